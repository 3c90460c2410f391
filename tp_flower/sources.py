"""Where a shard's rows come from: files and data frames, opened with DuckDB.

Every source is opened by :func:`connect` as the view ``shard`` of a DuckDB connection
that can read nothing else.
"""

import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

import duckdb
import pandas as pd

from tp_flower.csv_files import csv_call, csv_types
from tp_flower.datasets.flights import flights_tables
from tp_flower.engine_errors import safe_message
from tp_flower.errors import SourceError
from tp_flower.fragment import Fragment
from tp_flower.sql_text import quote_name, quote_text
from tp_flower.tables_file import (
    PARQUET_SUFFIXES,
    ShardSource,
    file_suffix,
    read_tables_file,
)

__all__ = [
    "Scan",
    "ShardSchema",
    "ShardSource",
    "column_types",
    "connect",
    "create_view",
    "describe",
    "fingerprint",
    "flights_sources",
    "hosted_shards",
    "load_tables",
    "register_frames",
    "release",
    "scan",
]

Frames = Mapping[str, pd.DataFrame | Sequence[pd.DataFrame]]

EARLY_ROWS: Final = 2048
MEMORY_PREFIX: Final = "memory:"


@dataclass(frozen=True)
class ShardSchema:
    """What a shard looks like: no values, only names, types and counts.

    Attributes:
        columns: DuckDB type by column, in the source's order.
        rows: number of rows before any filter.
        all_null: the columns without a single value; their type says nothing.
    """

    columns: dict[str, str]
    rows: int
    all_null: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scan:
    """A shard opened to run a fragment on it.

    Attributes:
        connection: a locked DuckDB connection.
        fragment: what is left to run over the relation ``shard``; checked.
        columns: DuckDB type of each column of ``shard``.
        needs_sort: whether the rows come in an order that another reading may not
            repeat, so that the reader must sort them by what they hold.
    """

    connection: duckdb.DuckDBPyConnection
    fragment: Fragment
    columns: Mapping[str, str]
    needs_sort: bool = False

    def chunks(self) -> Iterator[None]:
        """Put the next rows behind the relation ``shard`` at every step."""
        yield None


def load_tables(path: str) -> tuple[ShardSource, ...]:
    """Return the shards of a tables file, or of the frames "memory:<token>".

    Raises:
        SourceError: the file is missing, unreadable, no TOML, names no table, has an
            unknown key or a source of an unknown form; the token is not known.
    """
    if path.startswith(MEMORY_PREFIX):
        return _registered(path.removeprefix(MEMORY_PREFIX))
    return read_tables_file(path)


