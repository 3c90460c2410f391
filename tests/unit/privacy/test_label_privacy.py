"""Labels: noise of the stated probabilities, and plans that a site can trust."""

import itertools
import math
from unittest.mock import patch

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.integrate import quad

from tests.support.files import case_table
from tp_flower.errors import SettingsError
from tp_flower.privacy.label_mechanisms import (
    MAX_EPSILON,
    MIN_EPSILON,
    NOISE_VALUES,
    ClassNoise,
    LabelPlan,
    NumberNoise,
    epsilon_of_noise,
    laplace_keep,
    noisy_argmax,
    randomised_response,
    response_keep,
)
from tp_flower.randomness import NoiseSource

DRAWS = 1_000_000
KEY = bytes(range(32))
EPSILONS = (0.5, 1.0, 2.0, epsilon_of_noise(0.5))
TOO_MANY = {"classes": [str(k) for k in range(1001)]}, "not 1001"


def integrated_keep(classes: int, epsilon: float) -> float:
    """P(1 + n_0 > max n_j) by adaptive quadrature over n_0, away from the kinks."""
    b = 2.0 / epsilon

    def integrand(x):
        tail = 0.5 * math.exp(-abs(1 + x) / b)
        below = tail if x < -1 else 1 - tail
        return math.exp(-abs(x) / b) / (2 * b) * below ** (classes - 1)

    pieces = itertools.pairwise([-1 - 50 * b, -1 - 5 * b, -1, 0, b, 5 * b, 50 * b])
    return sum(quad(integrand, *piece, epsabs=1e-14)[0] for piece in pieces)


@pytest.mark.parametrize("classes", [2, 3, 5, 40, 1000])
@pytest.mark.parametrize("epsilon", [MIN_EPSILON, 0.3, 2.0, 5.657, 40.0, MAX_EPSILON])
def test_keep_of_laplace_is_the_integral(classes, epsilon):
    expected = integrated_keep(classes, epsilon)
    assert laplace_keep(classes, epsilon) == pytest.approx(expected, abs=1e-12)


@pytest.mark.cases(
    "0.5-2-laplace",
    "0.5-3-randomised-response",
    "1.0-3-laplace",
    "1.0-7-randomised-response",
    "2.0-7-laplace",
    "2.0-2-randomised-response",
    "5.6*-2-laplace",
    "5.6*-7-randomised-response",
)
@pytest.mark.parametrize("mechanism", ["laplace", "randomised-response"])
@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_classes_change_as_often_as_stated(mechanism, classes, epsilon):
    plan = LabelPlan(mechanism, epsilon, tuple(map(str, range(classes))))
    true = np.arange(DRAWS) % classes
    noisy = plan.draw_classes(true, NoiseSource(KEY))
    counts = np.zeros((classes, classes))
    np.add.at(counts, (true, noisy), 1)
    noise = plan.noise
    expected = np.full((classes, classes), noise.flip)
    np.fill_diagonal(expected, noise.keep)
    of_class = counts.sum(axis=1, keepdims=True)
    error = np.sqrt(expected * (1 - expected) / of_class)
    assert (np.abs(counts / of_class - expected) < 4.5 * error).all()


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_likelihoods_are_within_e_to_the_epsilon(classes, epsilon):
    response = ClassNoise(classes, response_keep(classes, epsilon))
    laplace = ClassNoise(classes, laplace_keep(classes, epsilon))
    assert response.epsilon == pytest.approx(epsilon, rel=1e-12)
    # the argmax tells less than the noisy vector that Eq. 25 is about
    assert 0.4 * epsilon < laplace.epsilon < 0.6 * epsilon
    assert response.keep > laplace.keep
    for noise in (response, laplace):
        assert noise.keep + (classes - 1) * noise.flip == pytest.approx(1.0)


def test_blocks_of_the_argmax_cover_all_rows():
    classes = 1000
    true = np.arange(2 * NOISE_VALUES // classes + 7) % classes
    noisy = noisy_argmax(true, classes, MAX_EPSILON, NoiseSource(KEY))
    assert_array_equal(noisy, true)
    # a response is a class whatever the uniform numbers
    with patch.object(NoiseSource, "uniform", lambda _, n: np.full(n, 1 - 2**-53)):
        out = randomised_response(np.arange(4) % 3, 3, 0.1, NoiseSource())
    assert_array_equal(out, [2, 0, 1, 2])


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_numbers_are_clipped_and_get_the_laplace_noise_of_the_range(epsilon):
    plan = LabelPlan("laplace", epsilon, limits=(1.0, 5.0))
    assert plan.noise == NumberNoise(4.0 / epsilon)
    values = np.repeat([-1e9, 1.0, 2.5, 7.0], DRAWS // 4)
    expected = NoiseSource(KEY).with_laplace(np.clip(values, 1.0, 5.0), 4.0 / epsilon)
    noisy = plan.draw_numbers(values, NoiseSource(KEY))
    assert_array_equal(noisy, expected)
    variance = (noisy - np.clip(values, 1.0, 5.0)).var()
    assert variance == pytest.approx(plan.noise.variance, rel=0.02)


def test_noise_of_the_paper_by_hand():
    assert epsilon_of_noise(0.5) == pytest.approx(2 * math.sqrt(2) / 0.5)
    # a number from 1 to 5 moves by at most 4: eps = 4 / b, b = 0.5 / sqrt 2
    assert epsilon_of_noise(0.5, (1.0, 5.0)) == pytest.approx(4 * math.sqrt(2) / 0.5)
    # rates of noisy classes are unbiased
    noise = ClassNoise(3, 0.6)
    rates = np.array([0.5, 0.3, 0.2])
    noisy = noise.flip + (noise.keep - noise.flip) * rates
    assert_allclose(noise.rate_of(noisy), rates, atol=1e-15)


@pytest.mark.parametrize(
    ("changes", "match"), [TOO_MANY, *case_table(__file__)["refused"]]
)
def test_what_is_no_plan_is_refused(changes, match):
    with pytest.raises(SettingsError, match=match):
        LabelPlan(**{"mechanism": "laplace", "epsilon": 1.0, **changes})
