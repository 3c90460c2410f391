"""The database of a site: the state of its runs, its ledger, its noisy labels.

Everything is in one file, ``<state-dir>/site.db``, so that the changes of a message are
written as a whole or not at all. Arrays of more than a few megabytes are stored beside
it (``run_store``).
"""

import atexit
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

from tp_flower.database import DamagedFileError, Database
from tp_flower.errors import LedgerError, SettingsError, SiteError
from tp_flower.node_config import IN_MEMORY

FILE: Final = "site.db"
VERSION: Final = 3
START: Final = "0" * 32  # the ledger's checksum before its first line
LABELS: Final = "labels"  # in place of a run's name: entries kept over all runs
SCHEMA: Final = f"""
CREATE TABLE entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    run TEXT NOT NULL,
    name TEXT NOT NULL,
    touched REAL NOT NULL,
    meta TEXT NOT NULL,
    layout TEXT NOT NULL,
    checksum INTEGER NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (run, name)
);
CREATE TABLE ledger (
    seq INTEGER PRIMARY KEY,
    checksum TEXT NOT NULL,
    line TEXT NOT NULL,
    run TEXT AS (json_extract(line, '$.run')),
    event TEXT AS (json_extract(line, '$.event')),
    ident TEXT AS (json_extract(line, '$.ident')),
    source TEXT AS (coalesce(
        json_extract(line, '$.source'), json_extract(line, '$.release.source'))),
    part INTEGER AS (
        coalesce(json_extract(line, '$.part'), json_extract(line, '$.release.part'))),
    what TEXT AS (
        coalesce(json_extract(line, '$.what'), json_extract(line, '$.release.what'))),
    key INTEGER AS (json_extract(line, '$.key')),
    times INTEGER AS (json_extract(line, '$.times'))
);
CREATE INDEX ledger_of_run ON ledger (run, event, part, what, key, times);
CREATE INDEX ledger_of_source ON ledger (source, event);
CREATE INDEX ledger_of_ident ON ledger (ident);
CREATE TABLE counter (
    changes INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    checksum TEXT NOT NULL
);
INSERT INTO counter VALUES (0, 0, '{START}');
CREATE TABLE masked (
    run TEXT NOT NULL,
    name TEXT NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (run, name)
) WITHOUT ROWID;
"""

RUN_NAME: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+")
_OLD: Final = ("privacy/ledger.jsonl", "privacy/labels")
_MOST_OPEN: Final = 16  # open databases of a process: a site has one, tests many
_OPENING: Final = Lock()
_OPEN: Final[OrderedDict[tuple[int, str], Database]] = OrderedDict()


def open_database(root: str) -> Database:
    """Return the database of a state folder; a process has one object of each."""
    # a forked process has to open its own connection
    key = os.getpid(), root
    with _OPENING:
        if key not in _OPEN:
            path = None
            if root != IN_MEMORY:
                path = Path(root) / FILE
            if path is not None and not path.exists():
                _refuse_old(path.parent)
            _OPEN[key] = Database(path, SCHEMA, VERSION, lambda e: _refusal(root, e))
        _OPEN.move_to_end(key)
        if len(_OPEN) > _MOST_OPEN:
            list(_OPEN.values())[-_MOST_OPEN - 1].close()
        return _OPEN[key]


def close_databases() -> None:
    """Close the databases of this process; each is opened again when it is used."""
    with _OPENING:
        for (process, _), database in _OPEN.items():
            # invariant: a forked process never closes the connections of its parent
            if process == os.getpid():
                database.close()


