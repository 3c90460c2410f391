"""Every loss and its proximal step against brute force, one row at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import check_grad, minimize

from tests.support.reference import losses as slow
from tests.support.reference.families import ALL, Family
from tp_flower.arrays import blocks
from tp_flower.objectives import (
    FAMILIES,
    KMEANS,
    ClassNoise,
    NumberNoise,
    Objective,
    Target,
    make_objective,
    names_of_losses,
)
from tp_flower.objectives.comparison import RankedRows, means_by_tenth
from tp_flower.objectives.metrics import auc
from tp_flower.privacy.label_mechanisms import LabelPlan
from tp_flower.randomness import NoiseSource

RHOS = np.logspace(-3, 3, 13)
# what design section 4.3 asks of the z-update
PROX_GRADIENT = 1e-8
each_loss = pytest.mark.parametrize("loss", ALL, ids=str)
KEY = bytes(range(32))
CASES = {
    "logistic": Family("logistic", 2, ClassNoise(2, 0.8)),
    "softmax-2": Family("softmax", 2, ClassNoise(2, 0.9)),
    "softmax-3": Family("softmax", 3, ClassNoise(3, 0.55)),
    "softmax-6": Family("softmax", 6, ClassNoise(6, 0.4)),
}
each = pytest.mark.parametrize("case", CASES)


def problem(loss: Family, rows: int = 12) -> tuple[np.ndarray, np.ndarray]:
    rng = default_rng(loss.outputs)
    return 2 * rng.normal(size=(rows, loss.outputs)), loss.labels(rng, rows)


def test_every_family_is_in_the_registry():
    def families(kind: type) -> set[type]:
        below = set().union(*map(families, kind.__subclasses__()))
        is_of_product = kind.__module__.startswith("tp_flower.")
        # with a parameter they are of the same family
        is_one = is_of_product and "(" not in getattr(kind, "name", "(")
        return below | ({kind} if is_one else set())

    assert families(Objective) == set(FAMILIES.values()), "list it in FAMILIES"
    assert set(names_of_losses()) == set(FAMILIES) - {KMEANS}


@each_loss
def test_value_is_the_mean_over_rows(loss):
    scores, labels = problem(loss)
    expected = slow.mean_value(loss.name, scores, labels)
    assert loss.on(labels).value(scores) == pytest.approx(expected, rel=1e-13)
    # over several blocks
    scores, labels = problem(loss, rows=40_001)
    assert len(list(blocks(len(labels)))) == 3
    expected = loss.on(labels).row_values(scores).mean()
    assert loss.on(labels).value(scores) == pytest.approx(expected, rel=1e-12)


@each_loss
def test_gradient_row_by_row_and_by_differences(loss):
    scores, labels = problem(loss, rows=6)
    gradient = loss.on(labels).gradient(scores)
    expected = slow.gradients(loss.name, scores, labels)
    assert_allclose(gradient, expected, rtol=1e-12, atol=1e-14)

    def value(flat):
        return float(loss.on(labels).row_values(flat.reshape(scores.shape)).sum())

    def flat_gradient(flat):
        return loss.on(labels).gradient(flat.reshape(scores.shape)).ravel()

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
    assert_allclose(loss.on(labels).row_values(scores), values, atol=1e-12)
    gradients = slow.gradients(loss.name, scores, labels)
    assert_allclose(loss.on(labels).gradient(scores), gradients)


@each_loss
def test_base_score_is_the_best_constant(loss):
    _, labels = problem(loss, rows=40)
    bound = loss.on(labels)
    base = bound.base_score
    assert base.shape == (loss.outputs,)

    def value_of_constant(constant):
        return bound.value(np.tile(constant, (len(labels), 1)))

    gradient = bound.gradient(np.tile(base, (len(labels), 1))).mean(axis=0)
    assert_allclose(gradient, 0.0, atol=1e-12)
    best = minimize(value_of_constant, np.zeros(loss.outputs)).fun
    assert value_of_constant(base) == pytest.approx(best, rel=1e-8)


def test_base_score_of_a_class_without_rows_is_finite():
    base = Family("softmax", 3).on([0.0, 1.0, 1.0, 0.0]).base_score
    assert np.isfinite(base).all()
    assert base[2] < base[:2].min()


def expected_label(loss, base) -> np.ndarray:
    """Class 0, or the number whose mean is a score's."""
    return np.exp(base) if loss.name in slow.VARIANCES else np.zeros(1)


def slope(loss, base, direction, step) -> np.ndarray:
    """The derivative of the gradient at a point, in a direction."""
    label = expected_label(loss, base)
    ends = (base + step * direction, base - step * direction)
    upper, lower = (loss.on(label).gradient(end[None])[0] for end in ends)
    return (upper - lower) / (2 * step)


