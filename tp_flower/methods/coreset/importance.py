"""The importance of a table's rows for least squares: leverage scores over joins.

Algorithm 2 of the paper scores joined row j by g_i(j) = ||u_j||^2 at party i, with U an
orthonormal basis of the columns of the N joined rows. Over a join the matrix repeats
the table's rows, X_i = P_i T_i with (P_i T_i)_j = t_{p_i(j)}. Its leverage is

    x_j^T (X_i^T W X_i)^+ x_j = t^T (T_i^T P_i^T W P_i T_i)^+ t
                              = t^T (T_i^T diag(G^w_i) T_i)^+ t    with t = t_{p_i(j)}

as P_i^T W P_i sums the weights over the joined rows of each row of the table: exactly
the score of the materialised join, in O(n_i d^2) in place of O(N d^2), one number per
row of the table. Gram matrices of shards add up. The scores sum to the rank of X_i:

    sum_j w_j g_i(p_i(j)) = sum_r G^w_r g_i(r) = trace(Gram Gram^+) = rank <= columns

The objective's penalty N l2 ||theta||^2 is the cost of d additional joined rows, sqrt(N
l2) times the unit vectors, with label 0. They are known and always in the sample. With
them the basis is that of [X_i; sqrt(N l2) I], and (Gram + N l2 I)^+ replaces Gram^+:
ridge leverage scores. Directions that the penalty decides, such as those of rare
categories, then get no draws; with l2 = 0 it is the paper's score. The total is the
effective dimension, still at most the number of columns.

The paper adds 1/N at every party. That share does not depend on data; the server draws
it: :func:`tp_flower.methods.coreset.sampling.draw_uniform`.

Notation:
    T_i     ``rows``  (n, p): the encoded columns, at the label table with 1 and label
    G^w_i   ``multiplicity``  (n,): summed weights of each row's joined training rows
    W       ``whitening``  (p, r): W W^T = (T^T diag(G^w) T)^+, r its rank

Reference:
    Huang, Li, Sun, Zhao 2022, Coresets for Vertical Federated Learning, Algorithm 2;
    Chhaya, Dasgupta, Shit 2020, On Coresets for Regularized Regression (the penalty).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tp_flower.arrays import AnyArray, FloatArray, blocks
from tp_flower.learning.solvers import gram
from tp_flower.methods.coreset.solvers import LabelArray, nearest, weighted_kmeans

LEAST_GAMMA_SQUARED: Final = 0.01
REGRESSION: Final = "regression"
CLUSTERS: Final = "clusters"
"""Rows are important for a regression, by their leverage, or for k-means."""

RANK_TOLERANCE: Final = 1e-10
"""Eigenvalues of the scaled Gram matrix below this share of the largest count as 0.

