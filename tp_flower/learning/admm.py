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
takes the place of G_i at the sites too. Equal weights leave all as it is; a
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
import numpy.typing as npt

from tp_flower.arrays import (
    BLOCK_ROWS,
    BoolArray,
    FloatArray,
    blocks_of,
    in_threads,
)
from tp_flower.joins.mapping import TableRows
from tp_flower.losses import Loss

RESIDUAL_VALUES = 8192
"""Values per block: few enough for the cache, and for BLAS to start no threads."""

LEAST_VALUES = 1 << 18
"""Minimum number of values per thread: some milliseconds of work."""

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
    if all(gap.dual > IMBALANCE * gap.primal for gap in window):
        return rho / 2.0
    return rho


Float32Array = npt.NDArray[np.float32]
Weights = FloatArray | None

SETBACK = 10.0
"""Reject a step that is so many times longer than the best one: old steps mislead."""

RIDGE = 1e-10
"""Ridge relative to the trace of the normal equations, above their rounding."""

BLOCK_VALUES = 8192
"""Values per block of an array: all stored changes of a block fit a core's cache."""


@dataclass(frozen=True)
class Point:
    """Where ADMM stands between two epochs: h and lambda, both (N, d_c)."""

    scores: FloatArray
    duals: FloatArray


Sums = tuple[FloatArray, float]
"""<dF_k, dF_new> and <dF_k, f> of every stored change, (used, 2), and ||f||^2: over an
array's values, in the norm's weights."""


