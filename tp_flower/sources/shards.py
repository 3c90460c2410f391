"""Where a shard's rows come from: files, data frames and databases.

:func:`connect` opens files and frames as the view ``shard`` of a DuckDB connection that
can read nothing else; :mod:`tp_flower.sources.databases.shards` opens databases. It is
imported only if a site has one, because its drivers take as long as everything else.
"""

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Final

import duckdb
import pandas as pd

from tp_flower.duckdb_engine import (
    lock,
    new_engine,
    quote_name,
    quote_path,
    quote_text,
    safe_message,
    shared_cursor,
)
from tp_flower.errors import SourceError
from tp_flower.node_config import NUM_PARTITIONS, PARTITION_ID, TABLES
from tp_flower.query.fragment import Fragment
from tp_flower.sources.csv_files import csv_call, csv_format
from tp_flower.sources.entries import MEMORY_PREFIX as MEMORY_PREFIX
from tp_flower.sources.flights import flights_tables
from tp_flower.sources.policy import SIMULATED
from tp_flower.sources.tables_file import PARQUET_SUFFIXES, file_suffix, read_tables_file
from tp_flower.sources.tables_file import ShardSource as ShardSource


@dataclass(frozen=True)
class ShardSchema:
    """The schema of a shard: only names, types and counts before any filter, no values.

    The type of a column that is ``all_null`` is meaningless; warnings, about values
    that determine a column's type, are only for the owner.
    """

    columns: dict[str, str]
    rows: int
    all_null: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scan:
    """A shard opened to run a fragment on it, over the relation ``shard``.

    Attributes:
        fragment: checked, and without what the database evaluates.
        needs_sort: whether another reading may return the rows in a different order, so
            that the reader must sort them by their content.
        pushed: descriptions of the filters that the database applies.
        chunks: makes the next rows the relation ``shard`` at every step; to be used
            once, as a database's rows are gone after they were read. If the fragment
            has a sub-query, all rows come in one step.
    """

    connection: duckdb.DuckDBPyConnection
    fragment: Fragment
    needs_sort: bool = False
    pushed: tuple[str, ...] = ()
    chunks: Callable[[], Iterator[None]] = lambda: iter([None])


def column_types(connection: duckdb.DuckDBPyConnection, select: str) -> dict[str, str]:
    """Return the DuckDB type of each column of a SELECT."""
    rows = connection.execute(f"DESCRIBE {select}").fetchall()
    return {name: kind for name, kind, *_ in rows}


EARLY_ROWS: Final = 2048

Frames = Mapping[str, pd.DataFrame | Sequence[pd.DataFrame]]
_FRAMES: Final[dict[str, tuple[str, dict[str, tuple[pd.DataFrame, ...]]]]] = {}
"""The site and the data frames by table that this process hosts, by token."""


def register_frames(frames: Frames, site: str) -> str:
    """Store a site's frames, one or a list of shards by table; return their token."""
    shards: dict[str, tuple[pd.DataFrame, ...]] = {}
    for table, value in frames.items():
        listed = [value] if isinstance(value, pd.DataFrame) else list(value)
        for frame in listed:
            if not isinstance(frame, pd.DataFrame):
                raise SourceError(
                    f"table {table!r} at site {site!r}: expected a pandas DataFrame, "
                    f"not {type(frame).__name__}"
                )
        shards[table] = tuple(listed)
    if not any(shards.values()):
        raise SourceError(f"site {site!r} has no tables")
    token = uuid.uuid4().hex
    _FRAMES[token] = site, shards
    return token


def release(token: str) -> None:
    """Forget the data frames of a token; unknown tokens are ignored."""
    _FRAMES.pop(token.removeprefix(MEMORY_PREFIX), None)


def _registered(token: str) -> tuple[str, dict[str, tuple[pd.DataFrame, ...]]]:
    try:
        return _FRAMES[token]
    except KeyError:
        raise SourceError(f"no data frames are registered under {token!r} here") from None


def load_tables(path: str) -> tuple[ShardSource, ...]:
    """Return the shards of a tables file, or of the frames "memory:<token>"."""
    if not path.startswith(MEMORY_PREFIX):
        return read_tables_file(path)
    token = path.removeprefix(MEMORY_PREFIX)
    site, tables = _registered(token)
    # whoever runs this process has all of their rows
    return tuple(
        ShardSource(table=table, site=site, index=index, token=token, policy=SIMULATED)
        for table, shards in tables.items()
        for index in range(len(shards))
    )


