"""Units of privacy: what a whole unit changes is within the bound, whatever its rows.

The neighbours of a table are made by brute force: for each unit, the table in which
zeros stand for all that the unit adds.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from tests.support.examples.fits import fit_problem, with_ones
from tests.support.examples.networks import torch_model
from tp_flower.learning.models.local_model import LinearModel, LocalModel
from tp_flower.privacy.gradients import PrivateFit, clipped_sum, fit_privately
from tp_flower.privacy.statistics_update import (
    Rows,
    StatisticsPlan,
    noisy_gram,
    noisy_moments,
)
from tp_flower.privacy.units import Units
from tp_flower.randomness import KEY_BYTES, NoiseSource

few = settings(max_examples=40)
seeds = st.integers(0, 999)
KEY = bytes([1]) * KEY_BYTES
CLIP = 1.5
SLACK = 1 + 1e-9
PLAN = StatisticsPlan(3.0, 0.7, 0.0, 0.0)


def people(seed: int) -> tuple[np.ndarray, ...]:
    """Features, messages and multiplicities of people with 1 to many rows."""
    rows = 40
    rng = default_rng(seed)
    codes = rng.permutation(np.minimum(rng.geometric(0.2, rows), 12))
    features = rng.normal(size=(rows, 3)) * rng.gamma(0.5, 4.0, (rows, 1))
    # the rows of person 1 are alike, so that nothing cancels
    features[codes == 1] = features[0]
    messages = rng.normal(size=(rows, 2)) * rng.gamma(0.5, 4.0, (rows, 1))
    messages[codes == 1] = messages[0]
    return codes, features.astype(np.float32), messages, rng.integers(0, 9, rows)


def linear() -> LocalModel:
    return LinearModel(3, 2, intercept=True)


def mlp() -> LocalModel:
    return torch_model(3, 2, hidden_sizes=(4,), seed=2)


each_model = pytest.mark.parametrize("make", [linear, mlp])


def change_of_sum(model, codes, features, messages, *, by_unit=True) -> float:
    """The largest change of a clipped sum, by unit or by row, without one unit."""

    def statistic(stays):
        units = Units(codes[stays]) if by_unit else None
        return clipped_sum(model, features[stays], messages[stays], CLIP, units)

    whole = statistic(np.ones(len(codes), bool))
    return max(np.linalg.norm(whole - statistic(codes != u)) for u in np.unique(codes))


@each_model
@few
@given(seed=seeds, scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_a_unit_changes_a_clipped_sum_by_the_clip_at_most(make, seed, scale):
    codes, features, messages, _ = people(seed)
    change = change_of_sum(make(), codes, features, scale * messages)
    assert change <= CLIP * SLACK


def test_a_clip_of_rows_would_not_bound_a_unit():
    codes, features, messages, _ = people(0)
    most = np.bincount(codes).max()
    change = change_of_sum(linear(), codes, features, 1e3 * messages, by_unit=False)
    assert 2 * CLIP < change <= most * CLIP * SLACK


def test_the_bounds_are_reached():
    """Rows that are alike add up: the sensitivities are no larger than needed."""
    features = np.ones((6, 3), np.float32)
    messages = np.full((6, 2), 9.0)
    units = Units(np.zeros(6, int))
    counts = np.full(6, 4)
    for model in (linear(), mlp()):
        total = clipped_sum(model, features, messages, CLIP, units)
        assert np.linalg.norm(total) == pytest.approx(CLIP, rel=1e-4)
    rows = Rows(features, counts, intercept=True, units=units)
    assert np.linalg.norm(noisy_gram(PLAN, rows, NoiseSource(KEY))) == pytest.approx(
        9.0
    )
    assert np.linalg.norm(
        noisy_moments(PLAN, rows, messages, NoiseSource(KEY))
    ) == pytest.approx(2.1)


@each_model
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_a_row_that_is_not_finite_changes_no_bound(make, value):
    codes, features, messages, _ = people(3)
    messages[np.flatnonzero(codes == 1)[0]] = value
    assert change_of_sum(make(), codes, features, messages) <= CLIP * SLACK


@few
@given(seed=seeds)
def test_clipped_sum_of_a_linear_model_equals_a_loop_over_units(seed):
    codes, features, messages, _ = people(seed)
    wide = with_ones(features)
    expected = np.zeros((4, 2))
    for unit in np.unique(codes):
        own = codes == unit
        gradient = wide[own].T @ messages[own]
        expected += gradient * min(1.0, CLIP / np.linalg.norm(gradient))
    total = clipped_sum(linear(), features, messages, CLIP, Units(codes))
    assert_allclose(total, expected.ravel(), atol=1e-9)


def test_clipped_sum_of_a_torch_model_equals_a_loop_over_units():
    codes, features, messages, _ = people(6)
    sizes = np.bincount(codes)
    expected = [
        clipped_sum(mlp(), features[own], messages[own], CLIP / sizes[codes[own][0]])
        for own in ([number] for number in range(len(codes)))
    ]
    total = clipped_sum(mlp(), features, messages, CLIP, Units(codes))
    assert_allclose(total, sum(expected), rtol=1e-4, atol=1e-5)


@few
@given(seed=seeds)
def test_statistics_equal_a_loop_over_units(seed):
    codes, features, residual, counts = people(seed)
    wide = with_ones(features)
    matrix = np.zeros((4, 4))
    sums = np.zeros((4, 2))
    for unit in np.unique(codes):
        own = codes == unit
        size = (counts[own] * (wide[own] ** 2).sum(axis=1)).sum()
        weights = counts[own] * min(1.0, 9.0 / size if size else 1.0)
        matrix += (wide[own].T * weights) @ wide[own]
        part = wide[own].T @ (weights[:, None] * residual[own])
        sums += part * min(1.0, 2.1 / max(np.linalg.norm(part), 1e-30))
    rows = Rows(features, counts, intercept=True, units=Units(codes))
    assert_allclose(noisy_gram(PLAN, rows, NoiseSource(KEY)), matrix, atol=1e-9)
    assert_allclose(
        noisy_moments(PLAN, rows, residual, NoiseSource(KEY)), sums, atol=1e-9
    )


@each_model
def test_units_of_one_row_are_clipped_as_rows(make):
    _, features, messages, counts = people(1)
    units = Units(default_rng(0).permutation(len(features)))
    by_unit = clipped_sum(make(), features, messages, CLIP, units)
    by_row = clipped_sum(make(), features, messages, CLIP)
    assert_allclose(by_unit, by_row, rtol=1e-6, atol=1e-7)
    both = [Rows(features, counts, True, own) for own in (units, None)]
    assert_allclose(
        *[noisy_gram(PLAN, own, NoiseSource(KEY)) for own in both], rtol=1e-9
    )


@each_model
def test_the_size_of_blocks_changes_nothing(make, monkeypatch):
    codes, features, messages, _ = people(2)
    units = Units(codes)
    whole = clipped_sum(make(), features, messages, CLIP, units)
    monkeypatch.setattr("tp_flower.learning.models.neural.EVALUATION_ROWS", 3)
    monkeypatch.setattr("tp_flower.privacy.units._BLOCK_VALUES", 20)
    chunked = clipped_sum(make(), features, messages, CLIP, units)
    assert_allclose(chunked, whole, rtol=1e-5, atol=1e-6)


def test_whole_units_are_sampled_at_the_rate():
    codes = default_rng(0).integers(0, 2000, 6000)
    rows = Units(codes).sample(0.3, NoiseSource(KEY))
    drawn = np.unique(codes[rows])
    count = len(np.unique(codes))
    assert np.isin(codes, drawn).sum() == len(rows)
    # five deviations of a binomial
    assert abs(len(drawn) - 0.3 * count) < 5 * math.sqrt(0.21 * count)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_a_fit_takes_units_whole_and_clips_them_together(rate, monkeypatch):
    codes, features, messages, counts = people(4)
    units = Units(codes)
    steps = []

    def clipped(model, rows, messages, clip, of_rows):
        assert len(messages) == len(rows)
        steps.append((of_rows.codes, clip))
        return np.zeros(len(model.penalised))

    monkeypatch.setattr("tp_flower.privacy.gradients.clipped_sum", clipped)
    model = linear()
    problem = replace(
        fit_problem(model),
        features=features,
        multiplicity=np.maximum(counts, 1),
        target=messages,
    )
    plan = PrivateFit(2.0, 1e-9, sample_rate=rate, steps=9, unit_norm=3.0)
    fit_privately(model, problem, plan, NoiseSource(KEY), units)
    sizes = np.bincount(codes)
    for of_rows, clip in steps:
        assert clip == 6.0
        drawn = np.bincount(of_rows, minlength=len(sizes))
        assert_array_equal(drawn[drawn > 0], sizes[drawn > 0])
        assert rate < 1 or len(of_rows) == len(codes)
    assert len(steps) == 9
    assert rate == 1 or len({len(of_rows) for of_rows, _ in steps}) > 1
