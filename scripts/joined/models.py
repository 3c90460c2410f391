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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression, Ridge

from scripts.joined.centralized import JoinedTable
from tp_flower.arrays import FloatArray
from tp_flower.learning.losses import Loss
from tp_flower.learning.metrics import evaluate
from tp_flower.reports.records import Metrics
from tp_flower.settings import Settings

Matrix = Any
"""Dense, or a sparse matrix of scipy, which has no types."""
Until = Callable[[Metrics], bool]

LBFGS_OPTIONS = {"maxcor": 10, "maxiter": 500, "gtol": 1e-6, "ftol": 0.0}
SGD_EPOCHS = 10
SAMPLED_ROWS = 20_000
NOISE_MARGIN = 4.0


@dataclass(frozen=True)
class LinearFit:
    """A linear model W (d, k), c (k,), and the iterations it took; 1 in closed form."""

    weights: FloatArray
    intercept: FloatArray
    steps: int = 1

    def scores(self, features: Matrix) -> FloatArray:
        """Return X W + c, (N, k): the product in the precision of the features."""
        product = features @ self.weights.astype(features.dtype)
        scores: FloatArray = np.asarray(product, np.float64) + self.intercept
        return scores


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

    def objective(self, fitted: LinearFit) -> float:
        """Return the objective of a linear model, the penalty included."""
        penalty = 0.5 * self.l2 * float((fitted.weights**2).sum())
        scores = fitted.scores(self.train)
        return self.loss.value(scores, self.train_labels) + penalty

    def optimum(self) -> LinearFit:
        """Return the linear model that minimises the objective."""
        features = self.train.astype(np.float64)
        if self.loss.name == "squared":
            return fit_ridge(features, self.train_labels, self.l2)
        return fit_logistic(
            *(features, self.train_labels, self.l2),
            solver="newton-cholesky",
            tol=1e-10,
        )

    def test_metrics(self, fitted: LinearFit) -> Metrics:
        """Return a linear model's metrics on the held-out rows."""
        return evaluate(self.loss, fitted.scores(self.test), self.test_labels)


def fit_ridge(features: Matrix, labels: FloatArray, l2: float) -> LinearFit:
    """Return the ridge regression, in closed form."""
    design = np.column_stack([features, np.ones(len(features))])
    # the intercept, which comes last, is free
    penalty = np.diag(np.append(np.full(features.shape[1], l2), 0.0))
    gram = design.T @ design / len(labels) + penalty
    # of least norm where one-hot columns add up to the intercept and l2 is 0
    theta = np.linalg.lstsq(gram, design.T @ labels / len(labels), rcond=None)[0]
    return LinearFit(theta[:-1, None], theta[-1:])


def fit_logistic(
    features: Matrix, labels: FloatArray, l2: float, **options: Any
) -> LinearFit:
    """Return scikit-learn's LogisticRegression with options, or its defaults.

    The labels are class indices of two or more classes; its C is 1 / (N l2).
    """
    inverse = 1.0 / (len(labels) * l2) if l2 else np.inf
    model = LogisticRegression(C=inverse, **options).fit(features, labels)
    weights, intercept = model.coef_.T.astype(np.float64), model.intercept_
    return LinearFit(weights, intercept.astype(np.float64), int(model.n_iter_[0]))


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
        self.test.append(self.problem.test_metrics(fitted))
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

    def model_of(flat: FloatArray) -> LinearFit:
        theta = flat.reshape(width + 1, outputs).copy()
        return LinearFit(theta[:-1], theta[-1])

    def objective(flat: FloatArray) -> tuple[float, FloatArray]:
        fitted = model_of(flat)
        scores = fitted.scores(problem.train)
        excess = problem.loss.gradient(scores, problem.train_labels) / len(scores)
        slopes = problem.train.T @ excess.astype(np.float32)
        gradient = [slopes + problem.l2 * fitted.weights, excess.sum(axis=0)]
        penalty = 0.5 * problem.l2 * float((fitted.weights**2).sum())
        value = problem.loss.value(scores, problem.train_labels) + penalty
        return value, np.vstack(gradient).ravel()

    def on_iteration(flat: FloatArray) -> None:
        if curve.measure(model_of(flat)):
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
            scores = LinearFit(weights, intercept).scores(features)
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

    L and T are the largest eigenvalue and the trace of the second moments of features
    and intercept, times the loss's curvature; ``averaged`` is batch size * (1 -
    momentum).
    """
    rows = len(problem.train_labels)
    sample = problem.train[np.sort(rng.permutation(rows)[:SAMPLED_ROWS])]
    sample = sample.toarray() if sp.issparse(sample) else sample
    moments = sample.T @ sample / len(sample)
    largest, trace = np.linalg.norm(moments, 2) + 1.0, np.trace(moments) + 1.0
    bound = float(largest + NOISE_MARGIN * trace / averaged)
    return 1.0 / (problem.loss.max_curvature * bound + problem.l2)


def train_scikit_learn(
    problem: Problem, _: Settings, until: Until | None = None
) -> Curve:
    """Fit scikit-learn's Ridge or LogisticRegression: one step."""
    curve = Curve(problem, until)
    data = (problem.train, problem.train_labels)
    if problem.loss.name == "squared":
        model = Ridge(alpha=len(problem.train_labels) * problem.l2).fit(*data)
        intercept = np.atleast_1d(np.asarray(model.intercept_, np.float64))
        fitted = LinearFit(model.coef_.astype(np.float64)[:, None], intercept)
    else:
        fitted = fit_logistic(*data, problem.l2)
    curve.measure(fitted)
    return curve
