"""The messages of training by boosting, after ``prepare``."""

from typing import Annotated, Final

import msgspec

from tp_flower.arrays import AnyArray
from tp_flower.joins.pairs import MOST_REGIONS
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Discloses, PartBody, Reply, Request
from tp_flower.protocol.messages import declare_action
from tp_flower.protocol.setup_messages import SealedText
from tp_flower.protocol.training_messages import SCORES_DISCLOSED

TREES: Final = "trees"  # the kind of models
LOCAL, BAGGED, POOLED = "local", "bagged", "pooled"  # how the shards of a table boost
SCORES_PER_EPOCH: Final = 2  # of a shard's own trees, and of those of all
# joined rows: where no rows validate, it keeps to its own trees
LARGE_SHARD: Final = 50_000
SHARED_TREES: Final = 3
FEWEST_TREES: Final = 8
"""All trees of shards that average them, over one's own; of each shard, at least."""


class Growth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How trees are grown: how many, of how many leaves, and by which rate.

    A leaf has at least ``least_rows`` joined rows.
    """

    trees: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    leaves: Annotated[int, msgspec.Meta(ge=2, le=1 << 16)]
    rate: Annotated[float, msgspec.Meta(gt=0, le=1)]
    least_rows: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)] = 0

    def with_leaves(self, leaves: int) -> "Growth":
        """Return the growth of trees of another number of leaves."""
        return msgspec.structs.replace(self, leaves=leaves)

    def of_shards(self, shards: int) -> "Growth":
        """Return the growth of shards that average trees: fewer each, and bolder ones.

        >>> growth = Growth(trees=30, leaves=127, rate=0.1, least_rows=20)
        >>> [growth.of_shards(n).trees for n in (2, 5, 50)]
        [30, 18, 8]
        """
        trees = min(max(SHARED_TREES * self.trees // shards, FEWEST_TREES), self.trees)
        rate = 1.0 - (1.0 - self.rate) ** (self.trees / trees)
        return msgspec.structs.replace(self, trees=trees, rate=rate)


class BoostStep(PartBody, frozen=True, kw_only=True):
    """The loss's first two derivatives, summed over each trained row's joined rows.

    ``hessian`` is absent where it is the row's multiplicity, as of a squared loss.
    """

    gradient: Annotated[AnyArray, f.float32("trained", "outputs")]
    hessian: Annotated[AnyArray, f.float32("trained", "outputs")] | None = None


class BoostRequest(Request, frozen=True, kw_only=True):
    """One round of boosting: add the last trees times a length, then grow more.

    Attributes:
        is_linear: whether parts fit a linear model, which goes before trees.
        is_shrunk: whether their rows choose its penalty.
        lengths: by table, none before the first trees.
        parts: a participant that is not in them grows no more.
        is_bagged: whether the last trees are the average of the shards', where there
            are several.
        is_best: whether the model after the step is the best so far, to be saved.
        sends_scores: whether what each shard's own trees add comes up, masked.
        bagged: the tables whose shards seal their trees for each other.
        pooled: those of them whose shards seal sums by column instead, and grow no
            trees alone.
        scores_number: of the scores that answer it, in the run: it names their masks.
    """

    growth: Growth
    is_linear: bool = False
    is_shrunk: bool = False
    lengths: dict[str, f.NonNegative] = {}
    is_bagged: bool = False
    is_best: bool = False
    sends_scores: bool = True
    bagged: list[f.Name] = []
    pooled: list[f.Name] = []
    scores_number: f.Count
    parts: dict[int, BoostStep]

    discloses = (
        Discloses(
            "the loss's first two derivatives, summed per row of the site, which tell "
            "the label of a row in one joined row",
            fields=("gradient", "hessian"),
            covered_by="messages",
        ),
    )
    schedule = (
        *("growth", "is_linear", "is_shrunk", "lengths", "is_bagged", "is_best"),
        *("sends_scores", "bagged", "pooled", "scores_number"),
    )


class BoostUpdate(PartBody, frozen=True, kw_only=True):
    """The values of a participant's new trees, which add to its rows' scores.

    ``sealed`` are the trees, or sums by column, which only the table's other shards can
    open; None if its policy does not let models leave.
    """

    scores: Annotated[AnyArray, f.score_words("scored", "outputs")] | None = None
    sealed: SealedText | None = None


class BoostReply(Reply, frozen=True):
    """The values of every participant's new trees, or the trees, or both."""

    parts: dict[int, BoostUpdate]

    discloses = (
        SCORES_DISCLOSED._replace(
            carries="{scored}, of new trees alone", when="scores_own_trees"
        ),
        Discloses(
            "to the other shards of {bagged}: the trees that a shard has grown, whose "
            "splits lie between values of its rows, and whose leaves have sums of the "
            "derivatives over at least min-rows-per-leaf joined rows, which may be of "
            "one row; or such sums over intervals and categories of each column, with "
            "the interval's mean (lou = pooled)",
            fields=("sealed",),
            covered_by="shards",
            kinds=("trees",),
            policy="models",
            when="bagged",
            reader=f.SITES,
        ),
    )


