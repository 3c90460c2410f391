"""Statistics of features that merge across shards; encoders are fitted to them.

A table is encoded with the statistics of *all* its rows, wherever they are: each shard
computes :func:`feature_statistics` of what the encoder needs, and no more. Their
:func:`merge` is exact, but for quantiles, whose error is bounded (``quantiles.py``).

Notation
    n        rows of the shard
    mean, m2 mean, and sum of squared deviations from it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from tp_flower.errors import SchemaError
from tp_flower.features.categories import (
    CategoryStatistics,
    category_purpose,
    count_categories,
    merge_categories,
)
from tp_flower.features.choice import TableChoice
from tp_flower.features.columns import (
    BoolArray,
    FeatureColumn,
    FloatArray,
    VectorColumn,
)
from tp_flower.features.derived import categories_of, derive
from tp_flower.features.quantiles import QuantileSummary, merge_quantiles, summarise
from tp_flower.features.spec import EncoderSpec, Need
from tp_flower.keyed_hash import KeyedHasher


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the values that are not missing."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def scale(self) -> float:
        """Population standard deviation; 0 for a constant or empty column."""
        return float(np.sqrt(self.m2 / self.count)) if self.count else 0.0


@dataclass(frozen=True)
class Range:
    """The smallest and the largest value: of single rows, whatever min_count is."""

    low: float
    high: float


@dataclass(frozen=True)
class ColumnStatistics:
    """What is known of a feature over some rows.

    Attributes:
        kind: of value: number, boolean, time, text or vector.
        spec: the encoder that it is for; None where there are no values: a column
            without values has no kind, and fits any other.
        rows: how many there are; 0 where the encoder needs no statistics.
        count: how many have a value; 0 likewise.
        moments: of the values, or of what the encoder derives from them.
        range: likewise.
        quantiles: likewise.
        categories: how often each occurs.
        width: length of a vector; 0 for other kinds.
        is_declared: whether the encoder needs no statistics, and these are none.
    """

    kind: str
    spec: EncoderSpec | None
    rows: int
    count: int
    moments: Moments | None = None
    range: Range | None = None
    quantiles: QuantileSummary | None = None
    categories: CategoryStatistics | None = None
    width: int = 0
    is_declared: bool = False


@dataclass(frozen=True)
class Sample:
    """The rows that a site computes statistics of, and on what terms.

    Attributes:
        hasher: of the site, for the categories.
        min_count: the fewest rows that a category or a point of the quantiles stands
            for. The points are values of single rows still, and so are the ends of a
            range, which no count protects.
        rows: bool (n,), the rows that count; None for all.
    """

    hasher: KeyedHasher
    min_count: int = 1
    rows: BoolArray | None = None


def feature_statistics(
    choice: TableChoice, name: str, kind: str, column: FeatureColumn, sample: Sample
) -> ColumnStatistics:
    """Return the statistics of a feature that its encoder is fitted to.

    Those of an encoder that needs none are its kind of value and the length of vectors.

    Args:
        choice: the encoders of the table.
        name: of the feature.
        kind: number, boolean, time, text or vector.
        column: n rows.
        sample: of the rows.

    Raises:
        SchemaError: the encoder does not fit, or the values are too large; names the
            feature.
    """
    if choice.is_declared(name, kind):
        width = _width(column)
        return declared_statistics(choice, name, kind, width)
    if sample.rows is not None:
        column = column.take(sample.rows)
    count = column.rows - int(np.count_nonzero(column.is_missing))
    if not count:
        return ColumnStatistics(kind, None, column.rows, 0)
    spec = choice.spec_for(name, kind)
    known = ColumnStatistics(kind, spec, column.rows, count)
    if Need.CATEGORIES in spec.needs:
        hasher = sample.hasher.purpose(category_purpose(choice.table, name))
        found = count_categories(categories_of(column, name), hasher, sample.min_count)
        return replace(known, categories=found)
    try:
        values = derive(name, column, spec).values
        return _with_numbers(known, spec, values[~np.isnan(values)], sample.min_count)
    except SchemaError as error:
        raise SchemaError(f"feature {name!r}: {error}") from None


def _width(column: FeatureColumn) -> int:
    """Return the length of a column's vectors, 0 where there is none."""
    if isinstance(column, VectorColumn) and not column.is_missing.all():
        return column.width
    return 0


def declared_statistics(
    choice: TableChoice, name: str, kind: str, width: int = 0
) -> ColumnStatistics:
    """Return the kind of a feature whose encoder needs no statistics, as statistics.

    Args:
        choice: the encoders of the table.
        name: of the feature.
        kind: of value; "" of a column that is all NULL at its source, and has no type.
        width: length of a vector, 0 where there is none; ignored of other kinds.

    Raises:
        SchemaError: the encoder does not fit; names the feature.
    """
    if not kind or (kind == "vector" and not width):
        return ColumnStatistics(kind, None, 0, 0, is_declared=True)
    spec = choice.spec_for(name, kind)
    width = width if kind == "vector" else 0
    return ColumnStatistics(kind, spec, 0, 0, width=width, is_declared=True)


