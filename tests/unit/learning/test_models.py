"""Local models against dense algebra, finite differences and autograd; threads."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn

from tests.support.examples.fits import fit_problem, normal_rows, ridge_of, with_ones
from tests.support.examples.networks import torch_model
from tp_flower.arrays import run_in_threads, thread_count
from tp_flower.errors import SettingsError
from tp_flower.learning.models import local_model
from tp_flower.learning.models.local_model import (
    LinearModel,
    ModelSpec,
    build_model,
    moment,
)
from tp_flower.learning.models.neural import FitBudget, fit_least_squares
from tp_flower.learning.solvers import RidgeSolver, gram
from tp_flower.objectives import KMEANS, Target, make_objective

few = settings(max_examples=60)
mlp = partial(torch_model, 3)
FACTORY = "tests.support.examples.networks:network"


def not_a_module(features, outputs, intercept):
    return (features, outputs, intercept)


@few
@given(
    rows=st.sampled_from([0, 1, 7, 8192, 8200]),
    columns=st.integers(0, 4),
    outputs=st.integers(1, 3),
    intercept=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear_model_is_a_matrix_product(rows, columns, outputs, intercept, seed):
    rng = default_rng(seed)
    model = LinearModel(columns, outputs, intercept=intercept)
    theta = rng.normal(size=(columns + intercept, outputs))
    model.parameters = theta.ravel()
    features = normal_rows(rows, columns, seed)
    dense = with_ones(features, intercept)
    messages = rng.normal(size=(rows, outputs))
    pulled = dense.T @ messages
    for threads, least in (("1", local_model.LEAST_VALUES), ("3", 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", threads)
            patch.setattr(local_model, "LEAST_VALUES", least)
            actual = moment(features, messages, intercept=intercept)
            assert_allclose(actual, pulled, atol=1e-10)
            actual = model.pullback(features, messages)
            assert_allclose(actual, pulled.ravel(), atol=1e-10)
            assert_allclose(model.scores(features), dense @ theta, atol=1e-12)


def test_linear_model_starts_at_zero_and_spares_the_intercept():
    model = LinearModel(2, 3, intercept=True)
    assert not model.parameters.any()
    assert model.penalised.tolist() == [True] * 6 + [False] * 3
    assert LinearModel(2, 3, intercept=False).penalised.all()
    # accumulation is in float64: in float32 the ones would be lost beside 2^25
    features = np.array([[2.0**25], [1.0], [1.0]], dtype=np.float32)
    assert moment(features, np.ones((3, 1)), intercept=False)[0, 0] == 2.0**25 + 2


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("kind", ["mlp", FACTORY])
def test_pullback_is_the_gradient_of_the_weighted_scores(kind, outputs):
    spec = ModelSpec(kind, outputs, intercept=True, output_scale=2.5, seed=3)
    model = build_model(spec, 4, "cpu")
    # in float64 a step can be so small that no ReLU switches within it
    model.module.double()
    features = normal_rows(9, 4).astype(np.float64)
    rng = default_rng(1)
    messages = rng.normal(size=(9, outputs))
    actual = model.pullback(features, messages)
    theta = model.parameters
    direction = rng.normal(size=len(theta))
    step = 1e-6
    ends = []
    for sign in (1, -1):
        model.parameters = theta + sign * step * direction
        ends.append(float((model.scores(features) * messages).sum()))
    slope = (ends[0] - ends[1]) / (2 * step)
    assert slope == pytest.approx(float(actual @ direction), rel=1e-6)


def test_mlp_scores_by_hand():
    """One hidden layer, written out in float64; its pullback is tested by steps."""
    model = mlp(outputs=2, output_scale=1.5)
    w1, b1, w2, b2 = (
        parameter.detach().numpy().astype(np.float64)
        for parameter in model.module.parameters()
    )
    features = normal_rows(6, 3)
    expected = 1.5 * (np.maximum(features @ w1.T + b1, 0.0) @ w2.T + b2)
    assert_allclose(model.scores(features), expected, rtol=1e-5, atol=1e-6)


def test_scores_in_chunks_are_the_scores(monkeypatch):
    model = mlp()
    features = normal_rows(11, 3)
    features.flags.writeable = False
    whole = model.scores(features)
    monkeypatch.setattr("tp_flower.learning.models.neural.EVALUATION_ROWS", 4)
    assert_allclose(model.scores(features), whole, rtol=1e-6)
    assert model.scores(features[:0]).shape == (0, 1)
    zero = model.pullback(features[:0], np.zeros((0, 1)))
    assert zero.tolist() == [0.0] * len(model.penalised)


def test_all_shards_of_a_table_start_alike_and_tables_do_not():
    state = torch.get_rng_state()
    model = mlp(seed=5)
    again = mlp(seed=5)
    other = mlp(seed=6)
    assert_array_equal(model.parameters, again.parameters)
    assert not np.array_equal(model.parameters, other.parameters)
    other.parameters = model.parameters
    assert_array_equal(other.parameters, model.parameters)
    rows = normal_rows(5, 3)
    assert_array_equal(other.scores(rows), model.scores(rows))
    # torch's own state is left alone
    assert torch.equal(torch.get_rng_state(), state)


def test_mlp_penalises_weights_and_only_the_label_table_has_an_output_bias():
    with_bias = mlp(hidden_sizes=(5, 2))
    without = mlp(intercept=False)
    hidden = [True] * 15 + [False] * 5 + [True] * 10 + [False] * 2
    assert with_bias.penalised.tolist() == [*hidden, True, True, False]
    assert without.penalised.tolist() == [True] * 15 + [False] * 5 + [True] * 5
    assert isinstance(with_bias.module[-1], nn.Linear)


def test_factory_gets_features_outputs_and_intercept():
    spec = ModelSpec(FACTORY, outputs=2, intercept=False)
    model = build_model(spec, 3, "cpu")
    again = build_model(spec, 3, "cpu")
    assert len(model.parameters) == 3 * 3 + 3 + 3 * 2
    assert_array_equal(model.parameters, again.parameters)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no.such.module:f", "model 'no.such.module:f' cannot be imported"),
        (f"{__name__}:missing", "cannot be imported .AttributeError.; allowed: 'l"),
        (f"{__name__}:not_a_module", "returned tuple, not a torch.nn.Module"),
    ],
)
def test_unusable_factories_are_refused(kind, message):
    with pytest.raises(SettingsError, match=message):
        build_model(ModelSpec(kind), 2, "cpu")


@pytest.mark.parametrize("strength", [0.0, 0.05])
def test_fit_of_a_linear_module_reaches_the_weighted_ridge(strength):
    model = build_model(ModelSpec("torch.nn:Linear", intercept=True), 3, "cpu")
    problem = fit_problem(model, strength=strength)
    budget = FitBudget(passes=1500, batch_rows=60, learning_rate=0.05)
    fit_least_squares(model, problem, budget, default_rng(0))
    assert_allclose(model.parameters, ridge_of(problem), atol=2e-3)


def test_fit_towards_a_centre_of_great_strength_stays_there():
    model = mlp(seed=1)
    model.parameters = centre = mlp(seed=2).parameters
    every = np.ones_like(model.penalised)
    problem = replace(fit_problem(model, 1e4), centre=centre, penalised=every)
    fit_least_squares(model, problem, FitBudget(), default_rng(0))
    assert_allclose(model.parameters, centre, atol=5e-3)


def test_fit_is_repeatable():
    models = mlp(seed=1), mlp(seed=1)
    for model in models:
        rng = default_rng(3)
        fit_least_squares(model, fit_problem(model), FitBudget(passes=1), rng)
    assert_array_equal(*(model.parameters for model in models))


@few
@given(
    rows=st.sampled_from([0, 1, 9, 16385]),
    width=st.integers(0, 4),
    clusters=st.integers(1, 5),
)
def test_scores_of_centres_are_the_squared_distances(rows, width, clusters):
    rng = default_rng(rows + width)
    features = rng.normal(size=(rows, width)).astype(np.float32)
    model = build_model(ModelSpec("centres", outputs=clusters), width)
    centres = rng.normal(size=(clusters, width))
    model.parameters = centres.ravel()
    expected = ((features.astype(np.float64)[:, None] - centres) ** 2).sum(axis=2)
    assert_allclose(model.scores(features), expected, atol=1e-12)
    # never below zero
    far = np.full((1, width), 12345.678, np.float32)
    model.parameters = np.tile(far.ravel().astype(np.float64), clusters)
    assert (model.scores(far) >= 0.0).all()


def test_metrics_are_the_weighted_mean_distance_and_its_root():
    scores = np.array([[4.0, 9.0], [25.0, 1.0]])
    weights = np.array([3.0, 1.0])
    objective = make_objective(KMEANS, Target.without_label(2, ("0", "1")), weights)
    actual = objective.metrics(scores)
    assert actual == {"loss": 3.25, "rms_distance": pytest.approx(3.25**0.5)}
    assert objective.base_score.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_spans_cover_the_rows_in_order(monkeypatch, rows, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    spans = run_in_threads(lambda span: span, rows, least_rows=1)
    assert len(spans) == max(min(threads, rows), 1)
    covered = [row for span in spans for row in range(span.start, span.stop)]
    assert covered == list(range(rows))


def test_few_rows_stay_in_this_thread_and_many_take_as_many_as_allowed(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    names = run_in_threads(lambda _: threading.current_thread(), 19, least_rows=10)
    assert names == [threading.current_thread()]
    meet = threading.Barrier(3, timeout=120)
    # passes only if three threads are inside together
    assert len(run_in_threads(lambda _: meet.wait(), 30, least_rows=10)) == 3

    def fail(span):
        if span.start:
            raise ValueError("not the first")

    with pytest.raises(ValueError, match="not the first"):
        run_in_threads(fail, 30, least_rows=10)
    ended = []

    def fail_first(span):
        if not span.start:
            raise ValueError("the first")
        time.sleep(0.05)
        ended.append(span)

    with pytest.raises(ValueError, match="the first"):
        run_in_threads(fail_first, 30, least_rows=10)
    assert len(ended) == 2  # none goes on behind the caller's back


def test_threads_that_a_fork_has_left_behind_are_not_waited_for():
    # passes only if three threads are inside together
    work = "run_in_threads(lambda _: meet.wait(), 30, 10)"
    code = (
        "import os, threading; from tp_flower.arrays import run_in_threads\n"
        f"meet = threading.Barrier(3, timeout=120); {work}; child = os.fork()\n"
        f"{work}; assert child or os._exit(0) is None; print(os.waitpid(child, 0)[1])"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    run = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        run, check=True, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "0\n"
    assert done.stderr == ""


@pytest.mark.parametrize("text", ["", "0", "-2", "many"])
def test_what_is_no_number_of_threads_bounds_nothing(monkeypatch, text):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine = thread_count()
    assert machine >= 1
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert thread_count() == machine


def problem(rows, columns, outputs, seed):
    """Features, multiplicities (some 0), target, joined rows."""
    rng = default_rng(seed)
    features = rng.normal(size=(rows, columns)).astype(np.float32)
    multiplicity = rng.integers(0, 6, rows)
    multiplicity[0] = 1
    target = rng.normal(size=(rows, outputs))
    return features, multiplicity, target, int(multiplicity.sum())


def solve(features, multiplicity, target, joined, kappa, l2, intercept):
    matrix = gram(features, multiplicity, intercept=intercept)
    moments = with_ones(features, intercept).T @ (multiplicity[:, None] * target)
    return RidgeSolver.from_gram(matrix, joined, intercept=intercept).solve(
        moments, kappa, l2
    )


def reference(features, multiplicity, target, joined, kappa, l2, intercept):
    """Stack sqrt(kappa G / N) rows over sqrt(beta) I, and let lstsq solve."""
    columns = features.shape[1]
    root = np.sqrt(kappa * multiplicity / joined)[:, None]
    data = root * with_ones(features, intercept)
    stacked = np.vstack([data, np.sqrt(l2) * np.eye(columns, columns + intercept)])
    right = np.vstack([root * target, np.zeros((columns, target.shape[1]))])
    return np.linalg.lstsq(stacked, right, rcond=None)[0]


@few
@given(
    columns=st.integers(0, 5),
    outputs=st.integers(1, 3),
    seed=st.integers(0, 999),
    log_kappa=st.floats(-4, 4),
    l2=st.sampled_from([0.0, 1e-6, 1e-3, 1.0]),
    intercept=st.booleans(),
)
def test_solution_is_that_of_the_full_system(
    columns, outputs, seed, log_kappa, l2, intercept
):
    given_ = problem(40, columns, outputs, seed)
    kappa = 10.0**log_kappa
    actual = solve(*given_, kappa, l2, intercept)
    expected = reference(*given_, kappa, l2, intercept)
    assert actual.shape == (columns + intercept, outputs)
    assert_allclose(actual, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("kappa", [1e-4, 1.0, 1e4])
def test_without_penalty_the_least_norm_solution_of_rank_deficient_features(
    kappa, intercept
):
    features, multiplicity, target, joined = problem(30, 3, 2, 1)
    # a doubled column, a zero column, and one-hot columns that sum to one
    hot = np.eye(3, dtype=np.float32)[np.arange(30) % 3]
    wide = np.hstack([features, features[:, :1], 0 * features[:, :1], hot])
    actual = solve(wide, multiplicity, target, joined, kappa, 0.0, intercept)
    root = np.sqrt(multiplicity)[:, None]
    if intercept:
        # the intercept is free: least norm is over the weights alone
        mean = (multiplicity @ wide) / joined
        centre = (multiplicity @ target) / joined
        weights = np.linalg.lstsq(root * (wide - mean), root * (target - centre))[0]
        expected = np.vstack([weights, centre - mean @ weights])
    else:
        expected = np.linalg.lstsq(root * wide, root * target)[0]
    assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


@few
@given(
    rows=st.sampled_from([1, 5, 30, 8193]),
    cut=st.floats(0, 1),
    intercept=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gram_matrices_of_shards_add_up(rows, cut, intercept, seed):
    features, multiplicity, _, _ = problem(rows, 3, 1, seed)
    at = int(cut * rows)
    whole = gram(features, multiplicity, intercept=intercept)
    dense = with_ones(features, intercept)
    assert_allclose(
        whole, dense.T @ (multiplicity[:, None] * dense), rtol=1e-9, atol=1e-9
    )
    parts = [
        gram(features[part], multiplicity[part], intercept=intercept)
        for part in (slice(0, at), slice(at, rows))
    ]
    assert_allclose(sum(parts), whole, rtol=1e-10, atol=1e-10)
