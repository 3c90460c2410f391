"""A site's batch of SGD: gradients of the batch, a step, the scores of the next.

A table in one shard answers ``sgd`` with the scores of the next batch. A sharded table
answers with its gradient, and with the scores after ``step``.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from client_apps.methods.site_method import Beginning, JoinMethod, prepared_part
from client_apps.operator.curvature import (
    Curvature,
    probed_curvature,
    typical_curvature,
)
from client_apps.operator.participant import Participant, body_of
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MessageError
from tp_flower.features.sparse import EncodedRows
from tp_flower.learning import solvers
from tp_flower.learning.models.local_model import LinearModel, host_features
from tp_flower.methods.sgd.messages import (
    TRAIN_SGD,
    BatchStep,
    BatchUpdate,
    SgdReply,
    SgdRequest,
    StepReply,
    StepRequest,
    StepUpdate,
)
from tp_flower.protocol import training_messages
from tp_flower.protocol.codec import check_sizes
from tp_flower.protocol.messages import Action


@dataclass
class SgdState:
    """The state of SGD: the ``momentum`` of its steps, (p,)."""

    momentum: FloatArray


Part = Participant[SgdState]


class SgdMethod(JoinMethod[SgdState]):
    """Stochastic gradient descent at a site."""

    state = SgdState
    carriers = TRAIN_SGD, Action.PREPARE

    def begin(self, part: Participant[Any], columns: int) -> Beginning[SgdState]:
        """Begin with the curvature, from which the server takes the step size."""
        if isinstance(part.model, LinearModel):
            curvature = _curvature(part, part.model, columns)
        else:
            curvature = probed_curvature(part, columns)
        state = SgdState(np.zeros(len(part.model.parameters)))
        return Beginning(prepared_part(part, **curvature), state)


def _curvature(part: Participant[Any], model: LinearModel, columns: int) -> Curvature:
    """Return the mean and the largest curvature of a linear model."""
    data = part.data
    plan = part.data.plan
    typical = typical_curvature(part, columns)
    total = data.joined_rows
    if plan.fit is not None or plan.gradients is not None:
        return typical
    width = max(len(model.parameters) // model.outputs, 1)
    if plan.statistics is None and width > solvers.MOST_COLUMNS:
        rows = host_features(data.trained)
        return _wide_curvature(model, rows, data.multiplicity, total)
    matrix = part.releaser.gram(data.rows(intercept=model.intercept))
    mean = float(np.trace(matrix)) / (total * width)
    # the trace of a noisy matrix may be negative
    curvature = {"mean_curvature": mean} if plan.statistics is None else typical
    largest = float(np.linalg.eigvalsh(matrix / total).max(initial=0.0))
    return {**curvature, "largest_curvature": largest}


def _wide_curvature(
    model: LinearModel, rows: EncodedRows, counts: AnyArray, joined_rows: int
) -> Curvature:
    """Return the curvature of a wide linear model, without its Gram matrix."""
    trace = float(solvers.column_squares(rows, counts).sum())
    width = rows.shape[1]
    if model.intercept:
        trace += float(counts.sum())
        width += 1
    largest = solvers.largest_eigenvalue(rows, counts, intercept=model.intercept)
    return {
        "mean_curvature": trace / (joined_rows * width),
        "largest_curvature": largest / joined_rows,
    }


def take_step(
    part: Part, gradient: FloatArray, learning_rate: float, momentum: float
) -> None:
    """Take one SGD step (Eq. 13 or 19) with the mean gradient of the loss, (p,).

    velocity = momentum * velocity + gradient + beta * theta (no beta for biases);
    theta -= learning_rate * velocity.
    """
    theta = part.model.parameters
    decay = part.data.l2 * np.where(part.model.penalised, theta, 0.0)
    part.state.momentum = momentum * part.state.momentum + decay + gradient
    part.model.parameters = theta - learning_rate * part.state.momentum


def sgd(site: Site, request: SgdRequest) -> SgdReply:
    """Take Y of a batch; step (one shard) or send the gradient (sharded table)."""
    updates = {}
    for part in site.parts(SgdState):
        body = body_of(request.parts, part)
        if request.is_best:
            part.mark_best()
        batch = _batch(part, request.batch, "batch")
        model = part.model
        check_sizes(
            body, batch_rows=len(part.data.batch_of(batch)), outputs=model.outputs
        )
        derivatives = body.messages.astype(np.float64)
        features = part.data.batch(batch)
        units = part.data.units_of(batch)
        total = part.releaser.gradient(model, features, derivatives, batch, units)
        mean = total / request.batch_rows
        if part.data.update is training_messages.Update.SUM:
            share = part.share(mean, part.data.label_scale)
            updates[part.number] = BatchUpdate(share=share)
        else:
            take_step(part, mean, *_pace(part, request.step))
            updates[part.number] = BatchUpdate(**_next_scores(part, request.step))
        site.save(part)
    return SgdReply(updates)


def step(site: Site, request: StepRequest) -> StepReply:
    """Take the sharded tables' mean gradient, make the step, send the next scores."""
    updates = {}
    for part in site.parts(SgdState):
        if part.data.update is not training_messages.Update.SUM:
            continue
        body = body_of(request.parts, part)
        check_sizes(body, summed=len(part.model.penalised) + 1)
        mean = part.total(body.sum, part.data.label_scale)
        take_step(part, mean, *_pace(part, request.step))
        updates[part.number] = StepUpdate(**_next_scores(part, request.step))
        site.save(part)
    return StepReply(updates)


def _pace(part: Part, step: BatchStep) -> tuple[float, float]:
    rates = step.learning_rates
    if part.data.table not in rates:
        raise MessageError(f"'learning-rates' lacks table {part.data.table!r}")
    return rates[part.data.table], step.momentum


def _next_scores(part: Part, step: BatchStep) -> dict[str, AnyArray]:
    """Return the accompanying scores: next batch, held-out rows, or all rows."""
    scores: dict[str, AnyArray] = {}
    data = part.data
    part.begin_scores(step.scores_number)
    if step.next_batch is not None:
        scores["batch_scores"] = part.release_batch(
            _batch(part, step.next_batch, "next_batch")
        )
    if step.evaluate == "tested":
        tested = data.tested
        scores["tested_scores"] = part.release_scores(
            data.features[tested], tested, "tested_scores"
        )
    elif step.evaluate == "all":
        scores["scores"] = part.release_rows(is_tested=True)
    return scores


def _batch(part: Part, number: int, name: str) -> int:
    """Return a request's batch number, within the plan of batches."""
    total = len(part.data.batch_start) - 1
    if not total:
        raise MessageError("the run has no plan of batches")
    if number >= total:
        raise MessageError(
            f"{name.replace('_', '-')!r} is {number}; allowed: from 0 to {total - 1}"
        )
    return number
