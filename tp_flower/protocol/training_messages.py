"""Messages of training over joins that are no method's own.

``prepare`` begins training, and ``consensus`` sets the parameters of a table; the
messages of a method are in its room, and may have steps and shares as they are here.
"""

import math
from enum import StrEnum
from typing import Annotated, Final, Self

import msgspec

from tp_flower.arrays import FEWEST_BINS, MOST_BINS, AnyArray
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Body, Discloses, PartBody, Reply, Request
from tp_flower.protocol.rank_messages import Cover
from tp_flower.protocol.setup_messages import Number, PublicKey, SealedText

Clip = Annotated[float, f.between(1e-12, 1e12)]
Delta = Annotated[float, msgspec.Meta(gt=0, le=math.nextafter(1.0, 0.0))]
MOST_STEPS: Final = 1_000_000
MOST_SAMPLED: Final = 1 << 24  # joined rows of a coreset
MOST_FACTORS: Final = 128  # of a key
MOST_FITS: Final = 100_000  # of a search
Steps = Annotated[int, f.between(0, MOST_STEPS)]
LEAST_SCALE: Final = 1 / 1e30
Scale = Annotated[float, f.between(LEAST_SCALE, 1e30)]
"""Units of noise, bounded so that all arithmetic with them stays finite."""


class Update(StrEnum):
    """How the shards of one table are trained together (learning over unions).

    LOCAL: the shard is the whole table. GRAM: the sites' sufficient statistics are
    summed, and solved. CONSENSUS: consensus ADMM. SUM: the sites' gradients are summed
    (SGD). GIVEN: the server solves over sampled rows, even for whole tables.
    """

    LOCAL = "local"
    GRAM = "gram"
    CONSENSUS = "consensus"
    SUM = "sum"
    GIVEN = "given"


class PrivacyTerms(Body, frozen=True, kw_only=True):
    """The mechanisms that a run requests for models and scores.

    The fields have the names of the run's privacy settings.
    """

    features: Annotated[str, f.one_of(f.CLEAR, f.DP_SGD, f.NOISY_STATISTICS)]
    epsilon: f.Positive
    delta: Delta
    clip: Clip
    noise_multiplier: f.NonNegative
    sample_rate: f.Share
    local_steps: Steps
    target_clip: Clip
    predictions: f.NonNegative
    prediction_clip: Clip

    @classmethod
    def of(cls, settings: object) -> Self:
        """Return the terms that are among the fields of a run's privacy settings."""
        return msgspec.convert(settings, cls, from_attributes=True)

    @property
    def covers_features(self) -> bool:
        """Whether models (gradients, statistics, parameters) are private."""
        return self.features != f.CLEAR

    @property
    def covers_predictions(self) -> bool:
        """Whether scores leave with noise only."""
        return self.predictions > 0

    @property
    def is_private(self) -> bool:
        """Whether either is."""
        return self.covers_features or self.covers_predictions


class Masking(Body, frozen=True):
    """The fixed point of masked scores, see :class:`FixedPoint`."""

    bits: Annotated[int, f.between(-128, 128)]
    tables: Annotated[int, f.between(1, 1 << 16)]


class Union(Body, frozen=True, kw_only=True):
    """The shards of a table whose arrays are summed.

    Attributes:
        group: that shares the key of their seal; absent if shares leave in the clear.
        shards: the public key of each shard's site in this run, by participant; absent
            if all shards take part that were proposed, of which every site knows it.
    """

    group: Annotated[str, msgspec.Meta(pattern=r"^table-[0-9]{1,4}\Z")] | None = None
    shards: dict[Number, PublicKey] | None = None


class Outline(Body, frozen=True, kw_only=True):
    """The announced schedule of a run, from which sites plan their releases.

    Attributes:
        sends: the form in which sampled rows leave, if the server solves.
    """

    strategy: f.Strategy
    epochs: Steps
    sends: Annotated[str, f.one_of("rows", "centres")] | None = None


UNMATCHED_DISCLOSED: Final = Discloses(
    "which own rows a LEFT JOIN finds no partner for",
    fields=("unmatched",),
    when="masks_outer",
)


