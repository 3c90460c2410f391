"""Learning over joins by sharing ADMM: the server's half of one epoch, on arrays.

    minimise (1/N) sum_j loss(z_j; y_j) + beta sum_i R(theta_i)  s.t.  z = b + sum_i h_i

One epoch, with kappa = c * rho (Boyd et al. 2011, section 7.3; paper Eq. 7, 8, 14):

    h~       = alpha h + (1 - alpha) z                  over-relaxation, alpha in [1, 2)
    z        = prox(h~ + duals / rho)
    duals   += rho (h~ - z)                             == grad loss(z), exactly
    v        = duals + rho (h - z)
    step_i   = -seg_i(v) / (kappa G_i)                  sent to the sites of table i
    target_i = h_i + step_i                             at the sites

The server needs the sum of the tables' scores, and no table's own.

The paper's Eq. 9/16 has c = 1 (Jacobi: every table corrects the whole residual at
once), which in general does not converge for three tables; c = M (sharing) converges
for every rho > 0 on convex problems.

A joined row of a LEFT JOIN may lack a table: there h_i = 0 for any theta_i, as if the
table's row had a constant model. In the constraint z = b + sum_i A_i theta_i this is a
zero row of A_i, which the convergence of sharing ADMM allows: the row's term in table
i's update is a constant, so G_i counts matched joined rows only, seg_i sums over them,
and c stays M. (Only M_j <= M tables share the residual of joined row j; a c above M_j
makes a shorter step there, never a wrong one.)

If joined rows have weights w_j of mean 1, the whole augmented Lagrangian of row j is
multiplied by w_j. This changes neither its z- nor its dual update (the multiplier of
the constraint is w_j duals_j, and equals w_j grad loss(z_j)), and the tables' updates
through sums only: step_i = -seg_i(w v) / (kappa G^w_i) with G^w_i = seg_i(w), which
takes the place of G_i at the sites too. Equal weights leave all as it is; a weight of 2
is the row twice.

Notation:
    h     ``scores``  (N, d_c)            h_i   ``local_scores``  (n_i, d_c)
    z     ``z``  (N, d_c)                 lambda  ``duals``  (N, d_c)
    c     ``corrections``: M              G_i   ``multiplicity``  (n_i,)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tp_flower.arrays import BLOCK_ROWS, BoolArray, FloatArray, blocks_of, in_threads
from tp_flower.joins.mapping import TableRows
from tp_flower.losses import Loss

RESIDUAL_VALUES = 8192  # of a block: in the cache, without threads of BLAS
LEAST_VALUES = 1 << 18  # minimum number of values per thread: some milliseconds of work
IMBALANCE = 10.0
BALANCE_WINDOW = 3


@dataclass(frozen=True)
class AdmmState:
    """The server's state from epoch to epoch.

    After every step ``duals`` equal the loss's gradient at z; ``rho`` > 0.
    """

    z: FloatArray
    duals: FloatArray
    rho: float


@dataclass(frozen=True)
class Residuals:
    """Root-mean-square residuals of an epoch, relative to the size of their variables.

    ||h - z|| / max(||h - b||, ||z - b||), and rho ||h - h_before|| / ||duals||.
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
    """Return the state after the z- and dual update (Eq. 7, 8), and v, (N, d_c)."""
    z, duals, message = (np.empty_like(scores) for _ in range(3))

    def step(span: slice) -> None:
        for block in blocks_of(span, BLOCK_ROWS):
            # all steps on one block at a time, while it is in the cache
            h, y, old_z = scores[block], labels[block], state.z[block]
            relaxed = h
            if over_relaxation != 1.0:
                relaxed = over_relaxation * h + (1.0 - over_relaxation) * old_z
            centre = state.duals[block] / state.rho
            centre += relaxed
            new_z = z[block] = loss.prox(centre, y, state.rho, start=old_z)
            # duals + rho (h~ - z) in exact arithmetic, without the sum's rounding
            new_duals = duals[block] = loss.gradient(new_z, y)
            gap = h - new_z
            gap *= state.rho
            np.add(gap, new_duals, out=message[block])

    in_threads(step, len(scores), _least_rows(scores))
    return replace(state, z=z, duals=duals), message


def score_steps(
    rows: TableRows,
    message: FloatArray,
    kappa: float,
    inverse: FloatArray | None = None,
) -> FloatArray:
    """Return target_i - h_i = -seg_i(v) / (kappa G_i), (n_i, d_c); 0 where G_i = 0.

    If rows are weighted, ``message`` is w v and ``inverse`` is 1 / G^w_i, (n_i,).
    """
    inverse = rows.inverse_multiplicity if inverse is None else inverse
    out = rows.segment_sum(message)
    out *= inverse[:, None]
    out *= -1.0 / kappa
    return out


def residuals(
    state: AdmmState,
    scores: FloatArray,
    scores_before: FloatArray,
    base: FloatArray,
    weights: FloatArray | None = None,
) -> Residuals:
    """Return the relative residuals of an epoch that ended with ``scores``.

    In the norms, as in the augmented Lagrangian, a row of weight w counts w times.
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

    One residual must exceed the other tenfold in *all* recent epochs, of which
    ``BALANCE_WINDOW`` are needed since rho last changed: in the first epochs of a good
    run the primal one does so now and then, and following it at once doubles the epochs
    to the optimum (observed on flights).

    >>> balanced_rho(1.0, [Residuals(primal=1.0, dual=0.01)] * BALANCE_WINDOW)
    2.0
    """
    if len(recent) < BALANCE_WINDOW:
        return rho
    window = recent[-BALANCE_WINDOW:]
    if all(gap.primal > IMBALANCE * gap.dual for gap in window):
        return rho * 2.0
    return (
        rho / 2.0 if all(gap.dual > IMBALANCE * gap.primal for gap in window) else rho
    )


def consensus_parameters(
    total: FloatArray, shards: int, penalised: BoolArray, rho_in: float, l2: float
) -> FloatArray:
    """Return w from the sum of the shards' theta^q + u^q (Eq. 20), (p,).

    w = Q rho_in / (Q rho_in + beta) * mean(theta + u); the paper's Eq. 20 has M where
    consensus ADMM has Q_i. Biases are not penalised, only averaged.
    """
    average = total / shards
    shrink = shards * rho_in / (shards * rho_in + l2)
    return np.where(penalised, shrink * average, average)
