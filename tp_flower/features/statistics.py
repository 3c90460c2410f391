"""Statistics of features that merge across shards; encoders are fitted to them.

A table is encoded with the statistics of *all* its rows, wherever they are: each shard
computes :func:`feature_statistics` of what the encoder needs, and no more. Their
:func:`merge` is exact, but for quantiles, whose error is bounded.

Notation
    n        rows of the shard
    mean, m2 mean, and sum of squared deviations from it
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.errors import SchemaError
from tp_flower.features.choice import TableChoice
from tp_flower.features.columns import (
    CategoricalColumn,
    FeatureColumn,
    NumericColumn,
    VectorColumn,
    as_categorical,
    as_numeric,
    number_texts,
    text_lengths,
)
from tp_flower.features.spec import EncoderSpec, Need
from tp_flower.keyed_hash import HashArray, KeyedHasher

CountArray = npt.NDArray[np.int64]
PositionArray = npt.NDArray[np.intp]
Part = TypeVar("Part")

MOST_POINTS: Final = 1000
"""Points of one shard's summary, m."""


MOST_CATEGORIES: Final = 100_000
"""Categories that one shard lists at most: 2.4 MB on the wire."""


@dataclass(frozen=True, eq=False)
class QuantileSummary:
    r"""Some of a feature's values, each standing for a run of consecutive ranks.

    A shard sorts its n values, cuts them into g = min(m, n // min_count) groups of
    consecutive ranks whose sizes differ by at most one (each has min_count values or
    more), and keeps the middle value of each group with the group's size as its
    weight. Merging collects the points of all shards; nothing is thrown away, so the
    order of merging does not matter and the error does not grow with it.

    **Error.** Let F(x) be the number of values <= x over all shards, and W(x) the
    weight of the points <= x. Then |F(x) - W(x)| <= ``rank_error`` for every x: in a
    shard, a group whose values are all <= x or all > x counts right in both, and at
    most one group has values on both sides. If its middle value, at 0-based place
    (s - 1) // 2 of s, is <= x, at least (s - 1) // 2 + 1 of its values are, and W has
    counted s: too many by s // 2 at most. If it is > x, at most (s - 1) // 2 <= s // 2
    of its values are <= x, and W has counted none. So a shard adds at most half its
    largest group, and one with fewer than min_count values, which sends nothing, adds
    those. The same holds for values < x. In terms of the n_q values of shard q:

        rank_error <= sum_q max(ceil(n_q / m), 2 min_count - 1) / 2

    which is (1 / 2m) of all rows, plus at most half a row per shard, unless shards are
    smaller than 2 m min_count. With min_count = 1 and n_q <= m for all q it is 0:
    the quantiles are exact.

    Values are float64 (g,), in ascending order; weights int64 (g,).
    """

    values: FloatArray
    weights: CountArray
    rank_error: int

    @property
    def count(self) -> int:
        """Number of values that the points stand for."""
        return int(self.weights.sum())

    def quantile(self, p: float) -> float:
        """Return the p-quantile of the weighted points, interpolated linearly.

        Of points with weight 1 it is numpy's. In general it is a value x with
        F(x) >= floor(r) + 1 - rank_error, and fewer than ceil(r) + 1 + rank_error
        values below it, where r = p * (count - 1).
        """
        if not len(self.values):
            raise ValueError("a summary without points has no quantiles")
        rank = p * (self.count - 1)
        ends = np.cumsum(self.weights)
        below, above = self.values[
            np.searchsorted(ends, [np.floor(rank), np.ceil(rank)], side="right")
        ]
        share = rank - np.floor(rank)
        # below + share * (above - below) could overflow
        between = (1 - share) * below + share * above
        return float(min(max(between, below), above))


