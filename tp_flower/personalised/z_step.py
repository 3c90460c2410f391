"""The Z-step: personal models near their targets and similar along the edges.

    Z = argmin  1/2 ||Z - V||_F^2 + penalty * sum over edges (i, j) w_ij ||z_i - z_j||_p

With w_ij = 1, V = Z_t - eta G_t / N and penalty = eta * lambda this is the draft's
problem of Section IV-B. It is solved by Algorithm 4 (ADMM), written with rows for
sites, over-relaxed and scaled: kappa = eta rho, and the multipliers as
`pull` = -eta Omega^T, so that neither the inverse nor a warm start depends on eta:

    Z  <- (I + kappa B^T B)^-1 (V + B^T (kappa W - pull))
    D  <- a B Z + (1 - a) W                               (a: over-relaxation)
    C  <- D + pull / kappa
    W  <- prox_{w penalty/kappa ||.||_p}(C),   pull <- kappa (C - W)

Notation: Z `models` (N, d), V `targets` (N, d), B `graph.incidence` (M, N), W
`differences` (M, d), Omega the draft's multipliers (d, M). At the optimum Z = V - B^T
pull, and every row of pull lies in the dual norm's ball of radius `penalty w`.

The draft runs a fixed number of iterations. This solver stops on both residuals, in
units of Z: ||B Z - W||_F and kappa ||B^T (W - W_before)||_F.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray
from tp_flower.personalised.graph import SimilarityGraph

Radius = float | FloatArray  # one for all edges, or a column (M, 1) with one for each


class EdgeNorm(StrEnum):
    """The norm p of the difference between two sites' models."""

    ONE = "1"
    TWO = "2"
    MAX = "inf"


def edge_norms(rows: FloatArray, norm: EdgeNorm) -> FloatArray:
    """Return the norm of every row, (M, d) -> (M,).

    >>> [float(edge_norms(np.array([[3.0, -4.0]]), norm)[0]) for norm in EdgeNorm]
    [7.0, 5.0, 4.0]
    """
    order = {EdgeNorm.ONE: 1, EdgeNorm.TWO: 2, EdgeNorm.MAX: np.inf}[norm]
    if not rows.shape[1]:
        return np.zeros(len(rows))
    norms: FloatArray = np.linalg.norm(rows, order, axis=1)
    return norms


def project_dual(rows: FloatArray, radius: Radius, norm: EdgeNorm) -> FloatArray:
    """Return every row's nearest point in the ball of the dual norm q, (M, d).

    By Moreau, a - project_dual(a, t) = argmin_b t ||b||_p + 1/2 ||b - a||^2: p = 1 is
    elementwise soft-thresholding, p = 2 block soft-thresholding.

    >>> project_dual(np.array([[3.0, -4.0]]), 1.0, EdgeNorm.TWO)
    array([[ 0.6, -0.8]])
    """
    if norm is EdgeNorm.ONE:
        return np.clip(rows, -radius, radius)
    if norm is EdgeNorm.MAX:
        return _onto_cross_polytope(rows, radius)
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    shrink = np.ones_like(lengths)
    np.divide(radius, lengths, out=shrink, where=lengths > radius)
    projected: FloatArray = rows * shrink
    return projected


def _onto_cross_polytope(rows: FloatArray, radius: Radius) -> FloatArray:
    """Project onto the l1 ball (Duchi et al., ICML 2008, Figure 1)."""
    if not rows.size:
        return rows.copy()
    magnitudes = np.abs(rows)
    falling = -np.sort(-magnitudes, axis=1)
    excess = np.cumsum(falling, axis=1) - radius
    ranks = np.arange(1, rows.shape[1] + 1)
    support = np.maximum((falling * ranks > excess).sum(axis=1), 1)
    level = excess[np.arange(len(rows)), support - 1] / support
    shrunk = np.maximum(magnitudes - np.maximum(level, 0.0)[:, None], 0.0)
    projected: FloatArray = np.copysign(shrunk, rows)
    return projected


OVER_RELAXATION = 1.6


@dataclass(frozen=True)
class ZSolution:
    """The solution of a Z-step, and its residuals.

    ``models`` Z (N, d) are exactly equal at sites whose edges have no difference left;
    ``pull`` (M, d) is each edge's pull on its first site. The residuals are ||B Z -
    W||_F and kappa ||B^T (W - W_before)||_F over ||V - mean V||_F.
    """

    models: FloatArray
    pull: FloatArray
    iterations: int = 0
    primal_residual: float = 0.0
    dual_residual: float = 0.0


