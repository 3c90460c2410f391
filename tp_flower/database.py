"""SQLite files that survive crashes: a site's state, the server's journal.

A transaction is written as a whole or not at all, wherever a process is killed; a
*durable* one also survives a loss of power once it is committed (write-ahead log,
``synchronous = FULL``). Writers take turns: threads of a process by a lock, processes
by SQLite's locks.
"""

import errno
import fcntl
import itertools
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tp_flower.errors import SettingsError
from tp_flower.files import PRIVATE, sync

WAIT_SECONDS: Final = 60.0  # how long a transaction waits for those of other processes
_OTHERS: Final = 0o077
_ERRORS: Final = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_LOCKED: errno.EBUSY,
}
_DAMAGED: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}

_NUMBERS: Final = itertools.count(1)


class DamagedFileError(Exception):
    """A file is not a database of this version any more."""


class Database:
    """One SQLite file, as the threads of a process share it.

    All methods turn an error of the system or a damaged file into the error that
    ``refusal`` makes of it, and raise ``SettingsError`` if others than its owner may
    open the file, or if it is of another version.

    Args:
        path: path of the file, created on first use for its owner alone; None for a
            database in memory.
        schema: statements that create the tables of a version.
        is_exclusive: whether no other process may have the file open while this one
            does.

    Attributes:
        transaction_number: the current transaction's, unique in the process.
    """

    def __init__(
        self,
        path: Path | None,
        schema: str,
        version: int,
        refusal: Callable[[OSError | DamagedFileError], Exception],
        *,
        is_exclusive: bool = False,
    ) -> None:
        self.path = path
        self._schema = schema
        self._version = version
        self._refusal = refusal
        self._is_exclusive = is_exclusive
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        # of the connection's transactions; None until the first one
        self._is_durable: bool | None = None
        self.transaction_number = 0

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Keep the process's other threads out, to read."""
        with self._lock, self._translate_errors():
            yield self._current_connection()

    def fetch(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows of one query."""
        with self.reading() as connection:
            return connection.execute(query, values).fetchall()

    def write(self, query: str, *values: object, is_durable: bool = True) -> int:
        """Carry out one statement, in a transaction; return the last row's number."""
        with self.transaction(is_durable=is_durable) as connection:
            return connection.execute(query, values).lastrowid or 0

    @contextmanager
    def transaction(self, *, is_durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Open a transaction, which writes all or nothing, or join the open one."""
        with self._lock:
            if self._connection is not None and self._connection.in_transaction:
                with self._translate_errors():
                    yield self._connection
                return
            self.begin(is_durable=is_durable)
            try:
                with self._translate_errors():
                    yield self._current_connection()
            except BaseException:
                self.rollback()
                raise
            self.commit()

    def begin(self, *, is_durable: bool = True) -> None:
        """Begin a transaction, and keep all others out until it ends."""
        self._lock.acquire()
        try:
            with self._translate_errors():
                connection = self._current_connection()
                if is_durable != self._is_durable:
                    mode = "FULL" if is_durable else "NORMAL"
                    connection.execute(f"PRAGMA synchronous = {mode}")
                    self._is_durable = is_durable
                connection.execute("BEGIN IMMEDIATE")
        except BaseException:
            self._lock.release()
            raise
        self.transaction_number = next(_NUMBERS)

    def commit(self) -> None:
        """Commit the transaction."""
        try:
            with self._translate_errors():
                self._current_connection().execute("COMMIT")
        except BaseException:
            self.rollback()
            raise
        self._lock.release()

    def rollback(self) -> None:
        """Roll the transaction back: nothing was written."""
        try:
            # the error may have rolled it back
            with suppress(sqlite3.Error):
                if self._connection is not None and self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
        finally:
            self._lock.release()

    def overwrite_deleted(self) -> None:
        """Erase deleted rows from the log, unless somebody is reading it."""
        with self._lock, self._translate_errors():
            connection = self._current_connection()
            if self.path is not None and not connection.in_transaction:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the file until it is used again; not inside a transaction."""
        with self._lock:
            connection = self._connection
            if self.path is None or connection is None or connection.in_transaction:
                return
            connection.close()
            self._connection = None

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate errors of SQLite and of the system into the caller's error type."""
        try:
            yield
        except sqlite3.Error as error:
            # the module's own errors, of arguments or bad UTF-8, have no code
            is_text = isinstance(error, sqlite3.OperationalError)
            default = sqlite3.SQLITE_CORRUPT if is_text else sqlite3.SQLITE_MISUSE
            code = getattr(error, "sqlite_errorcode", default) & 0xFF
            cause: OSError | DamagedFileError
            if code in _ERRORS:
                cause = OSError(_ERRORS[code], os.strerror(_ERRORS[code]))
            elif code in _DAMAGED:
                cause = DamagedFileError(str(error))
            else:
                raise
            raise self._refusal(cause) from cause
        except OSError as error:
            raise self._refusal(error) from error

    def _current_connection(self) -> sqlite3.Connection:
        """Return the open connection, or a new one if the file was replaced."""
        if self._connection is not None:
            # a file that has replaced it is another database
            if self._connection.in_transaction or self._inode == _inode(self.path):
                return self._connection
            self._connection.close()
        self._connection = self._open()
        self._is_durable = None
        self._inode = _inode(self.path)
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        # the lock of the object keeps threads apart
        return sqlite3.connect(
            ":memory:" if self.path is None else self.path,
            timeout=0.0 if self._is_exclusive else WAIT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )

    def _open(self) -> sqlite3.Connection:
        """Return a new connection to the file, which is made if need be."""
        if self.path is None:
            connection = self._connect()
            connection.executescript(self._schema)
            return connection
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # two processes must not create the file at once
            fcntl.flock(folder, fcntl.LOCK_EX)
            _check_private(self.path)
            connection = self._connect()
            try:
                self._prepare(connection, self.path)
            except BaseException:
                connection.close()
                raise
        finally:
            os.close(folder)
        return connection

    def _prepare(self, connection: sqlite3.Connection, path: Path) -> None:
        """Create the tables of a new file; refuse a file of another version."""
        # deleted rows may hold keys: overwrite them
        connection.execute("PRAGMA secure_delete = ON")
        if self._is_exclusive:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == 0 and not tables:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.executescript(
                f"BEGIN IMMEDIATE; {self._schema}PRAGMA user_version = "
                f"{self._version}; COMMIT;"
            )
        elif version != self._version:
            raise SettingsError(
                f"{path} has version {version}, expected {self._version}: use the "
                "version of tp_flower that wrote it, or move its folder away"
            )
        if self._is_exclusive:
            # the lock is taken with the first transaction
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("COMMIT")


def _check_private(path: Path) -> None:
    """Make a file for its owner alone, or refuse one that others may open."""
    try:
        # invariant: a file that this process has open is never opened and closed here,
        # which would release SQLite's locks
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE))
    except FileExistsError:
        pass
    else:
        for folder in (path.parent, path.parent.parent):
            sync(folder)
        return
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise SettingsError(f"{path.name} is not a regular file (perhaps a link)")
    if status.st_uid != os.geteuid():
        raise SettingsError(
            f"{path.name} belongs to another user (number {status.st_uid}): run this "
            "as its owner"
        )
    if status.st_mode & _OTHERS:
        raise SettingsError(
            f"{path.name} may be read or changed by others than its owner (mode "
            f"{stat.S_IMODE(status.st_mode):04o}): chmod 600 it"
        )


def _inode(path: Path | None) -> int:
    """Return the inode of a database's file: 0 in memory, -1 if it is gone."""
    if path is None:
        return 0
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return -1
