"""Centralised training that runs are measured against: it must be as good as it can."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import scipy.sparse as sp

from client_apps.app import app
from scripts.data.store import STORE_CLASSIFICATION_SQL, STORE_SQL, make_store
from scripts.joined.baselines import (
    BASELINES,
    train_lbfgs,
    train_mlp,
    train_scikit_learn,
    train_sgd,
    train_trees,
)
from scripts.joined.centralized import join_tables
from scripts.joined.optima import fit_linear
from scripts.joined.problem import Problem
from strategies import TablePuppetADMM
from strategies.run.grid import InProcessGrid
from tp_flower.learning.metrics import evaluate
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.shards import (
    MEMORY_PREFIX,
    load_tables,
    register_frames,
    release,
)

THREE_CLASSES = STORE_SQL.replace(
    "o.quantity AS",
    "CASE WHEN o.quantity > 12 THEN 2 WHEN o.quantity > 8 THEN 1 ELSE 0 END AS",
)
QUERIES = {
    "squared": STORE_SQL,
    "logistic": STORE_CLASSIFICATION_SQL,
    "softmax": THREE_CLASSES,
}
SETTINGS = {
    "squared": Settings(task="regression", seed=3, l2=1e-3),
    "logistic": Settings(task="classification", seed=3, l2=1e-3),
    "softmax": Settings(task="classification", seed=3, l2=1e-3),
}


@pytest.fixture(scope="module", params=list(QUERIES))
def loss(request: pytest.FixtureRequest) -> str:
    return request.param


@cache
def store():
    return make_store(orders=500, items=20, customers=40, seed=1)


@cache
def problem_of(loss: str) -> Problem:
    token = register_frames(store(), site="all")
    joined = join_tables(
        Query.from_sql(QUERIES[loss]),
        SETTINGS[loss],
        load_tables(MEMORY_PREFIX + token),
    )
    release(token)
    return Problem.of(joined, SETTINGS[loss])


@cache
def optimum_of(loss: str):
    problem = problem_of(loss)
    return fit_linear(problem.loss, problem.train, problem.train_labels, problem.l2)


def excess(loss: str, fitted) -> float:
    """How far the objective is above the optimum's, relatively."""
    problem = problem_of(loss)
    training = (problem.loss, problem.train, problem.train_labels, problem.l2)
    return fitted.objective(*training) / optimum_of(loss).objective(*training) - 1.0


def test_lbfgs_reaches_the_optimum(loss: str) -> None:
    curve = train_lbfgs(problem_of(loss), SETTINGS[loss])
    # the products are in float32; for three classes scikit-learn is the optimum
    assert abs(excess(loss, curve.fitted)) < 1e-5
    assert len(curve.test) == len(curve.seconds) > 5
    assert curve.seconds == sorted(curve.seconds)


@pytest.mark.parametrize("train", [train_lbfgs, train_sgd])
def test_a_sparse_table_gives_the_same_steps(loss: str, train) -> None:
    dense = problem_of(loss)
    sparse = replace(
        dense, train=sp.csr_matrix(dense.train), test=sp.csr_matrix(dense.test)
    )
    settings = replace(SETTINGS[loss], num_epochs=2, learning_rate=0.01)
    one, other = (train(problem, settings) for problem in (dense, sparse))
    for metrics, expected in zip(one.test[:4], other.test[:4], strict=True):
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_scikit_learn_reaches_the_optimum(loss: str) -> None:
    curve = train_scikit_learn(problem_of(loss), SETTINGS[loss])
    assert -1e-9 < excess(loss, curve.fitted) < 1e-4


def test_sgd_reaches_the_optimum(loss: str) -> None:
    settings = replace(SETTINGS[loss], num_epochs=80, batch_size=100, decay=0.1)
    curve = train_sgd(problem_of(loss), settings)
    assert len(curve.test) == 80
    assert excess(loss, curve.fitted) < 0.005


def test_one_batch_and_no_momentum_is_gradient_descent() -> None:
    problem = problem_of("squared")
    settings = replace(
        SETTINGS["squared"],
        num_epochs=1,
        batch_size=len(problem.train_labels),
        momentum=0.0,
        learning_rate=0.1,
    )
    curve = train_sgd(problem, settings)
    mean = problem.train_labels.mean()
    gradient = problem.train.T @ (mean - problem.train_labels)
    weights = -0.1 * gradient / len(problem.train_labels)
    np.testing.assert_allclose(
        curve.fitted.weights[:, 0], weights, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(curve.fitted.intercept, [mean], rtol=1e-9)


def test_split_and_encoders_are_those_of_the_run() -> None:
    settings = replace(SETTINGS["squared"], num_epochs=12)
    strategy = TablePuppetADMM(Query.from_sql(STORE_SQL), settings)
    strategy.start(InProcessGrid(app, [store()]))
    curve = train_lbfgs(problem_of("squared"), settings)
    # the run is within ADMM's tolerance of the same optimum, on the same held-out rows
    assert strategy.report.final_test["rmse"] == pytest.approx(
        curve.test[-1]["rmse"], rel=1e-3
    )
    assert strategy.report.joined_rows_test == len(problem_of("squared").test_labels)


@pytest.mark.parametrize("train", [train_mlp, train_trees])
def test_other_models_beat_the_best_constant(loss: str, train) -> None:
    problem = problem_of(loss)
    base = problem.loss.base_score(problem.train_labels)
    constant = np.tile(base, (len(problem.test_labels), 1))
    known = evaluate(problem.loss, constant, problem.test_labels)["loss"]
    epochs = 20
    curve = train(problem, replace(SETTINGS[loss], num_epochs=epochs))
    assert len(curve.test) == epochs
    assert curve.test[-1]["loss"] < 0.9 * known
    assert curve.fitted is None


@pytest.mark.parametrize("name", list(BASELINES))
def test_training_ends_when_it_is_good_enough(name: str) -> None:
    seen = []

    def until(metrics):
        seen.append(metrics)
        return len(seen) == 2

    settings = replace(SETTINGS["logistic"], num_epochs=5)
    curve = BASELINES[name](problem_of("logistic"), settings, until)
    # scikit-learn is one step
    assert len(curve.test) == (1 if name == "scikit-learn" else 2)
    assert curve.test == seen
