"""Models and solvers on sparse rows, against the same on dense ones."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose

from tests.support.examples.networks import torch_model
from tp_flower.arrays import MISSING
from tp_flower.features.sparse import SparseRows, columns_of, dense, is_sparse
from tp_flower.learning import solvers
from tp_flower.learning.models import neural
from tp_flower.learning.models.local_model import (
    CentresModel,
    FitProblem,
    LinearModel,
    LocalModel,
    rows_of,
)
from tp_flower.learning.solvers import IterativeSolver, RidgeSolver, gram
from tp_flower.methods.boost.messages import Growth
from tp_flower.methods.boost.trees import TreeModel, grow
from tp_flower.privacy.gradients import clipped_sum, squared_lengths
from tp_flower.privacy.statistics_update import Rows
from tp_flower.privacy.units import Units

JOINED = 200
KAPPA = 0.3


def one_hot_rows(rows: int, width: int = 12, seed: int = 0) -> SparseRows:
    """Rows of two numbers, and of two one-hot encodings with values of either sign, or
    none.
    """
    rng = default_rng(seed)
    half = 2 + (width - 2) // 2
    starts = np.array([2, half])
    ends = np.array([half, width])
    hot = rng.integers(starts, ends, (rows, 2))
    signs = rng.choice([-1, 0, 1], (rows, 2), p=[0.3, 0.2, 0.5])
    columns = np.hstack([np.tile([0, 1], (rows, 1)), np.where(signs == 0, starts, hot)])
    values = np.hstack([rng.normal(size=(rows, 2)), signs])
    return SparseRows(values.astype(np.float32), columns.astype(np.int32), width)


def messages_of(rows: int, outputs: int = 1) -> np.ndarray:
    return default_rng(2).normal(size=(rows, outputs))


def mlp() -> LocalModel:
    return torch_model(12, intercept=False, hidden_sizes=(3,))


def counts_of(rows: int) -> np.ndarray:
    return default_rng(1).integers(1, 5, rows)


@given(st.integers(0, 40), st.integers(6, 30), st.booleans(), st.integers(0, 9))
def test_products_are_those_of_dense_rows(rows, width, has_one, seed):
    sparse = one_hot_rows(rows, width, seed)
    full = dense(sparse)
    rng = default_rng(seed)
    counts = counts_of(rows)
    model = LinearModel(width, 2, intercept=has_one)
    model.parameters = rng.normal(size=len(model.parameters))
    messages = rng.normal(size=(rows, 2))
    assert_allclose(model.scores(sparse), model.scores(full), atol=1e-12)
    assert_allclose(
        model.pullback(sparse, messages), model.pullback(full, messages), atol=1e-12
    )
    centres = CentresModel(width, 2)
    centres.parameters = rng.normal(size=len(centres.parameters))
    assert_allclose(centres.scores(sparse), centres.scores(full), atol=1e-12)
    matrix = gram(sparse, counts, intercept=has_one)
    assert_allclose(matrix, gram(full, counts, intercept=has_one), atol=1e-10)
    assert (matrix == matrix.T).all()
    squares = solvers.column_squares(sparse, counts)
    assert_allclose(squares, solvers.column_squares(full, counts), atol=1e-10)
    assert_allclose(
        squared_lengths(sparse, intercept=has_one),
        squared_lengths(full, intercept=has_one),
    )


@given(st.integers(1, 40), st.integers(0, 9))
def test_some_of_the_rows_or_columns_are_those_of_dense_rows(rows, seed):
    sparse = one_hot_rows(rows, 12, seed)
    rng = default_rng(seed)
    full = dense(sparse)
    chosen = rng.integers(0, rows, 7)
    mask = rng.random(rows) < 0.5
    for place in (chosen, mask, slice(1, rows)):
        assert (dense(sparse[place]) == full[place]).all()
    assert (dense(rows_of(sparse, chosen)) == full[chosen]).all()
    columns = rng.permutation(12)[:5]
    assert (dense(columns_of(sparse, columns)) == full[:, columns]).all()
    assert len(sparse) == rows
    assert sparse.nbytes == rows * sparse.stored * 8


def test_wide_tables_are_sparse_if_most_of_a_row_is_zero():
    assert is_sparse(257, 64)
    assert not is_sparse(256, 1)
    assert not is_sparse(257, 65)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("l2", [0.2, 1e-6, 0.0])
def test_iterations_end_where_the_gram_matrix_does(intercept, l2):
    sparse = one_hot_rows(60)
    counts = counts_of(60)
    outputs = 2
    # sums over rows, of which the solution of least norm is one for l2 = 0, too
    messages = messages_of(60, outputs)
    model = LinearModel(12, outputs, intercept=intercept)
    moments = model.pullback(sparse, counts[:, None] * messages).reshape(-1, outputs)
    matrix = gram(sparse, counts, intercept=intercept)
    exact = RidgeSolver.from_gram(matrix, JOINED, intercept=intercept)
    solver = IterativeSolver.of_rows(
        sparse, counts, JOINED, intercept=intercept, centred=True
    )
    expected = exact.solve(moments, KAPPA, l2)
    assert_allclose(solver.solve(moments, KAPPA, l2), expected, rtol=1e-7, atol=1e-8)
    assert_allclose(solver.product(expected), matrix @ expected, atol=1e-8)
    assert solver.trace == pytest.approx(np.trace(matrix) / JOINED)


def test_iterations_of_a_consensus_penalise_the_intercept():
    sparse = one_hot_rows(60)
    counts = counts_of(60)
    moments = messages_of(13)
    matrix = gram(sparse, counts, intercept=True)
    exact = RidgeSolver.from_gram(matrix, JOINED, intercept=False)
    solver = IterativeSolver.of_rows(
        sparse, counts, JOINED, intercept=True, centred=False
    )
    expected = exact.solve(moments, KAPPA, 0.2)
    assert_allclose(solver.solve(moments, KAPPA, 0.2), expected, rtol=1e-7)
    assert solver.trace == pytest.approx(np.trace(matrix) / JOINED)


@pytest.mark.parametrize("intercept", [False, True])
def test_the_largest_eigenvalue_needs_no_gram_matrix(intercept):
    sparse = one_hot_rows(60)
    counts = counts_of(60)
    matrix = gram(sparse, counts, intercept=intercept)
    largest = solvers.largest_eigenvalue(sparse, counts, intercept=intercept)
    assert largest == pytest.approx(np.linalg.eigvalsh(matrix)[-1], rel=1e-9)


@pytest.mark.parametrize("way", ["from_rows", "from_frequent"])
def test_factorisations_are_those_of_dense_rows(monkeypatch, way):
    monkeypatch.setattr(solvers, "FREQUENT", 4)
    sparse = one_hot_rows(9)
    counts = counts_of(9)
    # sums of rows, as those of every update are
    messages = messages_of(9)
    moments = LinearModel(12, 1, intercept=True).pullback(dense(sparse), messages)
    factorise = getattr(RidgeSolver, way)
    one, two = (
        factorise(rows, counts, JOINED, intercept=True).solve(
            moments[:, None], KAPPA, 0.2
        )
        for rows in (sparse, dense(sparse))
    )
    assert_allclose(one, two, rtol=1e-9, atol=1e-12)


def test_clips_are_those_of_dense_rows():
    sparse = one_hot_rows(40)
    full = dense(sparse)
    units = Units(np.arange(40) % 7)
    messages = messages_of(40)
    for model in (LinearModel(12, 1, intercept=True), mlp()):
        for of_rows in (None, units):
            one, two = (
                clipped_sum(model, rows, messages, 0.5, of_rows)
                for rows in (sparse, full)
            )
            assert_allclose(one, two, rtol=1e-5, atol=1e-7)
    weights = [
        Rows(rows, counts_of(40), True, units).weights(1.5) for rows in (sparse, full)
    ]
    assert_allclose(*weights)


def test_a_torch_model_reads_batches_of_sparse_rows(monkeypatch):
    monkeypatch.setattr(neural, "EVALUATION_VALUES", 12 * 7)  # seven rows at a time
    sparse = one_hot_rows(40)
    full = dense(sparse)
    counts = counts_of(40)
    target = messages_of(40)
    fitted = []
    for rows in (sparse, full):
        model = mlp()
        centre = np.zeros(len(model.penalised))
        problem = FitProblem(
            rows, counts, target, 1.0, 100, 1e-3, centre, model.penalised
        )
        budget = neural.FitBudget(passes=2, least_steps=3, batch_rows=16)
        neural.fit_least_squares(model, problem, budget, default_rng(3))
        gradient = model.pullback(rows, target)
        fitted.append((model.parameters, model.scores(rows), gradient))
    for one, two in zip(*fitted, strict=True):
        assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    assert isinstance(neural.as_tensor(sparse[:2]), torch.Tensor)


def test_trees_read_sparse_rows_and_missing_numbers():
    sparse = one_hot_rows(600)
    sparse.values[::5, 0] = MISSING
    full = dense(sparse)
    gradient = messages_of(500) + np.sign(full[:500, [3]])
    growth = Growth(trees=5, leaves=7, rate=0.3, least_rows=5)
    values = []
    for rows in (sparse, full):
        model = TreeModel(1)
        model.start(())
        text, of_rows = grow(model, rows, gradient, np.ones((500, 1)), 500.0, growth)
        model.add(1.0, text)
        values.append((of_rows, model.scores(rows)))
    (grown, scored), expected = values
    assert np.ptp(grown) > 0.1
    assert_allclose(grown, expected[0], atol=1e-9)
    assert_allclose(scored, expected[1], atol=1e-9)
