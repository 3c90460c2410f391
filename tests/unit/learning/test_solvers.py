"""Factorisations of a table's Hessian, against its dense inverse."""

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose

from tp_flower.learning import solvers
from tp_flower.learning.solvers import RidgeSolver, gram

KAPPA = 0.3
L2 = 0.2
JOINED = 50


def table(rows: int, columns: int):
    rng = default_rng(3)
    sizes = np.geomspace(1.0, 0.01, columns)
    features = (rng.normal(size=(rows, columns)) * sizes).astype(np.float32)
    # of some offset, which the intercept takes up
    return features + np.float32(0.5), rng.integers(1, 5, rows)


def moments_of(features, counts, *, intercept: bool):
    """Moments of random numbers per row, (d [+ 1], 2)."""
    one = np.ones((len(features), int(intercept)))
    values = default_rng(4).normal(size=(len(features), 2))
    return np.hstack([features.astype(float), one]).T @ (counts[:, None] * values)


def dense(matrix, moments, *, intercept: bool):
    """The minimiser of the theta-update, by a dense solver."""
    penalty = np.full(len(matrix), L2)
    penalty[len(matrix) - int(intercept) :] = 0.0
    return np.linalg.solve(
        KAPPA * matrix / JOINED + np.diag(penalty), KAPPA * moments / JOINED
    )


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("way", ["columns", "rows"])
def test_columns_and_rows_are_exact(way, intercept):
    features, counts = table(12, 30)
    matrix = gram(features, counts, intercept=intercept)
    if way == "rows":
        solver = RidgeSolver.from_rows(features, counts, JOINED, intercept=intercept)
        assert solver.eigenvectors.shape == (30, 12)
    else:
        solver = RidgeSolver.from_gram(matrix, JOINED, intercept=intercept)
    moments = moments_of(features, counts, intercept=intercept)
    expected = dense(matrix, moments, intercept=intercept)
    solved = solver.solve(moments, KAPPA, L2)
    assert_allclose(solved, expected, rtol=1e-7, atol=1e-9)
    assert_allclose(solver.product(solved), matrix @ solved, atol=1e-8)
    assert solver.trace == pytest.approx(np.trace(matrix) / JOINED)


@pytest.mark.parametrize("intercept", [False, True])
def test_wide_tables_have_a_block_and_a_diagonal(monkeypatch, intercept):
    monkeypatch.setattr(solvers, "FREQUENT", 8)
    features, counts = table(60, 30)
    solver = RidgeSolver.from_frequent(features, counts, JOINED, intercept=intercept)
    whole = gram(features, counts, intercept=intercept)
    assert solver.trace == pytest.approx(np.trace(whole) / JOINED)
    # the columns of most variance, which the intercept has no part of
    mean = counts @ features / counts.sum() if intercept else np.zeros(30)
    centred = features - mean
    inner = gram(centred, counts)
    order = np.argsort(-np.diag(inner))
    assert set(solver.block) == set(order[:8])
    alone = np.isin(np.arange(30), order[8:])
    kept = inner * ~(alone[:, None] | alone) + np.diag(np.diag(inner) * alone)
    moments = moments_of(centred, counts, intercept=False)
    # of rows about their mean, which have no sum of their own
    given = np.vstack([moments, np.zeros((int(intercept), 2))])
    expected = dense(kept, moments, intercept=False)
    solved = solver.solve(given, KAPPA, L2)[:30]
    assert_allclose(solved, expected, rtol=1e-6, atol=1e-9)


def test_the_cheapest_factorisation_is_chosen():
    # few rows, many rows, and so many columns that even few rows are too large a matrix
    shapes = (10, 5000), (5000, 5000), (4000, 1 << 20)
    exact, rough = (
        [solvers.factorisation(*shape, is_exact=how) for shape in shapes]
        for how in (True, False)
    )
    assert exact == ["rows", "none: iterative", "none: iterative"]
    assert rough == ["rows", "frequent columns, diagonal", "frequent columns, diagonal"]
    for is_exact in (True, False):
        assert solvers.factorisation(0, 3, is_exact=is_exact) == "columns"
        assert solvers.factorisation(5000, 4096, is_exact=is_exact) == "columns"
