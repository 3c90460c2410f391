"""Statistics of features that merge across shards; encoders are fitted to them.

A table is encoded with the statistics of *all* its rows, wherever they are: each shard
computes the :func:`feature_statistics` that the encoder needs, and no more. Their
:func:`merge` is exact.

A row counts as often as it is joined, so that they are the statistics of the joined
rows; those in no joined training row do not count.

Notation
    n        rows of the shard
    G        joined training rows of each of them, which count in its place
    mean, m2 mean, and sum of squared deviations from it
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tp_flower.arrays import BoolArray, FloatArray, IntArray
from tp_flower.errors import SchemaError
from tp_flower.features import columns
from tp_flower.features.choice import TableChoice
from tp_flower.features.spec import LEVELS, EncoderSpec, Need
from tp_flower.keyed_hash import KEY_BYTES, HashArray, KeyedHasher

PositionArray = npt.NDArray[np.intp]
TieArray = npt.NDArray[np.uint32]
Moments = tuple[int, float, float]

MOST_CATEGORIES: Final = 100_000  # that one shard lists: 2.8 MB on the wire
MISSING_HASH: Final = np.full(2, np.iinfo(np.uint64).max)
_TIES: Final = KeyedHasher(bytes(KEY_BYTES)).purpose("ties")


@dataclass(frozen=True, eq=False)
class CategoryStatistics:
    """The categories of a feature, with their numbers of joined rows.

    A shard reports categories with fewer than its min_count rows only as "other". It
    also lists at most ``MOST_CATEGORIES``: all that have more than ``tail`` joined
    rows, together with ``tail``. So it remains known exactly which categories are the
    most frequent, or known that this is unknown.

    The hashes (k, 2) are 128 bits of the keyed hash and ascend. ``counts`` are joined
    rows that certainly are of the category, ``most`` those that may be: shards whose
    lists were cut may have more that they did not list. ``ties``, hashes of the values
    by a key that is the same in all runs, rank categories of one count.
    """

    hashes: HashArray = field(default_factory=lambda: np.zeros((0, 2), np.uint64))
    counts: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    most: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    tail: int = 0
    ties: TieArray = field(default_factory=lambda: np.zeros(0, np.uint32))

    def with_missing(self, rows: int) -> "CategoryStatistics":
        """Return the categories and, if some of the rows lack a value, one of these."""
        if not rows:
            return self
        return CategoryStatistics(
            np.concatenate([self.hashes, MISSING_HASH[None]]),
            np.append(self.counts, rows),
            np.append(self.most, rows),
            self.tail,
            np.append(self.ties, np.uint32(np.iinfo(np.uint32).max)),
        )

    def most_frequent(self, number: int) -> PositionArray:
        """Return the positions of the most frequent categories; ties: by value."""
        ranked = np.lexsort((self.ties, -self.counts))
        chosen = ranked[:number]
        others = ranked[number:]
        if self.tail:
            smallest = self.counts[chosen].min(initial=np.iinfo(np.int64).max)
            if len(chosen) < number or smallest <= max(
                self.tail, self.most[others].max(initial=0)
            ):
                raise SchemaError(
                    f"it has more than {MOST_CATEGORIES} different values in a shard, "
                    "so its most frequent ones cannot be determined: encode it with "
                    "hash(k) or length, keep fewer categories with one-hot(k), or "
                    "leave it out"
                )
        return chosen


NO_CATEGORIES: Final = CategoryStatistics()
TOO_MANY: Final = CategoryStatistics(tail=1)
"""Of numbers that are not few, or not whole."""


def count_categories(
    column: columns.CategoricalColumn, hasher: KeyedHasher, counted: "CountedRows"
) -> CategoryStatistics:
    """Return the categories of a shard's rows that may leave it."""
    is_present = ~column.is_missing
    size = len(column.texts)
    present = column.codes[is_present]
    weights = counted.of(is_present)
    joined = np.bincount(present, weights, size).astype(np.int64)
    listed = np.flatnonzero(
        np.bincount(present, minlength=size) >= max(1, counted.min_count)
    )
    tail = 0
    if len(listed) > MOST_CATEGORIES:
        threshold = len(listed) - 1 - MOST_CATEGORIES
        tail = int(np.partition(joined[listed], threshold)[threshold])
        listed = listed[joined[listed] > tail]
    texts = column.texts.take(pa.array(listed))
    hashes = short_hashes(texts, hasher)
    ties = short_hashes(texts, _TIES)[:, 0]
    # in the order of the hashes, which reveals nothing about the order of the texts
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    rows = joined[listed][order]
    return CategoryStatistics(
        hashes[order], rows, rows, tail, ties[order].astype(np.uint32)
    )


