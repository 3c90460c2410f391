"""How much each row of a table matters for k-means: local clusters over joins.

Algorithm 3 of the paper clusters the columns of the N joined rows at party i and scores
joined row j, of cluster l with members B_l, by

    g_i(j) = alpha d_j^2 / cost + alpha cost_l / (|B_l| cost) + 2 alpha / |B_l|

Copies of a row are in the same cluster at the same distance. So the joined rows are
clustered as the table's rows with weights G^w, |B_l| is the weight of the cluster's
rows, and a row's score is that of each joined row that it is in. A table in several
shards is clustered shard by shard: the union of their centres costs what the shards
cost in sum, and each shard's members are its clusters. Of all that only a shard's cost
and its number of clusters leave it. The scores of a shard q sum to

    sum_r G^w_r g(r) = 2 alpha cost_q / cost + 2 alpha clusters_q

which the server can compute from costs and counts, and so bound.

Notation:
    G^w_r   ``masses``  (n,)
    d_r^2   ``distances``  (n,), squared, to the row's centre
    B_l     ``cluster_masses``  (k,); cost_l  ``cluster_costs``  (k,)

Reference:
    Huang, Li, Sun, Zhao 2022, Coresets for Vertical Federated Learning, Algorithm 3.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tp_flower.coresets.kmeans import LabelArray, nearest, weighted_kmeans

FloatArray = npt.NDArray[np.float64]

ALPHA: Final = 2.0
"""How far from the best the local clustering is taken to be."""

ZERO_COST: Final = 1e-10
"""A cost below it, over the rows' own squares, is rounding: features are float32."""


@dataclass(frozen=True)
class ShardClusters:
    """A shard's rows in their clusters.

    Attributes:
        labels: (n,), each row's cluster.
        distances: (n,), squared distance of each row to its centre.
        masses: (n,), what each row counts.
        centres: (k, d), of the clusters that have a row.
    """

    labels: LabelArray
    distances: FloatArray
    masses: FloatArray
    centres: FloatArray

    @cached_property
    def cluster_masses(self) -> FloatArray:
        """What the rows of each cluster count, (k,)."""
        return _sums(self.labels, self.masses, self.used)

    @cached_property
    def cluster_costs(self) -> FloatArray:
        """What the rows of each cluster cost, (k,)."""
        return _sums(self.labels, self.masses * self.distances, self.used)

    @property
    def cost(self) -> float:
        """What all rows cost."""
        return float(self.masses @ self.distances)

    @property
    def used(self) -> int:
        """How many clusters have a row that counts."""
        return len(self.centres)


def cluster_shard(
    features: npt.NDArray[Any],
    masses: npt.NDArray[Any],
    clusters: int,
    rng: np.random.Generator,
) -> ShardClusters:
    """Return the rows of a shard in at most ``clusters`` clusters, by k-means++.

    Args:
        features: (n, d), encoded.
        masses: (n,), >= 0.
        clusters: k.
        rng: the site's.
    """
    own = np.asarray(masses, np.float64)
    counted = own > 0
    if not counted.any():
        nothing = np.zeros(len(own))
        empty = np.zeros((0, features.shape[1]))
        return ShardClusters(np.zeros(len(own), np.intp), nothing, own, empty)
    centres = weighted_kmeans(features, own, clusters, rng, starts=1)
    centres = centres[np.unique(nearest(features[counted], centres)[0])]
    labels, distances = nearest(features, centres)
    squares = np.einsum("ij,ij->i", features, features, dtype=np.float64)
    if own @ distances <= ZERO_COST * (own @ squares):
        distances = np.where(counted, 0.0, distances)
    return ShardClusters(labels, distances, own, centres)


def kmeans_scores(own: ShardClusters, table_cost: float | None = None) -> FloatArray:
    """Return the scores (n,) of a shard's rows; 0 where a row counts nothing.

    Args:
        own: the shard's clusters.
        table_cost: what the rows of all shards cost; None where this is the only one.
    """
    cost = own.cost if table_cost is None else table_cost
    if not own.used:
        return np.zeros(len(own.masses))
    share = ALPHA / cost if cost > 0 else 0.0
    cluster = (share * own.cluster_costs + 2.0 * ALPHA) / own.cluster_masses
    scores = share * own.distances + cluster[own.labels]
    return np.where(own.masses > 0, scores, 0.0)


def kmeans_total(own_cost: float, table_cost: float, used: int) -> float:
    """Return what the scores of a shard sum to, of what it says of its clusters.

    >>> kmeans_total(1.0, 4.0, 3), kmeans_total(0.0, 0.0, 2)
    (13.0, 8.0)
    """
    share = own_cost / table_cost if table_cost > 0 else 0.0
    return 2.0 * ALPHA * (share + used)


def _sums(labels: LabelArray, values: FloatArray, clusters: int) -> FloatArray:
    """Return the sums (k,) of values (n,) by cluster."""
    total: npt.NDArray[Any] = np.bincount(labels, values, minlength=clusters)
    return total
