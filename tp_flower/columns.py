"""Feature columns of a shard, and statistics of them that merge across shards.

A table is encoded with the statistics of *all* its rows, wherever they are: each shard
computes :func:`column_statistics`, and their :func:`merge` is exact.

Notation
    n        rows of the shard
    mean, m2 mean, and sum of squared deviations from it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from tp_flower.errors import SchemaError

FloatArray = npt.NDArray[np.float64]
CodeArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class NumericColumn:
    """A feature with numbers.

    Attributes:
        values: float64 (n,), NaN where missing.
    """

    values: FloatArray

    @property
    def rows(self) -> int:
        """Number of rows, n."""
        return len(self.values)


@dataclass(frozen=True, eq=False)
class CategoricalColumn:
    """A feature with text values.

    Attributes:
        codes: int32 (n,), position in ``categories``, -1 where missing.
        categories: the distinct values of this shard, sorted.
    """

    codes: CodeArray
    categories: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Number of rows, n."""
        return len(self.codes)


FeatureColumn = NumericColumn | CategoricalColumn


@dataclass(frozen=True)
class NumericStatistics:
    """Count, mean and sum of squared deviations of the values that are not missing."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def scale(self) -> float:
        """Population standard deviation; 0 for a constant or empty column."""
        return float(np.sqrt(self.m2 / self.count)) if self.count else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; floats survive exactly."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}


@dataclass(frozen=True)
class CategoryStatistics:
    """How often each category occurs; missing values are not counted."""

    counts: Mapping[str, int]

    @property
    def count(self) -> int:
        """Number of values that are not missing."""
        return sum(self.counts.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"counts": dict(self.counts)}


ColumnStatistics = NumericStatistics | CategoryStatistics


def statistics_from_json(data: Mapping[str, Any]) -> ColumnStatistics:
    """Rebuild a column's statistics from ``to_json``.

    >>> statistics_from_json({"counts": {"a": 2}})
    CategoryStatistics(counts={'a': 2})
    """
    if "counts" in data:
        counts = {str(name): int(count) for name, count in data["counts"].items()}
        return CategoryStatistics(counts)
    return NumericStatistics(int(data["count"]), float(data["mean"]), float(data["m2"]))


def column_statistics(
    column: FeatureColumn, rows: BoolArray | None = None
) -> ColumnStatistics:
    """Return the statistics of a column's rows.

    Args:
        column: n rows.
        rows: bool (n,), the rows that count; None for all.

    Raises:
        SchemaError: the values are too large for their squares to be summed.
    """
    if isinstance(column, NumericColumn):
        return _numeric_statistics(
            column.values if rows is None else column.values[rows]
        )
    codes = column.codes if rows is None else column.codes[rows]
    counts = np.bincount(codes[codes >= 0], minlength=len(column.categories))
    pairs = zip(column.categories, counts.tolist(), strict=True)
    return CategoryStatistics({name: count for name, count in pairs if count})


def _numeric_statistics(values: FloatArray) -> NumericStatistics:
    present = values[~np.isnan(values)]
    if not present.size:
        return NumericStatistics()
    # Deviations from the first value: a constant column has m2 == 0 and its exact
    # value as mean, in every shard, so that it is recognised after any merge.
    first = float(present[0])
    with np.errstate(over="ignore", invalid="ignore"):
        deviations = present - first
        shift = float(deviations.mean())
        deviations -= shift
        m2 = float(deviations @ deviations)
    if not np.isfinite(m2):
        raise SchemaError(
            f"values up to {np.abs(present).max():.3g} are too large to standardise"
        )
    return NumericStatistics(int(present.size), first + shift, m2)


def merge(statistics: Sequence[ColumnStatistics]) -> ColumnStatistics:
    """Return the statistics of the union of the shards' rows.

    A column without values has no kind: what one shard says about it fits any other.

    >>> merge([NumericStatistics(1, 1.0, 0.0), NumericStatistics(1, 3.0, 0.0)])
    NumericStatistics(count=2, mean=2.0, m2=2.0)

    Raises:
        ValueError: there is nothing to merge.
        SchemaError: the column is numeric in one shard and categorical in another.

    Reference:
        Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for
        computing sample variances, 1979, Eq. 2.1.
    """
    if not statistics:
        raise ValueError("no statistics to merge")
    return reduce(_merge_two, statistics)


def _merge_two(a: ColumnStatistics, b: ColumnStatistics) -> ColumnStatistics:
    if not a.count or not b.count:
        return a if a.count else b
    if isinstance(a, NumericStatistics) and isinstance(b, NumericStatistics):
        return _merge_numeric(a, b)
    if isinstance(a, CategoryStatistics) and isinstance(b, CategoryStatistics):
        counts = dict(a.counts)
        for name, count in b.counts.items():
            counts[name] = counts.get(name, 0) + count
        return CategoryStatistics(counts)
    raise SchemaError("a column is numeric in one shard and categorical in another")


def _merge_numeric(a: NumericStatistics, b: NumericStatistics) -> NumericStatistics:
    count = a.count + b.count
    delta = b.mean - a.mean
    return NumericStatistics(
        count,
        a.mean + delta * (b.count / count),
        a.m2 + b.m2 + delta * delta * (a.count * (b.count / count)),
    )


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
            raise SchemaError(f"feature {name!r}: {error}") from error
    for shard in shards:
        if extra := shard.keys() - merged.keys():
            raise SchemaError(f"feature {min(extra)!r} is missing in a shard")
    return merged
