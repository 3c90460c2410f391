"""Messages for drawing a coreset, and for solving on it at the server."""

from typing import Annotated, Final

import msgspec

from tp_flower.arrays import AnyArray
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Discloses, PartBody, Reply, Request
from tp_flower.protocol.messages import declare_action
from tp_flower.protocol.setup_messages import SealedText
from tp_flower.protocol.training_messages import MOST_SAMPLED

MOST_CLUSTERS: Final = 10_000
LARGEST_PENALTY: Final = 1e100

Clusters = Annotated[int, f.between(1, MOST_CLUSTERS)]


class MeasurePart(PartBody, frozen=True, kw_only=True):
    """The rows that a participant measures; for the label table, the kind of its label.

    Attributes:
        is_shard: whether the table has other shards.
        penalty: weight of the penalty in the scores of columns.
    """

    is_shard: bool
    penalty: Annotated[float, f.between(0, LARGEST_PENALTY)] | None = None
    label: f.Document | None = None
    encoder: SealedText | None = None
    trained: Annotated[AnyArray, f.bits("rows")]
    multiplicity: Annotated[AnyArray, f.positive_counts("trained")] | None = None
    masses: Annotated[AnyArray, f.float32("trained")] | None = None


class MeasureRequest(Request, frozen=True, kw_only=True):
    """Sum the sensitivities of the rows: to a regression's columns, or to clusters."""

    sensitivities: Annotated[str, f.one_of("regression", "clusters")]
    clusters: Clusters
    joined_rows: f.JoinedRows
    parts: dict[int, MeasurePart]

    discloses = (
        Discloses(
            "which rows of the site are joined, and {counted}",
            fields=("trained", "multiplicity", "masses", "joined_rows", "penalty"),
        ),
    )
    schedule = ("sensitivities", "clusters", "is_shard", "label", "encoder")


class MeasuredPart(PartBody, frozen=True, kw_only=True):
    """The sum of a table's sensitivities; for a shard, the statistics to sum them.

    Those are the cost of its clusters, or second moments of its columns.
    """

    total: f.NonNegative | None = None
    cost: f.NonNegative | None = None
    clusters: f.Count | None = None
    gram: Annotated[AnyArray, f.float64("columns", "columns")] | None = None


class MeasureReply(Reply, frozen=True):
    """The sensitivities of every participant."""

    parts: dict[int, MeasuredPart]

    discloses = (
        Discloses(
            "the sum of the sensitivities of a table's rows",
            fields=("total",),
            kinds=("sensitivities",),
            policy="scores",
        ),
        Discloses(
            "second moments of each shard of {sharded}, the label's too, or the cost "
            "of its clusters",
            fields=("gram", "cost", "clusters"),
            kinds=("sensitivities",),
            policy="models",
            when="sharded",
        ),
    )


class DrawPart(PartBody, frozen=True, kw_only=True):
    """The number of rows that a participant draws.

    Attributes:
        scale: factor that lowers its sensitivities.
        cost: cost of the clusters of all its table's shards.
        gram: second moments of the columns of all its table's shards.
    """

    count: Annotated[int, f.between(0, MOST_SAMPLED)]
    scale: Annotated[float, msgspec.Meta(gt=0, le=1)]
    cost: f.NonNegative | None = None
    gram: Annotated[AnyArray, f.float64("columns", "columns")] | None = None


class DrawRequest(Request, frozen=True):
    """Draw rows in proportion to the sensitivities of their joined rows."""

    parts: dict[int, DrawPart]

    discloses = (
        Discloses("how many rows to draw", fields=("count", "scale")),
        Discloses(
            "the sum of these moments or costs over the shards of {sharded}",
            fields=("cost", "gram"),
            when="sharded",
        ),
    )


class DrawnPart(PartBody, frozen=True):
    """The rows that a participant drew, by position among its trained rows."""

    drawn: Annotated[AnyArray, f.unsigned("drawn")]


class DrawReply(Reply, frozen=True):
    """The rows that were drawn."""

    parts: dict[int, DrawnPart]

    discloses = (
        Discloses(
            "which rows were drawn, the sensitive ones more often",
            fields=("drawn",),
            kinds=("drawn-rows",),
            policy="scores",
        ),
    )


class WeighPart(PartBody, frozen=True, kw_only=True):
    """A participant's position in the sum, and its rows in the sample; -1 for none."""

    place: f.Count
    rows: Annotated[AnyArray, f.nullable_positions("sample")]


class WeighRequest(Request, frozen=True, kw_only=True):
    """Sum the sensitivities behind each joined row of the sample.

    The masks of the ``summed`` participants cancel.
    """

    joined_rows: f.JoinedRows
    summed: f.Size
    parts: dict[int, WeighPart]

    discloses = (
        Discloses(
            "which rows of the site are in the sample",
            fields=("rows", "place", "summed"),
        ),
    )
    schedule = ("joined_rows",)


class WeighedPart(PartBody, frozen=True):
    """Sensitivities in fixed point, under masks that cancel in the sum."""

    masked: Annotated[AnyArray, f.ArraySpec("uint64", ("sample",))]


class WeighReply(Reply, frozen=True):
    """The masked sensitivities."""

    parts: dict[int, WeighedPart]

    discloses = (
        Discloses(
            "the sum of the tables' sensitivities per joined row of the sample",
            fields=("masked",),
            covered_by="masked",
            kinds=("masked-sensitivities",),
            policy="scores",
        ),
    )


class RowsRequest(Request, frozen=True, kw_only=True):
    """Send the sampled rows, or at most ``clusters`` centres of them."""

    seed: f.Seed
    clusters: Clusters

    discloses = (Discloses("that the sampled rows are requested"),)
    schedule = ("seed", "clusters")


class SampledRows(PartBody, frozen=True):
    """The sampled rows of a participant, or instead the centres of its clusters."""

    rows: Annotated[AnyArray, f.float32("trained", "features")] | None = None
    centres: Annotated[AnyArray, f.float64("clusters", "features")] | None = None
    nearest: Annotated[AnyArray, f.unsigned("trained")] | None = None


class RowsReply(Reply, frozen=True):
    """The sampled rows of every participant."""

    parts: dict[int, SampledRows]

    discloses = (
        Discloses(
            "the encoded features of every row in the sample, in the clear",
            fields=("rows",),
            kinds=("rows",),
            policy="rows",
            when="sends_rows",
        ),
        Discloses(
            "per shard, the centres of its sampled rows' features, and the centre "
            "nearest to each row",
            fields=("centres", "nearest"),
            kinds=("centres",),
            policy="models",
            when="sends_centres",
        ),
    )


TRAIN_MEASURE: Final = declare_action("train.measure", MeasureRequest, MeasureReply)
TRAIN_DRAW: Final = declare_action("train.draw", DrawRequest, DrawReply)
TRAIN_WEIGH: Final = declare_action("train.weigh", WeighRequest, WeighReply)
TRAIN_ROWS: Final = declare_action("train.rows", RowsRequest, RowsReply)
