"""Matching: the rows of a table that join to the joined rows before it, by their keys.

Keys are numbered once. What a step of joining counts follows from how many rows of the
table have each key, and how many joined rows meet it; the joined rows themselves are
read and written in parts, so that nothing is as long as they are, but they.

Notation:
    N, N'  joined rows before a step, and after it
    n      rows of the new table
    K      keys of its rows and of those that it is joined to, numbered from 0
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import IndexArray, IntArray, blocks, empty
from tp_flower.joins.mapping import (
    NO_ROW,
    RowNumbers,
    index_type,
    number_type,
    take_rows,
)

NULL: Final = -1
PART_ROWS = 1 << 18
"""Joined rows that are matched at a time, and about as many that are written."""

Codes = npt.NDArray[np.int32]
"""The number of each row's key; NULL without one."""
Sides = Sequence[tuple[str, Codes, Codes]]
"""By predicate, the table before a step, the codes of its rows, and of the new one's.
Equal codes are equal keys."""


class KeyNumbering:
    """One number for the keys of several predicates together.

    Attributes:
        of_new: of the new table's rows, (n,).
        count: the numbers are below it.
    """

    def __init__(self, sides: Sides) -> None:
        (table, of_old, self.of_new), *others = sides
        self._first = table, _with_null(of_old)
        self.count = _count(of_old, self.of_new)
        self._pairings = []
        for side in others:
            pairing = _Pairing(self.of_new, *side)
            self._pairings.append(pairing)
            self.of_new, self.count = pairing.of_new, pairing.count

    def of(self, joined: Mapping[str, RowNumbers], part: slice) -> Codes:
        """Return the numbers of a part of the joined rows, (B,)."""
        table, codes = self._first
        numbers = take_rows(codes, joined[table][part])
        for pairing in self._pairings:
            numbers = pairing.of(numbers, joined, part)
        return numbers


class _Pairing:
    """The numbers of pairs, of a number so far and the code of a further predicate.

    All pairs that no row of the new table has are the last.
    """

    def __init__(
        self, numbers: Codes, table: str, of_old: Codes, of_new: Codes
    ) -> None:
        self._table = table
        self._of_old = _with_null(of_old)
        self._codes = _count(of_old, of_new)
        is_keyed = (numbers >= 0) & (of_new >= 0)
        pairs = self._pairs(numbers[is_keyed], of_new[is_keyed])
        distinct, places = np.unique(pairs, return_inverse=True)
        self.count = len(distinct) + 1
        # NULL stands beyond the last pair
        self._distinct = np.append(distinct, NULL)
        self.of_new = np.full(len(of_new), NULL, np.int32)
        self.of_new[is_keyed] = places

    def of(
        self, numbers: Codes, joined: Mapping[str, RowNumbers], part: slice
    ) -> Codes:
        """Return the pairs' numbers of a part of the joined rows, (B,)."""
        codes = take_rows(self._of_old, joined[self._table][part])
        pairs = self._pairs(numbers, codes)
        # neighbours are looked up one after the other
        order = np.argsort(pairs)
        places = np.empty(len(pairs), np.int32)
        places[order] = np.searchsorted(self._distinct[:-1], pairs[order])
        places[self._distinct[places] != pairs] = self.count - 1
        places[(numbers < 0) | (codes < 0)] = NULL
        return places

    def _pairs(self, numbers: Codes, codes: Codes) -> IntArray:
        return numbers.astype(np.int64) * self._codes + codes


def _count(of_old: Codes, of_new: Codes) -> int:
    """Return the number that all codes are below."""
    return int(max(of_old.max(initial=NULL), of_new.max(initial=NULL))) + 1


def _with_null(codes: Codes) -> Codes:
    """Return codes (n,) with a last one, of the row -1 that a LEFT JOIN lacks."""
    return np.append(codes, np.int32(NULL))


