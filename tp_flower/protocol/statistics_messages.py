"""Messages of the features' statistics.

Notation (sizes in shapes):
    rows          of the shard, after the query's filters
    points-N      of the quantiles of feature N
    categories-N  of feature N
"""

from typing import Annotated

import msgspec

from tp_flower.protocol.fields import (
    AnyArray,
    Body,
    Count,
    Discloses,
    Document,
    Finite,
    NonNegative,
    PartBody,
    Reply,
    Request,
    amounts,
    bits,
    hash_pairs,
    value_counts,
)


class StatisticsPart(PartBody, frozen=True, kw_only=True):
    """Which statistics of a shard are needed.

    Attributes:
        encoders: by feature, chosen or automatic.
        rows: of the label table: those that are not held out.
    """

    encoders: Document
    rows: Annotated[AnyArray, bits("rows")] | None = None


class StatisticsRequest(Request, frozen=True):
    """Sum up every feature."""

    parts: dict[int, StatisticsPart]

    discloses = (
        Discloses("which rows of {label_table} are held out", fields=("rows",)),
    )
    schedule = ("encoders",)


class FeatureStatistics(Body, frozen=True, kw_only=True):
    """One feature's statistics; of what its encoder does not need, None.

    Attributes:
        name: of the feature.
        kind: of its values; "" where only a declaration could tell.
        rows: of the shard.
        count: of them with a value.
        width: of a vector.
        mean: of the values.
        m2: sum of squared deviations from it.
        low: smallest value.
        high: largest value.
        tail: rows of the categories that are too rare to leave.
    """

    name: str
    kind: str
    rows: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] | None = None
    count: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] | None = None
    width: Count | None = None
    mean: Finite | None = None
    m2: NonNegative | None = None
    low: Finite | None = None
    high: Finite | None = None
    tail: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] | None = None


class StatisticsOfPart(PartBody, frozen=True, kw_only=True):
    """A shard's statistics.

    Attributes:
        statistics: of each feature, in the query's order.
        quantile_values: by feature's position, points in ascending order.
        quantile_weights: values that each point stands for.
        category_hashes: keyed hashes of the categories, in order.
        category_counts: rows of each.
    """

    statistics: list[FeatureStatistics]
    quantile_values: dict[str, Annotated[AnyArray, amounts("points-{}")]] = {}
    quantile_weights: dict[str, Annotated[AnyArray, value_counts("points-{}")]] = {}
    category_hashes: dict[str, Annotated[AnyArray, hash_pairs("categories-{}")]] = {}
    category_counts: dict[str, Annotated[AnyArray, value_counts("categories-{}")]] = {}


class StatisticsReply(Reply, frozen=True):
    """The shards' statistics."""

    parts: dict[int, StatisticsOfPart]

    discloses = (
        Discloses(
            "per feature: the kind of value, and the length of vectors",
            fields=("statistics",),
        ),
        Discloses(
            "per feature of {fitted}, unless its encoder was declared: count, mean, "
            "deviation; range or quantiles if it needs them",
            fields=("statistics", "quantile_values", "quantile_weights"),
            kinds=("statistics",),
            policy="statistics",
            when="fitted",
        ),
        Discloses(
            "per category: how many rows; rare ones stay (min-count)",
            fields=("category_hashes", "category_counts"),
            covered_by="hashes",
            kinds=("statistics",),
            policy="statistics",
            when="fitted",
        ),
    )
