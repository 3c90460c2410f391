"""The prox of an edge's norm: what pulls the models of two similar sites together.

The draft writes block soft-thresholding with the dual norm for every p; that is right
for p = 2 alone. By Moreau's identity the prox of any norm is what a projection leaves:

    prox_{t ||.||_p}(a) = a - proj_{ ||b||_q <= t }(a),    1/p + 1/q = 1

so that one function per norm, the projection onto the ball of its dual, is all.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Radius = float | FloatArray
"""One for all edges, or a column (M, 1) with one for each."""


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


def edge_prox(rows: FloatArray, threshold: Radius, norm: EdgeNorm) -> FloatArray:
    """Return argmin_b threshold ||b||_p + 1/2 ||b - a||^2 of every row a, (M, d).

    p = 1 is elementwise soft-thresholding, p = 2 block soft-thresholding.

    >>> edge_prox(np.array([[3.0, -4.0]]), 1.0, EdgeNorm.TWO)
    array([[ 2.4, -3.2]])
    """
    return rows - project_dual(rows, threshold, norm)


def project_dual(rows: FloatArray, radius: Radius, norm: EdgeNorm) -> FloatArray:
    """Return every row's nearest point in the dual norm's ball, (M, d).

    Args:
        rows: one edge per row.
        radius: >= 0.
        norm: p; the ball is of the norm q.
    """
    return _PROJECTIONS[norm](rows, radius)


def _onto_box(rows: FloatArray, radius: Radius) -> FloatArray:
    return np.clip(rows, -radius, radius)


def _onto_sphere(rows: FloatArray, radius: Radius) -> FloatArray:
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
    kept = np.maximum((falling * ranks > excess).sum(axis=1), 1)
    level = excess[np.arange(len(rows)), kept - 1] / kept
    shrunk = np.maximum(magnitudes - np.maximum(level, 0.0)[:, None], 0.0)
    projected: FloatArray = np.copysign(shrunk, rows)
    return projected


_PROJECTIONS: Mapping[EdgeNorm, Callable[[FloatArray, Radius], FloatArray]] = {
    EdgeNorm.ONE: _onto_box,
    EdgeNorm.TWO: _onto_sphere,
    EdgeNorm.MAX: _onto_cross_polytope,
}
