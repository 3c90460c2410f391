"""Messages that begin and end training over joins: prepare, finish.

Notation (sizes in shapes):
    rows        of the shard, after the query's filters
    trained     rows in at least one joined training row
    total       rows that take part, trained or held out
    outputs     d_c, scores per row
    parameters  p, of the shard's model
    width       features, and the intercept where the model has one
"""

import math
from typing import Annotated, Final, Self

import msgspec

from tp_flower.arrays import AnyArray
from tp_flower.methods import (
    ACCOUNTANTS,
    CLEAR,
    DP_SGD,
    NOISY_STATISTICS,
    OUTSIDER,
    SERVER,
)
from tp_flower.protocol.fields import (
    Body,
    Count,
    Discloses,
    Document,
    JoinedRows,
    NonNegative,
    PartBody,
    Positive,
    Reply,
    Request,
    Share,
    bits,
    flags,
    float32,
    float64,
    one_of,
    positions,
)
from tp_flower.protocol.packet import Update

MOST_STEPS: Final = 1_000_000
MOST_SCALE: Final = 1e30
"""Of numbers that noise is in units of: all arithmetic with them stays finite."""
LEAST_SCALE: Final = 1 / MOST_SCALE

Steps = Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)]
Scale = Annotated[float, msgspec.Meta(ge=LEAST_SCALE, le=MOST_SCALE)]
Device = Annotated[str, one_of("auto", "cpu", "cuda")]

Clip = Annotated[float, msgspec.Meta(ge=1e-12, le=1e12)]
Delta = Annotated[float, msgspec.Meta(gt=0, le=math.nextafter(1.0, 0.0))]


class PrivacyTerms(Body, frozen=True, kw_only=True):
    """Mechanisms that a run asks its sites for, on models and on scores.

    The fields are those of the same names of the run's settings of privacy.

    Attributes:
        features: mechanism on gradients and models.
        epsilon: of what the models disclose of a row.
        delta: of the same, and of scores.
        clip: norm of a row's gradient, or of its share of the statistics.
        noise_multiplier: deviation of the noise over the clip; 0: from epsilon.
        sample_rate: of DP-SGD in ADMM; 0: chosen by the site.
        local_steps: of DP-SGD in ADMM, per epoch; 0: chosen by the site.
        target_clip: of the statistics: of a row's target.
        predictions: epsilon of all scores of a row; 0 for scores without noise.
        prediction_clip: norm of a row's scores.
        adversary: whom the epsilon of DP-SGD over the server's batches is for.
        accountant: of sub-sampled noise.
    """

    features: Annotated[str, one_of(CLEAR, DP_SGD, NOISY_STATISTICS)]
    epsilon: Positive
    delta: Delta
    clip: Clip
    noise_multiplier: NonNegative
    sample_rate: Share
    local_steps: Steps
    target_clip: Clip
    predictions: NonNegative
    prediction_clip: Clip
    adversary: Annotated[str, one_of(SERVER, OUTSIDER)]
    accountant: Annotated[str, one_of(*ACCOUNTANTS)]

    @classmethod
    def of(cls, settings: object) -> Self:
        """Return the terms that a run's settings of privacy have among their fields."""
        return msgspec.convert(settings, cls, from_attributes=True)

    @property
    def covers_features(self) -> bool:
        """Whether models (gradients, statistics, parameters) are private."""
        return self.features != CLEAR

    @property
    def covers_predictions(self) -> bool:
        """Whether scores leave with noise only."""
        return self.predictions > 0


class Outline(Body, frozen=True, kw_only=True):
    """The announced schedule of a run, by which sites plan their releases.

    Attributes:
        strategy: that trains.
        epochs: at most.
        exchanges: of ADMM: updates of consensus in an epoch.
        batch_uses: of SGD: how often each batch is visited.
        batch_rate: of SGD: probability that a drawn batch takes a joined row; 0 where
            batches are a partition.
        sends: what leaves of sampled rows where the server solves.
    """

    strategy: str
    epochs: Steps
    exchanges: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)] | None = None
    batch_uses: Steps | None = None
    batch_rate: Share | None = None
    sends: Annotated[str, one_of("rows", "centres")] | None = None


