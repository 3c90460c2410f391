"""Training on the joined table, as one would without tp_flower: one function a method.

    problem = Problem.of(join_tables(query, settings, sources), settings)
    curve = BASELINES["L-BFGS"](problem, settings)

Split and encoders are those of the federated run. A curve has the held-out metrics
after every epoch or iteration, and the seconds of training until then: what measuring
takes is left out. With ``until`` training ends at the first metrics that are enough.

Notation
    X   ``features``  (N, d), dense float32 or CSR        y  ``labels``  (N,)
    W   ``weights``   (d, k)                              c  ``intercept``  (k,)
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.optimize import minimize
from sklearn.linear_model import Ridge

from scripts.joined.additive_mlp import fit_mlp
from scripts.joined.optima import FloatArray, LinearFit, fit_scikit_learn
from scripts.joined.problem import Matrix, Problem
from tp_flower.learning.losses import Loss
from tp_flower.learning.metrics import evaluate
from tp_flower.reports.records import Metrics
from tp_flower.settings import Settings

Until = Callable[[Metrics], bool]

LBFGS_MEMORY = 10
LBFGS_ITERATIONS = 500
GRADIENT_TOLERANCE = 1e-6

SGD_EPOCHS = 10
SAMPLED_ROWS = 20_000
POWER_STEPS = 20
NOISE_MARGIN = 4.0

MLP_EPOCHS = 10

TREES = 200
TREE_SETTINGS: Mapping[str, object] = {
    "learning_rate": 0.1,
    "num_leaves": 63,
    "verbosity": -1,
    "deterministic": True,
}
TREE_OBJECTIVES: Mapping[str, str] = {
    "squared": "regression",
    "logistic": "binary",
    "softmax": "multiclass",
}


@dataclass
class Curve:
    """A training, step by step.

    Attributes:
        test: metrics on the held-out rows after each epoch or iteration.
        seconds: of training until then.
        fitted: the model, if it is linear.
    """

    test: list[Metrics] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    fitted: LinearFit | None = None


class _Watch:
    """Fills a curve; its clock stands still while it measures."""

    def __init__(self, problem: Problem, until: Until | None) -> None:
        self.curve = Curve()
        self._problem, self._until = problem, until
        self._started = time.perf_counter()

    def see(self, test_scores: Callable[[], FloatArray]) -> bool:
        """Measure the model; return whether it is good enough."""
        arrived = time.perf_counter()
        self.curve.seconds.append(arrived - self._started)
        own = self._problem
        metrics: Metrics = evaluate(own.loss, test_scores(), own.test_labels)
        self.curve.test.append(metrics)
        self._started += time.perf_counter() - arrived
        return self._until is not None and self._until(metrics)

    def see_linear(self, fitted: LinearFit) -> bool:
        """Measure a linear model."""
        self.curve.fitted = fitted
        return self.see(
            lambda: scores_of(self._problem.test, fitted.weights, fitted.intercept)
        )


def scores_of(
    features: Matrix, weights: FloatArray, intercept: FloatArray
) -> FloatArray:
    """Return X W + c, (N, k): the product in float32, as the features are."""
    scores = np.asarray(features @ weights.astype(np.float32), np.float64)
    scores += intercept
    return scores


def train_lbfgs(
    problem: Problem,
    settings: Settings,  # noqa: ARG001
    until: Until | None = None,
) -> Curve:
    """Minimise the objective by scipy's L-BFGS over all rows; a step is an iteration.

    It starts at the best constant score.
    """
    watch = _Watch(problem, until)
    outputs, width = problem.loss.outputs, problem.train.shape[1]
    start = np.zeros((width + 1, outputs))
    start[-1] = problem.loss.base_score(problem.train_labels)

    def objective(flat: FloatArray) -> tuple[float, FloatArray]:
        theta = flat.reshape(width + 1, outputs)
        scores = scores_of(problem.train, theta[:-1], theta[-1])
        excess = problem.loss.gradient(scores, problem.train_labels) / len(scores)
        gradient = np.empty_like(theta)
        gradient[:-1] = problem.train.T @ excess.astype(np.float32)
        gradient[:-1] += problem.l2 * theta[:-1]
        gradient[-1] = excess.sum(axis=0)
        return problem.value(scores, theta[:-1]), gradient.ravel()

    def on_iteration(flat: FloatArray) -> None:
        theta = flat.reshape(width + 1, outputs).copy()
        if watch.see_linear(LinearFit(theta[:-1], theta[-1])):
            raise StopIteration

    minimize(
        objective,
        start.ravel(),
        jac=True,
        method="L-BFGS-B",
        callback=on_iteration,
        options={
            "maxcor": LBFGS_MEMORY,
            "maxiter": LBFGS_ITERATIONS,
            "gtol": GRADIENT_TOLERANCE,
            "ftol": 0.0,
        },
    )
    return watch.curve


def train_sgd(
    problem: Problem, settings: Settings, until: Until | None = None
) -> Curve:
    """Minimise the objective by mini-batches with momentum.

    The settings are read as the federated run reads them: ``batch_size`` (0: N / 100),
    ``learning_rate`` (0: what is safe), ``momentum``, ``decay``, ``num_epochs``,
    ``seed``.
    """
    watch = _Watch(problem, until)
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
            scores = scores_of(features, weights, intercept)
            excess = problem.loss.gradient(scores, problem.train_labels[batch])
            excess /= len(batch)
            gradient = features.T @ excess.astype(np.float32) + problem.l2 * weights
            speed = settings.momentum * speed - rate * gradient
            intercept_speed *= settings.momentum
            intercept_speed -= rate * excess.sum(axis=0)
            weights, intercept = weights + speed, intercept + intercept_speed
        if watch.see_linear(LinearFit(weights, intercept, epoch + 1)):
            break
    return watch.curve


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
    problem: Problem,
    settings: Settings,  # noqa: ARG001
    until: Until | None = None,
) -> Curve:
    """Fit scikit-learn's Ridge or LogisticRegression with its defaults: one step."""
    watch = _Watch(problem, until)
    if problem.loss.name == "squared":
        penalty = len(problem.train_labels) * problem.l2
        model = Ridge(alpha=penalty).fit(problem.train, problem.train_labels)
        intercept = np.atleast_1d(np.asarray(model.intercept_, np.float64))
        fitted = LinearFit(model.coef_.astype(np.float64)[:, None], intercept)
    else:
        fitted = fit_scikit_learn(problem.train, problem.train_labels, problem.l2)
    watch.see_linear(fitted)
    return watch.curve


