"""Where a shard's rows come from: files, data frames and databases.

:func:`connect` opens files and frames as the view ``shard`` of a DuckDB connection that
can read nothing else; :mod:`tp_flower.sources.databases.shards` opens databases. It is
imported only if a site has one, because its drivers take as long as everything else.
"""

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import duckdb

from tp_flower import duckdb_engine
from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import SourceError
from tp_flower.node_config import NUM_PARTITIONS, PARTITION_ID, TABLES
from tp_flower.protocol.text_readings import TEXT, TextColumn
from tp_flower.query.fragment import Fragment
from tp_flower.sources.csv_columns import EARLY_ROWS, MOST_STRAY
from tp_flower.sources.csv_shards import (
    csv_relation,
    is_csv_shard,
    text_columns,
    text_hints,
)
from tp_flower.sources.derived.resolve import resolve_derived
from tp_flower.sources.entries import MEMORY_PREFIX as MEMORY_PREFIX
from tp_flower.sources.entries import TABLES_THERE, type_setting
from tp_flower.sources.flights import flights_tables
from tp_flower.sources.frames import HostedFrame, hosted_frame, read_frame
from tp_flower.sources.policy import MISSING, SIMULATED, Policy
from tp_flower.sources.tables_file import (
    PARQUET_SUFFIXES,
    read_tables_file,
    shard_in_code,
)
from tp_flower.sources.tables_file import ShardSource as ShardSource
from tp_flower.sources.text_sql import read_text
from tp_flower.sources.text_values import null_for_missing

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ShardSchema:
    """The schema of a shard: only names, types and counts before any filter, no values.

    The type of a column that is ``all_null`` is meaningless; ``texts`` are the columns
    of a text file whose type is not the owner's; warnings, about values that determine
    a column's type, are only for the owner. ``unread`` has the other columns of the
    source: why no query can read each, and what to write instead.
    """

    columns: dict[str, str]
    rows: int
    all_null: tuple[str, ...] = ()
    texts: dict[str, TextColumn] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    unread: dict[str, str] = field(default_factory=dict)


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
    return {
        name: kind
        for name, kind, *_ in connection.execute(f"DESCRIBE {select}").fetchall()
    }


_SHARD: Final = "SELECT * FROM shard"
_FLOATS: Final = frozenset(("FLOAT", "DOUBLE"))


def regular_type(kind: str) -> str:
    """Return the type that values of a type have in :func:`regular_rows`."""
    return "TIMESTAMP_NS" if kind == "TIMESTAMPTZ_NS" else kind


def regular_rows(types: Mapping[str, str], relation: str) -> str:
    """Return the SELECT of columns of these types, with one form of missing numbers.

    NaN becomes NULL here, before anything reads the values: filters, aggregates, keys
    and features then agree that it is missing. TIMESTAMPTZ_NS, to which few of DuckDB's
    functions apply, becomes TIMESTAMP_NS, in UTC.
    """
    columns = []
    for name, kind in types.items():
        column = quote_name(name)
        value = column
        if kind in _FLOATS:
            # Parquet's least and greatest values leave NaN out, and DuckDB takes
            # isnan() and comparisons with NaN to be false where they do; it does not
            # decide these by them
            value = f"CASE WHEN isfinite({column}) OR isinf({column}) THEN {column} END"
        elif regular_type(kind) != kind:
            value = f"CAST({column} AS {regular_type(kind)})"
        columns.append(f"{value} AS {column}")
    return f"SELECT {', '.join(columns) or 'nothing'} FROM {relation}"


Frames: TypeAlias = Mapping[str, Any]
"""Tables by name: a shard, or a list of shards.

A shard is a data frame of pandas, polars or Arrow, or as ``shard_in_code`` takes it: a
path, a URI, or keys of a tables file.
"""


@dataclass(frozen=True)
class _Registered:
    """The tables of a site that this process hosts; ``policy`` is that of frames."""

    site: str
    shards: Mapping[str, tuple[HostedFrame | ShardSource, ...]]
    policy: Policy


