"""Encode a table's feature columns as one float32 matrix.

Numbers are standardised, texts become one column per category, missing values are
imputed. The encoder is fitted to the merged statistics of all shards, and every shard
encodes with it: a sharded table is encoded like an unsplit one.

Notation
    n   rows of the shard
    d   width of the encoding, ``TableEncoder.width``
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tp_flower.columns import (
    CategoricalColumn,
    CategoryStatistics,
    ColumnStatistics,
    FeatureColumn,
    NumericColumn,
    NumericStatistics,
    column_statistics,
    merge,
    merge_tables,
    statistics_from_json,
)
from tp_flower.errors import SchemaError

__all__ = [
    "CategoricalColumn",
    "CategoricalEncoding",
    "CategoryStatistics",
    "ColumnStatistics",
    "FeatureColumn",
    "NumericColumn",
    "NumericEncoding",
    "NumericStatistics",
    "TableEncoder",
    "column_statistics",
    "fit",
    "merge",
    "merge_tables",
    "statistics_from_json",
]

Float32Array = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.integer[Any]]
Rows = slice | IndexArray
Writer = Callable[[Rows, Float32Array], None]

VERSION: Final = 1
OTHER: Final = "(other)"
BLOCK_VALUES: Final = 1 << 18  # float32 values written at a time: about a core's cache


@dataclass(frozen=True)
class NumericEncoding:
    """One column: (x - mean) / scale; a missing value becomes the mean, that is 0."""

    name: str
    mean: float
    scale: float

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return (self.name,)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"name": self.name, "mean": self.mean, "scale": self.scale}

    def writer(self, column: FeatureColumn) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        values = _numeric(self.name, column).values

        def write(block: Rows, out: Float32Array) -> None:
            standardised = values[block] - self.mean
            standardised /= self.scale
            standardised[np.isnan(standardised)] = 0.0
            out[:, 0] = standardised

        return write


@dataclass(frozen=True)
class CategoricalEncoding:
    """One column per category, sorted by name, then one for all others if there is one.

    Attributes:
        name: the feature.
        categories: the categories that have a column.
        fill: the category that stands for a missing value: the most frequent one.
        has_other: whether all other categories share a last column; without it they
            are encoded as zeros.
    """

    name: str
    categories: tuple[str, ...]
    fill: str
    has_other: bool

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        names = (*self.categories, OTHER) if self.has_other else self.categories
        return tuple(f"{self.name}={category}" for category in names)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "name": self.name,
            "categories": list(self.categories),
            "fill": self.fill,
            "other": self.has_other,
        }

    def writer(self, column: FeatureColumn) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        categorical = _categorical(self.name, column)
        codes, target = categorical.codes, self._targets(categorical.categories)

        def write(block: Rows, out: Float32Array) -> None:
            hot = target[codes[block]]
            out[...] = 0.0
            known = np.flatnonzero(hot >= 0)
            out[known, hot[known]] = 1.0

        return write

    def _targets(self, local: tuple[str, ...]) -> IndexArray:
        """Encoded column by local code, -1 for none; the last entry is code -1's."""
        position = {name: index for index, name in enumerate(self.categories)}
        unknown = len(self.categories) if self.has_other else -1
        names = (*local, self.fill)
        return np.array([position.get(name, unknown) for name in names], dtype=np.intp)


def _numeric(name: str, column: FeatureColumn) -> NumericColumn:
    """The column; one without values may be of the other kind."""
    if isinstance(column, NumericColumn):
        return column
    if column.categories:
        raise SchemaError(f"feature {name!r} is not numeric in this shard")
    return NumericColumn(np.full(column.rows, np.nan))


def _categorical(name: str, column: FeatureColumn) -> CategoricalColumn:
    """The column; one without values may be of the other kind."""
    if isinstance(column, CategoricalColumn):
        return column
    if not np.isnan(column.values).all():
        raise SchemaError(f"feature {name!r} is not categorical in this shard")
    return CategoricalColumn(np.full(column.rows, -1, dtype=np.int32), ())


FeatureEncoding = NumericEncoding | CategoricalEncoding