class _Registry:
    """The data frames that sites of this process host, by token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[str, tuple[str, dict[str, tuple[pd.DataFrame, ...]]]] = {}

    def add(self, site: str, frames: dict[str, tuple[pd.DataFrame, ...]]) -> str:
        token = uuid.uuid4().hex
        with self._lock:
            self._sites[token] = (site, frames)
        return token

    def get(self, token: str) -> tuple[str, dict[str, tuple[pd.DataFrame, ...]]]:
        with self._lock:
            if token in self._sites:
                return self._sites[token]
        raise SourceError(f"no data frames are registered under {token!r} here")

    def remove(self, token: str) -> None:
        with self._lock:
            self._sites.pop(token, None)


_REGISTRY: Final = _Registry()


def register_frames(frames: Frames, site: str) -> str:
    """Keep data frames for the sites of this process; return their token.

    Args:
        frames: one data frame, or a list of shards, by table name.
        site: the organisation that holds them.
    """
    shards: dict[str, tuple[pd.DataFrame, ...]] = {}
    for table, given in frames.items():
        listed = [given] if isinstance(given, pd.DataFrame) else list(given)
        for frame in listed:
            if not isinstance(frame, pd.DataFrame):
                raise SourceError(
                    f"table {table!r} at site {site!r}: expected a pandas DataFrame, "
                    f"not {type(frame).__name__}"
                )
        shards[table] = tuple(listed)
    if not any(shards.values()):
        raise SourceError(f"site {site!r} has no tables")
    return _REGISTRY.add(site, shards)


def release(token: str) -> None:
    """Forget the data frames of a token; unknown tokens are ignored."""
    _REGISTRY.remove(token.removeprefix(MEMORY_PREFIX))


def _registered(token: str) -> tuple[ShardSource, ...]:
    site, tables = _REGISTRY.get(token)
    return tuple(
        ShardSource(table=table, site=site, index=index, token=token)
        for table, shards in tables.items()
        for index in range(len(shards))
    )


def hosted_shards(
    node_config: Mapping[str, object], run_config: Mapping[str, object]
) -> tuple[ShardSource, ...]:
    """Return the shards that this node hosts.

    A node with its own tables file hosts all of it. Otherwise the run's tables file, or
    the built-in flights, describes all organisations, and they are dealt to the nodes:
    organisation k goes to the node with partition-id k % num-partitions.
    """
    own = node_config.get("tables")
    if own:
        return load_tables(str(own))
    listed = run_config.get("tables")
    sources = load_tables(str(listed)) if listed else flights_sources()
    organisations = list(dict.fromkeys(source.site for source in sources))
    node = int(str(node_config.get("partition-id", 0)))
    nodes = int(str(node_config.get("num-partitions", 1)))
    mine = set(organisations[node % nodes :: nodes]) if nodes > 0 else set()
    return tuple(source for source in sources if source.site in mine)


def flights_sources() -> tuple[ShardSource, ...]:
    """The shards of the built-in flights federation, five organisations in all."""
    sources = []
    for table, files in flights_tables().items():
        sources += [
            ShardSource(table=table, site=site, index=index, path=str(path))
            for index, (site, path) in enumerate(files.items())
        ]
    # invariant: organisations in order EWR, JFK, LGA, registry, directory
    return tuple(sources)


@contextmanager
def connect(source: ShardSource) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a DuckDB connection in which the view ``shard`` is the source.

    The connection can read the source's file and nothing else, and cannot be told
    otherwise any more.

    Raises:
        SourceError: the file is missing or cannot be read, or DuckDB refuses what is
            asked of it inside the ``with`` block.
    """
    # a file needs an engine of its own, which may read that file and no other
    engine = _new_engine() if source.path else _frames_engine().cursor()
    with closing(engine) as connection:
        try:
            create_view(connection, source)
            if source.path:
                _lock(connection, source.path)
            yield connection
        except duckdb.Error as error:
            raise SourceError(f"{source}: {safe_message(error)}") from error


@contextmanager
def scan(source: ShardSource, fragment: Fragment) -> Iterator[Scan]:
    """Open a shard to run a fragment on it.

    Raises:
        QueryError: the fragment is not what a site may run.
        SourceError: as :func:`connect`.
    """
    with connect(source) as connection:
        columns = column_types(connection, "SELECT * FROM shard")
        yield Scan(connection, fragment.check(columns), columns)


def fingerprint(source: ShardSource) -> str | None:
    """Return a text that changes when the shard's rows do; None if nothing tells."""
    if source.path is None:
        return None
    status = Path(source.path).stat()
    return f"{source.path}|{status.st_size}|{status.st_mtime_ns}"