@each_loss
def test_curvature_is_the_mean_diagonal_of_the_hessian(loss):
    base = np.linspace(-0.7, 0.4, loss.outputs)
    hessian = [slope(loss, base, unit, 1e-5) for unit in np.eye(loss.outputs)]
    diagonal = np.diag(hessian)
    assert loss.on([]).curvature(base) == pytest.approx(diagonal.mean(), rel=1e-6)
    actual = loss.on(expected_label(loss, base)).hessian(base[None])[0]
    assert_allclose(actual, diagonal, rtol=1e-6)


@each_loss
def test_max_curvature_bounds_every_hessian(loss):
    rng = default_rng(0)
    curvatures = []
    for _ in range(300):
        base = rng.normal(0, 2, loss.outputs)
        direction = rng.normal(size=loss.outputs)
        direction /= np.linalg.norm(direction)
        curvatures.append(slope(loss, base, direction, 1e-4) @ direction)
    assert max(curvatures) <= loss.on([]).max_curvature * (1 + 1e-6)
    # the bound is not a loose one: two even classes reach it
    bound = loss.on([]).max_curvature
    assert bound == np.inf or max(curvatures) > 0.5 * bound


@each_loss
@pytest.mark.parametrize("rho", RHOS, ids=lambda rho: f"{rho:.0e}")
def test_prox_is_stationary_everywhere(loss, rho):
    rng = default_rng(7)
    scales = np.repeat([0.01, 1.0, 30.0, 1e4], 12)
    centre = scales[:, None] * rng.uniform(-1, 1, (48, loss.outputs))
    centre[36:42], centre[42:] = 1e4, -1e4
    centre[41, 0], centre[47, 0] = -1e4, 1e4
    labels = loss.labels(rng, 48)
    rng.shuffle(labels)
    start = rng.permutation(centre) / 10
    bound = loss.on(labels)
    for z in (bound.prox(centre, rho), bound.prox(centre, rho, start)):
        assert z.shape == centre.shape
        rows = zip(z, centre, labels, strict=True)
        gradients = [np.abs(slow.prox_gradient(loss.name, *r, rho)).max() for r in rows]
        # where the curvature is 1e7, the last bit of z tells more than that
        last_bit = np.spacing(np.abs(z)) * (bound.hessian(z) + rho)
        allowed = np.maximum(PROX_GRADIENT, 2.0 * last_bit.max(axis=1))
        if loss.name not in slow.VARIANCES:
            allowed[:] = PROX_GRADIENT
        assert np.all(np.array(gradients, float) <= allowed)


@each_loss
@pytest.mark.parametrize("rho", [1e-3, 0.05, 1.0, 1e3])
def test_prox_is_the_brute_force_minimum(loss, rho):
    centre, labels = problem(loss, rows=6)
    start = centre + 1.0
    before = centre.copy(), labels.copy(), start.copy()
    actual = loss.on(labels).prox(centre, rho, start=start)
    for array, copy in zip((centre, labels, start), before, strict=True):
        assert_array_equal(array, copy)
    rows = [*zip(centre, labels, strict=True)]
    expected = [slow.brute_prox(loss.name, *row, rho) for row in rows]
    # at 1e-3 the minimum is flat: a gradient of 1e-8 is 1e-5 from it
    assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    for z, other, (v, y) in zip(actual, expected, rows, strict=True):
        values = [
            slow.row_value(loss.name, point, y) + rho / 2 * ((point - v) ** 2).sum()
            for point in (z, other)
        ]
        assert values[0] <= values[1] + 1e-12


@each_loss
def test_prox_of_many_rows_is_the_prox_of_each(loss):
    centre, labels = problem(loss, rows=9000)
    together = loss.on(labels).prox(centre, 0.3)
    for row in (0, 1, 8191, 8192, 8999):
        alone = loss.on(labels[row : row + 1]).prox(centre[row : row + 1], 0.3)
        assert_allclose(together[row], alone[0], atol=1e-6)


def noisy_problem(case):
    loss = CASES[case]
    rng = default_rng(loss.classes)
    labels = loss.labels(rng, 12)
    return loss, 2 * rng.normal(size=(12, loss.outputs)), labels


def mean_over_noise(noise, labels, function):
    """The exact mean of function(noisy labels), class by class."""
    total = 0.0
    for other in range(noise.classes):
        chance = np.where(labels == other, noise.keep, noise.flip)
        value = function(np.full_like(labels, other))
        total = total + chance.reshape((-1,) + (1,) * (value.ndim - 1)) * value
    return total


