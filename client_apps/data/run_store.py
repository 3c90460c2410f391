"""The state of a site between the messages of a run.

The next message may be answered by another process. So the whole state is in the site's
database: *entries* (arrays that never change: keys, multiplicities, a factorisation, a
batch plan) and the *committed round*, the last one answered, with its reply and all
state that changes. Arrays of ``LARGE_BYTES`` and more are ``.npy`` files in a folder of
the run: they are on disk before the transaction that names them, and a file that no
entry names is removed. A process also keeps the entries that it has read in memory for
as long as they do not change.
"""

import errno
import fcntl
import json
import os
import secrets
import shutil
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import count
from logging import WARNING
from pathlib import Path
from typing import Any, Final

import numpy as np

from client_apps.data.cache import STALE_SECONDS
from client_apps.data.database import (
    LABELS,
    RUN_NAME,
    Changes,
    cannot_write,
    open_database,
)
from tp_flower.arrays import AnyArray
from tp_flower.errors import LostStateError, MaskError, SiteError
from tp_flower.events import log_event
from tp_flower.files import PRIVATE, sync
from tp_flower.node_config import IN_MEMORY
from tp_flower.protocol.packet import ArrayKey, Parcel

LARGE_BYTES: Final = 1 << 18

_LOCK: Final = ".lock"
_ALIGNMENT: Final = 16
_SUFFIX: Final = ".npy"
_ROUND, _REPLY = _WHOLE = ".round", ".reply"
"""Entries with the state and the reply of the committed round: their checksums also
cover large arrays."""
_NUMBERS: Final = count(1)  # of entries that are in this process alone
_MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError)
_INSERT: Final = (
    "INSERT OR REPLACE INTO entries (run, name, touched, meta, layout, checksum, data) "
    "VALUES (?, ?, ?, ?, ?, ?, ?)"
)


_FORGET_MASKED: Final = "DELETE FROM masked WHERE run = ?"


@dataclass(frozen=True)
class Entry:
    """Arrays by name and a JSON-able description."""

    arrays: Mapping[str, AnyArray]
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class CommittedRound:
    """The round that a site has answered last in a run, with the state after it.

    ``history`` stands for all rounds up to this one, and for the rows that were read.
    """

    number: int
    digest: str
    history: str
    arrays: Mapping[ArrayKey, AnyArray] = field(default_factory=dict)
    is_over: bool = False


@dataclass
class _OfRun:
    """The memory that this process has of one run at one site.

    ``entries`` were written or read by it, with their ids in the database; no other
    process has those ``remembered``; the answering thread holds the lock.
    """

    entries: dict[str, tuple[int, Entry]] = field(default_factory=dict)
    remembered: dict[str, Entry] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_CACHE: defaultdict[tuple[str, str], _OfRun] = defaultdict(_OfRun)
"""By state folder and the run's name at the site."""