_TABLES: Final[dict[str, _Registered]] = {}
"""By token."""


def register_frames(frames: Frames, site: str, policy: Policy = SIMULATED) -> str:
    """Store a site's tables, which may be shards or lists of them; return their token.

    The policy applies to shards that have none; whoever runs this process has all of
    their rows.
    """
    shards: dict[str, tuple[HostedFrame | ShardSource, ...]] = {}
    for table, value in frames.items():
        listed = value if isinstance(value, list | tuple) else [value]
        shards[table] = tuple(
            _read_shard(table, k, site, item) for k, item in enumerate(listed)
        )
    if not any(shards.values()):
        raise SourceError(f"site {site!r} has no tables")
    token = uuid.uuid4().hex
    _resolved(token, _Registered(site, shards, policy))
    _TABLES[token] = _Registered(site, shards, policy)
    return token


def _read_shard(
    table: str, index: int, site: str, value: object
) -> HostedFrame | ShardSource:
    """Return a shard from a frame, path, URI or entry; refuse other values."""
    if isinstance(value, str | PathLike | Mapping):
        return shard_in_code(table, index, site, value)
    frame = read_frame(value)
    if frame is None:
        raise SourceError(
            f"table {table!r} at site {site!r}: expected a data frame (pandas, polars, "
            "Arrow), a path, a URI, keys of a tables file, or a list of these, not "
            f"{type(value).__name__}"
        )
    return hosted_frame(frame)


def release(token: str) -> None:
    """Forget the data frames of a token; unknown tokens are ignored."""
    _TABLES.pop(token.removeprefix(MEMORY_PREFIX), None)


def _registered_table(token: str) -> _Registered:
    try:
        return _TABLES[token]
    except KeyError:
        raise SourceError(
            f"no data frames are registered under {token!r} here"
        ) from None


def _frame(source: ShardSource) -> HostedFrame:
    shard = _registered_table(source.token or "").shards[source.table][source.index]
    if not isinstance(shard, HostedFrame):
        raise SourceError(f"{source}: it is no data frame of this process")
    return shard


def load_tables(path: str) -> tuple[ShardSource, ...]:
    """Return the shards of a tables file, or those registered as "memory:<token>"."""
    if not path.startswith(MEMORY_PREFIX):
        return resolve_derived(read_tables_file(path))
    token = path.removeprefix(MEMORY_PREFIX)
    return _resolved(token, _registered_table(token))


def _resolved(token: str, hosted: _Registered) -> tuple[ShardSource, ...]:
    """Return the registered shards, with the policy of those without one."""
    sources = [
        shard
        if isinstance(shard, ShardSource)
        else ShardSource(table, hosted.site, index, token=token, policy=MISSING)
        for table, shards in hosted.shards.items()
        for index, shard in enumerate(shards)
    ]
    return tuple(
        source if source.has_policy else replace(source, policy=hosted.policy)
        for source in resolve_derived(sources)
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
        ShardSource(
            table=table, site=site, index=index, path=str(path), policy=SIMULATED
        )
        for table, files in flights_tables().items()
        for index, (site, path) in enumerate(files.items())
    )


