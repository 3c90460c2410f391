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
    CyclicEncoding,
    MissingEncoding,
    NumberEncoding,
    VectorEncoding,
)
from tp_flower.features.hashed import (
    CategoryEncoding,
    HashEncoding,
    ListedEncoding,
    hex_of,
)
from tp_flower.features.spec import EncoderSpec, number_categories
from tp_flower.features.statistics import (
    CategoryStatistics,
    ColumnStatistics,
    Moments,
    QuantileSummary,
    Range,
)

Fitted = FeatureEncoding | None
Known = TypeVar("Known")


def fit(table: str, statistics: Mapping[str, ColumnStatistics]) -> TableEncoder:
    """Return the encoder for a table with these statistics, by feature name.

    Constant and empty features are dropped; which values of them are missing is kept
    where it was asked for and is not constant itself. Features whose encoder needs no
    statistics are encoded as they were declared, whatever their values are.

    Args:
        table: alias in the query.
        statistics: merged over the table's shards.

    Raises:
        SchemaError: the statistics are not enough to fit to; names the feature.
    """
    encodings: list[FeatureEncoding] = []
    dropped = []
    for name, own in statistics.items():
        try:
            encoding = _fit_feature(name, own)
        except SchemaError as error:
            raise SchemaError(f"feature {name!r} of table {table!r}: {error}") from None
        if encoding is None:
            dropped.append(name)
        else:
            encodings.append(encoding)
        wants_missing = own.spec is not None and own.spec.indicator
        if wants_missing and (own.is_declared or 0 < own.count < own.rows):
            encodings.append(MissingEncoding(name))
    fitted = tuple(name for name, own in statistics.items() if not own.is_declared)
    return TableEncoder(table, tuple(encodings), tuple(dropped), fitted)


def _fit_feature(name: str, own: ColumnStatistics) -> Fitted:
    """The encoding of one feature, None if it is constant."""
    if own.spec is None:
        return None
    if own.width:
        return VectorEncoding(name, own.width)
    return _FITTERS[own.spec.kind](name, own, own.spec)


def _standard(name: str, own: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    moments = _moments(own)
    if not moments.scale > 0:
        return None
    return NumberEncoding(
        name, moments.mean, moments.scale, _fill(own), spec.kind == "length"
    )


def _min_max(name: str, own: ColumnStatistics, _: EncoderSpec) -> Fitted:
    span = _range(own)
    if not span.high > span.low:
        return None
    return NumberEncoding(name, span.low, span.high - span.low, _fill(own))


def _robust(name: str, own: ColumnStatistics, _: EncoderSpec) -> Fitted:
    """(x - median) / (third quartile - first); the deviation where these agree."""
    moments, quantiles = _moments(own), _quantiles(own)
    if not moments.scale > 0:
        return None
    low, median, high = (quantiles.quantile(p) for p in (0.25, 0.5, 0.75))
    scale = high - low if high > low else moments.scale
    return NumberEncoding(name, median, scale, _fill(own))


def _plain(name: str, own: ColumnStatistics, _: EncoderSpec) -> Fitted:
    moments = _moments(own)
    if not moments.scale > 0:
        return None
    # no value is farther from the mean than the root of the sum of squares
    if abs(moments.mean) + math.sqrt(moments.m2) > LARGEST:
        raise SchemaError("its values are too large to stay as they are: use standard")
    return NumberEncoding(name, 0.0, 1.0, _fill(own))


def _equal_width(name: str, own: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    span = _range(own)
    edges = np.linspace(span.low, span.high, _argument(spec) + 1)[1:-1]
    return _bins(name, own, np.unique(edges[edges > span.low]))


def _equal_depth(name: str, own: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    quantiles, bins = _quantiles(own), _argument(spec)
    edges = np.unique([quantiles.quantile(j / bins) for j in range(1, bins)])
    # below the smallest point there would be a bin of next to nothing
    return _bins(name, own, edges[edges > quantiles.values[0]])


def _bins(name: str, own: ColumnStatistics, edges: FloatArray) -> Fitted:
    if not len(edges):
        return None
    fill = None
    if own.spec is not None and own.spec.missing != "zero":
        fill = int(np.searchsorted(edges, _fill(own), side="right"))
    return BinEncoding(name, tuple(edges.tolist()), fill)


def _cyclic(name: str, _: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    cycle = spec.argument
    return None if cycle is None else CyclicEncoding(name, cycle)


def _in_range(name: str, _: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    """The place in the declared range, from -1 (low) to 1 (high)."""
    span = spec.range
    fill = 0.0 if spec.missing == "zero" else span.middle
    return NumberEncoding(name, span.middle, span.half_width, fill, limit=1.0)


def _listed(name: str, own: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    categories, is_number = spec.categories, own.kind != "text"
    if is_number:
        categories = number_categories(categories)
    return ListedEncoding(name, categories, is_number)


def _one_hot(name: str, own: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    """The most frequent categories, and the others in one column if there are any."""
    found, most = _categories(own), _argument(spec)
    has_other = own.count > found.counts.sum() or len(found.counts) > most
    is_cut = found.tail > 0 or len(found.counts) + has_other > most
    kept = found.most_frequent(most - 1 if is_cut else len(found.counts))
    is_zero = spec.missing == "zero"
    kinds_of_rows = len(kept) + has_other + (is_zero and own.count < own.rows)
    if kinds_of_rows < 2 or not len(kept):
        return None
    order = np.sort(kept)
    fill = None if is_zero else int(np.searchsorted(order, kept[0]))
    return CategoryEncoding(
        name, hex_of(found.hashes[order]), fill, bool(has_other), own.kind != "text"
    )


def _hash(name: str, own: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    return HashEncoding(name, _argument(spec), own.kind != "text")


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


def _fill(own: ColumnStatistics) -> float:
    """The number that stands for a missing value."""
    rule = "zero" if own.spec is None else own.spec.missing
    if rule == "mean":
        return _moments(own).mean
    return _quantiles(own).quantile(0.5) if rule == "median" else 0.0


def _argument(spec: EncoderSpec) -> int:
    if not isinstance(spec.argument, int):
        raise TypeError(f"{spec} has no number of columns")
    return spec.argument


def _moments(own: ColumnStatistics) -> Moments:
    return _known(own.moments, "moments")


def _range(own: ColumnStatistics) -> Range:
    return _known(own.range, "range")


def _categories(own: ColumnStatistics) -> CategoryStatistics:
    return _known(own.categories, "categories")


def _quantiles(own: ColumnStatistics) -> QuantileSummary:
    quantiles = _known(own.quantiles, "quantiles")
    if not len(quantiles.values):
        raise SchemaError(
            "no shard has the rows that a quantile must stand for (min-count): "
            "use standard or none"
        )
    return quantiles


def _known(statistic: Known | None, name: str) -> Known:
    if statistic is None:
        raise SchemaError(f"its statistics have no {name}")
    return statistic
