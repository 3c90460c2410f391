"""The spread of the means of the rows at risk within stretches of time, exactly.

With e_i the relative hazard of a row, and u_ki whether it is at risk at event time k,
the information of a partial likelihood is less than the rows' second moments by

    sum_k C_k y_k y_k',    y_k = sum_i e_i u_ki x_i

Let a clock advance by C_k at event time k. A row that leaves at a on the clock, and has
entered at b, has e_i x_i in y from b to a, so that the sum is one over pairs of rows,
whose kernel is the covariance of Brownian motions that stop at a and b. Levy's halves
of time give it as a sum of squares (Levy's construction: Moerters and Peres 2010,
"Brownian Motion", section 1.1): of a stretch [l, r) in which the clock advances by T,

    sum_k in s C_k y_k y_k' = y_s y_s' / T_s + sum_g y_g y_g'

    y_s = sum_i e_i (a_i - b_i) x_i           clipped to the stretch
    y_g = sum_i e_i (H_g(a_i) - H_g(b_i)) x_i

where g are the halves, their halves and so on, as long as they have two event times. A
hat H_g rises evenly from the start of g to its middle, where it is
sqrt((m - l) (r - m) / (r - l)), and falls to its end: only rows that enter or leave
within g are in its sum. So y_g are sums over clusters of rows, a row in a few, whose
squares alone are added up (:mod:`tp_flower.methods.moments.clusters`).

*Ties* (Efron): of the l-th of d deaths D at a time the others count 1 - l/d. With c_l
that death's C and f = l/d, their sum over l is

    C (y - q y_D) (y - q y_D)' + (sum c f^2 - C q^2) y_D y_D',    q = sum c f / C

so that a row which dies leaves at a - q C, and the deaths of a time are a cluster.

Notation:
    N  rows      K  event times      a  ``leaves``, b  ``enters``      S  stretches
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tp_flower.arrays import BoolArray, FloatArray, IntArray
from tp_flower.objectives.objective import RowClusters
from tp_flower.objectives.survival.risk_sets import RiskSets


class Halves(NamedTuple):
    """The parts of stretches that are divided at one level, of each event time, (K,).

    Attributes:
        start: the first event time of its part.
        middle: the first one of the part's second half.
        stop: behind the last one.
        is_divided: whether the part has two event times or more.
    """

    start: IntArray
    middle: IntArray
    stop: IntArray
    is_divided: BoolArray


def halves(of_time: IntArray) -> Iterator[Halves]:
    """Yield the halves of stretches (K,), level by level.

    >>> [level.middle.tolist() for level in halves(np.array([0, 0, 0, 1]))]
    [[1, 1, 1, 3], [0, 2, 2, 3]]
    """
    times = np.arange(len(of_time))
    edges = np.flatnonzero(np.diff(of_time, prepend=-1, append=-1))
    start = edges[np.searchsorted(edges, times, side="right") - 1]
    stop = edges[np.searchsorted(edges, times, side="right")]
    while (is_divided := stop - start > 1).any():
        middle = (start + stop) // 2
        yield Halves(start, middle, stop, is_divided)
        is_second = times >= middle
        start = np.where(is_second, middle, start)
        stop = np.where(is_second, stop, np.maximum(middle, start + 1))


class Steps(NamedTuple):
    """By how much the clock advances at each event time, with Efron's ties, (K,).

    Attributes:
        logs: log C.
        early: q.
        ties: log (sum c f^2 - C q^2); -inf without ties.
    """

    logs: FloatArray
    early: FloatArray
    ties: FloatArray


@dataclass(frozen=True, eq=False)
class Clock:
    """When rows enter and leave, by a clock that advances at event times.

    Attributes:
        sets: the risk sets.
        steps: of the clock.
        of_time: the stretch of each event time, (K,).
        log_rates: log e, (N,).
    """

    sets: RiskSets
    steps: Steps
    of_time: IntArray
    log_rates: FloatArray

    @cached_property
    def first(self) -> IntArray:
        """The first event time of each stretch, (S,)."""
        return np.flatnonzero(np.diff(self.of_time, prepend=-1))

    @cached_property
    def scale(self) -> FloatArray:
        """The log of a stretch's largest step, the unit of the clock in it, (S,)."""
        largest: FloatArray = np.maximum.reduceat(self.steps.logs, self.first)
        return largest

    @cached_property
    def _sizes(self) -> FloatArray:
        """The steps of the clock, (K,)."""
        sizes: FloatArray = np.exp(self.steps.logs - self.scale[self.of_time])
        return sizes

    @cached_property
    def edges(self) -> FloatArray:
        """The clock before each event time, and after the last, (K + 1,)."""
        return np.append(0.0, np.cumsum(self._sizes))

    @cached_property
    def leaves(self) -> FloatArray:
        """When rows leave, by the clock, (N,)."""
        leaves = self.edges[self.sets.spans.last]
        early = self.steps.early * self._sizes
        leaves[self.sets.deaths] -= early[self.sets.time_of]
        return leaves

    @cached_property
    def enters(self) -> FloatArray:
        """When rows enter, by the clock, (N,)."""
        return self.edges[self.sets.spans.first]

    def means(self, least: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return how much of rows' hazards is in each stretch (N, S), and scales (S,).

        Squares of sums of the first, times the second, are -y_s y_s' / T_s. With logs
        of the ``least`` hazards at risk within each stretch, (S,), none is more than
        the events that a row's hazard has had.
        """
        edges = self.edges[[*self.first.tolist(), len(self.of_time)]]
        leaves = np.clip(self.leaves[:, None], edges[:-1], edges[1:])
        enters = np.clip(self.enters[:, None], edges[:-1], edges[1:])
        spent = np.where(self.sets.spans.is_any[:, None], leaves - enters, 0.0)
        rates = np.exp(self.log_rates[:, None] + (least + self.scale))
        return rates * spent, -np.exp(-2.0 * least - self.scale) / np.diff(edges)

    def clusters(self) -> RowClusters:
        """Return the halves of stretches, and the deaths of a time, as clusters."""
        spans = self.sets.spans
        rows = np.flatnonzero(spans.is_any)
        ends = (
            (spans.last[rows] - 1, self.leaves[rows], 1.0),
            (spans.first[rows], self.enters[rows], -1.0),
        )
        members = []
        count = 0
        for level in halves(self.of_time):
            starts, numbers = np.unique(
                level.start[level.is_divided], return_inverse=True
            )
            of_times = np.zeros(len(self.of_time), np.int64)
            of_times[level.is_divided] = count + numbers
            count += len(starts)
            for times, clock, sign in ends:
                hats = sign * self._hats(level, times, clock)
                is_in = hats != 0.0
                chosen = rows[is_in]
                rates = self.log_rates[chosen]
                rates = rates + 0.5 * self.scale[self.of_time[times[is_in]]]
                slopes = np.exp(rates) * hats[is_in]
                members.append((chosen, of_times[times[is_in]], slopes))
        is_tied = np.isfinite(self.steps.ties[self.sets.time_of])
        deaths, times = self.sets.deaths[is_tied], self.sets.time_of[is_tied]
        tied, numbers = np.unique(times, return_inverse=True)
        slopes = np.exp(self.log_rates[deaths] + 0.5 * self.steps.ties[times])
        members.append((deaths, count + numbers, slopes))
        return RowClusters.together(members, count + len(tied))

    def _hats(self, level: Halves, times: IntArray, clock: FloatArray) -> FloatArray:
        """Return the hat of the part around each of some event times, at a clock's."""
        low, middle, high = (
            self.edges[each[times]] for each in (level.start, level.middle, level.stop)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            rise = (clock - low) / (middle - low)
            fall = (high - clock) / (high - middle)
            peak = np.sqrt((middle - low) * (high - middle) / (high - low))
            hats: FloatArray = peak * np.maximum(np.minimum(rise, fall), 0.0)
        return np.where(level.is_divided[times], hats, 0.0)
