"""A connection to a shard's database: read-only, in UTC, in one consistent snapshot."""

import logging
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import sqlalchemy as sa
from pymysql.cursors import SSCursor

from tp_flower.errors import SourceError, UnreachableError
from tp_flower.sources.databases.errors import DRIVER_ERRORS, PASSING, safe_words
from tp_flower.sources.databases.url import DatabaseUrl, Dialect
from tp_flower.sources.tables_file import DatabaseShard, ShardSource

SECONDS_TO_CONNECT: Final = 30

# SQLAlchemy's loggers would show rows, users and the owner's SQL
_SILENT: Final = "tp_flower"
for _name in ("engine.Engine", "pool.impl.NullPool"):
    logging.getLogger(f"sqlalchemy.{_name}.{_SILENT}").disabled = True

_OURS: Final = threading.local()


def _is_not_ours(_record: logging.LogRecord) -> bool:
    """Drop what a driver logs in a thread that has a shard's database open."""
    return not getattr(_OURS, "sessions", 0)


for _name in ("psycopg", "psycopg.pq"):
    # it would show the user's name
    logging.getLogger(_name).addFilter(_is_not_ours)


@contextmanager
def _silence() -> Iterator[None]:
    _OURS.sessions = getattr(_OURS, "sessions", 0) + 1
    try:
        yield
    finally:
        _OURS.sessions -= 1


_START: Final[dict[Dialect, tuple[str, ...]]] = {
    "postgresql": (
        "SET LOCAL TIME ZONE 'UTC'",
        "SET LOCAL extra_float_digits = 1",
    ),
    "mysql": (
        "SET SESSION TRANSACTION READ ONLY",
        "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "SET SESSION time_zone = '+00:00'",
        # the site may take its time between two chunks
        "SET SESSION net_write_timeout = 3600",
        "SET SESSION sql_mode = CONCAT(@@sql_mode, ',NO_UNSIGNED_SUBTRACTION')",
        "START TRANSACTION WITH CONSISTENT SNAPSHOT",
    ),
    "sqlite": ("BEGIN",),
}


@dataclass(frozen=True)
class Session:
    """An open connection to a shard's database.

    Every method raises SourceError where the database refuses what is asked of it; the
    message names table, site and place, never a secret.

    Attributes:
        connection: SQLAlchemy's.
        source: the shard.
        database: where it is.
    """

    connection: sa.Connection
    source: ShardSource
    database: DatabaseShard
    _streams: list[Any] = field(default_factory=list)

    @property
    def dialect(self) -> Dialect:
        """The SQL that is spoken."""
        return self.database.url.dialect

    def one_row(self, sql: str) -> Sequence[Any]:
        """Return the first row of a query, empty if it has none."""
        with self._run(sql) as cursor:
            row: Sequence[Any] = cursor.fetchone() or ()
            return row

    def fields(self, sql: str) -> list[Any]:
        """Return the driver's description of a query's columns."""
        with self._run(sql) as cursor:
            if self.dialect == "mysql":
                # the description lacks the flags and the character set
                return list(cursor._result.fields)  # noqa: SLF001
            return list(cursor.description)

    def all_rows(self, sql: str) -> list[Sequence[Any]]:
        """Return the rows of a small query."""
        with self._run(sql) as cursor:
            return list(cursor.fetchall())

    def primary_key(self) -> list[str]:
        """Return the columns of the table's primary key, [] where there is none."""
        table = self.database.table
        if table is None:
            return []
        schema = ".".join(table[:-1]) or None
        with _told(self.source, self.database):
            inspector = sa.inspect(self.connection)
            found = inspector.get_pk_constraint(table[-1], schema)
            return list(found["constrained_columns"])

    def execute(self, sql: str) -> None:
        """Run a statement that yields no rows."""
        with _told(self.source, self.database):
            self.connection.exec_driver_sql(sql)

    def chunks(self, sql: str) -> Iterator[list[Sequence[Any]]]:
        """Yield the rows of a query, some at a time, from a cursor at the server."""
        driver: Any = self.connection.connection.driver_connection
        with _told(self.source, self.database):
            if self.dialect == "postgresql":
                cursor = driver.cursor(name="tp_flower_shard")
            elif self.dialect == "mysql":
                cursor = driver.cursor(SSCursor)
            else:
                cursor = driver.cursor()
            self._streams.append(cursor)
            cursor.execute(sql)
        while found := self._fetch(cursor):
            yield found

    def _fetch(self, cursor: Any) -> list[Sequence[Any]]:
        with _told(self.source, self.database):
            return list(cursor.fetchmany(self.database.chunk_rows))

    @contextmanager
    def _run(self, sql: str) -> Iterator[Any]:
        """Run a query; yield the driver's cursor, which nobody logs."""
        driver: Any = self.connection.connection.driver_connection
        with _told(self.source, self.database), closing(driver.cursor()) as cursor:
            cursor.execute(sql)
            yield cursor

    def close(self) -> None:
        """Hang up: nobody wants the rows that are left, and nothing was changed."""
        with suppress(*DRIVER_ERRORS):
            for cursor in self._streams:
                if self.dialect == "mysql":
                    _abandon(cursor)
                cursor.close()
        with suppress(*DRIVER_ERRORS):
            self.connection.invalidate()
        self.connection.close()


