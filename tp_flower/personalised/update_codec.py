"""A piecewise constant vector as bytes: its runs, and their values or a code book.

    1 byte    1 if there is a code book, else 0
    runs      one bit per element, 1 where a run of equal elements begins
    values    r float32, little-endian like all numbers here; or a code book: 1 byte
              k - 1, k float32, r indices of ceil(log2 k) bits each

What is decoded is the encoded vector in float32, or with a
code book its nearest entries: equal elements stay exactly equal.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray, IntArray
from tp_flower.errors import ReplyError

Bytes = npt.NDArray[np.uint8]

MOST_CODES: Final = 256
LLOYD_STEPS: Final = 30


def encode_update(values: FloatArray, codes: int = 0) -> Bytes:
    """Return the bytes of a vector (d,): few where it has few runs of equal elements.

    ``codes`` is the size of the code book, at most `MOST_CODES`; 0 sends every value. A
    value that is not finite in float32 is a ValueError.

    >>> bytes(encode_update(np.array([2.0, 2.0, 2.0, 2.0]))).hex(" ")
    '00 80 00 00 00 40'
    """
    if not 0 <= codes <= MOST_CODES:
        raise ValueError(f"codes is {codes}, allowed: 0 to {MOST_CODES}")
    with np.errstate(over="ignore"):
        narrow = values.astype("<f4")
    if not np.isfinite(narrow).all():
        raise ValueError("an update has values that are not finite")
    starts = _starts(narrow)
    if codes and len(starts):
        lengths = np.diff(starts, append=len(narrow))
        book = code_book(narrow[starts].astype(np.float64), lengths, codes)
        narrow = np.repeat(book[_nearest(book, narrow[starts])], lengths)
        starts = _starts(narrow)
    begins = np.zeros(len(narrow), np.bool_)
    begins[starts] = True
    content, has_book = _encode_values(narrow[starts], codes)
    return np.concatenate(
        [np.array([has_book], np.uint8), np.packbits(begins), content]
    )


def decode_update(code: Bytes, size: int) -> FloatArray:
    """Return the vector (size,) that `encode_update` wrote.

    The code comes from a site: anything that violates the format is a ReplyError.
    """
    _check(code.dtype == np.uint8 and code.ndim == 1, "is not a vector of bytes")
    stop = 1 + (size + 7) // 8
    _check(len(code) >= stop, f"has {len(code)} bytes, and its runs take {stop}")
    _check(code[0] in (0, 1), f"has the unknown layout {code[0]}")
    begins = np.unpackbits(code[1:stop])
    _check(not begins[size:].any(), "has bits behind its end")
    starts = np.flatnonzero(begins)
    _check(not size or bool(begins[0]), "has elements before its first run")
    runs, rest = len(starts), code[stop:]
    if code[0]:
        values = _decode_book(rest, runs)
    else:
        _check(len(rest) == 4 * runs, f"has {len(rest)} bytes of {runs} values")
        values = rest.copy().view("<f4")
    _check(bool(np.isfinite(values).all()), "has values that are not finite")
    return np.repeat(values.astype(np.float64), np.diff(starts, append=size))


def code_book(
    values: FloatArray, counts: IntArray, codes: int
) -> npt.NDArray[np.float32]:
    """Return at most ``codes`` float32 to represent values, ascending and distinct.

    k-means in one dimension, with each value, (r,), counted as often as it occurs:
    Lloyd's iteration from the quantiles, so that equal values give equal code books; if
    a value is zero, zero stays an entry.
    """
    order = np.argsort(values)
    points, weights = values[order], counts[order].astype(np.float64)
    distinct = np.unique(points.astype(np.float32))
    if len(distinct) <= codes:
        return distinct
    share = (np.cumsum(weights) - 0.5 * weights) / weights.sum()
    book = np.unique(np.interp((np.arange(codes) + 0.5) / codes, share, points))
    for _ in range(LLOYD_STEPS):
        owner = _nearest(book, points)
        mass = np.bincount(owner, weights)
        total = np.bincount(owner, weights * points)
        means = np.unique(total[mass > 0] / mass[mass > 0])
        if np.array_equal(means, book):
            break
        book = means
    if (points == 0.0).any():
        book[np.argmin(np.abs(book))] = 0.0
    return np.unique(book.astype(np.float32))


def _nearest(
    book: npt.NDArray[np.floating], values: npt.NDArray[np.floating]
) -> IntArray:
    wide = book.astype(np.float64)
    return np.searchsorted(0.5 * (wide[1:] + wide[:-1]), values.astype(np.float64))


def _starts(values: npt.NDArray[np.float32]) -> IntArray:
    return np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])


def _encode_values(values: npt.NDArray[np.float32], codes: int) -> tuple[Bytes, bool]:
    """Return the runs' values, and whether as a code book, which may be shorter."""
    raw = values.view(np.uint8)
    if not codes or not len(values):
        return raw, False
    book, index = np.unique(values, return_inverse=True)
    bit_rows = index[:, None] >> np.arange((len(book) - 1).bit_length())[::-1]
    packed = np.packbits((bit_rows & 1).astype(np.uint8))
    booked = np.concatenate(
        [np.array([len(book) - 1], np.uint8), book.view(np.uint8), packed]
    )
    return (booked, True) if len(booked) < len(raw) else (raw, False)


def _decode_book(content: Bytes, runs: int) -> npt.NDArray[np.float32]:
    _check(len(content) > 0, "has no code book")
    codes = int(content[0]) + 1
    bits = (codes - 1).bit_length()
    expected = 1 + 4 * codes + (runs * bits + 7) // 8
    _check(
        len(content) == expected, f"has {len(content)} bytes of a code book's values"
    )
    places = np.unpackbits(content[1 + 4 * codes :])
    _check(not places[runs * bits :].any(), "has bits behind its end")
    index = places[: runs * bits].reshape(runs, bits) @ (1 << np.arange(bits)[::-1])
    _check(bool((index < codes).all()), "names entries that its code book lacks")
    return content[1 : 1 + 4 * codes].copy().view("<f4")[index]


def _check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ReplyError(f"an encoded update {problem}")
