"""Messages of SGD: a batch, and the step of a sharded table.

Notation (sizes in shapes):
    batch-rows  distinct trained rows of a batch
    next-rows   those of the batch after it
    tested      rows in held-out joined rows
    total       rows that take part, trained or held out
    outputs     d_c, scores per row
    parameters  p, of the shard's model
"""

from typing import Annotated

from tp_flower.protocol.fields import (
    AnyArray,
    Body,
    Count,
    Discloses,
    NonNegative,
    PartBody,
    Reply,
    Request,
    Share,
    Size,
    float32,
    float64,
    one_of,
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

    messages: Annotated[AnyArray, float32("batch-rows", "outputs")]
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
    batch_scores: Annotated[AnyArray, float32("next-rows", "outputs")] | None = None
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

    batch_scores: Annotated[AnyArray, float32("next-rows", "outputs")] | None = None
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
