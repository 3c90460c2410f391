"""Piecewise constant updates, and their bytes."""

import numpy as np
import pytest

from tests.support.files import case_table
from tp_flower.errors import ReplyError
from tp_flower.personalised.update_codec import (
    MOST_CODES,
    code_book,
    decode_update,
    encode_update,
)
from tp_flower.personalised.z_step import penalty_of_round, piecewise_update

VECTORS = 1000
ONE, TWO = "00 00 80 3f", "00 00 00 40"


def differences(size: int) -> np.ndarray:
    """Lambda of Eq. 7."""
    return np.eye(size) - np.eye(size, k=1)


@pytest.mark.parametrize("integers", [False, True])
def test_updates_of_every_size_satisfy_the_optimality_condition(integers):
    """u - g = -Lambda^T w with |w| <= gamma, and w = gamma sign(Lambda u) at a jump.

    The problem is convex: no other update satisfies it.
    """
    rng = np.random.default_rng(1)
    for _ in range(VECTORS):
        size = int(rng.integers(1, 80))
        gradient = rng.normal(size=size) * 10.0 ** rng.integers(-3, 4)
        # ties and plateaus
        gradient = np.round(gradient) if integers else gradient
        penalty = float(rng.exponential()) * max(np.abs(gradient).mean(), 1e-3)
        update = piecewise_update(gradient, penalty)
        multipliers = np.cumsum(gradient - update)
        scale = penalty + np.abs(gradient).sum()
        assert np.abs(multipliers).max() <= penalty + 1e-12 * scale
        jumps = differences(size) @ update
        at = jumps != 0
        expected = penalty * np.sign(jumps[at])
        assert np.abs(multipliers[at] - expected).max(initial=0.0) <= 1e-12 * scale


def test_without_penalty_it_is_the_gradient_and_with_a_large_one_zero():
    gradient = np.random.default_rng(3).normal(size=50)
    assert (piecewise_update(gradient, 0.0) == gradient).all()
    enough = np.abs(np.cumsum(gradient)).max()
    assert not piecewise_update(gradient, enough * 1.001).any()
    assert piecewise_update(gradient, enough * 0.99).any()
    assert piecewise_update(np.empty(0), 1.0).shape == (0,)


def test_the_schedule_ends_at_the_gradient():
    gradient = np.random.default_rng(9).normal(size=30)
    rounds = np.array([0, 50, 90, 99])
    updates = [
        piecewise_update(gradient, penalty_of_round(1.0, n, 100)) for n in rounds
    ]
    errors = np.linalg.norm(np.array(updates) - gradient, axis=1)
    # each element is off by at most 2 gamma, at jumps
    assert (errors <= 2 * np.sqrt(30) * (1 - rounds / 100) ** 3).all()
    assert (np.diff(errors) <= 0).all()
    assert penalty_of_round(0.3, 0, 7) == 0.3


