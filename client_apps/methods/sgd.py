"""A site's batch of SGD: gradients of the batch, a step, the scores of the next.

A table in one shard answers ``sgd`` with the scores of the next batch. A sharded table
answers with its gradient, and with the scores after ``step``.
"""

import numpy as np

from client_apps.operator.participant import Participant, body_of
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray
from tp_flower.errors import MessageError
from tp_flower.protocol import training_messages
from tp_flower.protocol.codec import check_sizes


def sgd(
    site: Site, request: training_messages.SgdRequest
) -> training_messages.SgdReply:
    """Take Y of a batch; step (one shard) or send the gradient (sharded table)."""
    updates = {}
    for part in site.parts():
        body = body_of(request.parts, part)
        if request.is_best:
            part.mark_best()
        batch, model = _batch(part, request.batch, "batch"), part.model
        check_sizes(
            body, batch_rows=len(part.data.batch_of(batch)), outputs=model.outputs
        )
        derivatives = body.messages.astype(np.float64)
        features, units = part.data.batch(batch), part.data.units_of(batch)
        total = part.releaser.gradient(model, features, derivatives, batch, units)
        mean = total / request.batch_rows
        if part.data.update is training_messages.Update.SUM:
            share = part.share(mean, part.data.label_scale)
            updates[part.number] = training_messages.BatchUpdate(share=share)
        else:
            part.step(mean, *_pace(part, request.step))
            updates[part.number] = training_messages.BatchUpdate(
                **_next_scores(part, request.step)
            )
        site.save(part)
    return training_messages.SgdReply(updates)


def step(
    site: Site, request: training_messages.StepRequest
) -> training_messages.StepReply:
    """Take the sharded tables' mean gradient, make the step, send the next scores."""
    updates = {}
    for part in site.parts():
        if part.data.update is not training_messages.Update.SUM:
            continue
        body = body_of(request.parts, part)
        check_sizes(body, summed=len(part.model.penalised) + 1)
        part.step(
            part.total(body.sum, part.data.label_scale), *_pace(part, request.step)
        )
        updates[part.number] = training_messages.StepUpdate(
            **_next_scores(part, request.step)
        )
        site.save(part)
    return training_messages.StepReply(updates)


def _pace(part: Participant, step: training_messages.BatchStep) -> tuple[float, float]:
    rates = step.learning_rates
    if part.data.table not in rates:
        raise MessageError(f"'learning-rates' lacks table {part.data.table!r}")
    return rates[part.data.table], step.momentum


def _next_scores(
    part: Participant, step: training_messages.BatchStep
) -> dict[str, AnyArray]:
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


def _batch(part: Participant, number: int, name: str) -> int:
    total = len(part.data.batch_start) - 1
    if not total:
        raise MessageError("the run has no plan of batches")
    if number >= total:
        raise MessageError(
            f"{name.replace('_', '-')!r} is {number}; allowed: from 0 to {total - 1}"
        )
    return number
