"""Cells of few rows: what a table of counts does not show, and what would follow of it.

Hiding is for whoever reads the table. The server has made it, and has read the counts.

Notation:
    r  categories        c  groups
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from tp_flower.arrays import BoolArray, IntArray

FEWEST_HIDDEN: Final = 2
"""Of a line with a sum: one hidden entry would follow from the others."""


def hidden_cells(counts: IntArray, least: int) -> BoolArray:
    """Return which counts, and sums of them, are not shown, (r + 1, c + 1).

    The last row and column are sums. A count below ``least`` is hidden; and of every
    line that has hidden entries so many more, the smallest, that there are two, and
    that they add up to ``least``: else the sum and the others would tell (Cox 1980,
    "Suppression methodology and statistical disclosure control"). Several lines
    together may still bound a count.

    >>> hidden_cells(np.array([[30, 4], [40, 12], [50, 60]]), 10)[:-1, :-1]
    array([[ True,  True],
           [ True,  True],
           [False, False]])
    """
    table = with_sums(counts)
    hidden: BoolArray = table < least
    if least <= 1:
        return np.zeros_like(hidden)
    changed = True
    while changed:
        changed = False
        for line in _lines(counts.shape):
            if _is_told(table[line], hidden[line], least):
                visible = np.flatnonzero(~hidden[line])
                # a view: it changes the table
                hidden[line][visible[np.argmin(table[line][visible])]] = True
                changed = True
    return hidden


def hidden_sizes(sizes: IntArray, least: int) -> BoolArray:
    """Return which of some numbers with a known sum are not shown, (n,).

    >>> hidden_sizes(np.array([300, 4, 20]), 10)
    array([False,  True,  True])
    """
    return hidden_cells(sizes[:, None], least)[:-1, 0]


def with_sums(counts: IntArray) -> IntArray:
    """Return counts (r, c) with a row and a column of sums."""
    rows = np.concatenate([counts, counts.sum(axis=0, keepdims=True)])
    table: IntArray = np.concatenate([rows, rows.sum(axis=1, keepdims=True)], axis=1)
    return table


def _lines(shape: tuple[int, ...]) -> Iterator[tuple[int | slice, int | slice]]:
    """Yield the rows and the columns of a table with sums.

    A single group has no rows: each of its counts is its sum.
    """
    rows, columns = shape
    everything = slice(None)
    if columns > 1:
        yield from ((number, everything) for number in range(rows + 1))
    if rows > 1:
        yield from ((everything, number) for number in range(columns + 1))


def _is_told(line: IntArray, hidden: BoolArray, least: int) -> bool:
    """Return whether a line's sum and shown entries tell of few rows; the sum is last.

    Of a line whose sum is hidden, the sum counts as an entry.
    """
    if not hidden.any() or hidden.all():
        return False
    amount = int(np.count_nonzero(hidden))
    return amount < FEWEST_HIDDEN or int(line[hidden].sum()) < least
