"""Sums over the shards of a table: the server adds up shares that it cannot read.

A shard s sends, for an array x_s of k numbers, as its share

    fix(x_s) + a_s - a_(s-1)                        mod 2^64
    t_s = <r, fix(x_s)> + a'_s - a'_(s-1)           mod p = 2^61 - 1

with a_s = PRF(K_T; n, s), a'_s = PRF'(K_T; n, s) and a_0 = a'_0 = 0, over the shards in
one order, s = 1 to S. K_T is known to the table's shards alone, n numbers the arrays of
the run, s also names all shards of the sum, and r = PRF''(K_T; n). The server adds the
words and the checks, and returns their sums; each shard takes off a_S, to which the
masks add up, and has the sum of the arrays. No two arrays have one n and s.

The masks a_s - a_(s-1) of one n are as independent as the words a_s are: each set of
masks belongs to one set of words. So nothing is told that masks of a word for each
shard would hide, and a shard makes three words for each number, however many shards
there are: with a word for each shard, all of them together would make S^2.

A sum that is not over each of the shards once keeps a mask, and is refused. So is one
that the server has changed: it passes if <r, change> hits the change of the check,
which for one r_i in 2^60 at most is so. (|sum| < 2^60, so that no change is 0 mod p.)

fix is a number in fixed point: x 2^40, rounded, for numbers in units of about 1.

In the clear a share is x_s and 1: the last number of a sum counts its shards.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import mul
from typing import Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import AnyArray, FloatArray, IntArray
from tp_flower.errors import DivergedError, SiteError

WordArray = npt.NDArray[np.uint64]

BITS: Final = 40  # bits after the point
SUM_BITS: Final = 60  # the absolute sum of the words stays below 2^60
_PRIME: Final = (1 << 61) - 1
_PURPOSE: Final = b"tp_flower sealed sum v2 "
_COARSE = 2.0**30
_FINE = 2.0**-18
"""Units of the two numbers that stand for one of a Gram matrix."""


def fixed_words(numbers: FloatArray, addends: int, table: str) -> IntArray:
    """Return numbers of size about 1 in fixed point, one of some addends of a sum.

    Raises:
        DivergedError: a number is out of range.
    """
    limit = 2.0 ** (SUM_BITS - BITS) / addends
    # false for NaN
    if not np.abs(numbers).max(initial=0.0) < limit:
        # the server reads this, and states the unit: the number would tell what seals
        # hide
        raise DivergedError(
            f"table {table}: a number to be summed blindly is out of range; sealed "
            f"sums allow up to {limit:g} times its unit: training diverged, or a "
            "feature has no scale: encode numbers as 'standard'"
        )
    return np.rint(numbers * 2.0**BITS).astype(np.int64)


def read_words(fixed: IntArray) -> FloatArray:
    """Return the numbers whose fixed point, or a sum of it, an array is."""
    return fixed / 2.0**BITS


def add_shares(shares: Sequence[AnyArray]) -> AnyArray:
    """Return the sum of the shards' shares, (k + 1,), with the check at its end."""
    total: AnyArray = np.stack(shares).sum(axis=0)
    if total.dtype == np.uint64:
        total[-1] = sum(int(words[-1]) for words in shares) % _PRIME
    return total


def gram_size(width: int) -> int:
    """Return how many numbers stand for a Gram matrix (w, w), two for each."""
    return width * (width + 1)


def split_gram(gram: FloatArray) -> FloatArray:
    """Return two numbers for each of a symmetric matrix (w, w), which are up to 2^50.

    In fixed point they keep what one would lose, of features of any scale.
    """
    numbers = gram[np.triu_indices(len(gram))]
    unit = _COARSE / 2.0**BITS
    coarse = np.rint(numbers / unit) * unit
    return np.append(coarse / _COARSE, (numbers - coarse) / _FINE)


