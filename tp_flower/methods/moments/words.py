"""Numbers in fixed point as words, and sums of products of words modulo 2^64.

A number x of column a is the word round(x 2^b_a) mod 2^64, so that a sum of products of
columns a and c is that of the numbers, times 2^(b_a + b_c), as long as it stays below
2^63 in absolute value. By Cauchy and Schwarz it does if sum_j x_a(j)^2 2^(2 b_a) is at
most 2^62 for every column: the bits of a column follow from its own second moment.

Notation:
    n  rows        d  columns        b  ``bits``  (d,), after the point
"""

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import BoolArray, FloatArray, IntArray

WordArray = npt.NDArray[np.uint64]

MOST_BITS: Final = 40
"""After the point: a column of tiny numbers needs no more to be as exact as others."""
LEAST_BITS: Final = -64
"""Before the point. Columns that fit have no value as large as encoded ones are clipped
to."""
_MOMENT_BITS: Final = 62
_WORD_BITS: Final = 64
_EXACT_BITS: Final = 53
"""Of whole numbers in float64."""
_BLOCK_ROWS: Final = 1 << 9
"""So few that the limbs of a block stay in the processor's cache."""


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

    Integers have no BLAS. Words are cut into limbs, whose products over a block of rows
    are whole numbers of at most 2^53: floating point is exact on them. Words that are
    small numbers have fewer limbs than pads.

    >>> inner(np.array([[2**63]], np.uint64), np.array([[3]], np.uint64)).tolist()
    [[9223372036854775808]]
    """
    total = np.zeros((left.shape[1], right.shape[1]), np.uint64)
    for start in range(0, len(left), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        left_size = _bits_of(left[block])
        right_size = _bits_of(right[block])
        left_bits, right_bits = _limb_bits(left_size, right_size)
        left_limbs = _limbs(left[block], left_size, left_bits)
        right_limbs = _limbs(right[block], right_size, right_bits)
        for left_shift, left_limb in left_limbs.items():
            for right_shift, right_limb in right_limbs.items():
                shift = left_shift + right_shift
                if shift < _WORD_BITS:
                    product = (left_limb.T @ right_limb).astype(np.int64)
                    total += product.view(np.uint64) << np.uint64(shift)
    return total


def _bits_of(words: WordArray) -> int:
    """Return the bits of the largest word as a signed number, its sign among them."""
    numbers = words.view(np.int64)
    low = int(numbers.min(initial=0))
    high = int(numbers.max(initial=0))
    return max(high, -low - 1).bit_length() + 1


@cache
def _limb_bits(left: int, right: int) -> tuple[int, int]:
    """Return the bits of limbs that have the fewest products, of words of some bits.

    >>> _limb_bits(64, 64), _limb_bits(64, 25), _limb_bits(25, 25)
    ((22, 22), (19, 25), (19, 25))
    """
    exact = _EXACT_BITS - _BLOCK_ROWS.bit_length() + 1

    def products(left_bits: int) -> int:
        right_bits = exact - left_bits
        return sum(
            left_shift + right_shift < _WORD_BITS
            for left_shift in range(0, left, left_bits)
            for right_shift in range(0, right, right_bits)
        )

    # of equally many, those of most equal sizes
    return min(
        ((bits, exact - bits) for bits in range(1, exact)),
        key=lambda pair: (products(pair[0]), abs(pair[0] - pair[1])),
    )


def _limbs(words: WordArray, size: int, bits: int) -> dict[int, FloatArray]:
    """Return the limbs of words of some size by their first bit; the highest is signed.

    >>> _limbs(np.array([0xABCD], np.uint64), 17, 8)
    {0: array([205.]), 8: array([171.]), 16: array([0.])}
    """
    rest = words.view(np.int64)
    mask = np.int64((1 << bits) - 1)
    limbs = {}
    highest = (size - 1) // bits * bits
    for shift in range(0, highest, bits):
        limbs[shift] = (rest & mask).astype(np.float64)
        rest = rest >> np.int64(bits)
    limbs[highest] = rest.astype(np.float64)
    return limbs
