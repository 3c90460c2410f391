"""The server's journal of a run: the replies of every round, so that it can be resumed.

A strategy is a generator of rounds, and depends on nothing but its settings and the
replies that it received. So the replies are the checkpoint: run again with the replies
in the journal, it gets the same duals, scores, mapping and random states, and continues
with the round that was in flight. Sites answer that round as they did, or would have.

``<run>/checkpoint/journal.db`` has the settings that the run began with, the replies of
every round, and the messages of the unanswered round; arrays of ``LARGE_BYTES`` and
more are stored beside it. The disk is synchronised at most once a second: when the
power fails, only the rounds of the last second are lost.
"""

import errno
import json
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Final, Self

from flwr.app import Message

from tp_flower.database import DamagedFileError, Database
from tp_flower.errors import SettingsError
from tp_flower.files import write_file
from tp_flower.protocol.fields import Document
from tp_flower.protocol.packet import Parcel, parcel_of

VERSION: Final = 1
FOLDER: Final = "checkpoint"
FILE: Final = "journal.db"
SCHEMA: Final = """
CREATE TABLE head (facts TEXT NOT NULL);
CREATE TABLE frames (
    id INTEGER PRIMARY KEY,
    facts TEXT NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE parcels (
    frame INTEGER NOT NULL,
    node TEXT NOT NULL,
    header BLOB NOT NULL,
    layout BLOB NOT NULL,
    payload BLOB NOT NULL,
    file TEXT NOT NULL,
    PRIMARY KEY (frame, node)
);
"""
LARGE_BYTES: Final = 1 << 20
SYNC_SECONDS: Final = 1.0

_SUFFIX: Final = ".payload"
_IN_FLIGHT: Final = 0  # the frame of the unanswered messages; rounds count from 1


@dataclass(frozen=True)
class Frame:
    """One round: JSON facts for the report, and each node's reply."""

    facts: Document
    parcels: Mapping[int, Parcel]


