"""Numbers in two bytes: how arrays are rounded to travel, and read again.

Notation:
    x      what is meant, a float32 number      q(x)   what arrives
    ulp    distance of the two numbers of the narrow format that x lies between

A narrow array is a power of two, one for the array, times numbers of a format:
``float16`` (IEEE 754 binary16, 11 bits of precision, all exponents in use as the
largest number is scaled to [2**14, 2**15)) or ``bfloat16`` (8 bits, the exponents of
float32). So neither large nor small arrays are lost, whatever their unit.

*Row arrays* (targets, messages, scores) are rounded **stochastically**: up with
probability (x - below) / ulp. Then

    E q(x) = x,   |q(x) - x| < ulp,   Var q(x) <= ulp**2 / 4,
    ulp <= 2**-10 |x| in float16 and 2**-7 |x| in bfloat16,

and errors of rows average out in what is computed from them. Below 2**-28 of the
largest number (2**-140 in bfloat16) steps get no finer: ulp = 2**-38 of it (2**-147).

Why this is without bias: the bits of a float, read as a whole number, grow with it, and
between two neighbours of the narrow format they grow evenly. A uniform whole number
from 0 to 2**k - 1 added to the bits before the last k are cut off carries into the
bits kept with a probability that is exactly the cut-off part over 2**k.

*Gradients* of shards add up over the steps, so that what rounding takes away can be
given back: q(x + e) is sent, rounded to nearest, and e' = x + e - q(x + e) kept for the
next step (error feedback; Seide et al. 2014, Karimireddy et al. 2019). The sum of all
that was sent is the sum of all that was meant but for the last e, half an ulp.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tp_flower.randomness import Stream, generator

AnyArray = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint16]

_TOP: Final = 15
"""The largest number is scaled to below 2**15, so that rounding up cannot overflow."""

_LEAST_TOP: Final = -148
"""The least float32 number above 0 is 2**-149, half of this power of two."""

LARGEST_EXPONENT: Final = _TOP - _LEAST_TOP
"""No array of float32 numbers needs a power of two beyond 2**-163 or 2**163."""


class Precision(StrEnum):
    """The setting ``wire``: what row arrays and gradients travel as."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class _Format:
    """How the narrow format's bits lie in those of a float32.

    Attributes:
        cut: last bits of a float32 that it does not have.
        lowered: powers of two by which a number must be smaller as a float32 for its
            exponent to have the same bits. What float16 cannot hold but in fewer bits
            is then such a number of float32, too, and is cut as the others are.
    """

    cut: int
    lowered: int

    @property
    def half_ulp(self) -> int:
        return 1 << (self.cut - 1)


_FORMATS: Final[Mapping[Precision, _Format]] = {
    Precision.FLOAT16: _Format(cut=13, lowered=127 - 15),
    Precision.BFLOAT16: _Format(cut=16, lowered=0),
}


