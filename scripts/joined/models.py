"""Models fitted to the joined table, as one would without tp_flower.

    minimise (1/N) sum_j loss(x_j W + c; y_j) + l2/2 ||W||^2   c is free

``fit_*`` return an optimum. ``train_*`` return a curve: the held-out metrics after
every epoch or iteration, and the seconds of training until then (what measuring takes
is left out); with ``until`` they end at the first metrics that are enough.

Notation
    X   ``features``  (N, d), dense float32 or CSR     y  ``labels``  (N,)
    W   ``weights``  (d, k)                            c  ``intercept``  (k,)
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression, Ridge

from scripts.joined.centralized import JoinedTable
from tp_flower.arrays import FloatArray
from tp_flower.learning.losses import (
    LogisticLoss,
    Loss,
    SoftmaxLoss,
    SquaredLoss,
)
from tp_flower.learning.metrics import evaluate
from tp_flower.reports.records import Metrics
from tp_flower.settings import Settings

Float32Array = npt.NDArray[np.float32]
Matrix = Any
"""Dense float32, or a sparse matrix of scipy, which has no types."""
Until = Callable[[Metrics], bool]

BLOCK_ROWS = 16384
NEWTON_TOLERANCE = 1e-10

LBFGS_OPTIONS = {"maxcor": 10, "maxiter": 500, "gtol": 1e-6, "ftol": 0.0}

SGD_EPOCHS = 10
SAMPLED_ROWS = 20_000
POWER_STEPS = 20
NOISE_MARGIN = 4.0


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
        """Return X W + c, (N, k), multiplied in float64."""
        out = np.empty((len(features), len(self.intercept)))
        for block in _blocks(len(features)):
            out[block] = features[block].astype(np.float64) @ self.weights
        out += self.intercept
        return out

    def float32_scores(self, features: Matrix) -> FloatArray:
        """Return X W + c, (N, k): the product in float32, as the features are."""
        product = features @ self.weights.astype(np.float32)
        scores: FloatArray = np.asarray(product, np.float64) + self.intercept
        return scores

    def objective(
        self, loss: Loss, features: Float32Array, labels: FloatArray, l2: float
    ) -> float:
        """Return the objective, the penalty included."""
        penalty = 0.5 * l2 * float((self.weights**2).sum())
        return loss.value(self.scores(features), labels) + penalty


@dataclass(frozen=True, eq=False)
class Problem:
    """The encoded joined table, split into training and held-out rows."""

    train: Matrix
    train_labels: FloatArray
    test: Matrix
    test_labels: FloatArray
    loss: Loss
    l2: float

    @classmethod
    def of(cls, joined: JoinedTable, settings: Settings) -> Self:
        """Split a joined table as it says."""
        parts = (*joined.part(test=False), *joined.part(test=True))
        return cls(*parts, joined.loss, settings.l2)

    def optimum(self) -> LinearFit:
        """Return the linear model that minimises the objective."""
        return fit_linear(self.loss, self.train, self.train_labels, self.l2)

    def test_metrics(self, scores: FloatArray) -> Metrics:
        """Return the metrics of scores of the held-out rows."""
        return evaluate(self.loss, scores, self.test_labels)


def fit_linear(
    loss: Loss, features: Float32Array, labels: FloatArray, l2: float
) -> LinearFit:
    """Return the optimum of a loss: ridge, logistic or softmax regression."""
    if isinstance(loss, SquaredLoss):
        return fit_ridge(features, labels, l2)
    if isinstance(loss, LogisticLoss):
        wide = features.astype(np.float64)
        options = {"solver": "newton-cholesky", "tol": NEWTON_TOLERANCE}
        return fit_scikit_learn(wide, labels, l2, **options)
    if isinstance(loss, SoftmaxLoss):
        return fit_scikit_learn(features, labels, l2, tol=1e-7, max_iter=10_000)
    raise ValueError(f"there is no centralised fit for the loss {loss.name!r}")


def fit_ridge(features: Float32Array, labels: FloatArray, l2: float) -> LinearFit:
    """Return the ridge regression, in closed form."""
    width, total = features.shape[1] + 1, len(labels)
    gram, moments = np.zeros((width, width)), np.zeros(width)
    for rows in _blocks(total):
        block = np.ones((rows.stop - rows.start, width))
        block[:, :-1] = features[rows]
        gram += block.T @ block
        moments += block.T @ labels[rows]
    # the intercept, which comes last, is free
    penalty = np.diag(np.append(np.full(width - 1, l2), 0.0))
    # of least norm where one-hot columns add up to the intercept and l2 is 0
    solution = np.linalg.lstsq(gram / total + penalty, moments / total, rcond=None)
    theta = np.asarray(solution[0], np.float64)
    return LinearFit(theta[:-1, None], theta[-1:])


def fit_scikit_learn(
    features: object, labels: FloatArray, l2: float, **options: Any
) -> LinearFit:
    """Return scikit-learn's LogisticRegression with options, or its defaults.

    The features are dense or sparse, the labels class indices of two or more classes;
    scikit-learn's C is 1 / (N l2).
    """
    inverse = 1.0 / (len(labels) * l2) if l2 else np.inf
    model = LogisticRegression(C=inverse, **options).fit(features, labels)
    weights = model.coef_.T.astype(np.float64)
    return LinearFit(
        weights, model.intercept_.astype(np.float64), int(model.n_iter_[0])
    )


def _blocks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, rows))


@dataclass
class Curve:
    """A training, step by step; its clock stands still while it measures.

    Attributes:
        test: metrics on the held-out rows after each epoch or iteration.
        seconds: of training until then.
        fitted: the last linear model.
    """

    problem: Problem
    until: Until | None = None
    test: list[Metrics] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    fitted: LinearFit | None = None
    _started: float = field(default_factory=time.perf_counter)

    def measure(self, fitted: LinearFit) -> bool:
        """Measure a model; return whether it is good enough."""
        arrived = time.perf_counter()
        self.seconds.append(arrived - self._started)
        scores = fitted.float32_scores(self.problem.test)
        self.test.append(self.problem.test_metrics(scores))
        self.fitted = fitted
        self._started += time.perf_counter() - arrived
        return self.until is not None and self.until(self.test[-1])


def train_lbfgs(problem: Problem, _: Settings, until: Until | None = None) -> Curve:
    """Minimise the objective by scipy's L-BFGS over all rows; a step is an iteration.

    It starts at the best constant score.
    """
    curve = Curve(problem, until)
    outputs, width = problem.loss.outputs, problem.train.shape[1]
    start = np.zeros((width + 1, outputs))
    start[-1] = problem.loss.base_score(problem.train_labels)

    def objective(flat: FloatArray) -> tuple[float, FloatArray]:
        theta = flat.reshape(width + 1, outputs)
        scores = LinearFit(theta[:-1], theta[-1]).float32_scores(problem.train)
        excess = problem.loss.gradient(scores, problem.train_labels) / len(scores)
        gradient = np.empty_like(theta)
        gradient[:-1] = problem.train.T @ excess.astype(np.float32)
        gradient[:-1] += problem.l2 * theta[:-1]
        gradient[-1] = excess.sum(axis=0)
        penalty = 0.5 * problem.l2 * float((theta[:-1] ** 2).sum())
        value = problem.loss.value(scores, problem.train_labels) + penalty
        return value, gradient.ravel()

    def on_iteration(flat: FloatArray) -> None:
        theta = flat.reshape(width + 1, outputs).copy()
        if curve.measure(LinearFit(theta[:-1], theta[-1])):
            raise StopIteration

    minimize(
        *(objective, start.ravel()),
        jac=True,
        method="L-BFGS-B",
        callback=on_iteration,
        options=LBFGS_OPTIONS,
    )
    return curve


def train_sgd(
    problem: Problem, settings: Settings, until: Until | None = None
) -> Curve:
    """Minimise the objective by mini-batches with momentum.

    The settings are read as the federated run reads them: ``batch_size`` (0: N / 100),
    ``learning_rate`` (0: what is safe), ``momentum``, ``decay``, ``num_epochs``,
    ``seed``.
    """
    curve = Curve(problem, until)
    rng = np.random.default_rng(settings.seed)
    rows = len(problem.train_labels)
    size = settings.batch_size or max(rows // 100, 1)
    first_rate = settings.learning_rate or _safe_rate(
        problem, size * (1.0 - settings.momentum), rng
    )
    weights = np.zeros((problem.train.shape[1], problem.loss.outputs))
    intercept = problem.loss.base_score(problem.train_labels)
    speed, intercept_speed = np.zeros_like(weights), np.zeros_like(intercept)
    # the rows in random order once, so that a batch is a slice of them; copied batch by
    # batch, the whole table need not be there twice
    batches = np.array_split(rng.permutation(rows), -(-rows // size))
    for epoch in range(settings.num_epochs or SGD_EPOCHS):
        rate = first_rate / (1.0 + settings.decay * epoch)
        for number in rng.permutation(len(batches)):
            batch = batches[number]
            features = problem.train[batch]
            scores = LinearFit(weights, intercept).float32_scores(features)
            excess = problem.loss.gradient(scores, problem.train_labels[batch])
            excess /= len(batch)
            gradient = features.T @ excess.astype(np.float32) + problem.l2 * weights
            speed = settings.momentum * speed - rate * gradient
            intercept_speed *= settings.momentum
            intercept_speed -= rate * excess.sum(axis=0)
            weights, intercept = weights + speed, intercept + intercept_speed
        if curve.measure(LinearFit(weights, intercept, epoch + 1)):
            break
    return curve


def _safe_rate(problem: Problem, averaged: float, rng: np.random.Generator) -> float:
    """Return 1 / (L + 4 T / averaged), as TablePuppetSGD does, from a sample of rows.

    L and T are the largest eigenvalue and the trace of the features' second moments,
    times the loss's curvature; ``averaged`` is batch size * (1 - momentum).
    """
    rows = len(problem.train_labels)
    chosen = np.sort(rng.permutation(rows)[:SAMPLED_ROWS])
    sample = problem.train[chosen]
    vector = rng.normal(size=sample.shape[1]).astype(np.float32)
    largest = 0.0
    for _ in range(POWER_STEPS):
        vector /= np.linalg.norm(vector)
        vector = sample.T @ (sample @ vector) / len(chosen)
        largest = float(np.linalg.norm(vector))
    squares = sample.multiply(sample) if sp.issparse(sample) else sample * sample
    trace = float(squares.sum()) / len(chosen) + 1.0
    # the intercept is a column of ones
    bound = largest + 1.0 + NOISE_MARGIN * trace / averaged
    return 1.0 / (problem.loss.max_curvature * bound + problem.l2)


def train_scikit_learn(
    problem: Problem, _: Settings, until: Until | None = None, **options: Any
) -> Curve:
    """Fit scikit-learn's Ridge, or LogisticRegression with options: one step."""
    curve = Curve(problem, until)
    if problem.loss.name == "squared":
        penalty = len(problem.train_labels) * problem.l2
        model = Ridge(alpha=penalty).fit(problem.train, problem.train_labels)
        intercept = np.atleast_1d(np.asarray(model.intercept_, np.float64))
        fitted = LinearFit(model.coef_.astype(np.float64)[:, None], intercept)
    else:
        data = (problem.train, problem.train_labels, problem.l2)
        fitted = fit_scikit_learn(*data, **options)
    curve.measure(fitted)
    return curve
