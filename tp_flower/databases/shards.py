"""Shards in databases: what they look like, and their rows.

The database is asked for as few rows and columns as the query needs
(:mod:`tp_flower.databases.pushdown`), hands them out in chunks, and never changes.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager

import duckdb
from sqlglot import exp

from tp_flower.databases.columns import (
    check_names,
    mysql_columns,
    postgresql_columns,
    sqlite_columns,
)
from tp_flower.databases.dialects import quote, render
from tp_flower.databases.pushdown import FilterPushdown, Selection, select
from tp_flower.databases.reader import DatabaseTable, Reader, base_of
from tp_flower.databases.session import Session, open_session
from tp_flower.databases.types import DatabaseColumn
from tp_flower.errors import SourceError
from tp_flower.query.fragment import Fragment
from tp_flower.sources.engine import shared_cursor
from tp_flower.sources.engine_errors import safe_message
from tp_flower.sources.scan import Scan, ShardSchema, column_types
from tp_flower.sources.sql_text import quote_name
from tp_flower.sources.tables_file import ShardSource


def describe_database(source: ShardSource) -> ShardSchema:
    """Return a shard's columns, types and number of rows.

    Raises:
        SourceError: the database cannot be read.
    """
    with open_session(source) as session, closing(shared_cursor()) as connection:
        shard = _open_shard(session, connection)
        counts = ", ".join(
            f"COUNT({quote(name, session.dialect)})" for name in shard.columns
        )
        total, *present = session.one_row(
            f"SELECT COUNT(*), {counts} FROM {base_of(session)}"
        )
    empty = [name for name, n in zip(shard.columns, present, strict=True) if not n]
    return ShardSchema(dict(shard.types), int(total), tuple(empty))


def database_fingerprint(source: ShardSource) -> str | None:
    """Return the value of the owner's ``fingerprint`` query; None if there is none.

    Raises:
        SourceError: the query fails or yields no value.
    """
    if source.database is None or source.database.fingerprint is None:
        return None
    with open_session(source) as session:
        row = session.one_row(source.database.fingerprint)
    if len(row) != 1 or row[0] is None:
        raise SourceError(f"{source}: 'fingerprint' must yield one value")
    return str(row[0])


@contextmanager
def scan_database(source: ShardSource, fragment: Fragment) -> Iterator[Scan]:
    """Open a shard to run a fragment on it.

    Raises:
        QueryError: the fragment is not what a site may run.
        SourceError: the database cannot be read, or DuckDB refuses what is asked of it
            inside the ``with`` block.
    """
    with open_session(source) as session, closing(shared_cursor()) as connection:
        try:
            shard = _open_shard(session, connection)
            pushdown = FilterPushdown(session.dialect, shard.columns, connection)
            selection = select(
                pushdown,
                fragment.check(shard.types),
                has_filters=session.database.is_pushed_down,
            )
            reader = Reader(shard, selection, connection)
            reader.show([])
            yield Scan(
                connection=connection,
                fragment=selection.fragment,
                columns=column_types(connection, "SELECT * FROM shard"),
                needs_sort=not reader.order_by(),
                pushed=selection.pushed,
                read=reader.chunks,
            )
        except duckdb.Error as error:
            raise SourceError(f"{source}: {safe_message(error)}") from error


def load_database(source: ShardSource, connection: duckdb.DuckDBPyConnection) -> None:
    """Make the view ``shard`` of a connection all rows that can be read.

    Raises:
        SourceError: the database cannot be read.
    """
    with open_session(source) as session:
        table = _open_shard(session, connection)
        names = tuple(n for n, column in table.columns.items() if column.is_readable)
        everything = Selection(Fragment(source.table, source.table), names)
        Reader(table, everything, connection).keep_all()


def _open_shard(
    session: Session, connection: duckdb.DuckDBPyConnection
) -> DatabaseTable:
    """Look at the columns, and make the empty relation ``declared`` of them."""
    source = session.source
    found = _columns(session)
    check_names([column.name for column in found], str(source))
    columns = {column.name: column for column in found}
    for name in (*source.types, *session.database.order_by):
        if name not in columns:
            raise SourceError(
                f"{source}: 'types' or 'order-by' names column {name!r}, "
                f"but the columns are {', '.join(columns)}"
            )
    wanted = {name: source.types.get(name, col.type) for name, col in columns.items()}
    nulls = ", ".join(
        f"CAST(NULL AS {kind}) AS {quote_name(name)}" for name, kind in wanted.items()
    )
    try:
        connection.execute(
            f"CREATE OR REPLACE TEMP VIEW declared AS SELECT {nulls} WHERE false"
        )
        types = column_types(connection, "SELECT * FROM declared")
    except duckdb.Error as error:
        raise SourceError(f"{source}: {safe_message(error)}") from error
    for name in source.types:
        # the site casts: the database's columns are not of this type
        column = columns[name]
        columns[name] = DatabaseColumn(
            name, types[name], column.read, column.arrives, is_exact=False
        )
    return DatabaseTable(session, columns, types)


def _columns(session: Session) -> list[DatabaseColumn]:
    base = base_of(session)

    def one_row(select: exp.Expr) -> list[object]:
        sql = render(select, session.dialect)
        return list(session.one_row(f"{sql} FROM {base}"))

    if session.dialect == "sqlite":
        session.execute(f"CREATE TEMP VIEW tp_flower_shard AS SELECT * FROM {base}")
        rows = session.all_rows("PRAGMA table_info(tp_flower_shard)")
        declared = {str(name): str(kind) for _, name, kind, *_ in rows}
        check_names([str(name) for _, name, *_ in rows], str(session.source))
        return sqlite_columns(
            declared, one_row, session.source.types, str(session.source)
        )
    fields = session.fields(f"SELECT * FROM {base} LIMIT 0")
    if session.dialect == "mysql":
        return mysql_columns(fields)
    return postgresql_columns(fields, one_row)
