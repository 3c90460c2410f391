"""Numbers in two bytes: against NumPy's and torch's formats, and by law."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_flower.protocol import Packet, pack, unpack
from tp_flower.randomness import Stream
from tp_flower.wire import (
    LARGEST_EXPONENT,
    Narrow,
    Precision,
    Rounding,
    round_stochastically,
    round_to_nearest,
    wide,
    with_feedback,
)

PRECISIONS = [Precision.FLOAT16, Precision.BFLOAT16]
TORCH = {Precision.FLOAT16: torch.float16, Precision.BFLOAT16: torch.bfloat16}
ULP = {Precision.FLOAT16: 2.0**-10, Precision.BFLOAT16: 2.0**-7}
SCALES = [1e-30, 1e-12, 1e-3, 1.0, 1e6, 1e20, 1e30]

each_precision = pytest.mark.parametrize("precision", PRECISIONS)
each_scale = pytest.mark.parametrize("scale", SCALES)


def seeded(seed=0):
    return np.random.default_rng(seed)


def normal(scale, rows=500, seed=1):
    return scale * seeded(seed).normal(size=rows)


def in_torch(bits, precision):
    """What torch reads in the bits."""
    signed = torch.from_numpy(bits.view(np.int16))
    return signed.view(TORCH[precision]).float().numpy()


# formats


@each_precision
def test_all_bits_are_read_as_torch_reads_them(precision):
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    np.testing.assert_array_equal(
        Narrow(bits, precision, 0).wide(), in_torch(bits, precision)
    )


@each_precision
@pytest.mark.parametrize("exponent", [-LARGEST_EXPONENT, -40, 7, LARGEST_EXPONENT])
def test_numbers_are_multiplied_by_the_power_of_two(precision, exponent):
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        plain = in_torch(bits, precision).astype(np.float64)
        expected = (plain * 2.0**exponent).astype(np.float32)
    found = Narrow(bits, precision, exponent).wide()
    # half the smallest float32: it may be rounded twice
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-149)


@each_precision
@each_scale
def test_rounds_to_nearest_as_torch_does(precision, scale):
    values = normal(scale)
    found = round_to_nearest(values, precision)
    scaled = torch.from_numpy(values * 2.0**-found.exponent)
    expected = scaled.to(TORCH[precision]).double().numpy() * 2.0**found.exponent
    np.testing.assert_array_equal(found.wide(), expected.astype(np.float32))
    assert np.abs(in_torch(found.bits, precision)).max() <= 2.0**15


@each_precision
@each_scale
def test_numbers_of_the_format_are_exact(precision, scale):
    """All of them, from the largest down to 2**-28 of it and zero, of both signs."""
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    numbers = in_torch(bits, precision)
    numbers = numbers[np.abs(numbers) < 2.0**15]
    if precision is Precision.BFLOAT16:
        numbers = numbers[(np.abs(numbers) > 2.0**-20) | (numbers == 0)]
    values = numbers.astype(np.float64) * 2.0 ** np.round(np.log2(scale) - 15)
    for found in (
        round_stochastically(values, precision, seeded()),
        round_to_nearest(values, precision),
    ):
        np.testing.assert_array_equal(found.wide(), values)


# rounding


@each_precision
@pytest.mark.parametrize("largest", [2.0**-144, 2.0**-149, 1e-300, 5e-324, 1e38])
def test_arrays_of_any_size_travel(precision, largest):
    """The margins of rows that are told apart well leave derivatives like these."""
    values = np.array([largest, -largest, 0.0])
    sent = round_stochastically(values, precision, seeded())
    found = unpack(pack(Packet({}, {(0, "messages"): sent}))).array(0, "messages")
    np.testing.assert_allclose(found, values, rtol=ULP[precision], atol=2.0**-149)


@each_precision
@each_scale
def test_rounding_is_without_bias(precision, scale):
    """Over many draws the mean is the number: within four of its standard errors."""
    draws = 4000
    values = normal(scale, rows=60)
    # small ones, of which float16 has few bits
    values[:20] *= 2.0 ** -np.arange(10, 30)
    values = values.astype(np.float32).astype(np.float64)
    found = round_stochastically(np.tile(values, (draws, 1)), precision, seeded())
    numbers = found.wide().astype(np.float64)
    below, above = numbers.min(axis=0), numbers.max(axis=0)
    assert ((below <= values) & (values <= above)).all()
    # there are no others than these two
    assert ((numbers == below) | (numbers == above)).all()
    share = (values - below) / np.where(above > below, above - below, 1.0)
    error = np.sqrt(share * (1 - share) / draws) * (above - below)
    off = np.abs(numbers.mean(axis=0) - values)
    assert (off <= 4 * error + 1e-12 * np.abs(values)).all()
    # rounding to nearest is off by more than that
    nearest = round_to_nearest(values, precision).wide()
    assert (np.abs(nearest - values) > 4 * error).mean() > 0.5


@each_precision
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=30),
    st.integers(0, 99),
)
def test_errors_are_below_an_ulp(precision, numbers, seed):
    values = np.array(numbers)
    largest = np.abs(values).max()
    ulp = ULP[precision] * np.abs(values) + 2.0**-149
    ulp += 2.0 ** (-38 if precision is Precision.FLOAT16 else -147) * largest
    drawn = round_stochastically(values, precision, seeded(seed)).wide()
    # and half of what float32 does not have
    assert (np.abs(drawn - values) <= (1 + 2.0**-12) * ulp).all()
    nearest = round_to_nearest(values, precision).wide()
    assert (np.abs(nearest - values) <= (0.5 + 2.0**-12) * ulp).all()
    assert (drawn[values == 0] == 0).all()
    assert (nearest[values == 0] == 0).all()


@each_precision
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,), (4, 3), (2, 2, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_shape_and_order(precision, shape, dtype):
    values = seeded().normal(size=shape).astype(dtype)
    for array in (values, values.T):
        found = round_stochastically(array, precision, seeded())
        assert found.shape == array.shape
        assert found.nbytes == 2 * array.size
        np.testing.assert_allclose(found.wide(), array, rtol=ULP[precision])


@each_precision
def test_zeros_stay_zeros(precision):
    found = round_stochastically(np.zeros(1000), precision, seeded())
    assert not found.wide().any()
    beside = np.array([0.0, 1e30, -0.0])
    assert round_stochastically(beside, precision, seeded()).wide()[::2].tolist() == [
        0.0,
        0.0,
    ]


@each_precision
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
def test_what_is_not_finite_arrives_so(precision, bad):
    """Whoever receives it refuses it, as in float32."""
    values = np.array([1.0, bad, -2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = round_stochastically(values, precision, seeded())
        nearest = round_to_nearest(values, precision)
    for found in (drawn.wide(), nearest.wide()):
        assert not np.isfinite(found[1])
        assert np.isnan(found[1]) == np.isnan(bad)


# messages


def rounding(precision, *position, seed=0, stream=Stream.ROUND_UP):
    return Rounding(precision, seed, stream, *position)


@each_precision
def test_a_seed_repeats_and_every_message_has_its_own_draws(precision):
    values = normal(1.0)
    first = rounding(precision, 3, 1).rows(values).bits
    np.testing.assert_array_equal(rounding(precision, 3, 1).rows(values).bits, first)
    for other in (
        rounding(precision, 4, 1),
        rounding(precision, 3, 2),
        rounding(precision, 3, 1, seed=1),
        rounding(precision, 3, 1, stream=Stream.ROUND_DOWN),
    ):
        assert (other.rows(values).bits != first).mean() > 0.2
    # so have two arrays of one message
    both = rounding(precision, 3, 1)
    assert (both.rows(values).bits != both.rows(values).bits).mean() > 0.2


def test_float32_is_what_it_was():
    values = np.array([1 / 3, 1e300, np.nan])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rounding(Precision.FLOAT32).rows(values)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, values.astype(np.float32))
    assert found.dtype == np.float32
    assert wide(found) is found


# feedback


@each_precision
def test_the_sum_of_what_is_sent_is_the_sum_of_what_was_meant(precision):
    """But for the last rounding: however many there were, and of whatever size."""
    steps, size = 300, 40
    rng = seeded()
    meant = rng.normal(size=(steps, size)) * np.exp(rng.normal(size=(steps, 1)))
    unsent, total, plain = np.zeros(size), np.zeros(size), np.zeros(size)
    for values in meant:
        sent, unsent = with_feedback(values, unsent, precision)
        total += sent.wide()
        plain += round_to_nearest(values, precision).wide()
        # half an ulp of what was sent
        most = 0.5 * ULP[precision] * np.abs(sent.wide()) + 2.0**-39 * 100
        assert (np.abs(unsent) <= most).all()
    np.testing.assert_allclose(total + unsent, meant.sum(axis=0), rtol=0, atol=1e-10)
    off = np.abs(total - meant.sum(axis=0))
    # without it the errors of all steps are there
    assert off.mean() < np.abs(plain - meant.sum(axis=0)).mean() / 4


def test_in_float32_nothing_is_left():
    values, none = normal(1.0), np.zeros(500)
    sent, unsent = with_feedback(values, none, Precision.FLOAT32)
    assert sent is values
    assert unsent is none


@pytest.mark.parametrize(
    ("precision", "apart"), [(Precision.FLOAT16, 4e4), (Precision.BFLOAT16, 5e3)]
)
def test_sgd_reaches_the_optimum_that_rounding_to_nearest_does_not(precision, apart):
    """Two shards whose gradients nearly cancel: what is left is less than an ulp.

    f = 1/2 (theta - a)^2 + 1/2 (theta - b)^2 has its optimum at (a + b) / 2.
    """
    centres = apart * np.array([1.0, -1.0]) + np.array([1.0, 2.0])
    start, rate, steps = 0.0, 0.05, 400

    def sum_of(send):
        theta = start
        for _ in range(steps):
            theta -= rate * sum(
                float(send(shard, np.array([theta - centre]))[0])
                for shard, centre in enumerate(centres)
            )
        return theta

    left = [np.zeros(1), np.zeros(1)]

    def with_memory(shard, gradient):
        sent, left[shard] = with_feedback(gradient, left[shard], precision)
        return sent.wide()

    exact = sum_of(lambda _, gradient: gradient)
    assert exact == pytest.approx(1.5, abs=1e-6)
    nearest = sum_of(lambda _, gradient: round_to_nearest(gradient, precision).wide())
    assert nearest == start
    # the step times what a shard may still owe, 1/2 ulp each
    assert sum_of(with_memory) == pytest.approx(
        exact, abs=2 * rate * ULP[precision] * apart
    )