def _with_numbers(
    known: ColumnStatistics, spec: EncoderSpec, present: FloatArray, min_count: int
) -> ColumnStatistics:
    needs = spec.needs
    return replace(
        known,
        moments=moments_of(present) if Need.MOMENTS in needs else None,
        range=_range(present) if Need.RANGE in needs else None,
        quantiles=summarise(present, min_count) if Need.QUANTILES in needs else None,
    )


def moments_of(present: FloatArray) -> Moments:
    """Return the moments of values, (n,), none of them missing.

    Raises:
        SchemaError: the values are too large for their squares to be summed.
    """
    if not present.size:
        return Moments()
    # Deviations from the first value: a constant column has m2 == 0 and its exact
    # value as mean, in every shard, so that it is recognised after any merge.
    first = float(present[0])
    with np.errstate(over="ignore", invalid="ignore"):
        deviations = present - first
        shift = float(deviations.mean())
        deviations -= shift
        m2 = float(deviations @ deviations)
    if not np.isfinite(m2):
        # how large is the owner's business: it is the value of a row
        raise SchemaError("some values are too large to standardise")
    return Moments(int(present.size), first + shift, m2)


def _range(present: FloatArray) -> Range:
    low, high = float(present.min()), float(present.max())
    if not np.isfinite(high - low):
        raise SchemaError("some values are too large to scale")
    return Range(low, high)


def merge(statistics: Sequence[ColumnStatistics]) -> ColumnStatistics:
    """Return the statistics of the union of the shards' rows.

    Raises:
        ValueError: there is nothing to merge.
        SchemaError: the column is of one kind in one shard and of another in another.
    """
    if not statistics:
        raise ValueError("no statistics to merge")
    rows = sum(own.rows for own in statistics)
    filled = [shard for shard in statistics if shard.spec is not None]
    if not filled:
        return replace(statistics[0], rows=rows)
    first = filled[0]
    for own in filled:
        if (own.spec, own.width) != (first.spec, first.width):
            raise SchemaError(f"{_a(first)} in one shard and {_a(own)} in another")
    return replace(
        first,
        rows=rows,
        count=sum(own.count for own in filled),
        moments=_merged_moments([own.moments for own in filled]),
        range=_merged_range([own.range for own in filled]),
        quantiles=_merged_quantiles([own.quantiles for own in filled]),
        categories=_merged_categories([own.categories for own in filled]),
    )


def _a(own: ColumnStatistics) -> str:
    return f"a vector of {own.width}" if own.width else f"a {own.kind}"


def _merged_moments(parts: Sequence[Moments | None]) -> Moments | None:
    known = [part for part in parts if part is not None]
    return reduce(merge_moments, known) if known else None


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Return the moments of the union of two sets of values, neither of them empty.

    >>> merge_moments(Moments(1, 1.0, 0.0), Moments(1, 3.0, 0.0))
    Moments(count=2, mean=2.0, m2=2.0)

    Reference:
        Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for
        computing sample variances, 1979, Eq. 2.1.
    """
    count = a.count + b.count
    delta = b.mean - a.mean
    return Moments(
        count,
        a.mean + delta * (b.count / count),
        a.m2 + b.m2 + delta * delta * (a.count * (b.count / count)),
    )


def _merged_range(parts: Sequence[Range | None]) -> Range | None:
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return Range(min(own.low for own in known), max(own.high for own in known))


def _merged_quantiles(
    parts: Sequence[QuantileSummary | None],
) -> QuantileSummary | None:
    known = [part for part in parts if part is not None]
    return merge_quantiles(known) if known else None


def _merged_categories(
    parts: Sequence[CategoryStatistics | None],
) -> CategoryStatistics | None:
    known = [part for part in parts if part is not None]
    return merge_categories(known) if known else None


def merge_tables(
    shards: Sequence[Mapping[str, ColumnStatistics]],
) -> dict[str, ColumnStatistics]:
    """Merge the statistics of all columns of a table's shards.

    Raises:
        ValueError: there are no shards.
        SchemaError: the shards' columns differ in name or kind; names the column.
    """
    if not shards:
        raise ValueError("no statistics to merge")
    merged: dict[str, ColumnStatistics] = {}
    for name in shards[0]:
        try:
            merged[name] = merge([shard[name] for shard in shards])
        except KeyError:
            raise SchemaError(f"feature {name!r} is missing in a shard") from None
        except SchemaError as error:
            raise SchemaError(f"feature {name!r} is {error}") from error
    for shard in shards:
        if extra := shard.keys() - merged.keys():
            raise SchemaError(f"feature {min(extra)!r} is missing in a shard")
    return merged
