"""Private scores: rows are clipped, and noise has its law, at every release anew."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tp_flower.errors import SiteError
from tp_flower.privacy.mechanisms import ClippedNoise, clip_rows, private_scores
from tp_flower.randomness import NoiseSource

KEY = bytes(range(32))


@settings(deadline=None)
@given(
    arrays.arrays(np.float64, st.tuples(st.integers(0, 6), st.integers(1, 3))),
    st.floats(1e-3, 1e3),
)
def test_clipped_rows_have_at_most_the_norm_whatever_they_hold(scores, clip):
    """Infinities and NaN included: a model can be made to overflow for chosen rows."""
    clipped = clip_rows(scores, clip)
    assert clipped.shape == scores.shape
    assert np.isfinite(clipped).all()
    assert (np.linalg.norm(clipped, axis=1) <= clip * (1 + 1e-12)).all()


@settings(deadline=None)
@given(
    arrays.arrays(np.float64, (5, 2), elements=st.floats(-1e6, 1e6)),
    st.floats(1e-3, 1e3),
)
def test_clipped_rows_are_those_of_a_loop(scores, clip):
    for row, clipped in zip(scores, clip_rows(scores, clip), strict=True):
        norm = float(np.sqrt((row**2).sum()))
        expected = row * clip / norm if norm > clip else row
        np.testing.assert_allclose(clipped, expected, rtol=1e-12, atol=1e-15)


def test_infinite_scores_are_clipped_and_nan_counts_as_zero():
    scores = np.array([[np.inf, 0.0], [np.nan, 3.0], [-np.inf, np.inf], [1e300, 0.0]])
    root = np.sqrt(2.0)
    expected = [[2.0, 0.0], [0.0, 2.0], [-root, root], [2.0, 0.0]]
    np.testing.assert_allclose(clip_rows(scores, 2.0), expected, rtol=1e-12)


def noisy(scores, clip, multiplier, source):
    return private_scores(scores, ClippedNoise(clip, multiplier), source)


def test_noise_is_that_of_the_source_with_multiplier_times_clip_and_new_every_time():
    scores = np.full((500, 2), 0.5)
    expected = NoiseSource(KEY).with_gaussian(np.full((500, 2), 0.5), 30.0)
    released = noisy(scores, 10.0, 3.0, NoiseSource(KEY))
    np.testing.assert_array_equal(released, expected)
    source, scores = NoiseSource(), np.array([[1e9, -3.0]])
    first, second = (noisy(scores, 1.0, 1.0, source) for _ in range(2))
    assert not np.isin(first, second).any()
    assert noisy(scores, np.inf, 0.0, source) is scores
    assert noisy(np.zeros((0, 3)), 1.0, 1.0, source).shape == (0, 3)
    with pytest.raises(SiteError, match="noise of 1 times a clip of inf is none"):
        noisy(scores, np.inf, 1.0, source)
