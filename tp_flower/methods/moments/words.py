"""Numbers in fixed point as words, and sums of products of words modulo 2^64.

A number x of column a is the word round(x 2^b_a) mod 2^64, so that a sum of products of
columns a and c is that of the numbers, times 2^(b_a + b_c), as long as it stays below
2^63 in absolute value. By Cauchy and Schwarz it does if sum_j x_a(j)^2 2^(2 b_a) is at
most 2^62 for every column: the bits of a column follow from its own second moment.

Notation:
    n  rows        d  columns        b  ``bits``  (d,), after the point
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import BoolArray, FloatArray, IntArray

WordArray = npt.NDArray[np.uint64]

MOST_BITS: Final = 40
"""After the point: a column of tiny numbers needs no more to be as exact as others."""
LEAST_BITS: Final = -40
_MOMENT_BITS: Final = 62
_BLOCK_ROWS: Final = 1 << 16
_LIMB: Final = 16
_LIMBS: Final = 4


def column_bits(second_moments: FloatArray) -> IntArray:
    """Return the bits of columns whose sums of squares over the join are (d,).

    >>> column_bits(np.array([1.0, 2.0**20, 0.0])).tolist()
    [31, 21, 40]
    """
    least = 2.0 ** (2 * (_MOMENT_BITS / 2 - MOST_BITS))
    exponents = np.log2(np.maximum(second_moments, least)) / 2.0
    bits = np.floor(_MOMENT_BITS / 2 - exponents)
    clipped: IntArray = np.clip(bits, LEAST_BITS, MOST_BITS).astype(np.int64)
    return clipped


def public_bits(joined_rows: int, magnitudes: IntArray) -> IntArray:
    """Return the bits of columns whose root mean square is at most 2^magnitude, (d,).

    >>> public_bits(1 << 20, np.array([0, 3])).tolist()
    [21, 18]
    """
    largest: FloatArray = joined_rows * 4.0 ** magnitudes.astype(np.float64)
    return column_bits(largest)


def fits(second_moments: FloatArray, bits: IntArray, shards: int) -> BoolArray:
    """Return which columns of a shard, (d,), keep the sums of all shards below 2^62."""
    largest: BoolArray = second_moments <= 4.0 ** (_MOMENT_BITS / 2 - bits) / shards
    return largest


def to_words(numbers: FloatArray, bits: IntArray) -> WordArray:
    """Return numbers (n, d) in fixed point.

    >>> to_words(np.array([[-1.0]]), np.array([3])).view(np.int64).tolist()
    [[-8]]
    """
    scaled = numbers * 2.0 ** bits.astype(np.float64)
    return np.rint(scaled).astype(np.int64).view(np.uint64)


def to_numbers(words: WordArray, left: IntArray, right: IntArray) -> FloatArray:
    """Return sums of products (a, c) of columns with bits (a,) and (c,) as numbers."""
    whole = words.view(np.int64).astype(np.float64)
    numbers: FloatArray = np.ldexp(whole, -(left[:, None] + right[None, :]))
    return numbers


def inner(left: WordArray, right: WordArray) -> WordArray:
    """Return left^T right mod 2^64, of words (n, a) and (n, c).

    Integers have no BLAS. Words are cut into limbs of 16 bits, whose products over a
    block of rows are whole numbers below 2^53: floating point is exact on them. Words
    that are small numbers have fewer limbs than pads.

    >>> inner(np.array([[2**63]], np.uint64), np.array([[3]], np.uint64)).tolist()
    [[9223372036854775808]]
    """
    total = np.zeros((left.shape[1], right.shape[1]), np.uint64)
    for start in range(0, len(left), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        left_limbs = _limbs(left[block])
        right_limbs = _limbs(right[block])
        for i, left_limb in enumerate(left_limbs):
            for j, right_limb in enumerate(right_limbs[: _LIMBS - i]):
                product = (left_limb.T @ right_limb).astype(np.int64).view(np.uint64)
                total += product << np.uint64(_LIMB * (i + j))
    return total


def _limbs(words: WordArray) -> list[FloatArray]:
    """Return the limbs of words, the lowest first; the highest has their sign."""
    numbers = words.view(np.int64)
    low = int(numbers.min(initial=0))
    high = int(numbers.max(initial=0))
    # of the bits of the larger one, and its sign
    bits = max(high, -low - 1).bit_length() + 1
    count = -(-bits // _LIMB)
    unsigned = np.ascontiguousarray(words, "<u8").view("<u2")
    pieces = unsigned.reshape(*words.shape, _LIMBS)
    limbs = [pieces[..., limb].astype(np.float64) for limb in range(count - 1)]
    highest = pieces.view("<i2")[..., count - 1].astype(np.float64)
    return [*limbs, highest]
