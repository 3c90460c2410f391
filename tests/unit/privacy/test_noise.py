"""Noise has the law that the accountants assume, and is never the same; so scores."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from client_apps.rounds.site import Round
from tp_flower.errors import SiteError
from tp_flower.privacy import mechanisms
from tp_flower.randomness import GRID_BITS, NoiseSource

DRAWS = 1_000_000
KEY = bytes(range(32))


@pytest.mark.parametrize(
    ("law", "scale"),
    [*(("norm", d) for d in (1e-6, 0.7, 3.0, 1e5)), ("laplace", 0.2), ("laplace", 5.0)],
)
def test_noise_has_its_deviation_and_distribution(law, scale):
    source = NoiseSource(KEY)
    zeros = np.zeros(DRAWS)
    draw = source.with_gaussian if law == "norm" else source.with_laplace
    noise = draw(zeros, scale)
    deviation = scale if law == "norm" else np.sqrt(2) * scale
    assert noise.std() == pytest.approx(deviation, rel=0.01)
    assert abs(noise.mean()) < 5 * deviation / np.sqrt(DRAWS)
    assert stats.kstest(noise[:50_000] / scale, law).pvalue > 1e-3


def test_uniform_numbers_are_uniform_and_never_at_the_ends():
    numbers = NoiseSource(KEY).uniform((1000, 1000))
    assert numbers.shape == (1000, 1000)
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert stats.kstest(numbers.ravel()[:50_000], "uniform").pvalue > 1e-3


@pytest.mark.parametrize("bits", [b"\x00", b"\xff"])
def test_the_ends_are_not_reached_whatever_the_bits(bits, monkeypatch):
    class Stream:
        def update(self, data):
            return bits * len(data)

    source = NoiseSource()
    monkeypatch.setattr(source, "_stream", Stream())
    (number,) = source.uniform(1)
    assert 0 < number < 1
    assert np.isfinite(source.with_gaussian(np.zeros(1), 1.0)).all()
    assert np.isfinite(source.with_laplace(np.zeros(1), 1.0)).all()


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.5, 1.0])
def test_bernoulli_draws_each_with_its_rate(rate):
    drawn = NoiseSource(KEY).bernoulli(DRAWS, rate)
    error = np.sqrt(rate * (1 - rate) / DRAWS)
    assert len(drawn) / DRAWS == pytest.approx(rate, abs=5 * error)
    assert (np.diff(drawn) > 0).all()


def test_every_source_draws_anew_and_a_source_never_repeats_itself():
    first = NoiseSource()
    second = NoiseSource()
    blocks = [first.uniform(4), second.uniform(4), first.uniform(4)]
    assert len(np.unique(np.concatenate(blocks))) == 12
    values = np.array([0.1, np.pi])
    assert first.with_gaussian(values, 0.0) is values
    assert first.with_laplace(values, 0.0) is values


@pytest.mark.parametrize("deviation", [0.3, 1.0, 700.0])
def test_noisy_values_lie_on_a_grid_that_does_not_depend_on_the_value(deviation):
    step = 2.0 ** (np.floor(np.log2(deviation)) - GRID_BITS)
    values = np.linspace(-1, 1, 1000) * np.pi
    noisy = NoiseSource().with_gaussian(values, deviation) / step
    assert_array_equal(noisy, np.round(noisy))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"kind": "cauchy"}, "Invalid value 'cauchy'"),
        ({"kind": "pure", "epsilon": 1, "times": 2}, "unknown field `times`"),
        ({"kind": "pure", "epsilon": -1}, "epsilon is out of range: -1"),
        ({"kind": "pure", "epsilon": float("inf")}, "epsilon is out of range: inf"),
        ({"kind": "gaussian", "noise_multiplier": 1, "sample_rate": 0}, "sample_rate"),
    ],
)
def test_what_is_no_mechanism_is_refused(data, match):
    with pytest.raises(ValueError, match=match):
        msgspec.convert(data, mechanisms.Mechanism)


def test_noise_and_payments_are_of_one_key_one_history_and_one_request():
    def drawn(key, *rounds):
        last = None
        for number, digest in enumerate(rounds):
            begun = Round(last, lambda: key, number, digest)
            last = begun.committed()
        # the noise cannot be drawn from the name of a payment
        assert not begun._derive(b"noise").hex().startswith(begun.payment)
        return begun.payment, *begun.noise.uniform(4).tolist()

    first = drawn(KEY, "a", "b")
    assert drawn(KEY, "a", "b") == first
    for other in ("c", "b"), ("b",), ("a", "c"), ("b", "a"):
        assert not {*first} & {*drawn(KEY, *other)}
    assert not {*first} & {*drawn(bytes(32), "a", "b")}


@given(
    arrays.arrays(np.float64, st.tuples(st.integers(0, 6), st.integers(1, 3))),
    st.floats(1e-3, 1e3),
)
def test_clipped_rows_have_at_most_the_norm_whatever_they_hold(scores, clip):
    """Infinities and NaN included: a model can be made to overflow for chosen rows."""
    clipped = mechanisms.clip_rows(scores, clip)
    assert clipped.shape == scores.shape
    assert np.isfinite(clipped).all()
    assert (np.linalg.norm(clipped, axis=1) <= clip * (1 + 1e-12)).all()


@given(
    arrays.arrays(np.float64, (5, 2), elements=st.floats(-1e6, 1e6)),
    st.floats(1e-3, 1e3),
)
def test_clipped_rows_are_those_of_a_loop(scores, clip):
    for row, clipped in zip(scores, mechanisms.clip_rows(scores, clip), strict=True):
        norm = float(np.sqrt((row**2).sum()))
        expected = row * clip / norm if norm > clip else row
        assert_allclose(clipped, expected, rtol=1e-12, atol=1e-15)


def test_infinite_scores_are_clipped_and_nan_counts_as_zero():
    scores = np.array([[np.inf, 0.0], [np.nan, 3.0], [-np.inf, np.inf], [1e300, 0.0]])
    root = np.sqrt(2.0)
    expected = [[2.0, 0.0], [0.0, 2.0], [-root, root], [2.0, 0.0]]
    assert_allclose(mechanisms.clip_rows(scores, 2.0), expected, rtol=1e-12)


def noisy(scores, clip, multiplier, source):
    return mechanisms.private_scores(
        scores, mechanisms.ClippedNoise(clip, multiplier), source
    )


def test_noise_is_that_of_the_source_with_multiplier_times_clip_and_new_every_time():
    scores = np.full((500, 2), 0.5)
    expected = NoiseSource(KEY).with_gaussian(np.full((500, 2), 0.5), 30.0)
    assert_array_equal(noisy(scores, 10.0, 3.0, NoiseSource(KEY)), expected)
    source = NoiseSource()
    scores = np.tile([1e9, -3.0], (25, 1))
    first, second = (noisy(scores, 1.0, 1.0, source) for _ in range(2))
    # values stand on a grid: of fifty two may meet by chance, no more
    assert np.isin(first, second).sum() <= 2
    assert noisy(scores, np.inf, 0.0, source) is scores
    assert noisy(np.zeros((0, 3)), 1.0, 1.0, source).shape == (0, 3)
    with pytest.raises(SiteError, match="multiplier 1 times clip inf gives no noise"):
        noisy(scores, np.inf, 1.0, source)
