"""Messages of training by stochastic gradient descent, after ``prepare``."""

from typing import Annotated, Final

from tp_flower.arrays import AnyArray
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Body, Discloses, PartBody, Reply, Request
from tp_flower.protocol.messages import declare_action
from tp_flower.protocol.training_messages import (
    SCORES_DISCLOSED,
    share_disclosure,
    sum_disclosure,
)


class BatchStep(Body, frozen=True, kw_only=True):
    """How to take a batch's step, and which scores to send with it; None for none."""

    next_batch: f.Count | None = None
    evaluate: Annotated[str, f.one_of("tested", "all")] | None = None
    scores_number: f.Count
    learning_rates: dict[str, f.NonNegative]
    momentum: f.Share


class BatchMessages(PartBody, frozen=True):
    """Y of a batch's distinct rows (paper, Eq. 10): sums of the loss's derivatives."""

    messages: Annotated[AnyArray, f.float32("batch_rows", "outputs")]


class SgdRequest(Request, frozen=True, kw_only=True):
    """One batch of SGD.

    Attributes:
        batch_rows: number of joined rows by which the summed gradient is divided.
        is_best: whether the model before the batch is the best so far, to be saved.
    """

    batch: f.Count
    batch_rows: f.Size
    is_best: bool = False
    step: BatchStep
    parts: dict[int, BatchMessages]

    discloses = (
        Discloses(
            "the loss's derivative per row of the site of a batch, made from labels "
            "and all tables' scores",
            fields=("messages",),
            covered_by="messages",
        ),
    )
    schedule = ("batch", "batch_rows", "is_best", "step")


class StepUpdate(PartBody, frozen=True):
    """Scores after a step: of the next batch, of held-out rows, or of all rows."""

    batch_scores: Annotated[AnyArray, f.score_words("next_rows", "outputs")] | None = (
        None
    )
    tested_scores: Annotated[AnyArray, f.score_words("tested", "outputs")] | None = None
    scores: Annotated[AnyArray, f.score_words("total", "outputs")] | None = None


class BatchUpdate(StepUpdate, frozen=True):
    """Scores, and a shard's share of the batch's mean gradient (paper, Eq. 18)."""

    share: Annotated[AnyArray, f.shares("summed")] | None = None


_BATCH_SCORES = SCORES_DISCLOSED._replace(
    fields=("batch_scores", "tested_scores", "scores"),
    kinds=("batch-scores", "scores"),
    when="",
)


class SgdReply(Reply, frozen=True):
    """The update of every participant."""

    parts: dict[int, BatchUpdate]

    discloses = (
        _BATCH_SCORES,
        share_disclosure("sums_gradients", "gradients of {sharded}", "gradients"),
    )


class MeanGradient(PartBody, frozen=True):
    """The mean gradient of a sharded table over a batch."""

    sum: Annotated[AnyArray, f.shares("summed")]


class StepRequest(Request, frozen=True, kw_only=True):
    """Take the step of a sharded table."""

    step: BatchStep
    parts: dict[int, MeanGradient]

    discloses = (sum_disclosure("sums_gradients", "gradients of {sharded}"),)
    schedule = ("step",)


class StepReply(Reply, frozen=True):
    """The update of every participant."""

    parts: dict[int, StepUpdate]

    discloses = (_BATCH_SCORES._replace(when="sharded"),)


TRAIN_SGD: Final = declare_action("train.sgd", SgdRequest, SgdReply)
TRAIN_STEP: Final = declare_action("train.step", StepRequest, StepReply)
