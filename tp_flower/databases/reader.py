"""The rows that a site reads of a table in a database, in chunks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import duckdb

from tp_flower.databases import dialects
from tp_flower.databases.pushdown import Selection, column_names
from tp_flower.databases.session import Session
from tp_flower.databases.types import Arriving, DatabaseColumn, to_arrow
from tp_flower.errors import SourceError
from tp_flower.sources.sql_text import quote_name
from tp_flower.sources.tables_file import ShardSource


@dataclass(frozen=True)
class DatabaseTable:
    """The table, or the owner's query, behind a shard of an open database.

    Attributes:
        session: the connection.
        columns: as the database declares them, by name.
        types: DuckDB type of each, as the tables file wants it.
    """

    session: Session
    columns: Mapping[str, DatabaseColumn]
    types: Mapping[str, str]

    @property
    def source(self) -> ShardSource:
        """The shard."""
        return self.session.source


def base_of(session: Session) -> str:
    """Return the owner's table or query, as it stands in FROM."""
    database = session.database
    if database.table is not None:
        return ".".join(
            dialects.quote(part, session.dialect) for part in database.table
        )
    # a line of its own: the query may end in a comment
    return f"(\n{database.sql}\n) AS owner_query"


@dataclass(frozen=True)
class Reader:
    """Reads the columns and rows of a selection.

    Attributes:
        table: where from.
        selection: what.
        connection: a locked DuckDB connection, which gets the relation ``shard``.
    """

    table: DatabaseTable
    selection: Selection
    connection: duckdb.DuckDBPyConnection

    def order_by(self) -> tuple[str, ...]:
        """Return the names of the columns that put rows in the same order every time.

        These are the columns that the owner names, and the primary key.
        """
        session = self.table.session
        columns = (*session.database.order_by, *session.primary_key())
        return tuple(dict.fromkeys(columns))

    def chunks(self) -> Iterator[None]:
        """Put the next rows behind the relation ``shard`` at every step.

        One step of no rows where there are none, and one of all where the fragment
        has a sub-query.

        Raises:
            SourceError: the rows cannot be read.
        """
        if self.selection.fragment.subquery is not None:
            self.keep_all()
            yield None
            return
        is_empty = True
        for rows in self.table.session.chunks(self.statement()):
            self.show(rows)
            is_empty = False
            yield None
        if is_empty:
            yield None

    def show(self, rows: Sequence[Sequence[Any]]) -> None:
        """Make ``shard`` a view of rows of the statement."""
        self.connection.register("chunk", self._arrow(rows))
        self._view("chunk")

    def keep_all(self) -> None:
        """Make ``shard`` a view of all rows, which need not fit into memory.

        Raises:
            SourceError: the rows cannot be read.
        """
        kept = f"kept_{uuid4().hex}"
        self.connection.register("chunk", self._arrow([]))
        self.connection.execute(f"CREATE TEMP TABLE {kept} AS FROM chunk")
        for rows in self.table.session.chunks(self.statement()):
            self.connection.register("chunk", self._arrow(rows))
            self.connection.execute(f"INSERT INTO {kept} FROM chunk")
        self._view(kept)

    def _arrow(self, rows: Sequence[Sequence[Any]]) -> Any:
        return to_arrow(rows, self._arriving(), str(self.table.source))

    def _arriving(self) -> list[Arriving]:
        """The columns of the statement."""
        arriving = []
        for name in self.selection.columns:
            column = self.table.columns[name]
            if not column.is_readable:
                raise SourceError(
                    f"{self.table.source}: column {name!r} is of type {column.type}, "
                    "which cannot be used: convert it in 'sql' to a number, a text, a "
                    "date, a timestamp or a boolean"
                )
            arriving.append(Arriving(name, column.arrives))
        return arriving or [Arriving("nothing", "INTEGER")]

    def _view(self, relation: str) -> None:
        """Make ``shard`` a view with the columns' own types."""
        columns = ", ".join(
            quote_name(name)
            if self.table.types[name] == '"NULL"'
            else f"CAST({quote_name(name)} AS {self.table.types[name]}) "
            f"AS {quote_name(name)}"
            for name in self.selection.columns
        )
        self.connection.execute(
            "CREATE OR REPLACE TEMP VIEW shard AS "
            f"SELECT {columns or 'nothing'} FROM {relation}"
        )

    def statement(self) -> str:
        """Return the one statement that the database runs."""
        dialect, order = self.table.session.dialect, self.order_by()
        filters = self.selection.filters
        used = {*self.selection.columns, *column_names(filters), *order}
        # the columns that are needed, with values that DuckDB knows too
        rows = ", ".join(
            f"{dialects.render(column.read, dialect)} AS {self._quote(name)}"
            for name, column in self.table.columns.items()
            if name in used
        )
        columns = ", ".join(map(self._quote, self.selection.columns))
        nothing = f"1 AS {self._quote('nothing')}"
        where = " AND ".join(dialects.render(each, dialect) for each in filters)
        by = ", ".join(map(self._quote, order))
        return (
            f"SELECT {columns or nothing} FROM "
            f"(SELECT {rows or nothing} FROM {base_of(self.table.session)}) "
            "AS shard_rows"
            f"{f' WHERE {where}' if where else ''}{f' ORDER BY {by}' if by else ''}"
        )

    def _quote(self, name: str) -> str:
        return dialects.quote(name, self.table.session.dialect)
