"""The rows of a derived table: its owner's SELECT, run by DuckDB over others' shards.

The engine is locked before the SELECT is run: it reads the shards that it names, and no
file, server or extension besides. It has one thread, because rows are named by their
position, and a sum of floats in another order would be another row.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from typing import Final, NamedTuple
from uuid import uuid4

import duckdb

from tp_flower import duckdb_engine
from tp_flower.duckdb_engine import quote_name, safe_message
from tp_flower.errors import SourceError
from tp_flower.protocol.text_readings import TEXT, TextColumn
from tp_flower.query.fragment import spell
from tp_flower.sources.csv_shards import text_columns
from tp_flower.sources.derived.accounts import stored_shards
from tp_flower.sources.entries import (
    DUCKDB_SAYS,
    FOR_OWNER,
    quote_toml,
    type_setting,
)
from tp_flower.sources.shards import (
    column_types,
    create_view,
    describe,
    files_of,
    fingerprint,
    show_rows,
)
from tp_flower.sources.tables_file import DerivedShard, ShardSource

_TEXTS: Final = (TEXT, "ENUM")


def derived_fingerprint(source: ShardSource) -> str | None:
    """Return a text that changes with the rows behind a derived shard.

    None if nothing shows whether some of them have changed.
    """
    states = [fingerprint(shard) for shard in stored_shards(source)]
    if None in states:
        return None
    return sha256(chr(0).join(map(str, states)).encode()).hexdigest()


@contextmanager
def connect_derived(source: ShardSource) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a locked connection whose view ``shard`` is a derived shard."""
    stored = list(stored_shards(source))
    paths = [path for shard in stored if shard.path for path in files_of(shard.path)]
    # a DuckDB file can only be attached before the lock
    is_attached = any(shard.path and shard.relation is not None for shard in stored)
    if is_attached:
        engine = duckdb_engine.new_engine()
        duckdb_engine.serialise(engine)
    else:
        engine = duckdb_engine.file_cursor(paths, is_serial=True)
    with closing(engine) as connection:
        try:
            rows = _StoredRows(connection, source)
            if is_attached:
                duckdb_engine.lock(connection, paths)
            rows.show(source)
            rows.drop()
            yield connection
        except duckdb.Error as error:
            raise SourceError(f"{source}: {safe_message(error)}") from error


def load_derived(source: ShardSource, connection: duckdb.DuckDBPyConnection) -> None:
    """Make the view ``shard`` of a connection a derived shard."""
    rows = _StoredRows(connection, source)
    rows.show(source)
    rows.drop()


class _StoredRows:
    """The shards of files, frames and databases behind a derived one, as views."""

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, source: ShardSource
    ) -> None:
        self._connection = connection
        self._views: list[tuple[ShardSource, str]] = []
        self._names: list[str] = []
        for shard in stored_shards(source):
            if self._view(shard) is None:
                create_view(connection, shard)
                self._views.append((shard, self._rename()))

    def _view(self, shard: ShardSource) -> str | None:
        return next((view for each, view in self._views if each is shard), None)

    def _rename(self) -> str:
        """Give the view ``shard`` another name, and return it quoted."""
        name = quote_name(f"rows_{uuid4().hex}")
        self._connection.execute(f"ALTER VIEW shard RENAME TO {name}")
        self._names.append(name)
        return name

    def drop(self) -> None:
        """Drop all views but ``shard``: a query is about no column besides."""
        for name in self._names:
            self._connection.execute(f"DROP VIEW {name}")

    def show(self, source: ShardSource) -> None:
        """Make the view ``shard`` a derived shard, whose SELECT is run once."""
        derived = source.derived
        if derived is None:
            raise TypeError(f"{source} is not derived")
        relations = {
            name: self._union(source, name, shards)
            for name, shards in derived.tables.items()
        }
        name = f"derived_{uuid4().hex}"
        with _named(self._connection, relations):
            self._check_readings(source, derived)
            try:
                _check_names(source, _answer(self._connection, derived))
                self._connection.execute(
                    f"CREATE TEMP TABLE {name} AS SELECT * FROM {_enclosed(derived)}"
                )
            except duckdb.Error as error:
                raise SourceError(
                    f"{source}: its 'sql' fails{DUCKDB_SAYS}{safe_message(error)}"
                    f"{_unread_columns(source, error)}"
                ) from error
        show_rows(self._connection, source, name)

    def _of(self, shards: Sequence[ShardSource]) -> list[str]:
        """Return the views of a table's shards."""
        views = []
        for shard in shards:
            view = self._view(shard)
            if view is None:
                self.show(shard)
                view = self._rename()
            views.append(view)
        return views

    def _union(
        self, source: ShardSource, table: str, shards: Sequence[ShardSource]
    ) -> str:
        """Return the SELECT of a table's rows in all shards, in columns of all."""
        views = self._of(shards)
        types = [
            _readable(shard, column_types(self._connection, f"SELECT * FROM {view}"))
            for shard, view in zip(shards, views, strict=True)
        ]
        selected: list[list[str]] = [[] for _ in views]
        for name in types[0]:
            spellings = [spell(name, of_shard) for of_shard in types]
            if None in spellings:
                # as in a query, which can read the columns that all shards have
                continue
            columns = [
                _Column(view, own_name, of_shard[own_name])
                for view, own_name, of_shard in zip(
                    views, spellings, types, strict=True
                )
                if own_name is not None
            ]
            problem = (
                f"{source}: its 'sql' reads shards that differ{FOR_OWNER}column "
                f"{name!r} of table {table!r}"
            )
            agreed = _agree(self._connection, problem, columns)
            for items, sql in zip(selected, agreed, strict=True):
                items.append(f"{sql} AS {quote_name(name)}")
        return " UNION ALL ".join(
            f"SELECT {', '.join(items) or 'NULL AS nothing'} FROM {view}"
            for items, view in zip(selected, views, strict=True)
        )

    def _check_readings(self, source: ShardSource, derived: DerivedShard) -> None:
        """Refuse a SELECT of days in a text file that two formats fit."""
        for name, shards in derived.tables.items():
            for shard in shards:
                for column, texts in text_columns(shard).items():
                    if texts.are_ambiguous and _reads(
                        self._connection, derived, name, column
                    ):
                        problem = _ambiguous(f"{column!r} of table {name!r}", texts)
                        raise SourceError(
                            f"{source}: its 'sql' reads days of several formats"
                            f"{FOR_OWNER}{problem}; {type_setting(column)} says that "
                            "they are no days"
                        )