def test_short_updates_reach_the_objective_of_long_ones():
    """On 1,000 dimensions, a quarter of the bytes at no more than 0.5 % worse."""
    rng = np.random.default_rng(3)
    features = rng.normal(size=(1500, 1000))
    labels = features @ np.repeat(rng.normal(size=20), 50) + 5 * rng.normal(size=1500)
    rate = 1500 / np.linalg.norm(features, 2) ** 2
    lengths = []

    def encoded(gradient, at):
        code = encode_update(
            piecewise_update(gradient, penalty_of_round(0.03, at, 40)), 32
        )
        lengths.append(len(code))
        return decode_update(code, 1000)

    def objective_after(send):
        model = ahead = np.zeros(1000)
        for at in range(40):
            gradient = features.T @ (features @ ahead - labels) / 1500
            following = ahead - rate * send(gradient, at)
            ahead = following + at / (at + 3) * (following - model)
            model = following
        return 0.5 * np.mean((features @ model - labels) ** 2)

    exact = objective_after(lambda gradient, _: gradient)
    assert objective_after(encoded) <= 1.005 * exact
    assert np.mean(lengths) <= 4000 / 4
    assert exact < 0.25 * np.mean(labels**2)  # half of the loss of no model


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 70_000])
@pytest.mark.parametrize("length", [1, 3, 300, 66_000])
def test_a_code_is_read_as_it_was_written(size, length):
    rng = np.random.default_rng(5)
    values = np.repeat(rng.normal(size=size // length + 1), length)[:size]
    code = encode_update(values)
    assert (decode_update(code, size) == values.astype(np.float32)).all()
    runs = -(-size // length)
    assert len(code) == 1 + (size + 7) // 8 + 4 * runs


@pytest.mark.parametrize("codes", [1, 2, 3, 16, MOST_CODES])
def test_a_code_book_has_so_many_entries_and_takes_so_many_bits(codes):
    values = np.random.default_rng(6).normal(size=5000)
    code = encode_update(values, codes)
    decoded = decode_update(code, 5000)
    assert len(np.unique(decoded)) <= codes
    bits = (codes - 1).bit_length()
    assert len(code) <= 1 + 625 + 1 + 4 * codes + -(-5000 * bits // 8)
    # at least as good as the middles of equal parts of the values
    middles = np.quantile(values, (np.arange(codes) + 0.5) / codes)
    nearest = np.abs(values[:, None] - middles).min(axis=1)
    assert np.sum((decoded - values) ** 2) <= np.sum(nearest**2) * (1 + 1e-6)


def test_a_code_book_is_a_fixed_point_of_lloyds_iteration():
    values = np.concatenate([np.full(5, 1.0), np.full(3, 1.2), np.full(9, -4.0)])
    counts = np.ones(len(values), np.int64)
    assert code_book(values, counts, 2).tolist() == pytest.approx(
        [-4.0, (5 * 1.0 + 3 * 1.2) / 8]
    )
    assert code_book(values, counts, 3).tolist() == pytest.approx([-4.0, 1.0, 1.2])
    # where nothing changes, nothing is told to change
    assert 0.0 in code_book(np.linspace(-1, 1, 101), np.ones(101, np.int64), 8)


def test_a_value_with_no_finite_code_is_refused():
    for value in (np.nan, np.inf, 1e39):
        with pytest.raises(ValueError, match="not finite"):
            encode_update(np.array([0.0, value]))
    with pytest.raises(ValueError, match="codes is 257, allowed: 0 to 256"):
        encode_update(np.zeros(2), 257)


def bytes_of(text: str) -> np.ndarray:
    """The bytes of a code; 1.0 and 2.0 are float32."""
    text = text.replace("1.0", ONE).replace("2.0", TWO)
    return np.frombuffer(bytes.fromhex(text), np.uint8)


@pytest.mark.parametrize(("text", "message"), case_table(__file__)["wrong"])
def test_a_wrong_code_is_refused(text, message):
    with pytest.raises(ReplyError, match=message):
        decode_update(bytes_of(text), 4)


def test_a_code_by_hand():
    code = bytes_of("01 c0 01 1.0 2.0 80")
    assert decode_update(code, 4).tolist() == [2.0, 1.0, 1.0, 1.0]
    with pytest.raises(ReplyError, match="not a vector of bytes"):
        decode_update(code.astype(np.int64), 4)


def test_no_bytes_crash_the_reader():
    rng = np.random.default_rng(7)
    whole = encode_update(np.repeat(rng.normal(size=20), 5), 8)
    for _ in range(2000):
        broken = whole.copy()
        places = rng.integers(0, len(whole), 2)
        broken[places] = rng.integers(0, 256, 2)
        broken = broken[: rng.integers(0, len(whole) + 1)]
        try:
            decoded = decode_update(broken, 100)
        except ReplyError:
            continue
        assert decoded.shape == (100,)
        assert np.isfinite(decoded).all()