Features are float32: a copy of a column differs from it by up to 1e-7 of its size, and
so by 1e-14 in the Gram matrix. A wrong rank changes which rows are drawn more often,
never what a weighted sum is expected to be.
"""

_BLOCK_VALUES: Final = 1 << 22


def augment(
    features: AnyArray, labels: AnyArray | None, *, intercept: bool
) -> FloatArray:
    """Return the columns that define a table's scores, (n, d [+ 1] [+ c]).

    ``labels`` (n, c) are numbers, or one column per class.

    >>> augment(np.array([[2.0]]), np.array([[7.0]]), intercept=True).tolist()
    [[2.0, 1.0, 7.0]]
    """
    ones = np.ones((len(features), int(intercept)))
    parts = [features, ones, *([] if labels is None else [labels])]
    return np.concatenate(parts, axis=1, dtype=np.float64)


def add_penalty(gram: FloatArray, features: int, penalty: float) -> FloatArray:
    """Return the Gram matrix (p, p) including the penalty's rows.

    The first ``features`` columns are penalised, with N l2 >= 0.

    >>> add_penalty(np.ones((2, 2)), 1, 3.0).tolist()
    [[4.0, 1.0], [1.0, 1.0]]
    """
    diagonal = np.zeros(len(gram))
    diagonal[:features] = penalty
    return gram + np.diag(diagonal)


def whitening(gram: FloatArray) -> FloatArray:
    """Return W, (p, r), with W W^T = gram^+ on the space that the columns span.

    The columns are first scaled to length 1, so that units do not decide what counts as
    zero; copies, constants beside an intercept and empty columns only lower the rank r.
    """
    lengths = np.sqrt(np.diag(gram), where=np.diag(gram) >= 0, out=-np.ones(len(gram)))
    if not np.isfinite(gram).all() or (lengths < 0).any():
        raise ValueError("a Gram matrix needs finite values and a diagonal >= 0")
    scale = np.divide(1.0, lengths, where=lengths > 0, out=np.zeros_like(lengths))
    values, vectors = np.linalg.eigh(scale[:, None] * gram * scale)
    is_direction = values > RANK_TOLERANCE * values.max(initial=0.0)
    basis: FloatArray = scale[:, None] * (
        vectors[:, is_direction] / np.sqrt(values[is_direction])
    )
    return basis


def leverages(rows: AnyArray, whitening: FloatArray) -> FloatArray:
    """Return t^T gram^+ t of each row, (n,), >= 0.

    ``whitening`` (p, r) belongs to the whole table's Gram matrix.
    """
    scores = np.empty(len(rows))
    for block in blocks(len(rows), max(_BLOCK_VALUES // max(rows.shape[1], 1), 1)):
        # columnwise products have an ordinary size, whatever the units
        projected = rows[block] @ whitening
        scores[block] = np.einsum("nr,nr->n", projected, projected)
    return scores


def leverage_total(gram: FloatArray, whitening: FloatArray) -> float:
    """Return the sum of a shard's scores: trace(gram_q gram^+), from 0 to its columns.

    ``gram`` excludes the penalty's rows; ``whitening`` belongs to the sum over the
    shards, including them.
    """
    return float(np.einsum("pr,pq,qr->", whitening, gram, whitening, optimize=True))


_TOLERANCE: Final = 1e-6
_LARGEST: Final = 1e100


def is_gram(matrix: AnyArray) -> bool:
    """Return whether a finite matrix (p, p) can be a sum of t t^T.

    It must be symmetric with |g_ij| <= sqrt(g_ii g_jj) (Cauchy-Schwarz), so that
    arithmetic with its columns scaled to length 1 stays finite.

    >>> is_gram(np.array([[4.0, 2.0], [2.0, 1.0]]))
    True
    >>> is_gram(np.array([[1.0, 2.0], [2.0, 1.0]]))
    False
    """
    squares = np.diag(matrix)
    if squares.min(initial=0.0) < 0.0 or np.abs(matrix).max(initial=0.0) > _LARGEST:
        return False
    lengths = np.sqrt(squares)
    bound = (1.0 + _TOLERANCE) * lengths[:, None] * lengths
    is_symmetric = (np.abs(matrix - matrix.T) <= _TOLERANCE * bound).all()
    return bool(is_symmetric and (np.abs(matrix) <= bound).all())


ALPHA: Final = 2.0  # assumed ratio of the local clustering's cost to the best
ZERO_COST: Final = 1e-10  # costs below this share of the squares are rounding


@dataclass(frozen=True)
class ShardClusters:
    """A shard's rows in clusters: labels and squared distances to the centres, (n,).

    The multiplicity (n,) is weighted; centres (k, d) belong to non-empty clusters.
    """

    labels: LabelArray
    distances: FloatArray
    multiplicity: FloatArray
    centres: FloatArray

    def sum_by_cluster(self, values: FloatArray) -> FloatArray:
        """Return the sums (k,) of values (n,) over the rows of each cluster."""
        total: AnyArray = np.bincount(self.labels, values, minlength=self.used)
        return total

    @property
    def cost(self) -> float:
        """The sum of squared distances."""
        return float(self.multiplicity @ self.distances)

    @property
    def used(self) -> int:
        """The number of clusters with a row that counts."""
        return len(self.centres)


def cluster_shard(
    features: AnyArray, multiplicity: AnyArray, clusters: int, rng: np.random.Generator
) -> ShardClusters:
    """Return a shard's rows in at most ``clusters`` clusters, by k-means++."""
    weights = np.asarray(multiplicity, np.float64)
    has_weight = weights > 0
    if not has_weight.any():
        nothing = np.zeros(len(weights))
        empty = np.zeros((0, features.shape[1]))
        return ShardClusters(np.zeros(len(weights), np.intp), nothing, weights, empty)
    centres = weighted_kmeans(features, weights, clusters, rng, starts=1)
    centres = centres[np.unique(nearest(features[has_weight], centres)[0])]
    labels, distances = nearest(features, centres)
    squares = np.einsum("ij,ij->i", features, features, dtype=np.float64)
    if weights @ distances <= ZERO_COST * (weights @ squares):
        distances = np.where(has_weight, 0.0, distances)
    return ShardClusters(labels, distances, weights, centres)


def kmeans_scores(shard: ShardClusters, cost: float) -> FloatArray:
    """Return the scores (n,) of a shard's rows; 0 for rows of multiplicity 0.

    ``cost`` covers the rows of all the table's shards.
    """
    if not shard.used:
        return np.zeros(len(shard.multiplicity))
    share = ALPHA / cost if cost > 0 else 0.0
    costs = shard.sum_by_cluster(shard.multiplicity * shard.distances)
    sizes = shard.sum_by_cluster(shard.multiplicity)
    cluster = (share * costs + 2.0 * ALPHA) / sizes
    return np.where(
        shard.multiplicity > 0, share * shard.distances + cluster[shard.labels], 0.0
    )


def kmeans_total(cost: float, table_cost: float, used: int) -> float:
    """Return the sum of a shard's scores, from its cost and its number of clusters.

    >>> kmeans_total(1.0, 4.0, 3), kmeans_total(0.0, 0.0, 2)
    (13.0, 8.0)
    """
    share = cost / table_cost if table_cost > 0 else 0.0
    return 2.0 * ALPHA * (share + used)


def gamma(blocks: Sequence[AnyArray], weights: FloatArray) -> float:
    """Return the smallest singular value of [U_1, ..., U_T], from 0 to 1.

    U_i is an orthonormal basis of the columns of table i over the joined rows. 0: some
    column is a combination of other tables' columns (and the scores may miss it); 1:
    the tables' columns are orthogonal. The sample size that the theorem requires grows
    as 1 / gamma^2 (Assumption 4.1). Assumption 5.1, of k-means, asks for a table that
    tells all rows apart; a join has none as a rule, since its tables' rows repeat.

    Each table's block (m, p_i) has its columns on the sampled joined rows; the label
    table's includes the intercept's and the label's. Sums with the weights (m,), > 0,
    stand for sums over all joined rows.

    >>> first = np.array([[1.0], [2.0]])
    >>> others = (np.array([[2.0], [-1.0]]), 3.0 * first)
    >>> [round(gamma([first, other], np.ones(2)), 9) for other in others]
    [1.0, 0.0]
    """
    together = np.concatenate(
        [block @ whitening(gram(block, weights)) for block in blocks], axis=1
    )
    smallest = np.linalg.eigvalsh(gram(together, weights)).min(initial=1.0)
    # this is a square: rounding can turn 0 into what would be 1e-8 as a root
    if smallest > 1e-12:
        return float(np.sqrt(np.clip(smallest, 0.0, 1.0)))
    return 0.0
