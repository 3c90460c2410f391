"""All random number streams of a run, derived from its one seed.

Only this module makes generators: all other code takes one as an argument.
"""

import secrets
from collections.abc import Callable
from enum import IntEnum
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from tp_flower.arrays import FloatArray

Shape = int | tuple[int, ...]

KEY_BYTES: Final = 32
GRID_BITS: Final = 20  # noisy values are multiples of 2**-this of the deviation
_NONCE: Final = bytes(16)
_BITS: Final = 52  # a float can represent these bits and a half


class Stream(IntEnum):
    """Purposes of random streams; different purposes are independent."""

    SPLIT = 1
    BATCHES = 2
    ORDER = 3
    LOCAL_FIT = 4
    CURVATURE = 5
    DRAW = 9
    SOLVE = 10
    SUMMARIES = 11
    SAMPLE = 12
    NOISE = 13
    FACTORS = 14
    ROUNDING = 15
    FOLDS = 16
    CANDIDATES = 17
    PERMUTATIONS = 18


def generator(seed: int, stream: Stream, *position: int) -> np.random.Generator:
    """Return the generator of a purpose, for example for one epoch at one shard.

    >>> a, b = (generator(0, Stream.LOCAL_FIT, epoch) for epoch in (1, 2))
    >>> float(a.random()) == float(b.random())
    False
    """
    return np.random.default_rng([seed, int(stream), *position])


def key_stream(key: bytes) -> CipherContext:
    """Return the pseudo-random bytes of a key that is used for this stream alone."""
    # so that a fixed nonce is not reused
    return Cipher(ChaCha20(key, _NONCE), mode=None).encryptor()


class NoiseSource:
    """A stream of random numbers, from a key that is used for nothing else."""

    def __init__(self, key: bytes | Callable[[], bytes] | None = None) -> None:
        self._key = key

    @cached_property
    def _stream(self) -> CipherContext:
        # created with the first number: most messages need none
        key = secrets.token_bytes(KEY_BYTES) if self._key is None else self._key
        key = key() if callable(key) else key
        return key_stream(key)

    def uniform(self, shape: Shape) -> FloatArray:
        """Return numbers from the open interval (0, 1): odd multiples of 2**-53."""
        stream = self._stream.update(bytes(8 * int(np.prod(shape))))
        words = np.frombuffer(stream, np.uint64) >> np.uint64(64 - _BITS)
        return ((words.astype(np.float64) + 0.5) * 2.0**-_BITS).reshape(shape)

    def bernoulli(self, count: int, rate: float) -> npt.NDArray[np.int64]:
        """Return which of ``count`` items are drawn, each with probability ``rate``."""
        return np.flatnonzero(self.uniform(count) < rate)

    def generator(self) -> np.random.Generator:
        """Return a predictable generator, for draws that need not be secret."""
        words = np.frombuffer(self._stream.update(bytes(KEY_BYTES)), np.uint64)
        return np.random.default_rng(words)

    def with_gaussian(self, values: FloatArray, deviation: float) -> FloatArray:
        """Return values with Gaussian noise; the unchanged values for deviation 0."""
        if not deviation:
            return values
        # most messages draw no noise, and scipy takes a sixth of a second to import
        from scipy.special import ndtri

        return _round_to_grid(
            values + deviation * ndtri(self.uniform(values.shape)), deviation
        )

    def gaussian_words(self, deviations: FloatArray) -> npt.NDArray[np.uint64]:
        """Return whole numbers with Gaussian noise, modulo 2^64.

        They are for sums that cannot be rounded with their noise, as no one has both:
        on a grid, noise would leave what a sum is beside the grid. So a multiple of a
        step, 2^-GRID_BITS of the deviation, gets a uniform number below the step: what
        a noisy sum is modulo the step is uniform, and given that, the rest is a sum
        with Gaussian noise that is rounded to steps. ``deviations``, below 2^64, may
        be 0, for no noise.
        """
        from scipy.special import ndtri

        exponents = np.log2(np.maximum(deviations, 1.0))
        steps = np.maximum(np.floor(exponents) - GRID_BITS, 0.0).astype(np.uint64)
        noise = deviations * ndtri(self.uniform(deviations.shape))
        # rounded down, and up by half a step on average; whole numbers are rounded
        middles = np.where(steps == 0, 0.5, 0.0)
        coarse = np.floor(noise * 2.0 ** -steps.astype(np.float64) + middles)
        stream = self._stream.update(bytes(8 * deviations.size))
        fine = np.frombuffer(stream, "<u8").reshape(deviations.shape)
        # twice, as no shift is by 64
        fine = fine >> np.uint64(1) >> (np.uint64(63) - steps)
        words: npt.NDArray[np.uint64] = (
            coarse.astype(np.int64).view(np.uint64) << steps
        ) + fine
        return words

    def with_laplace(self, values: FloatArray, scale: float) -> FloatArray:
        """Return values with Laplace noise (deviation sqrt(2) scale); see above."""
        if not scale:
            return values
        centred = self.uniform(values.shape) - 0.5
        noise = -np.sign(centred) * np.log1p(-2.0 * np.abs(centred))
        return _round_to_grid(values + scale * noise, scale)


def _round_to_grid(values: FloatArray, deviation: float) -> FloatArray:
    step = 2.0 ** (np.floor(np.log2(deviation)) - GRID_BITS)
    rounded: FloatArray = np.round(values / step) * step
    return rounded