def _ambiguous(column: str, texts: TextColumn) -> str:
    """Return what is to be done about days that two formats fit."""
    formats = " or ".join(
        f"dates = {quote_toml(reading.format)}" for reading in texts.readings
    )
    return f"the days of column {column} fit them: name the right one, {formats}"


@contextmanager
def _named(
    connection: duckdb.DuckDBPyConnection, relations: Mapping[str, str]
) -> Iterator[None]:
    """Have views of the names that a SELECT has for its tables.

    A WITH around it would not do: the SELECT may have one of the same name.
    """
    connection.execute("DROP VIEW IF EXISTS source_rows")
    for name, select in relations.items():
        connection.execute(f"CREATE TEMP VIEW {quote_name(name)} AS {select}")
    try:
        yield
    finally:
        for name in relations:
            connection.execute(f"DROP VIEW {quote_name(name)}")


def _enclosed(derived: DerivedShard) -> str:
    # on its own line, because the query may end in a comment
    return f"(\n{derived.sql}\n)"


def _answer(
    connection: duckdb.DuckDBPyConnection, derived: DerivedShard
) -> list[tuple[str, str]]:
    """Return the names and types of a SELECT's columns, as it has them."""
    rows = connection.execute(f"DESCRIBE {_enclosed(derived)}").fetchall()
    return [(name, kind) for name, kind, *_ in rows]


def _check_names(source: ShardSource, columns: Sequence[tuple[str, str]]) -> None:
    """Refuse columns with equal names, of which DuckDB would rename one."""
    names = [name.lower() for name, _ in columns]
    for name in names:
        if names.count(name) > 1:
            raise SourceError(
                f"{source}: 'sql' has two columns {name!r}: leave one out, "
                f"t.* EXCLUDE ({quote_name(name)}), or name it, AS another"
            )


def _reads(
    connection: duckdb.DuckDBPyConnection,
    derived: DerivedShard,
    table: str,
    column: str,
) -> bool:
    """Return whether a SELECT reads a column of a table: without it, it is another."""
    view, whole = quote_name(table), quote_name(f"whole_{uuid4().hex}")
    if spell(column, column_types(connection, f"SELECT * FROM {view}")) is None:
        return False
    columns = _answer(connection, derived)
    connection.execute(f"ALTER VIEW {view} RENAME TO {whole}")
    connection.execute(
        f"CREATE TEMP VIEW {view} AS SELECT * EXCLUDE ({quote_name(column)}) "
        f"FROM {whole}"
    )
    try:
        return _answer(connection, derived) != columns
    except duckdb.Error:
        return True
    finally:
        connection.execute(f"DROP VIEW {view}")
        connection.execute(f"ALTER VIEW {whole} RENAME TO {view}")


def _readable(shard: ShardSource, types: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of a shard that queries can read, with their types."""
    unread: Mapping[str, str] = {}
    if shard.types and shard.database is None:
        unread = describe(shard).unread
    return {name: kind for name, kind in types.items() if name not in unread}


class _Column(NamedTuple):
    """A column of a shard's view."""

    view: str
    name: str
    type: str


def _agree(
    connection: duckdb.DuckDBPyConnection, problem: str, columns: Sequence[_Column]
) -> list[str]:
    """Return the SQL of a column in each shard; refuse texts beside other values.

    The type of a column without a value means nothing.
    """
    names = [quote_name(column.name) for column in columns]
    if len({column.type for column in columns}) == 1:
        return names
    held: dict[bool, str] = {}
    for k, column in enumerate(columns):
        counts = f"SELECT count({names[k]}) FROM {column.view}"
        ((values,),) = connection.execute(counts).fetchall()
        if values:
            is_text = column.type.startswith(_TEXTS)
            held[is_text] = TEXT if is_text else column.type
        else:
            names[k] = "NULL"
    if len(held) > 1:
        raise SourceError(
            f"{problem} is of the types {' and '.join(held.values())}: name one in the "
            f"table's entry, {type_setting(columns[0].name)}"
        )
    return names


def _unread_columns(source: ShardSource, error: duckdb.Error) -> str:
    """Return why columns cannot be read, one of which a SELECT may have named."""
    if not isinstance(error, duckdb.BinderException):
        return ""
    unread = [
        f"; column {name!r} of {shard.table!r} {reason}"
        for shard in stored_shards(source)
        for name, reason in describe(shard).unread.items()
    ]
    return "".join(unread)
