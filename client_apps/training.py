"""What a site does in training: the ADMM and SGD actions over all its parts.

Rounds and what travels in them (design section 6): a table in one shard answers
``admm`` with its new local scores at once; a sharded table answers with statistics or
parameters first, and with local scores after ``consensus``. SGD likewise with ``sgd``
and ``step``.
"""

import numpy as np

from client_apps.orders import MOST_SEED, Order, header_of, real_numbers
from client_apps.part import Part, State
from client_apps.site import Site
from tp_flower.errors import DivergedError, SiteError
from tp_flower.learning.losses import FloatArray
from tp_flower.learning.problem import FitProblem
from tp_flower.privacy.plan import MODEL, MOMENTS, PARAMETERS
from tp_flower.privacy.statistics_update import Rows, private_update
from tp_flower.protocol import AnyArray, ArrayKey, Packet, Update
from tp_flower.randomness import Stream, generator

SENT = "sent"
"""State vector: the scores that the server has made the targets from, (n, d_c)."""

Own = dict[str, AnyArray]
Arrays = dict[ArrayKey, AnyArray]


def admm(site: Site, request: Packet) -> Packet:
    """Take the targets; update theta, or send what the server needs to do so."""
    arrays: Arrays = {}
    changed = {}
    header = header_of(request)
    for part in site.parts():
        target = _received(request, part, "target", len(part.shard.data.multiplicity))
        for name, array in _theta_update(part, target, header).items():
            arrays[part.number, name] = array
        changed[part.number] = _finite_state(part)
    site.save_state(changed)
    return Packet({}, arrays)


def _theta_update(part: Part, target: FloatArray, header: Order) -> Own:
    shard, kappa = part.shard, _kappa(header)
    if part.outgoing.plan.statistics is not None:
        return _private_exact_update(part, target, header)
    if part.update is Update.GRAM:
        part.outgoing.check_clear(MOMENTS)
        return {"moments": shard.moments(target)}
    if part.update is Update.CONSENSUS:
        if _has_more_rounds(header):
            shard.vectors["target"] = target.ravel()
        return {"proposal": _propose(part, target, header)}
    if part.solver is not None:
        part.outgoing.check_clear(MODEL)
        shard.fit_exactly(part.solver, target, kappa)
    else:
        _fit_by_gradient(part, target, header, None)
    return {"scores": _send_scores(part, header)}


def _send_scores(part: Part, header: Order) -> AnyArray:
    """Return the scores of all rows to be sent, and keep them as they will arrive.

    Where held-out rows are not evaluated, those of the trained rows.
    """
    own = part.shard
    found = own.scores() if header.flag("evaluate") else own.trained_scores()
    scores = part.outgoing.scores(_finite(part, found))
    if part.outgoing.plan.statistics is not None and _has_noisy_scores(part):
        part.shard.vectors[SENT] = scores
    return scores


def _has_noisy_scores(part: Part) -> bool:
    return part.outgoing.plan.scores is not None


def _sent_scores(part: Part) -> AnyArray:
    """Return the scores (n, d_c) that the server has made the targets from."""
    if not _has_noisy_scores(part):
        return part.shard.scores()
    # before the first ones it takes those of an untrained linear model for granted
    none = np.zeros((len(part.shard.data.features), part.shard.model.outputs))
    return part.shard.vectors.get(SENT, none)


def _private_exact_update(part: Part, target: FloatArray, header: Order) -> Own:
    """Update theta by noisy statistics, or send those that the server needs."""
    shard, kappa = part.shard, _kappa(header)
    model = shard.linear
    rows = Rows(shard.data.trained, shard.data.multiplicity, intercept=model.intercept)
    sent = _sent_scores(part)[: len(target)]
    moments = part.outgoing.moments(rows, kappa * (target - sent))
    if part.update is Update.GRAM:
        return {"moments": moments}
    if part.solver is None:
        raise TypeError(f"table {part.table}: no solver of the private statistics")
    theta = private_update(part.solver, model.weights, moments, kappa, shard.data.l2)
    model.parameters = theta.ravel()
    return {"scores": _send_scores(part, header)}