def hosted_shards(
    node_config: Mapping[str, object], run_config: Mapping[str, object]
) -> tuple[ShardSource, ...]:
    """Return the shards that this node hosts.

    A node with its own tables file hosts all of it. Otherwise the run's tables file, or
    the built-in flights, describes all organisations, and they are divided among the
    nodes: organisation k goes to the node with partition-id k % num-partitions. This is
    for simulations: a server does not choose the files that a site reads.
    """
    if hosted := node_config.get(TABLES):
        return load_tables(str(hosted))
    simulated = run_config.get("tables")
    if simulated and PARTITION_ID not in node_config:
        raise SourceError(
            "this node has no tables file of its own, and the run's is for "
            "simulations only: start the SuperNode with "
            "--node-config 'tables=\"/path/of/tables.toml\"'"
        )
    sources = load_tables(str(simulated)) if simulated else flights_sources()
    organisations = list(dict.fromkeys(source.site for source in sources))
    node = int(str(node_config.get(PARTITION_ID, 0)))
    nodes = int(str(node_config.get(NUM_PARTITIONS, 1)))
    mine = set(organisations[node % nodes :: nodes]) if nodes > 0 else set()
    return tuple(
        replace(source, policy=SIMULATED) if not source.has_policy else source
        for source in sources
        if source.site in mine
    )


def flights_sources() -> tuple[ShardSource, ...]:
    """The shards of the built-in flights federation, whose rows are public."""
    # invariant: organisations in order EWR, JFK, LGA, registry, directory
    return tuple(
        ShardSource(table=table, site=site, index=index, path=str(path), policy=SIMULATED)
        for table, files in flights_tables().items()
        for index, (site, path) in enumerate(files.items())
    )


@contextmanager
def connect(source: ShardSource) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a DuckDB connection whose view ``shard`` is all that it can ever read."""
    # a file needs its own engine, which may read that file and no other
    engine = new_engine() if source.path else shared_cursor()
    with closing(engine) as connection:
        try:
            create_view(connection, source)
            if source.path:
                lock(connection, _files(source.path))
            yield connection
        except duckdb.Error as error:
            raise SourceError(f"{source}: {safe_message(error)}") from error


@contextmanager
def scan(source: ShardSource, fragment: Fragment) -> Iterator[Scan]:
    """Open a shard to run a fragment on it."""
    if source.database is not None:
        from tp_flower.sources.databases.shards import scan_database

        with scan_database(source, fragment) as opened_scan:
            yield opened_scan
        return
    with connect(source) as connection:
        columns = column_types(connection, "SELECT * FROM shard")
        yield Scan(connection, fragment.check(columns))


def fingerprint(source: ShardSource) -> str | None:
    """Return a text that changes with the shard's rows; None if nothing shows it."""
    if source.database is not None:
        from tp_flower.sources.databases.shards import database_fingerprint

        return database_fingerprint(source)
    if source.path is None:
        return None
    _check_readable(source, source.path)
    files = []
    # what was written to a DuckDB file may still be in its log
    log = f"{source.path}.wal"
    for path in (*_files(source.path), *([log] if Path(log).exists() else [])):
        status = Path(path).stat()
        # a copy that keeps the file's time and size (cp -p, rsync -t) changes the ctime
        times = f"{status.st_mtime_ns}|{status.st_ctime_ns}"
        files.append(f"{path}|{status.st_size}|{times}")
    if len(files) == 1:
        return files[0]
    return f"{source.path}|{sha256(chr(0).join(files).encode()).hexdigest()}"


def _files(path: str) -> list[str]:
    if not Path(path).is_dir():
        return [path]
    return sorted(
        str(file)
        for suffix in PARQUET_SUFFIXES
        for file in Path(path).rglob(f"*{suffix}")
        if file.is_file()
    )