def train_mlp(
    problem: Problem, settings: Settings, until: Until | None = None
) -> Curve:
    """Train one MLP of all columns with Adam (torch); a step is an epoch.

    ``hidden_sizes`` (the first one), ``l2``, ``num_epochs`` and ``seed`` are read.
    """
    watch = _Watch(problem, until)
    epochs = settings.num_epochs or MLP_EPOCHS

    def ends(test_scores: Callable[[], FloatArray]) -> bool:
        return watch.see(test_scores) or len(watch.curve.test) == epochs

    columns = [slice(0, problem.train.shape[1])]
    rng = np.random.default_rng(settings.seed)
    fit_mlp(problem, columns, settings.hidden_sizes[0], rng, ends)
    return watch.curve


def train_trees(
    problem: Problem, settings: Settings, until: Until | None = None
) -> Curve:
    """Grow gradient-boosted trees (LightGBM); a step is a boosting round.

    ``num_epochs`` (0: 200 trees) and ``seed`` are read.

    Making its histograms is part of the time. The penalty has no part in it.

    Raises:
        ModuleNotFoundError: LightGBM is not installed: pip install tp-flower[bench].
    """
    import lightgbm

    watch = _Watch(problem, until)

    enough = False

    def measured(predicted: FloatArray, _: object) -> tuple[str, float, bool]:
        nonlocal enough
        scores = _scores_of_rates(problem.loss, np.asarray(predicted, np.float64))
        enough = watch.see(lambda: scores)
        return "loss", watch.curve.test[-1]["loss"], False

    def stop(environment: Any) -> None:
        if enough:
            raise lightgbm.callback.EarlyStopException(environment.iteration, [])

    parameters = {
        **TREE_SETTINGS,
        "objective": TREE_OBJECTIVES[problem.loss.name],
        "num_class": problem.loss.outputs if problem.loss.name == "softmax" else 1,
        "metric": "None",
        "seed": settings.seed,
    }
    train = lightgbm.Dataset(problem.train, problem.train_labels)
    test = lightgbm.Dataset(problem.test, problem.test_labels, reference=train)
    lightgbm.train(
        *(parameters, train, settings.num_epochs or TREES),
        valid_sets=[test],
        feval=measured,
        callbacks=[stop],
    )
    return watch.curve


def _scores_of_rates(loss: Loss, predicted: FloatArray) -> FloatArray:
    """Return the scores (N, k) behind LightGBM's predictions: rates of classes."""
    if loss.name == "squared":
        return predicted[:, None]
    smallest = np.finfo(np.float64).tiny
    if loss.name == "softmax":
        return np.log(np.maximum(predicted, smallest))
    odds = np.maximum(predicted, smallest) / np.maximum(1.0 - predicted, smallest)
    return np.log(odds)[:, None]


Baseline = Callable[..., Curve]
BASELINES: Mapping[str, Baseline] = {
    "SGD": train_sgd,
    "L-BFGS": train_lbfgs,
    "scikit-learn": train_scikit_learn,
    "MLP": train_mlp,
    "boosted trees": train_trees,
}
"""Each takes a Problem, the Settings of the run, and optionally ``until``."""
