"""Models fitted to the joined table, as one would without tp_flower.

    minimise (1/N) sum_j loss(x_j W + c; y_j) + l2/2 ||W||^2   c is free

``fit_*`` return an optimum, `train_lbfgs` a curve: the held-out metrics after every
iteration, and the seconds of training until then (what measuring takes is left out).

Notation
    X   ``features``  (N, d), dense float32 or CSR     y  ``labels``  (N,)
    W   ``weights``  (d, k)                            c  ``intercept``  (k,)
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from scripts.joined.centralized import Float32Array, IntArray, JoinedTable
from tp_flower.arrays import MISSING, FloatArray
from tp_flower.methods.boost.settings import LEAVES, BoostSettings
from tp_flower.objectives import Objective
from tp_flower.reports.records import Metrics
from tp_flower.settings import Settings
from tp_flower.splits import TRAIN, VALIDATION

Matrix = Any
"""Dense, or a sparse matrix of scipy, which has no types."""
Until = Callable[[Metrics], bool]

LBFGS_OPTIONS = {"maxcor": 10, "maxiter": 500, "gtol": 1e-6, "ftol": 0.0}


@dataclass(frozen=True)
class LinearFit:
    """A linear model W (d, k), c (k,)."""

    weights: FloatArray
    intercept: FloatArray

    def scores(self, features: Matrix) -> FloatArray:
        """Return X W + c, (N, k): the product in the precision of the features."""
        product = features @ self.weights.astype(features.dtype)
        scores: FloatArray = np.asarray(product, np.float64) + self.intercept
        return scores


@dataclass(frozen=True, eq=False)
class Problem:
    """The encoded joined table, split into training and held-out rows."""

    train: Matrix
    mean_loss: Objective
    test: Matrix
    test_loss: Objective
    l2: float

    @classmethod
    def of(cls, joined: JoinedTable, settings: Settings) -> Self:
        """Split a joined table as it says."""
        is_train, loss = joined.subset == TRAIN, joined.objective
        train, test = joined.features[is_train], joined.features[joined.is_test]
        losses = loss.select(is_train), loss.select(joined.is_test)
        return cls(train, losses[0], test, losses[1], settings.l2)

    @property
    def train_labels(self) -> FloatArray:
        """Labels of the training rows, (N,)."""
        return self.mean_loss.target.numbers

    def objective(self, fitted: LinearFit) -> float:
        """Return the objective of a linear model, the penalty included."""
        value = self.mean_loss.value(fitted.scores(self.train))
        return value + self.penalty(fitted)

    def penalty(self, fitted: LinearFit) -> float:
        """Return the penalty of a linear model."""
        return 0.5 * self.l2 * float((fitted.weights**2).sum())

    def optimum(self) -> LinearFit:
        """Return the linear model that minimises the objective."""
        features = self.train.astype(np.float64)
        if self.mean_loss.name == "squared":
            return fit_ridge(features, self.train_labels, self.l2)
        return fit_logistic(
            *(features, self.train_labels, self.l2), solver="newton-cholesky", tol=1e-10
        )

    def test_metrics(self, fitted: LinearFit) -> Metrics:
        """Return a linear model's metrics on the held-out rows."""
        return self.test_loss.metrics(fitted.scores(self.test))


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
    weights, intercept = model.coef_.T, model.intercept_
    return LinearFit(weights.astype(np.float64), intercept.astype(np.float64))


@dataclass
class Curve:
    """A training: metrics on held-out rows and seconds by iteration; its last model."""

    test: list[Metrics] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    fitted: LinearFit | None = None


def train_lbfgs(problem: Problem, until: Until | None = None) -> Curve:
    """Minimise the objective by scipy's L-BFGS over all rows; a step is an iteration.

    It starts at the best constant score, and ends at the first metrics that are enough.
    """
    curve, measuring = Curve(), 0.0
    outputs, width = problem.mean_loss.outputs, problem.train.shape[1]
    start = np.zeros((width + 1, outputs))
    start[-1] = problem.mean_loss.base_score

    def model_of(flat: FloatArray) -> LinearFit:
        theta = flat.reshape(width + 1, outputs).copy()
        return LinearFit(theta[:-1], theta[-1])

    def objective(flat: FloatArray) -> tuple[float, FloatArray]:
        fitted = model_of(flat)
        scores = fitted.scores(problem.train)
        excess = problem.mean_loss.gradient(scores) / len(scores)
        slopes = problem.train.T @ excess.astype(np.float32)
        gradient = [slopes + problem.l2 * fitted.weights, excess.sum(axis=0)]
        value = problem.mean_loss.value(scores)
        return value + problem.penalty(fitted), np.vstack(gradient).ravel()

    def on_iteration(flat: FloatArray) -> None:
        nonlocal measuring
        arrived = time.perf_counter()
        curve.fitted = model_of(flat)
        curve.test.append(problem.test_metrics(curve.fitted))
        curve.seconds.append(arrived - started - measuring)
        measuring += time.perf_counter() - arrived
        if until is not None and until(curve.test[-1]):
            raise StopIteration

    started = time.perf_counter()
    minimize(
        *(objective, start.ravel()),
        jac=True,
        method="L-BFGS-B",
        callback=on_iteration,
        options=LBFGS_OPTIONS,
    )
    return curve


