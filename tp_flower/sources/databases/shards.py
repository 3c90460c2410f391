"""Shards in databases: their columns and their rows.

The database is asked only for the rows and columns that the query needs
(:mod:`tp_flower.sources.databases.pushdown`), in chunks, and is never changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, compress
from typing import Any, Final
from uuid import uuid4

import duckdb
from sqlglot import exp

from tp_flower.duckdb_engine import quote_name, safe_message, shared_cursor
from tp_flower.errors import SourceError, UnreachableError
from tp_flower.protocol.text_readings import TEXT
from tp_flower.query.fragment import Fragment
from tp_flower.sources.databases.columns import (
    DatabaseColumn,
    absent_column,
    check_names,
    mysql_column,
    postgresql_columns,
    sqlite_columns,
    to_arrow,
)
from tp_flower.sources.databases.pushdown import (
    FilterPushdown,
    Selection,
    column_names,
    quote,
    render,
    select,
)
from tp_flower.sources.databases.session import DatabaseSession, open_session
from tp_flower.sources.shards import Scan, ShardSchema, column_types, regular_rows
from tp_flower.sources.tables_file import ShardSource


@dataclass(frozen=True)
class DatabaseTable:
    """The table or the owner's query behind a shard, in the tables file's types.

    ``types`` are those of the columns that queries can read.
    """

    session: DatabaseSession
    connection: duckdb.DuckDBPyConnection
    columns: Mapping[str, DatabaseColumn]
    types: Mapping[str, str]
    names: Mapping[str, str]

    @cached_property
    def order_by(self) -> tuple[str, ...]:
        """The owner's columns and the primary key, which fix the order of the rows."""
        session = self.session
        source = self.session.source
        columns = source.spelled("order-by", session.database.order_by, self.columns)
        columns += [self.names[name] for name in session.primary_key()]
        return tuple(dict.fromkeys(columns))

    def chunks(self, selection: Selection) -> Iterator[None]:
        """Make the next rows the relation ``shard`` at every step.

        Without rows there is one empty step; with a sub-query, one step has all rows.
        """
        if selection.fragment.subquery is not None:
            self.load(selection)
            yield None
            return
        is_empty = True
        for rows in self._rows(selection):
            self.show(selection, rows)
            is_empty = False
            yield None
        if is_empty:
            yield None

    def _rows(self, selection: Selection) -> Iterator[list[Sequence[Any]]]:
        """Yield the selection's rows in chunks."""
        try:
            yield from self.session.chunks(self._statement(selection))
        except UnreachableError:
            raise
        except SourceError:
            if name := self._time_without_a_year(selection):
                column = quote(name, self.session.dialect)
                raise SourceError(
                    f"{self.session.source}: column {name!r} holds infinity, or a time "
                    "before the year 1 or after 9999: convert it in 'sql', as in CASE "
                    f"WHEN {column} BETWEEN '0001-01-01' AND '9999-12-31' THEN "
                    f"{column} END"
                ) from None
            raise

    def _time_without_a_year(self, selection: Selection) -> str:
        """Return the first column of PostgreSQL with times that Python lacks, or "".

        The driver's error names no column.
        """
        times = [
            name
            for name in selection.columns
            if self.columns[name].arrives.startswith(("DATE", "TIMESTAMP"))
        ]
        if self.session.dialect != "postgresql" or not times:
            return ""
        items = ", ".join(
            f"bool_or({column} NOT BETWEEN '0001-01-01' AND '9999-12-31')"
            for column in (quote(name, "postgresql") for name in times)
        )
        with suppress(SourceError):
            has_rows = self.session.one_row(
                f"SELECT {items} FROM {_relation(self.session)}"
            )
            return next(compress(times, has_rows), "")
        return ""

    def show(self, selection: Selection, rows: Sequence[Sequence[Any]]) -> None:
        """Make ``shard`` a view of the selection's rows."""
        self.connection.register("chunk", self._arrow(selection, rows))
        self._view(selection, "chunk")

    def load(self, selection: Selection) -> None:
        """Make ``shard`` a view of all rows, which may exceed the memory."""
        table = f"loaded_{uuid4().hex}"
        self.connection.register("chunk", self._arrow(selection, []))
        self.connection.execute(f"CREATE TEMP TABLE {table} AS FROM chunk")
        for rows in self._rows(selection):
            self.connection.register("chunk", self._arrow(selection, rows))
            self.connection.execute(f"INSERT INTO {table} FROM chunk")
        self._view(selection, table)

    def _arrow(self, selection: Selection, rows: Sequence[Sequence[Any]]) -> Any:
        columns = [self.columns[name] for name in selection.columns]
        return to_arrow(rows, columns or [_NOTHING], str(self.session.source))

    def _view(self, selection: Selection, relation: str) -> None:
        """Make ``shard`` a view with the columns' own types."""
        columns = ", ".join(
            f"{self._cast(name)} AS {quote_name(name)}" for name in selection.columns
        )
        rows = f"(SELECT {columns or 'nothing'} FROM {relation})"
        types = {name: self.types[name] for name in selection.columns}
        self.connection.execute(
            f"CREATE OR REPLACE TEMP VIEW shard AS {regular_rows(types, rows)}"
        )

    def _cast(self, name: str) -> str:
        """Return the SQL of a column in the type that queries see."""
        column = quote_name(name)
        kind = self.types[name]
        if kind == '"NULL"':
            # Arrow's nulls would be integers
            return "NULL"
        if self.columns[name].arrives == TEXT and kind != TEXT:
            return self.session.source.read_text(column, kind, is_strict=True)
        return f"CAST({column} AS {kind})"

    def _statement(self, selection: Selection) -> str:
        """Return the database's SELECT of the columns and rows that a query needs."""
        dialect = self.session.dialect
        used_columns = {
            *selection.columns,
            *column_names(selection.filters),
            *self.order_by,
        }
        # the columns that are needed, if DuckDB supports their values
        rows = ", ".join(
            f"{render(column.read, dialect)} AS {quote(name, dialect)}"
            for name, column in self.columns.items()
            if name in used_columns
        )
        columns = ", ".join(quote(name, dialect) for name in selection.columns)
        nothing = f"1 AS {quote(_NOTHING.name, dialect)}"
        where = " AND ".join(render(term, dialect) for term in selection.filters)
        where_clause = f" WHERE {where}" if where else ""
        order = ", ".join(quote(name, dialect) for name in self.order_by)
        order_clause = f" ORDER BY {order}" if order else ""
        return (
            f"SELECT {columns or nothing} FROM (SELECT {rows or nothing} FROM "
            f"{_relation(self.session)}) AS shard_rows{where_clause}{order_clause}"
        )


