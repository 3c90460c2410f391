"""Encoding of statistics for another shard of the table, and its checks.

A category travels as its keyed hash, never as its text. The declaration of the message
checks types, signs and shapes; this module checks that some data have such statistics.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
from msgspec.structs import replace as replace_fields

from tp_flower.arrays import AnyArray
from tp_flower.errors import SchemaError
from tp_flower.features.choice import TableChoice
from tp_flower.features.encodings import CategoryEncoding, FeatureEncoding
from tp_flower.features.spec import KINDS, Need
from tp_flower.features.statistics import (
    MOST_CATEGORIES,
    CategoryStatistics,
    ColumnStatistics,
    declared_statistics,
)
from tp_flower.keyed_hash import hex_texts
from tp_flower.protocol.setup_messages import (
    MOST_WIDTH,
    Detail,
    FeatureStatistics,
    FeatureSummary,
    StatisticsOfPart,
)

Item = TypeVar("Item")


def to_wire(statistics: Mapping[str, ColumnStatistics]) -> StatisticsOfPart:
    """Return a shard's statistics, by feature, as its site sends them."""
    columns = {str(index): column for index, column in enumerate(statistics.values())}
    counts = {j: c.categories for j, c in columns.items() if Need.CATEGORIES in c.needs}
    return StatisticsOfPart(
        statistics=[_feature(name, column) for name, column in statistics.items()],
        category_hashes={key: summary.hashes for key, summary in counts.items()},
        category_counts={key: summary.counts for key, summary in counts.items()},
        category_ties={key: summary.ties for key, summary in counts.items()},
    )


STEP: Final = 2  # percent


