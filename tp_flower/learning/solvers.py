"""Exact solutions with a table's Hessian: the theta-update of ADMM, and CG's steps.

The theta-update is a weighted least-squares fit of the target:

    theta_i = argmin  beta R(theta)
                      + (kappa / 2N) sum_j G_ij ||f_i(theta; T_ij) - target_ij||^2

with kappa = c * rho. This is the paper's Eq. 14-16 with the square completed, so that
only the target travels. Linear models have a closed form, which takes one product with
the features per epoch, after one eigendecomposition for all rho.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tp_flower.arrays import AnyArray, FloatArray, IntArray, blocks
from tp_flower.learning.models.local_model import FeatureArray, Features, moment

RANK_TOLERANCE = 1e-11

MOST_COLUMNS = 4096
"""A Gram matrix of as many columns takes about 20 s to factorise, eight times as long
for twice as many."""
FREQUENT = 1024  # columns of the block of a wider table; the others have a diagonal
BY_COLUMNS, BY_ROWS, BY_FREQUENT = "columns", "rows", "frequent columns, diagonal"
"""Factorisations of a table's Hessian."""

GRAM_VALUES = 1 << 22  # float64 values in a block of rows, 32 MB
LEAST_ROWS = 256


def gram(
    features: "Features | FloatArray", multiplicity: AnyArray, *, intercept: bool = False
) -> FloatArray:
    """Return [T, 1]^T diag(G) [T, 1], (d [+ 1], d [+ 1]), which shards may sum.

    BLAS computes only half of it, as the symmetric A^T A with A = sqrt(G) [T, 1].

    >>> gram(np.array([[1], [2]], dtype=np.float32), np.array([1, 4]), intercept=True)
    array([[17.,  9.],
           [ 9.,  5.]])
    """
    width = features.shape[1] + int(intercept)
    total = np.zeros((width, width))
    size = max(GRAM_VALUES // max(width, 1), LEAST_ROWS)
    buffer = np.empty((min(size, len(features)), width))
    for block in blocks(len(features), size):
        rows = buffer[: block.stop - block.start]
        rows[:, : features.shape[1]] = features[block]
        rows[:, features.shape[1] :] = 1.0
        rows *= np.sqrt(multiplicity[block], dtype=np.float64)[:, None]
        total += rows.T @ rows
    return total


def factorisation(rows: int, columns: int, *, is_exact: bool) -> str:
    """Return the cheapest factorisation of a table's Hessian.

    One that need not be exact takes wide tables as frequent columns and a diagonal.

    >>> factorisation(100, 300, is_exact=True)
    'rows'
    """
    if 0 < rows < columns:
        return BY_ROWS
    return BY_COLUMNS if is_exact or columns <= MOST_COLUMNS else BY_FREQUENT


@dataclass(frozen=True)
class RidgeSolver:
    """The exact theta-update of a linear model, for every rho, from its Gram matrix.

    The intercept is not penalised: it is eliminated by centring, so that one
    eigendecomposition V diag(s) V^T of the centred Gram matrix / N serves all kappa:

        W = V (kappa V^T m) / (kappa s + beta),  c = mean target - mean row W

    ``mean`` is the weighted mean row, (d,), and ``weight`` the sum of G / N; both are 0
    without intercept. N is ``joined_rows``.

    V has a column per row of the table if these are fewer. If V is of the columns in
    ``block`` alone, (k,), the others are their own eigenvectors, after it.
    """

    eigenvalues: FloatArray
    eigenvectors: FloatArray
    mean: FloatArray
    block: IntArray
    weight: float
    joined_rows: int

    @classmethod
    def from_gram(cls, matrix: FloatArray, joined_rows: int, *, intercept: bool) -> "RidgeSolver":
        """Factorise [T, 1]^T diag(G) [T, 1] (or T^T diag(G) T without intercept)."""
        matrix = matrix / joined_rows
        if not intercept:
            mean, weight = np.zeros(len(matrix)), 0.0
        else:
            weight = float(matrix[-1, -1])
            mean = matrix[-1, :-1] / weight
            matrix = matrix[:-1, :-1] - weight * np.outer(mean, mean)
        values, vectors = np.linalg.eigh(matrix)
        block = np.arange(len(mean))
        return cls(np.maximum(values, 0.0), vectors, mean, block, weight, joined_rows)

    @classmethod
    def from_rows(
        cls, features: FeatureArray, multiplicity: AnyArray, joined_rows: int, *, intercept: bool
    ) -> "RidgeSolver":
        """Factorise the Gram matrix of few rows (n, d), by n numbers for each column.

        Moments are sums of rows, and parameters are, if they begin at 0: what V leaves
        out is never needed.
        """
        counts, weight, mean = _centre(features, multiplicity, joined_rows, intercept=intercept)
        rows = np.sqrt(counts)[:, None] * (features - mean)
        _, sizes, vectors = np.linalg.svd(rows, full_matrices=False)
        return cls(sizes**2, vectors.T, mean, np.arange(len(mean)), weight, joined_rows)

    @classmethod
    def from_frequent(
        cls, features: FeatureArray, multiplicity: AnyArray, joined_rows: int, *, intercept: bool
    ) -> "RidgeSolver":
        """Factorise the columns of most variance together, and all others alone."""
        counts, weight, mean = _centre(features, multiplicity, joined_rows, intercept=intercept)
        squares = sum(
            counts[span] @ np.square(features[span], dtype=np.float64)
            for span in blocks(len(features), LEAST_ROWS)
        )
        variances = np.maximum(squares - weight * mean**2, 0.0)
        order = np.argsort(-variances, kind="stable")
        block, others = np.sort(order[:FREQUENT]), np.sort(order[FREQUENT:])
        matrix = gram(features[:, block], multiplicity, intercept=intercept)
        inner = cls.from_gram(matrix, joined_rows, intercept=intercept)
        values = np.concatenate([inner.eigenvalues, variances[others]])
        return replace(inner, eigenvalues=values, mean=mean, block=block)

    def _rotated(self, columns: FloatArray) -> FloatArray:
        """Return V^T times an array, (d, d_c)."""
        if len(self.block) == len(columns):
            return self.eigenvectors.T @ columns
        inner = self.eigenvectors.T @ columns[self.block]
        return np.concatenate([inner, np.delete(columns, self.block, axis=0)])

    def _restored(self, rotated: FloatArray) -> FloatArray:
        """Return V times an array, (d, d_c)."""
        if len(self.block) == len(self.mean):
            return self.eigenvectors @ rotated
        size = self.eigenvectors.shape[1]
        columns = np.empty((len(self.mean), rotated.shape[1]))
        columns[self.block] = self.eigenvectors @ rotated[:size]
        columns[np.delete(np.arange(len(columns)), self.block)] = rotated[size:]
        return columns

    @property
    def trace(self) -> float:
        """The trace of [T, 1]^T diag(G) [T, 1] / N."""
        return float(self.eigenvalues.sum()) + self.weight * (float(self.mean @ self.mean) + 1.0)

    def product(self, parameters: FloatArray) -> FloatArray:
        """Return the Gram matrix times parameters (d [+ 1], d_c): their moments."""
        weights = parameters[:-1] if self.weight else parameters
        product = self._restored(self.eigenvalues[:, None] * self._rotated(weights))
        if self.weight:
            total = self.weight * (self.mean @ weights + parameters[-1])
            product = np.vstack([product + np.outer(self.mean, total), total])
        return self.joined_rows * product

    def solve(self, moments: FloatArray, kappa: float, l2: float) -> FloatArray:
        """Return the parameters (d [+ 1], d_c) of the theta-update.

        ``moments`` are [T, 1]^T (G * target), (d [+ 1], d_c), summed over the shards;
        if ``l2`` is 0, the solution of least norm is returned.
        """
        moments = moments / self.joined_rows
        centre = np.zeros(moments.shape[1])
        if self.weight:
            centre = moments[-1] / self.weight
            moments = moments[:-1] - self.weight * np.outer(self.mean, centre)
        rotated = kappa * self._rotated(moments)
        curvature = kappa * self.eigenvalues
        usable = curvature + l2 > RANK_TOLERANCE * curvature.max(initial=0.0)
        scale = np.where(usable, 1.0 / np.where(usable, curvature + l2, 1.0), 0.0)
        weights = self._restored(rotated * scale[:, None])
        return np.vstack([weights, centre - self.mean @ weights]) if self.weight else weights


def _centre(
    features: FeatureArray, multiplicity: AnyArray, joined_rows: int, *, intercept: bool
) -> tuple[FloatArray, float, FloatArray]:
    """Return G / N, (n,), and the solver's ``weight`` and ``mean``."""
    counts = multiplicity / joined_rows
    weight = float(counts.sum()) if intercept else 0.0
    if not weight:
        return counts, weight, np.zeros(features.shape[1])
    return counts, weight, moment(features, counts[:, None], intercept=False).ravel() / weight


def exact_update(
    solver: RidgeSolver, theta: FloatArray, moments: FloatArray, kappa: float, l2: float
) -> FloatArray:
    """Return theta after its update, (p, d_c), from where the scores step off.

    ``moments`` are [T, 1]^T (G * (target - h)), (p, d_c), summed over the shards, where
    h are the scores of ``theta``, (p, d_c): their own moments need no row.
    """
    return solver.solve(solver.product(theta) + moments, kappa, l2)


@dataclass(frozen=True)
class Iterate:
    """The iterate z of an accelerated descent, the point ``ahead``, y, and t."""

    point: FloatArray
    ahead: FloatArray
    momentum: float = 1.0

    @classmethod
    def at(cls, point: FloatArray) -> "Iterate":
        """Return the start of a descent."""
        return cls(point, point)

    def advanced(self, point: FloatArray, *, is_accelerated: bool = True) -> "Iterate":
        """Return the iterate after a step to z+; y+ = z+ if it is not accelerated."""
        if not is_accelerated:
            return Iterate.at(point)
        step = point - self.point
        if float(np.vdot(self.ahead - point, step)) > 0.0:
            return Iterate.at(point)
        momentum = (1.0 + math.sqrt(1.0 + 4.0 * self.momentum**2)) / 2.0
        return Iterate(point, point + (self.momentum - 1.0) / momentum * step, momentum)

    def change_to(self, point: FloatArray) -> float:
        """Return ||y - z+|| / max(1, ||z+||): 0 if and only if z+ = y is optimal."""
        return float(np.linalg.norm(self.ahead - point)) / max(1.0, float(np.linalg.norm(point)))


def descend(
    gradient: Callable[[FloatArray], FloatArray],
    start: FloatArray,
    step: float,
    *,
    tolerance: float,
    most_steps: int,
) -> FloatArray:
    """Return the minimiser of a smooth function of (p,), given its gradient.

    ``step`` is at most 1 over the largest curvature; the descent ends when the relative
    change of a step is within the tolerance.

    >>> to_twos = lambda z: [1.0, 0.1] * (z - 2.0)
    >>> end = descend(to_twos, np.zeros(2), 1.0, tolerance=1e-12, most_steps=500)
    >>> end.round(9).tolist()
    [2.0, 2.0]
    """
    iterate = Iterate.at(start)
    for _ in range(most_steps):
        point = iterate.ahead - step * gradient(iterate.ahead)
        change = iterate.change_to(point)
        iterate = iterate.advanced(point)
        if change <= tolerance:
            break
    return iterate.point