def create_view(connection: duckdb.DuckDBPyConnection, source: ShardSource) -> None:
    """Make the view ``shard`` of a connection a source; copy a database's rows."""
    if source.database is not None:
        from tp_flower.sources.databases.shards import load_database

        load_database(source, connection)
        return
    if source.path is not None:
        _check_readable(source, source.path)
    if source.path is None:
        frame = _registered(source.token or "")[1][source.table][source.index]
        connection.register("frame", frame.rename(columns=str))
        relation = "frame"
    elif source.relation is not None:
        name = f"source_{uuid.uuid4().hex}"
        file = quote_text(source.path)
        connection.execute(f"ATTACH {file} AS {name} (READ_ONLY)")
        schema, table = ("main", *source.relation)[-2:]
        relation = f"{name}.{quote_name(schema)}.{quote_name(table)}"
    elif not _is_csv(source):
        files = ", ".join(map(quote_path, _files(source.path)))
        relation = f"read_parquet([{files}])"
    else:
        sniffed = csv_format(source.path, source.nulls)
        _check_columns(source, list(sniffed.types))
        types = {**sniffed.types, **_known_types(source, sniffed.types)}
        # read directly with these types: a cast would come after '007' became 7
        relation = csv_call(source.path, source.nulls, sniffed.dialect, types)
        source = replace(source, types={})
    columns = _replacements(connection, source, relation)
    connection.execute(f"CREATE TEMP VIEW shard AS SELECT {columns} FROM {relation}")


def _check_readable(source: ShardSource, path: str) -> None:
    try:
        if Path(path).is_dir():
            is_empty = not _files(path)
        else:
            with Path(path).open("rb") as file:
                is_empty = not file.read(1)
    except FileNotFoundError:
        raise SourceError(f"{source}: the file does not exist") from None
    except OSError as error:
        reason = error.strerror
        raise SourceError(f"{source}: the file cannot be read: {reason}") from error
    if is_empty:
        problem = "folder has no Parquet files" if Path(path).is_dir() else "file is empty"
        raise SourceError(f"{source}: the {problem}")


def _check_columns(source: ShardSource, names: Sequence[str]) -> None:
    """Refuse a file of lines of different lengths, which DuckDB reads as one column."""
    if len(names) == 1 and any(mark in names[0] for mark in ",;|\t"):
        raise SourceError(
            f"{source}: the file looks like one column {names[0]!r}: "
            "does every line have as many values as the first one has names?"
        )


def _replacements(connection: duckdb.DuckDBPyConnection, source: ShardSource, relation: str) -> str:
    """Return the SELECT list that gives columns the types of the tables file."""
    if not source.types:
        return "*"
    columns = column_types(connection, f"SELECT * FROM {relation}")
    casts = ", ".join(
        f"CAST({quote_name(column)} AS {name}) AS {quote_name(column)}"
        for column, name in _known_types(source, columns).items()
    )
    return f"* REPLACE ({casts})"


def _known_types(source: ShardSource, columns: Collection[str]) -> Mapping[str, str]:
    for column in source.types:
        if column not in columns:
            raise SourceError(
                f"{source}: 'types' names column {column!r}, "
                f"but the columns are {', '.join(columns)}"
            )
    return source.types


def describe(source: ShardSource) -> ShardSchema:
    """Return a shard's columns, types and number of rows."""
    if source.database is not None:
        from tp_flower.sources.databases.shards import describe_database

        return describe_database(source)
    with connect(source) as connection:
        columns = column_types(connection, "SELECT * FROM shard")
        # nearly every column has an early value: only the others are read to the end
        early = f"(SELECT * FROM shard LIMIT {EARLY_ROWS})"
        unseen = _without_value(connection, early, columns)
        empty = _without_value(connection, "shard", unseen)
        ((total,),) = connection.execute("SELECT count(*) FROM shard").fetchall()
    return ShardSchema(columns, int(total), tuple(empty), _warnings(source))


def _is_csv(source: ShardSource) -> bool:
    path = source.path or ""
    is_file = source.relation is None and not Path(path).is_dir()
    return is_file and file_suffix(path) not in PARQUET_SUFFIXES


def _warnings(source: ShardSource) -> tuple[str, ...]:
    """Return warnings for the owner of a CSV file, without quoting values."""
    if source.path is None or not _is_csv(source):
        return ()
    strays = csv_format(source.path, source.nulls).stray_rows
    return tuple(
        f"{source}: column {name!r} is read as text, because its value in row {row} "
        "is not a number: correct it, name it in 'nulls' if it stands for a missing "
        f'one, or say that these are texts: types = {{ {name} = "VARCHAR" }}'
        for name, row in strays.items()
        if name not in source.types
    )


def _without_value(
    connection: duckdb.DuckDBPyConnection, relation: str, columns: Iterable[str]
) -> list[str]:
    """Return the columns that are NULL in all rows."""
    names = list(columns)
    counts = ", ".join(f"count({quote_name(name)})" for name in names)
    if not names:
        return []
    (values,) = connection.execute(f"SELECT {counts} FROM {relation}").fetchall()
    return [name for name, count in zip(names, values, strict=True) if not count]