FACTORS: Final = 16
PENALTIES: Final = (0.05, 0.1, 0.2)
SWEEPS: Final = 20


def fit_factors(
    joined: JoinedTable, ids: Sequence[IntArray], width: int = FACTORS
) -> FloatArray:
    """Return the scores (N,) of a matrix factorisation, ids alone.

    A score is the mean label + b_u + b_v + p_u q_v, by alternating weighted ridge
    regressions (Zhou et al. 2008: the penalty of an id grows with its rows); penalty
    and sweep are those of the least squared error on the validation rows. ``ids`` are
    the codes (N,) of the two ids.
    """
    is_train, is_validation = joined.subset == TRAIN, joined.subset == VALIDATION
    labels = joined.labels
    mean = labels[is_train].mean()
    best, best_loss = np.full(len(labels), mean), np.inf
    for penalty in PENALTIES:
        draw = np.random.default_rng(0)
        sides = [draw.normal(0.0, 0.1, (int(of.max()) + 1, width + 1)) for of in ids]
        # the first column is b: it is added, and no factor of the other side's
        for side in sides:
            side[:, 0] = 0.0
        for _ in range(SWEEPS):
            for one, other in ((0, 1), (1, 0)):
                design = sides[other][ids[other]]
                left = labels - mean - design[:, 0]
                design[:, 0] = 1.0
                sides[one] = _ridge_by_id(
                    *(design[is_train], left[is_train], ids[one][is_train]),
                    *(len(sides[one]), penalty),
                )
            first, second = (side[of] for side, of in zip(sides, ids, strict=True))
            scores = mean + first[:, 0] + second[:, 0]
            scores += (first[:, 1:] * second[:, 1:]).sum(axis=1)
            loss = float(((scores - labels)[is_validation] ** 2).mean())
            if loss < best_loss:
                best, best_loss = scores, loss
    return best


def _ridge_by_id(
    design: FloatArray, labels: FloatArray, ids: IntArray, count: int, penalty: float
) -> FloatArray:
    """Return the ridge regression of every id's rows, (count, d); 0 without rows."""
    order = np.argsort(ids, kind="stable")
    design, labels, ids = design[order], labels[order], ids[order]
    present, starts = np.unique(ids, return_index=True)
    width = design.shape[1]
    gram = np.empty((len(present), width, width))
    for column in range(width):
        product = design[:, column, None] * design
        gram[:, column] = np.add.reduceat(product, starts)
    rows = np.diff(np.append(starts, len(ids)))
    gram += (penalty * rows)[:, None, None] * np.eye(width)
    right = np.add.reduceat(design * labels[:, None], starts)
    solved = np.zeros((count, width))
    solved[present] = np.linalg.solve(gram, right[:, :, None])[:, :, 0]
    return solved


TREES: Final = 300
"""Trees of the witness, which has the leaves and the rate of the sites' trees."""


def tree_options(settings: Settings, loss: Objective) -> dict[str, object]:
    """Return LightGBM's parameters: the sites' leaves and rate, else its defaults."""
    objectives = {"squared": "regression", "logistic": "binary"}
    return {
        "objective": objectives.get(loss.name, "multiclass"),
        "num_class": loss.outputs,
        "num_leaves": settings.of(BoostSettings).leaves or LEAVES,
        "learning_rate": settings.of(BoostSettings).tree_rate,
        "verbosity": -1,
        "num_threads": 1,
    }


def one_table_each(joined: JoinedTable) -> dict[str, object]:
    """Return LightGBM's parameter by which a tree sees the columns of one table."""
    width = joined.features.shape[1]
    tables = [list(range(*part.indices(width))) for part in joined.columns.values()]
    return {"interaction_constraints": tables}


def grow_trees(
    joined: JoinedTable,
    settings: Settings,
    trees: int = TREES,
    start: FloatArray | None = None,
    **options: object,
) -> Any:
    """Return LightGBM's model of the joined rows; validation rows stop it early.

    ``start`` has the scores (N,) that it goes on from, ``options`` come before the
    settings'.
    """
    import lightgbm

    rows, parts = _with_nan(joined), {}
    for part in (TRAIN, VALIDATION):
        chosen = joined.subset == part
        parts[part] = lightgbm.Dataset(
            rows[chosen],
            joined.labels[chosen],
            categorical_feature=list(joined.categorical),
            init_score=None if start is None else start[chosen],
        )
    is_stopped = bool((joined.subset == VALIDATION).any())
    return lightgbm.train(
        tree_options(settings, joined.objective) | options,
        parts[TRAIN],
        trees,
        valid_sets=[parts[VALIDATION]] if is_stopped else None,
        callbacks=[lightgbm.early_stopping(20, verbose=False)] if is_stopped else None,
    )


def tree_metrics(
    joined: JoinedTable,
    booster: Any,
    trees: int | None = None,
    start: FloatArray | None = None,
) -> Metrics:
    """Return the metrics of the held-out rows after the first, or the best, trees."""
    rows = _with_nan(joined)[joined.is_test]
    scores = booster.predict(rows, raw_score=True, num_iteration=trees)
    if start is not None:
        scores += start[joined.is_test]
    tested = joined.objective.select(joined.is_test)
    return tested.metrics(scores.reshape(len(rows), -1))


def _with_nan(joined: JoinedTable) -> Float32Array:
    return np.where(joined.features <= MISSING, np.float32(np.nan), joined.features)
