"""What a site keeps of the round of a run that it has answered last, in one file.

The round's number, the digest of its request, the vectors that it has changed and the
reply are one record: they are there together or not at all, wherever a process is
killed. The file is written under another name, then renamed.

Layout
    magic, version, crc32 and length of the description        24 bytes
    the description                                            JSON
    the vectors, one after the other
    the reply: header, layout and payload

Each of them starts at a multiple of 64 bytes. The description has the shapes of the
vectors, the lengths of the reply's pieces, and the crc32 of both.
"""

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from tp_flower.arrays import AnyArray
from tp_flower.errors import LostStateError
from tp_flower.files import write_file
from tp_flower.protocol import WIRE_DTYPES, ArrayKey, Parcel

VERSION: Final = 1
STATE_FILE: Final = "state"

_MAGIC: Final = b"tpf-site"
_START: Final = struct.Struct("<8sIIQ")
_ALIGNMENT: Final = 64
_SMALL_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Record:
    """A round of a run that a site has answered, and what it has left.

    Attributes:
        run: names the run at this site.
        number: of the round.
        digest: of its request.
        history: stands for all rounds up to this one, and for the rows that were read.
        reply: that was sent.
        arrays: the state by (part, name).
        entries: the names of all else that the site keeps of the run.
        doomed: the names of what is to be forgotten, now that the round is answered.
        is_over: whether nothing more is to be done in the run.
        checksum: crc32 of the reply in a file, which nobody has read yet; None where
            it is not in a file.
    """

    run: str
    number: int
    digest: str
    history: str
    reply: Parcel
    arrays: Mapping[ArrayKey, AnyArray] = field(default_factory=dict)
    entries: tuple[str, ...] = ()
    doomed: tuple[str, ...] = ()
    is_over: bool = False
    checksum: int | None = None

    def check_reply(self) -> None:
        """Refuse a reply that is damaged.

        Raises:
            LostStateError: it is.
        """
        if self.checksum not in (None, _checksum(self.reply)):
            raise LostStateError("the kept reply of the last round is damaged")


def write(path: Path, record: Record, *, is_durable: bool) -> None:
    """Replace a state file by one that has a record.

    Raises:
        OSError: it cannot be written; the one before is still there.
    """
    arrays = {key: np.ascontiguousarray(own) for key, own in record.arrays.items()}
    vectors = [_bytes(own) for own in arrays.values()]
    described = {
        "run": record.run,
        "round": record.number,
        "digest": record.digest,
        "history": record.history,
        "entries": record.entries,
        "doomed": record.doomed,
        "over": record.is_over,
        "arrays": [
            [part, name, str(own.dtype), own.shape]
            for (part, name), own in arrays.items()
        ],
        "state": _checksum(vectors),
        "lengths": [len(piece) for piece in record.reply],
        "reply": _checksum(record.reply),
    }
    text = json.dumps(described, separators=(",", ":")).encode()
    start = _START.pack(_MAGIC, VERSION, zlib.crc32(text), len(text))
    pieces = [start + text, *vectors, *record.reply]
    write_file(path, _padded(pieces), is_durable=is_durable)


def read(path: Path, run: str) -> Record:
    """Return the record of a file; its arrays are read-only maps of it.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
        ValueError: it is damaged, of another version, or of another run.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        # a map of a small file takes longer than reading it
        whole = memoryview(
            file.read()
            if size <= _SMALL_BYTES
            else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        )
    if len(whole) < _START.size:
        raise ValueError("it ends too soon")
    magic, version, checksum, size = _START.unpack_from(whole)
    text = whole[_START.size : _START.size + size]
    if (magic, version, checksum) != (_MAGIC, VERSION, zlib.crc32(text)):
        raise ValueError("its description is damaged, or of another version")
    told: dict[str, Any] = json.loads(bytes(text))
    if told["run"] != run:
        raise ValueError("it is of another run")
    place = _next(_START.size + size)
    arrays, vectors = {}, []
    for part, name, dtype, shape in told["arrays"]:
        own = _view(whole, place, dtype, shape)
        arrays[part, name] = own
        vectors.append(_bytes(own))
        place = _next(place + own.nbytes)
    if _checksum(vectors) != told["state"]:
        raise ValueError("its vectors are damaged")
    reply = []
    for length in told["lengths"]:
        reply.append(whole[place : place + length])
        place = _next(place + length)
    return Record(
        run=run,
        number=told["round"],
        digest=told["digest"],
        history=told["history"],
        reply=Parcel(*reply),
        arrays=arrays,
        entries=tuple(told["entries"]),
        doomed=tuple(told["doomed"]),
        is_over=told["over"],
        checksum=told["reply"],
    )


def _view(whole: memoryview, place: int, dtype: str, shape: list[int]) -> AnyArray:
    """Return a vector within a file."""
    if dtype not in WIRE_DTYPES:
        raise ValueError(f"a vector is of type {dtype}")
    kind = np.dtype(dtype)
    if place + prod(shape) * kind.itemsize > len(whole):
        raise ValueError("it ends too soon")
    return np.ndarray(shape, kind, whole, place)


def _bytes(array: AnyArray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _checksum(pieces: Iterable[bytes | memoryview]) -> int:
    """Return the crc32 of all, one after the other."""
    return reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces, 0)


def _padded(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the pieces, each up to the next multiple of ``_ALIGNMENT`` bytes."""
    for piece in pieces:
        yield piece
        yield bytes(_next(len(piece)) - len(piece))


def _next(place: int) -> int:
    return place + -place % _ALIGNMENT