class PreparePart(PartBody, frozen=True, kw_only=True):
    """The rows, the encoder and the model of a participant.

    Rows are named by masks, each of the table once, or in VFL by lists with the row
    behind each joined row.

    Attributes:
        encoder: of the table.
        model: of the table, untrained.
        update: how the table's shards train together.
        joined_rows: N, joined training rows.
        held_out_rows: of VFL: joined rows that are held out.
        l2: weight of the penalty.
        device: where the model is computed.
        label_scale: size of the loss's derivatives.
        mean_multiplicity: joined rows of a row that is trained on, on average.
        trained: rows in joined training rows.
        tested: rows in held-out joined rows.
        multiplicity: joined rows of each trained row, G.
        masses: in place of it, what those weigh.
        expanded_trained: of VFL: the row behind each joined training row.
        expanded_tested: of VFL: the same for held-out joined rows.
        batch_start: of SGD: where each batch starts in ``batch_rows``.
        batch_rows: of SGD: the distinct trained rows of every batch.
    """

    encoder: Document
    model: Document
    update: Update
    joined_rows: JoinedRows
    held_out_rows: Count | None = None
    l2: NonNegative
    device: Device
    label_scale: Scale
    mean_multiplicity: Annotated[float, msgspec.Meta(ge=0, le=MOST_SCALE)]
    trained: Annotated[AnyArray, bits("rows")] | None = None
    tested: Annotated[AnyArray, bits("rows")] | None = None
    multiplicity: Annotated[AnyArray, positions("trained", low=1)] | None = None
    masses: Annotated[AnyArray, float32("trained")] | None = None
    expanded_trained: Annotated[AnyArray, positions("trained")] | None = None
    expanded_tested: Annotated[AnyArray, positions("tested")] | None = None
    batch_start: Annotated[AnyArray, positions("batches+1")] | None = None
    batch_rows: Annotated[AnyArray, positions("batch_rows")] | None = None


class PrepareRequest(Request, frozen=True, kw_only=True):
    """Encode the features, make the models, plan the releases.

    Attributes:
        privacy: mechanisms of the run.
        outline: the run's schedule.
        parts: of each participant.
    """

    privacy: PrivacyTerms
    outline: Outline
    parts: dict[int, PreparePart]

    discloses = (
        Discloses(
            "{encoders}; {alignment}",
            fields=(
                *("encoder", "trained", "tested", "multiplicity", "masses"),
                *("expanded_trained", "expanded_tested", "mean_multiplicity"),
                *("label_scale", "joined_rows", "held_out_rows"),
            ),
        ),
        Discloses(
            "which own rows every batch has, by number",
            fields=("batch_start", "batch_rows"),
            when="has_batches",
        ),
    )
    schedule = ("privacy", "outline", "model", "update", "l2", "device")


class PreparedPart(PartBody, frozen=True, kw_only=True):
    """A participant's start.

    Attributes:
        features: width of its encoded rows.
        mean_curvature: of its objective.
        largest_curvature: the same; 0 where nobody needs it.
        gradient_noise: multiplier of the noise on its gradients.
        gram_deviation: of the noise on its Gram matrix.
        penalised: which parameters the penalty is on.
        gram: second moments of its features, weighted by G.
        scores: of an untrained model that is not linear.
    """

    features: Count
    mean_curvature: NonNegative
    largest_curvature: NonNegative = 0.0
    gradient_noise: NonNegative | None = None
    gram_deviation: NonNegative | None = None
    penalised: Annotated[AnyArray, flags("parameters")]
    gram: Annotated[AnyArray, float64("width", "width")] | None = None
    scores: Annotated[AnyArray, float32("total", "outputs")] | None = None


class PrepareReply(Reply, frozen=True, kw_only=True):
    """What training starts from, and what the run's releases cost.

    Attributes:
        ledger: the run's lines of the site's ledger.
        parts: of each participant.
    """

    ledger: list[Document]
    parts: dict[int, PreparedPart]

    discloses = (
        Discloses(
            "second moments of the features of {gram} (Gram)",
            fields=("gram",),
            covered_by="models",
            kinds=("gram",),
            policy="models",
            when="gram",
        ),
        Discloses(
            "scores of every row, untrained model",
            fields=("scores",),
            covered_by="scores",
            kinds=("scores",),
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
    schedule = ("features", "penalised", "gradient_noise", "gram_deviation", "ledger")


class FinishRequest(Request, frozen=True, kw_only=True):
    """The run is over.

    Attributes:
        keep_models: whether sites keep their parts of the model.
        model_name: that they are kept under.
        model_version: the same.
    """

    keep_models: bool = False
    model_name: str | None = None
    model_version: str | None = None

    discloses = (Discloses("that the run is over, and its name"),)
    schedule = ("keep_models", "model_name", "model_version")


class FinishedPart(PartBody, frozen=True):
    """What a site says of a part of a model.

    Attributes:
        digest: SHA-256 of the part that it keeps; None where it keeps none.
        coefficients: of a linear model, where the table's policy shows them.
    """

    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None
    coefficients: Annotated[AnyArray, float64("width", "outputs")] | None = None


class FinishReply(Reply, frozen=True, kw_only=True):
    """What the run has come to at a site, and what its releases cost.

    Attributes:
        ledger: the run's lines of the site's ledger.
        parts: of each participant whose model is kept.
    """

    ledger: list[Document]
    parts: dict[int, FinishedPart]

    discloses = (
        Discloses(
            "a digest of each part of the model that the site keeps", fields=("digest",)
        ),
        Discloses(
            "the final coefficients of a table's linear model, if the table's policy "
            "says that they may be shown",
            fields=("coefficients",),
            covered_by="models",
            kinds=("coefficients",),
            policy="coefficients",
        ),
    )
    schedule = ("ledger",)
    is_complete = False