def summarise(values: FloatArray, min_count: int = 1) -> QuantileSummary:
    """Return the summary of a shard's finite values, (n,)."""
    groups = min(MOST_POINTS, len(values) // min_count)
    if not groups:
        nothing = np.zeros(0, dtype=np.int64)
        return QuantileSummary(np.zeros(0), nothing, len(values))
    edges = np.arange(groups + 1, dtype=np.int64) * len(values) // groups
    points = np.sort(values)[(edges[:-1] + edges[1:] - 1) // 2]
    weights = np.diff(edges)
    return _ordered(points, weights, rank_error_of(weights, len(values)))


def rank_error_of(weights: CountArray, count: int) -> int:
    """Return the error that a shard's points add, for its ``count`` values."""
    return int(weights.max(initial=0)) // 2 + count - int(weights.sum())


def merge_quantiles(summaries: Sequence[QuantileSummary]) -> QuantileSummary:
    """Return the summary of the union of the shards' values, in any order."""
    values = np.concatenate([summary.values for summary in summaries])
    weights = np.concatenate([summary.weights for summary in summaries])
    return _ordered(values, weights, sum(each.rank_error for each in summaries))


def _ordered(
    values: FloatArray, weights: CountArray, rank_error: int
) -> QuantileSummary:
    """Return the summary of these points; equal points go by weight.

    So a summary is the same in whatever order it was merged, or not merged at all.
    """
    order = np.lexsort((weights, values))
    return QuantileSummary(values[order], weights[order], rank_error)


@dataclass(frozen=True, eq=False)
class CategoryStatistics:
    """The categories of a feature and their rows.

    A shard leaves out what has fewer than its min_count rows: that never leaves it, and
    is "other". It also lists no more than ``MOST_CATEGORIES``: all that have more than
    ``tail`` rows, and says what ``tail`` is. Which categories are the most frequent is
    then still known exactly, or known to be unknown.

    Attributes:
        hashes: uint64 (k, 2), in ascending order: 128 bits of the keyed hash.
        counts: int64 (k,), rows that are known to be of the category.
        most: int64 (k,), rows that may be: shards whose lists were cut short may have
            some that they did not list.
        tail: rows that a category may have which no shard lists; 0 if no list was cut.
    """

    hashes: HashArray
    counts: CountArray
    most: CountArray
    tail: int

    def most_frequent(self, number: int) -> PositionArray:
        """Return the positions of the most frequent categories; ties: smallest hash.

        Raises:
            SchemaError: lists were cut too short to tell.
        """
        ranked = np.argsort(-self.counts, kind="stable")
        chosen, others = ranked[:number], ranked[number:]
        if self.tail:
            least = self.counts[chosen].min(initial=np.iinfo(np.int64).max)
            if len(chosen) < number or least <= max(
                self.tail, self.most[others].max(initial=0)
            ):
                raise SchemaError(
                    f"it has more than {MOST_CATEGORIES} different values in a shard, "
                    "and which are the most frequent cannot be told: encode it with "
                    "hash(k) or length, keep fewer categories with one-hot(k), or "
                    "leave it out"
                )
        return chosen


def count_categories(
    column: CategoricalColumn, hasher: KeyedHasher, min_count: int = 1
) -> CategoryStatistics:
    """Return the categories of a shard's rows that may leave it."""
    present = column.codes[~column.is_missing]
    counts = np.bincount(present, minlength=len(column.texts))
    listed = np.flatnonzero(counts >= max(1, min_count))
    tail = 0
    if len(listed) > MOST_CATEGORIES:
        place = len(listed) - 1 - MOST_CATEGORIES
        tail = int(np.partition(counts[listed], place)[place])
        listed = listed[counts[listed] > tail]
    hashes = short_hashes(column.texts.take(pa.array(listed)), hasher)
    # in the order of the hashes: theirs says nothing about that of the texts
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    rows = counts[listed][order].astype(np.int64)
    return CategoryStatistics(hashes[order], rows, rows, tail)


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
    # a shard that does not list a category may have as many rows of it as its tail
    most = np.full(len(counts), tail, dtype=np.int64)
    np.add.at(counts, group, np.concatenate([part.counts for part in parts]))
    np.add.at(most, group, np.concatenate([part.most - part.tail for part in parts]))
    return CategoryStatistics(hashes[is_first], counts, most, tail)


def category_purpose(table: str, feature: str) -> str:
    """Return the purpose of the key that a feature's categories are hashed with.

    Both names are those of the query, which all sites of a run know.
    """
    return f"category/{len(table)}/{table}/{feature}"


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
    """Statistics of a feature over some rows.

    Attributes:
        kind: of value: number, boolean, time, text or vector.
        spec: the encoder that it is for; None where there are no values: a column
            without values has no kind, and fits any other.
        count: rows with a value; it and ``rows`` are 0 where the encoder needs none.
        moments: of the values, or of the numbers that the encoder derives from them;
            range and quantiles are of the same numbers.
        width: length of a vector; 0 for other kinds.
        is_declared: whether the encoder needs no statistics.
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

    ``kind`` is number, boolean, time, text or vector.
    """
    if choice.is_declared(name, kind):
        width = column.width if isinstance(column, VectorColumn) else 0
        width = 0 if column.is_missing.all() else width
        return declared_statistics(choice, name, kind, width)
    if sample.rows is not None:
        column = column.take(sample.rows)
    count = column.rows - int(np.count_nonzero(column.is_missing))
    if not count:
        return ColumnStatistics(kind, None, column.rows, 0)
    spec = choice.spec_for(name, kind)
    needs = spec.needs_of(kind)
    counted = ColumnStatistics(kind, spec, column.rows, count)
    if Need.CATEGORIES in needs:
        hasher = sample.hasher.purpose(category_purpose(choice.table, name))
        values = (
            number_texts(column)
            if isinstance(column, NumericColumn)
            else as_categorical(name, column)
        )
        categories = count_categories(values, hasher, sample.min_count)
        return replace(counted, categories=categories)
    if spec.kind == "length":
        column = text_lengths(as_categorical(name, column))
    numbers = as_numeric(name, column).values
    present = numbers[~np.isnan(numbers)]
    try:
        return replace(
            counted,
            moments=moments_of(present) if Need.MOMENTS in needs else None,
            range=_range(present) if Need.RANGE in needs else None,
            quantiles=summarise(present, sample.min_count)
            if Need.QUANTILES in needs
            else None,
        )
    except SchemaError as error:
        raise SchemaError(f"feature {name!r}: {error}") from None


def declared_statistics(
    choice: TableChoice, name: str, kind: str, width: int = 0
) -> ColumnStatistics:
    """Return the kind of a feature whose encoder needs no statistics, as statistics.

    The kind of value is "" of a column that is all NULL at its source; ``width`` is
    the length of a vector, 0 where there is none, and ignored of other kinds.
    """
    if not kind or (kind == "vector" and not width):
        return ColumnStatistics(kind, None, 0, 0, is_declared=True)
    spec = choice.spec_for(name, kind)
    width = width if kind == "vector" else 0
    return ColumnStatistics(kind, spec, 0, 0, width=width, is_declared=True)


def moments_of(present: FloatArray) -> Moments:
    """Return the moments of values, (n,), none of them missing."""
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
    """Return the statistics of the union of the shards' rows."""
    if not statistics:
        raise ValueError("no statistics to merge")
    rows = sum(shard.rows for shard in statistics)
    filled = [shard for shard in statistics if shard.spec is not None]
    if not filled:
        return replace(statistics[0], rows=rows)
    first = filled[0]
    for other in filled:
        if (other.spec, other.width) != (first.spec, first.width):
            raise SchemaError(f"{_a(first)} in one shard and {_a(other)} in another")
    return replace(
        first,
        rows=rows,
        count=sum(shard.count for shard in filled),
        moments=_merged([s.moments for s in filled], partial(reduce, merge_moments)),
        range=_merged(
            [s.range for s in filled],
            lambda spans: Range(min(s.low for s in spans), max(s.high for s in spans)),
        ),
        quantiles=_merged([s.quantiles for s in filled], merge_quantiles),
        categories=_merged([s.categories for s in filled], merge_categories),
    )


def _a(column: ColumnStatistics) -> str:
    return f"a vector of {column.width}" if column.width else f"a {column.kind}"


def _merged(
    parts: Sequence[Part | None], merge_parts: Callable[[list[Part]], Part]
) -> Part | None:
    present = [part for part in parts if part is not None]
    return merge_parts(present) if present else None


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


def merge_tables(
    shards: Sequence[Mapping[str, ColumnStatistics]],
) -> dict[str, ColumnStatistics]:
    """Merge the statistics of all columns of a table's shards."""
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
