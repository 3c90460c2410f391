"""A site's epoch of ADMM: fit every participant's model to the server's targets.

A table in one shard answers ``admm`` with the scores of its new model. A sharded table
answers with statistics or parameters first, and with scores after ``consensus``
(learning over unions).
"""

import numpy as np

from client_apps.operator.participant import Participant, body_of
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MessageError, SiteError
from tp_flower.learning.models.local_model import FitProblem
from tp_flower.privacy.plan import MODEL, MOMENTS, PARAMETERS
from tp_flower.privacy.statistics_update import Rows, private_update
from tp_flower.protocol.codec import check_sizes
from tp_flower.protocol.training_messages import (
    AdmmReply,
    AdmmRequest,
    AdmmUpdate,
    CommonParameters,
    ConsensusReply,
    ConsensusRequest,
    ConsensusUpdate,
    LocalFit,
    Update,
)
from tp_flower.randomness import Stream, generator

SENT = "sent"
"""State vector (n, d_c): the scores behind the server's current targets."""


def admm(site: Site, request: AdmmRequest) -> AdmmReply:
    """Take the targets; update theta, or send the server what it needs to update it."""
    updates = {}
    for part in site.parts():
        body, outputs = body_of(request.parts, part), part.model.outputs
        check_sizes(body, trained=len(part.data.multiplicity), outputs=outputs)
        target = body.target.astype(np.float64)
        updates[part.number] = _theta_update(part, target, request)
        site.save(part)
    return AdmmReply(updates)


def _theta_update(
    part: Participant, target: FloatArray, request: AdmmRequest
) -> AdmmUpdate:
    fit, solver = request.fit, part.data.solver
    if part.data.plan.statistics is not None:
        return _private_exact_update(part, target, request)
    if part.data.update is Update.GRAM:
        part.releaser.check_clear(MOMENTS)
        return AdmmUpdate(moments=part.moments(target))
    if part.data.update is Update.CONSENSUS:
        if request.more_rounds:
            part.vectors["target"] = target.ravel()
        return AdmmUpdate(proposal=_propose(part, target, fit))
    if solver is not None:
        part.releaser.check_clear(MODEL)
        part.fit_exactly(solver, target, fit.kappa)
    else:
        _fit_by_gradient(part, target, fit, None)
    return AdmmUpdate(scores=_send_scores(part, evaluate=request.evaluate))


def _send_scores(part: Participant, *, evaluate: bool) -> AnyArray:
    """Return the scores to send for all rows, and keep them as they will arrive.

    If held-out rows are not evaluated, only the trained rows' scores are sent.
    """
    data = part.data
    scores = part.release_scores(data.features if evaluate else data.trained)
    if data.plan.statistics is not None and data.plan.scores is not None:
        part.vectors[SENT] = scores
    return scores


def _sent_scores(part: Participant) -> AnyArray:
    """Return the scores (n, d_c) that the server has made the targets from."""
    if part.data.plan.scores is None:
        return part.model.scores(part.data.features)
    # the first targets assume the scores of an untrained linear model
    none = np.zeros((len(part.data.features), part.model.outputs))
    return part.vectors.get(SENT, none)


def _private_exact_update(
    part: Participant, target: FloatArray, request: AdmmRequest
) -> AdmmUpdate:
    """Update theta from noisy statistics, or send them if the server solves."""
    data, model, kappa = part.data, part.linear, request.fit.kappa
    rows = Rows(data.trained, data.multiplicity, intercept=model.intercept)
    sent_scores = _sent_scores(part)[: len(target)]
    moments = part.releaser.moments(rows, kappa * (target - sent_scores))
    if part.data.update is Update.GRAM:
        return AdmmUpdate(moments=moments)
    if data.solver is None:
        raise TypeError(f"table {data.table}: no solver of the private statistics")
    theta = private_update(data.solver, model.weights, moments, kappa, data.l2)
    model.parameters = theta.ravel()
    return AdmmUpdate(scores=_send_scores(part, evaluate=request.evaluate))


def _propose(part: Participant, target: FloatArray, fit: LocalFit) -> FloatArray:
    table, solver = part.data.table, part.data.solver
    if table not in fit.rho_in:
        raise MessageError(f"'rho-in' lacks table {table!r}")
    rho_in = fit.rho_in[table]
    part.set_inner_penalty(rho_in)
    if solver is not None:
        part.releaser.check_clear(PARAMETERS)
        return part.fit_consensus_exactly(solver, target, fit.kappa, rho_in)
    _fit_by_gradient(part, target, fit, rho_in)
    return part.propose(part.model.parameters)


def _fit_by_gradient(
    part: Participant, target: FloatArray, fit: LocalFit, rho_in: float | None
) -> None:
    """Fit a torch model, pulled toward w - u with strength rho_in if given."""
    data, model = part.data, part.model
    problem = FitProblem(
        features=data.trained,
        multiplicity=data.multiplicity,
        target=target,
        kappa=fit.kappa,
        joined_rows=data.joined_rows,
        strength=data.l2 if rho_in is None else rho_in,
        centre=np.zeros(len(model.penalised)) if rho_in is None else part.centre,
        penalised=model.penalised if rho_in is None else np.ones_like(model.penalised),
    )
    if rho_in is not None:
        model.parameters = part.vectors["theta"]
    if part.data.plan.fit is not None:
        part.releaser.fit(model, problem, fit.learning_rate)
    else:
        part.releaser.check_clear(MODEL)
        _fit_torch(part, problem, fit)


def _fit_torch(part: Participant, problem: FitProblem, fit: LocalFit) -> None:
    # linear models never import torch
    from tp_flower.learning.models.neural import (
        FitBudget,
        TorchModel,
        fit_least_squares,
    )

    model = part.model
    if not isinstance(model, TorchModel):
        raise TypeError(f"{type(model).__name__} cannot be fitted by gradient")
    budget = FitBudget(
        passes=fit.local_epochs or FitBudget.passes,
        learning_rate=fit.learning_rate or FitBudget.learning_rate,
    )
    rng = generator(fit.seed, Stream.LOCAL_FIT, fit.epoch, part.number)
    fit_least_squares(model, problem, budget, rng)


def consensus(site: Site, request: ConsensusRequest) -> ConsensusReply:
    """Take the parameters that the server found; reply with local scores.

    If more inner rounds follow, the reply is the next proposal instead.
    """
    updates = {}
    for part in site.parts():
        if part.number not in request.parts:
            continue
        _accept(part, request.parts[part.number])
        if not request.more_rounds:
            scores = _send_scores(part, evaluate=request.evaluate)
            updates[part.number] = ConsensusUpdate(scores=scores)
        elif part.data.update is Update.CONSENSUS:
            target = part.vectors.get("target")
            if target is None or request.fit is None:
                raise MessageError("no round of consensus has begun")
            target = target.reshape(-1, part.model.outputs)
            proposal = _propose(part, target, request.fit)
            updates[part.number] = ConsensusUpdate(proposal=proposal)
        site.save(part)
    return ConsensusReply(updates)


def _accept(part: Participant, common: CommonParameters) -> None:
    """Take the common parameters of a sharded table."""
    check_sizes(common, parameters=len(part.model.penalised))
    # torch needs an array of its own
    parameters = common.parameters.copy()
    if part.data.update is Update.CONSENSUS:
        part.accept_consensus(parameters)
    elif part.data.update in (Update.GRAM, Update.GIVEN):
        part.model.parameters = parameters
    else:
        raise SiteError(f"table {part.data.table}: the server may not set its model")
