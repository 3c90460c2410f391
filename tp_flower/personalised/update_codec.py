"""A piecewise constant vector as bytes: run lengths and values, or a code book.

    1 byte    layout of the runs (low 4 bits), and whether there is a code book (16)
    4 bytes   runs r, little-endian, like all numbers here
    runs      one bit per element, 1 where a run begins; or r lengths of 1, 2 or 4
              bytes; or nothing, where every element is a run
    values    r float32; or a code book: 1 byte k - 1, k float32, r indices of
              ceil(log2 k) bits each

The shortest layout is used. What is decoded is the encoded vector in float32, or with a
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

_BITMAP: Final = 0
_EACH: Final = 8
_WIDTHS: Final = {1: "<u1", 2: "<u2", 4: "<u4"}
_BOOK: Final = 16
_HEADER_BYTES: Final = 5


def encode_update(values: FloatArray, codes: int = 0) -> Bytes:
    """Return the bytes of a vector (d,): few where it has few runs of equal elements.

    ``codes`` is the size of the code book, at most `MOST_CODES`; 0 sends every value. A
    value that is not finite in float32 is a ValueError.

    >>> bytes(encode_update(np.array([2.0, 2.0, 2.0, 2.0]))).hex(" ")
    '00 01 00 00 00 80 00 00 00 40'
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
    layout, runs = _encode_runs(starts, len(narrow))
    content, is_booked = _encode_values(narrow[starts], codes)
    count = np.array([len(starts)], "<u4").view(np.uint8)
    head = np.array([layout | (_BOOK if is_booked else 0)], np.uint8)
    return np.concatenate([head, count, runs, content])


def decode_update(code: Bytes, size: int) -> FloatArray:
    """Return the vector (size,) that `encode_update` wrote.

    The code comes from a site: anything that violates the format is a ReplyError.
    """
    _check(code.dtype == np.uint8 and code.ndim == 1, "is not a vector of bytes")
    _check(len(code) >= _HEADER_BYTES, f"has {len(code)} bytes")
    kind = int(code[0])
    runs = int(code[1:_HEADER_BYTES].view("<u4")[0])
    _check(runs <= size and bool(runs) == bool(size), f"has {runs} runs for {size}")
    lengths, rest = _decode_runs(kind & ~_BOOK, code[_HEADER_BYTES:], runs, size)
    if kind & _BOOK:
        values = _decode_book(rest, runs)
    else:
        _check(len(rest) == 4 * runs, f"has {len(rest)} bytes of {runs} values")
        values = rest.copy().view("<f4")
    _check(bool(np.isfinite(values).all()), "has values that are not finite")
    return np.repeat(values.astype(np.float64), lengths)


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
    """Return where runs of equal elements begin."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])


def _encode_runs(starts: IntArray, size: int) -> tuple[int, Bytes]:
    """Return the shortest layout of the runs, and its bytes."""
    if len(starts) == size:
        return _EACH, np.empty(0, np.uint8)
    lengths = np.diff(starts, append=size)
    longest = int(lengths.max(initial=1))
    width = next(candidate for candidate in _WIDTHS if longest < 1 << (8 * candidate))
    if width * len(starts) < (size + 7) // 8:
        return width, lengths.astype(_WIDTHS[width]).view(np.uint8)
    begins = np.zeros(size, np.bool_)
    begins[starts] = True
    return _BITMAP, np.packbits(begins)


def _decode_runs(
    layout: int, content: Bytes, runs: int, size: int
) -> tuple[IntArray, Bytes]:
    """Return the runs' lengths and the remaining bytes."""
    if layout == _EACH:
        _check(runs == size, f"has {runs} runs that should be {size}")
        return np.ones(size, np.int64), content
    _check(layout == _BITMAP or layout in _WIDTHS, f"has the unknown layout {layout}")
    byte_count = (size + 7) // 8 if layout == _BITMAP else layout * runs
    _check(len(content) >= byte_count, "ends within its runs")
    if layout == _BITMAP:
        bits = np.unpackbits(content[:byte_count])
        _check(not bits[size:].any(), "has bits behind its end")
        starts = np.flatnonzero(bits)
        is_whole = len(starts) == runs and not starts[:1].any()
        lengths = np.diff(starts, append=size)
    else:
        lengths = content[:byte_count].copy().view(_WIDTHS[layout]).astype(np.int64)
        is_whole = int(lengths.sum()) == size and bool((lengths > 0).all())
    _check(is_whole, f"has runs that do not make up {size} elements")
    return lengths, content[byte_count:]


def _encode_values(values: npt.NDArray[np.float32], codes: int) -> tuple[Bytes, bool]:
    """Return the runs' values, and whether as a code book, which may be shorter."""
    raw = values.view(np.uint8)
    if not codes or not len(values):
        return raw, False
    book, index = np.unique(values, return_inverse=True)
    bits = (len(book) - 1).bit_length()
    bit_rows = index[:, None] >> np.arange(bits)[::-1]
    packed = np.packbits((bit_rows & 1).astype(np.uint8))
    head = np.array([len(book) - 1], np.uint8)
    booked = np.concatenate([head, book.view(np.uint8), packed])
    return (booked, True) if len(booked) < len(raw) else (raw, False)


def _decode_book(content: Bytes, runs: int) -> npt.NDArray[np.float32]:
    _check(len(content) > 0, "has no code book")
    codes = int(content[0]) + 1
    bits = (codes - 1).bit_length()
    packed = content[1 + 4 * codes :]
    expected = 1 + 4 * codes + (runs * bits + 7) // 8
    _check(
        len(content) == expected, f"has {len(content)} bytes of a code book's values"
    )
    places = np.unpackbits(packed)
    _check(not places[runs * bits :].any(), "has bits behind its end")
    powers = 1 << np.arange(bits)[::-1]
    index = places[: runs * bits].reshape(runs, bits) @ powers
    _check(bool((index < codes).all()), "names entries that its code book lacks")
    return content[1 : 1 + 4 * codes].copy().view("<f4")[index]


def _check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ReplyError(f"an encoded update {problem}")