def _new_engine() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(
        config={
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
    )
    connection.execute("SET GLOBAL TimeZone = 'UTC'")
    return connection


@lru_cache(maxsize=1)
def _frames_engine() -> duckdb.DuckDBPyConnection:
    """The locked engine behind all data frames of this process.

    Starting one takes longer than reading a small frame. Each connection is a cursor of
    its own, with its own temporary tables.
    """
    connection = _new_engine()
    _lock(connection, None)
    return connection


def _lock(connection: duckdb.DuckDBPyConnection, path: str | None) -> None:
    """Let the engine read one file at most, and never again be told otherwise."""
    allowed = quote_text(path) if path else ""
    connection.execute(f"SET allowed_paths = [{allowed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def create_view(connection: duckdb.DuckDBPyConnection, source: ShardSource) -> None:
    """Make the view ``shard`` of a connection the source.

    Raises:
        SourceError: the file is missing or cannot be read.
    """
    if source.path is None:
        _, tables = _REGISTRY.get(source.token or "")
        frame = tables[source.table][source.index]
        connection.register("frame", frame.rename(columns=str))
        relation = "frame"
    elif file_suffix(source.path) in PARQUET_SUFFIXES:
        _check_readable(source, source.path)
        relation = f"read_parquet({quote_text(source.path)})"
    else:
        _check_readable(source, source.path)
        found = csv_types(source.path, source.nulls)
        _check_columns_found(source, list(found))
        types = {**found, **_known_types(source, found)}
        # read with these types at once: a cast would come after '007' became 7
        relation = csv_call(source.path, source.nulls, types)
        source = replace(source, types={})
    columns = _replacements(connection, source, relation)
    connection.execute(f"CREATE TEMP VIEW shard AS SELECT {columns} FROM {relation}")


def _check_readable(source: ShardSource, path: str) -> None:
    try:
        with Path(path).open("rb") as file:
            is_empty = not file.read(1)
    except FileNotFoundError:
        raise SourceError(f"{source}: the file does not exist") from None
    except OSError as error:
        reason = error.strerror
        raise SourceError(f"{source}: the file cannot be read: {reason}") from error
    if is_empty:
        raise SourceError(f"{source}: the file is empty")


def _check_columns_found(source: ShardSource, found: Sequence[str]) -> None:
    """DuckDB reads a file whose lines differ in length as one column of lines."""
    if len(found) == 1 and any(mark in found[0] for mark in ",;|\t"):
        raise SourceError(
            f"{source}: the file looks like one column {found[0]!r}: "
            "does every line have as many values as the first one has names?"
        )


def _replacements(
    connection: duckdb.DuckDBPyConnection, source: ShardSource, relation: str
) -> str:
    """What to SELECT so that columns have the types that the source asks for."""
    if not source.types:
        return "*"
    found = column_types(connection, f"SELECT * FROM {relation}")
    casts = ", ".join(
        f"CAST({quote_name(column)} AS {name}) AS {quote_name(column)}"
        for column, name in _known_types(source, found).items()
    )
    return f"* REPLACE ({casts})"


def _known_types(source: ShardSource, found: Mapping[str, str]) -> Mapping[str, str]:
    for column in source.types:
        if column not in found:
            raise SourceError(
                f"{source}: 'types' names column {column!r}, "
                f"but the columns are {', '.join(found)}"
            )
    return source.types


def column_types(connection: duckdb.DuckDBPyConnection, select: str) -> dict[str, str]:
    """Return the DuckDB type of each column of a SELECT."""
    rows = connection.execute(f"DESCRIBE {select}").fetchall()
    return {name: kind for name, kind, *_ in rows}


def describe(source: ShardSource) -> ShardSchema:
    """Return a shard's columns, types and number of rows.

    Raises:
        SourceError: the source cannot be read.
    """
    with connect(source) as connection:
        columns = column_types(connection, "SELECT * FROM shard")
        # nearly every column has a value early: only the others are read to the end
        early = f"(SELECT * FROM shard LIMIT {EARLY_ROWS})"
        unseen = _without_value(connection, early, columns)
        empty = _without_value(connection, "shard", unseen)
        ((total,),) = connection.execute("SELECT count(*) FROM shard").fetchall()
    return ShardSchema(columns=columns, rows=int(total), all_null=tuple(empty))


def _without_value(
    connection: duckdb.DuckDBPyConnection, relation: str, columns: Iterable[str]
) -> list[str]:
    """Return the columns that hold nothing but NULL."""
    names = list(columns)
    counts = ", ".join(f"count({quote_name(name)})" for name in names)
    if not names:
        return []
    (values,) = connection.execute(f"SELECT {counts} FROM {relation}").fetchall()
    return [name for name, count in zip(names, values, strict=True) if not count]