class SiteStore:
    """The state of one run at one site; if durable, it survives a loss of power.

    Several sites may share the state folder ``root``. ``save``, ``drop`` and ``commit``
    add to the ``changes`` of the message.
    """

    def __init__(
        self, root: str, run: str, site: str, *, is_durable: bool = False
    ) -> None:
        self.run = f"{run}-{site}"
        self._root = root
        self._is_durable = is_durable
        self._folder = None if root == IN_MEMORY else Path(root) / self.run
        self._database = open_database(root)
        self.changes = Changes(self._database, is_durable=is_durable)
        # what waits to be written, by name; None for an entry to drop
        self._pending: dict[str, Entry | None] = {}
        self._pending_labels: dict[str, Entry] = {}
        self._files: list[Path] = []
        self._unsynced: Path | None = None
        self._has_dropped = False
        self._is_locked = False
        # of the run's entries, by name, as committed; None if not read, or changed
        self._ids: dict[str, int] | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run for this process; a process that is killed releases the lock."""
        if self._folder is None:
            lock: AbstractContextManager[object] = self._cached.lock
        else:
            lock = self._file_lock(self._folder)
        with lock:
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False
                self._ids = None

    @contextmanager
    def _file_lock(self, folder: Path) -> Iterator[None]:
        """Lock the run's folder between processes."""
        try:
            lock = _lock_folder(folder)
        except OSError as error:
            raise cannot_write(folder, error) from error
        try:
            yield
        finally:
            try:
                # a folder without large arrays is removed
                with suppress(OSError):
                    if os.listdir(folder) == [_LOCK]:
                        (folder / _LOCK).unlink()
                        folder.rmdir()
            finally:
                os.close(lock)

    @contextmanager
    def together(self, make_room: Callable[[OSError], bool]) -> Iterator[None]:
        """Write all changes at the end, unless the block raises: see ``Changes``."""
        try:
            with self.changes.together(make_room):
                yield
        except BaseException:
            for path in self._files:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            raise
        finally:
            self._pending.clear()
            self._pending_labels.clear()
            self._files.clear()

    def touch(self) -> None:
        """Note that the run continues, if it has entries."""
        self._write(
            "UPDATE entries SET touched = ? WHERE run = ?", time.time(), self.run
        )

    def forget_stale(self) -> Iterator[str]:
        """Yield the names of abandoned runs and remove their files."""
        if self._folder is None:
            return
        oldest = time.time() - STALE_SECONDS
        rows = self._database.fetch(
            "SELECT run, max(touched) FROM entries GROUP BY run"
        )
        touched = {run: float(last) for run, last in rows if RUN_NAME.fullmatch(run)}
        for folder in self._folder.parent.iterdir():
            # another process may be removing it
            with suppress(OSError):
                if RUN_NAME.fullmatch(folder.name):
                    touched.setdefault(folder.name, folder.stat().st_mtime)
        for run in sorted(run for run, last in touched.items() if last < oldest):
            yield run
            folder = self._folder.parent / run
            self.changes.add(partial(self._write, _FORGET_MASKED, run))
            self.changes.add(
                partial(self._write, "DELETE FROM entries WHERE run = ?", run),
                partial(shutil.rmtree, folder, ignore_errors=True),
            )

    def last(self) -> CommittedRound | None:
        """Return the committed round; None for none, or a damaged one."""
        try:
            if (entry := self._load(self.run, _ROUND)) is None:
                return None
            arrays = {}
            for key, array in entry.arrays.items():
                part, _, name = key.partition("/")
                arrays[int(part), name] = array
            return CommittedRound(arrays=arrays, **entry.meta)
        except (FileNotFoundError, *_MALFORMED) as error:
            log_event(WARNING, "unusable-state", run=self.run, reason=str(error))
            return None

    def reply(self) -> Parcel:
        """Return the reply of the committed round; LostStateError if it is damaged."""
        try:
            if (entry := self._load(self.run, _REPLY)) is not None:
                return Parcel(*(entry.arrays[name].data for name in Parcel._fields))
        except (FileNotFoundError, *_MALFORMED):
            pass
        raise LostStateError("the stored reply of the last round is damaged")

    def commit(self, last: CommittedRound, reply: Parcel) -> None:
        """Make this the committed round; if the run is over, drop all other entries."""
        if last.is_over:
            for name in self.names():
                self.drop(name)
            # with the keys of the masks
            self.changes.add(partial(self._write, _FORGET_MASKED, self.run))
        meta = {**vars(last)}
        del meta["arrays"]
        state = {f"{part}/{name}": array for (part, name), array in last.arrays.items()}
        pieces = {
            name: np.frombuffer(piece, np.uint8)
            for name, piece in zip(Parcel._fields, reply, strict=True)
        }
        self._add(self.run, _ROUND, Entry(state, meta))
        self._add(self.run, _REPLY, Entry(pieces, {}))

    def record_masked(self, part: int, name: str, digest: bytes) -> None:
        """Record the digest of the values that the masks of a name hide.

        From then on these masks hide nothing else.

        MaskError if they have hidden something else in this run.
        """
        query = "SELECT digest FROM masked WHERE run = ? AND name = ?"
        key = f"{part}/{name}"
        recorded = self._database.fetch(query, self.run, key)
        if not recorded:
            insert = "INSERT INTO masked VALUES (?, ?, ?)"
            self.changes.add(partial(self._write, insert, self.run, key, digest))
        elif recorded != [(digest,)]:
            raise MaskError(
                f"the masks of {name} have hidden other numbers in this run, before "
                "the site lost its state: requests, rows or settings have changed "
                "since, and the difference would leave without a mask; start the run "
                "again"
            )

    def forget_committed(self) -> None:
        """Forget the committed round, as if the site had answered no message."""
        self._write(
            "DELETE FROM entries WHERE run = ? AND name IN (?, ?)", self.run, *_WHOLE
        )
        for name in _WHOLE:
            self._cached.entries.pop(name, None)

    def names(self) -> list[str]:
        """Return the names of the entries."""
        if self._folder is None:
            names = self._cached.entries.keys() - {*_WHOLE}
        else:
            query = "SELECT name FROM entries WHERE run = ? AND name NOT LIKE '.%'"
            names = {str(name) for (name,) in self._database.fetch(query, self.run)}
        for name, entry in self._pending.items():
            names = names - {name} if entry is None else names | {name}
        return sorted(names)

    def has(self, name: str) -> bool:
        """Return whether there is an entry of this name."""
        if name in self._pending:
            return self._pending[name] is not None
        return self._id(self.run, name) is not None

    def save(self, name: str, entry: Entry) -> None:
        """Save an entry, replacing one of that name; ValueError for object arrays."""
        self._add(self.run, name, entry)
        self._pending[name] = entry

    def load(self, name: str) -> Entry:
        """Return an entry, large arrays as memory maps; LostStateError if missing."""
        try:
            if name in self._pending:
                entry = self._pending[name]
            else:
                entry = self._load(self.run, name)
        except (OSError, *_MALFORMED) as error:
            raise lost_state() from error
        if entry is None:
            raise lost_state()
        return entry

    def drop(self, name: str) -> None:
        """Forget an entry, if there is one."""
        if not self.has(name):
            return

        def forget() -> None:
            self._cached.entries.pop(name, None)
            self._has_dropped = True

        query = "DELETE FROM entries WHERE run = ? AND name = ?"
        self.changes.add(partial(self._write, query, self.run, name), forget)
        self._pending[name] = None

    def labels(self, name: str, draw: Callable[[], AnyArray]) -> tuple[AnyArray, str]:
        """Return noisy labels (n,) and their id, drawing them if there are none.

        A draw is kept over all runs, because repeated noise could be averaged out.
        ``name`` stands for everything that the draw depends on.
        """
        entry = self._pending_labels.get(name)
        try:
            entry = entry or self._load(LABELS, name)
        except _MALFORMED as error:
            raise SiteError(
                f"the stored labels {name} are damaged: restore the site's database "
                "from a copy, because drawing new ones would cost epsilon again"
            ) from error
        if entry is None:
            entry = Entry({LABELS: draw()}, {"ident": secrets.token_hex(16)})
            self._add(LABELS, name, entry)
            self._pending_labels[name] = entry
        return entry.arrays[LABELS], str(entry.meta["ident"])

    @property
    def memory(self) -> dict[str, Entry]:
        """The entries that only this process has, until the run ends."""
        return self._cached.remembered

    def end(self) -> None:
        """Forget the entries that only this process has.

        Tests of faults replace this method.
        """
        self.memory.clear()

    def sweep(self) -> None:
        """Erase dropped entries, and large arrays that no entry names."""
        if self._folder is None:
            return
        if self._has_dropped:
            self._database.overwrite_deleted()
            self._has_dropped = False
        with suppress(FileNotFoundError):
            if files := {path.name for path in self._folder.glob(f"*{_SUFFIX}")}:
                rows = self._database.fetch(
                    "SELECT layout FROM entries WHERE run = ?", self.run
                )
                files -= {
                    location for (text,) in rows for *_, location in json.loads(text)
                }
            for name in files:
                (self._folder / name).unlink(missing_ok=True)

    @property
    def _cached(self) -> _OfRun:
        return _CACHE[self._root, self.run]

    def _write(self, query: str, *values: object) -> int:
        self._ids = None
        return self._database.write(query, *values, is_durable=self._is_durable)

    def _id(self, run: str, name: str) -> int | None:
        """Return the id of an entry, unique to its version; None if missing."""
        if self._folder is None:
            number, _ = _CACHE[self._root, run].entries.get(name, (None, None))
            return number
        # nobody else changes the entries of a run that is locked; those that are not
        # committed may yet be taken back
        if run == self.run and self._is_locked and not self.changes.is_begun:
            if self._ids is None:
                query = "SELECT name, id FROM entries WHERE run = ?"
                self._ids = dict(self._database.fetch(query, run))
            return self._ids.get(name)
        rows = self._database.fetch(
            "SELECT id FROM entries WHERE run = ? AND name = ?", run, name
        )
        return next((number for (number,) in rows), None)

    def _add(self, run: str, name: str, entry: Entry) -> None:
        """Store an entry with the changes of the round."""
        if self._folder is None and run != LABELS:
            # nobody else reads it
            keep = partial(self._keep, run, name, entry=entry)
            self.changes.add(then=lambda: keep(next(_NUMBERS)))
            return
        row = self._row(run, name, entry)
        numbers = [0]

        def write() -> None:
            if run == LABELS and self._id(run, name) is not None:
                # or both draws would leave; a retry of this run takes the other draw
                error = OSError(errno.EAGAIN, "another run has just drawn these labels")
                raise cannot_write(Path(self._root), error) from error
            if self._unsynced is not None:
                # invariant: files are on disk before the row that names them
                sync(self._unsynced)
                sync(self._unsynced.parent)
                self._unsynced = None
            numbers[0] = self._write(_INSERT, run, name, time.time(), *row)

        self.changes.add(
            write,
            lambda: self._keep(run, name, numbers[0], entry),
            is_durable=run == LABELS,
        )

    def _keep(self, run: str, name: str, number: int, entry: Entry) -> None:
        """Keep an entry in this process if it is read again or stored nowhere else."""
        if self._folder is None or (run != LABELS and name not in _WHOLE):
            _CACHE[self._root, run].entries[name] = number, entry

    def _load(self, run: str, name: str) -> Entry | None:
        """Return an entry from this process or the database; None if there is none.

        Raises OSError for an unreadable file, one of ``_MALFORMED`` for a damaged
        entry.
        """
        number = self._id(run, name)
        cached = _CACHE[self._root, run].entries.get(name)
        if cached is not None and cached[0] == number:
            return cached[1]
        if number is None or self._folder is None:
            return None
        entry = self._read(run, name)
        self._keep(run, name, number, entry)
        return entry

    def _row(self, run: str, name: str, entry: Entry) -> tuple[object, ...]:
        """Return an entry as its columns, once its large arrays are on disk.

        Columns: the description; for each array its name, dtype, shape and position in
        the data, or file; the checksum; the data. In memory they are empty.
        """
        data = bytearray()
        large = []
        if self._folder is None:
            return "", "", 0, data
        layout: list[tuple[object, ...]] = []
        for key, values in entry.arrays.items():
            array = np.asarray(values, order="C")
            if array.dtype.hasobject:
                raise ValueError(f"{key}: an array of objects needs allow_pickle=False")
            location: int | str = len(data)
            # noisy labels belong to no run, so they cannot be in a run's folder
            if array.nbytes >= LARGE_BYTES and run != LABELS:
                location = self._write_file(f"{name}-{key.replace('/', '-')}", array)
                large.append(array)
            else:
                data += array.tobytes()
                data += bytes(-len(data) % _ALIGNMENT)
            layout.append((key, array.dtype.str, array.shape, location))
        texts = json.dumps(entry.meta), json.dumps(layout)
        return (*texts, _checksum(name, texts, data, large), data)

    def _write_file(self, name: str, array: AnyArray) -> str:
        """Write a large array to a file of its own; return the file's name."""
        folder = Path(self._root) / self.run
        path = folder / f"{name}-{secrets.token_hex(8)}{_SUFFIX}"
        try:
            _make(folder)
            self._files.append(path)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
            with open(descriptor, "wb") as file:
                np.save(file, array, allow_pickle=False)
                if self._is_durable:
                    file.flush()
                    os.fsync(file.fileno())
                    self._unsynced = folder
        except OSError as error:
            raise cannot_write(folder, error) from error
        return path.name

    def _read(self, run: str, name: str) -> Entry:
        """Return an entry from the database; ValueError if it is damaged."""
        query = (
            "SELECT meta, layout, checksum, data FROM entries WHERE run = ? AND name = "
            "?"
        )
        ((meta, layout, checksum, data),) = self._database.fetch(query, run, name)
        arrays: dict[str, AnyArray] = {}
        large = []
        for key, dtype, shape, location in json.loads(layout):
            if isinstance(location, str):
                path = Path(self._root) / self.run / Path(location).name
                arrays[key] = map_array(path)
                large.append(arrays[key])
                if (arrays[key].dtype.str, list(arrays[key].shape)) != (dtype, shape):
                    raise ValueError(f"{location} has another dtype or shape")
            else:
                arrays[key] = np.ndarray(shape, np.dtype(dtype), data, location)
        if checksum != _checksum(name, (meta, layout), data, large):
            raise ValueError("its checksum does not match")
        return Entry(arrays, json.loads(meta))


