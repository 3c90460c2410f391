"""Fit a table's encoder to the merged statistics of its shards."""

import math
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import numpy as np

from tp_flower.arrays import FloatArray
from tp_flower.errors import SchemaError
from tp_flower.features.encoder import FeatureEncoding, TableEncoder
from tp_flower.features.encodings import (
    LARGEST,
    BinEncoding,
    CategoryEncoding,
    CyclicEncoding,
    HashEncoding,
    ListedEncoding,
    MissingEncoding,
    NumberEncoding,
    VectorEncoding,
    hex_of,
)
from tp_flower.features.spec import EncoderSpec, number_categories
from tp_flower.features.statistics import ColumnStatistics, QuantileSummary

Fitted = FeatureEncoding | None
Statistic = TypeVar("Statistic")


def fit(table: str, statistics: Mapping[str, ColumnStatistics]) -> TableEncoder:
    """Return the encoder for a table with these statistics, by feature name.

    Constant and empty features are dropped; which values of them are missing is kept
    where it was asked for and is not constant itself. Features whose encoder needs no
    statistics are encoded as they were declared, whatever their values are.

    Raises:
        SchemaError: the statistics are not enough to fit to; names the feature.
    """
    encodings: list[FeatureEncoding] = []
    dropped = []
    for name, column in statistics.items():
        try:
            encoding = _fit_feature(name, column)
        except SchemaError as error:
            raise SchemaError(f"feature {name!r} of table {table!r}: {error}") from None
        if encoding is None:
            dropped.append(name)
        else:
            encodings.append(encoding)
        wants_missing = column.spec is not None and column.spec.indicator
        if wants_missing and (column.is_declared or 0 < column.count < column.rows):
            encodings.append(MissingEncoding(name))
    fitted = tuple(
        name for name, column in statistics.items() if not column.is_declared
    )
    return TableEncoder(table, tuple(encodings), tuple(dropped), fitted)


def _fit_feature(name: str, column: ColumnStatistics) -> Fitted:
    """Return the encoding of one feature, None if it is constant."""
    if column.spec is None:
        return None
    if column.width:
        return VectorEncoding(name, column.width)
    return _FITTERS[column.spec.kind](name, column, column.spec)


def _standard(name: str, column: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    moments = _present(column.moments, "moments")
    if not moments.scale > 0:
        return None
    return NumberEncoding(
        name, moments.mean, moments.scale, _fill(column), spec.kind == "length"
    )


def _min_max(name: str, column: ColumnStatistics, _: EncoderSpec) -> Fitted:
    span = _present(column.range, "range")
    if not span.high > span.low:
        return None
    return NumberEncoding(name, span.low, span.high - span.low, _fill(column))


def _robust(name: str, column: ColumnStatistics, _: EncoderSpec) -> Fitted:
    """(x - median) / (third quartile - first); the deviation where these agree."""
    moments, quantiles = _present(column.moments, "moments"), _quantiles(column)
    if not moments.scale > 0:
        return None
    low, median, high = (quantiles.quantile(p) for p in (0.25, 0.5, 0.75))
    scale = high - low if high > low else moments.scale
    return NumberEncoding(name, median, scale, _fill(column))


def _plain(name: str, column: ColumnStatistics, _: EncoderSpec) -> Fitted:
    moments = _present(column.moments, "moments")
    if not moments.scale > 0:
        return None
    # no value is farther from the mean than the root of the sum of squares
    if abs(moments.mean) + math.sqrt(moments.m2) > LARGEST:
        raise SchemaError("its values are too large to stay as they are: use standard")
    return NumberEncoding(name, 0.0, 1.0, _fill(column))


def _equal_width(name: str, column: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    span = _present(column.range, "range")
    edges = np.linspace(span.low, span.high, spec.columns + 1)[1:-1]
    return _bins(name, column, np.unique(edges[edges > span.low]))


def _equal_depth(name: str, column: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    quantiles, bins = _quantiles(column), spec.columns
    edges = np.unique([quantiles.quantile(j / bins) for j in range(1, bins)])
    # below the smallest point there would be a bin of next to nothing
    return _bins(name, column, edges[edges > quantiles.values[0]])


def _bins(name: str, column: ColumnStatistics, edges: FloatArray) -> Fitted:
    if not len(edges):
        return None
    fill = None
    if column.spec is not None and column.spec.missing != "zero":
        fill = int(np.searchsorted(edges, _fill(column), side="right"))
    return BinEncoding(name, tuple(edges.tolist()), fill)


def _cyclic(name: str, _: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    return None if spec.argument is None else CyclicEncoding(name, spec.argument)


def _in_range(name: str, _: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    """The place in the declared range, from -1 (low) to 1 (high)."""
    span = spec.range
    fill = 0.0 if spec.missing == "zero" else span.middle
    return NumberEncoding(name, span.middle, span.half_width, fill, limit=1.0)


def _listed(name: str, column: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    if column.kind == "text":
        return ListedEncoding(name, spec.categories)
    return ListedEncoding(name, number_categories(spec.categories), of_number=True)


def _one_hot(name: str, column: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    """The most frequent categories, and the others in one column if there are any."""
    listed, most = _present(column.categories, "categories"), spec.columns
    has_other = column.count > listed.counts.sum() or len(listed.counts) > most
    is_cut = listed.tail > 0 or len(listed.counts) + has_other > most
    frequent = listed.most_frequent(most - 1 if is_cut else len(listed.counts))
    is_zero = spec.missing == "zero"
    kinds_of_rows = len(frequent) + has_other + (is_zero and column.count < column.rows)
    if kinds_of_rows < 2 or not len(frequent):
        return None
    order = np.sort(frequent)
    fill = None if is_zero else int(np.searchsorted(order, frequent[0]))
    return CategoryEncoding(
        name, hex_of(listed.hashes[order]), fill, bool(has_other), column.kind != "text"
    )


def _hash(name: str, column: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    return HashEncoding(name, spec.columns, column.kind != "text")


_FITTERS: Final[
    Mapping[str, Callable[[str, ColumnStatistics, EncoderSpec], Fitted]]
] = {
    "standard": _standard,
    "length": _standard,
    "min-max": _min_max,
    "robust": _robust,
    "none": _plain,
    "bins": _equal_width,
    "quantile-bins": _equal_depth,
    "cyclic": _cyclic,
    "range": _in_range,
    "categories": _listed,
    "one-hot": _one_hot,
    "hash": _hash,
}


def _fill(column: ColumnStatistics) -> float:
    """Return the number that stands for a missing value."""
    rule = "zero" if column.spec is None else column.spec.missing
    if rule == "mean":
        return _present(column.moments, "moments").mean
    return _quantiles(column).quantile(0.5) if rule == "median" else 0.0


def _quantiles(column: ColumnStatistics) -> QuantileSummary:
    quantiles = _present(column.quantiles, "quantiles")
    if not len(quantiles.values):
        raise SchemaError(
            "no shard has the rows that a quantile must stand for (min-count): "
            "use standard or none"
        )
    return quantiles


def _present(statistic: Statistic | None, name: str) -> Statistic:
    if statistic is None:
        raise SchemaError(f"its statistics have no {name}")
    return statistic
