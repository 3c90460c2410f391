"""Least squares on weighted rows in one place: ridge, lasso and elastic net.

    minimise    1/(2 W) sum_j w_j (x_j theta + b - y_j)^2
                    + l2/2 ||theta||^2 + l1 ||theta||_1,    W = sum_j w_j

the objective of every strategy, with a free intercept b.

Notation:
    x_j    ``design``  (n, p)
    y_j    ``targets``  (n,)
    w_j    ``weights``  (n,), >= 0, not all 0
    theta  the first p elements of the result, b the last
"""

import warnings
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import AnyArray, FloatArray, blocks

Solver = Literal["exact", "saga"]

MAX_PASSES: Final = 10_000
TOLERANCE: Final = 1e-6
CONSTANT: Final = 1e-12  # deviation of a constant column, relative to its size


def solve(
    design: AnyArray,
    targets: FloatArray,
    weights: FloatArray,
    *,
    l2: float,
    l1: float = 0.0,
    solver: Solver = "exact",
) -> FloatArray:
    """Return theta and b, (p + 1,), for a finite design, using scikit-learn.

    If both penalties are 0, theta is the solution of least norm after the columns are
    scaled to length 1: copies and combinations of columns do no harm.

    The solver is "exact" (singular values; coordinate descent if l1 is above 0), or
    "saga": stochastic average gradients (Defazio et al. 2014), which stop after
    ``MAX_PASSES`` passes if they have not converged.
    """
    scaled = weights * (len(weights) / weights.sum())
    if l1 > 0 and solver == "saga":
        raise ValueError("solver 'saga' takes no l1 penalty: l1 must be 0")
    columns = np.asarray(design, np.float64)
    if l1 == 0 and l2 == 0 and solver == "exact":
        return _least_squares(columns, targets, scaled)
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import ElasticNet, Ridge

    with warnings.catch_warnings():
        # the best solution so far is used, and its cost is in the report
        warnings.simplefilter("ignore", ConvergenceWarning)
        if solver == "saga":
            return _saga(columns, targets, scaled, l2)
        if l1 > 0:
            # 1/(2n) sum w r^2 + alpha (ratio |theta|_1 + (1 - ratio)/2 ||theta||^2)
            alpha = l1 + l2
            ratio = l1 / (l1 + l2)
            model = ElasticNet(
                alpha=alpha, l1_ratio=ratio, max_iter=MAX_PASSES, tol=TOLERANCE
            )
        else:
            # sum w r^2 + alpha ||theta||^2, which is 2 n times ours
            model = Ridge(alpha=l2 * len(scaled), solver="svd")
        model.fit(columns, targets, sample_weight=scaled)
    return np.append(model.coef_, model.intercept_)


def _saga(
    design: FloatArray, targets: FloatArray, weights: FloatArray, l2: float
) -> FloatArray:
    """Return theta and b, (p + 1,), by stochastic average gradients."""
    from sklearn.linear_model import Ridge

    # scikit-learn's step follows the longest row, regardless of its weight: a large
    # weight could make it diverge, so weights are multiplied into the rows
    mean = np.average(design, 0, weights)
    middle = np.average(targets, 0, weights)
    roots = np.sqrt(weights)
    model = Ridge(
        alpha=l2 * len(weights),
        solver="saga",
        fit_intercept=False,
        max_iter=MAX_PASSES,
        tol=TOLERANCE,
        random_state=0,  # of the order in which it takes the rows
    ).fit(roots[:, None] * (design - mean), roots * (targets - middle))
    return np.append(model.coef_, middle - mean @ model.coef_)


