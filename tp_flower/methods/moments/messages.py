"""Messages of training from second moments: counts down, padded sums up."""

from typing import Annotated, Final

from tp_flower.arrays import AnyArray
from tp_flower.methods.moments.counts import MOST_TUPLES
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import SITES, Body, Discloses, PartBody, Reply, Request
from tp_flower.protocol.messages import declare_action
from tp_flower.protocol.setup_messages import SealedText

MOST_PASSES: Final = 3
LARGEST_COUNT: Final = float(MOST_TUPLES)
LARGEST_WEIGHT: Final = (1 << 16) - 1
"""Of a row, as a whole number: of N = 10^6 joined rows, it leaves columns 13 bits after
the point."""

MOST_SHARE: Final = 1e6
"""Of a row's weight, which is rounded: one that weighs next to nothing weighs 1."""

LARGEST_SLOPE: Final = (1 << 20) - 1
"""Of a row's loss, as a whole number of either sign."""

LARGEST_NUMBER: Final = (1 << 31) - 1
MOST_COARSER: Final = 31
MOST_CLUSTERS: Final = 1 << 22
"""Each takes memory at a site before any word is made."""

SIGNIFICANT_DIGITS: Final = 6
"""Of what the label's site tells of a model: of a sum they tell 20 bits, not all."""

Bits = Annotated[int, f.between(-64, 64)]
Pass = Annotated[int, f.between(0, MOST_PASSES - 1)]
"""A subset of the joined rows: 0 is trained on, 1 validates, 2 is tested on."""
Incoming = Annotated[
    AnyArray,
    f.ArraySpec("int64", ("passes", "keys-{}", "across-{}"), 0, LARGEST_COUNT),
]
Beside = Annotated[
    AnyArray,
    f.ArraySpec("int64", ("passes", "keys-{}", "beside-{}"), 0, LARGEST_COUNT),
]
ColumnBits = Annotated[AnyArray, f.ArraySpec("int64", ("columns",), -64, 64)]


class CountedPart(PartBody, frozen=True, kw_only=True):
    """The counts that reach a table, by which its rows are weighted.

    Attributes:
        incoming: by number of a join, in how many tuples of each shard on its other
            side every key of this one is, by pass.
        beside: the same of each shard on its own side, where there are several.
        bits: of each column after the point, where the table has several shards.
        passes: of each row, a bit for every pass that it takes part in; absent if all
            rows take part in all.
    """

    encoder: SealedText | None = None
    incoming: dict[str, Incoming] = {}
    beside: dict[str, Beside] = {}
    bits: ColumnBits | None = None
    passes: Annotated[AnyArray, f.ArraySpec("uint8", ("rows",), 0, 7)] | None = None


class MomentsRequest(Request, frozen=True, kw_only=True):
    """Add up the rows by join key, under pads that joins share.

    Attributes:
        passes: that the joined rows have.
        columns: of every table, the label's and the intercept's among them.
        outputs: scores of a row, as many as the label has columns.
        bits: of the columns of every table after the point, where moments have noise.
        classes: of the label; none for numbers.
        largest_weight: of a row, by the query's weight.
        label_rows: of each shard of the label's table; by all of them together a
            shard knows which of its rows are held out at random.
        split_rows: likewise of another table in several shards whose rows are held out
            at random, those of each shard that are in joined rows.
    """

    passes: list[Pass]
    columns: dict[f.Name, f.Count]
    bits: dict[f.Name, Bits] = {}
    outputs: f.Size
    classes: list[str | f.Finite] = []
    largest_weight: f.Positive = 1.0
    label_rows: list[f.Count]
    split_rows: list[f.Count] = []
    parts: dict[int, CountedPart]

    discloses = (
        Discloses(
            "of each join key of the site, how many tuples of the tables behind the "
            "join have it, shard by shard, and which rows are held out",
            fields=("incoming", "beside", "passes"),
        ),
        Discloses(
            "how many columns each table has, and the magnitude of the label; how many "
            "rows the shards of its table have, and how many of those of a table that "
            "is held out at random are joined",
            fields=(
                *("columns", "bits", "classes", "largest_weight"),
                *("label_rows", "split_rows"),
            ),
        ),
    )
    schedule = ("encoder", "outputs")


