"""Every loss and its proximal step against brute force, one row at a time."""

import numpy as np
import pytest
from scipy.optimize import check_grad, minimize

from tests.support.reference import losses as slow
from tp_flower.arrays import blocks
from tp_flower.learning.losses import LogisticLoss, Loss, SoftmaxLoss, SquaredLoss

ALL_LOSSES = [SquaredLoss(), LogisticLoss(), *(SoftmaxLoss(k) for k in range(2, 7))]
RHOS = np.logspace(-3, 3, 13)
# what design section 4.3 asks of the z-update
PROX_GRADIENT = 1e-8

each_loss = pytest.mark.parametrize(
    "loss", ALL_LOSSES, ids=lambda loss: f"{loss.name}-{loss.outputs}"
)


def labels_for(loss: Loss, rng: np.random.Generator, rows: int) -> np.ndarray:
    if loss.name == "squared":
        return rng.normal(0.0, 3.0, rows)
    classes = 2 if loss.name == "logistic" else loss.outputs
    labels = rng.integers(0, classes, rows)
    labels[:classes] = np.arange(classes)
    return labels.astype(float)


def problem(loss: Loss, rows: int = 12) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(loss.outputs)
    return 2 * rng.normal(size=(rows, loss.outputs)), labels_for(loss, rng, rows)


@each_loss
def test_value_is_the_mean_over_rows(loss):
    scores, labels = problem(loss)
    expected = slow.mean_value(loss.name, scores, labels)
    assert loss.value(scores, labels) == pytest.approx(expected, rel=1e-13)
    # over several blocks
    scores, labels = problem(loss, rows=40_001)
    assert len(list(blocks(len(labels)))) == 3
    expected = loss.row_values(scores, labels).mean()
    assert loss.value(scores, labels) == pytest.approx(expected, rel=1e-12)


@each_loss
def test_gradient_row_by_row_and_by_differences(loss):
    scores, labels = problem(loss, rows=6)
    gradient = loss.gradient(scores, labels)
    expected = slow.gradients(loss.name, scores, labels)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-14)

    def value(flat):
        return float(loss.row_values(flat.reshape(scores.shape), labels).sum())

    def flat_gradient(flat):
        return loss.gradient(flat.reshape(scores.shape), labels).ravel()

    # forward differences of step 1.5e-8: errors of that size
    assert check_grad(value, flat_gradient, scores.ravel()) < 1e-5


@each_loss
@pytest.mark.parametrize("extreme", [-1e4, 1e4])
def test_extreme_scores_neither_overflow_nor_warn(loss, extreme):
    _, labels = problem(loss)
    scores = np.full((len(labels), loss.outputs), extreme)
    scores[:, 0] *= -1.0
    rows = zip(scores, labels, strict=True)
    values = np.array([slow.row_value(loss.name, *row) for row in rows], float)
    np.testing.assert_allclose(loss.row_values(scores, labels), values, atol=1e-12)
    gradients = slow.gradients(loss.name, scores, labels)
    np.testing.assert_allclose(loss.gradient(scores, labels), gradients)


@each_loss
def test_base_score_is_the_best_constant(loss):
    _, labels = problem(loss, rows=40)
    base = loss.base_score(labels)
    assert base.shape == (loss.outputs,)

    def value_of_constant(constant):
        return loss.value(np.tile(constant, (len(labels), 1)), labels)

    gradient = loss.gradient(np.tile(base, (len(labels), 1)), labels).mean(axis=0)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-12)
    best = minimize(value_of_constant, np.zeros(loss.outputs)).fun
    assert value_of_constant(base) == pytest.approx(best, rel=1e-8)


def test_base_score_of_a_class_without_rows_is_finite():
    base = SoftmaxLoss(3).base_score(np.array([0.0, 1.0, 1.0, 0.0]))
    assert np.isfinite(base).all()
    assert base[2] < base[:2].min()


def slope(loss, base, direction, step) -> np.ndarray:
    """The derivative of the gradient of class 0 at a point, in a direction."""
    label, ends = np.zeros(1), (base + step * direction, base - step * direction)
    upper, lower = (loss.gradient(end[None], label)[0] for end in ends)
    return (upper - lower) / (2 * step)


@each_loss
def test_curvature_is_the_mean_diagonal_of_the_hessian(loss):
    base = np.linspace(-0.7, 0.4, loss.outputs)
    hessian = [slope(loss, base, unit, 1e-5) for unit in np.eye(loss.outputs)]
    expected = np.mean(np.diag(hessian))
    assert loss.curvature(base) == pytest.approx(expected, rel=1e-6)


@each_loss
def test_max_curvature_bounds_every_hessian(loss):
    rng = np.random.default_rng(0)
    curvatures = []
    for _ in range(300):
        base, direction = rng.normal(0, 2, loss.outputs), rng.normal(size=loss.outputs)
        direction /= np.linalg.norm(direction)
        curvatures.append(slope(loss, base, direction, 1e-4) @ direction)
    assert max(curvatures) <= loss.max_curvature * (1 + 1e-6)
    # the bound is not a loose one: two even classes reach it
    assert max(curvatures) > 0.5 * loss.max_curvature


@each_loss
@pytest.mark.parametrize("rho", RHOS, ids=lambda rho: f"{rho:.0e}")
def test_prox_is_stationary_everywhere(loss, rho):
    rng = np.random.default_rng(7)
    scales = np.repeat([0.01, 1.0, 30.0, 1e4], 12)
    centre = scales[:, None] * rng.uniform(-1, 1, (48, loss.outputs))
    centre[36:42], centre[42:] = 1e4, -1e4
    centre[41, 0], centre[47, 0] = -1e4, 1e4
    labels = labels_for(loss, rng, 48)
    rng.shuffle(labels)
    start = rng.permutation(centre) / 10
    for z in (loss.prox(centre, labels, rho), loss.prox(centre, labels, rho, start)):
        assert z.shape == centre.shape
        rows = zip(z, centre, labels, strict=True)
        worst = max(np.abs(slow.prox_gradient(loss.name, *r, rho)).max() for r in rows)
        assert worst <= PROX_GRADIENT


@each_loss
@pytest.mark.parametrize("rho", [1e-3, 0.05, 1.0, 1e3])
def test_prox_is_the_brute_force_minimum(loss, rho):
    centre, labels = problem(loss, rows=6)
    start = centre + 1.0
    before = centre.copy(), labels.copy(), start.copy()
    actual = loss.prox(centre, labels, rho, start=start)
    for array, copy in zip((centre, labels, start), before, strict=True):
        np.testing.assert_array_equal(array, copy)
    rows = [*zip(centre, labels, strict=True)]
    expected = [slow.brute_prox(loss.name, *row, rho) for row in rows]
    # at 1e-3 the minimum is flat: a gradient of 1e-8 is 1e-5 from it
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    for z, other, (v, y) in zip(actual, expected, rows, strict=True):
        values = [
            slow.row_value(loss.name, point, y) + rho / 2 * ((point - v) ** 2).sum()
            for point in (z, other)
        ]
        assert values[0] <= values[1] + 1e-12


@each_loss
def test_prox_of_many_rows_is_the_prox_of_each(loss):
    centre, labels = problem(loss, rows=9000)
    together = loss.prox(centre, labels, 0.3)
    for row in (0, 1, 8191, 8192, 8999):
        alone = loss.prox(centre[row : row + 1], labels[row : row + 1], 0.3)
        np.testing.assert_allclose(together[row], alone[0], atol=1e-6)