def short_hashes(texts: pa.Array, hasher: KeyedHasher) -> HashArray:
    """Return 128 bits of the keyed hash of each text, uint64 (k, 2)."""
    return hasher.hash_texts(texts)[:, :2]


def merge_categories(parts: Sequence[CategoryStatistics]) -> CategoryStatistics:
    """Return the statistics of the union of the shards' rows, in any order."""
    hashes = np.concatenate([part.hashes for part in parts])
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    hashes = hashes[order]
    is_first = np.ones(len(hashes), dtype=np.bool_)
    is_first[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
    group = np.empty(len(hashes), dtype=np.intp)
    group[order] = np.cumsum(is_first) - 1
    tail = sum(part.tail for part in parts)
    counts = np.zeros(int(is_first.sum()), dtype=np.int64)
    # a shard that does not list a category may have up to ``tail`` rows of it
    upper = np.full(len(counts), tail, dtype=np.int64)
    np.add.at(counts, group, np.concatenate([part.counts for part in parts]))
    np.add.at(upper, group, np.concatenate([part.most - part.tail for part in parts]))
    ties = np.concatenate([part.ties for part in parts])[order][is_first]
    return CategoryStatistics(hashes[is_first], counts, upper, tail, ties)


def category_purpose(table: str, feature: str) -> str:
    """Return the purpose of the key that a feature's categories are hashed with.

    Both names are the query's, which all sites of a run know.
    """
    return f"category/{len(table)}/{table}/{feature}"


@dataclass(frozen=True)
class ColumnStatistics:
    """Statistics of a feature over joined rows, as far as its encoder needs them.

    The kind is number, boolean, time, text or vector. Without values there is no spec:
    the column fits any kind. Numbers describe the values, or what the encoder derives
    from them; NaN if not needed. ``low`` and ``high`` are values of single rows,
    whatever min_count is; ``width`` is the length of a vector. Of ``rows`` joined rows
    ``count`` have a value.

    A declared encoder needs no statistics: ``rows`` and ``count`` are 0.
    """

    kind: str
    spec: EncoderSpec | None
    rows: int
    count: int
    mean: float = math.nan
    m2: float = math.nan
    low: float = math.nan
    high: float = math.nan
    categories: CategoryStatistics = NO_CATEGORIES
    width: int = 0
    is_declared: bool = False

    @property
    def deviation(self) -> float:
        """The population's standard deviation; 0 for a constant column."""
        return math.sqrt(self.m2 / self.count)

    @property
    def needs(self) -> frozenset[Need]:
        """The statistics that the encoder is fitted to."""
        if self.spec is None:
            return frozenset()
        return self.spec.needs_of(self.kind)


@dataclass(frozen=True)
class CountedRows:
    """The rows (n,) that a site computes statistics of (None: all), and its hasher.

    A category represents at least ``min_count`` rows. The ends of a range are still
    values of single rows. ``counts`` are G of these rows; None if all are 1.
    """

    hasher: KeyedHasher
    min_count: int = 1
    rows: BoolArray | None = None
    counts: IntArray | None = None

    def of(self, rows: BoolArray) -> IntArray | None:
        """Return G of some of these rows."""
        if self.counts is None:
            return None
        return self.counts[rows]


def feature_statistics(
    choice: TableChoice,
    name: str,
    kind: str,
    column: columns.FeatureColumn,
    counted: CountedRows,
) -> ColumnStatistics:
    """Return the statistics of a feature that its encoder is fitted to.

    An encoder without statistics gets the kind of value and the length of vectors.
    """
    if choice.is_declared(name, kind):
        width = column.width if isinstance(column, columns.VectorColumn) else 0
        width = 0 if column.is_missing.all() else width
        return declared_statistics(choice, name, kind, width)
    if counted.rows is not None:
        column = column.take(counted.rows)
    is_present = ~column.is_missing
    counts = counted.of(is_present)
    count = int(np.count_nonzero(is_present) if counts is None else counts.sum())
    rows = column.rows if counted.counts is None else int(counted.counts.sum())
    if not count:
        return ColumnStatistics(kind, None, rows, 0)
    spec = choice.spec_for(name, kind)
    statistics = ColumnStatistics(kind, spec, rows, count)
    if Need.CATEGORIES in statistics.needs:
        hasher = counted.hasher.purpose(category_purpose(choice.table, name))
        categories = _categories(spec, name, column, counted, hasher)
        statistics = replace(statistics, categories=categories)
    if not statistics.needs & {Need.MOMENTS, Need.RANGE}:
        return statistics
    if spec.kind == "length":
        column = columns.text_lengths(columns.as_categorical(name, column))
    numbers = columns.as_numeric(name, column).values
    try:
        return _add_numbers(statistics, numbers[is_present], counts)
    except SchemaError as error:
        raise SchemaError(f"feature {name!r}: {error}") from None


def _categories(
    spec: EncoderSpec,
    name: str,
    column: columns.FeatureColumn,
    counted: CountedRows,
    hasher: KeyedHasher,
) -> CategoryStatistics:
    if not isinstance(column, columns.NumericColumn):
        return count_categories(columns.as_categorical(name, column), hasher, counted)
    if spec.kind == LEVELS and not columns.has_levels(column, spec.columns):
        return TOO_MANY
    return count_categories(columns.number_texts(column), hasher, counted)


def _add_numbers(
    statistics: ColumnStatistics, present: FloatArray, counts: IntArray | None
) -> ColumnStatistics:
    """Add the statistics of the numbers (n,), n >= 1, that the encoder needs."""
    if Need.MOMENTS in statistics.needs:
        mean, m2 = moments_of(present, counts)
        statistics = replace(statistics, mean=mean, m2=m2)
    if Need.RANGE in statistics.needs:
        low = float(present.min())
        high = float(present.max())
        if not np.isfinite(high - low):
            raise SchemaError("some values are too large to scale")
        statistics = replace(statistics, low=low, high=high)
    return statistics


def declared_statistics(
    choice: TableChoice, name: str, kind: str, width: int
) -> ColumnStatistics:
    """Return the kind of a feature whose encoder needs no statistics, as statistics.

    The kind is "" for a column that is all NULL at its source; ``width`` is the length
    of a vector, 0 if there is none, and is ignored for other kinds.
    """
    if not kind or (kind == "vector" and not width):
        return ColumnStatistics(kind, None, 0, 0, is_declared=True)
    width = width if kind == "vector" else 0
    return ColumnStatistics(
        kind, choice.spec_for(name, kind), 0, 0, width=width, is_declared=True
    )


def moments_of(
    present: FloatArray, counts: IntArray | None = None
) -> tuple[float, float]:
    """Return mean and m2 of values, (n,), none missing, each counted G times."""
    # Deviations from the first value: a constant column has m2 == 0 and its exact value
    # as mean, in every shard, so that it is still recognised after merging.
    first = float(present[0])
    with np.errstate(over="ignore", invalid="ignore"):
        deviations = present - first
        shift = float(np.average(deviations, weights=counts))
        deviations -= shift
        weighted = deviations if counts is None else counts * deviations
        m2 = float(deviations @ weighted)
    if not np.isfinite(m2):
        # the size stays with the owner: it is the value of a row
        raise SchemaError("some values are too large to standardise")
    return first + shift, m2


def merge(statistics: Sequence[ColumnStatistics]) -> ColumnStatistics:
    """Return the statistics of the union of at least one shard's rows."""
    rows = sum(shard.rows for shard in statistics)
    filled = [shard for shard in statistics if shard.spec is not None]
    if not filled:
        return replace(statistics[0], rows=rows)
    first = filled[0]
    for other in filled:
        if (other.spec, other.width) != (first.spec, first.width):
            raise SchemaError(
                f"{_with_article(first)} in one shard and {_with_article(other)} in "
                "another"
            )
    moments = [(shard.count, shard.mean, shard.m2) for shard in filled]
    count, mean, m2 = reduce(merge_moments, moments)
    return replace(
        first,
        rows=rows,
        count=count,
        mean=mean,
        m2=m2,
        low=min(shard.low for shard in filled),
        high=max(shard.high for shard in filled),
        categories=merge_categories([shard.categories for shard in filled]),
    )


def _with_article(column: ColumnStatistics) -> str:
    if column.width:
        return f"a vector of {column.width}"
    return f"a {column.kind}"


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Return count, mean and m2 of the union of two sets of values.

    >>> merge_moments((1, 1.0, 0.0), (1, 3.0, 0.0))
    (2, 2.0, 2.0)

    Reference:
        Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for
        computing sample variances, 1979, Eq. 2.1.
    """
    (count_a, mean_a, m2_a), (count_b, mean_b, m2_b) = a, b
    share = count_b / max(count_a + count_b, 1)
    delta = mean_b - mean_a
    return (
        count_a + count_b,
        mean_a + delta * share,
        m2_a + m2_b + delta * delta * (count_a * share),
    )


def merge_tables(
    shards: Sequence[Mapping[str, ColumnStatistics]],
) -> dict[str, ColumnStatistics]:
    """Merge the statistics of all columns of a table's shards."""
    merged: dict[str, ColumnStatistics] = {}
    for name in shards[0]:
        try:
            merged[name] = merge([shard[name] for shard in shards])
        except SchemaError as error:
            raise SchemaError(f"feature {name!r} is {error}") from error
    return merged
