"""A look at the bytes of a CSV file, faster than reading its values as texts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

CHUNK_BYTES: Final = 1 << 18  # about a core's cache
_OVERLAP: Final = 2
_ZERO: Final = ord("0")
_LAST_MARK: Final = ord(",")  # blanks, line ends, quotes, plus and comma come before it


def has_odd_numbers(path: str, delimiter: str) -> bool:
    """Return whether some value may be a number in an odd form.

    That is one with a blank, an underscore, a plus sign or a leading zero, such as
    '007'. If a file has none of these after its first line, no value is odd; if it has,
    it may be in a text.

    Args:
        path: the file; one that is compressed cannot be looked at.
        delimiter: between values, one character of ASCII for the file to be looked at.
    """
    if path.endswith(".gz") or len(delimiter) != 1 or not delimiter.isascii():
        return True
    return any(_is_odd(chunk, ord(delimiter)) for chunk in _chunks(path))


def _chunks(path: str) -> Iterator[bytes]:
    """Pieces of the file from the end of its first line on; they overlap."""
    with Path(path).open("rb") as file:
        kept = file.readline()[-1:]
        while read := file.read(CHUNK_BYTES):
            yield kept + read
            kept = (kept + read)[-_OVERLAP:]


def _is_odd(chunk: bytes, delimiter: int) -> bool:
    if b"_" in chunk or b" " in chunk or b"+" in chunk:
        return True
    data = np.frombuffer(chunk, np.uint8)
    ends = data[:-2] <= _LAST_MARK
    if delimiter > _LAST_MARK:
        ends |= data[:-2] == delimiter
    ends &= data[1:-1] == _ZERO
    ends &= data[2:] - np.uint8(_ZERO) < 10  # a digit: smaller bytes wrap around
    return bool(ends.any())
