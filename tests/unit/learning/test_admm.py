"""The server's half of ADMM on arrays, with mixing; the whole is in test_training."""

import numpy as np
import pytest

from tests.support.reference import losses as slow
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.learning import admm
from tp_flower.learning.admm import (
    BALANCE_WINDOW,
    AdmmState,
    AndersonMixer,
    Point,
    Residuals,
    admm_step,
    balanced_rho,
    initial_state,
    residuals,
)
from tp_flower.losses import LOSSES, make_loss

ALL_LOSSES = [
    make_loss(name, min(3, loss.class_counts[-1])) for name, loss in LOSSES.items()
]
each_loss = pytest.mark.parametrize("loss", ALL_LOSSES, ids=lambda loss: loss.name)


def rows_of(*row_of: int, rows: int) -> TableRows:
    return TableRows(np.array(row_of, np.int32), rows)


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
    state = initial_state(np.zeros(loss.outputs), 20, rho)
    for _ in range(5):
        scores = 3 * rng.normal(size=(20, loss.outputs))
        old, before = state, (scores.copy(), state.z.copy(), state.duals.copy())
        state, message = admm_step(old, scores, labels, loss, alpha)
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


ROWS, OWN, OUTPUTS = 900, 200, 3
RHO, CORRECTIONS = 0.7, 2
HALF_ULP = 2.0**-24
"""Relative rounding of float32."""


def mapping_of(row_of) -> TableMapping:
    return TableMapping({"t": TableRows(row_of.astype(np.int32), OWN)})


def random_steps(count: int):
    """Pairs of points (before, after) whose changes have nothing in common."""
    rng = np.random.default_rng(11)
    mapping = mapping_of(rng.integers(0, OWN, ROWS))

    def point() -> Point:
        local = {"t": rng.normal(size=(OWN, OUTPUTS))}
        scores = mapping.sum_scores(np.zeros(OUTPUTS), local)
        return Point(scores, rng.normal(size=(ROWS, OUTPUTS)), local)

    return mapping, [(point(), point()) for _ in range(count)]


def flat(point: Point) -> np.ndarray:
    arrays = (point.scores, point.duals, point.local_scores["t"])
    return np.concatenate([array.ravel() for array in arrays])


def textbook(mapping, steps, memory):
    """The last point by Walker and Ni's type II, and its |dG| |gamma|."""
    count = mapping.tables["t"].multiplicity
    weights = np.concatenate(
        [
            np.zeros(ROWS * OUTPUTS),  # h follows
            np.ones(ROWS * OUTPUTS),
            np.repeat(RHO * np.sqrt(CORRECTIONS * count), OUTPUTS),
        ]
    )
    reached = np.array([flat(after) for _, after in steps])
    moved = np.array([weights * (flat(after) - flat(start)) for start, after in steps])
    changes = np.diff(moved, axis=0)[-memory:]
    gamma = np.linalg.lstsq(changes.T, moved[-1])[0]
    back = np.diff(reached, axis=0)[-memory:]
    return reached[-1] - gamma @ back, np.abs(gamma) @ np.abs(back)


@pytest.mark.parametrize("memory", [1, 3, 5])
def test_a_mix_is_the_textbooks_to_the_rounding_of_what_is_kept(memory):
    mapping, steps = random_steps(7)
    mixer = AndersonMixer(mapping, memory, CORRECTIONS)
    for before, after in steps:
        mixed = mixer.mix(RHO, before, after)
    expected, size = textbook(mapping, steps, memory)
    # gamma is off by the rounding of dF, times its condition, which is below 10 here
    error = np.abs(flat(mixed) - expected)
    assert error.max() <= 10 * HALF_ULP * size.max()
    # it is the rounding of float32 that is seen, so that the bound is not a loose one
    assert error.max() > 1e-3 * HALF_ULP * size.max()


def test_a_mix_does_not_depend_on_the_order_of_the_rows():
    mapping, steps = random_steps(5)
    order = np.random.default_rng(1).permutation(ROWS)
    moved = mapping_of(mapping.tables["t"].row_of[order])

    def in_order(point: Point) -> Point:
        return Point(point.scores[order], point.duals[order], point.local_scores)

    mixer, other = (AndersonMixer(each, 3, CORRECTIONS) for each in (mapping, moved))
    for before, after in steps:
        mixed = mixer.mix(RHO, before, after)
        actual = other.mix(RHO, in_order(before), in_order(after))
    np.testing.assert_allclose(actual.duals, mixed.duals[order], rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(
        actual.local_scores["t"], mixed.local_scores["t"], rtol=1e-10, atol=1e-10
    )


def test_first_steps_and_steps_far_beyond_the_best_are_plain():
    mapping, steps = random_steps(6)
    mixer = AndersonMixer(mapping, 3, CORRECTIONS)
    for number, (before, after) in enumerate(steps[:5]):
        mixed = mixer.mix(RHO, before, after)
        assert (mixed is after) == (number == 0)
        assert mixer.remembered == min(number, 3)
        assert AndersonMixer(mapping, 0, CORRECTIONS).mix(RHO, before, after) is after
    before, after = steps[5]
    local = {"t": 100.0 * after.local_scores["t"]}
    far = Point(100.0 * after.scores, 100.0 * after.duals, local)
    assert mixer.mix(RHO, before, far) is far
    assert mixer.remembered == 0
    mixer.mix(RHO, *steps[0])
    mixer.restart()
    assert mixer.mix(RHO, before, after) is after


def test_mixing_at_a_fixed_point_stays_there():
    mapping, ((point, _),) = random_steps(1)
    mixer = AndersonMixer(mapping, 3, CORRECTIONS)
    for _ in range(4):
        mixed = mixer.mix(RHO, point, point)
        np.testing.assert_allclose(flat(mixed), flat(point), atol=1e-8)
