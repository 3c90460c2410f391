"""A site's epoch of ADMM: fit every participant's model to its target.

The server sends how far the scores are to step; the target is the own scores plus that.

A table in one shard answers ``admm`` with the scores of its new model. A sharded table
answers with statistics or parameters first, and with scores after ``consensus``
(learning over unions).

Notation: w, u -> ``Consensus.common``, ``Consensus.duals``, (p,) each.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from client_apps.methods.exact import start_exactly, step_of
from client_apps.methods.site_method import Beginning, JoinMethod, prepared_part
from client_apps.operator.curvature import probed_curvature
from client_apps.operator.participant import Participant
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MessageError, SiteError
from tp_flower.learning.models.local_model import FitProblem, LinearModel
from tp_flower.learning.solvers import Solver, exact_update
from tp_flower.methods.admm.iterations import consensus_parameters
from tp_flower.methods.admm.messages import (
    TRAIN_ADMM,
    AdmmReply,
    AdmmRequest,
    AdmmUpdate,
)
from tp_flower.privacy.plan import MODEL, PARAMETERS
from tp_flower.protocol import training_messages as messages
from tp_flower.protocol.codec import check_sizes, required
from tp_flower.protocol.messages import Action
from tp_flower.randomness import Stream, generator


@dataclass
class Consensus:
    """The consensus that a shard seeks with the table's other shards.

    Attributes:
        theta: its own parameters, (p,).
        common: w, those that the shards agree on, (p,).
        duals: u, scaled by 1 / ``rho_in``, (p,).
        rho_in: the penalty that scales them; None before the first epoch.
    """

    theta: FloatArray
    common: FloatArray
    duals: FloatArray
    rho_in: float | None = None

    @property
    def centre(self) -> FloatArray:
        """The point that theta^q is pulled to, w - u, (p,)."""
        return self.common - self.duals

    def set_penalty(self, rho_in: float) -> None:
        """Use rho_in from now on; scaled duals u are divided by it, so they follow."""
        if self.rho_in is not None:
            self.duals *= self.rho_in / rho_in
        self.rho_in = rho_in

    def propose(self, theta: FloatArray) -> FloatArray:
        """Keep theta^q; return theta^q + u^q, all that the server needs, (p,)."""
        self.theta = theta
        return theta + self.duals

    def accept(self, common: FloatArray) -> None:
        """Take w and update u += theta - w (Eq. 21)."""
        self.duals += self.theta - common
        self.common = common


@dataclass
class AdmmState:
    """The state of ADMM; ``consensus`` is that of a shard that seeks one."""

    consensus: Consensus | None = None


Part = Participant[AdmmState]


class AdmmMethod(JoinMethod[AdmmState]):
    """ADMM at a site, over the tables and over the shards of a table."""

    state = AdmmState
    carriers = TRAIN_ADMM, Action.PREPARE

    def begin(self, part: Participant[Any], columns: int) -> Beginning[AdmmState]:
        """Begin with the solver of a linear model, and for others with a probe."""
        state = AdmmState()
        parameters = part.model.parameters
        if part.data.update is messages.Update.CONSENSUS:
            zeros = np.zeros(len(parameters))
            state = AdmmState(Consensus(parameters, parameters, zeros))
        if not isinstance(part.model, LinearModel):
            reply = prepared_part(part, **probed_curvature(part, columns))
            return Beginning(reply, state)
        reply, solver = start_exactly(part, columns, is_exact=True)
        return Beginning(reply, state, solver)


def admm(site: Site, request: AdmmRequest) -> AdmmReply:
    """Step towards the targets; update theta, or send the share of its update."""
    updates = {}
    for part in site.parts(AdmmState):
        step = step_of(site, part, request.parts)
        if request.is_best:
            part.mark_best()
        updates[part.number] = _theta_update(part, step, request)
        site.save(part)
    return AdmmReply(updates)


def _theta_update(part: Part, step: FloatArray, request: AdmmRequest) -> AdmmUpdate:
    """Update theta; return the new scores, or the share of what a union sums."""
    fit = request.fit
    data = part.data
    if data.update is messages.Update.GRAM:
        moments = part.moments(step, fit.kappa)
        return AdmmUpdate(share=part.share(moments, _moment_unit(part, fit)))
    if data.update is messages.Update.LOCAL and data.solver is not None:
        if data.plan.statistics is None:
            part.releaser.check_clear(MODEL)
        _solve(part, data.solver, part.moments(step, fit.kappa), fit.kappa)
        return AdmmUpdate(scores=_scores(part, request))
    target = part.model.scores(data.trained) + step
    if data.update is messages.Update.CONSENSUS:
        return AdmmUpdate(share=_proposal(part, target, fit))
    _fit_by_gradient(part, target, fit, None)
    return AdmmUpdate(scores=_scores(part, request))


def _scores(part: Part, request: AdmmRequest | messages.ConsensusRequest) -> AnyArray:
    part.begin_scores(request.scores_number)
    return part.release_rows(is_tested=request.evaluate)


def _solve(part: Part, solver: Solver, moments: FloatArray, kappa: float) -> None:
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


def _moment_unit(part: Part, fit: messages.LocalFit) -> float:
    """Return the size of features times steps, which are derivatives over kappa."""
    return part.data.joined_rows * part.data.label_scale * max(1.0, 1.0 / fit.kappa)


def _proposal(
    part: Part, target: FloatArray, fit: messages.LocalFit
) -> AnyArray | None:
    """Return a shard's share of the sum of proposals; None without rows."""
    table = part.data.table
    solver = part.data.solver
    if table not in fit.rho_in:
        raise MessageError(f"'rho-in' lacks table {table!r}")
    rho_in = fit.rho_in[table]
    consensus = _consensus_of(part)
    consensus.set_penalty(rho_in)
    if solver is not None:
        part.releaser.check_clear(PARAMETERS)
        proposal = fit_consensus_exactly(part, solver, target, fit.kappa, rho_in)
    else:
        _fit_by_gradient(part, target, fit, consensus)
        proposal = consensus.propose(part.model.parameters)
    share = part.share(proposal, _parameter_unit(part))
    # a shard without rows to train on only learns what the others agree on
    if part.union.shard not in part.union.shards:
        return None
    return share


