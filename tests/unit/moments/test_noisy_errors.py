"""Errors of least squares by noisy moments count sampling and the noise."""

import numpy as np
import pytest

from tp_flower.methods.moments.inference import Inference, NoisyFit
from tp_flower.methods.moments.noise import LabelUnit
from tp_flower.methods.moments.penalties import Fit, Penalty
from tp_flower.methods.moments.solve import JoinedMoments

UNIT = LabelUnit(middle=2.0, half=5.0)
TRUTH = np.array([0.6, 0.4, -0.5, 1.5])
ORDER = {"features": np.array([0, 2, 3]), "labels": np.array([1]), "intercept": 4}


def moments_of(rng: np.random.Generator, rows: int, sigma: float) -> JoinedMoments:
    """Moments of rows of three features, that of another table the last; noisy."""
    features = rng.uniform(-1.0, 1.0, size=(rows, 3))
    features[:, 1] = features[:, 1] < 0.3
    label = features @ TRUTH[:-1] + TRUTH[-1] + 0.5 * rng.normal(size=rows)
    clipped = UNIT.clip(label[:, None])
    assert (np.abs(clipped) < 1.0).all()
    columns = np.column_stack([features[:, 0], clipped, features[:, 1:], np.ones(rows)])
    deviations = np.full((5, 5), sigma)
    deviations[:3, :3] = np.sqrt(0.5) * sigma + (1.0 - np.sqrt(0.5)) * sigma * np.eye(3)
    deviations[3, 3] = deviations[3, 4] = deviations[4, 3] = deviations[4, 4] = 0.0
    noise = np.triu(deviations * rng.normal(size=(5, 5)))
    noisy = columns.T @ columns + noise + np.triu(noise, 1).T
    return JoinedMoments(noisy, **ORDER, deviations=deviations).in_unit_of(UNIT)


def flat(fit: NoisyFit) -> np.ndarray:
    return np.append(fit.solution.coefficients, fit.solution.intercept)


@pytest.mark.parametrize("l2", [0.0, 0.2])
def test_without_noise_they_are_those_of_least_squares(l2):
    moments = moments_of(np.random.default_rng(0), 300, 0.0)
    expected = moments.ridge(l2)
    inference = Inference.of_squares(moments, Fit(Penalty(0.0, l2), expected, {}))
    found = NoisyFit.of(moments, l2)
    np.testing.assert_allclose(
        found.solution.coefficients, expected.coefficients, rtol=1e-9
    )
    np.testing.assert_allclose(found.solution.intercept, expected.intercept, rtol=1e-9)
    np.testing.assert_allclose(
        found.inference.covariance, inference.covariance, rtol=1e-6, atol=1e-12
    )


def test_noise_adds_the_variance_that_drawing_it_again_shows():
    l2 = 0.2
    rng = np.random.default_rng(1)
    # little, so that first order is all there is
    moments = moments_of(rng, 5_000, 0.5)
    found = NoisyFit.of(moments, l2)
    without = NoisyFit.of(
        JoinedMoments(moments.matrix, **ORDER, deviations=np.zeros((5, 5))), l2
    )
    added = found.inference.covariance - without.inference.covariance
    draws = [flat(NoisyFit.of(moments.with_more_noise(rng), l2)) for _ in range(1_200)]
    scale = np.sqrt(np.diag(added))
    drawn = np.cov(np.array(draws).T) / np.outer(scale, scale)
    np.testing.assert_allclose(
        drawn, added / np.outer(scale, scale), atol=5.0 * np.sqrt(2.0 / len(draws))
    )


@pytest.mark.parametrize(("sigma", "least"), [(12.0, 400), (40.0, 392)])
def test_intervals_hold_the_truth(sigma, least):
    """Also where noise is nearly as large as what some column varies by."""
    rng = np.random.default_rng(2)
    held = []
    for _ in range(400):
        moments = moments_of(rng, 1_500, sigma)
        fit = NoisyFit.of(moments, 0.0)
        if fit is None:
            continue
        low, high = fit.inference.statistics(flat(fit))[:, -2:].T
        held.append((low <= TRUTH) & (high >= TRUTH))
    assert len(held) >= least
    # three standard errors of a share of 400
    assert np.abs(np.mean(held, axis=0) - 0.95).max() < 0.033


def test_there_are_none_where_noise_hides_how_columns_vary():
    rng = np.random.default_rng(3)
    assert NoisyFit.of(moments_of(rng, 1_500, 12.0), 0.0) is not None
    drowned = moments_of(rng, 1_500, 120.0)
    assert NoisyFit.of(drowned, 0.0) is None
    assert NoisyFit.of(drowned, 1.0) is not None