@dataclass(frozen=True)
class Match:
    """The rows of a new table that match the joined rows before it.

    Attributes:
        keys: the numbers of both sides' keys.
        joined: the rows of the tables before, by joined row, (N,).
        order: rows of the new table that have a key, sorted by key.
        sizes: how many rows each key has, (K + 1,); the last is that of NULL, 0.
        meets: how many joined rows meet each key, (K + 1,); the last is of NULL.
    """

    keys: KeyNumbering
    joined: Mapping[str, RowNumbers]
    order: RowNumbers
    sizes: IntArray
    meets: IntArray

    @property
    def rows(self) -> int:
        """The number of joined rows before, N."""
        return len(next(iter(self.joined.values())))

    @property
    def inner_rows(self) -> int:
        """The number of joined rows after an INNER JOIN."""
        return int((self.meets * self.sizes).sum())

    @cached_property
    def unmatched_before(self) -> int:
        """The number of joined rows that match no row of the table."""
        return int(self.meets[self.sizes == 0].sum())

    @property
    def keyless_before(self) -> int:
        """The number of joined rows without a key: one is NULL, or a row is lacking."""
        return int(self.meets[NULL])

    @property
    def unmatched_rows(self) -> int:
        """The number of the table's rows that match no joined row."""
        return len(self.keys.of_new) - int(self.sizes[self.meets > 0].sum())

    @property
    def key_rows(self) -> IntArray:
        """The number of rows of each key of the table."""
        return self.sizes[self.sizes > 0]

    @property
    def repeated_rows(self) -> int:
        """How many more rows there are than with one row of each key."""
        return int((self.meets * np.maximum(self.sizes - 1, 0)).sum())

    def fan_outs(self, *, is_outer: bool) -> tuple[int, float, int]:
        """Return the least, the median and the most rows that a joined row becomes."""
        if not self.rows:
            return 0, 0.0, 0
        fan_outs = np.maximum(self.sizes, 1) if is_outer else self.sizes
        is_met = self.meets > 0
        values, rows = fan_outs[is_met], self.meets[is_met]
        order = np.argsort(values)
        values, ends = values[order], np.cumsum(rows[order])
        middle = [(self.rows - 1) // 2, self.rows // 2]
        places = np.searchsorted(ends, middle, side="right")
        return int(values[0]), float(values[places].mean()), int(values[-1])

    def lost_rows(self, table: str, rows: int) -> tuple[int, int]:
        """Count the rows of a table before that are in no joined row after.

        And those of them that have no key. ``rows`` are all that it has.
        """
        if not self.unmatched_before:
            return 0, 0
        is_before, is_keyed, is_kept = np.zeros((3, rows), np.bool_)
        for part in blocks(self.rows, PART_ROWS):
            of_table = self.joined[table][part]
            numbers = self.keys.of(self.joined, part)
            is_before[of_table] = True
            is_keyed[of_table[numbers >= 0]] = True
            is_kept[of_table[self.sizes[numbers] > 0]] = True
        before, keyed, kept = map(np.count_nonzero, (is_before, is_keyed, is_kept))
        return int(before - kept), int(before - keyed)


def match_rows(sides: Sides, joined: Mapping[str, RowNumbers]) -> Match:
    """Return which rows of a new table match the joined rows, by all predicates.

    Args:
        sides: of the predicates, one at least.
        joined: rows of the tables before, by joined row, (N,).
    """
    keys = KeyNumbering(sides)
    is_keyed = keys.of_new >= 0
    keyed = np.flatnonzero(is_keyed)
    order = keyed[np.argsort(keys.of_new[keyed], kind="stable")]
    sizes = np.bincount(keys.of_new[keyed], minlength=keys.count + 1)
    meets = np.zeros(keys.count + 1, np.int64)
    rows = len(next(iter(joined.values())))
    for part in blocks(rows, PART_ROWS):
        np.add.at(meets, keys.of(joined, part), 1)
    compact = order.astype(number_type(len(keys.of_new)), copy=False)
    return Match(keys, joined, compact, sizes, meets)


def join_rows(
    match: Match, table: str, rows: int, *, is_outer: bool, is_mapped: bool = False
) -> dict[str, RowNumbers]:
    """Return the rows of all tables by joined row after a step, (N',) each.

    Joined rows keep their order; the rows of the new ``table`` that one becomes ascend.
    ``rows`` is N'. They are mapped from files where that is asked for.
    """
    order = match.order
    starts = np.cumsum(match.sizes) - match.sizes
    sizes = match.sizes
    if is_outer and match.unmatched_before:
        order = np.append(order, order.dtype.type(NO_ROW))
        starts = np.where(sizes == 0, len(order) - 1, starts)
        sizes = np.maximum(sizes, 1)
    size = index_type(rows)
    starts, sizes = starts.astype(size), sizes.astype(size)
    # without others, the joined rows before are those after
    are_same = rows == match.rows and bool((sizes[match.meets > 0] == 1).all())
    before = {} if are_same else match.joined
    after = {
        name: empty((rows,), of.dtype, is_mapped=is_mapped)
        for name, of in before.items()
    }
    new = empty((rows,), order.dtype, is_mapped=is_mapped)
    stop = 0
    for part, numbers in _parts(match, sizes):
        counts = sizes[numbers]
        start, stop = stop, stop + int(counts.sum())
        for name, of in before.items():
            after[name][start:stop] = np.repeat(of[part], counts)
        # the place in ``order`` increases by one within the rows of a joined row
        lag = starts[numbers] - (np.cumsum(counts) - counts).astype(size)
        places = np.repeat(lag, counts)
        places += np.arange(stop - start, dtype=size)
        new[start:stop] = order[places]
    return {**(match.joined if are_same else after), table: new}


def _parts(match: Match, sizes: IndexArray) -> Iterator[tuple[slice, Codes]]:
    """Yield parts of the joined rows with their keys, none of many rows to write."""
    for part in blocks(match.rows, PART_ROWS):
        numbers = match.keys.of(match.joined, part)
        ends = np.cumsum(sizes[numbers], dtype=np.int64)
        start = 0
        while start < len(numbers):
            written = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, written + PART_ROWS, side="right"))
            stop = max(stop, start + 1)
            span = slice(part.start + start, part.start + stop)
            yield span, numbers[start:stop]
            start = stop
