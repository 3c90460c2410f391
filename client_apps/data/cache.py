"""The cache of a site, shared by its runs: folders of files, limited in size.

An entry is a folder with a description beside its files. It is written under a
temporary name and renamed when it is complete, so that a reader never sees a partial
one; processes that create the same entry at the same time do no harm. When the cache is
full, the least recently used entries go first, but never one that a run still uses.

Layout
    <folder>/<entry>/...                    the files
    <folder>/<entry>/entry.json             version, names and sizes
    <folder>/uses/<run>/<entry>             an empty file: the run uses the entry
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tp_flower.errors import is_full

VERSION: Final = 5
ENTRY_FILE: Final = "entry.json"
USES: Final = "uses"
ONCE: Final = "once-"  # prefix of the entries that no other run can use
STALE_SECONDS: Final = 7 * 24 * 3600.0
"""A run that has not touched an entry for this long is taken to be over or crashed."""


def entry_name(kind: str, *inputs: object) -> str:
    """Return the entry name that is determined by these inputs and nothing else.

    They are of plain JSON types.
    """
    text = json.dumps([VERSION, *inputs], sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


class Cache:
    """The entries of all runs in one folder, as seen by one run.

    They may take up ``limit`` bytes; entries in use may exceed it.
    """

    def __init__(self, folder: Path, run: str, limit: int) -> None:
        self.folder = folder
        self._limit = limit
        self._uses = folder / USES / run

    def find(self, name: str) -> Path | None:
        """Return an entry's folder and mark it as used; None if there is none.

        An entry that is damaged is dropped.
        """
        if not self.folder.is_dir():
            return None
        with self._lock():
            entry = self.folder / name
            if not _is_complete(entry):
                _remove(entry)
                return None
            self._use(name)
            return entry

    def obtain(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return an entry's folder and mark it as used; create the entry if need be.

        ``make`` fills an empty folder; nothing remains if it raises. If the disk is
        full, unused entries are removed and ``make`` is called once more.
        """
        if (entry := self.find(name)) is not None:
            return entry
        try:
            return self._create(name, make)
        except OSError as error:
            if not is_full(error):
                raise
            self.shrink(0)
            return self._create(name, make)

    def _create(self, name: str, make: Callable[[Path], None]) -> Path:
        """Create an entry under a temporary name; it appears whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = Path(tempfile.mkdtemp(dir=self.folder, prefix=f".{name}-"))
        try:
            make(temporary)
            description = json.dumps(_description(temporary))
            (temporary / ENTRY_FILE).write_text(description, encoding="utf-8")
            for path in temporary.iterdir():
                path.chmod(0o600)
            with self._lock():
                if _is_complete(self.folder / name):  # another process was faster
                    _remove(temporary)
                else:
                    _remove(self.folder / name)
                    temporary.rename(self.folder / name)
                self._use(name)
        except BaseException:
            _remove(temporary)
            raise
        self.shrink()
        return self.folder / name

    def release(self) -> None:
        """End the run's uses; remove its private entries and those beyond the limit."""
        if self._uses.is_dir():
            with self._lock():
                for use in self._uses.glob(f"{ONCE}*"):
                    _remove(self.folder / use.name)
                _remove(self._uses)
            self.shrink()

    def shrink(self, limit: int | None = None) -> None:
        """Remove the least recently used entries until the rest fits."""
        limit = self._limit if limit is None else limit
        if not self.folder.is_dir():
            return
        with self._lock():
            entries = {
                path: sum(file.stat().st_size for file in path.iterdir())
                for path in self.folder.iterdir()
                if not path.name.startswith(".") and path.name != USES
            }
            total = sum(entries.values())
            in_use = self._entries_in_use()
            for path in sorted(entries, key=_last_use):
                if total <= limit:
                    break
                if path.name not in in_use:
                    _remove(path)
                    total -= entries[path]
            oldest = time.time() - STALE_SECONDS
            for path in self.folder.glob(".*-*"):
                # left by a process that was killed; or its maker may be removing it
                with suppress(OSError):
                    if path.stat().st_mtime < oldest:
                        _remove(path)

    def _use(self, name: str) -> None:
        for folder in (self._uses.parent, self._uses):
            folder.mkdir(exist_ok=True, mode=0o700)
        (self._uses / name).touch(mode=0o600)
        os.utime(self.folder / name / ENTRY_FILE)

    def _entries_in_use(self) -> set[str]:
        """Return the names of the entries in use; forget runs that are over."""
        in_use: set[str] = set()
        oldest = time.time() - STALE_SECONDS
        for run in (self.folder / USES).glob("*"):
            uses = list(run.iterdir())
            if all(use.stat().st_mtime < oldest for use in uses):
                _remove(run)
            else:
                in_use.update(use.name for use in uses)
        return in_use

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep other processes from finding, renaming or removing entries."""
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _description(folder: Path) -> dict[str, object]:
    files = [path for path in folder.iterdir() if path.name != ENTRY_FILE]
    return {"version": VERSION, "sizes": {p.name: p.stat().st_size for p in files}}


def _is_complete(folder: Path) -> bool:
    try:
        text = (folder / ENTRY_FILE).read_text(encoding="utf-8")
        return bool(json.loads(text) == _description(folder))
    except (OSError, ValueError):
        return False


def _last_use(folder: Path) -> float:
    try:
        return (folder / ENTRY_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _remove(folder: Path) -> None:
    """Remove a folder without ever leaving part of it under its name."""
    if not folder.exists():
        return
    doomed = folder.with_name(f".{folder.name}-{os.getpid()}-{time.monotonic_ns()}")
    try:
        folder.rename(doomed)
    except OSError:  # another process has removed it
        return
    shutil.rmtree(doomed, ignore_errors=True)
