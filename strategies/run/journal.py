"""The server's journal of a run: what every round brought, so that a run can go on.

A strategy is a generator of rounds, and depends on nothing but its settings and the
replies that it was given. So the replies are the checkpoint: run again from the
journal, it has the duals, scores, mapping and random states that it had, and goes on
with the round that was in flight. Sites answer that round as they did, or would have.

Layout of ``<run>/checkpoint/``::

    head.json       version, name of the run, settings, query, who hosts what
    rounds.bin      one frame per round, appended
    in-flight.bin   the messages of the round that is not answered yet

A frame is ``magic, length, crc32`` and its body: the length of a JSON text, the text,
and the bytes of the messages. A frame that was not written whole is cut off. The disk
is waited for once in a second at most: rounds that a machine forgets when its power
fails are those of its last second.
"""

import fcntl
import json
import os
import shutil
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from flwr.app import Message

from tp_flower.errors import SettingsError
from tp_flower.files import write_file
from tp_flower.protocol import Parcel, open_parcel, parcel_of

VERSION: Final = 1
FOLDER: Final = "checkpoint"
HEAD: Final = "head.json"
ROUNDS: Final = "rounds.bin"
IN_FLIGHT: Final = "in-flight.bin"
SYNC_SECONDS: Final = 1.0

_FRAME: Final = struct.Struct("<8sQI")
_LENGTH: Final = struct.Struct("<Q")
_MAGIC: Final = b"tpround1"


@dataclass(frozen=True)
class Frame:
    """One round.

    Attributes:
        facts: JSON: what the round was, and what the report says of it.
        parcels: by node, what it answered.
    """

    facts: Mapping[str, Any]
    parcels: Mapping[int, Parcel]


class Journal:
    """The rounds of one run, on the server's disk.

    One process at a time has it open.

    Args:
        folder: of the checkpoint.
        head: what the run began with, JSON.

    Raises:
        SettingsError: another process goes on with the run.
    """

    def __init__(self, folder: Path, head: Mapping[str, Any]) -> None:
        self.folder, self.head = folder, head
        self._file = _locked(folder / ROUNDS)
        self._synced = 0.0

    @classmethod
    def begin(cls, folder: Path, head: Mapping[str, Any]) -> Self:
        """Start the journal of a new run in a folder, which is made.

        Raises:
            OSError: it cannot be written.
            SettingsError: the folder has a journal.
        """
        if (folder / HEAD).exists():
            raise SettingsError(
                f"{folder} has the checkpoint of a run that stopped: resume that run, "
                "remove the folder, or choose another output-dir"
            )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / ROUNDS).touch(mode=0o600)
        text = json.dumps({"version": VERSION, **head})
        write_file(folder / HEAD, [text.encode("utf8")], is_durable=True)
        return cls(folder, head)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Open the journal of a run that stopped.

        Raises:
            SettingsError: there is none, or it is of another version or damaged.
        """
        return cls(folder, read_head(folder))

    def append(self, frame: Frame) -> None:
        """Write a round down."""
        for piece in _framed(_body(frame)):
            self._file.write(piece)
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def frames(self) -> Iterator[Frame]:
        """Yield the rounds; what follows the last whole one is cut off."""
        self._file.seek(0)
        while (body := _read_frame(self._file)) is not None:
            yield _frame(body)

    def send_off(self, number: int, messages: Sequence[Message]) -> None:
        """Note the messages of a round before they leave."""
        frame = Frame(
            {"round": number},
            {m.metadata.dst_node_id: parcel_of(m.content) for m in messages},
        )
        path = self.folder / IN_FLIGHT
        write_file(path, _framed(_body(frame)), is_durable=False)

    def in_flight(self, number: int) -> Mapping[int, Parcel]:
        """Return the messages of a round as they left, by node; none if it has not."""
        path = self.folder / IN_FLIGHT
        if not path.exists():
            return {}
        with path.open("rb") as file:
            body = _read_frame(file)
        frame = None if body is None else _frame(body)
        if frame is None or frame.facts["round"] != number:
            return {}
        return frame.parcels

    def close(self) -> None:
        """Let other processes open it."""
        self._file.close()

    def remove(self) -> None:
        """Forget the run."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def read_head(folder: Path) -> dict[str, Any]:
    """Return what the run of a checkpoint began with.

    Raises:
        SettingsError: there is no checkpoint, or it is of another version or damaged.
    """
    try:
        head = json.loads((folder / HEAD).read_text(encoding="utf8"))
        version = head.pop("version")
    except FileNotFoundError:
        raise SettingsError(
            f"{folder.parent} has no checkpoint: its run has ended, or never began"
        ) from None
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise SettingsError(
            f"the checkpoint in {folder} cannot be read: {type(error).__name__}"
        ) from error
    if version != VERSION:
        raise SettingsError(
            f"the checkpoint in {folder} is of version {version!r}, expected {VERSION}"
        )
    found: dict[str, Any] = head
    return found


def messages_of(parcels: Mapping[int, Parcel], like: Sequence[Message]) -> None:
    """Give messages the content that they left with, where that is known."""
    for message in like:
        parcel = parcels.get(message.metadata.dst_node_id)
        if parcel is not None:
            message.content = open_parcel(parcel)


def _locked(path: Path) -> BinaryIO:
    """Open a file to read it and to append to it, for this process alone."""
    file = path.open("r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise SettingsError(
            f"another process goes on with the run of {path.parent.parent}"
        ) from None
    file.seek(0, os.SEEK_END)
    return file


def _body(frame: Frame) -> list[bytes | memoryview]:
    parcels = frame.parcels.items()
    sizes = [[node, *map(len, parcel)] for node, parcel in parcels]
    text = json.dumps({**frame.facts, "parcels": sizes}).encode("utf8")
    return [_LENGTH.pack(len(text)), text, *(p for _, own in parcels for p in own)]


def _framed(body: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    checksum, length = 0, 0
    for piece in body:
        checksum, length = zlib.crc32(piece, checksum), length + len(piece)
    return [_FRAME.pack(_MAGIC, length, checksum), *body]


def _read_frame(file: BinaryIO) -> memoryview | None:
    """Return the body of the next frame; None, and the file cut, if it is not whole."""
    start = file.tell()
    head = file.read(_FRAME.size)
    if len(head) == _FRAME.size:
        magic, length, checksum = _FRAME.unpack(head)
        rest = os.fstat(file.fileno()).st_size - file.tell()
        # an empty body has the checksum of zeros, which a crash may have left
        if magic == _MAGIC and _LENGTH.size <= length <= rest:
            body = file.read(length)
            if zlib.crc32(body) == checksum:
                return memoryview(body)
    if file.writable():
        file.truncate(start)
        file.seek(start)
    return None


def _frame(body: memoryview) -> Frame:
    (size,) = _LENGTH.unpack_from(body)
    start = _LENGTH.size + size
    facts = json.loads(bytes(body[_LENGTH.size : start]))
    parcels: dict[int, Parcel] = {}
    for node, *sizes in facts["parcels"]:
        pieces = []
        for length in sizes:
            pieces.append(body[start : start + length])
            start += length
        parcels[node] = Parcel(*pieces)
    return Frame(facts, parcels)
