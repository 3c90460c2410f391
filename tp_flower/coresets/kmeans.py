"""Clustering weighted rows: k-means++ with Lloyd's steps, and distributed dimensions.

    minimise over c_1 .. c_k    cost(C) = sum_j w_j min_l ||x_j - c_l||^2

Notation:
    x_j    ``points``  (n, d)
    w_j    ``weights``  (n,), >= 0; a point of weight 0 is as if it were not there
    c_l    ``centres``  (<= k, d): fewer than k where there are fewer distinct points

Reference:
    Arthur and Vassilvitskii 2007, k-means++; Ding, Liu, Huang, Li 2016, K-Means
    Clustering with Distributed Dimensions (``distdim``).
"""

import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import blocks

FloatArray = npt.NDArray[np.float64]
LabelArray = npt.NDArray[np.intp]

MAX_STEPS: Final = 300
STARTS: Final = 10
"""Seedings of which the best is taken, as in scikit-learn at the paper's time."""

_BLOCK_VALUES: Final = 1 << 22


def weighted_kmeans(
    points: npt.NDArray[Any],
    weights: npt.NDArray[Any],
    clusters: int,
    rng: np.random.Generator,
    *,
    starts: int = STARTS,
) -> FloatArray:
    """Return the centres, (<= k, d), of the best of ``starts`` runs of k-means++.

    Args:
        points: (n, d), finite.
        weights: (n,), >= 0.
        clusters: k, >= 1.
        rng: seeds the runs.
        starts: how many there are.

    Raises:
        ValueError: no point has a weight.
    """
    own, own_weights = points[weights > 0], weights[weights > 0]
    if not len(own):
        raise ValueError("no point has a weight above 0: there is nothing to cluster")
    # scikit-learn takes a second to import, and few messages cluster
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    solver = KMeans(
        n_clusters=min(clusters, len(own)),
        n_init=starts,
        max_iter=MAX_STEPS,
        random_state=int(rng.integers(2**31)),
    )
    with warnings.catch_warnings():
        # fewer distinct points than clusters: some centres are the same
        warnings.filterwarnings("ignore", "Number of distinct", ConvergenceWarning)
        solver.fit(own, sample_weight=own_weights)
    distinct: FloatArray = np.unique(solver.cluster_centers_.astype(np.float64), axis=0)
    return distinct


def nearest(
    points: npt.NDArray[Any], centres: FloatArray
) -> tuple[LabelArray, FloatArray]:
    """Return each point's nearest centre (n,), and the squared distance to it (n,).

    >>> labels, distances = nearest(np.array([[0.0], [7.0]]), np.array([[1.0], [5.0]]))
    >>> labels.tolist(), distances.tolist()
    ([0, 1], [1.0, 4.0])
    """
    labels, distances = np.zeros(len(points), np.intp), np.zeros(len(points))
    lengths = np.einsum("kd,kd->k", centres, centres)
    width = max(centres.shape[1], len(centres), 1)
    for block in blocks(len(points), max(_BLOCK_VALUES // width, 1)):
        own = points[block].astype(np.float64)
        labels[block] = np.argmin(lengths - 2.0 * (own @ centres.T), axis=1)
        # of the difference itself: that of squares has no digits left near 0
        own -= centres[labels[block]]
        distances[block] = np.einsum("ij,ij->i", own, own)
    return labels, distances


def kmeans_cost(
    points: npt.NDArray[Any],
    centres: FloatArray,
    weights: npt.NDArray[Any] | None = None,
) -> float:
    """Return cost(C), summed over the points.

    >>> kmeans_cost(np.array([[0.0], [7.0]]), np.array([[1.0]]), np.array([2.0, 1.0]))
    38.0
    """
    _, distances = nearest(points, centres)
    return float(distances.sum() if weights is None else weights @ distances)


def distdim(
    labels: npt.NDArray[np.integer],
    centres: Sequence[FloatArray],
    weights: npt.NDArray[Any],
    clusters: int,
    rng: np.random.Generator,
) -> FloatArray:
    """Return centres (<= k, d_1 + ... + d_T) of what parties say of their columns.

    Every party clusters its columns. A point is then taken for the combination of its
    local centres; those that occur are clustered, by the weight of their points.

    Args:
        labels: (n, T), which local centre each point is nearest to.
        centres: by party (k_t, d_t).
        weights: (n,), >= 0.
        clusters: k.
        rng: seeds the clustering.

    Reference:
        Ding et al. 2016, algorithm DistDim-K-means; of the k^T combinations only those
        that occur are made.
    """
    found, which = np.unique(labels, axis=0, return_inverse=True)
    mass = np.bincount(which.reshape(-1), weights, minlength=len(found))
    grid = np.concatenate(
        [own[found[:, place]] for place, own in enumerate(centres)], axis=1
    )
    return weighted_kmeans(grid, mass, clusters, rng)