@each
def test_the_mean_over_the_noise_is_the_plain_loss_and_gradient(case):
    loss, scores, labels = noisy_problem(case)
    for name in ("row_values", "gradient"):
        actual = mean_over_noise(
            loss.noise, labels, lambda y, name=name: getattr(loss.on(y), name)(scores)
        )
        plain = getattr(loss.plain.on(labels), name)(scores)
        assert_allclose(actual, plain, atol=1e-12)


@each
def test_the_loss_is_that_of_the_soft_label(case):
    loss, scores, labels = noisy_problem(case)
    noise = loss.noise
    soft = (np.eye(noise.classes)[labels.astype(int)] - noise.flip) / noise.contrast
    assert_allclose(soft.sum(axis=1), 1.0)
    classes = range(noise.classes)
    every = [[slow.row_value(loss.name, row, y) for y in classes] for row in scores]
    expected = (soft * np.array(every, float)).sum(axis=1)
    assert_allclose(loss.on(labels).row_values(scores), expected, atol=1e-12)
    assert loss.on(labels).value(scores) == pytest.approx(expected.mean())
    # the numbers that bound a gradient: 1 + (k - 1) c above, c below
    assert soft.max() == pytest.approx(1 + (noise.classes - 1) * noise.correction)
    assert soft.min() == pytest.approx(-noise.correction)


@settings(max_examples=60)
@given(
    case=st.sampled_from(sorted(CASES)),
    keep=st.floats(0.02, 1.0),
    log_rho=st.floats(-3, 3),
    data=st.data(),
)
def test_prox_law_stationary_for_any_row_and_noise(case, keep, log_rho, data):
    plain = CASES[case].plain
    # anything above 1/k speaks for its class
    least = 1 / plain.classes
    noise = ClassNoise(plain.classes, least + keep * (1 - least))
    loss = Family(plain.name, plain.classes, noise)
    size = plain.outputs
    centre = data.draw(st.lists(st.floats(-1e3, 1e3), min_size=size, max_size=size))
    label = np.array([float(data.draw(st.integers(0, noise.classes - 1)))])
    rho = 10.0**log_rho
    z = loss.on(label).prox(np.array([centre]), rho)
    gap = loss.on(label).gradient(z) + rho * (z - np.array([centre]))
    # rounding of rho * (z - v), whose size is that of the soft label
    assert np.abs(gap).max() <= 2e-8 + 1e-12 * rho * np.abs(centre).max()


@each
def test_no_noise_is_no_correction(case):
    _, scores, labels = noisy_problem(case)
    family = CASES[case].plain
    noise = ClassNoise(family.classes, 1.0)
    plain = family.on(labels)
    loss = Family(family.name, family.classes, noise).on(labels)
    assert_array_equal(loss.row_values(scores), plain.row_values(scores))
    assert_array_equal(loss.gradient(scores), plain.gradient(scores))
    assert_array_equal(loss.prox(scores, 0.3), plain.prox(scores, 0.3))
    assert loss.metrics(scores) == plain.metrics(scores)
    assert_allclose(loss.base_score, plain.base_score, atol=1e-14)


