"""The private theta-update: sensitivities, noise, and what is left without noise."""

from math import inf, nan, sqrt

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from tests.support.examples.fits import with_ones
from tp_flower.errors import SiteError
from tp_flower.learning.models.local_model import moment
from tp_flower.learning.solvers import RidgeSolver, exact_update, gram
from tp_flower.privacy.plan import PartPlan, Schedule, plan_statistics
from tp_flower.privacy.statistics_update import (
    GRAM_SHARE,
    Rows,
    StatisticsPlan,
    noisy_gram,
    noisy_moments,
    usable_gram,
)
from tp_flower.privacy.units import Units
from tp_flower.randomness import KEY_BYTES, NoiseSource
from tp_flower.settings import PrivacySettings

few = settings(max_examples=60)
CLEAR = StatisticsPlan(inf, inf, 0.0, 0.0)
KAPPA = 0.6
L2 = 1e-3


def noise() -> NoiseSource:
    return NoiseSource(b"\1" * KEY_BYTES)


def rows_of(seed: int, count: int = 40, columns: int = 4, intercept: bool = True):
    """Rows of very different lengths; one of zeros, one in no joined row."""
    rng = default_rng(seed)
    features = rng.normal(size=(count, columns)) * rng.gamma(0.5, 4.0, (count, 1))
    features[1] = 0.0
    multiplicity = rng.integers(0, 30, count)
    multiplicity[:3] = [1, 25, 0]
    return Rows(features.astype(np.float32), multiplicity, intercept)


def dense(rows: Rows) -> np.ndarray:
    return with_ones(rows.features, rows.intercept)


def without(rows: Rows, number: int) -> Rows:
    """The zero-out neighbour: the row's summands are gone, its number stays."""
    multiplicity = rows.multiplicity.copy()
    multiplicity[number] = 0
    return Rows(rows.features, multiplicity, rows.intercept)


def no_rows(columns: int, *, intercept: bool) -> Rows:
    features = np.zeros((0, columns), np.float32)
    return Rows(features, np.zeros(0, np.int64), intercept)


@few
@given(seed=st.integers(0, 999), intercept=st.booleans(), outputs=st.integers(1, 3))
def test_without_noise_the_update_is_the_exact_one(seed, intercept, outputs):
    rows = rows_of(seed, intercept=intercept)
    rng = default_rng(seed)
    theta = rng.normal(size=(4 + intercept, outputs))
    target = rng.normal(size=(40, outputs))
    joined = int(rows.multiplicity.sum())

    clear = gram(rows.features, rows.multiplicity, intercept=intercept)
    solver = RidgeSolver.from_gram(clear, joined, intercept=intercept)
    weighted = rows.multiplicity[:, None] * target
    expected = solver.solve(
        moment(rows.features, weighted, intercept=intercept), KAPPA, L2
    )

    residual = KAPPA * (target - dense(rows) @ theta)
    # bounds that no row reaches change nothing
    for plan in (StatisticsPlan(1e6, 1e6, 0.0, 0.0), CLEAR):
        matrix = usable_gram(noisy_gram(plan, rows, noise()), 0.0)
        assert_array_equal(matrix, clear)
        sums = noisy_moments(plan, rows, residual, noise())
    private = RidgeSolver.from_gram(matrix, joined, intercept=intercept)
    updated = exact_update(private, theta, sums / KAPPA, KAPPA, L2)
    assert_allclose(updated, expected, rtol=1e-8, atol=1e-10)


@few
@given(seed=st.integers(0, 999), intercept=st.booleans())
def test_sums_of_reweighted_rows_equal_a_loop_over_rows(seed, intercept):
    rows = rows_of(seed, intercept=intercept)
    residual = default_rng(seed).normal(size=(40, 2))
    plan = StatisticsPlan(3.0, 0.7, 0.0, 0.0)
    matrix = np.zeros((4 + intercept,) * 2)
    sums = np.zeros((4 + intercept, 2))
    for x, g, q in zip(dense(rows), rows.multiplicity, residual, strict=True):
        weight = 9.0 / (x @ x) if g * (x @ x) > 9.0 else g
        size = sqrt(weight) * np.linalg.norm(q)
        clipped = q * (0.7 / size) if size > 0.7 else q
        matrix += weight * np.outer(x, x)
        sums += weight * np.outer(x, clipped)
    assert_allclose(noisy_gram(plan, rows, noise()), matrix)
    moments = noisy_moments(plan, rows, residual, noise())
    assert_allclose(moments, sums, atol=1e-12)


