"""The penalties of least squares: ridge, lasso, elastic net, and a path of them.

    min over theta, b  1/(2 N) sum_j (x_j theta + b - y_j)^2
                           + l1 |theta|_1 + l2/2 |theta|^2

needs no rows: the first term is a quadratic form in the covariance of (x, y). So any
rows that have it do for a solver that wants rows, and as many as there are columns have
it: a square root. On these scikit-learn's coordinate descent solves (Friedman, Hastie,
Tibshirani 2010, "Regularization Paths for Generalized Linear Models").

A path holds the ratio of the two penalties, as glmnet does its alpha.

Notation:
    d  features        k  columns of the label        m  penalties of a path
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from tp_flower.arrays import FloatArray
from tp_flower.methods.moments.solve import JoinedMoments, Solution
from tp_flower.splits import VALIDATION

RIDGES: Final = tuple((10.0 ** np.arange(-6.0, 1.5, 0.5)).tolist())
"""Of standardised columns."""
LASSOS: Final = 50
SMALLEST_SHARE: Final = 1e-4
"""Of the penalty above which all coefficients are 0: there a path ends, as glmnet's."""
ABOVE: Final = 1.0 + 1e-6
"""Times that penalty: a path begins where no rounding leaves a coefficient."""
MOST_SWEEPS: Final = 10_000
DUAL_GAP: Final = 1e-12
"""Of the label's square, below which coordinate descent ends."""
TOLERANCE: Final = 1e-9
"""Of the largest covariance with the label, by which a solution may miss the
optimality conditions."""


class Penalty(NamedTuple):
    """The weights of |theta|_1 and of |theta|^2 / 2."""

    l1: float
    l2: float


@dataclass(frozen=True, eq=False)
class Fit:
    """Least squares under a penalty.

    Attributes:
        losses: by pass of the joined rows, without the penalty.
    """

    penalty: Penalty
    solution: Solution
    losses: Mapping[int, float]

    @property
    def nonzero(self) -> int:
        """How many features have a coefficient."""
        return int(np.count_nonzero(self.solution.coefficients.any(axis=1)))


def fit_path(
    trained: JoinedMoments, passes: Mapping[int, JoinedMoments], asked: Penalty
) -> list[Fit]:
    """Return the fits of a path, the strongest penalty first, the one asked for in it.

    Args:
        trained: of the rows to fit.
        passes: of the rows to measure every fit on.
        asked: without l1 the path is one of ridges.
    """
    if asked.l1:
        penalties = _scaled(trained, asked)
        coefficients = _elastic_nets(trained, penalties)
    else:
        penalties = [Penalty(0.0, l2) for l2 in sorted({asked.l2, *RIDGES})[::-1]]
        coefficients = [trained.ridge(l2).coefficients for _, l2 in penalties]
    fits = []
    for penalty, theta in zip(penalties, coefficients, strict=True):
        solution = trained.with_intercept(theta)
        losses = {n: moments.metrics(solution)["loss"] for n, moments in passes.items()}
        fits.append(Fit(penalty, solution, losses))
    return fits


def chosen_fit(path: Sequence[Fit], asked: Penalty) -> Fit:
    """Return the fit asked for, or of lowest validation loss if rows validate."""
    if VALIDATION in path[0].losses:
        return min(path, key=lambda fit: fit.losses[VALIDATION])
    return next(fit for fit in path if fit.penalty == asked)


def violation(moments: JoinedMoments, fit: Fit) -> float:
    """Return by how much a fit misses the conditions of the optimum.

    The gradient of the smooth terms is -l1 sign(theta) where theta is not 0, and within
    l1 where it is; the largest miss is relative to the largest covariance with a label.
    """
    coefficients = fit.solution.coefficients
    l1, l2 = fit.penalty
    cross = moments.covariance_of(moments.features, moments.labels)
    gradient = moments.covariance @ coefficients + l2 * coefficients - cross
    misses = np.where(
        coefficients == 0.0,
        np.maximum(np.abs(gradient) - l1, 0.0),
        np.abs(gradient + l1 * np.sign(coefficients)),
    )
    return float(misses.max(initial=0.0) / (np.abs(cross).max(initial=0.0) or 1.0))


def _scaled(moments: JoinedMoments, asked: Penalty) -> list[Penalty]:
    """Return multiples of a penalty, from the one that leaves no coefficient, (m,)."""
    cross = moments.covariance_of(moments.features, moments.labels)
    strongest = ABOVE * float(np.abs(cross).max(initial=0.0)) / asked.l1
    if not strongest:
        return [asked]
    scales = np.geomspace(strongest, SMALLEST_SHARE * strongest, LASSOS)
    return [
        Penalty(scale * asked.l1, scale * asked.l2)
        for scale in sorted({1.0, *scales.tolist()})[::-1]
    ]


def _elastic_nets(
    moments: JoinedMoments, penalties: Sequence[Penalty]
) -> list[FloatArray]:
    """Return the coefficients (d, 1) under penalties of one ratio, by descent."""
    # scikit-learn takes a second to import
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import enet_path

    if not len(moments.features):
        return [np.zeros((0, 1)) for _ in penalties]
    features, labels = np.split(pseudo_rows(moments), [-1], axis=1)
    sums = np.array(penalties).sum(axis=1)
    with warnings.catch_warnings():
        # what has not converged is told from its violation of the conditions
        warnings.simplefilter("ignore", ConvergenceWarning)
        # 1/(2n) |y - x theta|^2 + alpha (ratio |theta|_1 + (1 - ratio)/2 |theta|^2)
        _, paths, _ = enet_path(
            features,
            labels[:, 0],
            l1_ratio=penalties[0].l1 / float(sums[0]),
            alphas=sums,
            tol=DUAL_GAP,
            max_iter=MOST_SWEEPS,
        )
    return [theta[:, None] for theta in paths.T]


def pseudo_rows(moments: JoinedMoments) -> FloatArray:
    """Return rows of mean 0 that have the covariance of the features and the label.

    They are (d + 1, d + 1), as columns the features and then the label, a number:
    R with R^T R / (d + 1) the covariance.
    """
    columns = np.append(moments.features, moments.labels)
    values, vectors = np.linalg.eigh(moments.covariance_of(columns, columns))
    roots = np.sqrt(np.maximum(values, 0.0) * len(columns))
    return np.asfortranarray(roots[:, None] * vectors.T)
