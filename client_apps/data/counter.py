"""The counter of a site's database, in a file beside it: how far the database has come.

A database that is put back from an older copy, or whose last lines or log are removed,
would forget what was spent, and which numbers masks have hidden. So every message that
changes it counts in its table ``counter``, which also has seq and checksum of the
ledger's last line; ``site.counter`` has the same three. A database that is behind the
file releases nothing.

*Order.* The file is written after the commit and before the reply leaves::

    killed before  the database  the file  the reply  then
    committing     old           old       not sent   the message acts again
    writing        new           old       not sent   the next message writes the file
    replying       new           new       not sent   the message is repeated

So the file is never ahead of a database that nobody has taken back, and never behind a
reply. One that is behind, also an older copy, is therefore no fault; a missing one is.

*Not covered.* Whoever takes back both files leaves no trace in them. The checksum of
the last line is in every reply: those who kept one can ask the owner for its line.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import Connection
from typing import Final, NamedTuple, Self

from client_apps.data.database import FILE, START, cannot_write, open_database
from tp_flower.errors import LedgerError
from tp_flower.files import PRIVATE, sync
from tp_flower.node_config import IN_MEMORY

COUNTER_FILE: Final = "site.counter"
_DIGITS: Final = 20
# always the same: overwritten in place
_BYTES: Final = 2 * (_DIGITS + 1) + len(START) + 1


class Mark(NamedTuple):
    """The state of a database that its counter records.

    It is the number of its changes, and seq and checksum of its ledger's last line.
    """

    changes: int
    seq: int
    checksum: str

    @classmethod
    def read(cls, connection: Connection) -> Self:
        """Return the mark of a database."""
        return cls(
            *connection.execute("SELECT changes, seq, checksum FROM counter").fetchone()
        )

    @classmethod
    def of_text(cls, text: bytes) -> Self | None:
        """Return the mark that a file has; None if it is damaged.

        >>> mark = Mark(7, 2, START)
        >>> Mark.of_text(mark.text()) == mark, Mark.of_text(mark.text()[1:])
        (True, None)
        """
        words = text.decode("ascii", "replace").split()
        if len(text) != _BYTES or len(words) != len(cls._fields):
            return None
        try:
            return cls(int(words[0]), int(words[1]), words[2])
        except ValueError:
            return None

    def text(self) -> bytes:
        """Return the content of the file."""
        changes, seq, checksum = self
        return f"{changes:>{_DIGITS}} {seq:>{_DIGITS}} {checksum}\n".encode("ascii")


def confirm(root: str) -> Mark:
    """Return the mark of a site's database, once the file beside it has it too.

    Raises:
        LedgerError: the database is behind the file, or the file is missing or damaged.
    """
    database = open_database(root)
    if root == IN_MEMORY:
        with database.reading() as connection:
            return Mark.read(connection)
    with database.reading() as connection, _lock_file(Path(root)) as file:
        # invariant: the file is read first, so that the database can only be further
        stored = Mark.of_text(os.read(file, 2 * _BYTES))
        mark = Mark.read(connection)
        if stored == mark:
            return mark
        if stored is not None or mark.changes:
            _check(stored, connection)
        _write(file, mark)
    return mark


def check(root: str, connection: Connection) -> None:
    """Raise LedgerError if a database is behind its file, in a transaction."""
    if root == IN_MEMORY:
        return
    path = Path(root) / COUNTER_FILE
    content = path.read_bytes() if path.exists() else b""
    if content or Mark.read(connection).changes:
        _check(Mark.of_text(content), connection)


def set_back(root: str, connection: Connection) -> Mark:
    """Set the ledger of a database to its beginning, and count on from the file."""
    path = Path(root) / COUNTER_FILE
    changes = Mark.read(connection).changes
    stored = None
    if root != IN_MEMORY and path.exists():
        stored = Mark.of_text(path.read_bytes())
    if stored is not None:
        changes = max(changes, stored.changes)
    changes += 1
    connection.execute(
        "UPDATE counter SET changes = ?, seq = 0, checksum = ?", (changes, START)
    )
    return Mark(changes, 0, START)


def overwrite(root: str, mark: Mark) -> None:
    """Write a mark whatever the file has: its owner begins a new account."""
    if root != IN_MEMORY:
        with _lock_file(Path(root)) as file:
            _write(file, mark)


def checksum_at(connection: Connection, seq: int) -> str:
    """Return the checksum of a line of the ledger; "" if there is none."""
    if seq == 0:
        return START
    row = connection.execute(
        "SELECT checksum FROM ledger WHERE seq = ?", (seq,)
    ).fetchone()
    return "" if row is None else str(row[0])


def _check(stored: Mark | None, connection: Connection) -> None:
    """Refuse a database that is behind its counter, or has lost it."""
    if stored is None:
        raise LedgerError(
            f"{COUNTER_FILE}, which says how far the site's database has come, is "
            "missing or damaged; nothing is released until the site's owner puts back "
            f"a copy of it, which may be older{_OR_ELSE}"
        )
    changes = Mark.read(connection).changes
    if (
        changes < stored.changes
        or checksum_at(connection, stored.seq) != stored.checksum
    ):
        raise LedgerError(
            f"the site's database {FILE} is behind {COUNTER_FILE}: it is an older "
            f"copy, or part of it was removed ({FILE}-wal belongs to it); nothing is "
            "released until the site's owner puts back the database that was "
            f"there{_OR_ELSE}"
        )


_OR_ELSE: Final = (
    ", or decides to give up the account of what was spent, and the runs in flight "
    "(`tp-flower account --begin-anew FILE`)"
)


def _write(file: int, mark: Mark) -> None:
    os.lseek(file, 0, os.SEEK_SET)
    os.write(file, mark.text())
    os.fdatasync(file)


@contextmanager
def _lock_file(folder: Path) -> Iterator[int]:
    """Yield the counter file, open and locked against other writers.

    It is created if it does not exist.
    """
    try:
        file = os.open(folder / COUNTER_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        file = _create_file(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    except OSError as error:
        raise cannot_write(folder, error) from error
    finally:
        os.close(file)


def _create_file(folder: Path) -> int:
    """Create the counter file; return it open."""
    try:
        file = os.open(
            folder / COUNTER_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE
        )
        sync(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return file
