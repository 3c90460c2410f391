"""The server's half of ADMM on arrays; the whole method is in test_training."""

import numpy as np
import pytest

from tests.support.reference import losses as slow
from tp_flower.joins.mapping import TableRows
from tp_flower.learning.admm import (
    BALANCE_WINDOW,
    AdmmState,
    Residuals,
    admm_step,
    balanced_rho,
    initial_state,
    residuals,
)
from tp_flower.learning.losses import LogisticLoss, SoftmaxLoss, SquaredLoss

ALL_LOSSES = [SquaredLoss(), LogisticLoss(), SoftmaxLoss(3)]
each_loss = pytest.mark.parametrize("loss", ALL_LOSSES, ids=lambda loss: loss.name)


def rows_of(*row_of: int, rows: int) -> TableRows:
    return TableRows(np.array(row_of, np.int32), rows)


def labels_for(loss, rows: int, rng) -> np.ndarray:
    if loss.name == "squared":
        return rng.normal(size=rows)
    return rng.integers(0, max(2, loss.outputs), rows).astype(float)


@each_loss
@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("rho", [1e-3, 0.3, 1e3])
def test_duals_are_the_gradient_at_z_after_every_step(loss, alpha, rho):
    rng = np.random.default_rng(0)
    labels = labels_for(loss, 20, rng)
    state = initial_state(np.zeros(loss.outputs), 20, rho)
    for _ in range(5):
        scores = 3 * rng.normal(size=(20, loss.outputs))
        old = state
        state, message = admm_step(old, scores, labels, loss, alpha)
        relaxed = alpha * scores + (1 - alpha) * old.z
        np.testing.assert_allclose(
            state.duals, slow.gradients(loss.name, state.z, labels), atol=1e-13
        )
        # Eq. 8 gives the same, as z is optimal to 1e-8
        np.testing.assert_allclose(
            state.duals, old.duals + rho * (relaxed - state.z), atol=2e-8
        )
        np.testing.assert_allclose(
            message, state.duals + rho * (scores - state.z), atol=1e-12
        )
        assert state.rho == rho


def test_step_leaves_its_arguments_alone():
    state = initial_state(np.zeros(1), 4, 0.5)
    scores = np.ones((4, 1))
    admm_step(state, scores, np.arange(4.0), SquaredLoss(), 1.5)
    assert not state.z.any()
    assert not state.duals.any()
    assert (scores == 1).all()


def test_residuals_by_hand():
    state = AdmmState(np.array([[1.0], [1.0]]), np.array([[3.0], [4.0]]), 0.5)
    base, scores, before = np.array([0.0]), np.array([[4.0], [5.0]]), np.zeros((2, 1))
    gap = residuals(state, scores, before, base)
    # ||(3, 4)|| over ||(4, 5)||; 0.5 ||(4, 5)|| over ||(3, 4)||
    assert gap.primal == pytest.approx(5 / np.sqrt(41))
    assert gap.dual == pytest.approx(0.5 * np.sqrt(41) / 5)
    start = initial_state(np.array([0.5, -1.0]), 3, 1.0)
    assert start.z.tolist() == [[0.5, -1.0]] * 3
    assert not start.duals.any()
    zero = np.zeros((3, 2))
    nothing = residuals(initial_state(np.zeros(2), 3, 1.0), zero, zero, np.zeros(2))
    assert nothing == Residuals(0.0, 0.0)


HIGH, LOW, EVEN = Residuals(1.0, 0.01), Residuals(0.01, 1.0), Residuals(1.0, 0.5)


@pytest.mark.parametrize(
    ("recent", "expected"),
    [
        ([HIGH] * BALANCE_WINDOW, 6.0),
        ([LOW] * BALANCE_WINDOW, 1.5),
        ([EVEN, *[HIGH] * BALANCE_WINDOW], 6.0),
        ([*[HIGH] * BALANCE_WINDOW, EVEN], 3.0),
        ([HIGH] * (BALANCE_WINDOW - 1), 3.0),
        ([LOW, *[HIGH] * (BALANCE_WINDOW - 1)], 3.0),
        ([Residuals(0.0, 0.0)] * BALANCE_WINDOW, 3.0),
        ([], 3.0),
    ],
)
def test_rho_follows_a_lasting_imbalance_only(recent, expected):
    assert balanced_rho(3.0, recent) == expected
