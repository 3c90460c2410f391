"""A site's batch of SGD: gradients of the batch, a step, the scores of the next.

A table in one shard answers ``sgd`` with the scores of the next batch; a sharded table
with its gradient first, and with scores after ``step``.
"""

from collections.abc import Mapping

import numpy as np

from client_apps.operator.participant import Part, body_of
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import SiteError
from tp_flower.protocol.codec import check_sizes
from tp_flower.protocol.training_messages import (
    BatchMessages,
    BatchStep,
    BatchUpdate,
    SgdReply,
    SgdRequest,
    StepReply,
    StepRequest,
    StepUpdate,
    Update,
)


def sgd(site: Site, request: SgdRequest) -> SgdReply:
    """Take Y of a batch; step (one shard) or send the gradient (sharded table).

    With staleness a sharded table's step comes with the next batch: its shards take it
    first, and send the next scores without the step that this batch leads to.
    """
    updates = {}
    changed = {}
    for part in site.parts():
        body = body_of(request.parts, part)
        if part.update is Update.SUM:
            updates[part.number] = _sharded_batch(part, body, request)
        else:
            gradient = _gradient(part, body, request.batch)
            mean = gradient / request.batch_rows
            part.shard.step(mean, *_pace(part, request.step))
            updates[part.number] = BatchUpdate(**_next_scores(part, request.step))
        changed[part.number] = part.finite_state()
    site.save_state(changed)
    return SgdReply(updates)


def _sharded_batch(part: Part, body: BatchMessages, request: SgdRequest) -> BatchUpdate:
    """Take the late step, if one came; return the gradient of the batch."""
    if body.gradient is not None:
        check_sizes(body, parameters=len(part.shard.model.penalised))
        part.shard.step(body.gradient, *_pace(part, request.step))
    gradient = _gradient(part, body, request.batch)
    scores = _foreseen_scores(part, request.step) if request.stale else {}
    return BatchUpdate(gradient=gradient, **scores)


def step(site: Site, request: StepRequest) -> StepReply:
    """Take the mean gradient of the sharded tables, step, send the next scores."""
    updates = {}
    changed = {}
    for part in site.parts():
        if part.update is not Update.SUM:
            continue
        body = body_of(request.parts, part)
        check_sizes(body, parameters=len(part.shard.model.penalised))
        part.shard.step(body.gradient, *_pace(part, request.step))
        updates[part.number] = StepUpdate(**_next_scores(part, request.step))
        changed[part.number] = part.finite_state()
    site.save_state(changed)
    return StepReply(updates)


def _gradient(part: Part, body: BatchMessages, number: int) -> FloatArray:
    """Return the sum of the gradients of a batch's rows, (p,)."""
    batch = _batch(part, number, "batch")
    model = part.shard.model
    check_sizes(
        body,
        batch_rows=len(part.shard.data.batch_of(batch)),
        outputs=model.outputs,
        parameters=len(model.penalised),
    )
    messages = body.messages.astype(np.float64)
    features = part.shard.data.batch(batch)
    return part.outgoing.gradient(model, features, messages, batch)


def _pace(part: Part, step: BatchStep) -> tuple[float, float]:
    """Return the learning rate and the momentum of a part's steps."""
    rates = step.learning_rates
    if part.table not in rates:
        raise SiteError(
            f"malformed request: 'learning-rates' lacks table {part.table!r}"
        )
    return rates[part.table], step.momentum


def _foreseen_scores(part: Part, step: BatchStep) -> Mapping[str, AnyArray]:
    """Return the next scores with what is known of the step that is still to come."""
    model = part.shard.model
    theta = model.parameters
    model.parameters = part.shard.foreseen(*_pace(part, step))
    scores = _next_scores(part, step)
    model.parameters = theta
    return scores


def _next_scores(part: Part, step: BatchStep) -> dict[str, AnyArray]:
    """Return the scores that ride along: next batch, held-out rows, or all rows."""
    shard, outgoing = part.shard, part.outgoing
    scores: dict[str, AnyArray] = {}
    if step.next_batch is not None:
        batch = _batch(part, step.next_batch, "next_batch")
        computed = part.finite(shard.batch_scores(batch))
        scores["batch_scores"] = outgoing.scores(computed, batch)
    if step.evaluate == "tested":
        scores["tested_scores"] = outgoing.scores(part.finite(shard.tested_scores()))
    elif step.evaluate == "all":
        scores["scores"] = outgoing.scores(part.finite(shard.scores()))
    return scores


def _batch(part: Part, number: int, name: str) -> int:
    """Return the number of a batch of the run's plan."""
    total = len(part.shard.data.batch_start) - 1
    if not total:
        raise SiteError("malformed request: the run has no plan of batches")
    if number >= total:
        raise SiteError(
            f"malformed request: {name.replace('_', '-')!r} is {number}; allowed: from "
            f"0 to {total - 1}"
        )
    return number