class BagPart(PartBody, frozen=True):
    """The sealed trees or sums of all the table's shards, by number.

    With ``is_own`` there are none: the part stays with its trees.
    """

    is_own: bool
    trees: dict[str, Annotated[AnyArray, f.sealed("sealed-{}")]] = {}


class BagRequest(Request, frozen=True, kw_only=True):
    """Average the trees that the shards just grew (Breiman 1996), or grow pooled ones.

    Attributes:
        pooled: the tables that grow trees on the sums of all their shards, by
            ``growth``.
    """

    growth: Growth
    scores_number: f.Count
    pooled: list[f.Name] = []
    parts: dict[int, BagPart]

    # the message in which the trees were sealed discloses them
    schedule = ("scores_number", "growth", "pooled", "is_own", "trees")


class BagUpdate(PartBody, frozen=True):
    """The values of a table's averaged or pooled trees, of a participant's rows."""

    scores: Annotated[AnyArray, f.score_words("scored", "outputs")]


class BagReply(Reply, frozen=True):
    """The values of every table's averaged trees."""

    parts: dict[int, BagUpdate]

    discloses = (
        SCORES_DISCLOSED._replace(
            carries="{scored}, of the trees that the shards have averaged or pooled",
            when="bagged",
        ),
    )


class RegionsRequest(Request, frozen=True, kw_only=True):
    """Divide rows into regions, by one tree on the loss's derivatives.

    Attributes:
        growth: of the tree, whose leaves become regions; a policy may allow fewer.
    """

    growth: Growth
    parts: dict[int, BoostStep]

    discloses = (
        Discloses(
            "the loss's first two derivatives, summed per row of the site, as for "
            "trees",
            fields=("gradient", "hessian"),
            covered_by="messages",
            when="divides",
        ),
    )
    schedule = ("growth",)


class RegionsUpdate(PartBody, frozen=True, kw_only=True):
    """The region of each row that takes part, of so many; none where there is one."""

    count: Annotated[int, f.between(1, MOST_REGIONS)]
    regions: Annotated[AnyArray, f.regions("total")] | None = None


class RegionsReply(Reply, frozen=True):
    """The regions of the rows of some tables."""

    parts: dict[int, RegionsUpdate]

    discloses = (
        Discloses(
            "in which region each row of {divides} is, of as many as its policy allows "
            "at most: the leaf of one tree on its features, of at least min-rows rows",
            fields=("regions",),
            policy="regions",
            kinds=("regions",),
            when="divides",
        ),
    )
    schedule = ("count",)
    is_complete = False


class PairsPart(PartBody, frozen=True, kw_only=True):
    """The pairs of rows and regions that take the place of a participant's rows.

    Those in joined rows to train on come first; they have the counts of joined rows,
    or their weights, as in ``prepare``.
    """

    rows: Annotated[AnyArray, f.positions("pairs")]
    regions: Annotated[AnyArray, f.regions("pairs")]
    tested: Annotated[AnyArray, f.bits("pairs")]
    multiplicity: Annotated[AnyArray, f.positive_counts("trained_pairs")] | None = None
    masses: Annotated[AnyArray, f.float32("trained_pairs")] | None = None


class PairsRequest(Request, frozen=True, kw_only=True):
    """Take pairs of rows and regions for the rows.

    Attributes:
        table: the one with the regions.
    """

    table: f.Name
    parts: dict[int, PairsPart]

    discloses = (
        Discloses(
            "in which regions of one of {divides} the joined rows of each row of the "
            "site are, and in how many",
            fields=("rows", "regions", "tested", "multiplicity", "masses"),
            when="divides",
        ),
    )
    schedule = ("table",)


class PairedPart(PartBody, frozen=True):
    """How many pairs a participant has taken for its rows."""

    pairs: f.Count


class PairsReply(Reply, frozen=True):
    """That the sites have taken the pairs."""

    parts: dict[int, PairedPart]

    schedule = ("pairs",)


TRAIN_REGIONS: Final = declare_action("train.regions", RegionsRequest, RegionsReply)
TRAIN_PAIRS: Final = declare_action("train.pairs", PairsRequest, PairsReply)
TRAIN_BOOST: Final = declare_action("train.boost", BoostRequest, BoostReply)
TRAIN_BAG: Final = declare_action("train.bag", BagRequest, BagReply)
