"""The rows that a plan asks a database for, in chunks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import duckdb

from tp_flower.databases import dialects
from tp_flower.databases.pushdown import Item, Plan
from tp_flower.databases.session import Session
from tp_flower.databases.types import Arriving, DatabaseColumn, named, to_arrow
from tp_flower.errors import SourceError
from tp_flower.query.fragment import Feature
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
    """Reads what a plan asks for.

    Attributes:
        table: where from.
        plan: what.
        connection: a locked DuckDB connection, which gets the relation ``shard``.
    """

    table: DatabaseTable
    plan: Plan
    connection: duckdb.DuckDBPyConnection

    def order_by(self) -> tuple[str, ...]:
        """Return the names of the columns that put rows in the same order every time.

        Where the database groups, these are the groups; else what the owner says, and
        the primary key.
        """
        if self.plan.groups:
            return tuple(_key_of(group) for group in self.plan.groups)
        session = self.table.session
        columns = (*session.database.order_by, *session.primary_key())
        return tuple(dict.fromkeys(columns))

    def chunks(self) -> Iterator[None]:
        """Put the next rows behind the relation ``shard`` at every step.

        One step of no rows where there are none, and one of all where the fragment
        has a sub-query left.

        Raises:
            SourceError: the rows cannot be read.
        """
        if self.plan.fragment.subquery is not None:
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
        for name in self.plan.kept:
            column = self.table.columns[name]
            if not column.is_readable:
                raise SourceError(
                    f"{self.table.source}: column {name!r} is of type {column.type}, "
                    "which cannot be used: convert it in 'sql' to a number, a text, a "
                    "date, a timestamp or a boolean"
                )
            advice = (
                f"convert it in 'sql', or name a type that fits, as "
                f'types = {{ {name} = "VARCHAR" }}'
            )
            shown = f"column {name!r}"
            arriving.append(Arriving(name, column.arrives, shown, advice))
        wider = "CAST to a wider type in the query"
        computed = [Arriving(i.name, i.type, i.shown, wider) for i in self._computed()]
        return [*arriving, *computed] or [Arriving("nothing", "INTEGER", "", "")]

    def _computed(self) -> tuple[Item, ...]:
        return (*self.plan.items, *self.plan.groups, *self.plan.aggregates)

    def _view(self, relation: str) -> None:
        """Make ``shard`` a view with the columns' own types."""
        types = {name: self.table.types[name] for name in self.plan.kept}
        types |= {item.name: item.type for item in self._computed()}
        columns = ", ".join(
            quote_name(name)
            if kind == '"NULL"'
            else f"CAST({quote_name(name)} AS {kind}) AS {quote_name(name)}"
            for name, kind in types.items()
        )
        select = f"SELECT {columns or 'nothing'} FROM {relation}"
        if self.plan.outputs:
            groups = [Feature(g.name, quote_name(g.name)) for g in self.plan.groups]
            outputs = ", ".join(
                f"{output.sql} AS {quote_name(output.name)}"
                for output in (*self.plan.outputs, *groups)
            )
            having = " AND ".join(f"({sql})" for sql in self.plan.having) or "true"
            select = f"SELECT {outputs} FROM ({select}) WHERE {having}"
        self.connection.execute(f"CREATE OR REPLACE TEMP VIEW shard AS {select}")

    def statement(self) -> str:
        """Return the one statement that the database runs."""
        order = self.order_by()
        rows = self._rows(() if self.plan.groups else order)
        if self.plan.groups:
            select = self._grouped(rows)
        else:
            kept = [Item(name, named(name), "") for name in self.plan.kept]
            select = self._select((*kept, *self.plan.items), rows)
            select += self._where()
        by = ", ".join(self._quote(name) for name in order)
        return f"{select} ORDER BY {by}" if by else select

    def _grouped(self, rows: str) -> str:
        """Group by plain columns: what they stand for is computed row by row inside."""
        dialect = self.table.session.dialect
        keys = [Item(_key_of(g), g.sql, g.type) for g in self.plan.groups]
        inner = self._select((*keys, *self.plan.arguments), rows) + self._where()
        groups = [
            Item(
                group.name,
                dialects.text_of_bytes(named(key.name), dialect)
                if group.type == "VARCHAR"
                else named(key.name),
                group.type,
            )
            for group, key in zip(self.plan.groups, keys, strict=True)
        ]
        outer = self._select((*groups, *self.plan.aggregates), f"({inner}) AS grouped")
        return f"{outer} GROUP BY {', '.join(self._quote(key.name) for key in keys)}"

    def _rows(self, order: Sequence[str]) -> str:
        """The table's columns that are needed, with values that DuckDB knows too."""
        wanted = [
            Item(name, column.read, column.type)
            for name, column in self.table.columns.items()
            if name in self.plan.columns or name in order
        ]
        return f"({self._select(wanted, base_of(self.table.session))}) AS shard_rows"

    def _select(self, items: Sequence[Item], relation: str) -> str:
        dialect = self.table.session.dialect
        listed = ", ".join(
            f"{dialects.render(item.sql, dialect)} AS {self._quote(item.name)}"
            for item in items
        )
        listed = listed or f"1 AS {self._quote('nothing')}"
        return f"SELECT {listed} FROM {relation}"

    def _where(self) -> str:
        dialect = self.table.session.dialect
        conditions = [
            dialects.render(dialects.inner(condition), dialect)
            for condition in self.plan.filters
        ]
        return f" WHERE {' AND '.join(conditions)}" if conditions else ""

    def _quote(self, name: str) -> str:
        return dialects.quote(name, self.table.session.dialect)


def _key_of(group: Item) -> str:
    return f"{group.name} key"
