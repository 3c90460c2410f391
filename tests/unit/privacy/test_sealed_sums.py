"""Sums over shards: exact for the shards of a table; sealed, noise for all others."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from tp_flower.errors import DivergedError, SiteError
from tp_flower.privacy.sealed_sums import (
    BITS,
    ShardUnion,
    add_shares,
    gram_size,
    joined_gram,
    split_gram,
)

WRONG = "the server's sum is not that of the shares of all"
CLEAR = ""
GIBBERISH = st.integers(0, 2**64 - 1)


each_group = pytest.mark.parametrize("group", ["table-0", CLEAR])


def refuses(shard: ShardUnion, total: np.ndarray) -> None:
    """Assert that a shard does not open a sum, and says of which table it is."""
    count = len(shard.shards)
    with pytest.raises(SiteError, match=f"table t: {WRONG} {count} shards"):
        shard.total(total, "1")


def union(
    shards: int, key: bytes = bytes(32), group: str = "table-0"
) -> list[ShardUnion]:
    """The shards of one table, each as its site knows the table."""
    names = tuple(f"key {number}" for number in range(shards))
    return [ShardUnion(group, key, names, name, "t") for name in names]


def arrays(shards: int, size: int = 5, seed: int = 0) -> np.ndarray:
    """An array for each shard: (shards, size), multiples of the last bit."""
    return default_rng(seed).integers(-(2**50), 2**50, (shards, size)) / 2.0**BITS


def sealed(shards: list[ShardUnion], numbers: np.ndarray) -> list:
    return [shard.share(own, "1") for shard, own in zip(shards, numbers, strict=True)]


@each_group
@given(st.integers(1, 6), st.integers(0, 8), st.integers(0, 2**32))
def test_the_sum_of_shares_is_the_sum(group, shards, size, seed):
    members = union(shards, group=group)
    numbers = arrays(shards, size, seed)
    total = add_shares(sealed(members, numbers))
    assert (total.dtype == np.float64) == (group == CLEAR)
    for shard in members:
        assert np.array_equal(shard.total(total, "1"), numbers.sum(axis=0))


@each_group
@given(st.integers(1, 4), st.integers(1, 5), st.floats(-40, 80), st.integers(0, 99))
def test_sums_of_gram_matrices_are_exact_for_features_of_any_scale(
    group, shards, width, power, seed
):
    rows = default_rng(seed).normal(size=(shards, 7, width)) * 2.0 ** (power / 4)
    grams = [own.T @ own for own in rows]
    members = union(shards, group=group)
    pairs = zip(members, grams, strict=True)
    words = [shard.share(split_gram(own), "1") for shard, own in pairs]
    assert len(words[0]) == gram_size(width) + 1
    total = joined_gram(members[0].total(add_shares(words), "1"), width)
    exact = np.sum(grams, axis=0)
    # half a unit of the last place per shard, and float64
    place = 2.0**-58 if group else np.spacing(exact.max())
    assert np.allclose(total, exact, rtol=1e-14, atol=shards * place)
    assert np.array_equal(total, total.T)


def test_no_two_arrays_have_one_mask():
    zeros = np.zeros(15)
    masks = [
        shard.share(zeros, str(number))
        for key in (bytes(32), bytes(31) + b"1")
        for members in (2, 3)
        for shard in union(members, key)
        for number in range(4)
    ]
    words = np.concatenate(masks)
    assert len(np.unique(words)) == len(words)
    # nor is the mask of one the difference of others
    off = (words[:, None] - words[None, :])[~np.eye(len(words), dtype=bool)]
    assert len(np.unique(off)) > 0.999 * len(off)


def test_the_same_array_is_the_same_words():
    (one, other), numbers = union(2), arrays(2)
    assert np.array_equal(
        one.share(numbers[0], "1"), union(2)[0].share(numbers[0], "1")
    )
    assert not np.any(one.share(numbers[0], "1") == other.share(numbers[0], "1"))


def test_words_are_uniform_whatever_they_hide():
    (shard, _), size = union(2), 20_000
    for number in (0.0, 1e5, -3.25):
        words = shard.share(np.full(size, number), "1")[:-1]
        bits = np.unpackbits(words.view(np.uint8)).reshape(size, 64)
        # five deviations of a fair coin
        assert np.all(abs(bits.mean(axis=0) - 0.5) < 2.5 / size**0.5)


def one_left_out(words):
    return words[1:]


def one_twice(words):
    return [*words, words[0]]


def in_the_clear(words):
    return [own.astype(float) for own in words]


def as_words(numbers):
    return [own.astype(np.uint64) for own in numbers]


def one_forged(words):
    return [
        *words[1:],
        default_rng(5).integers(0, 2**64, words[0].shape, np.uint64),
    ]


def one_of_another_round(words):
    return [*words[1:], union(3)[0].share(arrays(3)[0], "0")]


@pytest.mark.parametrize(
    "cheat", [one_left_out, one_twice, one_forged, one_of_another_round, in_the_clear]
)
def test_a_sum_that_is_not_of_every_shard_once_is_refused(cheat):
    refuse_sums(union(3), cheat)


@pytest.mark.parametrize("cheat", [one_left_out, one_twice, as_words])
def test_a_sum_in_the_clear_counts_its_shards(cheat):
    refuse_sums(union(3, group=CLEAR), cheat)


def refuse_sums(members, cheat):
    total = add_shares(cheat(sealed(members, arrays(3))))
    for shard in members:
        refuses(shard, total)


def test_a_sum_over_nothing_is_refused():
    """Zeros are the sum of no words: their check is right, if masks did not hide it."""
    (shard, _) = union(2)
    refuses(shard, np.zeros(6, np.uint64))


@settings(max_examples=300)
@given(st.integers(0, 5), GIBBERISH.filter(bool), GIBBERISH)
def test_a_sum_that_was_changed_is_refused(place, change, check):
    """Whatever the server adds to a number, and to the check that it cannot read."""
    members = union(3)
    total = add_shares(sealed(members, arrays(3)))
    before = int(total[place])
    total[place] = np.uint64((before + change) % 2**64)
    # checks that are equal modulo the prime are the same check
    assume(place < 5 or (int(total[5]) - before) % (2**61 - 1))
    refuses(members[0], total)
    if place < 5:
        total[-1] = np.uint64(check)
        refuses(members[0], total)


@pytest.mark.parametrize("change", [2**61 - 1, 2**62, 2**63, 2**61, 1])
def test_no_change_is_invisible_to_the_check(change):
    members = union(2)
    total = add_shares(sealed(members, arrays(2)))
    for sign in (1, -1):
        forged = total.copy()
        forged[0] = np.uint64((int(forged[0]) + sign * change) % 2**64)
        refuses(members[0], forged)


def test_shards_that_are_told_of_different_shards_do_not_open_a_sum():
    members = union(3)
    few = [replace(shard, shards=shard.shards[:2]) for shard in members[:2]]
    total = add_shares(sealed(few, arrays(2)))
    assert np.array_equal(few[0].total(total, "1"), arrays(2).sum(axis=0))
    refuses(members[2], total)


def test_without_the_key_a_sum_is_not_opened():
    members, (stranger, *_) = union(3), union(3, b"k" * 32)
    total = add_shares(sealed(members, arrays(3)))
    refuses(stranger, total)


@pytest.mark.parametrize("number", [2.0**19, -(2.0**19), np.nan, np.inf])
def test_a_number_out_of_range_stops_the_run(number):
    (shard, _) = union(2)
    with pytest.raises(DivergedError, match=r"table t: .* allow up to 524288"):
        shard.share(np.array([1.0, number]), "1")


def test_the_largest_numbers_still_add_up():
    members = union(2)
    most = np.array([np.nextafter(2.0**19, 0.0)])
    total = add_shares(sealed(members, np.array([most, most])))
    assert np.array_equal(members[0].total(total, "1"), 2 * most)


@pytest.mark.parametrize("shards", [2, 3, 40])
def test_a_shard_makes_no_more_words_with_more_shards(shards, monkeypatch):
    """Else all shards of a table would make the square of their number."""
    made = []
    words_of = ShardUnion._words

    def counted(union, name, count):
        made.append(name)
        return words_of(union, name, count)

    monkeypatch.setattr(ShardUnion, "_words", counted)
    members = union(shards)
    numbers = arrays(shards)
    total = add_shares(sealed(members, numbers))
    # two words of a mask and the check, but for the first shard
    assert len(made) == 3 * shards - 1
    made.clear()
    assert np.allclose(members[1].total(total, "1"), numbers.sum(axis=0), rtol=1e-12)
    assert len(made) == 2


def test_the_order_of_the_shards_is_that_of_their_masks():
    """Shards that are told of another order share no words."""
    members = union(3)
    other = [replace(shard, shards=shard.shards[::-1]) for shard in members]
    refuses(other[0], add_shares(sealed(members, arrays(3))))
