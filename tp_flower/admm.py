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

Notation:
    h     ``scores``  (N, d_c)            h_i   ``local_scores``  (n_i, d_c)
    z     ``z``  (N, d_c)                 lambda  ``duals``  (N, d_c)
    c     ``corrections``: M or 1         G_i   ``multiplicity``  (n_i,)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tp_flower.losses import FloatArray, Loss
from tp_flower.mapping import TableMapping, TableRows

LocalScores = dict[str, FloatArray]

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
    rho = state.rho
    relaxed = scores
    if over_relaxation != 1.0:
        relaxed = over_relaxation * scores + (1.0 - over_relaxation) * state.z
    z = loss.prox(relaxed + state.duals / rho, labels, rho, start=state.z)
    # duals + rho (h~ - z) in exact arithmetic, and free of the rounding of that sum
    duals = loss.gradient(z, labels)
    message = scores - z
    message *= rho
    message += duals
    return replace(state, z=z, duals=duals), message


def targets(
    rows: TableRows, local_scores: FloatArray, message: FloatArray, kappa: float
) -> FloatArray:
    """Return target_i = h_i - seg_i(v) / (kappa G_i), (n_i, d_c); h_i where G_i = 0."""
    weight = kappa * np.maximum(rows.multiplicity, 1)
    out = rows.segment_sum(message)
    out /= -weight[:, None]
    out += local_scores
    return out


def residuals(
    state: AdmmState, scores: FloatArray, scores_before: FloatArray, base: FloatArray
) -> Residuals:
    """Return the relative residuals of an epoch that ended with ``scores``."""
    gap = np.linalg.norm(scores - state.z)
    size = max(np.linalg.norm(scores - base), np.linalg.norm(state.z - base))
    change = state.rho * np.linalg.norm(scores - scores_before)
    dual_size = np.linalg.norm(state.duals)
    tiny = np.finfo(np.float64).tiny
    return Residuals(float(gap / max(size, tiny)), float(change / max(dual_size, tiny)))


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


@dataclass(frozen=True)
class _Evaluation:
    """One evaluation of the fixed-point map: what it made, and by how much it moved."""

    duals: FloatArray
    local_scores: LocalScores
    moved_duals: FloatArray
    moved_scores: LocalScores


class AndersonMixer:
    """Anderson acceleration of the fixed-point map (duals, h_1 .. h_M) -> next.

    Next point = sum_k alpha_k g_k over the last evaluations g_k, where alpha minimises
    ||sum_k alpha_k (g_k - x_k)|| with sum alpha = 1 (Walker and Ni 2011). It lives at
    the server alone: an exact theta-update depends on the target only, and the
    extrapolated point reaches the sites through the targets. Duals and rho * h_i
    (weighted by G_i and c, as in the augmented Lagrangian) are compared in one norm.

    Args:
        mapping: the training rows' mapping.
        memory: evaluations kept besides the newest; 0 switches mixing off.
        corrections: c.
    """

    def __init__(self, mapping: TableMapping, memory: int, corrections: int) -> None:
        self._mapping, self._memory, self._corrections = mapping, memory, corrections
        self._history: list[_Evaluation] = []
        self._products = np.zeros((0, 0))

    def restart(self) -> None:
        """Forget the past, as a change of rho requires."""
        self._history, self._products = [], np.zeros((0, 0))

    def mix(
        self,
        rho: float,
        before: tuple[FloatArray, Mapping[str, FloatArray]],
        after: tuple[FloatArray, LocalScores],
    ) -> tuple[FloatArray, LocalScores]:
        """Return the extrapolated (duals, local scores) from one step of the map."""
        if not self._memory:
            return after
        duals, local_scores = after
        newest = _Evaluation(
            duals,
            local_scores,
            duals - before[0],
            {t: local_scores[t] - before[1][t] for t in local_scores},
        )
        self._append(newest, rho)
        if len(self._history) == 1:
            return after
        weights = self._weights()
        return (
            _combine(weights, [past.duals for past in self._history]),
            {
                table: _combine(
                    weights, [past.local_scores[table] for past in self._history]
                )
                for table in local_scores
            },
        )

    def _append(self, newest: _Evaluation, rho: float) -> None:
        size = self._inner(newest, newest, rho)
        diagonal = np.diag(self._products)
        # a step that moves ten times further than the best one: the past misleads
        if len(diagonal) and size > 100.0 * diagonal.min():
            self.restart()
        keep = self._memory
        self._history = self._history[-keep:]
        self._products = self._products[-keep:, -keep:]
        row = np.array([self._inner(past, newest, rho) for past in self._history])
        self._products = np.block(
            [[self._products, row[:, None]], [row[None, :], np.array([[size]])]]
        )
        self._history.append(newest)

    def _inner(self, left: _Evaluation, right: _Evaluation, rho: float) -> float:
        total = float(np.vdot(left.moved_duals, right.moved_duals))
        scale = self._corrections * rho * rho
        for table, moved in left.moved_scores.items():
            weight = self._mapping.tables[table].multiplicity
            total += scale * float(
                np.einsum("j,jk,jk->", weight, moved, right.moved_scores[table])
            )
        return total

    def _weights(self) -> FloatArray:
        size = len(self._products)
        ridge = 1e-10 * np.trace(self._products) + np.finfo(np.float64).tiny
        weights = np.linalg.solve(self._products + ridge * np.eye(size), np.ones(size))
        normalised: FloatArray = weights / weights.sum()
        return normalised


def _combine(weights: FloatArray, arrays: list[FloatArray]) -> FloatArray:
    total: FloatArray = weights[0] * arrays[0]
    for weight, array in zip(weights[1:], arrays[1:], strict=True):
        total += weight * array
    return total
