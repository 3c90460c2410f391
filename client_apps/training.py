"""What a site does in training: the ADMM and SGD actions over all its parts.

Rounds and what travels in them (design section 6): a table in one shard answers
``admm`` with its new local scores at once; a sharded table answers with statistics or
parameters first, and with local scores after ``consensus``. SGD likewise with ``sgd``
and ``step``.
"""

from typing import Any

import numpy as np

from client_apps.shard import Shard
from client_apps.site import Part, Site
from tp_flower.errors import SiteError
from tp_flower.learning.losses import FloatArray
from tp_flower.protocol import AnyArray, Packet, Update
from tp_flower.randomness import Stream, generator

Own = dict[str, AnyArray]


def admm(site: Site, request: Packet) -> Packet:
    """Take the targets; update theta, or send what the server needs to do so."""
    arrays, changed = {}, {}
    for part in site.parts():
        target = _received(request, part, "target", len(part.shard.data.multiplicity))
        for name, array in _theta_update(part, target, request.header).items():
            arrays[part.number, name] = array
        changed[part.number] = part.state
    site.save_state(changed)
    return Packet({}, arrays)


def _theta_update(part: Part, target: FloatArray, header: dict[str, Any]) -> Own:
    shard, kappa = part.shard, float(header["kappa"])
    if part.update is Update.GRAM:
        return {"moments": shard.moments(target)}
    if part.update is Update.CONSENSUS:
        if header["more-rounds"]:
            shard.vectors["target"] = target.ravel()
        return {"proposal": _propose(part, target, header)}
    if part.solver is not None:
        shard.fit_exactly(part.solver, target, kappa)
    else:
        _fit_by_gradient(part, target, header, None)
    return {"scores": _wire(shard.scores())}


def _propose(part: Part, target: FloatArray, header: dict[str, Any]) -> FloatArray:
    rho_in = float(header["rho-in"][part.table])
    part.shard.set_inner_penalty(rho_in)
    if part.solver is not None:
        kappa = float(header["kappa"])
        return part.shard.fit_consensus_exactly(part.solver, target, kappa, rho_in)
    _fit_by_gradient(part, target, header, rho_in)
    return part.shard.propose(part.shard.model.parameters)


def _fit_by_gradient(
    part: Part, target: FloatArray, header: dict[str, Any], rho_in: float | None
) -> None:
    """Fit a torch model; toward w - u with strength rho_in if that is given."""
    # linear models never import torch
    from tp_flower.learning.neural import (
        FitBudget,
        FitProblem,
        TorchModel,
        fit_least_squares,
    )

    shard, model = part.shard, part.shard.model
    if not isinstance(model, TorchModel):
        raise TypeError(f"{type(model).__name__} cannot be fitted by gradient")
    problem = FitProblem(
        features=shard.data.trained,
        multiplicity=shard.data.multiplicity,
        target=target,
        kappa=float(header["kappa"]),
        joined_rows=shard.data.joined_rows,
        strength=shard.data.l2 if rho_in is None else rho_in,
        centre=np.zeros(len(model.penalised)) if rho_in is None else shard.centre,
        penalised=model.penalised if rho_in is None else np.ones_like(model.penalised),
    )
    if rho_in is not None:
        model.parameters = shard.vectors["theta"]
    budget = FitBudget(
        passes=int(header["local-epochs"]) or FitBudget.passes,
        learning_rate=float(header["learning-rate"]) or FitBudget.learning_rate,
    )
    rng = generator(
        int(header["seed"]), Stream.LOCAL_FIT, int(header["epoch"]), part.number
    )
    fit_least_squares(model, problem, budget, rng)


def consensus(site: Site, request: Packet) -> Packet:
    """Take the sharded tables' common parameters; reply with local scores.

    With further inner rounds to come, the reply is the next proposal instead.
    """
    arrays, changed = {}, {}
    for part in site.parts():
        if (part.number, "parameters") not in request.arrays:
            continue
        size = len(part.shard.model.penalised)
        parameters = np.array(request.array(part.number, "parameters"), np.float64)
        if parameters.shape != (size,):
            raise SiteError(f"table {part.table}: expected {size} parameters")
        if part.update is Update.CONSENSUS:
            part.shard.accept_consensus(parameters)
        else:
            part.shard.model.parameters = parameters
        if part.update is Update.CONSENSUS and request.header["more-rounds"]:
            outputs = part.shard.model.outputs
            target = part.shard.vectors["target"].reshape(-1, outputs)
            arrays[part.number, "proposal"] = _propose(part, target, request.header)
        if not request.header["more-rounds"]:
            arrays[part.number, "scores"] = _wire(part.shard.scores())
        changed[part.number] = part.state
    site.save_state(changed)
    return Packet({}, arrays)


def sgd(site: Site, request: Packet) -> Packet:
    """Take Y of a batch; step (one shard) or send the gradient (sharded table)."""
    arrays, changed = {}, {}
    for part in site.parts():
        batch = int(request.header["batch"])
        rows = len(part.shard.data.batch_of(batch))
        messages = _received(request, part, "messages", rows)
        gradient = part.shard.batch_gradient(batch, messages)
        if part.update is Update.SUM:
            arrays[part.number, "gradient"] = gradient
            continue
        _step(part, gradient, request.header)
        arrays.update(_next_scores(part, request.header))
        changed[part.number] = part.state
    site.save_state(changed)
    return Packet({}, arrays)


def step(site: Site, request: Packet) -> Packet:
    """Take the summed gradient of the sharded tables, step, send the next scores."""
    arrays, changed = {}, {}
    for part in site.parts():
        if part.update is not Update.SUM:
            continue
        _step(part, request.array(part.number, "gradient"), request.header)
        arrays.update(_next_scores(part, request.header))
        changed[part.number] = part.state
    site.save_state(changed)
    return Packet({}, arrays)


def _step(part: Part, gradient_sum: AnyArray, header: dict[str, Any]) -> None:
    gradient = gradient_sum / float(header["batch-rows"])
    part.shard.step(gradient, float(header["learning-rate"]), float(header["momentum"]))


def _next_scores(part: Part, header: dict[str, Any]) -> dict[tuple[int, str], AnyArray]:
    """Return the scores that ride along: next batch, held-out rows, or all rows."""
    shard: Shard = part.shard
    arrays: dict[tuple[int, str], AnyArray] = {}
    if header["next-batch"] is not None:
        arrays[part.number, "batch-scores"] = _wire(
            shard.batch_scores(int(header["next-batch"]))
        )
    if header["evaluate"] == "tested":
        arrays[part.number, "tested-scores"] = _wire(shard.tested_scores())
    elif header["evaluate"] == "all":
        arrays[part.number, "scores"] = _wire(shard.scores())
    return arrays


def finish(site: Site, request: Packet) -> Packet:
    """Save the models of a run that went well, and forget all else of it."""
    if request.header.get("keep-models"):
        site.keep_models()
    site.clear()
    return Packet()


def _received(request: Packet, part: Part, name: str, rows: int) -> FloatArray:
    array = request.array(part.number, name)
    if array.ndim != 2 or len(array) != rows:
        raise SiteError(
            f"table {part.table}: array {name!r} has shape {array.shape}, "
            f"expected {rows} rows"
        )
    return array.astype(np.float64)


def _wire(scores: FloatArray) -> AnyArray:
    # the server refuses what does not fit, and says what to do
    with np.errstate(over="ignore", invalid="ignore"):
        return scores.astype(np.float32)
