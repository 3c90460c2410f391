"""Risk sets: who is observed, and has had no event yet, when somebody has one.

Events at the same time, in the same stratum, are one *event time*. A row is at risk at
those of its stratum that are after its entry and up to its own time: an interval of
event times, which are numbered stratum by stratum. Sums over the rows at risk, and over
the event times of a row, are of exponentials; their logarithms are added up, so that
no score is too large or too small, and nothing is ever subtracted from a sum: its
digits would be lost where few rows of low risk are left.

Notation:
    N  rows      K  event times      E  rows with an event, the deaths
    [first, last)  the event times at which a row is at risk, (N,) each
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Self

import numpy as np

from tp_flower.arrays import BoolArray, FloatArray, IntArray

NO_SUM: Final = -np.inf
"""The logarithm of an empty sum."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Some rows of N in groups, to be added up.

    Attributes:
        rows: (R,), those of a group next to each other.
        starts: where each group starts in them, (G,).
        numbers: of the groups, (G,), which rise.
    """

    rows: IntArray
    starts: IntArray
    numbers: IntArray

    @classmethod
    def by(cls, numbers: IntArray, rows: IntArray) -> Self:
        """Return the groups of rows (R,) whose numbers are given, (R,)."""
        order = np.argsort(numbers, kind="stable")
        values, starts = np.unique(numbers[order], return_index=True)
        return cls(rows[order], starts, values)

    def log_sums(self, logs: FloatArray, count: int) -> FloatArray:
        """Return the log of the sum of exp of logs (N,), by number below a count.

        >>> groups = Groups.by(np.array([1, 0, 1]), np.arange(3))
        >>> np.exp(groups.log_sums(np.log([2.0, 3.0, 5.0]), 3)).round(12).tolist()
        [3.0, 7.0, 0.0]
        """
        sums = np.full(count, NO_SUM)
        if not len(self.rows):
            return sums
        values = logs[self.rows]
        largest = np.maximum.reduceat(values, self.starts)
        sizes = np.diff(self.starts, append=len(values))
        shares = np.exp(values - np.repeat(largest, sizes))
        sums[self.numbers] = largest + np.log(np.add.reduceat(shares, self.starts))
        return sums


@dataclass(frozen=True, eq=False)
class Spans(ABC):
    """Intervals [first, last) of K event times, one for each of N rows."""

    first: IntArray
    last: IntArray
    times: int

    @abstractmethod
    def at_risk(self, logs: FloatArray) -> FloatArray:
        """Return by event time the log of the sum over the rows at risk, (K,)."""

    @abstractmethod
    def over_times(self, logs: FloatArray) -> FloatArray:
        """Return by row the log of the sum over its event times, of logs (K,), (N,)."""

    @cached_property
    def is_any(self) -> BoolArray:
        """Whether a row is at risk at any event time, (N,)."""
        return self.first < self.last

    def _groups(self, numbers: IntArray, rows: BoolArray) -> Groups:
        return Groups.by(numbers[rows], np.flatnonzero(rows))


@dataclass(frozen=True, eq=False)
class Prefixes(Spans):
    """Intervals that begin where their stratum does: one scan of each stratum.

    Attributes:
        strata: where the strata begin in the event times, then K.
    """

    strata: IntArray

    @cached_property
    def _by_last(self) -> Groups:
        return self._groups(self.last - 1, self.is_any)

    def at_risk(self, logs: FloatArray) -> FloatArray:
        """Return the sums of all rows that last as long, from the longest on."""
        sums = self._by_last.log_sums(logs, self.times)
        for start, stop in pairwise(self.strata.tolist()):
            backwards = sums[start:stop][::-1]
            np.logaddexp.accumulate(backwards, out=backwards)
        return sums

    def over_times(self, logs: FloatArray) -> FloatArray:
        """Return the sums from the stratum's first event time on."""
        sums = np.append(logs, NO_SUM)
        for start, stop in pairwise(self.strata.tolist()):
            np.logaddexp.accumulate(logs[start:stop], out=sums[start:stop])
        return sums[np.where(self.is_any, self.last - 1, self.times)]


