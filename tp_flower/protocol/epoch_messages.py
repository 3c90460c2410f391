"""Messages of ADMM: its epochs, and the consensus of a table's shards.

Notation (sizes in shapes):
    trained     rows in at least one joined training row
    scored      all rows that take part, or ``trained`` where nothing is evaluated
    outputs     d_c, scores per row
    parameters  p, of the shard's model
    width       features, and the intercept where the model has one
"""

from typing import Annotated

from tp_flower.arrays import AnyArray
from tp_flower.protocol.fields import (
    Body,
    Count,
    Discloses,
    NonNegative,
    PartBody,
    Positive,
    Reply,
    Request,
    Seed,
    Share,
    Size,
    float32,
    float64,
    one_of,
)

_COMMON = Discloses(
    "{common}", fields=("parameters",), covered_by="models", when="takes_parameters"
)


class LocalFit(Body, frozen=True, kw_only=True):
    """How a site fits a table's model to targets in ADMM.

    Attributes:
        kappa: penalty of the fit.
        rho_in: penalty of the consensus between shards, by table.
        epoch: from 1.
        seed: of a torch model's fit.
        local_epochs: passes of such a fit; 0 for the default.
        learning_rate: of such a fit; 0 for the default.
    """

    kappa: Positive
    rho_in: dict[str, Positive]
    epoch: Count
    seed: Seed
    local_epochs: Count
    learning_rate: NonNegative


class AdmmTarget(PartBody, frozen=True):
    """The target of the trained rows' scores, Y (paper, Eq. 15)."""

    target: Annotated[AnyArray, float32("trained", "outputs")]


class AdmmRequest(Request, frozen=True, kw_only=True):
    """One epoch of ADMM: fit the model to the target.

    Attributes:
        fit: how.
        more_rounds: rounds of consensus that follow the next one.
        evaluate: whether scores of held-out rows are to come, too.
        parts: the targets.
    """

    fit: LocalFit
    more_rounds: Count
    evaluate: bool
    parts: dict[int, AdmmTarget]

    discloses = (
        Discloses(
            "a target per {row}, made from labels and all tables' scores",
            fields=("target",),
            covered_by="messages",
        ),
    )
    schedule = ("fit", "more_rounds", "evaluate")


class AdmmUpdate(PartBody, frozen=True):
    """Scores of the fitted model; of a sharded table what comes before them.

    Attributes:
        scores: of a table in one shard.
        moments: features times targets, where the server solves.
        proposal: theta + u, where shards seek consensus (paper, Eq. 20).
    """

    scores: Annotated[AnyArray, float32("scored", "outputs")] | None = None
    moments: Annotated[AnyArray, float64("width", "outputs")] | None = None
    proposal: Annotated[AnyArray, float64("parameters")] | None = None


class AdmmReply(Reply, frozen=True):
    """The update of every participant."""

    parts: dict[int, AdmmUpdate]

    discloses = (
        Discloses(
            "features times targets, summed per shard of {gram}",
            fields=("moments",),
            covered_by="models",
            kinds=("moments",),
            policy="models",
            when="gram",
        ),
        Discloses(
            "parameters that each shard of {seeking} fitted",
            fields=("proposal",),
            covered_by="models",
            kinds=("parameters", "model"),
            policy="models",
            when="seeking",
        ),
        Discloses(
            "{scored}",
            fields=("scores",),
            covered_by="scores",
            kinds=("scores", "model"),
            policy="scores",
        ),
    )


class CommonParameters(PartBody, frozen=True):
    """The parameters of a table's model, from the server."""

    parameters: Annotated[AnyArray, float64("parameters")]


class ConsensusRequest(Request, frozen=True, kw_only=True):
    """Take the parameters of the table's model.

    Attributes:
        fit: how the next proposal is fitted; None where none is.
        more_rounds: rounds of consensus that follow; 0: scores are to come.
        evaluate: whether scores of held-out rows are to come, too.
        parts: the parameters.
    """

    fit: LocalFit | None = None
    more_rounds: Count
    evaluate: bool
    parts: dict[int, CommonParameters]

    discloses = (_COMMON,)
    schedule = ("fit", "more_rounds", "evaluate")


class ConsensusUpdate(PartBody, frozen=True):
    """Scores of the common model, or the proposal of the next round."""

    scores: Annotated[AnyArray, float32("scored", "outputs")] | None = None
    proposal: Annotated[AnyArray, float64("parameters")] | None = None