class PaddedPart(PartBody, frozen=True, kw_only=True):
    """A table's padded sums by join key, and corrections of their products.

    Attributes:
        features: encoded columns, d.
        deviation: of the noise on a moment of the table's columns, in their unit.
        bits: of each column, label and intercept among them, after the point; sealed
            for the label's site where it reads the moments.
        sums: words, by pass, join and table: ``0-2-1`` are those of table 1 by the keys
            of join 2 in pass 0.
        products: words, by pass and two tables.
    """

    features: f.Count
    deviation: f.NonNegative = 0.0
    bits: ColumnBits | None = None
    sealed_bits: SealedText | None = None
    sums: dict[
        str, Annotated[AnyArray, f.ArraySpec("uint64", ("joined-{}", "columns-{}"))]
    ] = {}
    products: dict[
        str, Annotated[AnyArray, f.ArraySpec("uint64", ("first-{}", "second-{}"))]
    ] = {}


class MomentsReply(Reply, frozen=True, kw_only=True):
    """The padded sums of every table, and the costs of the run's releases."""

    ledger: list[f.Document]
    parts: dict[int, PaddedPart]

    discloses = (
        Discloses(
            "the second moments of the joined rows: for each two columns of the "
            "tables, the label among them, the sum of their products, over the "
            "training rows and over those held out: of single rows nothing, unless a "
            "column, a filter or a key marks one",
            fields=("sums", "products"),
            covered_by="pads",
            kinds=("second-moments",),
            policy="moments",
            when="server_reads",
        ),
        Discloses(
            "the magnitude of each encoded column, as a power of two",
            fields=("bits",),
            kinds=("second-moments",),
            policy="moments",
            when="server_reads",
        ),
        Discloses(
            "to the site of {reader}, the second moments of the joined rows: for each "
            "two columns of the tables, the label among them, the sum of their "
            "products, over the training rows and over those held out",
            fields=("sums", "products"),
            covered_by="pads",
            kinds=("site-moments",),
            policy="regressions",
            when="reader",
            reader=SITES,
        ),
        Discloses(
            "to the site of {reader}, the magnitude of each encoded column, as a power "
            "of two",
            fields=("sealed_bits",),
            covered_by="sites",
            kinds=("site-moments",),
            policy="regressions",
            when="reader",
            reader=SITES,
        ),
        Discloses(
            "how much noise there is on the moments of {private}",
            fields=("deviation",),
            when="private",
        ),
    )
    schedule = ("features", "ledger")


class PaddedBlocks(PartBody, frozen=True, kw_only=True):
    """The moments under pads of the label's site.

    Attributes:
        products: words, by pass and two tables, each with its check.
        sealed_bits: of every other part, by its number.
    """

    products: dict[
        str, Annotated[AnyArray, f.ArraySpec("uint64", ("first-{}", "second-{}"))]
    ] = {}
    sealed_bits: dict[str, SealedText] = {}


class SolveRequest(Request, frozen=True, kw_only=True):
    """As the label's site: take the pads off the moments, and solve."""

    parts: dict[int, PaddedBlocks]

    discloses = (
        Discloses(
            "to the site of {reader} alone, the second moments of the joined rows, "
            "under its own pads, and the magnitude of each column, sealed",
            fields=("products", "sealed_bits"),
            covered_by="pads",
            when="reader",
        ),
    )


