"""A connection to a shard's database: read-only, in UTC, in one consistent snapshot."""

import logging
import re
import sqlite3
import threading
import time
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote

import sqlalchemy as sa

from tp_flower.errors import SourceError, UnreachableError, closest, install_hint
from tp_flower.query.fragment import spell
from tp_flower.sources.entries import TABLES_THERE
from tp_flower.sources.tables_file import SQLITE, DatabaseShard, ShardSource

Dialect = Literal["postgresql", "mysql", "sqlite"]

SUPPORTED: Final = (
    "postgresql://user:password@host/database",
    "mysql://user:password@host/database",
    "mariadb://user:password@host/database",
    "sqlite:///path/of/file.db",
)
HIDDEN: Final = "***"

_DIALECTS: Final[dict[str, tuple[Dialect, str]]] = {
    "postgresql": ("postgresql", "psycopg"),
    "postgres": ("postgresql", "psycopg"),
    "mysql": ("mysql", "pymysql"),
    "mariadb": ("mysql", "pymysql"),
    "sqlite": ("sqlite", "pysqlite"),
}
_VARIABLE: Final = re.compile(r"\$\{([^}]*)\}")
_PARTS: Final = re.compile(r"([^:/]+://)([^@]*@)?([^?]*)(\?.*)?", re.DOTALL)


def _errors_of(driver: str, name: str) -> tuple[type[Any], ...]:
    """Return a driver's class of errors, if the driver is installed."""
    with suppress(ImportError):
        return (getattr(import_module(driver), name),)
    return ()


_PG_ERRORS = _errors_of("psycopg", "Error")
_MY_ERRORS = _errors_of("pymysql", "MySQLError")


@dataclass(frozen=True, repr=False)
class DatabaseUrl:
    """Where a database is, and how to log in.

    ``url`` contains more than may be shown; ``secrets`` are the texts that must not
    appear in any output.
    """

    url: sa.URL = field(repr=False)
    secrets: frozenset[str] = field(default=frozenset(), repr=False)
    name: str = ""

    @property
    def dialect(self) -> Dialect:
        """The SQL dialect of the database."""
        return _DIALECTS[self.name][0]

    def __str__(self) -> str:
        """The address without user, password and options, for messages."""
        url = self.url
        user = ""
        if url.username or url.password:
            user = f"{HIDDEN}@"
        port = f":{url.port}" if url.port else ""
        query = f"?{HIDDEN}" if url.query else ""
        address = f"{user}{url.host or ''}{port}/{url.database or ''}"
        # an environment variable may stand for host or database
        return f"{self.name}://{_hide(address, self.secrets)}{query}"

    def __repr__(self) -> str:
        return f"DatabaseUrl({str(self)!r})"

    def redact(self, text: str) -> str:
        """Return a driver's or server's text without secrets and the user's name."""
        return _hide(text, {*self.secrets, self.url.username or ""})


def _hide(text: str, secrets: Collection[str]) -> str:
    # the longest first, because one may be part of another
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def parse_url(
    text: str, environment: Mapping[str, str], folder: Path, where: str
) -> DatabaseUrl:
    """Return the address that a URI gives, in which ``${NAME}`` stands for a variable.

    A variable in the user, the password or an option is used literally and needs no
    percent-encoding. The path of an SQLite file is relative to the folder of the tables
    file. No message quotes the URI.
    """
    expanded, values = _expand(text, environment, where)
    try:
        url = sa.make_url(expanded)
    except (sa.exc.ArgumentError, ValueError):
        url = None
    if url is None:
        raise SourceError(
            f"the 'uri' of {where} is not the URI of a database: expected for instance "
            f"{SUPPORTED[0]}, with @ : / of a user or password as %40 %3A %2F"
        )
    # the rest of a password after its first @ would pass for the host, and be shown
    if "@" in f"{url.host}{url.database}" and not url.drivername.startswith("sqlite"):
        raise SourceError(
            f"the 'uri' of {where} has more than one @: write @ : / of a user "
            "or password as %40 %3A %2F, or put the password, unescaped, into a "
            "variable: user:${PASSWORD}@host"
        )
    backend, _, driver = url.drivername.partition("+")
    if backend not in _DIALECTS or driver not in ("", _DIALECTS[backend][1]):
        hint = "" if driver else closest(backend, _DIALECTS)
        raise SourceError(
            f"the 'uri' of {where} names an unsupported kind of database{hint}: "
            f"use {', '.join(SUPPORTED)}"
        )
    dialect, known_driver = _DIALECTS[backend]
    if dialect != SQLITE and find_spec(known_driver) is None:
        raise SourceError(
            f"for the 'uri' of {where} the driver {known_driver} "
            f"{install_hint(dialect)}"
        )
    if dialect == "sqlite":
        url = _sqlite_file(url, folder, where)
    elif not url.host and "host" not in url.query:
        raise SourceError(f"the 'uri' of {where} names no host")
    url = url.set(drivername=f"{dialect}+{known_driver}")
    return DatabaseUrl(url, frozenset(_secrets(url, values)), backend)


