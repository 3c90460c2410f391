"""Sealed sums: the shards of a table add up arrays that the server cannot read.

A shard s sends, for an array x_s of k numbers,

    fix(x_s) + PRF(K_T; n, s)                       mod 2^64
    t_s = <r, fix(x_s)> + PRF'(K_T; n, s)           mod p = 2^61 - 1

K_T is known to the table's shards alone, n numbers the arrays of the run, s also names
all shards of the sum, and r = PRF''(K_T; n). The server adds the words and the checks,
and returns their sums; each shard takes off the masks of all shards, and has the sum of
the arrays. No two arrays have one n and s, hence none share a mask.

A sum that is not over each of the shards once keeps a mask, and is refused. So is one
that the server has changed: it passes if <r, change> hits the change of the check,
which for one r_i in 2^60 at most is so. (|sum| < 2^60, so that no change is 0 mod p.)

fix is a number in fixed point: x 2^40, rounded, for numbers in units of about 1.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray, IntArray
from tp_flower.errors import DivergedError, SiteError

WordArray = npt.NDArray[np.uint64]

BITS: Final = 40
"""Bits after the point."""
SUM_BITS: Final = 60
"""The absolute sum of the words stays below 2^60."""
_PRIME: Final = (1 << 61) - 1
_PURPOSE: Final = b"tp_flower sealed sum v1 "
_COARSE, _FINE = 10, 58
"""Bits after the point of the two words of a wide number."""


def add_sealed(arrays: Sequence[WordArray]) -> WordArray:
    """Return the sum of the shards' words, (k + 1,); the last one is the check."""
    total: WordArray = np.stack(arrays).sum(axis=0)
    total[-1] = sum(int(words[-1]) for words in arrays) % _PRIME
    return total


def gram_words(width: int) -> int:
    """Return how many words a Gram matrix (w, w) has, without the check.

    They are two for each number of its upper half.
    """
    return width * (width + 1)


@dataclass(frozen=True)
class SealedUnion:
    """The shards of a table whose arrays add up, as one of them knows them.

    Attributes:
        key: K_T.
        group: the name of the group of sites that have it.
        shards: a name for each shard of the sum, the same at all of them.
        shard: this one's name; one that is not in the sum only reads it.
        table: alias in the query, for error messages.
    """

    key: bytes = field(repr=False)
    group: str
    shards: tuple[str, ...]
    shard: str
    table: str

    def seal(self, numbers: FloatArray, name: str) -> WordArray:
        """Return the words of an array of k numbers, (k + 1,).

        ``name`` is the same at all shards, and that of no other array in the run.

        Raises:
            DivergedError: a number is out of range.
        """
        return self._masked(self._fixed(numbers.ravel(), BITS), name)

    def seal_gram(self, gram: FloatArray, name: str) -> WordArray:
        """Return the words of a symmetric matrix (w, w), of numbers up to 2^50."""
        numbers = gram[np.triu_indices(len(gram))]
        coarse = self._fixed(numbers, _COARSE)
        rest = numbers - coarse / 2.0**_COARSE
        return self._masked(np.append(coarse, self._fixed(rest, _FINE)), name)

    def open(self, words: WordArray, name: str) -> FloatArray:
        """Return the sum of the shards' arrays, (k,), from the sum of their words.

        Raises:
            SiteError: the words are not the sum of all shards' words of that name.
        """
        return self._unmasked(words, name) / 2.0**BITS

    def open_gram(self, words: WordArray, width: int, name: str) -> FloatArray:
        """Return the sum of the shards' matrices, (w, w)."""
        coarse, fine = np.split(self._unmasked(words, name), 2)
        upper = np.triu_indices(width)
        gram = np.zeros((width, width))
        gram[upper] = coarse / 2.0**_COARSE + fine / 2.0**_FINE
        gram.T[upper] = gram[upper]
        return gram

    def _fixed(self, numbers: FloatArray, bits: int) -> IntArray:
        limit = 2.0 ** (SUM_BITS - bits) / len(self.shards)
        largest = float(np.abs(numbers).max(initial=0.0))
        # false for NaN
        if not largest < limit:
            raise DivergedError(
                f"table {self.table}: a number to be summed over its shards is "
                f"{largest:g} times its unit; sealed sums allow up to {limit:g}: "
                "training diverged, or a feature has no scale. Lower learning-rate (0 "
                "chooses one), or encode numbers as 'standard'"
            )
        return np.rint(numbers * 2.0**bits).astype(np.int64)

    def _masked(self, fixed: IntArray, name: str) -> WordArray:
        masks = self._words(f"{name} {self.shard}", len(fixed) + 1)
        check = self._check(fixed, name) + int(masks[-1])
        words = fixed.view(np.uint64) + masks[:-1]
        return np.append(words, np.uint64(check % _PRIME))

    def _unmasked(self, words: WordArray, name: str) -> IntArray:
        count = len(words) - 1
        masks = [self._words(f"{name} {shard}", count + 1) for shard in self.shards]
        bare: WordArray = words[:-1] - np.stack(masks).sum(axis=0)[:-1]
        total = bare.view(np.int64)
        check = int(words[-1]) - sum(int(mask[-1]) for mask in masks)
        beyond = (bare + np.uint64(1 << SUM_BITS)) >> np.uint64(SUM_BITS + 1)
        if beyond.any() or self._check(total, name) != check % _PRIME:
            raise SiteError(
                f"table {self.table}: the server's sum is not that of the words of all "
                f"{len(self.shards)} shards: it left one out, counted one twice, or "
                "changed the sum"
            )
        return total

    def _check(self, fixed: IntArray, name: str) -> int:
        """Return <r, fix(x)> mod p, exactly."""
        factors = self._words(f"{name} check", len(fixed))
        total: int = sum(map(mul, fixed.tolist(), factors.tolist()))
        return total % _PRIME

    def _words(self, name: str, count: int) -> WordArray:
        """Return pseudo-random words of a name, (count,), for this set of shards."""
        text = "\n".join([*self.shards, name]).encode()
        # of the short arrays of a step, a cipher takes longer to set up
        words = hashlib.shake_256(self.key + _PURPOSE + text).digest(8 * count)
        return np.frombuffer(words, "<u8")