class PassMetrics(Body, frozen=True, kw_only=True):
    """How well a model does on the joined rows of a pass, and a constant beside it.

    Attributes:
        loss: half the mean square of what is left of the label's columns.
        r2: absent where the label does not vary.
        constant_loss: of the mean of the training rows' labels.
        constant_r2: of it.
    """

    loss: f.NonNegative
    r2: f.Finite | None = None
    constant_loss: f.NonNegative
    constant_r2: f.Finite | None = None


class SolvedBlocks(PartBody, frozen=True, kw_only=True):
    """What the label's site has solved for, and how well the model does.

    Attributes:
        sealed: the parameters of every table's model, by its position in the query.
        metrics: by pass.
        l1: the penalty of the model, chosen by the rows that validate.
        l2: of it.
        magnitude: the power of two above the label's root mean square; absent for
            classes.
        is_optimal: whether a lasso has come to its optimum.
    """

    sealed: dict[str, SealedText] = {}
    metrics: dict[str, PassMetrics]
    l1: f.NonNegative
    l2: f.NonNegative
    magnitude: Annotated[int, f.between(-1074, 1024)] | None = None
    is_optimal: bool


class SolveReply(Reply, frozen=True, kw_only=True):
    """The sealed models of all tables, and how well they do."""

    parts: dict[int, SolvedBlocks]

    discloses = (
        Discloses(
            "half the mean square and R2, of the model and of a constant, on the "
            "training rows and on those held out, in six digits; the penalty that "
            "rows which validate have chosen; the magnitude of the label, as a power "
            "of two",
            fields=("metrics", "l1", "l2", "magnitude", "is_optimal"),
            kinds=("moment-metrics",),
            policy="regressions",
            when="reader",
        ),
        Discloses(
            "to the sites of each table, the parameters of its model",
            fields=("sealed",),
            covered_by="sites",
            when="reader",
            reader=SITES,
        ),
    )


class SolvedPart(PartBody, frozen=True, kw_only=True):
    """The parameters of a table's model, (p,).

    Sealed where the label's site has solved for them.
    """

    parameters: Annotated[AnyArray, f.float64("parameters")] | None = None
    sealed: SealedText | None = None


class SolutionRequest(Request, frozen=True, kw_only=True):
    """Take the parameters that the server has solved for, or the label's site."""

    parts: dict[int, SolvedPart]

    discloses = (
        Discloses(
            "the parameters of the model of the site's table",
            fields=("parameters",),
            when="server_reads",
        ),
        Discloses(
            "the parameters of the model of the site's table",
            fields=("sealed",),
            covered_by="sites",
            when="reader",
        ),
    )


class TakenPart(PartBody, frozen=True, kw_only=True):
    """A table whose model has taken its parameters."""

    parameters: f.Count


class SolutionReply(Reply, frozen=True, kw_only=True):
    """That the sites have taken the solution."""

    parts: dict[int, TakenPart]

    schedule = ("parameters",)


class InformationPart(PartBody, frozen=True, kw_only=True):
    """How much the joined rows behind a table weigh, once for each weighting.

    Attributes:
        incoming: by number of a join, what the tuples of each shard on its other side
            weigh that every key of this one is in.
        beside: the same of each shard on its own side, where there are several.
        bits: of each column after the point, where the table has several shards.
        weights: of the label's table, what each row weighs that is trained on, of K
            classes in K (K - 1) / 2 weightings.
        slopes: of it, how steep the loss of each of these rows is, with its sign, where
            errors are clustered; of times to an event, how much a member of a cluster
            counts.
        members: of it, of times to an event, the trained row of each of these slopes.
        clusters: of it, their clusters.
        shares: of it, how much belongs to each stretch of time, by row, of times to an
            event.
    """

    incoming: dict[str, Incoming] = {}
    beside: dict[str, Beside] = {}
    bits: ColumnBits | None = None
    weights: (
        Annotated[
            AnyArray, f.ArraySpec("uint32", ("passes", "trained"), 0, LARGEST_WEIGHT)
        ]
        | None
    ) = None
    slopes: (
        Annotated[
            AnyArray,
            f.ArraySpec("int32", ("slopes",), -LARGEST_SLOPE, LARGEST_SLOPE),
        ]
        | None
    ) = None
    members: (
        Annotated[AnyArray, f.ArraySpec("int32", ("slopes",), 0, LARGEST_NUMBER)] | None
    ) = None
    clusters: (
        Annotated[AnyArray, f.ArraySpec("int32", ("slopes",), 0, LARGEST_NUMBER)] | None
    ) = None
    shares: (
        Annotated[
            AnyArray, f.ArraySpec("float64", ("stretches", "trained"), 0, MOST_SHARE)
        ]
        | None
    ) = None


