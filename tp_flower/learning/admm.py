"""Learning over joins by sharing ADMM: the server's half of one epoch, on arrays.

    minimise (1/N) sum_j loss(z_j; y_j) + beta sum_i R(theta_i)  s.t.  z = b + sum_i h_i

One epoch, with kappa = c * rho (Boyd et al. 2011, section 7.3; paper Eq. 7, 8, 14):

    h~       = alpha h + (1 - alpha) z                  over-relaxation, alpha in [1, 2)
    z        = prox(h~ + duals / rho)
    duals   += rho (h~ - z)                             == grad loss(z), exactly
    v        = duals + rho (h - z)
    target_i = h_i - seg_i(v) / (kappa G_i)             sent to the sites of table i

The paper's Eq. 9/16 is c = 1 (Jacobi: every table corrects the whole residual at once)
and does not converge for three tables in general; c = M (sharing) does for every rho >
0 on convex problems.

A joined row of a LEFT JOIN may lack a table: there h_i = 0 whatever theta_i, as if the
table's row were one whose model is constant. To the constraint z = b + sum_i A_i
theta_i that is a zero row of A_i, which the convergence of sharing ADMM allows: the
row's term in table i's update is a constant, so G_i counts matched joined rows only,
seg_i sums over them, and c stays M. (M_j <= M tables share the residual of joined row
j; a c above M_j makes a shorter step there, never a wrong one.)

Where joined rows have weights w_j of mean 1, the whole augmented Lagrangian of row j is
multiplied by w_j. That changes neither its z- nor its dual update (the multiplier of
the constraint is w_j duals_j, and equals w_j grad loss(z_j)), and the tables' updates
through sums only: target_i = h_i - seg_i(w v) / (kappa G^w_i) with G^w_i = seg_i(w),
which takes the place of G_i at the sites too. Equal weights leave all as it is; a
weight of 2 is the row twice.

Notation:
    h     ``scores``  (N, d_c)            h_i   ``local_scores``  (n_i, d_c)
    z     ``z``  (N, d_c)                 lambda  ``duals``  (N, d_c)
    c     ``corrections``: M or 1         G_i   ``multiplicity``  (n_i,)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tp_flower.arrays import BLOCK_ROWS, FloatArray
from tp_flower.joins.mapping import TableRows
from tp_flower.learning.losses import Loss
from tp_flower.threads import blocks_of, in_threads

LocalScores = dict[str, FloatArray]

RESIDUAL_VALUES = 8192
"""Per block: few enough for the cache, and for BLAS to start no threads."""

LEAST_VALUES = 1 << 18
"""Values that a thread has at least: some milliseconds of work."""

IMBALANCE = 10.0
BALANCE_WINDOW = 3


@dataclass(frozen=True)
class AdmmState:
    """What the server carries from epoch to epoch.

    Attributes:
        z: auxiliary variable, (N, d_c).
        duals: lambda, (N, d_c); equals the loss's gradient at z after every step.
        rho: penalty, > 0.
    """

    z: FloatArray
    duals: FloatArray
    rho: float


@dataclass(frozen=True)
class Residuals:
    """Root-mean-square residuals of an epoch, relative to the size of their variables.

    Attributes:
        primal: ||h - z|| / max(||h - b||, ||z - b||).
        dual: rho ||h - h_before|| / ||duals||.
    """

    primal: float
    dual: float


def initial_state(base: FloatArray, joined_rows: int, rho: float) -> AdmmState:
    """Return z = b, duals = 0."""
    z = np.tile(base, (joined_rows, 1))
    return AdmmState(z, np.zeros_like(z), rho)


def admm_step(
    state: AdmmState,
    scores: FloatArray,
    labels: FloatArray,
    loss: Loss,
    over_relaxation: float = 1.0,
) -> tuple[AdmmState, FloatArray]:
    """Take the z- and dual update (Eq. 7 and 8).

    Args:
        state: state of the epoch before.
        scores: h, (N, d_c).
        labels: y, (N,).
        loss: the loss of the joined rows.
        over_relaxation: alpha, in [1, 2); 1 is plain ADMM.

    Returns:
        The new state and v, (N, d_c).
    """
    z, duals, message = (np.empty_like(scores) for _ in range(3))

    def step(span: slice) -> None:
        for block in blocks_of(span, BLOCK_ROWS):
            # one block at a time through all the steps, while it is in the cache
            h, y, old_z = scores[block], labels[block], state.z[block]
            relaxed = h
            if over_relaxation != 1.0:
                relaxed = over_relaxation * h + (1.0 - over_relaxation) * old_z
            centre = state.duals[block] / state.rho
            centre += relaxed
            new_z = z[block] = loss.prox(centre, y, state.rho, start=old_z)
            # duals + rho (h~ - z) in exact arithmetic, free of the sum's rounding
            new_duals = duals[block] = loss.gradient(new_z, y)
            gap = h - new_z
            gap *= state.rho
            np.add(gap, new_duals, out=message[block])

    in_threads(step, len(scores), _least_rows(scores))
    return replace(state, z=z, duals=duals), message


def targets(
    rows: TableRows,
    local_scores: FloatArray,
    message: FloatArray,
    kappa: float,
    inverse_mass: FloatArray | None = None,
) -> FloatArray:
    """Return target_i = h_i - seg_i(v) / (kappa G_i), (n_i, d_c); h_i where G_i = 0.

    Args:
        rows: of table i.
        local_scores: h_i, (n_i, d_c).
        message: v, (N, d_c); w v where rows are weighted.
        kappa: c * rho.
        inverse_mass: 1 / G^w_i, (n_i,), where rows are weighted, else None.
    """
    inverse = rows.inverse_multiplicity if inverse_mass is None else inverse_mass
    out = rows.segment_sum(message)
    out *= inverse[:, None]
    out *= -1.0 / kappa
    out += local_scores
    return out


def residuals(
    state: AdmmState,
    scores: FloatArray,
    scores_before: FloatArray,
    base: FloatArray,
    weights: FloatArray | None = None,
) -> Residuals:
    """Return the relative residuals of an epoch that ended with ``scores``.

    The norms are those of the augmented Lagrangian: with weights w (N,) a row counts w
    times.
    """
    size = max(RESIDUAL_VALUES // scores.shape[1], 1)

    def sums_of(span: slice) -> FloatArray:
        sums = np.zeros(5)
        work = np.empty((min(size, span.stop - span.start), scores.shape[1]))
        for block in blocks_of(span, size):
            h, z = scores[block], state.z[block]
            duals, difference = state.duals[block], work[: len(h)]
            pairs = ((h, z), (h, base), (z, base), (h, scores_before[block]))
            for place, (left, right) in enumerate(pairs):
                np.subtract(left, right, out=difference)
                sums[place] += _square(difference, weights, block)
            sums[4] += _square(duals, weights, block)
        return sums

    parts = in_threads(sums_of, len(scores), _least_rows(scores))
    gap, size_h, size_z, change, dual_size = np.sqrt(np.sum(parts, axis=0))
    tiny = np.finfo(np.float64).tiny
    return Residuals(
        primal=float(gap / max(size_h, size_z, tiny)),
        dual=float(state.rho * change / max(dual_size, tiny)),
    )


def _square(values: FloatArray, weights: FloatArray | None, block: slice) -> Any:
    """Return the squared norm of a block's values, weighted row by row if given."""
    if weights is None:
        return np.vdot(values, values)
    return weights[block] @ np.einsum("ij,ij->i", values, values)


def _least_rows(scores: FloatArray) -> int:
    return max(LEAST_VALUES // int(scores.shape[1]), 1)


def balanced_rho(rho: float, recent: Sequence[Residuals]) -> float:
    """Return rho after balancing relative residuals (Boyd et al. 2011, 3.4.1).

    One residual must exceed the other tenfold in *all* the recent epochs: in the first
    epochs of a good run the primal one does now and then, and following it at once
    doubles the epochs to the optimum (seen on flights).

    Args:
        rho: the penalty so far.
        recent: residuals since rho changed last; ``BALANCE_WINDOW`` of them are needed.

    >>> balanced_rho(1.0, [Residuals(primal=1.0, dual=0.01)] * BALANCE_WINDOW)
    2.0
    """
    if len(recent) < BALANCE_WINDOW:
        return rho
    window = recent[-BALANCE_WINDOW:]
    if all(gap.primal > IMBALANCE * gap.dual for gap in window):
        return rho * 2.0
    if all(gap.dual > IMBALANCE * gap.primal for gap in window):
        return rho / 2.0
    return rho
