"""Feature columns of a shard, as its extraction yields them.

Notation
    n   rows of the shard, or of a block of its rows
    d   elements of a vector
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tp_flower.errors import SchemaError

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
CodeArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
IndexArray = npt.NDArray[np.integer[Any]]
Rows = slice | IndexArray | BoolArray


@dataclass(frozen=True, eq=False)
class NumericColumn:
    """A feature with numbers: booleans are 0 and 1, times seconds since 1970 (UTC).

    Attributes:
        values: float64 (n,), NaN where missing.
    """

    values: FloatArray

    @property
    def rows(self) -> int:
        """Number of rows, n."""
        return len(self.values)

    @property
    def is_missing(self) -> BoolArray:
        """Which rows have no value, (n,)."""
        return np.isnan(self.values)

    def take(self, rows: Rows) -> "NumericColumn":
        """Return the column of these rows."""
        return NumericColumn(self.values[rows])


@dataclass(frozen=True, eq=False)
class CategoricalColumn:
    """A feature with text values.

    Attributes:
        codes: int32 (n,), position in ``texts``, -1 where missing.
        texts: the distinct values of this shard, sorted: an Arrow array of strings.
            The blocks of a shard share one object, so that it is hashed once.
    """

    codes: CodeArray
    texts: pa.Array

    def __init__(self, codes: CodeArray, texts: pa.Array | Sequence[str]) -> None:
        object.__setattr__(self, "codes", codes)
        is_array = isinstance(texts, pa.Array | pa.ChunkedArray)
        texts = texts if is_array else pa.array(texts, pa.string())
        object.__setattr__(self, "texts", texts)

    @property
    def categories(self) -> tuple[str, ...]:
        """The distinct values as Python strings."""
        return tuple(self.texts.to_pylist())

    @property
    def rows(self) -> int:
        """Number of rows, n."""
        return len(self.codes)

    @property
    def is_missing(self) -> BoolArray:
        """Which rows have no value, (n,)."""
        return self.codes < 0

    def take(self, rows: Rows) -> "CategoricalColumn":
        """Return the column of these rows, with the same ``texts``."""
        return CategoricalColumn(self.codes[rows], self.texts)


@dataclass(frozen=True, eq=False)
class VectorColumn:
    """A feature with vectors of one length, such as embeddings.

    Attributes:
        values: float32 (n, d), NaN where missing: a whole row, or single elements.
    """

    values: Float32Array

    @property
    def rows(self) -> int:
        """Number of rows, n."""
        return len(self.values)

    @property
    def width(self) -> int:
        """Length of the vectors, d."""
        return int(self.values.shape[1])

    @property
    def is_missing(self) -> BoolArray:
        """Which rows have no element at all, (n,)."""
        return np.asarray(np.isnan(self.values).all(axis=1))

    def take(self, rows: Rows) -> "VectorColumn":
        """Return the column of these rows."""
        return VectorColumn(self.values[rows])


FeatureColumn = NumericColumn | CategoricalColumn | VectorColumn


def no_values(rows: int) -> FeatureColumn:
    """Return a column without any value: it fits every encoder."""
    return NumericColumn(np.full(rows, np.nan))


def example(kind: str, width: int) -> FeatureColumn:
    """Return a column of one value, made up, of a kind and, of vectors, a width."""
    if kind == "vector":
        return VectorColumn(np.ones((1, width), np.float32))
    if kind == "text":
        return CategoricalColumn(np.zeros(1, np.int32), ("",))
    return NumericColumn(np.ones(1))


def as_numeric(name: str, column: FeatureColumn) -> NumericColumn:
    """Return a feature's column as numbers; one without values may be of any kind.

    Raises:
        SchemaError: it has values of another kind.
    """
    if isinstance(column, NumericColumn):
        return column
    _check_empty(name, column, "numeric")
    return NumericColumn(np.full(column.rows, np.nan))


def as_categorical(name: str, column: FeatureColumn) -> CategoricalColumn:
    """Return a feature's column as texts; one without values may be of any kind.

    Raises:
        SchemaError: it has values of another kind.
    """
    if isinstance(column, CategoricalColumn):
        return column
    _check_empty(name, column, "categorical")
    return CategoricalColumn(np.full(column.rows, -1, dtype=np.int32), ())


def as_vectors(name: str, column: FeatureColumn, width: int) -> VectorColumn:
    """Return a feature's column as vectors; one without values may be of any kind.

    Raises:
        SchemaError: it has values of another kind, or vectors of another length.
    """
    if isinstance(column, VectorColumn):
        if column.width == width:
            return column
        if column.rows and not column.is_missing.all():
            raise SchemaError(
                f"feature {name!r} has vectors of length {column.width} in this shard, "
                f"expected {width}"
            )
    else:
        _check_empty(name, column, "a vector")
    return VectorColumn(np.full((column.rows, width), np.nan, dtype=np.float32))


def _check_empty(name: str, column: FeatureColumn, wanted: str) -> None:
    if not column.is_missing.all():
        raise SchemaError(f"feature {name!r} is not {wanted} in this shard")
