"""Stretches of time, of which the information about hazards is added up.

The information of the partial likelihood is a sum over the deaths, of the features'
covariance among the rows that are at risk then, each by its chance p to be the one:

    I = sum_k w'_k [ sum_i p_ki x_i x_i' - m_k m_k' ],    m_k = sum_i p_ki x_i

The means m_k are no second moments of rows; two that follow each other differ by the
rows that have left in between, and would tell these. So means are taken over stretches
of event times, in which many rows leave. How the means of a stretch differ is a sum
over pairs of its rows (:mod:`tp_flower.objectives.survival.levels`).

Notation:
    N  rows      K  event times      S  stretches
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from tp_flower.arrays import IntArray
from tp_flower.objectives.survival.risk_sets import RiskSets, Spans

LEAST_ROWS: Final = 50
"""That leave in a stretch, and are at risk at its start: as many as an owner's policy
asks for that does not say."""
SHARE: Final = 16
"""Of the rows at risk one in so many leaves, at least: the number of stretches grows
with the logarithm of the rows."""


@dataclass(frozen=True, eq=False)
class Stretches:
    """Event times in stretches, each within a stratum.

    Attributes:
        of_time: the stretch of each event time, (K,).
        fewest: rows that are at risk within a stretch, of any.
    """

    of_time: IntArray
    fewest: int

    def __len__(self) -> int:
        return int(self.of_time.max(initial=-1)) + 1

    @classmethod
    def of(cls, sets: RiskSets) -> "Stretches":
        """Return the stretches of some risk sets."""
        spans = sets.spans
        entered, left = _counts(spans.first, spans), _counts(spans.last, spans)
        edges = np.flatnonzero(np.diff(sets.strata, prepend=-1, append=-1)).tolist()
        starts: list[int] = []
        for start, stop in pairwise(edges):
            time = start
            while time < stop:
                starts.append(time)
                leaving = (entered[time] - left[time]) // SHARE
                enough = left[time] + max(LEAST_ROWS, leaving)
                time = min(int(np.searchsorted(left, enough)), stop)
                if time < stop and entered[time] - left[time] < LEAST_ROWS:
                    time = stop
        sizes = np.diff([*starts, spans.times])
        last = np.cumsum(sizes) - 1
        of_time = np.repeat(np.arange(len(starts)), sizes)
        return cls(of_time, int((entered[last] - left[starts]).min()))


def _counts(ends: IntArray, spans: Spans) -> IntArray:
    """Return how many rows at risk have an end at an event time or before, (K + 1,)."""
    counts: IntArray = np.cumsum(
        np.bincount(ends[spans.is_any], minlength=spans.times + 1)
    )
    return counts
