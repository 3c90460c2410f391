"""The server's half of ADMM on arrays; the whole is in test_training."""

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from tests.support.reference import losses as slow
from tests.support.reference.families import family
from tests.support.tables.mappings import one_to_one
from tp_flower.joins import rows as rows_of_joins
from tp_flower.methods.admm.iterations import (
    BALANCE_WINDOW,
    Residuals,
    admm_step,
    advance,
    balanced_rho,
    start,
)
from tp_flower.objectives import family_named, names_of_losses

each_loss = pytest.mark.parametrize(
    "loss",
    [family(n) for n in names_of_losses() if family_named(n).is_separable],
    ids=str,
)
HIGH = Residuals(1.0, 0.01)
LOW = Residuals(0.01, 1.0)
EVEN = Residuals(1.0, 0.5)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(rows_of_joins, "PART_ROWS", 6)
    monkeypatch.setattr(rows_of_joins, "BLOCK_ROWS", 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")


@each_loss
@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("rho", [1e-3, 0.3, 1e3])
def test_duals_are_the_gradient_at_z_after_every_step(loss, alpha, rho):
    rng = default_rng(0)
    labels = loss.labels(rng, 20)
    objective = loss.on(labels)
    rows = one_to_one(20, objective.vectors)
    start(rows, np.zeros(loss.outputs))
    for _ in range(5):
        scores = 3 * rng.normal(size=(20, loss.outputs))
        rows.fill("scores", scores)
        old_z, old_duals = (rows.whole(name).copy() for name in ("z", "duals"))
        sums = admm_step(rows, objective, rho, alpha)
        z = rows.whole("z")
        duals = rows.whole("duals")
        assert_array_equal(rows.whole("scores"), scores)
        relaxed = alpha * scores + (1 - alpha) * old_z
        expected = slow.gradients(loss.name, z, labels)
        if loss.name == "quantile":
            # at the label itself they are any from -1/2 to 1/2
            at_label = np.isclose(z[:, 0], labels)
            expected[at_label] = np.clip(duals[at_label], -0.5, 0.5)
        assert_allclose(duals, expected, atol=1e-13)
        # Eq. 8 gives the same, as z is optimal to 1e-8
        assert_allclose(duals, old_duals + rho * (relaxed - z), atol=2e-8)
        assert_allclose(sums["t"], duals + rho * (scores - z), atol=1e-12)


def gap_of(vectors, scores, base, rho) -> Residuals:
    """Residuals of an epoch that ends with scores (N, d_c), over a base score."""
    objective = family("squared").on(np.zeros(len(scores)))
    rows = one_to_one(len(scores), {**objective.vectors, **vectors})
    local = {"t": scores - base}
    gap, total = advance(rows, objective, rho, base, lambda sums: base + sums, local)
    assert total == pytest.approx((scores[:, 0] ** 2).sum() / 2.0)
    assert_allclose(rows.whole("scores"), scores)
    return gap


def test_residuals_by_hand():
    z = np.array([[1.0], [1.0]])
    duals = np.array([[3.0], [4.0]])
    base = np.array([0.0])
    scores = np.array([[4.0], [5.0]])
    before = np.zeros((2, 1))
    gap = gap_of({"z": z, "duals": duals, "scores": before}, scores, base, 0.5)
    # ||(3, 4)|| over ||(4, 5)||; 0.5 ||(4, 5)|| over ||(3, 4)||
    assert gap.primal == pytest.approx(5 / np.sqrt(41))
    assert gap.dual == pytest.approx(0.5 * np.sqrt(41) / 5)
    rows = one_to_one(3)
    start(rows, np.array([0.5, -1.0]))
    assert rows.whole("z").tolist() == [[0.5, -1.0]] * 3
    assert not rows.whole("duals").any()
    zero = np.zeros((3, 2))
    nothing = gap_of({"z": zero, "duals": zero, "scores": zero}, zero, np.zeros(2), 1.0)
    assert nothing == Residuals(0.0, 0.0)


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
