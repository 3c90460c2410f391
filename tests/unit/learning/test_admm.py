"""The server's half of ADMM on arrays, with mixing; the whole is in test_training."""

import numpy as np
import pytest

from tests.support.reference import losses as slow
from tp_flower.learning import admm
from tp_flower.losses import LOSSES, make_loss

ALL_LOSSES = [
    make_loss(name, min(3, loss.class_counts[-1])) for name, loss in LOSSES.items()
]
each_loss = pytest.mark.parametrize("loss", ALL_LOSSES, ids=lambda loss: loss.name)
HIGH, LOW, EVEN = (
    admm.Residuals(1.0, 0.01),
    admm.Residuals(0.01, 1.0),
    admm.Residuals(1.0, 0.5),
)
ROWS, OUTPUTS = 900, 3
RHO = 0.7
HALF_ULP = 2.0**-24
"""Relative rounding of float32."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(admm, "BLOCK_VALUES", 100)
    monkeypatch.setattr(admm, "LEAST_VALUES", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")


def labels_for(loss, rows: int, rng) -> np.ndarray:
    if loss.is_regression:
        return rng.normal(size=rows)
    return rng.integers(0, max(2, loss.outputs), rows).astype(float)


@each_loss
@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("rho", [1e-3, 0.3, 1e3])
def test_duals_are_the_gradient_at_z_after_every_step(loss, alpha, rho):
    rng = np.random.default_rng(0)
    labels = labels_for(loss, 20, rng)
    state = admm.initial_state(np.zeros(loss.outputs), 20, rho)
    for _ in range(5):
        scores = 3 * rng.normal(size=(20, loss.outputs))
        old, before = state, (scores.copy(), state.z.copy(), state.duals.copy())
        state, message = admm.admm_step(old, scores, labels, loss, alpha)
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


def random_steps(count: int):
    """Pairs of points (before, after) whose changes have nothing in common."""
    draws = np.random.default_rng(11).normal(size=(count, 2, 2, ROWS, OUTPUTS))
    return [(admm.Point(*before), admm.Point(*after)) for before, after in draws]


def flat(point: admm.Point) -> np.ndarray:
    return np.concatenate([point.scores.ravel(), point.duals.ravel()])


def textbook(steps, memory, row_weights):
    """The last point by Walker and Ni's type II, its |dG| |gamma|, and gamma."""
    size = np.repeat(np.sqrt(row_weights), OUTPUTS)
    weights = np.concatenate([0.0 * size, size])  # h is not in the norm
    reached = np.array([flat(after) for _, after in steps])
    moved = np.array([weights * (flat(after) - flat(start)) for start, after in steps])
    changes = np.diff(moved, axis=0)[-memory:]
    gamma = np.linalg.lstsq(changes.T, moved[-1])[0]
    back = np.diff(reached, axis=0)[-memory:]
    return reached[-1] - gamma @ back, np.abs(gamma) @ np.abs(back), gamma


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("memory", [1, 3, 5])
def test_a_mix_is_the_textbooks_to_the_rounding_of_what_is_kept(memory, is_weighted):
    steps, weights = random_steps(7), np.ones(ROWS)
    if is_weighted:
        weights = np.random.default_rng(2).uniform(0.5, 2.0, ROWS)
    mixer = admm.AndersonMixer(memory, weights if is_weighted else None)
    for before, after in steps:
        mixed = mixer.mix(before, after)
    expected, size, gamma = textbook(steps, memory, weights)
    np.testing.assert_allclose(mixer.coefficients, gamma, rtol=1e-4)
    # gamma is off by the rounding of dF, times its condition, which is below 10 here
    error = np.abs(flat(mixed) - expected)
    assert error.max() <= 10 * HALF_ULP * size.max()
    # it is the rounding of float32 that is seen, so that the bound is not a loose one
    assert error.max() > 1e-3 * HALF_ULP * size.max()


def test_a_mix_does_not_depend_on_the_order_of_the_rows():
    order = np.random.default_rng(1).permutation(ROWS)

    def in_order(point: admm.Point) -> admm.Point:
        return admm.Point(point.scores[order], point.duals[order])

    mixer, other = admm.AndersonMixer(3), admm.AndersonMixer(3)
    for before, after in random_steps(5):
        mixed = mixer.mix(before, after)
        actual = other.mix(in_order(before), in_order(after))
    np.testing.assert_allclose(
        flat(actual), flat(in_order(mixed)), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("memory", [1, 2, 4])
def test_the_sum_of_mixed_linear_models_is_the_mixed_score(memory):
    """Sites mix theta, the server h and the duals, by the same coefficients."""
    rng = np.random.default_rng(4)
    rows = {name: rng.normal(size=(ROWS, 5)) for name in "ab"}
    mixer, base = admm.AndersonMixer(memory), rng.normal(size=OUTPUTS)
    reached = {name: np.zeros((1, 5 * OUTPUTS)) for name in rows}
    start = admm.Point(np.tile(base, (ROWS, 1)), np.zeros((ROWS, OUTPUTS)))
    for _ in range(7):
        for name in rows:
            theta = rng.normal(size=5 * OUTPUTS)
            reached[name] = np.vstack([reached[name][-memory:], theta])
        scores = base + sum(
            rows[name] @ kept[-1].reshape(5, OUTPUTS) for name, kept in reached.items()
        )
        end = admm.Point(scores, rng.normal(size=(ROWS, OUTPUTS)))
        start = mixer.mix(start, end)
        mixed = base + sum(
            rows[name]
            @ admm.mixed_parameters(kept, mixer.coefficients).reshape(5, OUTPUTS)
            for name, kept in reached.items()
        )
        np.testing.assert_allclose(start.scores, mixed, atol=1e-5)
        assert {len(kept) for kept in reached.values()} <= set(range(2, memory + 2))


def test_first_steps_and_steps_far_beyond_the_best_are_plain():
    steps = random_steps(6)
    mixer = admm.AndersonMixer(3)
    for number, (before, after) in enumerate(steps[:5]):
        mixed = mixer.mix(before, after)
        assert (mixed is after) == (number == 0)
        assert mixer.remembered == len(mixer.coefficients) == min(number, 3)
        assert admm.AndersonMixer(0).mix(before, after) is after
    before, after = steps[5]
    far = admm.Point(100.0 * after.scores, 100.0 * after.duals)
    assert mixer.mix(before, far) is far
    assert mixer.remembered == len(mixer.coefficients) == 0
    mixer.mix(*steps[0])
    mixer.restart()
    assert mixer.mix(before, after) is after


def test_mixing_at_a_fixed_point_stays_there():
    ((point, _),) = random_steps(1)
    mixer = admm.AndersonMixer(3)
    for _ in range(4):
        mixed = mixer.mix(point, point)
        np.testing.assert_allclose(flat(mixed), flat(point), atol=1e-8)
