"""The server's half of ADMM on arrays; the whole is in test_training."""

import numpy as np
import pytest

from tests.support.reference import losses as slow
from tests.support.reference.families import family
from tp_flower.learning import admm
from tp_flower.objectives import names_of_losses

each_loss = pytest.mark.parametrize(
    "loss", [family(name) for name in names_of_losses()], ids=str
)
HIGH, LOW, EVEN = (
    admm.Residuals(1.0, 0.01),
    admm.Residuals(0.01, 1.0),
    admm.Residuals(1.0, 0.5),
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(admm, "LEAST_VALUES", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")


@each_loss
@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("rho", [1e-3, 0.3, 1e3])
def test_duals_are_the_gradient_at_z_after_every_step(loss, alpha, rho):
    rng = np.random.default_rng(0)
    labels = loss.labels(rng, 20)
    objective = loss.on(labels)
    state = admm.initial_state(np.zeros(loss.outputs), 20, rho)
    for _ in range(5):
        scores = 3 * rng.normal(size=(20, loss.outputs))
        old, before = state, (scores.copy(), state.z.copy(), state.duals.copy())
        state, message = admm.admm_step(old, scores, objective, alpha)
        # its arguments are left alone
        for array, copy in zip((scores, old.z, old.duals), before, strict=True):
            np.testing.assert_array_equal(array, copy)
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


def test_residuals_by_hand():
    state = admm.AdmmState(np.array([[1.0], [1.0]]), np.array([[3.0], [4.0]]), 0.5)
    base, scores, before = np.array([0.0]), np.array([[4.0], [5.0]]), np.zeros((2, 1))
    gap = admm.residuals(state, scores, before, base)
    # ||(3, 4)|| over ||(4, 5)||; 0.5 ||(4, 5)|| over ||(3, 4)||
    assert gap.primal == pytest.approx(5 / np.sqrt(41))
    assert gap.dual == pytest.approx(0.5 * np.sqrt(41) / 5)
    start = admm.initial_state(np.array([0.5, -1.0]), 3, 1.0)
    assert start.z.tolist() == [[0.5, -1.0]] * 3
    assert not start.duals.any()
    zero = np.zeros((3, 2))
    nothing = admm.residuals(
        admm.initial_state(np.zeros(2), 3, 1.0), zero, zero, np.zeros(2)
    )
    assert nothing == admm.Residuals(0.0, 0.0)


@pytest.mark.parametrize(
    ("recent", "expected"),
    [
        ([HIGH] * admm.BALANCE_WINDOW, 6.0),
        ([LOW] * admm.BALANCE_WINDOW, 1.5),
        ([EVEN, *[HIGH] * admm.BALANCE_WINDOW], 6.0),
        ([*[HIGH] * admm.BALANCE_WINDOW, EVEN], 3.0),
        ([HIGH] * (admm.BALANCE_WINDOW - 1), 3.0),
        ([LOW, *[HIGH] * (admm.BALANCE_WINDOW - 1)], 3.0),
        ([admm.Residuals(0.0, 0.0)] * admm.BALANCE_WINDOW, 3.0),
        ([], 3.0),
    ],
)
def test_rho_follows_a_lasting_imbalance_only(recent, expected):
    assert admm.balanced_rho(3.0, recent) == expected