def percent(part: int, of: int, detail: Detail) -> int:
    """Return a share in percent, rounded up, or to the nearest step.

    >>> [percent(part, 500, Detail.PERCENT) for part in (0, 1, 5, 14)]
    [0, 1, 1, 3]
    >>> [percent(part, 500, Detail.STEPS) for part in (0, 1, 5, 14)]
    [0, 0, 2, 2]
    """
    if detail is Detail.PERCENT:
        return -(-100 * part // of)
    return STEP * ((200 * part + STEP * of) // (2 * STEP * of))


def summary_of(
    name: str,
    column: ColumnStatistics,
    encodings: Sequence[FeatureEncoding],
    detail: Detail,
) -> FeatureSummary:
    """Return what leaves the sites about a feature that is fitted to rows.

    How many categories there are is counted: the number of encoded columns says as
    much.
    """
    spec = column.spec
    rows = max(column.rows, 1)
    missing = None
    if not column.is_declared:
        missing = percent(rows - column.count, rows, detail)
    summary = FeatureSummary(
        column=name,
        type=column.kind,
        encoder="" if spec is None else str(spec),
        missing=missing,
    )
    listed = [
        x for x in encodings if isinstance(x, CategoryEncoding) and x.name == name
    ]
    if not listed or spec is None:
        return summary
    stats = column.categories
    if spec.counts_missing:
        stats = stats.with_missing(column.rows - column.count)
    is_kept = np.isin(hex_texts(stats.hashes).to_pylist(), listed[0].hashes)
    total = column.rows if spec.counts_missing else column.count
    other = percent(int(total - stats.counts[is_kept].sum()), rows, detail)
    counts = {"categories": len(is_kept), "listed": int(np.count_nonzero(is_kept))}
    return replace_fields(summary, other=other, **counts)


def _feature(name: str, column: ColumnStatistics) -> FeatureStatistics:
    """Return the statistics of a column that its encoder needs, as they travel."""
    fields: dict[str, Any] = {}
    if not column.is_declared:
        fields |= {"rows": column.rows, "count": column.count}
    if column.kind == "vector":
        fields["width"] = column.width
    if Need.MOMENTS in column.needs:
        fields |= {"mean": column.mean, "m2": column.m2}
    if Need.RANGE in column.needs:
        fields |= {"low": column.low, "high": column.high}
    if Need.CATEGORIES in column.needs:
        fields["tail"] = column.categories.tail
    return FeatureStatistics(name=name, kind=column.kind, **fields)


def from_wire(
    sent: StatisticsOfPart, choice: TableChoice, rows: int
) -> dict[str, ColumnStatistics]:
    """Return a shard's statistics by feature, in the query's order.

    A SchemaError says that none of at most ``rows`` joined rows have such statistics.
    """
    names = list(choice.specs)
    reported = sent.statistics
    if len(reported) != len(names):
        raise SchemaError(
            f"statistics of {len(reported)} features, expected {len(names)}"
        )
    columns = {}
    for index, (name, feature) in enumerate(zip(names, reported, strict=True)):
        if feature.name != name:
            raise SchemaError(f"statistics of feature {name!r} are not in place")
        try:
            column = _counted_column(feature, choice, rows)
            column = _read_numbers(column, feature)
            columns[name] = _read_categories(column, feature, sent, str(index))
        except ImpossibleError as error:
            raise SchemaError(f"statistics of feature {name!r}: {error}") from None
    return columns


class ImpossibleError(ValueError):
    """A statistic that no data can have."""


def _counted_column(
    feature: FeatureStatistics, choice: TableChoice, rows: int
) -> ColumnStatistics:
    """Return the statistics of a column without categories and numbers."""
    name = feature.name
    kind = feature.kind
    if kind not in KINDS and not (kind == "" and choice.is_declared(name, "")):
        raise ImpossibleError(f"kind must be one of {', '.join(KINDS)}")
    if choice.is_declared(name, kind):
        width = 0
        if kind == "vector":
            width = _count(feature.width, "width", MOST_WIDTH)
        return declared_statistics(choice, name, kind, width)
    feature_rows = _count(feature.rows, "rows", rows)
    count = _count(feature.count, "count", feature_rows)
    spec = choice.spec_for(name, kind) if count else None
    return ColumnStatistics(kind, spec, feature_rows, count)


def _read_numbers(
    column: ColumnStatistics, feature: FeatureStatistics
) -> ColumnStatistics:
    """Return the column with the moments and the range of another shard."""
    if Need.MOMENTS in column.needs:
        mean = _present(feature.mean, "mean")
        m2 = _present(feature.m2, "m2")
        column = replace(column, mean=mean, m2=m2)
    if Need.RANGE in column.needs:
        low = _present(feature.low, "low")
        high = _present(feature.high, "high")
        if not 0 <= high - low < math.inf:
            raise ImpossibleError("low and high do not span a range")
        column = replace(column, low=low, high=high)
    return column


def _read_categories(
    column: ColumnStatistics,
    feature: FeatureStatistics,
    sent: StatisticsOfPart,
    key: str,
) -> ColumnStatistics:
    """Return the column with another shard's categories; refuse impossible ones."""
    if Need.CATEGORIES not in column.needs:
        return column
    hashes = _array(sent.category_hashes.get(key), "hashes")
    counts = _array(sent.category_counts.get(key), "counts")
    ties = _array(sent.category_ties.get(key), "ties")
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    if (hashes[1:] == hashes[:-1]).all(axis=1).any() or (np.diff(order) < 0).any():
        raise ImpossibleError("categories are not distinct and in order")
    # each is checked first, so that the sum cannot overflow
    if (counts > column.count).any() or counts.sum() > column.count:
        raise ImpossibleError(f"counts add up to more than {column.count} values")
    tail = _count(feature.tail, "tail", column.count)
    if (counts <= tail).any():
        raise ImpossibleError(f"categories have no more than tail = {tail} rows")
    return replace(
        column, categories=CategoryStatistics(hashes, counts, counts, tail, ties)
    )


def _array(array: AnyArray | None, name: str) -> AnyArray:
    """Return an array; ImpossibleError if it is missing or too long."""
    if array is None:
        raise ImpossibleError(f"array {name} is missing or malformed")
    if len(array) > MOST_CATEGORIES:
        raise ImpossibleError(
            f"{len(array)} {name}, at most {MOST_CATEGORIES} are allowed"
        )
    return array


def _present(value: Item | None, name: str) -> Item:
    if value is None:
        raise ImpossibleError(f"it has no {name}")
    return value


def _count(value: int | None, name: str, most: int) -> int:
    if value is None or value > most:
        raise ImpossibleError(f"{name} must be a whole number from 0 to {most}")
    return value
