"""Pairs of a table's rows and regions of their joined rows, in place of the rows.

The rows of one table are divided into regions, by a number each. A joined row is in the
region of its row of that table, which another table's model may read beside its
features: then that table is the table of its distinct pairs (row, region), and whatever
holds of rows holds of pairs.

Notation:
    n  rows that take part    m  pairs    N  joined rows
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tp_flower.arrays import AnyArray, BoolArray, IntArray
from tp_flower.joins.mapping import NO_ROW, TableRows

MOST_REGIONS: Final = 32
"""Of a table's rows: a number of five bits tells in which one a row is."""
NO_REGION: Final = 255
"""The region of a joined row that lacks a row of the table with regions."""
_REGIONS: Final = NO_REGION + 1


@dataclass(frozen=True)
class TablePairs:
    """A table's pairs: in each shard those of training rows first.

    Attributes:
        rows: (m,), the row of each pair.
        regions: (m,) uint8.
        is_trained: (m,), whether it is in a joined row to train on.
        train: the pair behind each joined row to train on.
        test: the same of held-out joined rows; None without any.
    """

    rows: IntArray
    regions: AnyArray
    is_trained: BoolArray
    train: TableRows
    test: TableRows | None

    @property
    def is_tested(self) -> BoolArray:
        """Whether each pair is in a held-out joined row, (m,)."""
        if self.test is None:
            return np.zeros(len(self.rows), np.bool_)
        return self.test.is_joined

    def of_rows(self, rows: slice) -> IntArray:
        """Return the numbers of the pairs of some rows, ascending."""
        is_own = (self.rows >= rows.start) & (self.rows < rows.stop)
        numbers: IntArray = np.flatnonzero(is_own)
        return numbers

    def keys(self, keys: TableRows) -> TableRows:
        """Return the keys (n,) of the table's rows as those of its pairs, (m,)."""
        return TableRows(keys.row_of[self.rows], keys.rows)


def pair_rows(
    train: TableRows,
    test: TableRows | None,
    regions: tuple[AnyArray, AnyArray],
    ends: Sequence[int],
) -> TablePairs:
    """Return the pairs of a table's rows with regions of joined rows.

    Args:
        train: the row of each joined row to train on.
        test: the same of held-out joined rows; None without any.
        regions: of both, uint8 (N,) each; the second is not read without held-out rows.
        ends: where the rows of each shard end.
    """
    trained_keys = _keys(train, regions[0])
    tested_keys = trained_keys[:0] if test is None else _keys(test, regions[1])
    trained = np.unique(trained_keys[trained_keys >= 0])
    keys = np.union1d(trained, tested_keys[tested_keys >= 0])
    is_trained = np.isin(keys, trained, assume_unique=True)
    rows = keys // _REGIONS
    shards = np.searchsorted(np.asarray(ends), rows, side="right")
    order = np.lexsort((keys, ~is_trained, shards))
    number = np.empty(len(keys), np.int32)
    number[order] = np.arange(len(keys), dtype=np.int32)

    def numbered(joined_keys: IntArray) -> TableRows:
        position = np.searchsorted(keys, np.maximum(joined_keys, 0))
        pair_of = number.take(position, mode="clip") if len(keys) else position
        pair_of = np.where(joined_keys < 0, NO_ROW, pair_of).astype(np.int32)
        return TableRows(pair_of, len(keys))

    return TablePairs(
        rows=rows[order],
        regions=(keys[order] % _REGIONS).astype(np.uint8),
        is_trained=is_trained[order],
        train=numbered(trained_keys),
        test=None if test is None else numbered(tested_keys),
    )


def cells(first: AnyArray, second: AnyArray) -> TableRows:
    """Return the cell of two regions, (N,) each, that each joined row is in."""
    cell_of = first.astype(np.int32) * _REGIONS + second
    return TableRows(cell_of, _REGIONS * _REGIONS)


def _keys(rows: TableRows, regions: AnyArray) -> IntArray:
    """Return a number of row and region of each joined row, (N,), -1 without a row."""
    keys: IntArray = rows.row_of.astype(np.int64) * _REGIONS + regions
    return np.where(rows.is_absent, np.int64(NO_ROW), keys)
