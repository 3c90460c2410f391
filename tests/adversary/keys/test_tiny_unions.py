"""Sealed sums: the exact distribution of what server and shards see, on tiny domains.

The pseudo-random words are replaced by all values that there are, one case in each
number of an array; words are read modulo 2 or 4, which divide 2^64.
"""

from itertools import product

import numpy as np
import pytest

from tests.support.reference.information import coded, every_case, information
from tp_flower.privacy import sealed_sums
from tp_flower.privacy.sealed_sums import BITS, ShardUnion, add_shares


def members(shards):
    names = tuple("abc"[:shards])
    return [ShardUnion("table-0", b"", names, name, "t") for name in names]


def usual(name, shard):
    return name, shard


def sealed(monkeypatch, shards, names, base, mask_of=usual):
    """The arrays and their words (rounds, shards, N), the sums, and the masks."""
    sent = list(product(names, "abc"[:shards]))
    masked = sorted({mask_of(*one) for one in sent} - {None})
    digits = every_case(base, len(sent) + len(masked), np.uint64)
    arrays = digits[: len(sent)].reshape(len(names), shards, -1)
    masks = dict(zip(masked, digits[len(sent) :], strict=True))

    def of_name(_, name, count):
        number, shard = name.split()
        nothing = np.zeros(count, np.uint64)
        if shard == "check":
            return nothing
        # here the check has no mask: it is left out of the words
        return np.append(masks.get(mask_of(number, shard), nothing[:-1]), nothing[-1:])

    monkeypatch.setattr(ShardUnion, "_words", of_name)
    words = []
    sums = []
    for name, own in zip(names, arrays / 2.0**BITS, strict=True):
        pairs = zip(members(shards), own, strict=True)
        words.append([shard.share(array, name) for shard, array in pairs])
        sums.append(members(shards)[0].total(add_shares(words[-1]), name) * 2.0**BITS)
    readable = np.array(words)[..., :-1] % np.uint64(base)
    return arrays, readable, np.array(sums) % base, list(masks.values())


def as_one(arrays, base):
    """Arrays (..., N) as one number (N,)."""
    return coded(arrays.reshape(-1, arrays.shape[-1]), base)


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize(("names", "base"), [("1", 2), ("12", 2), ("1", 4)])
def test_words_tell_the_server_nothing_and_sums_a_shard_the_sum_of_the_others(
    monkeypatch, shards, names, base
):
    arrays, words, sums, masks = sealed(monkeypatch, shards, names, base)
    view = as_one(words, base)
    assert information(as_one(arrays, base), view, view * 0) == 0
    # the first shard has all masks, its arrays, and the sums
    others = as_one(arrays[:, 1:], base)
    rest = as_one(arrays[:, 1:].sum(axis=1) % np.uint64(base), base)
    shard = coded([*masks, *sums, *arrays[:, 0]], base)
    assert information(others, shard, rest) == information(rest, rest, shard) == 0
    # which of two shards is the other's array
    bits = len(names) * np.log2(base)
    assert information(others, others, shard) == (shards - 2) * bits
    # a shard that gives the server its key tells it all arrays
    both = coded([*masks, *words.reshape(-1, words.shape[-1])], base)
    assert information(others, others, both) == 0


BROKEN = {
    # two differences of three shards, one of two rounds each, and an array itself
    "shards": ("1", lambda name, _: (name,), 2),
    "rounds": ("12", lambda _, shard: (shard,), 3),
    "bare": ("1", lambda name, shard: None if shard == "a" else (name, shard), 1),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_masks_tell_more(monkeypatch, broken):
    names, mask_of, bits = BROKEN[broken]
    arrays, words, _, _ = sealed(monkeypatch, 3, names, 2, mask_of)
    view = as_one(words, 2)
    assert information(as_one(arrays, 2), view, view * 0) == bits


@pytest.mark.parametrize(("shards", "is_masked"), [(2, True), (3, True), (2, False)])
def test_checks_tell_the_server_nothing_either(monkeypatch, shards, is_masked):
    """Modulo 3 in the place of their prime, with every factor and every mask."""
    monkeypatch.setattr(sealed_sums, "_PRIME", 3)
    drawn = {}
    monkeypatch.setattr(
        ShardUnion,
        "_words",
        lambda _, name, count: np.array(drawn[name.split()[1]][:count], np.uint64),
    )
    masks = [*product(range(2), range(3) if is_masked else [0])]
    cases = [*product(range(3), repeat=shards)]
    views = []
    for numbers in cases:
        for factor, *of_shards in product(range(3), *[masks] * shards):
            drawn.update(zip("abc", of_shards, strict=False), check=[factor])
            pairs = zip(members(shards), numbers, strict=True)
            words = [own.share(np.array([x]) / 2.0**BITS, "1") for own, x in pairs]
            views.append(
                [digit for word, check in words for digit in (word % 2, check)]
            )
    view = coded(np.array(views).T, 3)
    database = np.repeat(np.arange(len(cases)), len(views) // len(cases))
    assert (information(database, view, view * 0) == 0) == is_masked