class InformationRequest(Request, frozen=True, kw_only=True):
    """After training, add up the rows by join key, weighted, under pads.

    Attributes:
        columns: of every table, the intercept's among them.
        largest_cluster: the largest sum of squared slopes of a row's clusters; 0
            without any.
        coarser: bits that columns have less in sums over pairs of rows of a cluster.
        clusters: of times to an event, how many there are; 0 of others.
    """

    columns: dict[f.Name, f.Count]
    largest_cluster: f.TableRowCount = 0
    coarser: Annotated[int, f.between(0, MOST_COARSER)] = 0
    clusters: Annotated[int, f.between(0, MOST_CLUSTERS)] = 0
    parts: dict[int, InformationPart]

    discloses = (
        Discloses(
            "of each trained row of the label's table, how much its loss bends at the "
            "model's score, of several classes between each two of their scores, and "
            "for robust errors how steep it is; of each join key of the site, the sums "
            "of these over the tuples of the tables behind the join",
            fields=("weights", "incoming", "beside"),
        ),
        Discloses(
            "for clustered errors, to the label's table how steep the loss of each "
            "trained row is at the model's score, with its sign",
            fields=("slopes",),
        ),
        Discloses(
            "of times to an event, how much of a row's hazard is in each of some "
            "stretches of time, and of their halves, in which it enters or leaves: the "
            "model's score, and when the row is at risk",
            fields=("shares", "slopes", "members", "clusters"),
        ),
        Discloses(
            "how many columns each table has",
            fields=("columns", "bits"),
        ),
        Discloses(
            "for clustered errors, how large the squared slopes of a cluster's rows "
            "add up to at most",
            fields=("largest_cluster", "coarser"),
        ),
    )


class InformationReply(Reply, frozen=True, kw_only=True):
    """The padded weighted sums of every table."""

    parts: dict[int, PaddedPart]

    discloses = (
        Discloses(
            "weighted second moments of the joined training rows: for each two columns "
            "of the tables, the sum of their products, each row weighted by how much "
            "its loss bends, of several classes once for each two of them, and for "
            "robust errors by its squared slope, for clustered "
            "ones over pairs of rows of a cluster by both slopes; of times to "
            "an event also, by stretch of time, sums of the columns over the rows at "
            "risk, and over pairs of rows that leave in the same stretch: of single "
            "rows nothing, unless a column, a key or a weight marks one",
            fields=("sums", "products"),
            covered_by="pads",
            kinds=("weighted-moments",),
            policy="covariance",
        ),
        Discloses(
            "the magnitude of each encoded column, as a power of two",
            fields=("bits",),
            kinds=("weighted-moments",),
            policy="covariance",
        ),
    )
    schedule = ("features", "deviation", "sealed_bits")


TRAIN_MOMENTS: Final = declare_action("train.moments", MomentsRequest, MomentsReply)
TRAIN_SOLVE: Final = declare_action("train.solve", SolveRequest, SolveReply)
TRAIN_SOLUTION: Final = declare_action("train.solution", SolutionRequest, SolutionReply)
TRAIN_INFORMATION: Final = declare_action(
    "train.information", InformationRequest, InformationReply
)