class Journal:
    """The rounds of one run, on the server's disk.

    Only one process at a time has it open (SettingsError if another one has, or if
    there is no readable journal). ``head`` is JSON: how the run began.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / FILE).exists():
            raise SettingsError(
                f"{folder.parent} has no checkpoint: its run has ended, or never began"
            )
        self.folder = folder
        self._synced = 0.0
        self._database = _open(folder)
        try:
            self.head = self._read_head()
            self._sweep()
        except BaseException:
            self._database.close()
            raise

    @classmethod
    def begin(cls, folder: Path, head: Document) -> Self:
        """Start the journal of a new run in a folder, which is created."""
        if (folder / FILE).exists():
            raise SettingsError(
                f"{folder} has the checkpoint of a run that stopped: resume that run, "
                "remove the folder, or choose another output-dir"
            )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        database = _open(folder)
        with database.transaction() as connection:
            connection.execute("INSERT INTO head VALUES (?)", (json.dumps(head),))
        database.close()
        return cls(folder)

    def append(self, frame: Frame) -> None:
        """Record a round."""
        is_durable = time.monotonic() - self._synced > SYNC_SECONDS
        self._write(None, frame, is_durable=is_durable)
        if is_durable:
            self._synced = time.monotonic()

    def frames(self) -> Iterator[Frame]:
        """Yield the rounds; forget a damaged one and those after it."""
        with self._database.reading() as connection:
            query = "SELECT id FROM frames WHERE id <> ? ORDER BY id"
            numbers = [n for (n,) in connection.execute(query, (_IN_FLIGHT,))]
        for number in numbers:
            try:
                yield self._frame(number)
            except (OSError, ValueError):
                with self._database.transaction() as connection:
                    for table, column in (("frames", "id"), ("parcels", "frame")):
                        query = f"DELETE FROM {table} WHERE {column} >= ?"
                        connection.execute(query, (number,))
                return

    def send_off(self, number: int, messages: Sequence[Message]) -> None:
        """Record the messages of a round before they leave."""
        parcels = {m.metadata.dst_node_id: parcel_of(m.content) for m in messages}
        with self._database.reading() as connection:
            query = "SELECT file FROM parcels WHERE frame = ? AND file <> ''"
            replaced = [name for (name,) in connection.execute(query, (_IN_FLIGHT,))]
        self._write(_IN_FLIGHT, Frame({"round": number}, parcels), is_durable=False)
        for name in replaced:
            (self.folder / name).unlink(missing_ok=True)

    def in_flight(self, number: int) -> Mapping[int, Parcel]:
        """Return the recorded messages of a round, by node; {} if none left."""
        try:
            frame = self._frame(_IN_FLIGHT)
        except (OSError, ValueError):
            return {}
        if frame.facts["round"] != number:
            return {}
        return frame.parcels

    def close(self) -> None:
        """Close the journal, so that other processes can open it."""
        self._database.close()

    def remove(self) -> None:
        """Delete the journal: the run is over."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, number: int | None, frame: Frame, *, is_durable: bool) -> None:
        """Write a frame, replacing one with its number; None for the next number."""
        rows: list[tuple[object, ...]] = []
        for node, (header, layout, payload) in frame.parcels.items():
            name = ""
            data = payload
            if len(payload) >= LARGE_BYTES:
                name = f"{secrets.token_hex(8)}{_SUFFIX}"
                data = b""
                write_file(self.folder / name, [payload], is_durable=is_durable)
            # SQLite's numbers have 63 bits, those of Flower's nodes 64
            rows.append((str(node), header, layout, data, name))
        text = json.dumps(frame.facts)
        values = number, text, _checksum(text, frame.parcels)
        with self._database.transaction(is_durable=is_durable) as connection:
            query = "INSERT OR REPLACE INTO frames VALUES (?, ?, ?)"
            number = connection.execute(query, values).lastrowid
            connection.execute("DELETE FROM parcels WHERE frame = ?", (number,))
            query = "INSERT INTO parcels VALUES (?, ?, ?, ?, ?, ?)"
            connection.executemany(query, ((number, *row) for row in rows))

    def _frame(self, number: int) -> Frame:
        """Return a frame; OSError if a file is gone, ValueError if it is damaged."""
        with self._database.reading() as connection:
            query = "SELECT facts, checksum FROM frames WHERE id = ?"
            frame = connection.execute(query, (number,)).fetchone()
            rows = connection.execute(
                "SELECT node, header, layout, payload, file FROM parcels "
                "WHERE frame = ? ORDER BY rowid",
                (number,),
            ).fetchall()
        if frame is None:
            raise ValueError("there is no such frame")
        parcels: dict[int, Parcel] = {}
        for node, header, layout, payload, name in rows:
            data = (self.folder / Path(name).name).read_bytes() if name else payload
            parcels[int(node)] = Parcel(header, layout, data)
        text, checksum = frame
        if _checksum(text, parcels) != checksum:
            raise ValueError("its checksum does not match")
        return Frame(json.loads(text), parcels)

    def _read_head(self) -> Document:
        """Return the stored head; SettingsError if it cannot be read."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT facts FROM head").fetchall()
        try:
            ((text,),) = rows
            head: Document = json.loads(text)
        except ValueError as error:
            raise SettingsError(
                f"the checkpoint in {self.folder} cannot be read: "
                f"{type(error).__name__}"
            ) from error
        return head

    def _sweep(self) -> None:
        """Remove payloads that no frame names, left by a process that was killed."""
        with self._database.reading() as connection:
            files = {name for (name,) in connection.execute("SELECT file FROM parcels")}
        for path in self.folder.glob(f"*{_SUFFIX}"):
            if path.name not in files:
                path.unlink(missing_ok=True)


def read_head(folder: Path) -> Document:
    """Return the head of a checkpoint; SettingsError as for ``Journal``."""
    with closing(Journal(folder)) as journal:
        return journal.head


def _open(folder: Path) -> Database:
    """Open the database of a checkpoint for this process alone."""

    def refusal(error: OSError | DamagedFileError) -> Exception:
        if isinstance(error, DamagedFileError):
            return SettingsError(f"the checkpoint in {folder} cannot be read: {error}")
        if error.errno == errno.EBUSY:
            return SettingsError(
                f"another process goes on with the run of {folder.parent}"
            )
        return OSError(error.errno, error.strerror)

    return Database(folder / FILE, SCHEMA, VERSION, refusal, is_exclusive=True)


def _checksum(text: str, parcels: Mapping[int, Parcel]) -> int:
    pieces = [text.encode(), *chain.from_iterable(parcels.values())]
    return reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces, 0)
