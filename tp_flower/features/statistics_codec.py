"""Statistics on their way from a site to the server, and the checks of the server.

A category travels as its keyed hash, never as its text. The declaration of the message
checks types, signs and shapes; here it is checked that some data have such statistics.
"""

import math
from collections.abc import Mapping
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import AnyArray
from tp_flower.errors import SchemaError
from tp_flower.features.choice import TableChoice
from tp_flower.features.spec import KINDS, Need
from tp_flower.features.statistics import (
    MOST_CATEGORIES,
    MOST_POINTS,
    CategoryStatistics,
    ColumnStatistics,
    Moments,
    QuantileSummary,
    Range,
    declared_statistics,
    rank_error_of,
)
from tp_flower.protocol.setup_messages import FeatureStatistics, StatisticsOfPart

Item = TypeVar("Item")

MOST_WIDTH: Final = 1 << 20  # of a vector


def to_wire(statistics: Mapping[str, ColumnStatistics]) -> StatisticsOfPart:
    """Return a shard's statistics, by feature, as its site sends them."""
    columns = list(statistics.values())
    quantiles = {str(j): c.quantiles for j, c in enumerate(columns) if c.quantiles}
    categories = {str(j): c.categories for j, c in enumerate(columns) if c.categories}
    features = [
        FeatureStatistics(
            name=name,
            kind=column.kind,
            rows=None if column.is_declared else column.rows,
            count=None if column.is_declared else column.count,
            width=column.width if column.kind == "vector" else None,
            mean=None if column.moments is None else column.moments.mean,
            m2=None if column.moments is None else column.moments.m2,
            low=None if column.range is None else column.range.low,
            high=None if column.range is None else column.range.high,
            tail=None if column.categories is None else column.categories.tail,
        )
        for name, column in statistics.items()
    ]
    return StatisticsOfPart(
        statistics=features,
        quantile_values={key: q.values for key, q in quantiles.items()},
        quantile_weights={key: q.weights for key, q in quantiles.items()},
        category_hashes={key: c.hashes for key, c in categories.items()},
        category_counts={key: c.counts for key, c in categories.items()},
    )


def from_wire(
    sent: StatisticsOfPart, choice: TableChoice, rows: int
) -> dict[str, ColumnStatistics]:
    """Return a shard's statistics by feature, in the query's order.

    ``choice`` has the encoders that they were asked for; ``rows`` is the most rows that
    they can be of.

    Raises:
        SchemaError: no data of these features and so many rows have them; names the
            feature.
    """
    names, reported = list(choice.specs), sent.statistics
    if len(reported) != len(names):
        raise SchemaError(
            f"statistics of {len(reported)} features, not of {len(names)}"
        )
    columns = {}
    for number, (name, feature) in enumerate(zip(names, reported, strict=True)):
        if feature.name != name:
            raise SchemaError(f"no statistics of feature {name!r} in its place")
        try:
            columns[name] = _Reader(sent, feature, str(number)).read(choice, rows)
        except ImpossibleError as error:
            raise SchemaError(f"statistics of feature {name!r}: {error}") from None
    return columns


class ImpossibleError(ValueError):
    """A statistic that no data have."""


class _Reader:
    """Reads the statistics of one feature, whose arrays have the key ``key``."""

    def __init__(
        self, sent: StatisticsOfPart, feature: FeatureStatistics, key: str
    ) -> None:
        self._sent, self._feature, self._key = sent, feature, key

    def read(self, choice: TableChoice, rows: int) -> ColumnStatistics:
        """Return the statistics, or raise ImpossibleError."""
        feature, name, kind = self._feature, self._feature.name, self._feature.kind
        if kind not in KINDS and not (kind == "" and choice.is_declared(name, "")):
            raise ImpossibleError(f"kind must be one of {', '.join(KINDS)}")
        if choice.is_declared(name, kind):
            is_vector = kind == "vector"
            width = _count(feature.width, "width", MOST_WIDTH) if is_vector else 0
            return declared_statistics(choice, name, kind, width)
        feature_rows = _count(feature.rows, "rows", rows)
        count = _count(feature.count, "count", feature_rows)
        if not count:
            return ColumnStatistics(kind, None, feature_rows, 0)
        spec = choice.spec_for(name, kind)
        needs = spec.needs_of(kind)
        return ColumnStatistics(
            kind,
            spec,
            feature_rows,
            count,
            moments=self._moments(count) if Need.MOMENTS in needs else None,
            range=self._range() if Need.RANGE in needs else None,
            quantiles=self._quantiles(count) if Need.QUANTILES in needs else None,
            categories=self._categories(count) if Need.CATEGORIES in needs else None,
        )

    def _moments(self, count: int) -> Moments:
        m2 = _present(self._feature.m2, "m2")
        return Moments(count, _present(self._feature.mean, "mean"), m2)

    def _range(self) -> Range:
        low = _present(self._feature.low, "low")
        high = _present(self._feature.high, "high")
        if not 0 <= high - low < math.inf:
            raise ImpossibleError("low and high do not span a range")
        return Range(low, high)

    def _quantiles(self, count: int) -> QuantileSummary:
        values = self._array(self._sent.quantile_values, "points", MOST_POINTS)
        weights = self._array(self._sent.quantile_weights, "weights", MOST_POINTS)
        if (np.diff(values) < 0).any():
            raise ImpossibleError("quantile points without order")
        _check_counts(weights, count)
        return QuantileSummary(values, weights, rank_error_of(weights, count))

    def _categories(self, count: int) -> CategoryStatistics:
        hashes = self._array(self._sent.category_hashes, "hashes", MOST_CATEGORIES)
        counts = self._array(self._sent.category_counts, "counts", MOST_CATEGORIES)
        first, second = hashes[:, 0], hashes[:, 1]
        is_after = (first[1:] > first[:-1]) | (
            (first[1:] == first[:-1]) & (second[1:] > second[:-1])
        )
        if not is_after.all():
            raise ImpossibleError("categories that are not distinct and in order")
        _check_counts(counts, count)
        tail = _count(self._feature.tail, "tail", count)
        if (counts <= tail).any():
            raise ImpossibleError(f"categories of no more than tail = {tail} rows")
        return CategoryStatistics(hashes, counts, counts, tail)

    def _array(self, family: Mapping[str, AnyArray], name: str, most: int) -> AnyArray:
        array = family.get(self._key)
        if array is None:
            raise ImpossibleError(f"no usable array of {name}")
        if len(array) > most:
            raise ImpossibleError(f"{len(array)} {name}, more than {most}")
        return array


def _present(value: Item | None, name: str) -> Item:
    if value is None:
        raise ImpossibleError(f"it has no {name}")
    return value


def _count(value: int | None, name: str, most: int) -> int:
    if value is None or value > most:
        raise ImpossibleError(f"{name} must be a whole number from 0 to {most}")
    return value


def _check_counts(counts: npt.NDArray[np.int64], total: int) -> None:
    # each is checked first, so that the sum cannot overflow
    if (counts > total).any() or counts.sum() > total:
        raise ImpossibleError(f"counts that are not of {total} values")
