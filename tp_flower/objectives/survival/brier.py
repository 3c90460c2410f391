"""The Brier score of survival: how far its predicted probabilities are from what came.

At a time t a row's event has happened (0) or has not (1), where the model says S(t|h).
The mean square of the difference is over rows of which it is known; these stand for the
others by the inverse of their probability G of not being censored,

    BS(t) = 1/W sum_j w_j [ S(t|h_j)^2 / G(T_j-)    of rows with an event up to t
                          + (1 - S(t|h_j))^2 / G(t-) of rows without one until then ]

with Kaplan and Meier's G of the same rows, those of all strata together. Of one time
events come before censorings: a row that is censored at t has had no event up to t, and
the rows' weights add up to W at all times. Integrated it is the mean over time,

    IBS = 1/tau integral_0^tau BS(t) dt

by the trapezoidal rule over times of events. Without censoring BS is the mean square
of the survival curves' errors. A model that says 1/2 always has 0.25.

Source: Graf et al. 1999, "Assessment and comparison of prognostic classification
schemes for survival data"; ties as R's ``rttright``, and G of the rows that are judged,
as R's ``pec``.

Notation:
    N  rows      T, w, W  their times, weights, and the sum of these      K  times
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from tp_flower.arrays import FloatArray
from tp_flower.objectives.survival.baseline import Baseline, StratumBaselines
from tp_flower.objectives.survival.concordance import Survival

MOST_TIMES: Final = 100
"""Times at which the integrated score is worked out, at equal shares of the events."""


@dataclass(frozen=True, eq=False)
class Censoring:
    """The probability G of not being censored, by Kaplan and Meier.

    Attributes:
        times: of rows, which rise, (M,).
        remaining: G after each of them, (M,).
    """

    times: FloatArray
    remaining: FloatArray

    @classmethod
    def of(cls, survival: Survival, weights: FloatArray) -> Self:
        """Return that of some rows, all of which are at risk from the beginning.

        >>> seen = Survival(np.array([1.0, 2.0, 2.0]), np.array([False, True, False]))
        >>> Censoring.of(seen, np.ones(3)).remaining.round(2).tolist()
        [0.67, 0.0]
        """
        times, time_index = np.unique(survival.time, return_inverse=True)
        censored = np.bincount(time_index, weights * ~survival.is_event, len(times))
        leaving = np.bincount(time_index, weights, len(times))
        later = np.append(np.cumsum(leaving[::-1])[-2::-1], 0.0)
        share = np.divide(
            later, later + censored, out=np.ones(len(times)), where=censored > 0.0
        )
        return cls(times, np.cumprod(share))

    def before(self, times: FloatArray) -> FloatArray:
        """Return G before each of some times (m,), (m,)."""
        steps = np.append(1.0, self.remaining)
        before: FloatArray = steps[np.searchsorted(self.times, times)]
        return before


def brier_scores(
    scores: FloatArray,
    survival: Survival,
    baseline: Baseline | StratumBaselines,
    times: FloatArray,
    weights: FloatArray | None = None,
) -> FloatArray:
    """Return BS at some times (K,), of log hazard ratios (N,), (K,).

    In O(N K) time and O(N) memory.
    """
    mass = np.ones(len(scores)) if weights is None else weights
    censoring = Censoring.of(survival, mass)
    # of one time, events come first
    order = np.lexsort((~survival.is_event, survival.time))
    ordered = survival.time[order], survival.is_event[order]
    scores, mass, baseline = scores[order], mass[order], baseline.of_rows(order)
    # G is above 0 before the time of any row, which is not censored until then
    of_events = np.where(ordered[1], mass / censoring.before(ordered[0]), 0.0)
    remaining = censoring.before(times)
    # how many rows are before, and how many of these at a time have an event
    gone = np.searchsorted(ordered[0], times)
    later = np.searchsorted(ordered[0], times, side="right")
    events = np.append(0, np.cumsum(ordered[1]))
    gone += events[later] - events[gone]
    squares = np.zeros(len(times))
    for number, (time, dead) in enumerate(zip(times, gone, strict=True)):
        alive = baseline.survival(scores, time)
        squares[number] = of_events[:dead] @ alive[:dead] ** 2
        if dead < len(mass):
            left = mass[dead:] @ (1.0 - alive[dead:]) ** 2
            squares[number] += left / remaining[number]
    mean_squares: FloatArray = squares / mass.sum()
    return mean_squares


def integrated_brier(
    scores: FloatArray,
    survival: Survival,
    baseline: Baseline | StratumBaselines,
    weights: FloatArray | None = None,
) -> float:
    """Return IBS of log hazard ratios (N,); NaN of rows without an event.

    The last time is that of the last event among the rows, or in training if that is
    earlier, of strata in the first whose events end: the baseline ends there.

    >>> died = Survival(np.array([1.0, 2.0]), np.ones(2, bool))
    >>> nobody_dies = Baseline((2.0,), (0.0,))
    >>> integrated_brier(np.zeros(2), died, nobody_dies)
    0.5
    """
    times = event_grid(survival, baseline.last)
    if not len(times):
        return float("nan")
    values = brier_scores(scores, survival, baseline, times, weights)
    widths = np.diff(times)
    return float(widths @ (values[1:] + values[:-1]) / 2.0 / times[-1])


def event_grid(survival: Survival, last: float) -> FloatArray:
    """Return 0 and times of events up to a last one, some of many; none without any."""
    events = np.sort(survival.time[survival.is_event & (survival.time > 0.0)])
    if not len(events) or last <= 0.0:
        return np.zeros(0)
    within = np.append(events[events < last], min(last, events[-1]))
    places = np.linspace(0, len(within) - 1, min(MOST_TIMES, len(within)))
    chosen: FloatArray = np.unique(np.append(0.0, within[np.rint(places).astype(int)]))
    return chosen