class ZStep:
    """Solver of Z-steps on one graph, which reuses its inverses.

    The edges have weights w, (M,), > 0, None for ones; the tolerance applies to both
    residuals, relative to the spread of the targets.
    """

    def __init__(
        self,
        graph: SimilarityGraph,
        norm: EdgeNorm,
        weights: FloatArray | None = None,
        *,
        tolerance: float = 1e-6,
        most_iterations: int = 2000,
    ) -> None:
        self.graph, self.norm = graph, norm
        self._weights = 1.0 if weights is None else weights[:, None]
        self.tolerance, self.most_iterations = tolerance, most_iterations
        self._inverses: dict[float, FloatArray] = {}

    def solve(
        self, targets: FloatArray, penalty: float, pull: FloatArray | None = None
    ) -> ZSolution:
        """Return the personal models for targets V, (N, d), and a penalty eta * lambda.

        Without a penalty, or without edges, they are the targets; with a large enough
        penalty, the mean of the targets in every connected group. Both are exact.
        ``pull``, from the previous solution, is a warm start.
        """
        spread = float(np.linalg.norm(targets - targets.mean(axis=0)))
        edges = len(self.graph.edges)
        if pull is None:
            pull = np.zeros((edges, targets.shape[1]))
        if not penalty or not edges or not spread:
            return ZSolution(targets, np.zeros_like(pull))
        return self._iterate(targets, penalty, pull, spread)

    def _iterate(
        self, targets: FloatArray, penalty: float, pull: FloatArray, spread: float
    ) -> ZSolution:
        forward, back = self.graph.incidence, self.graph.incidence.T.tocsr()
        kappa = self._coupling(targets, penalty)
        if kappa not in self._inverses:
            self._inverses[kappa] = inverse_of(self.graph, kappa)
        inverse = self._inverses[kappa]
        radius = penalty * self._weights
        scaled = project_dual(pull, radius, self.norm) / kappa
        models = targets - kappa * (back @ scaled)
        differences = forward @ models
        primal = dual = np.inf
        iteration = 0
        while max(primal, dual) > self.tolerance and iteration < self.most_iterations:
            iteration += 1
            models = inverse @ (targets + kappa * (back @ (differences - scaled)))
            exact = forward @ models
            centre = OVER_RELAXATION * exact
            centre += (1.0 - OVER_RELAXATION) * differences
            centre += scaled
            scaled = project_dual(centre, radius / kappa, self.norm)
            centre -= scaled
            primal = float(np.linalg.norm(exact - centre)) / spread
            dual = kappa * float(np.linalg.norm(back @ (centre - differences))) / spread
            differences = centre
        models = _means(models, self.graph.groups(~differences.any(axis=1)))
        return ZSolution(models, kappa * scaled, iteration, primal, dual)

    def _coupling(self, targets: FloatArray, penalty: float) -> float:
        """Return kappa, a power of 2, so that few values, and so few inverses, occur.

        3 over the mean degree balances the two residuals if the penalty is weak; if it
        is strong relative to the targets' differences, kappa is larger, by trial.
        """
        lengths = np.linalg.norm(self.graph.incidence @ targets, axis=1)
        typical = max(float(np.sqrt(np.mean(lengths**2))), np.finfo(np.float64).tiny)
        # the longest pull that the dual norm's ball allows
        width = targets.shape[1] if self.norm is EdgeNorm.ONE else 1
        strength = 25.0 * penalty * float(np.sqrt(width)) / typical
        strength = min(max(strength, 1.0), 10.0)
        mean_degree = 2.0 * len(self.graph.edges) / len(self.graph)
        return float(2.0 ** np.round(np.log2(3.0 / mean_degree * strength)))


def inverse_of(graph: SimilarityGraph, kappa: float) -> FloatArray:
    """Return (I + kappa B^T B)^-1, (N, N).

    The eigenvalues are between 1 and 1 + 2 kappa * the largest degree, so that an
    explicit inverse loses no digits.
    """
    incidence = graph.incidence
    return np.linalg.inv(
        np.eye(len(graph)) + kappa * (incidence.T @ incidence).toarray()
    )


def _means(models: FloatArray, groups: npt.NDArray[np.int64]) -> FloatArray:
    """Return every site's mean over its group; itself if it is alone."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    sizes = np.diff(starts, append=len(groups))
    return (np.add.reduceat(models[order], starts, axis=0) / sizes[:, None])[groups]