class Changes:
    """The changes that a message makes to the site's database: all of them or none.

    They are added within ``together``, and written in one transaction at its end.
    ``is_durable`` changes, or all of them, survive a loss of power; a transaction of
    all is counted (``client_apps.data.counter``). The error of a refused change names
    the ``part`` that was being worked on when it was added. Their transaction
    ``is_begun`` between its first write and its end.
    """

    def __init__(self, database: Database, *, is_durable: bool) -> None:
        self.database = database
        self.part: int | None = None
        self._is_durable = is_durable
        self._waiting: list[_Change] = []
        self._written = 0
        self.is_begun = False

    @contextmanager
    def together(self, make_room: Callable[[OSError], bool]) -> Iterator[None]:
        """Write the changes added in the block when it ends, unless it raises.

        ``make_room`` is called if they cannot be written, and returns whether another
        attempt is worthwhile. If this raises, nothing has changed.
        """
        try:
            yield
            try:
                self._commit()
            except SiteError as error:
                cause = error.__cause__
                if not (isinstance(cause, OSError) and make_room(cause)):
                    raise
                self._commit()
        finally:
            self._waiting.clear()
            self._rollback()

    def add(
        self,
        write: Callable[[], object] | None = None,
        then: Callable[[], object] = lambda: None,
        *,
        is_durable: bool = False,
    ) -> None:
        """Add a change; ``then`` is called once, after the change is committed.

        ``write`` is called within a transaction, and called again if that fails; if no
        change has one, there is no transaction.
        """
        self._waiting.append(_Change(write, then, self.part, is_durable))

    def write_now(self) -> None:
        """Write the collected changes, so that they can be read before the commit.

        Other processes cannot write from here to the commit, so call it last.
        """
        if len(self._waiting) > self._written:
            self._write(is_durable=True)

    def _write(self, *, is_durable: bool) -> None:
        """Run the writes that have not run yet, in one transaction."""
        part = self.part
        for change in self._waiting[self._written :]:
            self.part = change.part
            if change.write is not None:
                if not self.is_begun:
                    self.database.begin(is_durable=is_durable)
                    self.is_begun = True
                change.write()
            self._written += 1
        self.part = part

    def _commit(self) -> None:
        """Commit the collected changes; then run what follows them."""
        if not self._waiting:
            return
        try:
            self._write(
                is_durable=self._is_durable or any(c.is_durable for c in self._waiting)
            )
            if self.is_begun:
                if self._is_durable:
                    self.database.write("UPDATE counter SET changes = changes + 1")
                self.is_begun = False
                self.database.commit()
        except BaseException:
            self._rollback()
            raise
        for change in self._waiting:
            change.then()

    def _rollback(self) -> None:
        self._written = 0
        if self.is_begun:
            self.is_begun = False
            self.database.rollback()


@dataclass(frozen=True)
class _Change:
    """The arguments of :meth:`Changes.add`, and the part."""

    write: Callable[[], object] | None
    then: Callable[[], object]
    part: int | None
    is_durable: bool


def cannot_write(folder: Path, error: OSError) -> SiteError:
    """Return the error about an unwritable state folder."""
    reason = error.strerror or type(error).__name__
    return SiteError(
        f"cannot write to the state folder {folder}: {reason}; nothing is released "
        "(node config state-dir names another folder)"
    )


def _refusal(root: str, error: OSError | DamagedFileError) -> SiteError:
    """Return the error of a site about an unusable database."""
    if isinstance(error, OSError):
        return cannot_write(Path(root), error)
    return LedgerError(
        f"the site's database {Path(root) / FILE} is damaged: {error}; nothing is "
        "released until the site's owner has restored it"
    )


def _refuse_old(folder: Path) -> None:
    """Refuse to start a new account where version 0.1.0 has left one."""
    old_files = [folder / name for name in _OLD if (folder / name).exists()]
    if folder.is_dir():
        runs = (path for path in folder.iterdir() if RUN_NAME.fullmatch(path.name))
        old_files += [run / "state" for run in runs if (run / "state").is_file()]
    if old_files:
        names = ", ".join(str(path.relative_to(folder)) for path in old_files[:3])
        raise SettingsError(
            f"the state folder {folder} is from version 0.1.0 ({names}), which this "
            "version does not read: let its runs end with that version, then move "
            "the folder away (its ledger is the record of what was released), or name "
            "another in node config state-dir; a new account begins there"
        )


atexit.register(close_databases)
