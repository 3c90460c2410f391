"""Linear models that a site solves for: shared by the methods that step exactly.

A table in one shard factorises its own Gram matrix [T, 1]^T diag(G) [T, 1], or solves
by iterations where it is wide. The shards of a table send shares of theirs with
``train.prepare``, and make the solver of the sum that comes with the first step.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from client_apps.methods.site_method import prepared_part
from client_apps.operator.curvature import typical_curvature
from client_apps.operator.participant import Participant, body_of, solver_entry
from client_apps.rounds.site import Site
from tp_flower.arrays import FloatArray
from tp_flower.errors import MessageError
from tp_flower.features.sparse import EncodedRows
from tp_flower.learning import solvers
from tp_flower.learning.models.local_model import LinearModel, host_features
from tp_flower.privacy.plan import GRAM
from tp_flower.privacy.sealed_sums import gram_size, joined_gram, split_gram
from tp_flower.privacy.statistics_update import usable_gram
from tp_flower.protocol.codec import check_sizes
from tp_flower.protocol.training_messages import PreparedPart, ScoreSteps, Update


def step_of(
    site: Site, part: Participant[Any], bodies: Mapping[int, ScoreSteps]
) -> FloatArray:
    """Return the steps of a part's trained rows, (n_trained, d_c).

    The solver of the sum that comes with the first of them is stored.
    """
    body = body_of(bodies, part)
    outputs = part.model.outputs
    check_sizes(body, trained=len(part.data.multiplicity), outputs=outputs)
    if body.sum is not None:
        site.keep(part.number, solver_entry(_summed_solver(part, body)))
    return body.step.astype(np.float64)


def _summed_solver(part: Participant[Any], body: ScoreSteps) -> solvers.RidgeSolver:
    """Return the solver of the Gram matrix that the shards have summed."""
    width = len(part.model.parameters) // part.model.outputs
    data = part.data
    if data.update is not Update.GRAM:
        raise MessageError(f"'sum' does not go with update {data.update.value!r}")
    check_sizes(body, summed_gram=gram_size(width) + 1)
    matrix = joined_gram(part.total(body.sum), width)
    return solvers.RidgeSolver.from_gram(
        usable_gram(matrix * data.joined_rows, body.deviation or 0.0),
        data.joined_rows,
        intercept=part.linear.intercept,
    )


Start = tuple[PreparedPart, solvers.Solver | None]


def start_exactly(part: Participant[Any], columns: int, *, is_exact: bool) -> Start:
    """Return the reply about a linear model, and the solver of its steps.

    It is ``is_exact`` where a step must be that of the table's whole Gram matrix; else
    the matrix of the most frequent columns does, with the others' diagonal. The shards
    of a table have a solver once their matrices are summed, a model that is fitted
    privately has none.
    """
    plan = part.data.plan
    if part.data.update is not Update.LOCAL or plan.is_private:
        return _start(part, columns, is_exact=is_exact)
    cache = part.data.kept
    if is_exact not in cache:
        cache[is_exact] = _start(part, columns, is_exact=is_exact)
    start: Start = cache[is_exact]
    return start


def _start(part: Participant[Any], columns: int, *, is_exact: bool) -> Start:
    """Return the start of a linear model; what leaves in it goes by the releaser."""
    model = part.linear
    data = part.data
    plan = part.data.plan
    if plan.fit is not None or plan.gradients is not None:
        return prepared_part(part, **typical_curvature(part, columns)), None
    total = data.joined_rows
    width = max(len(model.parameters) // model.outputs, 1)
    if plan.statistics is None:
        rows = host_features(data.trained)
        solver = _solver_of_rows(part, model, rows, is_exact=is_exact)
        if solver is not None:
            return prepared_part(part, mean_curvature=solver.trace / width), solver
    matrix = _gram(part)
    deviation = 0.0
    curvature = {"mean_curvature": float(np.trace(matrix)) / (total * width)}
    if plan.statistics is not None:
        # the trace of a noisy matrix may be negative
        curvature = typical_curvature(part, columns)
        deviation = plan.statistics.gram_deviation
    if data.update is Update.GRAM:
        share = part.share(split_gram(matrix / total))
        noise = {"gram_deviation": deviation, **curvature}
        return prepared_part(part, share=share, **noise), None
    return prepared_part(part, **curvature), solvers.RidgeSolver.from_gram(
        usable_gram(matrix, deviation), total, intercept=_is_centred(part, model)
    )


def _gram(part: Participant[Any]) -> FloatArray:
    """Return [T, 1]^T diag(G) [T, 1] of the trained rows, with the plan's noise."""
    rows = part.data.rows(intercept=part.linear.intercept)
    if part.data.plan.is_private:
        return part.releaser.gram(rows)
    cache = part.data.kept
    if GRAM not in cache:
        cache[GRAM] = part.releaser.gram(rows)
    matrix: FloatArray = cache[GRAM]
    return matrix


def _is_centred(part: Participant[Any], model: LinearModel) -> bool:
    """Return whether the intercept is free of the penalty.

    A step of a consensus penalises all parameters, including the intercept.
    """
    return model.intercept and part.data.update is Update.LOCAL


def _solver_of_rows(
    part: Participant[Any], model: LinearModel, rows: EncodedRows, *, is_exact: bool
) -> solvers.Solver | None:
    """Return the solver of a table that needs no whole Gram matrix; None if it does."""
    data = part.data
    way = solvers.factorisation(*rows.shape, is_exact=is_exact)
    start = rows, data.multiplicity, data.joined_rows
    is_local = data.update is Update.LOCAL
    if is_local and way == solvers.BY_ROWS:
        return solvers.RidgeSolver.from_rows(*start, intercept=model.intercept)
    if is_local and way == solvers.BY_FREQUENT:
        return solvers.RidgeSolver.from_frequent(*start, intercept=model.intercept)
    if data.update is not Update.GRAM and rows.shape[1] > solvers.MOST_COLUMNS:
        return solvers.IterativeSolver.of_rows(
            *start, intercept=model.intercept, centred=is_local
        )
    return None