def _least_squares(
    design: FloatArray, targets: FloatArray, weights: FloatArray
) -> FloatArray:
    """Return theta and b, (p + 1,), without a penalty, whatever the columns' units."""
    from sklearn.linear_model import LinearRegression

    # without a penalty units do not matter, and must not decide what counts as zero:
    # columns may be of size 1e-8 or 1e8
    lengths = np.sqrt(weights @ (design - np.average(design, 0, weights)) ** 2)
    # only rounding is left of a constant column: its coefficient is 0
    is_constant = lengths <= CONSTANT * np.sqrt(weights @ design**2)
    units = np.where(is_constant, 0.0, 1.0 / np.where(is_constant, 1.0, lengths))
    model = LinearRegression().fit(design * units, targets, sample_weight=weights)
    return np.append(model.coef_ * units, model.intercept_)


LabelArray = npt.NDArray[np.intp]

MAX_STEPS: Final = 300
STARTS: Final = 10  # of k-means++, as in scikit-learn at the paper's time
_BLOCK_VALUES: Final = 1 << 22


def weighted_kmeans(
    points: AnyArray,
    weights: AnyArray,
    clusters: int,
    rng: np.random.Generator,
    *,
    starts: int = STARTS,
) -> FloatArray:
    """Return the centres, (<= k, d), of the best of ``starts`` runs of k-means++."""
    weighted = points[weights > 0]
    positive_weights = weights[weights > 0]
    if not len(weighted):
        raise ValueError("no point has a weight above 0: there is nothing to cluster")
    # scikit-learn takes a second to import, and few messages cluster
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    solver = KMeans(
        n_clusters=min(clusters, len(weighted)),
        n_init=starts,
        max_iter=MAX_STEPS,
        random_state=int(rng.integers(2**31)),
    )
    with warnings.catch_warnings():
        # fewer distinct points than clusters: some centres coincide
        warnings.filterwarnings("ignore", "Number of distinct", ConvergenceWarning)
        solver.fit(weighted, sample_weight=positive_weights)
    return np.unique(solver.cluster_centers_.astype(np.float64), axis=0)


def nearest(points: AnyArray, centres: FloatArray) -> tuple[LabelArray, FloatArray]:
    """Return each point's nearest centre (n,), and the squared distance to it (n,).

    >>> labels, distances = nearest(np.array([[0.0], [7.0]]), np.array([[1.0], [5.0]]))
    >>> labels.tolist(), distances.tolist()
    ([0, 1], [1.0, 4.0])
    """
    labels = np.zeros(len(points), np.intp)
    distances = np.zeros(len(points))
    lengths = np.einsum("kd,kd->k", centres, centres)
    width = max(centres.shape[1], len(centres), 1)
    for block in blocks(len(points), max(_BLOCK_VALUES // width, 1)):
        rows = points[block].astype(np.float64)
        labels[block] = np.argmin(lengths - 2.0 * (rows @ centres.T), axis=1)
        # from the difference itself: a difference of squares has no digits left near 0
        rows -= centres[labels[block]]
        distances[block] = np.einsum("ij,ij->i", rows, rows)
    return labels, distances


def distdim(
    labels: npt.NDArray[np.integer],
    centres: Sequence[FloatArray],
    weights: AnyArray,
    clusters: int,
    rng: np.random.Generator,
) -> FloatArray:
    """Return centres (<= k, d_1 + ... + d_T) from the parties' local clusterings.

    Every party clusters its own columns. A point is then represented by its combination
    of local centres; those that occur are clustered, weighted by their points.

    ``labels`` (n, T) are the nearest local centres of each point, ``centres`` (k_t,
    d_t) one array per party, ``weights`` (n,) >= 0.

    Reference:
        Ding et al. 2016, algorithm DistDim-K-means; of the k^T combinations only those
        that occur are made.
    """
    combinations, combination_of = np.unique(labels, axis=0, return_inverse=True)
    totals = np.bincount(
        combination_of.reshape(-1), weights, minlength=len(combinations)
    )
    grid = np.concatenate(
        [
            party_centres[combinations[:, party]]
            for party, party_centres in enumerate(centres)
        ],
        axis=1,
    )
    return weighted_kmeans(grid, totals, clusters, rng)
