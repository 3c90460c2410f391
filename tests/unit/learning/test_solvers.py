"""The exact theta-update against the full regularised system, solved densely."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_flower.learning.solvers import RidgeSolver, gram

few = settings(max_examples=60, deadline=None)


def dense_of(features: np.ndarray, intercept: bool) -> np.ndarray:
    wide = features.astype(np.float64)
    return np.hstack([wide, np.ones((len(wide), 1))]) if intercept else wide


def problem(rows, columns, outputs, seed):
    """Features, multiplicities (some 0), target, joined rows."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(rows, columns)).astype(np.float32)
    multiplicity = rng.integers(0, 6, rows)
    multiplicity[0] = 1
    target = rng.normal(size=(rows, outputs))
    return features, multiplicity, target, int(multiplicity.sum())


def solve(features, multiplicity, target, joined, kappa, l2, intercept):
    matrix = gram(features, multiplicity, intercept=intercept)
    moments = dense_of(features, intercept).T @ (multiplicity[:, None] * target)
    solver = RidgeSolver.from_gram(matrix, joined, intercept=intercept)
    return solver.solve(moments, kappa, l2)


def reference(features, multiplicity, target, joined, kappa, l2, intercept):
    """Stack sqrt(kappa G / N) rows over sqrt(beta) I, and let lstsq solve."""
    columns = features.shape[1]
    root = np.sqrt(kappa * multiplicity / joined)[:, None]
    data = root * dense_of(features, intercept)
    penalty = np.sqrt(l2) * np.eye(columns, columns + intercept)
    stacked = np.vstack([data, penalty])
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
    np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-9)


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
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


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
    dense = dense_of(features, intercept)
    np.testing.assert_allclose(
        whole, dense.T @ (multiplicity[:, None] * dense), rtol=1e-9, atol=1e-9
    )
    parts = [
        gram(features[part], multiplicity[part], intercept=intercept)
        for part in (slice(0, at), slice(at, rows))
    ]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-10, atol=1e-10)
