"""Fit a table's encoder to the merged statistics of its shards."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from tp_flower.errors import SchemaError
from tp_flower.features import encodings
from tp_flower.features.encoder import TableEncoder
from tp_flower.features.spec import APART, CODES, LEVELS, EncoderSpec, number_categories
from tp_flower.features.statistics import MISSING_HASH, ColumnStatistics
from tp_flower.keyed_hash import hex_texts

Fitted = encodings.FeatureEncoding | None
NumberEncoding = encodings.NumberEncoding

ROWS_PER_LEVEL: Final = 100
"""Joined rows, on average, that a number needs to have a column besides the slope."""


def fit(table: str, statistics: Mapping[str, ColumnStatistics]) -> TableEncoder:
    """Return the encoder for a table with these statistics, by feature name.

    Constant and empty features are dropped; the indicator of their missing values is
    kept if it was requested and is not constant itself. Features whose encoder needs no
    statistics are encoded as declared, whatever their values are.
    """
    features: list[encodings.FeatureEncoding] = []
    dropped = []
    for name, column in statistics.items():
        spec = column.spec
        encoding = None
        try:
            if spec is not None:
                encoding = _FITTERS[spec.kind](name, column, spec)
        except SchemaError as error:
            raise SchemaError(f"feature {name!r} of table {table!r}: {error}") from None
        if encoding is None:
            dropped.append(name)
        else:
            features.append(encoding)
        if encoding is not None and spec is not None and spec.kind == LEVELS:
            features += _levels(name, column, spec)
        if spec is not None:
            features += _options(name, column, spec, encoding)
    fitted = tuple(
        name for name, column in statistics.items() if not column.is_declared
    )
    return TableEncoder(table, tuple(features), tuple(dropped), fitted)


def _options(
    name: str, column: ColumnStatistics, spec: EncoderSpec, encoding: Fitted
) -> Iterator[encodings.FeatureEncoding]:
    """Yield the columns that the options of a spec add."""
    if spec.squared and isinstance(encoding, NumberEncoding):
        yield encodings.SquareEncoding.of(encoding)
    varies = column.is_declared or 0 < column.count < column.rows
    if spec.indicator and varies:
        yield encodings.MissingEncoding(name)
    if spec.present:
        yield encodings.PresentEncoding(name)


def _standard(name: str, column: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    """Scale to mean 0 and deviation 1; a constant column is left out."""
    if not column.deviation > 0:
        return None
    fill = _fill(column, spec)
    is_length = spec.kind == "length"
    return NumberEncoding(name, column.mean, column.deviation, fill, is_length)


def _min_max(name: str, column: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    if not column.high > column.low:
        return None
    return NumberEncoding(
        name, column.low, column.high - column.low, _fill(column, spec)
    )


def _number_or_vector(name: str, column: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    """Take numbers and vectors unscaled; a constant column is left out."""
    if column.width:
        return encodings.VectorEncoding(name, column.width)
    if spec.present:
        return NumberEncoding(name, 0.0, 1.0, _fill(column, spec))
    if not column.deviation > 0:
        return None
    # no value is farther from the mean than the root of the sum of squares
    if abs(column.mean) + math.sqrt(column.m2) > encodings.LARGEST:
        raise SchemaError("its values are too large to stay unscaled: use standard")
    return NumberEncoding(name, 0.0, 1.0, _fill(column, spec))


def _bins(name: str, column: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    """Divide the range into intervals of equal width."""
    edges = np.linspace(column.low, column.high, spec.columns + 1)[1:-1]
    edges = np.unique(edges[edges > column.low])
    if not len(edges):
        return None
    fill = None
    if spec.missing != "zero":
        fill = int(np.searchsorted(edges, _fill(column, spec) or 0.0, side="right"))
    return encodings.BinEncoding(name, tuple(edges.tolist()), fill)


def _range_scale(name: str, _: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    """The position in the declared range, from -1 (low) to 1 (high)."""
    span = spec.range
    half_width = span.high / 2 - span.low / 2
    middle = span.low + half_width
    fill = 0.0 if spec.missing == "zero" else middle
    return NumberEncoding(name, middle, half_width, fill, limit=1.0)


def _list_columns(name: str, column: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    if column.kind == "text":
        return encodings.ListedEncoding(name, spec.categories)
    return encodings.ListedEncoding(
        name, number_categories(spec.categories), of_number=True
    )


def _one_hot(name: str, column: ColumnStatistics, spec: EncoderSpec) -> Fitted:
    """The most frequent categories, and one column for the others if there are any."""
    stats = column.categories
    total = column.count
    limit = spec.columns
    if spec.counts_missing:
        stats = stats.with_missing(column.rows - total)
        total = column.rows
    has_other = total > stats.counts.sum() or len(stats.counts) > limit
    is_cut = stats.tail > 0 or len(stats.counts) + has_other > limit
    frequent = stats.most_frequent(limit - 1 if is_cut else len(stats.counts))
    has_zeros = not spec.counts_missing and column.count < column.rows
    is_constant = len(frequent) + has_other + has_zeros < 2 and not spec.present
    if is_constant or not len(frequent):
        return None
    hashes = stats.hashes[np.sort(frequent)]
    # a category that nobody lists is one of the others, and so is a missing value
    fill = None
    if has_other and spec.counts_missing:
        fill = len(hashes)
    if (hashes[-1] == MISSING_HASH).all():
        fill = len(hashes) - 1
    digits = tuple(hex_texts(hashes).to_pylist())
    kind = encodings.CodeEncoding if spec.kind == CODES else encodings.CategoryEncoding
    return kind(name, digits, fill, bool(has_other), column.kind != "text")


def _levels(
    name: str, column: ColumnStatistics, spec: EncoderSpec
) -> list[encodings.FeatureEncoding]:
    """A column per number besides the slope, if they are few and of many rows each."""
    numbers = len(column.categories.counts)
    are_few = not column.categories.tail and 2 < numbers <= spec.columns
    has_rows = column.rows >= ROWS_PER_LEVEL * numbers
    encoding = None
    if are_few and has_rows:
        encoding = _one_hot(name, column, spec)
    return [] if encoding is None else [encoding]


_FITTERS: Final[
    Mapping[str, Callable[[str, ColumnStatistics, EncoderSpec], Fitted]]
] = {
    "standard": _standard,
    "length": _standard,
    LEVELS: _standard,
    "min-max": _min_max,
    "none": _number_or_vector,
    "bins": _bins,
    "cyclic": lambda name, _, spec: encodings.CyclicEncoding(name, spec.cycle),
    "range": _range_scale,
    "categories": _list_columns,
    "one-hot": _one_hot,
    CODES: _one_hot,
    "hash": lambda name, column, spec: encodings.HashEncoding(
        name, spec.columns, column.kind != "text"
    ),
}


def _fill(column: ColumnStatistics, spec: EncoderSpec) -> float | None:
    """Return the number that replaces a missing value, None for none."""
    if spec.missing == APART:
        return None
    if spec.missing != "mean":
        return 0.0
    return column.mean