def joined_gram(numbers: FloatArray, width: int) -> FloatArray:
    """Return the matrix (w, w) that :func:`split_gram` has split, or a sum of them."""
    coarse, fine = np.split(numbers, 2)
    upper = np.triu_indices(width)
    gram = np.zeros((width, width))
    gram[upper] = coarse * _COARSE + fine * _FINE
    gram.T[upper] = gram[upper]
    return gram


@dataclass(frozen=True)
class ShardUnion:
    """The shards of a table whose arrays add up, as one of them knows them.

    Attributes:
        group: the name of the group of sites that share a key; "" where the shares
            leave in the clear.
        key: K_T, of the group.
        shards: a name for each shard of the sum, the same at all of them.
        shard: this one's name; one that is not in the sum only reads it.
        table: alias in the query, for error messages.
    """

    group: str
    key: bytes = field(repr=False)
    shards: tuple[str, ...]
    shard: str
    table: str

    @property
    def is_sealed(self) -> bool:
        """Whether only the shards can read the shares."""
        return bool(self.group)

    def share(self, numbers: FloatArray, name: str, unit: float = 1.0) -> AnyArray:
        """Return the share of k numbers whose size is about ``unit``, (k + 1,).

        ``name`` is the same at all shards, and that of no other array in the run.

        Raises:
            DivergedError: a number is out of range.
        """
        if not self.is_sealed:
            return np.append(numbers, 1.0)
        fixed = fixed_words(numbers.ravel() / unit, len(self.shards), self.table)
        count = len(fixed) + 1
        # one without training rows is in no sum: its own words alone hide its share
        position = self.shards.index(self.shard) if self.shard in self.shards else 0
        words = self._words(f"{name} {self.shard}", count)
        before = np.zeros_like(words)
        if position:
            before = self._words(f"{name} {self.shards[position - 1]}", count)
        masked = fixed.view(np.uint64) + words[:-1] - before[:-1]
        check = self._digest(fixed, name) + int(words[-1]) - int(before[-1])
        return np.append(masked, np.uint64(check % _PRIME))

    def total(self, shares: AnyArray, name: str, unit: float = 1.0) -> FloatArray:
        """Return the sum of the shards' arrays, (k,), from the sum of their shares.

        Raises:
            SiteError: it is not the sum of all shards' shares of that name.
        """
        self._check((shares.dtype == np.uint64) == self.is_sealed)
        if not self.is_sealed:
            self._check(shares[-1] == len(self.shards))
            return shares[:-1]
        # the other words cancel between neighbours
        last = self._words(f"{name} {self.shards[-1]}", len(shares))
        bare: WordArray = shares[:-1] - last[:-1]
        fixed = bare.view(np.int64)
        check = int(shares[-1]) - int(last[-1])
        beyond = (bare + np.uint64(1 << SUM_BITS)) >> np.uint64(SUM_BITS + 1)
        self._check(not beyond.any() and self._digest(fixed, name) == check % _PRIME)
        return read_words(fixed) * unit

    def _check(self, is_sum: bool) -> None:
        """Refuse a sum that is not that of the shares of all shards."""
        if not is_sum:
            raise SiteError(
                f"table {self.table}: the server's sum is not that of the shares of "
                f"all {len(self.shards)} shards: it left one out, counted one twice, "
                "or changed the sum"
            )

    def _digest(self, fixed: IntArray, name: str) -> int:
        """Return <r, fix(x)> mod p, exactly."""
        factors = self._words(f"{name} check", len(fixed))
        total: int = sum(map(mul, fixed.tolist(), factors.tolist()))
        return total % _PRIME

    def _words(self, name: str, count: int) -> WordArray:
        """Return pseudo-random words of a name, (count,), for this set of shards."""
        # of the short arrays of a step, a cipher takes longer to set up
        stream = hashlib.shake_256(self._union_key + name.encode())
        return np.frombuffer(stream.digest(8 * count), "<u8")

    @cached_property
    def _union_key(self) -> bytes:
        """The key of this set of shards, in this order, derived from K_T."""
        text = _PURPOSE + "\n".join(self.shards).encode()
        return hmac.digest(self.key, text, hashlib.sha256)
