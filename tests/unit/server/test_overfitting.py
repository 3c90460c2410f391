"""The test of whether an earlier epoch fitted held-out rows better."""

import numpy as np
import pytest
from numpy.random import default_rng

from strategies.training.overfitting import LEAST_ROWS, rise_of


def test_a_rise_is_beyond_one_deviation_of_the_mean_difference():
    rng = default_rng(0)
    rises = 0
    for _ in range(2000):
        earlier = rng.gamma(1.0, size=100)
        rises += rise_of(earlier, earlier + 0.3 * rng.normal(size=100)) is not None
    # a normal is beyond one deviation on one side in 15.9 %, give or take 0.8
    assert rises / 2000 == pytest.approx(0.159, abs=0.03)


@pytest.mark.parametrize("rise", [0.01, 0.1, 1.0])
def test_a_rise_is_that_of_the_mean_losses(rise):
    rng = default_rng(1)
    earlier = rng.gamma(1.0, size=5000)
    last = earlier * (1.0 + rise) + 0.1 * rise * rng.normal(size=5000)
    assert rise_of(earlier, last) == pytest.approx(last.mean() / earlier.mean() - 1.0)
    weights = rng.uniform(0.5, 2.0, 5000)
    expected = (
        np.average(last, weights=weights) / np.average(earlier, weights=weights) - 1.0
    )
    assert rise_of(earlier, last, weights) == pytest.approx(expected)
    assert rise_of(last, earlier) is None


def test_small_rises_and_few_rows_are_none():
    earlier = np.linspace(1.0, 2.0, LEAST_ROWS)
    assert rise_of(earlier, 1.004 * earlier) is None
    assert rise_of(earlier, 1.006 * earlier) is not None
    assert rise_of(earlier[1:], 1.5 * earlier[1:]) is None
    assert rise_of(np.zeros(0), np.zeros(0)) is None