@contextmanager
def connect(source: ShardSource) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a DuckDB connection whose view ``shard`` is all that it can ever read."""
    with _open_shard(source) as (connection, _):
        yield connection


@contextmanager
def _open_shard(
    source: ShardSource,
) -> Iterator[tuple[duckdb.DuckDBPyConnection, Mapping[str, str]]]:
    """Open such a connection; yield also the type of each column of the view."""
    if source.derived is not None:
        from tp_flower.sources.derived.rows import connect_derived

        with connect_derived(source) as connection:
            yield connection, column_types(connection, _SHARD)
        return
    # a file needs its own engine, which may read that file and no other
    if not source.path:
        engine = duckdb_engine.shared_cursor()
    elif source.relation is None:
        engine = duckdb_engine.file_cursor(files_of(source.path))
    else:
        # a database can only be attached before that
        engine = duckdb_engine.new_engine()
    with closing(engine) as connection:
        try:
            types = create_view(connection, source)
            if source.path and source.relation is not None:
                duckdb_engine.lock(connection, [source.path])
            yield connection, types
        except duckdb.Error as error:
            raise SourceError(
                f"{source}: {duckdb_engine.safe_message(error)}"
            ) from error


@contextmanager
def scan(source: ShardSource, fragment: Fragment) -> Iterator[Scan]:
    """Open a shard to run a fragment on it."""
    if source.database is not None:
        from tp_flower.sources.databases.shards import scan_database

        with scan_database(source, fragment) as opened_scan:
            yield opened_scan
        return
    with _open_shard(source) as (connection, types):
        yield Scan(
            connection,
            fragment.check(types),
            needs_sort=not source.has_order,
        )


def fingerprint(source: ShardSource) -> str | None:
    """Return a text that changes with the shard's rows; None if nothing shows it."""
    if source.database is not None:
        from tp_flower.sources.databases.shards import database_fingerprint

        return database_fingerprint(source)
    if source.derived is not None:
        from tp_flower.sources.derived.rows import derived_fingerprint

        return derived_fingerprint(source)
    if source.path is None:
        return None
    _check_readable(source, source.path)
    paths = files_of(source.path)
    # what was written to a DuckDB file may still be in its log
    log = f"{source.path}.wal"
    if Path(log).exists():
        paths.append(log)
    files = []
    for path in paths:
        status = Path(path).stat()
        # a copy that keeps the file's time and size (cp -p, rsync -t) changes the ctime
        files.append(
            f"{path}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}"
        )
    if len(files) == 1:
        return files[0]
    return f"{source.path}|{sha256(chr(0).join(files).encode()).hexdigest()}"


def files_of(path: str) -> list[str]:
    """Return the Parquet files below a folder in order, or the one file."""
    if not Path(path).is_dir():
        return [path]
    return sorted(
        str(file)
        for suffix in PARQUET_SUFFIXES
        for file in Path(path).rglob(f"*{suffix}")
        if file.is_file()
    )


def create_view(
    connection: duckdb.DuckDBPyConnection, source: ShardSource
) -> Mapping[str, str]:
    """Make the view ``shard`` of a connection a source; copy a database's rows.

    Return the type of each of its columns.
    """
    if source.database is not None:
        from tp_flower.sources.databases.shards import load_database

        load_database(source, connection)
        return column_types(connection, _SHARD)
    if source.derived is not None:
        from tp_flower.sources.derived.rows import load_derived

        load_derived(source, connection)
        return column_types(connection, _SHARD)
    return show_rows(connection, source, _relation(connection, source))


def show_rows(
    connection: duckdb.DuckDBPyConnection, source: ShardSource, relation: str
) -> Mapping[str, str]:
    """Make the view ``shard`` a relation, with the columns that a source has of it.

    Return their types.
    """
    read_types = _frame(source).plain_types if source.token is not None else None
    if read_types is None:
        read_types = column_types(connection, f"SELECT * FROM {relation}")
    names = source.renamed(read_types)
    columns = ", ".join(
        f"{quote_name(old)} AS {quote_name(new)}" for old, new in names.items()
    )
    columns += "".join(f", NULL AS {quote_name(name)}" for name in source.absent)
    rows = f"SELECT {columns} FROM {relation}"
    if source.types:
        # for _find_strays(); others are spared what every view costs
        connection.execute(f"CREATE OR REPLACE TEMP VIEW source_rows AS {rows}")
    types = {new: read_types[old] for old, new in names.items()}
    casts = _casts(source, types)
    columns = ", ".join(
        f"{casts.get(name, quote_name(name))} AS {quote_name(name)}"
        for name in (*names.values(), *source.absent)
    )
    rows = f"(SELECT {columns} FROM ({rows}))"
    if casts or source.absent:
        types = column_types(connection, f"SELECT * FROM {rows}")
    connection.execute(f"CREATE TEMP VIEW shard AS {regular_rows(types, rows)}")
    return {name: regular_type(kind) for name, kind in types.items()}