class PreparePart(PartBody, frozen=True, kw_only=True):
    """The rows, the encoder and the model of a participant.

    Rows are selected by masks, each row of the table once.

    Attributes:
        update: how the table's shards train together.
        label_scale: size of the loss's derivatives.
        mean_multiplicity: mean number of joined rows of a trained row.
        batch_start: in SGD, where each batch starts in ``batch_rows``.
        batch_rows: in SGD, the distinct trained rows of every batch.
        union: of the table's shards; absent if nothing is summed.
        unmatched: by join, the rows that a LEFT JOIN finds no partner for.
        cover: the statements of all shards of the run, where a policy asks for them.
    """

    model: f.Document
    update: Update
    joined_rows: f.JoinedRows
    l2: f.NonNegative
    device: f.Device
    label_scale: Scale
    mean_multiplicity: Annotated[float, f.between(0, 1e30)]
    encoder: SealedText | None = None
    trained: Annotated[AnyArray, f.bits("rows")]
    tested: Annotated[AnyArray, f.bits("rows")]
    multiplicity: Annotated[AnyArray, f.positive_counts("trained")] | None = None
    masses: Annotated[AnyArray, f.float32("trained")] | None = None
    batch_start: Annotated[AnyArray, f.positions("batches+1")] | None = None
    batch_rows: Annotated[AnyArray, f.positions("batch_rows")] | None = None
    union: Union | None = None
    unmatched: dict[str, Annotated[AnyArray, f.bits("rows")]] = {}
    cover: Cover = {}


class PrepareRequest(Request, frozen=True, kw_only=True):
    """Encode the features, make the models, plan the releases.

    Attributes:
        masking: of the run's scores; None if they leave in the clear.
        sends_scores: whether scores of untrained models are needed, of all tables.
    """

    privacy: PrivacyTerms
    outline: Outline
    masking: Masking | None = None
    sends_scores: bool = False
    parts: dict[int, PreparePart]

    discloses = (
        Discloses(
            "{alignment}",
            fields=(
                *("trained", "tested", "multiplicity", "masses", "mean_multiplicity"),
                *("label_scale", "joined_rows"),
            ),
        ),
        Discloses(
            "which rows of the site each batch has, by number",
            fields=("batch_start", "batch_rows"),
            when="has_batches",
        ),
        UNMATCHED_DISCLOSED,
    )
    schedule = (
        *("privacy", "outline", "masking", "sends_scores"),
        *("model", "update", "l2", "device", "union", "encoder", "cover"),
    )


def share_disclosure(when: str, carries: str, *kinds: str) -> Discloses:
    """Declare the shares of a sum, which the server adds and may be unable to read."""
    return Discloses(
        f"{{shares_of}} {carries}",
        fields=("share",),
        covered_by="unions",
        kinds=kinds,
        policy="models",
        when=when,
    )


def sum_disclosure(when: str, carries: str) -> Discloses:
    """Declare a sum of shares, which the shards of the table use."""
    return Discloses(
        f"the sum over the shards: {carries}",
        fields=("sum",),
        covered_by="models",
        when=when,
    )


class PreparedPart(PartBody, frozen=True, kw_only=True):
    """A participant's start; ``scores`` are those of an untrained non-linear model.

    Attributes:
        mean_curvature: mean curvature of its objective.
        largest_curvature: largest curvature; 0 if it is not needed.
        gradient_noise: multiplier of the noise on its gradients.
        gram_deviation: deviation of the noise on its Gram matrix.
        share: of second moments of the features, weighted by G.
        takes_effects: whether the saved model may have effects of its rows' keys.
        takes_factors: whether it may have factors of them, which predictions send.
    """

    features: f.Count
    takes_effects: bool = False
    takes_factors: bool = False
    mean_curvature: f.NonNegative
    largest_curvature: f.NonNegative = 0.0
    gradient_noise: f.NonNegative | None = None
    gram_deviation: f.NonNegative | None = None
    penalised: Annotated[AnyArray, f.flags("parameters")]
    share: Annotated[AnyArray, f.shares("summed_gram")] | None = None
    scores: Annotated[AnyArray, f.score_words("total", "outputs")] | None = None


class PrepareReply(Reply, frozen=True, kw_only=True):
    """The start of training, and the costs of the run's releases.

    The account of these is left out where a fit of a search repeats those of another.
    """

    ledger: list[f.Document] | None = None
    parts: dict[int, PreparedPart]

    discloses = (
        share_disclosure(
            "gram", "second moments of the features of {gram} (Gram)", "gram"
        ),
        Discloses(
            "scores of every row, untrained model",
            fields=("scores",),
            covered_by="scores",
            kinds=("scores", "unmatched"),
            policy="scores",
            when="has_first_scores",
        ),
        Discloses(
            "one number of curvature per shard",
            fields=("mean_curvature", "largest_curvature"),
            kinds=("curvature",),
            policy="models",
            when="has_clear_curvature",
        ),
    )
    schedule = (
        *("features", "penalised", "gradient_noise", "gram_deviation", "ledger"),
        *("takes_effects", "takes_factors"),
    )