class _Changes:
    """The last ``memory`` changes of one array of the point, (n, d_c)."""

    def __init__(self, like: FloatArray, memory: int) -> None:
        self._changes: Float32Array = np.zeros((memory, *like.shape), np.float32)
        self._size = max(BLOCK_VALUES // like.shape[1], 1)
        self._least_rows = max(LEAST_VALUES // like.shape[1], 1)

    def store(self, slot: int, after: FloatArray, earlier: FloatArray) -> None:
        """Store the change of g since the previous epoch."""

        def subtract(span: slice) -> None:
            np.subtract(after[span], earlier[span], out=self._changes[slot, span])

        in_threads(subtract, len(after), self._least_rows)

    def extrapolated(self, after: FloatArray, gamma: FloatArray) -> FloatArray:
        """Return g - dG gamma, (n, d_c)."""
        out = np.empty_like(after)
        used = len(gamma)

        def extrapolate(span: slice) -> None:
            for block in blocks_of(span, self._size):
                wide = self._changes[:used, block].reshape(used, -1)
                back = gamma @ wide.astype(np.float64)
                np.subtract(after[block], back.reshape(out[block].shape), out[block])

        in_threads(extrapolate, len(after), self._least_rows)
        return out


class _Steps:
    """The last step f = g - x of the duals, and its last ``memory`` changes."""

    def __init__(self, like: FloatArray, memory: int, weights: Weights) -> None:
        self._moved: Float32Array = np.zeros((memory, *like.shape), np.float32)
        self._step: Float32Array = np.zeros(like.shape, np.float32)
        self._weights = weights
        self._size = max(BLOCK_VALUES // like.shape[1], 1)
        self._least_rows = max(LEAST_VALUES // like.shape[1], 1)

    def move(self, slot: int, used: int, before: FloatArray, after: FloatArray) -> Sums:
        """Store f = g - x, and its change since the previous epoch.

        ``used`` counts the stored changes including the new one, 0 at the first step;
        x and g are (n, d_c).
        """

        def add_up(span: slice) -> Sums:
            products, size = np.zeros((used, 2)), 0.0
            for block in blocks_of(span, self._size):
                step = after[block] - before[block]
                if self._weights is not None:
                    step *= self._weights[block]
                rounded = step.astype(np.float32)
                if used:
                    change = self._moved[slot, block]
                    np.subtract(rounded, self._step[block], out=change)
                    wide = self._moved[:used, block].reshape(used, -1)
                    pair = np.stack([change.ravel(), rounded.ravel()], axis=1)
                    products += wide.astype(np.float64) @ pair.astype(np.float64)
                self._step[block] = rounded
                size += float(np.vdot(step, step))
            return products, size

        parts = in_threads(add_up, len(after), self._least_rows)
        sums, sizes = zip(*parts, strict=True)
        return np.sum(sums, axis=0), sum(sizes)


class AndersonMixer:
    """Mix the last epochs of ADMM, by the duals, which the server has anyway.

    The sites mix their parameters with the same ``coefficients``
    (:func:`mixed_parameters`). Of linear models that makes the sum of their scores the
    h that is mixed here.

    Changes are stored in float32, which halves the server's largest arrays, and summed
    in float64: gamma is then optimal for the stored changes, and does not depend on the
    order of the rows. The norm of f is that of the duals; with weighted rows they have
    weight sqrt(w). A ``memory`` of 0 epochs switches mixing off.

    Attributes:
        coefficients: gamma of the last mix, (used,), of the changes from the oldest to
            the newest; empty after a plain step.
    """

    def __init__(self, memory: int, weights: FloatArray | None = None) -> None:
        self._memory = memory
        self._weights = None if weights is None else np.sqrt(weights)[:, None]
        self._changes: list[_Changes] = []
        self._products: FloatArray = np.zeros((memory, memory))
        self.restart()

    def restart(self) -> None:
        """Forget the past, as a change of rho requires."""
        self._count = 0
        self._best = np.inf
        self._reached: list[FloatArray] = []
        self.coefficients: FloatArray = np.zeros(0)

    @property
    def remembered(self) -> int:
        """Changes that the next mix looks back on, at most ``memory``."""
        return min(self._count, self._memory)

    def mix(self, before: Point, after: Point) -> Point:
        """Return the next point from one step of the map, which led from x to g.

        The arrays of ``after`` must not change; a change of rho requires a restart.
        """
        self.coefficients = np.zeros(0)
        if not self._memory:
            return after
        if not self._changes:
            self._changes = [_Changes(after.duals, self._memory) for _ in range(2)]
            self._steps = _Steps(after.duals, self._memory, self._weights)
        earlier, slot = self._reached, self._count % self._memory
        used = min(self._count + 1, self._memory) if earlier else 0
        products, square = self._steps.move(slot, used, before.duals, after.duals)
        size = square**0.5
        if size > SETBACK * self._best:
            self.restart()
            earlier = []
        self._best = min(self._best, size)
        self._reached = [after.scores, after.duals]
        if not earlier:
            return after
        self._remember(earlier, products[:, 0])
        return self._extrapolated(products[:, 1])

    def _remember(self, earlier: list[FloatArray], products: FloatArray) -> None:
        """Store the changes of g, and the products of the changes of f."""
        slot = self._count % self._memory
        self._count += 1
        arrays = zip(self._changes, self._reached, earlier, strict=True)
        for changes, new, old in arrays:
            changes.store(slot, new, old)
        used = self.remembered
        self._products[slot, :used] = self._products[:used, slot] = products

    def _extrapolated(self, against: FloatArray) -> Point:
        """Return g - dG gamma, where gamma solves the normal equations."""
        used = self.remembered
        products = self._products[:used, :used]
        ridge = RIDGE * np.trace(products) + np.finfo(np.float64).tiny
        gamma = np.linalg.solve(products + ridge * np.eye(used), against)
        self.coefficients = np.roll(gamma, -(self._count % used))
        pairs = zip(self._changes, self._reached, strict=True)
        scores, duals = (changes.extrapolated(array, gamma) for changes, array in pairs)
        return Point(scores, duals)


def mixed_parameters(reached: FloatArray, coefficients: FloatArray) -> FloatArray:
    """Return theta where the next epoch starts, (p,): g - sum_k gamma_k dG_k.

    ``reached`` has the parameters after each epoch, (epochs, p), the newest last, and
    ``coefficients`` (used,) are of the changes between them, the newest last.

    >>> reached = np.array([[9.0], [1.0], [3.0], [4.0]])
    >>> mixed_parameters(reached, np.array([0.5, -1.0])).tolist()
    [4.0]
    """
    used = len(coefficients)
    changes = np.diff(reached[len(reached) - used - 1 :], axis=0)
    mixed: FloatArray = reached[-1] - coefficients @ changes
    return mixed


def consensus_parameters(
    total: FloatArray,
    shards: int,
    penalised: BoolArray,
    rho_in: float,
    l2: float,
) -> FloatArray:
    """Return w from the sum of the shards' theta^q + u^q (Eq. 20), (p,).

    w = Q rho_in / (Q rho_in + beta) * mean(theta + u); the paper's Eq. 20 has M where
    consensus ADMM has Q_i. Biases are not penalised, only averaged.
    """
    average = total / shards
    shrink = shards * rho_in / (shards * rho_in + l2)
    shrunk: FloatArray = np.where(penalised, shrink * average, average)
    return shrunk