_NOTHING: Final = DatabaseColumn.of("nothing", "INTEGER")  # read if no column is needed


def _relation(session: DatabaseSession) -> str:
    """Return the owner's table or query, in the form for FROM."""
    if session.table is not None:
        return ".".join(quote(part, session.dialect) for part in session.table)
    # on its own line, because the query may end in a comment
    return f"(\n{session.database.sql}\n) AS owner_query"


def describe_database(source: ShardSource) -> ShardSchema:
    """Return a shard's columns, types and number of rows."""
    with open_session(source) as session, closing(shared_cursor()) as connection:
        table = _open_table(session, connection)
        counts = ", ".join(
            f"COUNT({quote(name, session.dialect)})" for name in table.names
        )
        total, *present = session.one_row(
            f"SELECT COUNT(*), {counts} FROM {_relation(session)}"
        )
    counted = zip(table.names.values(), present, strict=True)
    empty = [name for name, values in counted if not values and name in table.types]
    unread = {n: c.why_unread for n, c in table.columns.items() if not c.is_readable}
    all_null = (*empty, *source.absent)
    return ShardSchema(dict(table.types), int(total), all_null, unread=unread)


def database_fingerprint(source: ShardSource) -> str | None:
    """Return the value of the owner's ``fingerprint`` query; None without one."""
    if source.database is None or source.database.fingerprint is None:
        return None
    with open_session(source) as session:
        row = session.one_row(source.database.fingerprint)
    if len(row) != 1 or row[0] is None:
        raise SourceError(f"{source}: 'fingerprint' must yield one value")
    return str(row[0])