_READING = threading.Lock()


def map_array(file: Path) -> AnyArray:
    """Return an array of a file, memory-mapped.

    One thread reads at a time: numpy leaves the header to CPython's parser, which
    counts its depth for all threads together. With two in it at once one may end in
    "AST constructor recursion depth mismatch" (seen with CPython 3.11).
    """
    with _READING:
        array: AnyArray = np.load(file, mmap_mode="r", allow_pickle=False)
    return array


def lost_state() -> LostStateError:
    """Return the error about missing or damaged state."""
    return LostStateError(
        "the site has lost its state for this run (was it restarted?); start the run "
        "again"
    )


def _make(folder: Path) -> None:
    """Make the folder of a run, and the state folder, readable by their owner alone."""
    for directory in (folder.parent, folder):
        # not ``exist_ok``: that raises if the folder is removed in the meantime
        with suppress(FileExistsError):
            directory.mkdir(parents=True, mode=0o700)


def _checksum(
    name: str, texts: Iterable[str], data: bytes | bytearray, large: Iterable[AnyArray]
) -> int:
    """Return the crc32 of an entry; in a committed round it covers large arrays."""
    pieces: list[Any] = [*(text.encode() for text in texts), data]
    if name in _WHOLE:
        pieces += (array.reshape(-1).view(np.uint8).data for array in large)
    return reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces, 0)


def _lock_folder(folder: Path) -> int:
    """Return the open lock of a run's folder, which is created if need be."""
    path = folder / _LOCK
    while True:
        _make(folder)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE)
        except FileNotFoundError:  # another process has removed the folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # invariant: a lock in a removed folder protects nothing
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
