"""Harrell's C: how often, of two rows, the one of higher score has its event first.

    C = (concordant + tied / 2) / comparable

(Harrell et al. 1982, "Evaluating the yield of medical tests"). Two rows of a stratum
are comparable if one has an event while the other is at risk, and has none at the same
time: a row that is censored at the time of an event counts as later. Pairs count by the
product of their weights. It is the concordance of R's ``survival`` and of lifelines.

Notation:
    N  rows      Q  rows with an event, each compared with all rows after it
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from tp_flower.arrays import BoolArray, FloatArray, IntArray

NAN = float("nan")


@dataclass(frozen=True, eq=False)
class Survival:
    """When N rows have an event or are censored, as numbers that only order them.

    Attributes:
        time: (N,).
        is_event: (N,).
        entry: from when on a row is at risk, (N,); None where always.
        stratum: numbers from 0, (N,); None for one stratum.
    """

    time: FloatArray
    is_event: BoolArray
    entry: FloatArray | None = None
    stratum: IntArray | None = None


def concordance(
    scores: FloatArray, survival: Survival, weights: FloatArray | None = None
) -> float:
    """Return Harrell's C of scores (N,) that rise with the risk; NaN without a pair.

    In O(N log N), without a loop over rows.

    >>> died = Survival(np.array([1.0, 2.0, 3.0]), np.ones(3, bool))
    >>> concordance(np.array([5.0, 1.0, 1.0]), died)
    0.8333333333333334
    """
    comparison = _ComparedEvents.of(scores, survival, weights)
    # at one time events come first, and are not compared with each other
    order = 2 * np.unique(survival.time, return_inverse=True)[1] - survival.is_event
    sums = comparison.sums_after(order, order[comparison.events])
    if survival.entry is not None:
        # of these rows, some have not entered yet
        times = np.unique(np.append(survival.time, survival.entry))
        limits = np.searchsorted(times, survival.time[comparison.events]) - 1
        sums -= comparison.sums_after(np.searchsorted(times, survival.entry), limits)
    half, every = sums @ comparison.weights[comparison.events]
    return float(half / every) if every > 0.0 else NAN


@dataclass(frozen=True, eq=False)
class _ComparedEvents:
    """The rows with an event, each to be compared with rows after it.

    Attributes:
        events: these rows, (Q,).
        tied: which of them have the score of another row, as positions, (T,).
        stratum, ranks, weights: of all rows, (N,); ranks are those of the scores.
    """

    events: IntArray
    tied: IntArray
    stratum: IntArray
    ranks: IntArray
    weights: FloatArray

    @classmethod
    def of(
        cls, scores: FloatArray, survival: Survival, weights: FloatArray | None
    ) -> Self:
        """Return the comparison of scores (N,)."""
        _, ranks, rows_of_rank = np.unique(
            scores, return_inverse=True, return_counts=True
        )
        events = np.flatnonzero(survival.is_event)
        rows = len(scores)
        return cls(
            events,
            np.flatnonzero(rows_of_rank[ranks[events]] > 1),
            np.zeros(rows, np.int64) if survival.stratum is None else survival.stratum,
            ranks,
            np.ones(rows) if weights is None else weights,
        )

    def sums_after(self, place: IntArray, limits: IntArray) -> FloatArray:
        """Return the weights of rows of each event's stratum that are after a limit.

        Places are (N,), limits (Q,). Of each event there are two: the rows of a lower
        score, with half of those of the same score, and all, (2, Q).
        """
        span = int(max(place.max(initial=0), limits.max(initial=0))) + 2
        keys = self.stratum * span + place
        order = np.argsort(keys, kind="stable")
        begins = self.stratum[self.events] * span
        start = np.searchsorted(keys[order], begins + limits, side="right")
        # a place may be -1
        stop = np.searchsorted(keys[order], begins + span - 1, side="left")
        ranks = self.ranks[order]
        weights = self.weights[order]
        below = self.ranks[self.events]
        lower = rank_sums(ranks, weights, start, stop, below)
        up_to = rank_sums(
            ranks, weights, start[self.tied], stop[self.tied], below[self.tied] + 1
        )
        lower[self.tied] = (lower[self.tied] + up_to) / 2.0
        total = np.append(0.0, np.cumsum(weights))
        return np.stack([lower, total[stop] - total[start]])


def rank_sums(
    ranks: IntArray,
    weights: FloatArray,
    start: IntArray,
    stop: IntArray,
    below: IntArray,
) -> FloatArray:
    """Return the weight of the rows of [start, stop) whose rank is below another, (Q,).

    By a wavelet matrix (Claude and Navarro 2012, "The wavelet matrix"): rows are
    divided by the bits of their ranks (N,), the highest first, and queries follow.

    >>> ranks = np.array([2, 0, 1, 2])
    >>> query = [np.array([number]) for number in (1, 4, 2)]
    >>> rank_sums(ranks, np.ones(4), *query).tolist()
    [2.0]
    """
    total = np.zeros(len(below))
    bits = int(max(ranks.max(initial=0), below.max(initial=0))).bit_length()
    for bit in reversed(range(bits)):
        is_one = (ranks >> bit) & 1 == 1
        zeros = np.append(0, np.cumsum(~is_one))
        weight = np.append(0.0, np.cumsum(np.where(is_one, 0.0, weights)))
        goes_up = (below >> bit) & 1 == 1
        total += np.where(goes_up, weight[stop] - weight[start], 0.0)
        start, stop = (
            np.where(goes_up, zeros[-1] + edge - zeros[edge], zeros[edge])
            for edge in (start, stop)
        )
        order = np.concatenate([np.flatnonzero(~is_one), np.flatnonzero(is_one)])
        ranks = ranks[order]
        weights = weights[order]
    return total
