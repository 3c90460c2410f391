"""The server's half of ADMM on arrays; the whole method is in test_training."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reference import losses as slow
from tp_flower.joins.mapping import TableMapping, TableRows
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
    targets,
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


@settings(deadline=None)
@given(
    row_of=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    outputs=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_targets_row_by_row(row_of, outputs, seed):
    rng = np.random.default_rng(seed)
    local, message = (
        rng.normal(size=(5, outputs)),
        rng.normal(size=(len(row_of), outputs)),
    )
    found = targets(rows_of(*row_of, rows=5), local, message, kappa=0.7)
    for row in range(5):
        own = [message[j] for j, source in enumerate(row_of) if source == row]
        expected = local[row] - (sum(own) / (0.7 * len(own)) if own else 0.0)
        np.testing.assert_allclose(found[row], expected, atol=1e-12)


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


# Anderson mixing

SMALL = TableMapping({"t": rows_of(0, 1, 1, rows=2)})


def point_of(duals, local_scores) -> Point:
    """The point, with the scores of the joined rows that follow from it."""
    local = {"t": np.reshape(local_scores, (2, 1)).astype(np.float64)}
    scores = SMALL.sum_scores(np.zeros(1), local)
    return Point(scores, np.reshape(duals, (3, 1)).astype(np.float64), local)


START = point_of(np.zeros(3), np.zeros(2))


def linear_map(seed: int, radius: float):
    """A contraction of (duals (3, 1), scores (2, 1)) and its fixed point."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(5, 5))
    matrix *= radius / np.abs(np.linalg.eigvals(matrix)).max()
    shift = rng.normal(size=5)
    fixed = np.linalg.solve(np.eye(5) - matrix, shift)

    def step(point: Point) -> Point:
        flat = np.concatenate([point.duals.ravel(), point.local_scores["t"].ravel()])
        new = matrix @ flat + shift
        return point_of(new[:3], new[3:])

    return step, fixed


def iterate(step, mixer, count, rho=0.8) -> np.ndarray:
    point = START
    for _ in range(count):
        point = mixer.mix(rho, point, step(point))
        # the carried scores are those of the point, up to the rounding of float32
        expected = SMALL.sum_scores(np.zeros(1), point.local_scores)
        np.testing.assert_allclose(point.scores, expected, rtol=1e-4, atol=1e-4)
    return np.concatenate([point.duals.ravel(), point.local_scores["t"].ravel()])


@pytest.mark.parametrize("seed", range(5))
def test_mixing_reaches_the_fixed_point_of_a_linear_map_in_few_steps(seed):
    step, fixed = linear_map(seed, radius=0.95)
    scale = np.linalg.norm(fixed)
    memory = 5
    # in exact arithmetic the dimension + 1 steps; the ridge costs a few more
    mixed = iterate(step, AndersonMixer(SMALL, memory, 3), memory + 6)
    plain = iterate(step, AndersonMixer(SMALL, 0, 3), memory + 6)
    assert np.linalg.norm(mixed - fixed) < 1e-5 * scale
    assert np.linalg.norm(plain - fixed) > 1e-2 * scale


def test_first_step_and_a_restart_take_the_plain_step():
    mixer = AndersonMixer(SMALL, 5, 3)
    step, _ = linear_map(0, 0.9)
    after = step(START)
    assert mixer.mix(0.5, START, after) is after
    second = step(after)
    assert mixer.mix(0.5, after, second) is not second
    mixer.restart()
    assert mixer.mix(0.5, after, second) is second


def test_mixing_at_the_fixed_point_stays_there():
    step, fixed = linear_map(2, 0.9)
    mixer = AndersonMixer(SMALL, 2, 3)
    point = point_of(fixed[:3], fixed[3:])
    for epoch in range(5):
        point = mixer.mix(0.5, point, step(point))
        assert np.isfinite(point.duals).all()
        assert mixer.remembered == min(epoch, 2)
    np.testing.assert_allclose(point.duals, fixed[:3, None], atol=1e-8)


# sharing and Jacobi, on three tables that can fit any target


def run_tables(loss, corrections: int, epochs: int, rho: float) -> list[float]:
    """Losses of three tables joined row by row, each with a free score per row."""
    rng = np.random.default_rng(5)
    mapping = TableMapping(
        {name: TableRows(np.arange(15, dtype=np.int32), 15) for name in "abc"}
    )
    labels = labels_for(loss, 15, rng)
    base = np.zeros(loss.outputs)
    state = initial_state(base, 15, rho)
    local = {name: np.zeros((15, loss.outputs)) for name in "abc"}
    values = []
    for _ in range(epochs):
        scores = mapping.sum_scores(base, local)
        values.append(loss.value(scores, labels))
        state, message = admm_step(state, scores, labels, loss)
        local = {
            name: targets(mapping.tables[name], own, message, corrections * rho)
            for name, own in local.items()
        }
    return values


def test_jacobi_diverges_where_sharing_converges():
    sharing = run_tables(SquaredLoss(), 3, 60, rho=0.5)
    jacobi = run_tables(SquaredLoss(), 1, 60, rho=0.5)
    assert sharing[-1] < 1e-8 * sharing[0]
    assert jacobi[-1] > 1e6 * jacobi[0]


@pytest.mark.parametrize("rho", [0.05, 0.5, 5.0])
@each_loss
def test_sharing_lowers_every_loss_for_any_rho(loss, rho):
    values = run_tables(loss, 3, 60, rho)
    assert values[-1] < 0.3 * values[0]
