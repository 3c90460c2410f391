"""Encoded rows that are mostly zeros: they store only values that may be nonzero.

A one-hot encoding of 20,000 categories has one such value per row. Every row of a table
stores equally many, so that rows are rows of two plain arrays, which slices, memory
maps and threads share without a copy; scipy has the products.

Notation
    n   rows of the shard, or of a block of its rows
    d   width of the encoding
    k   values that are stored of each row
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, TypeAlias

import numpy as np

from tp_flower.arrays import AnyArray, FloatArray, IndexArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    # training needs nothing else of the modules that encode tables
    from tp_flower.features.columns import CodeArray, Float32Array, Rows

LEAST_WIDTH: Final = 256
LEAST_SAVING: Final = 4
"""A table is stored sparsely if it has more columns than the first, and as many values
per stored one as the second: a stored value takes the memory of two, and up to twice
the time."""


def is_sparse(width: int, stored: int) -> bool:
    """Return whether d columns, of which k are stored, are stored sparsely.

    >>> is_sparse(20_000, 3), is_sparse(20, 1), is_sparse(512, 400)
    (True, False, False)
    """
    return width > LEAST_WIDTH and width >= LEAST_SAVING * stored


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Encoded rows (n, d), of which k values each are stored.

    Attributes:
        values: float32 (n, k); a row that needs fewer values is filled up with zeros.
        columns: int32 (n, k), from 0 to d - 1; no two values other than 0 of a row
            share one.
        width: d.
    """

    values: "Float32Array"
    columns: "CodeArray"
    width: int

    @classmethod
    def empty(cls, rows: int, stored: int, width: int) -> Self:
        """Return rows to be written."""
        shape = rows, stored
        return cls(np.zeros(shape, np.float32), np.zeros(shape, np.int32), width)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns that are encoded, (n, d)."""
        return len(self.values), self.width

    @property
    def stored(self) -> int:
        """Values that are stored of each row, k."""
        return int(self.values.shape[1])

    @property
    def nbytes(self) -> int:
        """Memory that the rows take."""
        return int(self.values.nbytes + self.columns.nbytes)

    def __getitem__(self, rows: "Rows") -> "SparseRows":
        """Return some of the rows; a slice shares their memory."""
        return SparseRows(self.values[rows], self.columns[rows], self.width)

    def take(self, rows: IndexArray) -> "SparseRows":
        """Return rows (m,) by their numbers."""
        values = self.values.take(rows, axis=0)
        columns = self.columns.take(rows, axis=0)
        return SparseRows(values, columns, self.width)

    def matrix(self, weights: FloatArray | None = None) -> "csr_array":
        """Return the rows as scipy's float64 matrix (n, d), times weights (n,) if any.

        >>> SparseRows(np.float32([[5, 0]]), np.int32([[2, 0]]), 3).matrix().toarray()
        array([[0., 0., 5.]])
        """
        # scipy takes longer to import than numpy; most tables are not sparse
        from scipy.sparse import csr_array

        starts = np.arange(len(self) + 1) * self.stored
        values = np.asarray(self.values, np.float64)
        if weights is not None:
            values = values * weights[:, None]
        return csr_array(
            (values.ravel(), np.asarray(self.columns).ravel(), starts), self.shape
        )

    def dense(self) -> "Float32Array":
        """Return the rows with all values, float32 (n, d): for blocks of few rows."""
        out: Float32Array = self.matrix().toarray().astype(np.float32)
        return out

    def square_lengths(self) -> FloatArray:
        """Return the sum of squares of each row, (n,)."""
        values = np.asarray(self.values, np.float64)
        lengths: FloatArray = np.einsum("ij,ij->i", values, values)
        return lengths

    def square_sums(self, weights: AnyArray) -> FloatArray:
        """Return each column's sum of squares, (d,), with weights (n,) of rows."""
        return np.asarray(self.matrix().power(2).T @ weights, np.float64)

    def of_columns(self, columns: IndexArray) -> "SparseRows":
        """Return the rows (n, m) with some of the columns alone, (m,)."""
        position_of = np.full(self.width, -1, np.int32)
        position_of[columns] = np.arange(len(columns))
        positions = position_of[self.columns]
        values = np.where(positions < 0, np.float32(0), self.values)
        return SparseRows(values, np.maximum(positions, 0), len(columns))


EncodedRows: TypeAlias = "Float32Array | SparseRows"
"""Rows as an encoder writes them, (n, d)."""


def dense(rows: EncodedRows) -> "Float32Array":
    """Return rows with all values, float32 (n, d); dense ones are not copied."""
    return rows.dense() if isinstance(rows, SparseRows) else rows


def columns_of(rows: EncodedRows, columns: IndexArray) -> EncodedRows:
    """Return rows (n, m) with some of their columns alone, (m,)."""
    if isinstance(rows, SparseRows):
        return rows.of_columns(columns)
    return rows[:, columns]


def append_column(rows: EncodedRows, column: "Float32Array") -> EncodedRows:
    """Return rows (n, d + 1) with one more column, (n,)."""
    if not isinstance(rows, SparseRows):
        return np.concatenate([rows, column[:, None]], axis=1)
    places = np.full((len(rows), 1), rows.width, np.int32)
    return SparseRows(
        np.concatenate([rows.values, column[:, None]], axis=1),
        np.concatenate([rows.columns, places], axis=1),
        rows.width + 1,
    )
