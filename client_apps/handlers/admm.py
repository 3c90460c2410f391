"""A site's epoch of ADMM: fit every participant's model to its target.

The server sends how far the scores are to step; the target is the own scores plus that.

A table in one shard answers ``admm`` with the scores of its new model. A sharded table
answers with statistics or parameters first, and with scores after ``consensus``
(learning over unions).
"""

from typing import Final

import numpy as np

from client_apps.operator.participant import Participant, body_of
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MessageError, SiteError
from tp_flower.learning.admm import mixed_parameters, reached_with
from tp_flower.learning.models.local_model import FitProblem
from tp_flower.learning.solvers import RidgeSolver, exact_update
from tp_flower.privacy.plan import MODEL, PARAMETERS
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

REACHED: Final = "reached"
"""State vector: theta after each of the last epochs, (epochs, p)."""


def admm(site: Site, request: AdmmRequest) -> AdmmReply:
    """Step towards the targets; update theta, or send what the server updates it by."""
    updates = {}
    for part in site.parts():
        body, outputs = body_of(request.parts, part), part.model.outputs
        check_sizes(body, trained=len(part.data.multiplicity), outputs=outputs)
        step = body.step.astype(np.float64)
        updates[part.number] = _theta_update(part, step, request)
        site.save(part)
    return AdmmReply(updates)


def _theta_update(
    part: Participant, step: FloatArray, request: AdmmRequest
) -> AdmmUpdate:
    fit, data = request.fit, part.data
    if data.update is Update.GRAM:
        return AdmmUpdate(moments=part.moments(step, fit.kappa))
    if data.update is Update.LOCAL and data.solver is not None:
        if data.plan.statistics is None:
            part.releaser.check_clear(MODEL)
        _fit_exactly(part, data.solver, step, request)
        return AdmmUpdate(scores=_scores(part, request))
    target = part.model.scores(data.trained) + step
    if data.update is Update.CONSENSUS:
        if request.more_rounds:
            part.vectors["target"] = target.ravel()
        return AdmmUpdate(proposal=_propose(part, target, fit))
    _fit_by_gradient(part, target, fit, None)
    return AdmmUpdate(scores=_scores(part, request))


def _scores(part: Participant, request: AdmmRequest | ConsensusRequest) -> AnyArray:
    part.begin_scores(request.scores_number)
    return part.release_rows(is_tested=request.evaluate)


def _fit_exactly(
    part: Participant, solver: RidgeSolver, step: FloatArray, request: AdmmRequest
) -> None:
    """Set theta to the exact theta-update of a linear model (Eq. 16)."""
    model, kappa = part.linear, request.fit.kappa
    # an untrained model is where the first epoch starts
    reached = part.vectors.get(REACHED, model.parameters[None, :])
    if len(request.mixing) >= len(reached):
        raise MessageError(
            f"'mixing' has {len(request.mixing)} coefficients; the site remembers "
            f"{len(reached) - 1} changes"
        )
    start = mixed_parameters(reached, np.array(request.mixing))
    moments = part.moments(step, kappa)
    theta = exact_update(
        solver, start.reshape(-1, model.outputs), moments, kappa, part.data.l2
    )
    model.parameters = theta.ravel()
    if request.memory:
        part.vectors[REACHED] = reached_with(reached, theta.ravel(), request.memory)


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
        part.releaser.fit(model, problem, fit.learning_rate, data.units)
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
            scores = _scores(part, request)
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