def _propose(part: Part, target: FloatArray, header: Order) -> FloatArray:
    rho_in = header.order("rho-in").number(part.table, above_zero=True)
    part.shard.set_inner_penalty(rho_in)
    if part.solver is not None:
        part.outgoing.check_clear(PARAMETERS)
        kappa = _kappa(header)
        return part.shard.fit_consensus_exactly(part.solver, target, kappa, rho_in)
    _fit_by_gradient(part, target, header, rho_in)
    return part.shard.propose(part.shard.model.parameters)


def _fit_by_gradient(
    part: Part, target: FloatArray, header: Order, rho_in: float | None
) -> None:
    """Fit a torch model; toward w - u with strength rho_in if that is given."""
    shard, model = part.shard, part.shard.model
    problem = FitProblem(
        features=shard.data.trained,
        multiplicity=shard.data.multiplicity,
        target=target,
        kappa=_kappa(header),
        joined_rows=shard.data.joined_rows,
        strength=shard.data.l2 if rho_in is None else rho_in,
        centre=np.zeros(len(model.penalised)) if rho_in is None else shard.centre,
        penalised=model.penalised if rho_in is None else np.ones_like(model.penalised),
    )
    if rho_in is not None:
        model.parameters = shard.vectors["theta"]
    if part.outgoing.plan.fit is not None:
        part.outgoing.fit(model, problem, header.number("learning-rate"))
    else:
        part.outgoing.check_clear(MODEL)
        _fit_torch(part, problem, header)


def _fit_torch(part: Part, problem: FitProblem, header: Order) -> None:
    # linear models never import torch
    from tp_flower.learning.neural import FitBudget, TorchModel, fit_least_squares

    model = part.shard.model
    if not isinstance(model, TorchModel):
        raise TypeError(f"{type(model).__name__} cannot be fitted by gradient")
    budget = FitBudget(
        passes=header.count("local-epochs") or FitBudget.passes,
        learning_rate=header.number("learning-rate") or FitBudget.learning_rate,
    )
    seed, epoch = header.count("seed", most=MOST_SEED), header.count("epoch")
    rng = generator(seed, Stream.LOCAL_FIT, epoch, part.number)
    fit_least_squares(model, problem, budget, rng)


def consensus(site: Site, request: Packet) -> Packet:
    """Take parameters that the server has found; reply with local scores.

    With further inner rounds to come, the reply is the next proposal instead.
    """
    arrays: Arrays = {}
    changed = {}
    header = header_of(request)
    more_rounds = _has_more_rounds(header)
    for part in site.parts():
        if (part.number, "parameters") not in request.arrays:
            continue
        _accept(part, request)
        if part.update is Update.CONSENSUS and more_rounds:
            target = part.shard.vectors.get("target")
            if target is None:
                raise SiteError("malformed request: no round of consensus has begun")
            target = target.reshape(-1, part.shard.model.outputs)
            arrays[part.number, "proposal"] = _propose(part, target, header)
        if not more_rounds:
            arrays[part.number, "scores"] = _send_scores(part, header)
        changed[part.number] = _finite_state(part)
    site.save_state(changed)
    return Packet({}, arrays)


def _accept(part: Part, request: Packet) -> None:
    """Take the common parameters of a sharded table."""
    parameters = real_numbers(
        request.array(part.number, "parameters"),
        "parameters",
        (len(part.shard.model.penalised),),
    )
    if part.update is Update.CONSENSUS:
        part.shard.accept_consensus(parameters)
    elif part.update in (Update.GRAM, Update.GIVEN):
        part.shard.model.parameters = parameters
    else:
        raise SiteError(f"table {part.table}: its model is not another's to set")


def sgd(site: Site, request: Packet) -> Packet:
    """Take Y of a batch; step (one shard) or send the gradient (sharded table).

    With staleness a sharded table's step comes with the next batch: its shards take it
    first, and send the next scores without the step that this batch leads to.
    """
    arrays: Arrays = {}
    changed = {}
    header = header_of(request)
    is_stale = header.flag("stale")
    for part in site.parts():
        is_sharded = part.update is Update.SUM
        if is_sharded and (part.number, "gradient") in request.arrays:
            _step(part, _mean_gradient(part, request), header)
        gradient = _gradient(part, request, header)
        if is_sharded:
            arrays[part.number, "gradient"] = gradient
        else:
            _step(part, gradient / header.number("batch-rows", above_zero=True), header)
        if not is_sharded:
            arrays.update(_next_scores(part, header))
        elif is_stale:
            arrays.update(_foreseen_scores(part, header))
        changed[part.number] = _finite_state(part)
    site.save_state(changed)
    return Packet({}, arrays)


