"""The baseline: how the hazard of a score of 0 adds up over time, in each stratum.

    H0(t) = sum_{event times <= t} w' sum_l 1 / (sum_R w e^h - l/d sum_D w e^h)
    S(t | h) = exp(-H0(t) e^h)

which is R's ``basehaz`` and ``survfit`` of a ``coxph`` with Efron's ties; of times
without ties it is Breslow's (Breslow 1972; Therneau and Grambsch 2000, "Modeling
survival data", section 10.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from tp_flower.arrays import FloatArray, IndexArray

MOST_TIMES: Final = 3000
"""Event times that are kept, of all strata: each has as many, and two at least."""


@dataclass(frozen=True)
class Baseline:
    """The cumulative hazard of a score of 0 in a stratum: a step at each time.

    Attributes:
        times: when events were, which rise.
        hazards: of each time and all before it together.
        stratum: its number in the query; None where there are no strata.
        is_thinned: whether other times than these had events, too: between two of them
            the hazard rises evenly.

    >>> baseline = Baseline((1.0, 4.0), (0.5, 1.0))
    >>> baseline.survival(np.array([0.0]), 2.0).round(4).tolist()
    [0.6065]
    """

    times: tuple[float, ...]
    hazards: tuple[float, ...]
    stratum: float | None = None
    is_thinned: bool = False

    @property
    def last(self) -> float:
        """The last time that it is known of."""
        return self.times[-1]

    def of_rows(self, rows: IndexArray) -> Self:
        """Return the baseline of some rows, which is that of all."""
        del rows
        return self

    def hazard(self, time: float) -> float:
        """Return the cumulative hazard at a time."""
        if self.is_thinned:
            first = min(0.0, self.times[0])
            rises = np.interp(time, [first, *self.times], [0.0, *self.hazards])
            return float(rises)
        steps = np.append(0.0, self.hazards)
        return float(steps[np.searchsorted(self.times, time, side="right")])

    def survival(self, scores: FloatArray, time: float) -> FloatArray:
        """Return the probability of no event up to a time, by score (N,), (N,)."""
        return _survival(scores, self.hazard(time))

    def thinned(self, most: int, kept: Sequence[float] = ()) -> Self:
        """Return the baseline of so many times at most, beside those that are kept.

        They are those at which the hazard passes equal shares of the whole, the last
        time among them: in between it is off by one share at most.
        """
        if len(self.times) <= most:
            return self
        shares = np.linspace(0.0, self.hazards[-1], most + 1)[1:]
        places = np.append(
            np.searchsorted(self.hazards, shares), np.searchsorted(self.times, kept)
        )
        chosen = np.unique(np.minimum(places, len(self.times) - 1))
        times, hazards = (np.array(each)[chosen] for each in (self.times, self.hazards))
        return replace(
            self,
            times=tuple(times.tolist()),
            hazards=tuple(hazards.tolist()),
            is_thinned=True,
        )


@dataclass(frozen=True, eq=False)
class StratumBaselines:
    """The baselines of rows, each that of its stratum.

    Attributes:
        baselines: of the strata.
        places: of each row's among them, (N,).
    """

    baselines: Sequence[Baseline]
    places: IndexArray

    @property
    def last(self) -> float:
        """The last time that all are known of."""
        return min(baseline.last for baseline in self.baselines)

    def of_rows(self, rows: IndexArray) -> Self:
        """Return the baselines of some rows."""
        return replace(self, places=self.places[rows])

    def survival(self, scores: FloatArray, time: float) -> FloatArray:
        """Return the probability of no event up to a time, by score (N,), (N,)."""
        hazards = np.array([baseline.hazard(time) for baseline in self.baselines])
        return _survival(scores, hazards[self.places])


def _survival(scores: FloatArray, hazards: FloatArray | float) -> FloatArray:
    with np.errstate(over="ignore"):
        ratios = np.exp(scores)
    probability: FloatArray = np.exp(-hazards * ratios)
    return probability