@pytest.mark.parametrize("codes", [None, np.arange(40) // 3])
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_rows_that_are_not_finite_count_as_zero(value, codes):
    rows = rows_of(3)
    plan = StatisticsPlan(3.0, 0.7, 1.0, 1.0)
    units = None if codes is None else Units(codes)
    features = rows.features.copy()
    others = np.arange(40) != 4
    features[4, 1] = value
    spoilt = Rows(features, rows.multiplicity, rows.intercept, units)
    clean = spoilt.only(others)
    # with the row's score its target is not finite either
    residual = np.where(others, 1.0, value)[:, None]
    assert_array_equal(
        noisy_gram(plan, spoilt, noise()), noisy_gram(plan, clean, noise())
    )
    assert_array_equal(
        noisy_moments(plan, spoilt, residual, noise()),
        noisy_moments(plan, clean, residual[others], noise()),
    )


BOUNDED = StatisticsPlan(2.5, 0.4, 0.0, 0.0)


@few
@given(seed=st.integers(0, 999), intercept=st.booleans(), size=st.floats(-3, 3))
def test_no_row_changes_a_sum_by_more(seed, intercept, size):
    rows = rows_of(seed, intercept=intercept)
    residual = default_rng(seed).normal(size=(40, 2)) * 10.0**size
    whole = noisy_gram(BOUNDED, rows, noise())
    sums = noisy_moments(BOUNDED, rows, residual, noise())
    changes = []
    for number in range(40):
        other = without(rows, number)
        matrix = whole - noisy_gram(BOUNDED, other, noise())
        moments = sums - noisy_moments(BOUNDED, other, residual, noise())
        changes.append([np.linalg.norm(matrix), np.linalg.norm(moments)])
    largest = np.max(changes, axis=0)
    bounds = np.array([2.5**2, 2.5 * 0.4])
    assert (largest <= bounds * (1 + 1e-9)).all()
    # and the bound of A is reached: these rows are long
    assert largest[0] == pytest.approx(bounds[0])


def test_the_bound_of_moments_is_reached():
    rows = Rows(np.array([[9.0]], np.float32), np.array([50]), False)
    sums = noisy_moments(BOUNDED, rows, np.array([[-70.0]]), noise())
    assert sums.item() == pytest.approx(-2.5 * 0.4)


DRAWS = 300
NOISY = StatisticsPlan(1.5, 0.4, 3.0, 2.0)
NOISELESS = StatisticsPlan(1.5, 0.4, 0.0, 0.0)


def test_deviations_of_the_gram_matrix():
    """Symmetric; s on the diagonal and s / sqrt(2) off it, independent."""
    rows = rows_of(0, columns=29)
    clear = noisy_gram(NOISELESS, rows, noise())
    source = noise()
    draws = [noisy_gram(NOISY, rows, source) for _ in range(DRAWS)]
    noisy = np.stack(draws)
    assert_array_equal(noisy, noisy.swapaxes(1, 2))
    errors = noisy - clear
    s = 3.0 * 1.5**2
    assert NOISY.gram_deviation == pytest.approx(s)
    diagonal = np.diagonal(errors, axis1=1, axis2=2)
    upper = errors[:, *np.triu_indices(30, 1)]
    # the standard error of a deviation is s / sqrt(2 n): four of them here
    assert diagonal.std() == pytest.approx(s, rel=4 / sqrt(2 * diagonal.size))
    expected = s / sqrt(2.0)
    assert upper.std() == pytest.approx(expected, rel=4 / sqrt(2 * upper.size))
    assert abs(upper.mean()) < 4 * expected / sqrt(upper.size)
    # the noise is isotropic in the Frobenius norm: p (p + 1) / 2 dimensions
    assert (errors**2).sum(axis=(1, 2)).mean() == pytest.approx(
        s**2 * 30 * 31 / 2, rel=0.02
    )


def test_deviation_of_the_moments():
    """The noise of the source, whose law is tested there; anew at every use."""
    empty = no_rows(4, intercept=True)
    source = noise()
    again = noise()
    for rows in (rows_of(0), rows_of(0), empty):
        residual = np.ones((len(rows.features), 200))
        exact = noisy_moments(NOISELESS, rows, residual, noise())
        expected = again.with_gaussian(exact, 2.0 * 1.5 * 0.4)
        actual = noisy_moments(NOISY, rows, residual, source)
        assert_array_equal(actual, expected)
    assert np.abs(noisy_gram(NOISY, empty, noise())).min() > 0


@pytest.mark.parametrize("shards", [1, 3])
def test_noise_alone_becomes_a_positive_matrix(shards):
    """All true eigenvalues are 0; the noise's are within its spectral norm."""
    plan = StatisticsPlan(1.0, 1.0, 2.0, 1.0)
    rows = no_rows(60, intercept=False)
    source = noise()
    total = sum(noisy_gram(plan, rows, source) for _ in range(shards))
    norm = plan.gram_deviation * sqrt(2.0 * shards * 60)
    assert np.linalg.norm(total, 2) == pytest.approx(norm, rel=0.15)
    values = np.linalg.eigvalsh(usable_gram(total, plan.gram_deviation * sqrt(shards)))
    assert values.min() == pytest.approx(norm)
    assert values.max() < 2.2 * norm


def test_a_noisy_gram_matrix_does_not_change_what_training_converges_to():
    """Repeated updates with one A reach the ridge solution of the rows."""
    rows = rows_of(3, count=400)
    target = default_rng(3).normal(size=(400, 1))
    joined = int(rows.multiplicity.sum())
    plan = StatisticsPlan(1e3, 1e6, 1e-4, 0.0)
    matrix = usable_gram(noisy_gram(plan, rows, noise()), plan.gram_deviation)
    exact = gram(rows.features, rows.multiplicity, intercept=True)
    assert np.linalg.norm(matrix - exact) > 100.0
    solver = RidgeSolver.from_gram(matrix, joined, intercept=True)
    theta = np.zeros((5, 1))
    for _ in range(200):
        moments = noisy_moments(
            plan, rows, KAPPA * (target - dense(rows) @ theta), noise()
        )
        theta = exact_update(solver, theta, moments / KAPPA, KAPPA, L2)
    best = RidgeSolver.from_gram(exact, joined, intercept=True).solve(
        dense(rows).T @ (rows.multiplicity[:, None] * target), KAPPA, L2
    )
    assert_allclose(theta, best, rtol=1e-6)


SCHEDULE = Schedule(epochs=12, mean_multiplicity=9.0, columns=4, label_scale=30.0)


def test_bounds_of_a_plan_have_natural_units():
    settings = PrivacySettings(features="statistics", clip=2.0, target_clip=0.5)
    plan = plan_statistics(settings, SCHEDULE)
    assert plan.radius == pytest.approx(2.0 * sqrt(9.0 * 4))
    assert plan.target_bound == pytest.approx(15.0)
    # a table without rows to train on has a plan
    no_rows = Schedule(3, mean_multiplicity=0.0, columns=0)
    assert plan_statistics(settings, no_rows).radius == 2.0


@pytest.mark.parametrize("changes", [{"epsilon": 0.5}, {"noise_multiplier": 7.0}])
def test_the_gram_matrix_has_its_share_of_the_budget(changes):
    plan = plan_statistics(PrivacySettings(features="statistics", **changes), SCHEDULE)
    of_gram = 1 / plan.gram_multiplier**2
    total = of_gram + 12 / plan.moments_multiplier**2
    assert of_gram / total == pytest.approx(GRAM_SHARE)
    multiplier = changes.get("noise_multiplier", plan.moments_multiplier)
    assert plan.moments_multiplier == multiplier


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"radius": 0.0}, "multiplier 6.8 times clip 0 gives no noise"),
        ({"radius": -1}, "multiplier 15.4 times clip -0.5 gives no noise"),
        ({"radius": nan}, "times clip nan gives no noise"),
        ({"radius": inf}, "times clip inf gives no noise"),
        ({"radius": 1e300}, "times clip inf gives no noise"),
        ({"target_bound": inf}, "times clip inf gives no noise"),
        ({"gram_multiplier": -0.1}, "multiplier -0.1 times clip 4 gives no noise"),
        ({"moments_multiplier": inf}, "multiplier inf times"),
    ],
)
def test_a_plan_that_bounds_nothing_is_refused(change, words):
    data = msgspec.to_builtins(PartPlan(statistics=StatisticsPlan(2.0, 0.5, 6.8, 15.4)))
    data["statistics"] |= change
    with pytest.raises((SiteError, ValueError), match=words):
        msgspec.convert(data, PartPlan)


def test_a_negative_multiplicity_is_refused():
    with pytest.raises(SiteError, match="a multiplicity is negative"):
        Rows(np.ones((2, 1), np.float32), np.array([1, -1]), True)


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_a_target_without_size_is_refused(value):
    residual = np.array([[0.0], [value]])
    rows = Rows(np.ones((2, 1), np.float32), np.array([1, 0]), True)
    with pytest.raises(SiteError, match="a target is not finite"):
        noisy_moments(CLEAR, rows, residual, noise())
