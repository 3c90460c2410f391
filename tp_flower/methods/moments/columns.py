"""The columns of a table's rows, made block by block.

A row's columns are its encoded features and, at the label's table, those of the label
and a 1. As words they take 8 bytes each, more than the encoded features do: so they are
made of few rows at a time.

Notation:
    n  rows        d  columns
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from tp_flower.arrays import FloatArray, IntArray, blocks
from tp_flower.features.sparse import EncodedRows, dense
from tp_flower.methods.moments.words import WordArray, to_words

_BLOCK_ROWS: Final = 1 << 12


@dataclass(frozen=True, eq=False)
class TableColumns:
    """The columns of a table's rows, (n, d).

    Attributes:
        features: encoded.
        clip: makes the encoded rows (m, d) of any block those that are added up.
        labels: (n, k), of the label's table.
    """

    features: EncodedRows
    clip: Callable[[FloatArray], FloatArray] | None = None
    labels: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, rows: IntArray | slice) -> FloatArray:
        """Return the columns of some rows, (m, d)."""
        columns: FloatArray = dense(self.features[rows]).astype(np.float64)
        if self.clip is not None:
            columns = self.clip(columns)
        if self.labels is None:
            return columns
        labels = self.labels[rows]
        return np.concatenate([columns, labels, np.ones((len(labels), 1))], axis=1)

    @property
    def width(self) -> int:
        """The number of columns, d."""
        return int(self[:0].shape[1])

    def second_moments(self, counts: IntArray | FloatArray) -> FloatArray:
        """Return the sums of the squares of rows that count so often (n,), (d,)."""
        total = np.zeros(self.width)
        for block in blocks(len(self), _BLOCK_ROWS):
            total += counts[block] @ self[block] ** 2
        return total

    def odd_rows(self, rows: IntArray) -> IntArray:
        """Return in how many of some rows each column differs from nearly all, (d,).

        Those in which it is not 0; or those of the rarer value, if it has two values.
        """
        first = self[rows[:1]] if len(rows) else np.zeros((1, self.width))
        second = np.full(self.width, np.nan)
        of_first, of_second, nonzero = np.zeros((3, self.width), np.int64)
        for span in blocks(len(rows), _BLOCK_ROWS):
            block = self[rows[span]]
            differs = block != first
            found = block[differs.argmax(axis=0), np.arange(self.width)]
            is_new = np.isnan(second) & differs.any(axis=0)
            second[is_new] = found[is_new]
            of_first += np.count_nonzero(~differs, axis=0)
            of_second += np.count_nonzero(block == second, axis=0)
            nonzero += np.count_nonzero(block, axis=0)
        rarer = np.minimum(of_first, of_second)
        has_two = of_first + of_second == len(rows)
        odd: IntArray = np.where(
            has_two & (rarer > 0), np.minimum(rarer, nonzero), nonzero
        )
        return odd


@dataclass(frozen=True, eq=False)
class ColumnWords:
    """The columns of a table's rows as words, with bits (d,) after the point."""

    columns: TableColumns
    bits: IntArray

    def __getitem__(self, rows: IntArray) -> WordArray:
        """Return the words of some rows, (m, d)."""
        return to_words(self.columns[rows], self.bits)


def most_told_rows(weightings: int, columns: int) -> int:
    """Return how many rows sums of products may tell, of whoever knows the weights.

    In m weightings the blocks of some tables, of D_T columns and a column of ones, are
    m D_T (D_T + 3) / 2 sums of the sum_t n_t d_t numbers in their rows. Where each
    table has more rows than m (D_T + 3) / 2 they leave some open, whichever the tables.
    The ``columns`` are those of all, and the one of ones.

    >>> most_told_rows(weightings=6, columns=5)
    21
    """
    return weightings * (columns + 2) // 2