class LocalFit(Body, frozen=True, kw_only=True):
    """How a site fits a table's model to its targets in ADMM.

    ``rho_in`` is the penalty of the consensus between shards, by table; 0
    ``local_epochs`` of a torch model, or a ``learning_rate`` of 0, means the default.
    """

    kappa: f.Positive
    rho_in: dict[str, f.Positive] = {}
    epoch: f.Count
    seed: f.Seed
    local_epochs: f.Count = 0
    learning_rate: f.NonNegative = 0.0


class ScoreSteps(PartBody, frozen=True):
    """How far the trained rows' scores are from their target Y (paper, Eq. 15).

    ``sum`` is that of the shards' Gram matrices, in the first epoch, with the deviation
    of its noise.
    """

    step: Annotated[AnyArray, f.float32("trained", "outputs")]
    sum: Annotated[AnyArray, f.shares("summed_gram")] | None = None
    deviation: f.NonNegative | None = None


STEPS_DISCLOSED: Final = (
    Discloses(
        "a step of the score per row of the site, made from labels and all tables' "
        "scores",
        fields=("step",),
        covered_by="messages",
    ),
    sum_disclosure("gram", "second moments of the features of {gram}"),
)


class LineStep(Body, frozen=True, kw_only=True):
    """A step theta += ``length`` p in the direction p = v + ``conjugacy`` p."""

    length: f.NonNegative
    conjugacy: f.NonNegative


SCORES_DISCLOSED = Discloses(
    "{scored}",
    fields=("scores",),
    covered_by="scores",
    kinds=("scores",),
    policy="scores",
    when="takes_parameters",
)


class CommonParameters(PartBody, frozen=True):
    """The sum that a table's parameters follow from, or those the server found."""

    parameters: Annotated[AnyArray, f.float64("parameters")] | None = None
    sum: Annotated[AnyArray, f.shares("summed")] | None = None


class ConsensusRequest(Request, frozen=True, kw_only=True):
    """Take the parameters of the table's model, and reply with its scores.

    ``fit`` is that of the epoch; None where the server has found the parameters.
    """

    fit: LocalFit | None = None
    evaluate: bool
    scores_number: f.Count
    parts: dict[int, CommonParameters]

    discloses = (
        Discloses(
            "{common}", fields=("parameters",), covered_by="models", when="is_solved"
        ),
        sum_disclosure("terms", "{terms}"),
    )
    schedule = ("fit", "evaluate", "scores_number")


class ConsensusUpdate(PartBody, frozen=True):
    """The scores of the table's model."""

    scores: Annotated[AnyArray, f.score_words("scored", "outputs")]


class ConsensusReply(Reply, frozen=True):
    """The scores of every participant."""

    parts: dict[int, ConsensusUpdate]

    discloses = (SCORES_DISCLOSED,)


Bins = Annotated[int, f.between(FEWEST_BINS, MOST_BINS)]


class BinsPart(PartBody, frozen=True):
    """Into how many bins, at most, each column of a participant is divided."""

    bins: Bins


class BinsRequest(Request, frozen=True):
    """Send the bin numbers of all rows that take part, once."""

    parts: dict[int, BinsPart]

    discloses = (Discloses("that bin numbers are requested", fields=("bins",)),)


class BinnedPart(PartBody, frozen=True, kw_only=True):
    """The bin numbers of a participant's rows.

    Attributes:
        numbers: of each row's columns; 255 where a number is missing.
        categorical: the columns whose bins have no order.
    """

    categorical: list[f.Count]
    numbers: Annotated[AnyArray, f.bytes_of("total", "bin_columns")]


class BinsReply(Reply, frozen=True):
    """The bin numbers of every participant that was asked."""

    parts: dict[int, BinnedPart]

    discloses = (
        Discloses(
            "the bin number of each encoded column of every row that takes part, in "
            "the clear: which of up to {bins} groups its value is in, of at least "
            "five rows or min-count; where the groups' edges are is not told",
            fields=("numbers", "categorical"),
            kinds=("bins",),
            policy="bins",
        ),
    )


class NextRequest(Request, frozen=True):
    """Begin the next fit of a search: forget the models of the last one.

    Attributes:
        fit: its number, from 1; the last one trains on the rows of all folds.
        candidate: whose settings are trained by, a position in the run's candidates.
    """

    fit: Annotated[int, f.between(1, MOST_FITS)]
    candidate: Annotated[int, f.between(0, MOST_FITS)]

    discloses = (
        Discloses(
            "that the next fit of the search begins, and by which candidate's settings",
            fields=("fit", "candidate"),
        ),
    )


class NextReply(Reply, frozen=True):
    """That the site is ready for the next fit of a search."""

    discloses = (
        Discloses(
            "nothing by itself: the messages from encoders on are sent for each fold, "
            "and those of training again in each of up to {fits} fits",
            when="fits",
        ),
    )
