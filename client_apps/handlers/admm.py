"""A site's epoch of ADMM: fit every participant's model to its target.

The server sends how far the scores are to step; the target is the own scores plus that.

A table in one shard answers ``admm`` with the scores of its new model. A sharded table
answers with statistics or parameters first, and with scores after ``consensus``
(learning over unions).
"""

from collections.abc import Mapping

import numpy as np

from client_apps.operator.participant import Participant, body_of
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MessageError, SiteError
from tp_flower.learning.admm import consensus_parameters
from tp_flower.learning.models.local_model import FitProblem, LinearModel
from tp_flower.learning.solvers import RidgeSolver, Solver, exact_update
from tp_flower.privacy.plan import MODEL, PARAMETERS
from tp_flower.privacy.sealed_sums import gram_size, joined_gram
from tp_flower.privacy.statistics_update import usable_gram
from tp_flower.protocol import training_messages as messages
from tp_flower.protocol.codec import check_sizes, required
from tp_flower.randomness import Stream, generator


def admm(site: Site, request: messages.AdmmRequest) -> messages.AdmmReply:
    """Step towards the targets; update theta, or send the share of what updates it."""
    updates = {}
    for part in site.parts():
        step = step_of(site, part, request.parts)
        if request.is_best:
            part.mark_best()
        updates[part.number] = _theta_update(part, step, request)
        site.save(part)
    return messages.AdmmReply(updates)


def step_of(
    site: Site, part: Participant, parts: Mapping[int, messages.AdmmStep]
) -> FloatArray:
    """Return the steps of a part's trained rows, (n, d_c).

    The solver that comes with the first of them is kept.
    """
    body, outputs = body_of(parts, part), part.model.outputs
    check_sizes(body, trained=len(part.data.multiplicity), outputs=outputs)
    if body.sum is not None:
        site.keep_solver(part.number, _summed_solver(part, body))
    return body.step.astype(np.float64)


def _theta_update(
    part: Participant, step: FloatArray, request: messages.AdmmRequest
) -> messages.AdmmUpdate:
    fit, data = request.fit, part.data
    if data.update is messages.Update.GRAM:
        moments = part.moments(step, fit.kappa)
        return messages.AdmmUpdate(share=part.share(moments, _moment_unit(part, fit)))
    if data.update is messages.Update.LOCAL and data.solver is not None:
        if data.plan.statistics is None:
            part.releaser.check_clear(MODEL)
        _solve(part, data.solver, part.moments(step, fit.kappa), fit.kappa)
        return messages.AdmmUpdate(scores=_scores(part, request))
    target = part.model.scores(data.trained) + step
    if data.update is messages.Update.CONSENSUS:
        return messages.AdmmUpdate(share=_proposal(part, target, fit))
    _fit_by_gradient(part, target, fit, None)
    return messages.AdmmUpdate(scores=_scores(part, request))


def _scores(
    part: Participant, request: messages.AdmmRequest | messages.ConsensusRequest
) -> AnyArray:
    part.begin_scores(request.scores_number)
    return part.release_rows(is_tested=request.evaluate)


def _solve(
    part: Participant, solver: Solver, moments: FloatArray, kappa: float
) -> None:
    """Set theta to the exact theta-update of a linear model (Eq. 16).

    ``moments`` (d [+ 1], d_c) are of the steps of the table's rows.
    """
    outputs = part.model.outputs
    part.linear.parameters = exact_update(
        solver,
        part.model.parameters.reshape(-1, outputs),
        moments.reshape(-1, outputs),
        kappa,
        part.data.l2,
    ).ravel()


def _summed_solver(part: Participant, body: messages.AdmmStep) -> RidgeSolver:
    width, data = len(part.model.parameters) // part.model.outputs, part.data
    if data.update is not messages.Update.GRAM:
        raise MessageError(f"'sum' does not go with update {data.update.value!r}")
    check_sizes(body, summed_gram=gram_size(width) + 1)
    gram = joined_gram(part.total(body.sum), width)
    return RidgeSolver.from_gram(
        usable_gram(gram * data.joined_rows, body.deviation or 0.0),
        data.joined_rows,
        intercept=part.linear.intercept,
    )


def _moment_unit(part: Participant, fit: messages.LocalFit) -> float:
    """Return the size of features times steps, which are derivatives over kappa."""
    return part.data.joined_rows * part.data.label_scale * max(1.0, 1.0 / fit.kappa)


def _proposal(
    part: Participant, target: FloatArray, fit: messages.LocalFit
) -> AnyArray | None:
    table, solver = part.data.table, part.data.solver
    if table not in fit.rho_in:
        raise MessageError(f"'rho-in' lacks table {table!r}")
    rho_in = fit.rho_in[table]
    part.set_inner_penalty(rho_in)
    if solver is not None:
        part.releaser.check_clear(PARAMETERS)
        proposal = part.fit_consensus_exactly(solver, target, fit.kappa, rho_in)
    else:
        _fit_by_gradient(part, target, fit, rho_in)
        proposal = part.propose(part.model.parameters)
    share = part.share(proposal, _parameter_unit(part))
    # a shard without rows to train on only learns what the others agree on
    return share if part.union.shard in part.union.shards else None


def _parameter_unit(part: Participant) -> float:
    # the scores of other models are in units of the label
    return part.data.label_scale if isinstance(part.model, LinearModel) else 1.0


def _fit_by_gradient(
    part: Participant, target: FloatArray, fit: messages.LocalFit, rho_in: float | None
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


def _fit_torch(part: Participant, problem: FitProblem, fit: messages.LocalFit) -> None:
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


def consensus(
    site: Site, request: messages.ConsensusRequest
) -> messages.ConsensusReply:
    """Take the parameters of the table's model; reply with local scores."""
    updates = {}
    for part in site.parts():
        if part.number not in request.parts:
            continue
        _accept(part, request.parts[part.number], request.fit)
        updates[part.number] = messages.ConsensusUpdate(_scores(part, request))
        site.save(part)
    return messages.ConsensusReply(updates)


def _accept(
    part: Participant, common: messages.CommonParameters, fit: messages.LocalFit | None
) -> None:
    """Find the common parameters of a sharded table, or take those the server found."""
    data, parameters = part.data, len(part.model.penalised)
    check_sizes(common, parameters=parameters, summed=parameters + 1)
    if data.update is messages.Update.GIVEN:
        part.model.parameters = required(common.parameters, "parameters")
    elif data.update is messages.Update.GRAM:
        fit = required(fit, "fit")
        moments = part.total(common.sum, _moment_unit(part, fit))
        if data.solver is None:
            raise MessageError("no epoch has begun")
        _solve(part, data.solver, moments, fit.kappa)
    elif data.update is messages.Update.CONSENSUS:
        total = part.total(common.sum, _parameter_unit(part))
        rho_in = float(part.vectors["rho_in"][0])
        shards, penalised = len(part.union.shards), part.model.penalised
        part.accept_consensus(
            consensus_parameters(total, shards, penalised, rho_in, data.l2)
        )
    else:
        raise SiteError(f"table {part.data.table}: the server may not set its model")