def _abandon(cursor: Any) -> None:
    """Forget what is left of a MySQL query: closing it would fetch all its rows."""
    result = cursor._result  # noqa: SLF001 - there is no public way
    if result is not None:
        result.unbuffered_active, result.connection = False, None
    cursor.connection = None


@contextmanager
def open_session(source: ShardSource) -> Iterator[Session]:
    """Open a shard's database; nothing stays open after the block.

    Raises:
        UnreachableError: the database cannot be reached.
        SourceError: it does not let the user in.
    """
    database = source.database
    if database is None:
        raise SourceError(f"{source} is in no database")
    with _silence(), _engine(database.url) as engine:
        with _told(source, database):
            connection = engine.connect()
        session = Session(connection, source, database)
        with closing(session):
            for statement in _START[session.dialect]:
                session.execute(statement)
            yield session


@contextmanager
def _told(source: ShardSource, database: DatabaseShard) -> Iterator[None]:
    """Say in our own words what a driver raises."""
    words, kind = "", SourceError
    try:
        yield
    except DRIVER_ERRORS as error:
        words = safe_words(error, database)
        if words in PASSING or isinstance(error, ConnectionError | TimeoutError):
            kind = UnreachableError
    if words:
        # nobody is to see the driver's error
        raise kind(f"{source}: {words}") from None


@contextmanager
def _engine(url: DatabaseUrl) -> Iterator[sa.Engine]:
    options: dict[str, Any] = {
        "poolclass": sa.NullPool,
        "hide_parameters": True,
        "logging_name": _SILENT,
        "pool_logging_name": _SILENT,
    }
    connect: dict[str, Any] = {}
    if "connect_timeout" not in url.url.query:
        connect["connect_timeout"] = SECONDS_TO_CONNECT
    address = url.url
    if url.dialect == "sqlite":
        file = f"file:{quote(address.database or '')}?mode=ro"
        options["creator"] = partial(
            sqlite3.connect, file, uri=True, isolation_level=None
        )
        address = sa.make_url("sqlite://")
    elif url.dialect == "mysql":
        options["connect_args"] = {"charset": "utf8mb4", **connect}
    else:
        options["connect_args"] = {"client_encoding": "utf8", **connect}
        options["execution_options"] = {
            "isolation_level": "REPEATABLE READ",
            "postgresql_readonly": True,
        }
    engine = sa.create_engine(address, **options)
    try:
        yield engine
    finally:
        engine.dispose()