def fit_consensus_exactly(
    part: Part, solver: Solver, target: FloatArray, kappa: float, rho_in: float
) -> FloatArray:
    """Fit theta^q (Eq. 22) of a linear model and return theta^q + u^q, (p,).

    With theta = a + delta, a = w - u, this is a ridge regression of strength rho_in on
    the target minus the scores of a. ``solver`` penalises the intercept, too.
    """
    consensus = _consensus_of(part)
    centre = part.model.parameters = consensus.centre
    remaining = target - part.model.scores(part.data.trained)
    delta = solver.solve(part.weighted_sum(remaining), kappa, rho_in)
    return consensus.propose(centre + delta.ravel())


def _consensus_of(part: Part) -> Consensus:
    """Return the consensus of a shard of a table that seeks one."""
    if part.state.consensus is None:
        raise MessageError("the shards of this table seek no consensus")
    return part.state.consensus


def _parameter_unit(part: Part) -> float:
    # the scores of other models are in units of the label
    if not isinstance(part.model, LinearModel):
        return 1.0
    return part.data.label_scale


def _fit_by_gradient(
    part: Part, target: FloatArray, fit: messages.LocalFit, consensus: Consensus | None
) -> None:
    """Fit a torch model, pulled toward w - u of a consensus if there is one."""
    data = part.data
    model = part.model
    problem = FitProblem(
        features=data.trained,
        multiplicity=data.multiplicity,
        target=target,
        kappa=fit.kappa,
        joined_rows=data.joined_rows,
        strength=data.l2,
        centre=np.zeros(len(model.penalised)),
        penalised=model.penalised,
    )
    if consensus is not None:
        model.parameters = consensus.theta
        problem = replace(
            problem,
            strength=required(consensus.rho_in, "rho_in"),
            centre=consensus.centre,
            penalised=np.ones_like(model.penalised),
        )
    if part.data.plan.fit is not None:
        part.releaser.fit(model, problem, fit.learning_rate, data.units)
    else:
        part.releaser.check_clear(MODEL)
        _fit_torch(part, problem, fit)


def _fit_torch(part: Part, problem: FitProblem, fit: messages.LocalFit) -> None:
    """Fit a torch model by gradient descent."""
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
    for part in site.parts(AdmmState):
        if part.number not in request.parts:
            continue
        _accept(part, request.parts[part.number], request.fit)
        updates[part.number] = messages.ConsensusUpdate(_scores(part, request))
        site.save(part)
    return messages.ConsensusReply(updates)


def _accept(
    part: Part, common: messages.CommonParameters, fit: messages.LocalFit | None
) -> None:
    """Find the common parameters of a sharded table."""
    data = part.data
    parameters = len(part.model.penalised)
    check_sizes(common, parameters=parameters, summed=parameters + 1)
    if data.update is messages.Update.GRAM:
        fit = required(fit, "fit")
        moments = part.total(common.sum, _moment_unit(part, fit))
        if data.solver is None:
            raise MessageError("no epoch has begun")
        _solve(part, data.solver, moments, fit.kappa)
    elif data.update is messages.Update.CONSENSUS:
        total = part.total(common.sum, _parameter_unit(part))
        consensus = _consensus_of(part)
        penalised = part.model.penalised
        rho_in = required(consensus.rho_in, "rho_in")
        shards = len(part.union.shards)
        consensus.accept(
            consensus_parameters(total, shards, penalised, rho_in, data.l2)
        )
        part.model.parameters = consensus.common
    else:
        raise SiteError(f"table {part.data.table}: the server may not set its model")
