"""What a site keeps between the messages of a run.

All of it lies in a folder of the run, as the next message may be answered by another
process: *entries* (arrays that never change: keys, multiplicities, a factorisation, a
batch plan), written atomically and memory-mapped when read, and the *record* of the
round that was answered last, with all that changes (``state_file``). Each process also
keeps the entries that it has read, as long as the files are the same.
"""

import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.common.logger import log

from client_apps.data import committed_round
from client_apps.data.cache import STALE_SECONDS
from client_apps.data.committed_round import STATE_FILE, Record
from client_apps.data.folders import whole_folder
from tp_flower.arrays import AnyArray
from tp_flower.errors import LostStateError, SiteError
from tp_flower.events import line
from tp_flower.node_config import IN_MEMORY

META_FILE = "meta.json"

_LOCK: Final = ".lock"
_RUN: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+")
_MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class Entry:
    """Arrays by name and a JSON-able description."""

    arrays: Mapping[str, AnyArray]
    meta: Mapping[str, Any]


Stamp = tuple[int, int, int]


@dataclass
class _OfRun:
    """What this process knows of one run at one site.

    Attributes:
        entries: that it has written or read, with the stamp of their files.
        remembered: what it alone has.
        record: of the last round, where there are no files.
        lock: held by the thread that answers.
    """

    entries: dict[str, tuple[Stamp | None, Entry]] = field(default_factory=dict)
    remembered: dict[str, Entry] = field(default_factory=dict)
    record: Record | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _ProcessCache:
    """What this process knows, by state folder and the run's name at the site."""

    sites: dict[tuple[str, str], _OfRun] = field(default_factory=dict)


_CACHE = _ProcessCache()