def _relation(connection: duckdb.DuckDBPyConnection, source: ShardSource) -> str:
    """Return the SQL that reads a frame or a file; SourceError if it cannot be read."""
    if source.path is None:
        name = f"frame_{uuid.uuid4().hex}"
        connection.register(name, _cast_nanoseconds(_frame(source).rows))
        return name
    _check_readable(source, source.path)
    if source.relation is not None:
        name = f"source_{uuid.uuid4().hex}"
        connection.execute(
            f"ATTACH {duckdb_engine.quote_text(source.path)} AS {name} (READ_ONLY)"
        )
        parts = source.relation or _only_table(connection, name, source)
        schema, table = ("main", *parts)[-2:]
        return f"{name}.{quote_name(schema)}.{quote_name(table)}"
    if is_csv_shard(source):
        return csv_relation(source, source.path)
    files = ", ".join(map(duckdb_engine.quote_path, files_of(source.path)))
    return f"read_parquet([{files}])"


def _cast_nanoseconds(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Return a frame whose nanoseconds DuckDB reads.

    DuckDB would cut those of times with a time zone.
    """
    import pandas as pd

    zoned = [
        name
        for name, dtype in frame.dtypes.items()
        if isinstance(dtype, pd.DatetimeTZDtype) and dtype.unit == "ns"
    ]
    if not zoned:
        return frame
    return frame.assign(
        **{str(name): frame[name].dt.tz_convert(None) for name in zoned}
    )


def _only_table(
    connection: duckdb.DuckDBPyConnection, database: str, source: ShardSource
) -> tuple[str, ...]:
    """Return the schema and name of a database's only table."""
    sql = (
        "SELECT table_schema, table_name FROM information_schema.tables WHERE "
        "table_catalog = ?"
    )
    tables: list[tuple[str, ...]] = connection.execute(sql, [database]).fetchall()
    if len(tables) == 1:
        return tables[0]
    listed = ", ".join(sorted(".".join(parts) for parts in tables)) or "none"
    raise SourceError(f"{source}: it needs 'table'{TABLES_THERE}{listed}")


_AS_SHARDS: Final = (
    "; several other files are a shard each: write [[tables.NAME.shards]] with a path "
    "for every one"
)


def _check_readable(source: ShardSource, path: str) -> None:
    """Refuse a path that is missing, unreadable or empty."""
    try:
        if Path(path).is_dir():
            is_empty = not files_of(path)
        else:
            with Path(path).open("rb") as file:
                is_empty = not file.read(1)
    except FileNotFoundError:
        several = _AS_SHARDS if set(path) & set("*?[") else ""
        raise SourceError(f"{source}: the file does not exist{several}") from None
    except OSError as error:
        raise SourceError(
            f"{source}: the file cannot be read: {error.strerror}"
        ) from error
    if is_empty:
        if Path(path).is_dir():
            problem = f"folder has no Parquet files{_AS_SHARDS}"
        else:
            problem = "file is empty"
        raise SourceError(f"{source}: the {problem}")


def _casts(source: ShardSource, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the SQL of the columns that are read as another type than they have.

    Absent columns, which are no part of ``columns``, have the owner's type.
    """
    casts = {
        name: read_text(
            quote_name(name), source.readings.get(name, texts.best), is_strict=True
        )
        for name, texts in text_columns(source).items()
        if columns[name] == TEXT
    }
    columns = {**columns, **dict.fromkeys(source.absent, "NULL")}
    return {**_owner_casts(source, columns, casts.keys()), **casts}


def _owner_casts(
    source: ShardSource, columns: Mapping[str, str], others: Collection[str] = ()
) -> dict[str, str]:
    """Return the SQL of columns with a type in the tables file, except ``others``."""
    casts = {}
    for name, kind in source.types_of(columns).items():
        if name in others:
            continue
        column = quote_name(name)
        casts[name] = f"CAST({column} AS {kind})"
        if columns[name] == TEXT:
            casts[name] = source.read_text(column, kind)
    return casts


def describe(source: ShardSource) -> ShardSchema:
    """Return a shard's columns, types and number of rows."""
    if source.database is not None:
        from tp_flower.sources.databases.shards import describe_database

        return describe_database(source)
    with _open_shard(source) as (connection, types):
        unread, warnings = _find_strays(connection, source)
        if source.token is not None:
            unread |= _frame(source).unread
        # nearly every column has an early value: only the others are read to the end
        unseen, failures = _read_early(
            connection, [name for name in types if name not in unread]
        )
        unread |= failures
        columns = {name: kind for name, kind in types.items() if name not in unread}
        empty = _empty_columns(connection, "shard", unseen)
        total = _count_rows(connection, source)
    return ShardSchema(
        columns,
        rows=total,
        all_null=tuple(empty),
        texts={name: t for name, t in text_columns(source).items() if name in columns},
        warnings=(*text_hints(source), *warnings),
        unread={name: source.redact_place(why) for name, why in unread.items()},
    )


def _count_rows(connection: duckdb.DuckDBPyConnection, source: ShardSource) -> int:
    """Return the number of a shard's rows; a frame knows it, and is not scanned."""
    if source.token is not None:
        return len(_frame(source).frame)
    ((total,),) = connection.execute("SELECT count(*) FROM shard").fetchall()
    return int(total)


def _find_strays(
    connection: duckdb.DuckDBPyConnection, source: ShardSource
) -> tuple[dict[str, str], list[str]]:
    """Return why columns are not of the owner's types, and warnings.

    A warning is for a column of which only few texts are not of its type.
    """
    unread: dict[str, str] = {}
    warnings: list[str] = []
    if not source.types:
        return unread, warnings
    columns = column_types(connection, "SELECT * FROM source_rows")
    for name, sql in _owner_casts(source, columns, text_columns(source).keys()).items():
        texts = null_for_missing(f"CAST({quote_name(name)} AS VARCHAR)", source.nulls)
        counts = f"SELECT count({texts}), count({sql}) FROM source_rows"
        try:
            ((values, read),) = connection.execute(counts).fetchall()
        except duckdb.Error as error:
            unread[name] = (
                f"cannot be read as its type in 'types' of the tables file "
                f"({duckdb_engine.safe_message(error)}): take it out, or write "
                f"{type_setting(name)}"
            )
            continue
        if values - read > MOST_STRAY * values:
            unread[name] = (
                f"has a type in 'types', but more than one in {1 / MOST_STRAY:.0f} of "
                "its texts are not of it: check 'decimal' and 'dates', or list in "
                f"'nulls' texts that mean missing; {type_setting(name)} reads them as "
                "texts"
            )
        elif read < values:
            warnings.append(
                f"{source}: column {name!r} has a type in 'types': {values - read} of "
                f"its {values} texts are not of it, and are missing"
            )
    return unread, warnings


def _read_early(
    connection: duckdb.DuckDBPyConnection, names: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the columns that are NULL in the first rows, and why others are unread."""
    early = f"(SELECT * FROM shard LIMIT {EARLY_ROWS})"
    try:
        return _empty_columns(connection, early, names), {}
    except duckdb.Error as error:
        empty = []
        unread = {}
        for name in names:
            try:
                empty += _empty_columns(connection, early, [name])
            except duckdb.Error as of_column:
                unread[name] = (
                    f"cannot be read ({duckdb_engine.safe_message(of_column)})"
                )
        if len(unread) in (0, len(names)):
            # it is not about columns
            raise error
        return empty, unread


def _empty_columns(
    connection: duckdb.DuckDBPyConnection, relation: str, columns: Iterable[str]
) -> list[str]:
    """Return the columns that are NULL in all rows."""
    names = list(columns)
    counts = ", ".join(f"count({quote_name(name)})" for name in names)
    if not names:
        return []
    (values,) = connection.execute(f"SELECT {counts} FROM {relation}").fetchall()
    return [name for name, count in zip(names, values, strict=True) if not count]