def step(site: Site, request: Packet) -> Packet:
    """Take the mean gradient of the sharded tables, step, send the next scores."""
    arrays: Arrays = {}
    changed = {}
    header = header_of(request)
    for part in site.parts():
        if part.update is not Update.SUM:
            continue
        _step(part, _mean_gradient(part, request), header)
        arrays.update(_next_scores(part, header))
        changed[part.number] = _finite_state(part)
    site.save_state(changed)
    return Packet({}, arrays)


def _gradient(part: Part, request: Packet, header: Order) -> FloatArray:
    """Return the sum of the gradients of a batch's rows, (p,)."""
    batch = _batch(part, header, "batch")
    rows = len(part.shard.data.batch_of(batch))
    messages = _received(request, part, "messages", rows)
    features = part.shard.data.batch(batch)
    return part.outgoing.gradient(part.shard.model, features, messages, batch)


def _mean_gradient(part: Part, request: Packet) -> FloatArray:
    """Return the gradient of a batch over all shards, and over its rows, (p,)."""
    array = request.array(part.number, "gradient")
    return real_numbers(array, "gradient", (len(part.shard.model.penalised),))


def _step(part: Part, gradient: FloatArray, header: Order) -> None:
    part.shard.step(gradient, *_pace(part, header))


def _pace(part: Part, header: Order) -> tuple[float, float]:
    """Return the learning rate and the momentum of a part's steps."""
    rate = header.order("learning-rates").number(part.table)
    return rate, header.number("momentum", high=1.0)


def _foreseen_scores(part: Part, header: Order) -> Arrays:
    """Return the next scores with what is known of the step that is still to come."""
    model = part.shard.model
    theta = model.parameters
    model.parameters = part.shard.foreseen(*_pace(part, header))
    arrays = _next_scores(part, header)
    model.parameters = theta
    return arrays


def _next_scores(part: Part, header: Order) -> Arrays:
    """Return the scores that ride along: next batch, held-out rows, or all rows."""
    shard, own = part.shard, part.outgoing
    arrays: Arrays = {}
    if header.has("next-batch"):
        batch = _batch(part, header, "next-batch")
        scores = own.batch_scores(_finite(part, shard.batch_scores(batch)), batch)
        arrays[part.number, "batch-scores"] = scores
    asked = header.has("evaluate") and header.text("evaluate", ("tested", "all"))
    if asked == "tested":
        arrays[part.number, "tested-scores"] = own.scores(
            _finite(part, shard.tested_scores())
        )
    elif asked == "all":
        arrays[part.number, "scores"] = own.scores(_finite(part, shard.scores()))
    return arrays


def _finite_state(part: Part) -> State:
    """Return what is to be kept of a part.

    Raises:
        DivergedError: its model is not finite any more.
    """
    _finite(part, part.shard.model.parameters)
    return part.state


def _finite(part: Part, numbers: FloatArray) -> FloatArray:
    """Return a part's parameters or scores.

    Raises:
        DivergedError: they are not finite.
    """
    if not np.isfinite(numbers).all():
        raise DivergedError(
            f"table {part.table}: the model is not finite any more: training diverged. "
            "Lower learning-rate (0 chooses one)"
        )
    return numbers


def _received(request: Packet, part: Part, name: str, rows: int) -> FloatArray:
    array = request.array(part.number, name)
    return real_numbers(array, name, (rows, part.shard.model.outputs))


def _batch(part: Part, header: Order, name: str) -> int:
    """Return the number of a batch of the run's plan."""
    total = len(part.shard.data.batch_start) - 1
    if not total:
        raise SiteError("malformed request: the run has no plan of batches")
    return header.count(name, most=total - 1)


def _kappa(header: Order) -> float:
    return header.number("kappa", above_zero=True)


def _has_more_rounds(header: Order) -> bool:
    return header.count("more-rounds") > 0
