"""Sums that the server learns without their summands: pairwise masks over integers.

The scores of a sampled joined row are wanted as their sum over the tables. Every part
adds to its number, modulo 2^64, a mask for each other part: the earlier one of a pair
adds what the later one subtracts. All masks cancel in the sum of all parts; the sum of
fewer is a uniformly random number.

Guarantee:
    Whoever lacks the secret, such as the server, learns of the parts' numbers their sum
    and nothing else, as long as ChaCha20 and HMAC-SHA-256 are what they are taken for.
    Whoever has it (every site) can take the masks off a message that it sees; sites see
    no messages of other sites.

    =================================  ================================================
    a part's message is missing        the sum is random: the run stops, nothing is told
    the same context is used twice     the difference of two messages of a part is bare:
                                       the context names run, action and history
    a part lies about its number       the sum is wrong by it; its range is checked
    =================================  ================================================

Reference:
    Bonawitz et al. 2017, Practical Secure Aggregation; without dropouts and with a
    secret that all clients share, so that no pair needs a key agreement of its own.
"""

import hashlib
import hmac
from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

FloatArray = npt.NDArray[np.float64]
WordArray = npt.NDArray[np.uint64]

FRACTION_BITS: Final = 24
LARGEST_BITS: Final = 56
"""A part's number is below 2^56: 256 of them are below 2^64."""
MOST_PARTS: Final = 1 << (64 - LARGEST_BITS)

_NONCE: Final = bytes(16)


def pair_masks(
    secret: bytes, part: int, parts: int, count: int, context: bytes
) -> WordArray:
    """Return what a part adds to its ``count`` numbers, modulo 2^64.

    Args:
        secret: what the sites share and the server does not have.
        part: 0 .. parts - 1.
        parts: all that are summed.
        count: numbers of a message.
        context: what sets the message apart from all others under the secret.

    Raises:
        ValueError: there is no such part, or there are too many.

    >>> pair = [pair_masks(b"s", part, 2, 3, b"run 1") for part in (0, 1)]
    >>> (pair[0] + pair[1]).tolist()
    [0, 0, 0]
    """
    if not 0 <= part < parts <= MOST_PARTS:
        raise ValueError(f"part {part} of {parts}; at most {MOST_PARTS} are summed")
    total = np.zeros(count, np.uint64)
    for other in range(parts):
        if other == part:
            continue
        first, second = sorted((part, other))
        stream = _stream(secret, f"{first}:{second}:{parts}:".encode() + context, count)
        total += stream if part == first else -stream
    return total


def _stream(secret: bytes, name: bytes, count: int) -> WordArray:
    """Return uniformly random words (count,) that secret and name determine."""
    key = hmac.digest(secret, b"tp_flower pair mask:" + name, hashlib.sha256)
    # the key is of this stream alone, so that a fixed nonce is no repetition
    cipher = Cipher(ChaCha20(key, _NONCE), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * count)), "<u8").astype(np.uint64)


def to_fixed(scores: FloatArray, joined_rows: int) -> WordArray:
    """Return round(g * N * 2^24) of scores (k,): their mean over a join is near 1 / N.

    The uniform share makes a sum at least 1 / N, which is then within 2^-24 parts of a
    unit per table.

    Raises:
        ValueError: a score is not in the range 0 to 2^56 / (N 2^24): the joined rows'
            weights are too different.

    >>> to_fixed(np.array([0.25]), 4).tolist() == [1 << 24]
    True
    """
    scaled = np.rint(scores * (float(joined_rows) * (1 << FRACTION_BITS)))
    # a comparison with NaN is false
    if not ((scaled >= 0) & (scaled < float(1 << LARGEST_BITS))).all():
        raise ValueError(
            f"scores are from {scores.min():g} to {scores.max():g}, of {joined_rows} "
            "rows: too large to be summed; the rows' weights are too different"
        )
    return scaled.astype(np.uint64)


def from_fixed(total: WordArray, joined_rows: int) -> FloatArray:
    """Return the scores (k,) whose fixed numbers sum to ``total``."""
    return total / (float(joined_rows) * (1 << FRACTION_BITS))
