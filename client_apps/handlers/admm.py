"""A site's epoch of ADMM: fit every participant's model to the server's targets.

A table in one shard answers ``admm`` with the scores of its new model. A sharded table
answers with statistics or parameters first, and with scores after ``consensus``
(learning over unions).
"""

import numpy as np

from client_apps.operator.participant import Part, body_of
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import SiteError
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
"""State vector: the scores that the server has made the targets from, (n, d_c)."""


def admm(site: Site, request: AdmmRequest) -> AdmmReply:
    """Take the targets; update theta, or send what the server needs to do so."""
    updates = {}
    changed = {}
    for part in site.parts():
        body, outputs = body_of(request.parts, part), part.shard.model.outputs
        check_sizes(body, trained=len(part.shard.data.multiplicity), outputs=outputs)
        target = body.target.astype(np.float64)
        updates[part.number] = _theta_update(part, target, request)
        changed[part.number] = part.finite_state()
    site.save_state(changed)
    return AdmmReply(updates)


def _theta_update(part: Part, target: FloatArray, request: AdmmRequest) -> AdmmUpdate:
    shard, fit = part.shard, request.fit
    if part.outgoing.plan.statistics is not None:
        return _private_exact_update(part, target, request)
    if part.update is Update.GRAM:
        part.outgoing.check_clear(MOMENTS)
        return AdmmUpdate(moments=shard.moments(target))
    if part.update is Update.CONSENSUS:
        if request.more_rounds:
            shard.vectors["target"] = target.ravel()
        return AdmmUpdate(proposal=_propose(part, target, fit))
    if part.solver is not None:
        part.outgoing.check_clear(MODEL)
        shard.fit_exactly(part.solver, target, fit.kappa)
    else:
        _fit_by_gradient(part, target, fit, None)
    return AdmmUpdate(scores=_send_scores(part, evaluate=request.evaluate))


def _send_scores(part: Part, *, evaluate: bool) -> AnyArray:
    """Return the scores of all rows to be sent, and keep them as they will arrive.

    Where held-out rows are not evaluated, those of the trained rows.
    """
    computed = part.shard.scores() if evaluate else part.shard.trained_scores()
    scores = part.outgoing.scores(part.finite(computed))
    plan = part.outgoing.plan
    if plan.statistics is not None and plan.scores is not None:
        part.shard.vectors[SENT] = scores
    return scores


def _sent_scores(part: Part) -> AnyArray:
    """Return the scores (n, d_c) that the server has made the targets from."""
    if part.outgoing.plan.scores is None:
        return part.shard.scores()
    # before the first ones it takes those of an untrained linear model for granted
    none = np.zeros((len(part.shard.data.features), part.shard.model.outputs))
    return part.shard.vectors.get(SENT, none)


def _private_exact_update(
    part: Part, target: FloatArray, request: AdmmRequest
) -> AdmmUpdate:
    """Update theta by noisy statistics, or send those that the server needs."""
    shard, kappa = part.shard, request.fit.kappa
    model = shard.linear
    rows = Rows(shard.data.trained, shard.data.multiplicity, intercept=model.intercept)
    sent = _sent_scores(part)[: len(target)]
    moments = part.outgoing.moments(rows, kappa * (target - sent))
    if part.update is Update.GRAM:
        return AdmmUpdate(moments=moments)
    if part.solver is None:
        raise TypeError(f"table {part.table}: no solver of the private statistics")
    theta = private_update(part.solver, model.weights, moments, kappa, shard.data.l2)
    model.parameters = theta.ravel()
    return AdmmUpdate(scores=_send_scores(part, evaluate=request.evaluate))


def _propose(part: Part, target: FloatArray, fit: LocalFit) -> FloatArray:
    if part.table not in fit.rho_in:
        raise SiteError(f"malformed request: 'rho-in' lacks table {part.table!r}")
    rho_in = fit.rho_in[part.table]
    part.shard.set_inner_penalty(rho_in)
    if part.solver is not None:
        part.outgoing.check_clear(PARAMETERS)
        solver = part.solver
        return part.shard.fit_consensus_exactly(solver, target, fit.kappa, rho_in)
    _fit_by_gradient(part, target, fit, rho_in)
    return part.shard.propose(part.shard.model.parameters)


def _fit_by_gradient(
    part: Part, target: FloatArray, fit: LocalFit, rho_in: float | None
) -> None:
    """Fit a torch model; toward w - u with strength rho_in if that is given."""
    shard, model = part.shard, part.shard.model
    problem = FitProblem(
        features=shard.data.trained,
        multiplicity=shard.data.multiplicity,
        target=target,
        kappa=fit.kappa,
        joined_rows=shard.data.joined_rows,
        strength=shard.data.l2 if rho_in is None else rho_in,
        centre=np.zeros(len(model.penalised)) if rho_in is None else shard.centre,
        penalised=model.penalised if rho_in is None else np.ones_like(model.penalised),
    )
    if rho_in is not None:
        model.parameters = shard.vectors["theta"]
    if part.outgoing.plan.fit is not None:
        part.outgoing.fit(model, problem, fit.learning_rate)
    else:
        part.outgoing.check_clear(MODEL)
        _fit_torch(part, problem, fit)


def _fit_torch(part: Part, problem: FitProblem, fit: LocalFit) -> None:
    # linear models never import torch
    from tp_flower.learning.models.neural import (
        FitBudget,
        TorchModel,
        fit_least_squares,
    )

    model = part.shard.model
    if not isinstance(model, TorchModel):
        raise TypeError(f"{type(model).__name__} cannot be fitted by gradient")
    budget = FitBudget(
        passes=fit.local_epochs or FitBudget.passes,
        learning_rate=fit.learning_rate or FitBudget.learning_rate,
    )
    rng = generator(fit.seed, Stream.LOCAL_FIT, fit.epoch, part.number)
    fit_least_squares(model, problem, budget, rng)


def consensus(site: Site, request: ConsensusRequest) -> ConsensusReply:
    """Take parameters that the server found; reply with local scores.

    With further inner rounds to come, the reply is the next proposal instead.
    """
    updates = {}
    changed = {}
    for part in site.parts():
        if part.number not in request.parts:
            continue
        _accept(part, request.parts[part.number])
        if not request.more_rounds:
            scores = _send_scores(part, evaluate=request.evaluate)
            updates[part.number] = ConsensusUpdate(scores=scores)
        elif part.update is Update.CONSENSUS:
            proposal = _next_proposal(part, request)
            updates[part.number] = ConsensusUpdate(proposal=proposal)
        changed[part.number] = part.finite_state()
    site.save_state(changed)
    return ConsensusReply(updates)


def _next_proposal(part: Part, request: ConsensusRequest) -> FloatArray:
    """Return the proposal of the next inner round."""
    target = part.shard.vectors.get("target")
    if target is None or request.fit is None:
        raise SiteError("malformed request: no round of consensus has begun")
    target = target.reshape(-1, part.shard.model.outputs)
    return _propose(part, target, request.fit)


def _accept(part: Part, common: CommonParameters) -> None:
    """Take the common parameters of a sharded table."""
    check_sizes(common, parameters=len(part.shard.model.penalised))
    # torch wants to own what it is made from
    parameters = common.parameters.copy()
    if part.update is Update.CONSENSUS:
        part.shard.accept_consensus(parameters)
    elif part.update in (Update.GRAM, Update.GIVEN):
        part.shard.model.parameters = parameters
    else:
        raise SiteError(f"table {part.table}: its model is not another's to set")
