"""Vectors over joined rows in single precision, as in runs on a million rows."""

import numpy as np
import pytest

from strategies.setup import problem
from tests.support.federated import one_per_site, run, sharded, store
from tp_flower.joins.rows import LEAST_TOLERANCE

LOSS = {"cg": 1e-7, "admm": 1e-7, "boost": 1e-6}
"""How far the loss may be off, relative: the trees' values follow the derivatives."""
NUMBERS = {"cg": 3, "admm": 4, "boost": 6}
"""Of a joined row, besides the byte of its label and the numbers of its rows."""


def trained(method, **settings):
    settings.setdefault("num_epochs", 4)
    return run("logistic", one_per_site(sharded(store(200))), method, **settings)


@pytest.mark.parametrize("method", LOSS)
def test_the_model_is_that_of_double_precision(method, monkeypatch):
    double = trained(method)
    monkeypatch.setattr(problem, "SINGLE_ROWS", 1)
    single = trained(method)
    vectors = single.problem.rows.vectors
    assert {vector.dtype for vector in vectors.values()} == {
        np.dtype(np.float32),
        np.dtype(np.uint8),
    }
    np.testing.assert_allclose(single.losses, double.losses, rtol=LOSS[method])
    of_row = sum(v.nbytes for v in vectors.values()) / single.problem.rows.rows
    assert of_row == 4 * NUMBERS[method] + 1


@pytest.mark.parametrize(
    ("tolerance", "is_single"),
    [(0.0, True), (LEAST_TOLERANCE, True), (LEAST_TOLERANCE / 2, False)],
)
def test_a_small_tolerance_needs_double_precision(tolerance, is_single, monkeypatch):
    monkeypatch.setattr(problem, "SINGLE_ROWS", 1)
    finished = trained("cg", num_epochs=1, tolerance=tolerance)
    assert finished.problem.rows.is_single == is_single
    scores = finished.problem.rows.vectors["scores"]
    assert scores.dtype == (np.float32 if is_single else np.float64)


def test_few_rows_are_stored_in_double_precision():
    assert not trained("cg", num_epochs=1).problem.rows.is_single
