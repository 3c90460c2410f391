"""The Z-step: personal models near their targets and similar along the edges.

    Z = argmin  1/2 ||Z - V||_F^2 + penalty * sum over edges (i, j) ||z_i - z_j||_2

With V = Z_t - eta G_t / N and penalty = eta * lambda this is the draft's
problem of Section IV-B. It is solved by Algorithm 4 (ADMM), written with rows for
sites, over-relaxed and scaled: kappa = eta rho, and the multipliers as
`pull` = -eta Omega^T, so that neither the inverse nor a warm start depends on eta:

    Z  <- (I + kappa B^T B)^-1 (V + B^T (kappa W - pull))
    D  <- a B Z + (1 - a) W                               (a: over-relaxation)
    C  <- D + pull / kappa
    W  <- prox_{penalty/kappa ||.||_2}(C),   pull <- kappa (C - W)

Notation: Z `models` (N, d), V `targets` (N, d), B `graph.incidence` (M, N), W
`differences` (M, d), Omega the draft's multipliers (d, M). At the optimum Z = V - B^T
pull, and every row of pull lies in the ball of radius `penalty`.

The draft runs a fixed number of iterations. This solver stops on both residuals, in
units of Z: ||B Z - W||_F and kappa ||B^T (W - W_before)||_F.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray
from tp_flower.methods.personalised.graph import SimilarityGraph


def project_onto_ball(rows: FloatArray, radius: float) -> FloatArray:
    """Return every row's nearest point in the ball of the 2-norm, (M, d).

    By Moreau, a - project_onto_ball(a, t) = argmin_b t ||b||_2 + 1/2 ||b - a||^2,
    which is block soft-thresholding.

    >>> project_onto_ball(np.array([[3.0, -4.0]]), 1.0)
    array([[ 0.6, -0.8]])
    """
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    shrink = np.ones_like(lengths)
    np.divide(radius, lengths, out=shrink, where=lengths > radius)
    projected: FloatArray = rows * shrink
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

    The tolerance applies to both residuals, relative to the spread of the targets.
    """

    def __init__(
        self,
        graph: SimilarityGraph,
        *,
        tolerance: float = 1e-6,
        most_iterations: int = 2000,
    ) -> None:
        self.graph = graph
        self.tolerance = tolerance
        self.most_iterations = most_iterations
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
        """Return the solution by ADMM on the edges, from the duals ``pull``."""
        forward = self.graph.incidence
        back = self.graph.incidence.T.tocsr()
        kappa = self._coupling(targets, penalty)
        if kappa not in self._inverses:
            self._inverses[kappa] = inverse_of(self.graph, kappa)
        inverse = self._inverses[kappa]
        scaled = project_onto_ball(pull, penalty) / kappa
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
            scaled = project_onto_ball(centre, penalty / kappa)
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
        strength = min(max(25.0 * penalty / typical, 1.0), 10.0)
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