@dataclass(frozen=True)
class TableEncoder:
    """Encode a table's feature columns as one float32 matrix.

    Attributes:
        encodings: one per feature that is not constant, in the query's order.
        dropped: names of the constant features.
    """

    encodings: tuple[FeatureEncoding, ...]
    dropped: tuple[str, ...] = ()

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Name of each encoded column, d in all."""
        return tuple(
            name for encoding in self.encodings for name in encoding.feature_names
        )

    @property
    def width(self) -> int:
        """Number of encoded columns, d."""
        return sum(len(encoding.feature_names) for encoding in self.encodings)

    def transform(
        self,
        columns: Mapping[str, FeatureColumn],
        out: Float32Array | None = None,
        rows: IndexArray | None = None,
    ) -> Float32Array:
        """Return the encoded rows, float32 (n, d), C-contiguous if not given.

        Written in blocks of rows: beside ``out`` only one block is held.

        Args:
            columns: the shard's columns by feature name.
            out: float32 (n, d) to write to, such as a memory map.
            rows: the row positions to encode, in this order; None for all rows.

        Raises:
            SchemaError: a column is missing or of another kind than when fitted.
            ValueError: ``out`` has another shape or type.
        """
        writers = [
            encoding.writer(self._column(columns, encoding.name))
            for encoding in self.encodings
        ]
        total = (
            max((c.rows for c in columns.values()), default=0)
            if rows is None
            else len(rows)
        )
        shape = (total, self.width)
        if out is None:
            out = np.empty(shape, dtype=np.float32)
        if out.shape != shape or out.dtype != np.float32:
            raise ValueError(
                f"out must be float32 {shape}, not {out.dtype} {out.shape}"
            )
        step = max(256, BLOCK_VALUES // max(1, self.width))
        for start in range(0, total, step):
            span = slice(start, min(start + step, total))
            self._write_block(writers, span if rows is None else rows[span], out[span])
        return out

    def _write_block(
        self, writers: Sequence[Writer], block: Rows, out: Float32Array
    ) -> None:
        left = 0
        for encoding, write in zip(self.encodings, writers, strict=True):
            right = left + len(encoding.feature_names)
            write(block, out[:, left:right])
            left = right

    def _column(self, columns: Mapping[str, FeatureColumn], name: str) -> FeatureColumn:
        if name not in columns:
            raise SchemaError(
                f"feature {name!r} is not among the shard's: {', '.join(columns)}"
            )
        return columns[name]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types, with a version."""
        return {
            "version": VERSION,
            "encodings": [encoding.to_json() for encoding in self.encodings],
            "dropped": list(self.dropped),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TableEncoder":
        """Rebuild an encoder from ``to_json``.

        Raises:
            SchemaError: the data is of a version that this code does not know.
        """
        if data.get("version") != VERSION:
            raise SchemaError(
                f"encoder of version {data.get('version')!r}, expected {VERSION}"
            )
        encodings = tuple(_encoding_from_json(item) for item in data["encodings"])
        return cls(encodings, tuple(data["dropped"]))


def _encoding_from_json(data: Mapping[str, Any]) -> FeatureEncoding:
    if "mean" in data:
        return NumericEncoding(data["name"], float(data["mean"]), float(data["scale"]))
    return CategoricalEncoding(
        data["name"], tuple(data["categories"]), data["fill"], bool(data["other"])
    )


def fit(
    statistics: Mapping[str, ColumnStatistics], max_categories: int = 256
) -> TableEncoder:
    """Return the encoder for a table with these statistics, by feature name.

    Constant and empty features are dropped. A feature with more than
    ``max_categories`` categories keeps the most frequent ``max_categories - 1`` (ties:
    smallest name first), and the rest share a column.

    Raises:
        ValueError: ``max_categories`` is below 2.
    """
    if max_categories < 2:
        raise ValueError(f"max_categories must be at least 2, not {max_categories}")
    encodings: list[FeatureEncoding] = []
    dropped = []
    for name, statistic in statistics.items():
        encoding = _fit_column(name, statistic, max_categories)
        if encoding is None:
            dropped.append(name)
        else:
            encodings.append(encoding)
    return TableEncoder(tuple(encodings), tuple(dropped))


def _fit_column(
    name: str, statistic: ColumnStatistics, max_categories: int
) -> FeatureEncoding | None:
    """The encoding of one feature, None if it is constant."""
    if isinstance(statistic, NumericStatistics):
        scale = statistic.scale
        return NumericEncoding(name, statistic.mean, scale) if scale > 0 else None
    counts = {key: count for key, count in statistic.counts.items() if count}
    if len(counts) < 2:
        return None
    by_frequency = sorted(counts, key=lambda key: (-counts[key], key))
    has_other = len(counts) > max_categories
    kept = by_frequency[: max_categories - 1] if has_other else by_frequency
    return CategoricalEncoding(name, tuple(sorted(kept)), by_frequency[0], has_other)