def _expand(
    text: str, environment: Mapping[str, str], where: str
) -> tuple[str, list[str]]:
    """Return the URI with its variables' values, and these values."""
    values: list[str] = []

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in environment:
            raise SourceError(
                f"the 'uri' of {where} needs the environment variable {name!r}, "
                "which is not set where the site runs (a SuperLink or SuperNode that "
                "is up already keeps the environment it was started with)"
            )
        values.append(environment[name])
        return environment[name]

    def quoted_value(match: re.Match[str]) -> str:
        return quote(value(match), safe="")

    parts = _PARTS.fullmatch(text)
    # a variable before the first :// holds a whole URI
    pieces = parts.groups(default="") if parts else (text,)
    # user and options are unquoted later, host and database are not
    expanded = "".join(
        _VARIABLE.sub(replacement, piece)
        for piece, replacement in zip(
            pieces, (value, quoted_value, value, quoted_value), strict=False
        )
    )
    return expanded, values


def _sqlite_file(url: sa.URL, folder: Path, where: str) -> sa.URL:
    """Return the URL of a SQLite file, relative to the folder; refuse options."""
    if not url.database or url.database == ":memory:" or url.query or url.host:
        raise SourceError(
            f"the 'uri' of {where} names no file: expected {SUPPORTED[-1]}, "
            "relative to the tables file, or sqlite:////absolute/path, without options"
        )
    return url.set(database=str(folder / Path(url.database).expanduser()))


def _secrets(url: sa.URL, values: list[str]) -> set[str]:
    """Return all spellings of the secrets that an error may quote."""
    secrets = {*values, str(url.password or "")}
    for option in url.query.values():
        secrets |= {option} if isinstance(option, str) else set(option)
    secrets |= {quote(secret, safe="") for secret in secrets}
    secrets |= {quote(secret) for secret in secrets}
    return secrets - {""}


# the errors while reading
DRIVER_ERRORS: Final[tuple[type[Exception], ...]] = (
    sa.exc.SQLAlchemyError,
    *_PG_ERRORS,
    *_MY_ERRORS,
    sqlite3.Error,
    OSError,
    ValueError,  # for values that Python lacks, such as dates of the year 0
)

_ERRORS: Final = tomllib.loads(
    Path(__file__).with_name("errors.toml").read_text("utf-8")
)
_WORDS: Final[dict[str, str]] = _ERRORS["words"]
_MISSING = _WORDS["missing"]
_DATA = _WORDS["data"]
_LOST = _WORDS["lost"]


def _words_by_code(dialect: str) -> dict[Any, str]:
    """Return what an error's code means, by the code."""
    return {
        code: _WORDS[name] for name, codes in _ERRORS[dialect].items() for code in codes
    }


_PG_STATES = _words_by_code("postgresql")
_MY_CODES = _words_by_code("mysql")
_PHRASES: Final = {phrase: _WORDS[name] for phrase, name in _ERRORS["phrases"].items()}
PASSING: Final = [_WORDS[name] for name in ("lost", "reach", "full", "busy")]
"""These errors may be gone at the next attempt."""

# these concern names and syntax: the server's text helps
_WORDY: Final = [_WORDS[name] for name in ("missing", "column", "syntax")]


def safe_words(error: BaseException, database: DatabaseShard) -> str:
    """Return the cause of an error and a remedy, without a value or a secret."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig else error
    if isinstance(cause, sa.exc.NoSuchTableError):
        return _MISSING
    reason = _reason(cause)
    if reason in _WORDY:
        words = " ".join(str(_first_line(cause)).split())[:300]
        return f"{reason} ({database.url.redact(words)})"
    if reason:
        return reason
    name_and_code = f"{type(cause).__name__} {_code(cause)}".rstrip()
    return f"it answers with {name_and_code}"


def _code(cause: BaseException) -> str:
    if isinstance(cause, _PG_ERRORS):
        return cause.sqlstate or ""
    if isinstance(cause, _MY_ERRORS) and cause.args:
        if not isinstance(cause.args[0], int):
            return ""
        return str(cause.args[0])
    return ""


def _reason(cause: BaseException) -> str:
    """Return the reason of a driver's error in words without data, or ""."""
    code = _code(cause)
    if isinstance(cause, _PG_ERRORS) and code:
        matches = [state for state in _PG_STATES if code.startswith(state)]
        if not matches:
            return ""
        return _PG_STATES[max(matches, key=len)]
    if isinstance(cause, _MY_ERRORS):
        # an InterfaceError has no text: the connection is gone
        return _MY_CODES.get(int(code or 0), _LOST if code in ("", "0") else "")
    if isinstance(cause, ValueError) or type(cause).__name__ == "DataError":
        return _DATA
    text = str(cause)
    return next(
        (words for phrase, words in _PHRASES.items() if re.search(phrase, text)), ""
    )