class Intervals(Spans):
    """Any intervals, each the end of a block of event times and the start of the next.

    At level j the blocks have 2^(j-1) event times. An interval is of the level at which
    its two ends are in blocks next to each other, whose numbers differ in the last bit
    alone; at level 0 it is one event time (a "disjoint sparse table"). So two scans of
    a level make the sums of all its intervals.
    """

    @cached_property
    def _levels(self) -> list[tuple[int, Groups, Groups]]:
        """The levels with intervals, and their rows by first and by last event time."""
        last = self.last - 1
        # frexp's exponent is the number of bits
        level = np.frexp((self.first ^ last).astype(np.float64))[1]
        levels = []
        for number in np.unique(level[self.is_any]).tolist():
            rows = self.is_any & (level == number)
            groups = self._groups(self.first, rows), self._groups(last, rows)
            levels.append((number, *groups))
        return levels

    def at_risk(self, logs: FloatArray) -> FloatArray:
        """Return the sums over the intervals around each event time."""
        total = np.full(self.times, NO_SUM)
        for level, by_first, by_last in self._levels:
            sums = by_first.log_sums(logs, self.times)
            if level:
                ends = by_last.log_sums(logs, self.times)
                sums = np.logaddexp(
                    _scan(sums, level), _scan(ends, level, is_backwards=True)
                )
            total = np.logaddexp(total, sums)
        return total

    def over_times(self, logs: FloatArray) -> FloatArray:
        """Return the sums over each interval."""
        sums = np.full(len(self.first), NO_SUM)
        for level, by_first, _ in self._levels:
            rows = by_first.rows
            if not level:
                sums[rows] = logs[self.first[rows]]
                continue
            ends = _scan(logs, level, is_backwards=True)[self.first[rows]]
            sums[rows] = np.logaddexp(ends, _scan(logs, level)[self.last[rows] - 1])
        return sums


def _scan(logs: FloatArray, level: int, *, is_backwards: bool = False) -> FloatArray:
    """Return the log of the running sums (K,) within each block of a level."""
    size = 1 << (level - 1)
    padded = np.full(-(-len(logs) // size) * size, NO_SUM)
    padded[: len(logs)] = logs
    grid = padded.reshape(-1, size)
    if is_backwards:
        grid = grid[:, ::-1]
    np.logaddexp.accumulate(grid, axis=1, out=grid)
    return padded[: len(logs)]


@dataclass(frozen=True, eq=False)
class RiskSets:
    """The event times of N rows, and the rows at risk and with an event at each.

    Attributes:
        deaths: the rows with an event, by event time, (E,).
        time_of: the event time of each of them, (E,).
        counts: how many there are at each event time, d, (K,).
        times: when it is, (K,); it rises within a stratum.
        strata: the stratum of each event time, (K,).
        spans: the rows' intervals of event times.
    """

    deaths: IntArray
    time_of: IntArray
    counts: IntArray
    times: FloatArray
    strata: IntArray
    spans: Spans

    @classmethod
    def of(
        cls,
        time: FloatArray,
        is_event: BoolArray,
        entry: FloatArray | None = None,
        stratum: IntArray | None = None,
    ) -> Self:
        """Return the risk sets of rows (N,); strata are numbers from 0.

        >>> sets = RiskSets.of(np.array([3.0, 1.0, 3.0]), np.array([True, True, False]))
        >>> sets.times.tolist(), sets.spans.last.tolist()
        ([1.0, 3.0], [2, 1, 2])
        """
        codes = np.zeros(len(time), np.int64) if stratum is None else stratum
        distinct = np.unique(time[is_event])

        def position(at: FloatArray) -> IntArray:
            """Return where a time is in its row's stratum, after an event then."""
            ranks = np.searchsorted(distinct, at, side="right")
            return codes * (len(distinct) + 1) + ranks

        ends = position(time)
        events = np.flatnonzero(is_event)
        deaths = events[np.argsort(ends[events], kind="stable")]
        event_times, time_of, counts = np.unique(
            ends[deaths], return_inverse=True, return_counts=True
        )
        strata, ranks = np.divmod(event_times, len(distinct) + 1)
        last = np.searchsorted(event_times, ends, side="right")
        begins = codes * (len(distinct) + 1) if entry is None else position(entry)
        first = np.searchsorted(event_times, begins, side="right")
        count = len(event_times)
        spans: Spans
        if entry is None:
            edges = np.flatnonzero(np.diff(strata, prepend=-1, append=-1))
            spans = Prefixes(first, last, count, edges)
        else:
            spans = Intervals(first, last, count)
        return cls(deaths, time_of, counts, distinct[ranks - 1], strata, spans)

    @cached_property
    def ranks(self) -> FloatArray:
        """L / d of the deaths at one time, in any order: 0 of the first one, (E,)."""
        starts = np.cumsum(self.counts) - self.counts
        position = np.arange(len(self.deaths)) - starts[self.time_of]
        shares: FloatArray = position / self.counts[self.time_of]
        return shares

    def log_sums_of_deaths(self, logs: FloatArray) -> FloatArray:
        """Return by event time the log of the sum over its deaths, of (N,), (K,)."""
        return self._deaths.log_sums(logs, len(self.times))

    def sums_of_deaths(self, values: FloatArray) -> FloatArray:
        """Return by event time the sum over its deaths, of values (E,), (K,)."""
        sums: FloatArray = np.bincount(
            self.time_of, values, minlength=len(self.times)
        ).astype(np.float64)
        return sums

    @cached_property
    def _deaths(self) -> Groups:
        return Groups.by(self.time_of, self.deaths)
