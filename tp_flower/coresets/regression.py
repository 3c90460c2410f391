"""Least squares on weighted rows at one place: ridge, lasso and elastic net.

    minimise    1/(2 W) sum_j w_j (x_j theta + b - y_j)^2
                    + l2/2 ||theta||^2 + l1 ||theta||_1,    W = sum_j w_j

the objective of every strategy, with a free intercept b.

Notation:
    x_j    ``design``  (n, p)
    y_j    ``targets``  (n,)
    w_j    ``weights``  (n,), >= 0, not all 0
    theta  the first p of what is returned, b the last
"""

import warnings
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Solver = Literal["exact", "saga"]

MAX_PASSES: Final = 10_000
TOLERANCE: Final = 1e-6
CONSTANT: Final = 1e-12
"""A column whose deviation is below it, over its size, is constant."""
_SEED: Final = 0  # of the order in which SAGA takes the rows


def solve(
    design: npt.NDArray[Any],
    targets: FloatArray,
    weights: FloatArray,
    *,
    l2: float,
    l1: float = 0.0,
    solver: Solver = "exact",
) -> FloatArray:
    """Return theta and b, (p + 1,), by scikit-learn.

    Args:
        design: (n, p), finite.
        targets: (n,).
        weights: (n,).
        l2: >= 0; with both penalties 0 theta is the least of those that fit, once the
            columns have length 1: copies and combinations of columns do no harm.
        l1: >= 0.
        solver: "exact" (singular values; coordinate descent where l1 is above 0), or
            "saga": stochastic average gradients (Defazio et al. 2014), which stop after
            ``MAX_PASSES`` passes where they have not converged.

    Raises:
        ValueError: SAGA is asked for l1 above 0.
    """
    own = weights * (len(weights) / weights.sum())
    if l1 > 0 and solver == "saga":
        raise ValueError("SAGA solves ridge regression: l1 is 0 with it")
    own_design = np.asarray(design, np.float64)
    if l1 == 0 and l2 == 0 and solver == "exact":
        return _least_squares(own_design, targets, own)
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # the best that was reached is used, and its cost is in the report
        warnings.simplefilter("ignore", ConvergenceWarning)
        if solver == "saga":
            return _saga(own_design, targets, own, l2)
        model = _model(l2, l1, len(own))
        model.fit(own_design, targets, sample_weight=own)
    return np.append(model.coef_, model.intercept_)


def _saga(
    design: FloatArray, targets: FloatArray, weights: FloatArray, l2: float
) -> FloatArray:
    from sklearn.linear_model import Ridge

    # scikit-learn's step is from the longest row, whatever it weighs: with a weight of
    # its own a row may make it diverge, so that weights go into the rows themselves
    mean, middle = np.average(design, 0, weights), np.average(targets, 0, weights)
    roots = np.sqrt(weights)
    model = Ridge(
        alpha=l2 * len(weights),
        solver="saga",
        fit_intercept=False,
        max_iter=MAX_PASSES,
        tol=TOLERANCE,
        random_state=_SEED,
    ).fit(roots[:, None] * (design - mean), roots * (targets - middle))
    return np.append(model.coef_, middle - mean @ model.coef_)


def _least_squares(
    design: FloatArray, targets: FloatArray, weights: FloatArray
) -> FloatArray:
    from sklearn.linear_model import LinearRegression

    # without a penalty units do not matter, and what counts as zero must not depend
    # on them: columns may be of size 1e-8 and 1e8
    lengths = np.sqrt(weights @ (design - np.average(design, 0, weights)) ** 2)
    sizes = np.sqrt(weights @ design**2)
    # what a constant column has left is rounding: its coefficient is 0
    is_constant = lengths <= CONSTANT * sizes
    units = np.where(is_constant, 0.0, 1.0 / np.where(is_constant, 1.0, lengths))
    model = LinearRegression().fit(design * units, targets, sample_weight=weights)
    return np.append(model.coef_ * units, model.intercept_)


def _model(l2: float, l1: float, rows: int) -> Any:
    """Return scikit-learn's model whose objective is a multiple of ours."""
    from sklearn.linear_model import ElasticNet, Ridge

    if l1 > 0:
        # 1/(2n) sum w r^2 + alpha (ratio |theta|_1 + (1 - ratio)/2 ||theta||^2)
        return ElasticNet(
            alpha=l1 + l2,
            l1_ratio=l1 / (l1 + l2),
            max_iter=MAX_PASSES,
            tol=TOLERANCE,
        )
    # sum w r^2 + alpha ||theta||^2, which is 2 n times ours
    return Ridge(alpha=l2 * rows, solver="svd")
