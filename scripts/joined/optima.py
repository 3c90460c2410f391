"""Models fitted to the joined table: the optima that a run is measured against.

    minimise (1/N) sum_j loss(x_j W + c; y_j) + l2/2 ||W||^2   c is free

Notation
    X   ``features``  (N, d) float32        y  ``labels``  (N,)
    W   ``weights``  (d, k)                 c  ``intercept``  (k,)
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression

from tp_flower.learning.losses import (
    LogisticLoss,
    Loss,
    SoftmaxLoss,
    SquaredLoss,
    sigmoid,
)

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]

BLOCK_ROWS = 16384
NEWTON_TOLERANCE = 1e-10
MAX_NEWTON_STEPS = 100
KEPT_HESSIAN = 0.1


@dataclass(frozen=True)
class LinearFit:
    """A linear model of the joined table.

    Attributes:
        weights: W, (d, k).
        intercept: c, (k,).
        steps: iterations that it took; 1 in closed form.
    """

    weights: FloatArray
    intercept: FloatArray
    steps: int = 1

    def scores(self, features: Float32Array) -> FloatArray:
        """Return X W + c, (N, k)."""
        out = np.empty((len(features), len(self.intercept)))
        for block in _blocks(len(features)):
            out[block] = features[block].astype(np.float64) @ self.weights
        out += self.intercept
        return out

    def objective(
        self, loss: Loss, features: Float32Array, labels: FloatArray, l2: float
    ) -> float:
        """Return the objective, the penalty included."""
        penalty = 0.5 * l2 * float((self.weights**2).sum())
        return loss.value(self.scores(features), labels) + penalty


def fit_linear(
    loss: Loss, features: Float32Array, labels: FloatArray, l2: float
) -> LinearFit:
    """Return the optimum of a loss: ridge, logistic or softmax regression."""
    if isinstance(loss, SquaredLoss):
        return fit_ridge(features, labels, l2)
    if isinstance(loss, LogisticLoss):
        # undamped, Newton's method can fail where classes are almost separable
        with contextlib.suppress(RuntimeError):
            return fit_logistic(features, labels, l2)
    if isinstance(loss, LogisticLoss | SoftmaxLoss):
        return fit_scikit_learn(features, labels, l2, tol=1e-7, max_iter=10_000)
    message = f"there is no centralised fit for the loss {loss.name!r}"
    raise ValueError(message)


def fit_ridge(features: Float32Array, labels: FloatArray, l2: float) -> LinearFit:
    """Return the ridge regression, in closed form."""
    width, total = features.shape[1] + 1, len(labels)
    gram, moments = np.zeros((width, width)), np.zeros(width)
    for rows, block in _with_ones(features):
        gram += block.T @ block
        moments += block.T @ labels[rows]
    solution = _solve(gram / total + np.diag(_ridge(width, l2)), moments / total)
    return LinearFit(solution[:-1, None], solution[-1:])


def fit_logistic(
    features: Float32Array,
    labels: FloatArray,
    l2: float,
    tolerance: float = NEWTON_TOLERANCE,
) -> LinearFit:
    """Return the logistic regression for labels 0 and 1, by Newton's method.

    It ends when no coordinate of the gradient exceeds the tolerance.

    Raises:
        RuntimeError: it did not converge.
    """
    loss, total = LogisticLoss(), len(labels)
    theta = np.zeros(features.shape[1] + 1)
    theta[-1] = loss.base_score(labels)[0]
    ridge = _ridge(len(theta), l2)
    hessian, largest = np.zeros((0, 0)), 0.0
    for step in range(MAX_NEWTON_STEPS):
        rates = sigmoid(LinearFit(theta[:-1, None], theta[-1:]).scores(features)[:, 0])
        gradient = ridge * theta
        for rows, block in _with_ones(features):
            gradient += block.T @ (rates[rows] - labels[rows]) / total
        before, largest = largest, float(np.abs(gradient).max())
        if not np.isfinite(largest):
            break
        if largest <= tolerance:
            return LinearFit(theta[:-1, None], theta[-1:], step)
        # the Hessian costs d times more than the gradient: kept while it is good enough
        if largest > KEPT_HESSIAN * before:
            hessian = _hessian(features, rates * (1.0 - rates) / total) + np.diag(ridge)
        theta = theta - _solve(hessian, gradient)
    message = f"Newton's method did not converge: gradient {largest:.1e}"
    raise RuntimeError(message)


def _hessian(features: Float32Array, curvature: FloatArray) -> FloatArray:
    """Return [X, 1]^T diag(curvature) [X, 1]; float32, as only the speed needs it."""
    root = np.sqrt(curvature).astype(np.float32)
    total = np.zeros((features.shape[1] + 1,) * 2)
    for rows in _blocks(len(features)):
        block = np.ones((rows.stop - rows.start, len(total)), dtype=np.float32)
        block[:, :-1] = features[rows]
        block *= root[rows, None]
        total += block.T @ block
    return total


def fit_scikit_learn(
    features: object, labels: FloatArray, l2: float, **options: float
) -> LinearFit:
    """Return scikit-learn's LogisticRegression (lbfgs), for two or more classes.

    Args:
        features: dense or sparse.
        labels: class indices.
        l2: as here; scikit-learn's C is 1 / (N l2).
        options: of LogisticRegression; its defaults without any.
    """
    inverse = 1.0 / (len(labels) * l2) if l2 else np.inf
    model = LogisticRegression(C=inverse, **options).fit(features, labels)
    weights = model.coef_.T.astype(np.float64)
    return LinearFit(
        weights, model.intercept_.astype(np.float64), int(model.n_iter_[0])
    )


def _ridge(width: int, l2: float) -> FloatArray:
    """The penalty's diagonal: the intercept, which comes last, is free."""
    ridge = np.full(width, l2)
    ridge[-1] = 0.0
    return ridge


def _solve(matrix: FloatArray, right: FloatArray) -> FloatArray:
    # of least norm where one-hot columns add up to the intercept and l2 is 0
    return np.asarray(np.linalg.lstsq(matrix, right, rcond=None)[0], np.float64)


def _blocks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, rows))


def _with_ones(features: Float32Array) -> Iterator[tuple[slice, FloatArray]]:
    """Yield [X, 1] block by block in float64."""
    for rows in _blocks(len(features)):
        block = np.ones((rows.stop - rows.start, features.shape[1] + 1))
        block[:, :-1] = features[rows]
        yield rows, block