@each
def test_base_score_is_that_of_the_true_rates(case):
    loss = CASES[case]
    noise = loss.noise
    k = loss.classes
    rows = 60_000
    true = np.repeat(np.arange(k), rows * np.arange(1, k + 1) // (k * (k + 1) // 2))
    plan = LabelPlan("randomised-response", noise.epsilon, tuple(map(str, range(k))))
    noisy = plan.draw_classes(true, NoiseSource(KEY)).astype(float)
    actual = loss.on(noisy).base_score
    assert actual.shape == (loss.outputs,)
    expected = loss.plain.on(true).base_score
    # of several classes the differences count
    centred = [each - each.mean() * (len(each) > 1) for each in (actual, expected)]
    assert_allclose(*centred, atol=0.12)


def test_base_score_of_a_class_that_noise_alone_shows_is_finite():
    noise = ClassNoise(3, 0.5)
    # fewer of class 2 than the noise makes of nothing
    labels = np.repeat([0.0, 1.0, 2.0], [450, 330, 220])
    base = Family("softmax", 3, noise).on(labels).base_score
    assert np.isfinite(base).all()
    rates = np.exp(base)
    assert rates.sum() == pytest.approx(1.0)
    error = np.sqrt(0.25 * 0.75 / 1000) / 0.25
    assert rates[2] == pytest.approx(error / (0.8 + 0.32 + error))


def test_numbers_lose_half_the_noises_variance_and_nothing_else():
    noise = NumberNoise(1.5)
    family = Family("squared", 0, noise)
    rng = default_rng(0)
    scores = rng.normal(size=(200_000, 1))
    true = rng.normal(size=200_000)
    noisy = NoiseSource(KEY).with_laplace(true, noise.scale)
    loss = family.on(noisy)
    plain = family.plain.on(noisy)
    true_loss = family.plain.on(true)
    # the mean of 200 000 squares of Laplace noise: deviation 2.2 * 4.5 / 447
    assert loss.value(scores) == pytest.approx(true_loss.value(scores), abs=0.1)
    assert_array_equal(loss.gradient(scores), plain.gradient(scores))
    assert_array_equal(loss.prox(scores, 0.7), plain.prox(scores, 0.7))
    assert_array_equal(loss.base_score, [noisy.mean()])
    # a network's scores are of the size of the true labels
    objective = make_objective("squared", Target.of(noisy, noise=noise))
    assert objective.output_scale == pytest.approx(true.std(), rel=0.05)
    drowned = make_objective("squared", Target.of(true, noise=noise))
    assert drowned.output_scale == pytest.approx(0.1 * true.std())
    assert loss.curvature(np.zeros(1)) == 1.0
    assert loss.max_curvature == 1.0
    assert loss.name == "squared"
    actual = loss.metrics(scores)
    expected = true_loss.metrics(scores)
    assert actual["rmse"] == pytest.approx(expected["rmse"], rel=0.03)
    assert actual["r2"] == pytest.approx(expected["r2"], abs=0.1)


def test_estimates_below_no_error():
    labels = np.array([0.0, 1.0, 0.0, 1.0])
    far = Family("squared", 0, NumberNoise(10.0)).on(labels)
    metrics = far.metrics(np.zeros((4, 1)))
    assert metrics["loss"] == 0.25 - 100.0
    assert np.isnan([metrics["rmse"], metrics["r2"]]).all()
    near = Family("squared", 0, NumberNoise(0.1)).on(labels)
    metrics = near.metrics(labels[:, None])
    assert metrics["loss"] == pytest.approx(-0.01)
    assert metrics["rmse"] == 0.0
    assert metrics["r2"] == 1.0


@pytest.mark.parametrize("mechanism", ["laplace", "randomised-response"])
@each
def test_metrics_on_held_out_rows_are_those_against_true_labels(case, mechanism):
    plain = CASES[case].plain
    k = plain.classes
    rng = default_rng(5)
    rows = 200_000
    scores = 1.5 * rng.normal(size=(rows, plain.outputs))
    logits = scores if plain.outputs > 1 else np.hstack([0 * scores, scores])
    logits = logits + 0.7 * np.arange(k)
    true = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    plan = LabelPlan(mechanism, 2.0, tuple(map(str, range(k))))
    noisy = plan.draw_classes(true, NoiseSource(KEY)).astype(float)
    actual = Family(plain.name, k, plan.noise).on(noisy).metrics(scores)
    expected = plain.on(true).metrics(scores)
    uncorrected = plain.on(noisy).metrics(scores)
    for name, value in expected.items():
        # six standard errors of the noisiest: soft labels of deviation about 2 c
        tolerance = 6 * 3 * (1 + k * plan.noise.correction) / np.sqrt(rows)
        assert actual[name] == pytest.approx(value, abs=tolerance), name
        assert abs(uncorrected[name] - value) > 2 * abs(actual[name] - value), name


def test_the_auc_of_a_class_that_noise_alone_shows_is_unknown():
    noise = ClassNoise(2, 0.7)
    labels = np.repeat([0.0, 1.0], [80, 20])
    scores = np.linspace(-1, 1, 100)[:, None]
    metrics = Family("logistic", 2, noise).on(labels).metrics(scores)
    assert np.isnan(metrics["auc"])
    assert auc(scores[:, 0], labels > 0.5) == 1.0


def test_noise_of_another_kind_is_refused():
    for family in (
        Family("logistic", 2, NumberNoise(1.0)),
        Family("squared", 0, ClassNoise(2, 0.9)),
        Family(KMEANS, 2, ClassNoise(2, 0.9)),
    ):
        with pytest.raises(TypeError, match="is not noise for"):
            family.on([0.0])


@pytest.mark.parametrize(("rows", "groups"), [(9, 0), (25, 2), (400, 10)])
def test_no_mean_of_a_tenth_is_of_few_rows(rows, groups):
    labels = np.arange(float(rows))
    means = means_by_tenth(RankedRows.of(labels, labels))
    assert len(means) == groups
    assert all(each["rows"] >= 10 for each in means)
    assert all(each["predicted"] == each["actual"] for each in means)