def _first_line(cause: Any) -> str:
    """The server's text without the position and the statement that follow it."""
    if isinstance(cause, _PG_ERRORS):
        return cause.diag.message_primary or ""
    if isinstance(cause, _MY_ERRORS):
        # MySQL quotes the statement from the point of failure, including literals
        return str(cause.args[-1]).partition(" near ")[0]
    return str(cause).partition("\n")[0]


SECONDS_TO_CONNECT: Final = 30
# instructions between two looks at the clock, some 0.1 ms
_SQLITE_STEPS: Final = 10_000

# SQLAlchemy's loggers would print rows, users and the owner's SQL
_SILENT: Final = "tp_flower"
for _name in ("engine.Engine", "pool.impl.NullPool"):
    logging.getLogger(f"sqlalchemy.{_name}.{_SILENT}").disabled = True

_THREAD: Final = threading.local()


for _name in ("psycopg", "psycopg.pq"):
    # it would print the user's name: nothing is logged by threads that have a database
    # open
    logging.getLogger(_name).addFilter(lambda _: not getattr(_THREAD, "sessions", 0))


@contextmanager
def _silence() -> Iterator[None]:
    _THREAD.sessions = getattr(_THREAD, "sessions", 0) + 1
    try:
        yield
    finally:
        _THREAD.sessions -= 1


_START: Final[dict[Dialect, tuple[str, ...]]] = {
    "postgresql": ("SET LOCAL TIME ZONE 'UTC'", "SET LOCAL extra_float_digits = 1"),
    "mysql": (
        "SET SESSION TRANSACTION READ ONLY",
        "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "SET SESSION time_zone = '+00:00'",
        # the site may take long between two chunks
        "SET SESSION net_write_timeout = 3600",
        "SET SESSION sql_mode = CONCAT(@@sql_mode, ',NO_UNSIGNED_SUBTRACTION')",
        "START TRANSACTION WITH CONSISTENT SNAPSHOT",
    ),
    "sqlite": ("BEGIN",),
}