@contextmanager
def scan_database(source: ShardSource, fragment: Fragment) -> Iterator[Scan]:
    """Open a shard to run a fragment on it."""
    with open_session(source) as session, closing(shared_cursor()) as connection:
        try:
            table = _open_table(session, connection)
            selection = select(
                FilterPushdown(session.dialect, table.columns, connection),
                fragment.check(table.types),
                has_filters=session.database.is_pushed_down,
            )
            table.show(selection, [])
            yield Scan(
                connection=connection,
                fragment=selection.fragment,
                needs_sort=not table.order_by,
                pushed=selection.pushed,
                chunks=partial(table.chunks, selection),
            )
        except duckdb.Error as error:
            raise SourceError(f"{source}: {safe_message(error)}") from error


def load_database(source: ShardSource, connection: duckdb.DuckDBPyConnection) -> None:
    """Make the view ``shard`` of a connection all rows that can be read."""
    with open_session(source) as session:
        table = _open_table(session, connection)
        table.load(Selection(Fragment(source.table, source.table), tuple(table.types)))


def _open_table(
    session: DatabaseSession, connection: duckdb.DuckDBPyConnection
) -> DatabaseTable:
    """Determine the columns, and the types of those that queries can read."""
    source = session.source
    declared = _columns(session)
    check_names([column.name for column in declared], str(source))
    names = source.renamed([column.name for column in declared])
    columns = {names[c.name]: replace(c, name=names[c.name]) for c in declared}
    columns |= {name: absent_column(name) for name in source.absent}
    chosen = source.types_of(columns)
    source.spelled("order-by", session.database.order_by, columns)
    wanted = {
        n: chosen.get(n, column.type)
        for n, column in columns.items()
        if column.is_readable
    }
    nulls = ", ".join(
        f"CAST(NULL AS {kind}) AS {quote_name(name)}" for name, kind in wanted.items()
    )
    try:
        types = column_types(connection, f"SELECT {nulls} WHERE false") if nulls else {}
    except duckdb.Error as error:
        raise SourceError(f"{source}: {safe_message(error)}") from error
    for name in chosen.keys() & types.keys():
        # the site casts, because the database's columns are not of this type
        column = columns[name]
        arrives = columns[name].arrives
        if arrives == "BOOLEAN" != types[name] and session.dialect != "postgresql":
            arrives = "BIGINT"  # as MySQL and SQLite store truth values
        columns[name] = DatabaseColumn(
            name, types[name], column.read, arrives, is_exact=False
        )
    return DatabaseTable(session, connection, columns, types, names)


def _columns(session: DatabaseSession) -> list[DatabaseColumn]:
    """Return how the columns of a shard's table are read."""
    base = _relation(session)

    def one_row(select: exp.Expr) -> list[object]:
        return list(session.one_row(f"{render(select, session.dialect)} FROM {base}"))

    if session.dialect == "sqlite":
        session.execute(f"CREATE TEMP VIEW tp_flower_shard AS SELECT * FROM {base}")
        rows = chain.from_iterable(session.chunks("PRAGMA table_info(tp_flower_shard)"))
        declared = {str(name): str(kind) for _, name, kind, *_ in rows}
        names = session.source.renamed(declared)
        types = session.source.types_of(names.values())
        return sqlite_columns(declared, one_row, names, types)
    fields = session.fields(f"SELECT * FROM {base} LIMIT 0")
    if session.dialect == "mysql":
        return list(map(mysql_column, fields))
    return postgresql_columns(fields, one_row)
