"""Stretches of time, of which the information about hazards is added up.

The information of the partial likelihood is a sum over the deaths, of the features'
covariance among the rows that are at risk then, each by its chance p to be the one:

    I = sum_k w'_k [ sum_i p_ki x_i x_i' - m_k m_k' ],    m_k = sum_i p_ki x_i

The means m_k are no second moments of rows; two that follow each other differ by the
rows that have left in between, and would tell these. So means are taken over stretches
of event times s, in which many rows leave: with b_s = sum_i B_si x_i and n_s the deaths
of the stretch,

    B_si = sum_{k in s} w'_k p_ki        R_i = sum_k w'_k p_ki^2 - sum_s B_si^2 / n_s
    I ~ sum_i (sum_s B_si - R_i) x_i x_i' - sum_s b_s b_s' / n_s + r r' / sum_i R_i

with r = sum_i R_i x_i. What is left out is the spread of m_k around its stretch's mean,
a quadratic form of the rows whose diagonal is R and whose rows add up to 0: it is taken
to be that of rows which leave in an order that their features do not decide. Columns
that add up to 1 have no information, as in I.

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