class ConsensusReply(Reply, frozen=True):
    """The update of every participant."""

    parts: dict[int, ConsensusUpdate]

    discloses = (
        Discloses(
            "parameters that each shard of {seeking} fitted",
            fields=("proposal",),
            covered_by="models",
            kinds=("parameters",),
            policy="models",
            when="has_inner_rounds",
        ),
        Discloses(
            "{scored}",
            fields=("scores",),
            covered_by="scores",
            kinds=("scores",),
            policy="scores",
            when="takes_parameters",
        ),
    )


class BatchStep(Body, frozen=True, kw_only=True):
    """How a batch's step is taken, and what scores are to come with it.

    Attributes:
        next_batch: whose scores are to come; None after the last one.
        evaluate: which other scores are to come; None for none.
        learning_rates: by table.
        momentum: of every step.
    """

    next_batch: Count | None = None
    evaluate: Annotated[str, one_of("tested", "all")] | None = None
    learning_rates: dict[str, NonNegative]
    momentum: Share


class BatchMessages(PartBody, frozen=True):
    """Y of a batch's distinct rows (paper, Eq. 10).

    Attributes:
        messages: sums of the loss's derivatives.
        gradient: mean gradient of the batch before, where it comes late.
    """

    messages: Annotated[AnyArray, float32("batch_rows", "outputs")]
    gradient: Annotated[AnyArray, float64("parameters")] | None = None


class SgdRequest(Request, frozen=True, kw_only=True):
    """One batch of SGD.

    Attributes:
        batch: its number in the plan.
        batch_rows: joined rows, which the summed gradient is divided by.
        stale: whether sharded tables take the batch's step with the next batch.
        step: how.
        parts: the messages.
    """

    batch: Count
    batch_rows: Size
    stale: bool
    step: BatchStep
    parts: dict[int, BatchMessages]

    discloses = (
        Discloses(
            "the loss's derivative per {row} of a batch, made from labels and all "
            "tables' scores",
            fields=("messages",),
            covered_by="messages",
        ),
        Discloses(
            "the summed gradients of {sharded}",
            fields=("gradient",),
            covered_by="models",
            when="is_stale",
        ),
    )
    schedule = ("batch", "batch_rows", "stale", "step")


class BatchUpdate(PartBody, frozen=True):
    """A shard's gradient, and scores.

    Attributes:
        gradient: summed over the batch's rows (paper, Eq. 18).
        batch_scores: of the next batch's distinct rows.
        tested_scores: of held-out rows.
        scores: of all rows that take part.
    """

    gradient: Annotated[AnyArray, float64("parameters")] | None = None
    batch_scores: Annotated[AnyArray, float32("next_rows", "outputs")] | None = None
    tested_scores: Annotated[AnyArray, float32("tested", "outputs")] | None = None
    scores: Annotated[AnyArray, float32("total", "outputs")] | None = None


class SgdReply(Reply, frozen=True):
    """The update of every participant."""

    parts: dict[int, BatchUpdate]

    discloses = (
        Discloses(
            "{scored}",
            fields=("batch_scores", "tested_scores", "scores"),
            covered_by="scores",
            kinds=("batch-scores", "scores"),
            policy="scores",
        ),
        Discloses(
            "gradients of each shard of {sharded}",
            fields=("gradient",),
            covered_by="models",
            kinds=("gradients",),
            policy="models",
            when="sharded",
        ),
    )


class MeanGradient(PartBody, frozen=True):
    """The mean gradient of a sharded table over a batch."""

    gradient: Annotated[AnyArray, float64("parameters")]


class StepRequest(Request, frozen=True, kw_only=True):
    """Take the step of a sharded table.

    Attributes:
        step: how.
        parts: the gradients.
    """

    step: BatchStep
    parts: dict[int, MeanGradient]

    discloses = (
        Discloses(
            "the summed gradients of {sharded}",
            fields=("gradient",),
            covered_by="models",
            when="sharded",
        ),
    )
    schedule = ("step",)


class StepUpdate(PartBody, frozen=True):
    """Scores after a step; see :class:`BatchUpdate`."""

    batch_scores: Annotated[AnyArray, float32("next_rows", "outputs")] | None = None
    tested_scores: Annotated[AnyArray, float32("tested", "outputs")] | None = None
    scores: Annotated[AnyArray, float32("total", "outputs")] | None = None


class StepReply(Reply, frozen=True):
    """The update of every participant."""

    parts: dict[int, StepUpdate]

    discloses = (
        Discloses(
            "{scored}",
            fields=("batch_scores", "tested_scores", "scores"),
            covered_by="scores",
            kinds=("batch-scores", "scores"),
            policy="scores",
            when="sharded",
        ),
    )
