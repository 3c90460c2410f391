"""The theta-update of ADMM: a weighted least-squares fit of the target.

    theta_i = argmin  beta R(theta)
                      + (kappa / 2N) sum_j G_ij ||f_i(theta; T_ij) - target_ij||^2

with kappa = c * rho. This is the paper's Eq. 14-16 with the square completed, so that
only the target travels. Linear models have a closed form, which takes one product with
the features per epoch, after one eigendecomposition for all rho.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray, blocks
from tp_flower.learning.models.local_model import Features

RANK_TOLERANCE = 1e-11

GRAM_VALUES = 1 << 22
"""Float64 values in a block of rows, 32 MB."""
LEAST_ROWS = 256


def gram(
    features: "Features | FloatArray",
    multiplicity: npt.NDArray[Any],
    *,
    intercept: bool = False,
) -> FloatArray:
    """Return [T, 1]^T diag(G) [T, 1], (d [+ 1], d [+ 1]), which shards may sum.

    BLAS computes only half of it, as the symmetric A^T A with A = sqrt(G) [T, 1].

    >>> gram(np.array([[1], [2]], dtype=np.float32), np.array([1, 4]), intercept=True)
    array([[17.,  9.],
           [ 9.,  5.]])
    """
    if not isinstance(features, np.ndarray):
        counts = multiplicity.astype(np.float64)
        inner = features.gram(counts)
        if not intercept:
            return inner
        edge = features.moment(counts[:, None])
        return np.block([[inner, edge], [edge.T, counts.sum()]])
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


@dataclass(frozen=True)
class RidgeSolver:
    """The exact theta-update of a linear model, for every rho, from its Gram matrix.

    The intercept is not penalised: it is eliminated by centring, so that one
    eigendecomposition V diag(s) V^T of the centred Gram matrix / N serves all kappa:

        W = V (kappa V^T m) / (kappa s + beta),  c = mean target - mean row W

    ``mean`` is the weighted mean row, (d,), and ``weight`` the sum of G / N; both are 0
    without intercept. N is ``joined_rows``.
    """

    eigenvalues: FloatArray
    eigenvectors: FloatArray
    mean: FloatArray
    weight: float
    joined_rows: int

    @classmethod
    def from_gram(
        cls, matrix: FloatArray, joined_rows: int, *, intercept: bool
    ) -> "RidgeSolver":
        """Factorise [T, 1]^T diag(G) [T, 1] (or T^T diag(G) T without intercept)."""
        matrix = matrix / joined_rows
        if not intercept:
            mean, weight = np.zeros(len(matrix)), 0.0
        else:
            weight = float(matrix[-1, -1])
            mean = matrix[-1, :-1] / weight
            matrix = matrix[:-1, :-1] - weight * np.outer(mean, mean)
        values, vectors = np.linalg.eigh(matrix)
        return cls(np.maximum(values, 0.0), vectors, mean, weight, joined_rows)

    def product(self, parameters: FloatArray) -> FloatArray:
        """Return the Gram matrix times parameters (d [+ 1], d_c): their moments."""
        weights = parameters[:-1] if self.weight else parameters
        scaled = self.eigenvalues[:, None] * (self.eigenvectors.T @ weights)
        product: FloatArray = self.eigenvectors @ scaled
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
        rotated = kappa * (self.eigenvectors.T @ moments)
        curvature = kappa * self.eigenvalues
        usable = curvature + l2 > RANK_TOLERANCE * curvature.max(initial=0.0)
        scale = np.where(usable, 1.0 / np.where(usable, curvature + l2, 1.0), 0.0)
        weights = self.eigenvectors @ (rotated * scale[:, None])
        if not self.weight:
            return weights
        return np.vstack([weights, centre - self.mean @ weights])


def exact_update(
    solver: RidgeSolver,
    theta: FloatArray,
    moments: FloatArray,
    kappa: float,
    l2: float,
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
        ahead = point + (self.momentum - 1.0) / momentum * step
        return Iterate(point, ahead, momentum)

    def change_to(self, point: FloatArray) -> float:
        """Return ||y - z+|| / max(1, ||z+||): 0 if and only if z+ = y is optimal."""
        size = max(1.0, float(np.linalg.norm(point)))
        return float(np.linalg.norm(self.ahead - point)) / size


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