@dataclass(frozen=True, eq=False)
class Narrow:
    """An array as it travels in two bytes per number.

    Attributes:
        bits: of the numbers, any shape. NumPy has no bfloat16.
        precision: FLOAT16 or BFLOAT16.
        exponent: the numbers are to be multiplied by 2**exponent.
    """

    bits: Bits
    precision: Precision
    exponent: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.bits.shape

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.bits.nbytes

    def wide(self) -> npt.NDArray[np.float32]:
        """Return the numbers; those beyond float32 are infinite."""
        if self.precision is Precision.FLOAT16:
            numbers = self.bits.view(np.float16).astype(np.float32)
        else:
            numbers = (self.bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        # in two steps: 2**exponent alone may be no float32
        half = self.exponent // 2
        with np.errstate(over="ignore", invalid="ignore"):
            numbers *= np.float32(2.0**half)
            numbers *= np.float32(2.0 ** (self.exponent - half))
        return numbers


Sent = AnyArray | Narrow
"""An array of a message: as it is, or in two bytes per number."""


def wide(array: Sent) -> AnyArray:
    """Return an array of a message as one to compute with."""
    return array.wide() if isinstance(array, Narrow) else array


def round_stochastically(
    values: AnyArray, precision: Precision, rng: np.random.Generator
) -> Narrow:
    """Return values rounded without bias (see the module); zeros stay zeros.

    Args:
        values: float32 or float64, any shape. Those that are not finite stay so.
        precision: FLOAT16 or BFLOAT16.
        rng: for the rounding; 16 bits per number are drawn.

    >>> rng = np.random.default_rng(0)
    >>> found = round_stochastically(np.full(4000, 1 / 3), Precision.FLOAT16, rng)
    >>> sorted(set(found.wide().tolist()))
    [0.333251953125, 0.33349609375]
    >>> abs(float(found.wide().mean(dtype=float)) - 1 / 3) < 1e-5
    True
    """
    words = rng.bit_generator.random_raw(-(-values.size // 4))
    dither = words.view(np.uint16)[: values.size].reshape(values.shape)
    if _FORMATS[precision].cut < 16:
        dither &= np.uint16((1 << _FORMATS[precision].cut) - 1)
    return _narrowed(values, precision, dither)


def round_to_nearest(values: AnyArray, precision: Precision) -> Narrow:
    """Return values rounded to nearest, ties away from zero; |q(x) - x| <= ulp / 2."""
    return _narrowed(values, precision, np.uint32(_FORMATS[precision].half_ulp))


def with_feedback(
    values: FloatArray, unsent: FloatArray, precision: Precision
) -> tuple[Sent, FloatArray]:
    """Return what is sent of values that add up over messages, and what is left.

    With FLOAT32 they travel as they are, in float64, and nothing is left.

    Args:
        values: of this message, any shape.
        unsent: what the message before has left; zeros before the first.
        precision: of the run.
    """
    if precision is Precision.FLOAT32:
        return values, unsent
    meant = values + unsent
    sent = round_to_nearest(meant, precision)
    return sent, meant - sent.wide()


class Rounding:
    """How the row arrays of one message, or of one part's share of it, leave.

    Args:
        precision: of the run.
        seed: of the run.
        stream: of the direction.
        position: of the message in the run, and of the part.
    """

    def __init__(
        self, precision: Precision, seed: int, stream: Stream, *position: int
    ) -> None:
        self.precision = precision
        self._source = partial(generator, seed, stream, *position)

    @cached_property
    def _rng(self) -> np.random.Generator:
        # made where it is needed: it takes longer than rounding a small array
        return self._source()

    def rows(self, values: AnyArray) -> Sent:
        """Return numbers per row, (n, d_c), as they leave."""
        if self.precision is not Precision.FLOAT32:
            return round_stochastically(values, self.precision, self._rng)
        # whoever receives them refuses what does not fit, and says what to do
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(np.float32)


def _narrowed(
    values: AnyArray, precision: Precision, dither: Bits | np.uint32
) -> Narrow:
    """Return values with ``dither`` added to the bits before the last are cut off."""
    form = _FORMATS[precision]
    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= float(np.finfo(np.float32).max):  # true for NaN
        return _not_finite(values, precision)
    # largest = m * 2**top with m from [1/2, 1)
    exponent = max(math.frexp(largest)[1], _LEAST_TOP) - _TOP
    scale = 2.0 ** -(exponent + form.lowered)
    # in float64, as the scale may be no float32
    scaled = values.astype(np.float64, copy=False) * scale
    bits = np.asarray(scaled, np.float32).view(np.uint32)
    bits += dither
    if form.cut == 16:
        return Narrow((bits >> np.uint32(16)).astype(np.uint16), precision, exponent)
    cut = (bits >> np.uint32(form.cut)).astype(np.uint16)
    cut &= np.uint16(0x7FFF)
    bits >>= np.uint32(16)
    cut |= bits.astype(np.uint16) & np.uint16(0x8000)
    return Narrow(cut, precision, exponent)


def _not_finite(values: AnyArray, precision: Precision) -> Narrow:
    """Return an array that holds NaN or infinity, so that whoever gets it sees it."""
    with np.errstate(over="ignore", invalid="ignore"):
        if precision is Precision.FLOAT16:
            return Narrow(values.astype(np.float16).view(np.uint16), precision, 0)
        bits = values.astype(np.float32).view(np.uint32) >> np.uint32(16)
    return Narrow(bits.astype(np.uint16), precision, 0)