@dataclass(frozen=True)
class DatabaseSession:
    """An open connection to a shard's database; its SourceErrors contain no secrets."""

    connection: sa.Connection
    source: ShardSource
    database: DatabaseShard
    _streams: list[Any] = field(default_factory=list)

    @property
    def dialect(self) -> Dialect:
        """The SQL dialect."""
        return self.database.url.dialect

    def one_row(self, sql: str) -> Sequence[Any]:
        """Return the first row of a query, empty if it has none."""
        with self._run(sql) as cursor:
            return cursor.fetchone() or ()

    def fields(self, sql: str) -> list[Any]:
        """Return the driver's description of a query's columns."""
        with self._run(sql) as cursor:
            if self.dialect == "mysql":
                # the description lacks the flags and the character set
                return list(cursor._result.fields)  # noqa: SLF001
            return list(cursor.description)

    @cached_property
    def table(self) -> tuple[str, ...] | None:
        """The table in its own spelling, because names compare without case."""
        if self.database.table is None:
            return None
        *schemas, name = self.database.table or ("",)
        schema = ".".join(schemas) or None
        with _translated_errors(self.source, self.database):
            inspector = sa.inspect(self.connection)
            if self.dialect != SQLITE and inspector.has_table(name, schema):
                return self.database.table
            names = [
                *inspector.get_table_names(schema),
                *inspector.get_view_names(schema),
            ]
        spelling = names[0] if not name and len(names) == 1 else spell(name, names)
        if spelling is None:
            problem = _MISSING if name else "it needs 'table'"
            listed = ", ".join([*names, *self._tables_elsewhere()]) or "none"
            raise SourceError(f"{self.source}: {problem}{TABLES_THERE}{listed}")
        return (*schemas, spelling)

    def _tables_elsewhere(self) -> list[str]:
        """Return the tables and views of PostgreSQL's other schemas."""
        if self.dialect != "postgresql":
            return []
        with self._run(
            "SELECT table_schema || '.' || table_name FROM information_schema.tables "
            "WHERE table_schema NOT IN ('pg_catalog', 'information_schema', "
            "current_schema()) ORDER BY 1"
        ) as cursor:
            return [name for (name,) in cursor.fetchall()]

    def primary_key(self) -> list[str]:
        """Return the columns of the table's primary key, [] without one."""
        if self.table is None:
            return []
        schema = ".".join(self.table[:-1]) or None
        with _translated_errors(self.source, self.database):
            key = sa.inspect(self.connection).get_pk_constraint(self.table[-1], schema)
            return list(key["constrained_columns"])

    def execute(self, sql: str) -> None:
        """Run a statement that yields no rows."""
        with _translated_errors(self.source, self.database):
            self.connection.exec_driver_sql(sql)

    def limit(self, seconds: int) -> None:
        """Let the database end a statement that takes longer.

        In SQLite the limit is for all statements together.
        """
        if self.dialect == "sqlite":
            ends = time.monotonic() + seconds
            driver: Any = self.connection.connection.driver_connection
            driver.set_progress_handler(lambda: time.monotonic() > ends, _SQLITE_STEPS)
        elif self.dialect == "postgresql":
            self.execute(f"SET LOCAL statement_timeout = {1000 * seconds}")
        elif getattr(self.connection.dialect, "is_mariadb", False):
            self.execute(f"SET SESSION max_statement_time = {seconds}")
        else:
            self.execute(f"SET SESSION max_execution_time = {1000 * seconds}")

    def chunks(self, sql: str) -> Iterator[list[Sequence[Any]]]:
        """Yield the rows of a query in chunks, from a cursor on the server."""
        driver: Any = self.connection.connection.driver_connection
        with _translated_errors(self.source, self.database):
            if self.dialect == "postgresql":
                cursor = driver.cursor(name="tp_flower_shard")
            elif self.dialect == "mysql":
                from pymysql.cursors import SSCursor

                cursor = driver.cursor(SSCursor)
            else:
                cursor = driver.cursor()
            self._streams.append(cursor)
            cursor.execute(sql)
        while rows := self._fetch(cursor):
            yield rows

    def _fetch(self, cursor: Any) -> list[Sequence[Any]]:
        with _translated_errors(self.source, self.database):
            return list(cursor.fetchmany(self.database.chunk_rows))

    @contextmanager
    def _run(self, sql: str) -> Iterator[Any]:
        """Run a query; yield the driver's cursor, which logs nothing."""
        driver: Any = self.connection.connection.driver_connection
        with (
            _translated_errors(self.source, self.database),
            closing(driver.cursor()) as cursor,
        ):
            cursor.execute(sql)
            yield cursor

    def close(self) -> None:
        """Disconnect: the remaining rows are not needed, and nothing was changed."""
        with suppress(*DRIVER_ERRORS):
            for cursor in self._streams:
                if self.dialect == "mysql":
                    _abandon(cursor)
                cursor.close()
        with suppress(*DRIVER_ERRORS):
            self.connection.invalidate()
        self.connection.close()


def _abandon(cursor: Any) -> None:
    """Abandon a MySQL query's remaining rows, which closing it would fetch."""
    result = cursor._result  # noqa: SLF001 - there is no public way
    if result is not None:
        result.unbuffered_active = False
        result.connection = None
    cursor.connection = None


@contextmanager
def open_session(source: ShardSource) -> Iterator[DatabaseSession]:
    """Open a shard's database; nothing stays open after the block."""
    database = source.database
    if database is None:
        raise SourceError(f"{source} is not in a database")
    with _silence(), _engine(database.url) as engine:
        with _translated_errors(source, database):
            connection = engine.connect()
        session = DatabaseSession(connection, source, database)
        with closing(session):
            for statement in _START[session.dialect]:
                session.execute(statement)
            if source.policy.query_seconds is not None:
                session.limit(source.policy.query_seconds)
            yield session


@contextmanager
def _translated_errors(source: ShardSource, database: DatabaseShard) -> Iterator[None]:
    """Raise SourceError, in our own words, for an error of a driver."""
    words = ""
    kind = SourceError
    try:
        yield
    except DRIVER_ERRORS as error:
        words = safe_words(error, database)
        if words in PASSING or isinstance(error, ConnectionError | TimeoutError):
            kind = UnreachableError
    if words:
        # nobody may see the driver's error
        raise kind(f"{source}: {words}") from None


@contextmanager
def _engine(url: DatabaseUrl) -> Iterator[sa.Engine]:
    """Open an engine that only reads, and neither logs nor pools."""
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