class SiteStore:
    """What one site keeps of one run.

    Args:
        root: folder for the files; ``":memory:"`` keeps everything in this process.
        run: the run's name, which has been checked.
        site: tells the site from others that have the same state folder.
        is_durable: whether what is kept must outlast a loss of power.

    Attributes:
        run: names the run and the site.
    """

    def __init__(
        self, root: str, run: str, site: str, *, is_durable: bool = False
    ) -> None:
        self.run = f"{run}-{site}"
        self._key = (root, self.run)
        self._folder = None if root == IN_MEMORY else Path(root) / self.run
        self._is_durable = is_durable

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep all others out of the run; a process that is killed lets go of it.

        Raises:
            SiteError: the run's folder cannot be made.
        """
        if self._folder is None:
            with self._known.lock:
                yield
            return
        try:
            lock = _locked(self._folder)
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        try:
            self.touch()
            yield
        finally:
            try:
                self._leave_no_trace()
            finally:
                os.close(lock)

    def touch(self) -> None:
        """Say that the run goes on, if anything of it is kept."""
        if self._folder is not None:
            with suppress(OSError):
                os.utime(self._folder)

    def forget_stale(self) -> Iterator[str]:
        """Remove what runs have left that were killed, and the records of all others.

        Yields:
            A run's name, before it is removed.
        """
        if self._folder is None or not self._folder.parent.is_dir():
            return
        oldest = time.time() - STALE_SECONDS
        for folder in sorted(self._folder.parent.iterdir()):
            # another process may be removing it
            with suppress(OSError):
                is_stale = folder.stat().st_mtime < oldest
                if is_stale and _RUN.fullmatch(folder.name):
                    yield folder.name
                    shutil.rmtree(folder, ignore_errors=True)

    def last(self) -> Record | None:
        """Return the record of the round that was answered last.

        None if no round was answered, or if what is kept of it is not whole any more.

        Raises:
            OSError: the file cannot be read.
        """
        if self._folder is None:
            return self._known.record
        try:
            record = committed_round.read(self._folder / STATE_FILE, self.run)
        except FileNotFoundError:
            return None
        except _MALFORMED as error:
            log(WARNING, line("unusable-state", run=self.run, reason=str(error)))
            return None
        if gone := set(record.entries) - set(self.names()):
            log(WARNING, line("lost-state", run=self.run, gone=sorted(gone)))
            return None
        return record

    def commit(self, record: Record) -> None:
        """Replace the record of the last round: from now on, this one is answered.

        Raises:
            SiteError: it cannot be written; then the last round is the one before.
        """
        if self._folder is None:
            self._known.record = record
            return
        path = self._folder / STATE_FILE
        try:
            committed_round.write(path, record, is_durable=self._is_durable)
        except OSError as error:
            raise cannot_write(self._folder, error) from error

    def forget_record(self) -> None:
        """Forget the last round: the site says then that it has answered none."""
        self._known.record = None
        if self._folder is not None:
            (self._folder / STATE_FILE).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return the names of the entries."""
        if self._folder is None:
            return sorted(self._known.entries)
        with suppress(FileNotFoundError), os.scandir(self._folder) as found:
            return sorted(
                each.name
                for each in found
                if each.is_dir() and not each.name.startswith(".")
            )
        return []

    def save(self, name: str, entry: Entry) -> None:
        """Keep an entry; it replaces one of the same name.

        Raises:
            SiteError: if the files cannot be written.
        """
        stamp = None
        if self._folder is not None:
            try:
                self._write(self._folder, name, entry)
                stamp = _stamp(self._folder / name)
            except OSError as error:
                raise cannot_write(self._folder, error) from error
        self._known.entries[name] = (stamp, entry)

    def has(self, name: str) -> bool:
        """Return whether there is an entry of this name."""
        if self._folder is None:
            return name in self._known.entries
        return (self._folder / name).is_dir()

    def load(self, name: str) -> Entry:
        """Return an entry; its arrays may be read-only memory maps.

        Raises:
            LostStateError: if this site has no such entry for the run.
        """
        stamp, kept = None, self._known.entries.get(name)
        try:
            if self._folder is not None:
                stamp = _stamp(self._folder / name)
            if kept is not None and kept[0] == stamp:
                return kept[1]
            if self._folder is None:
                raise lost_state()
            entry = _read(self._folder / name)
        except (OSError, *_MALFORMED) as error:
            raise lost_state() from error
        self._known.entries[name] = (stamp, entry)
        return entry

    def remember(self, name: str, entry: Entry) -> None:
        """Keep an entry in this process alone, until the run ends."""
        self._known.remembered[name] = entry

    def recall(self, name: str) -> Entry | None:
        """Return an entry that this process has, None if it has none."""
        return self._known.remembered.get(name)

    def drop(self, name: str) -> None:
        """Forget an entry, if there is one."""
        self._known.entries.pop(name, None)
        if self._folder is not None:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def end(self) -> None:
        """Forget everything of the run but the record of its last round."""
        self._known.entries.clear()
        self._known.remembered.clear()
        if self._folder is not None:
            for path in self._folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Forget everything of the run."""
        _CACHE.sites.pop(self._key, None)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _known(self) -> _OfRun:
        return _CACHE.sites.setdefault(self._key, _OfRun())

    def _write(self, folder: Path, name: str, entry: Entry) -> None:
        with whole_folder(folder / name, is_durable=self._is_durable) as whole:
            for key, array in entry.arrays.items():
                np.save(whole / f"{key}.npy", array, allow_pickle=False)
            meta = {"meta": entry.meta, "arrays": list(entry.arrays)}
            (whole / META_FILE).write_text(json.dumps(meta), encoding="utf-8")

    def _leave_no_trace(self) -> None:
        """Remove a folder that nothing was put into, within a turn."""
        if self._folder is None:
            return
        with suppress(OSError):
            if os.listdir(self._folder) == [_LOCK]:
                (self._folder / _LOCK).unlink()
                self._folder.rmdir()


def cannot_write(folder: Path, error: OSError) -> SiteError:
    """Return the error about a state folder that cannot be written."""
    reason = error.strerror or type(error).__name__
    return SiteError(
        f"cannot write to the state folder {folder}: {reason} "
        "(node config state-dir names another folder)"
    )


def lost_state() -> LostStateError:
    """Return the error about state that is gone or damaged."""
    return LostStateError(
        "the site has lost its state for this run (was it restarted?); "
        "start the run again"
    )


def _locked(folder: Path) -> int:
    """Return the open lock of a run's folder, which is made if need be."""
    path = folder / _LOCK
    while True:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # another process has removed the folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # invariant: whoever holds the lock of a removed folder holds nothing
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _stamp(folder: Path) -> Stamp:
    """Return what tells an entry's files from those that replace them."""
    status = (folder / META_FILE).stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(folder: Path) -> Entry:
    document = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    arrays = {
        key: np.load(folder / f"{key}.npy", mmap_mode="r", allow_pickle=False)
        for key in document["arrays"]
    }
    return Entry(arrays, document["meta"])
