"""Which table a column belongs to, as DuckDB would decide it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.query.expressions import closest
from tp_flower.query.pieces import local_sql, spell


@dataclass(frozen=True)
class Local:
    """An expression over one table: the alias, and SQL over its bare columns."""

    table: str
    sql: str


@dataclass(frozen=True)
class Scope:
    """The columns that an expression can name.

    Attributes:
        columns: Alias -> columns, in FROM order.
        merged: Lower-case USING column -> alias of the table it is taken from.
        aliases: Names given in the SELECT list, for hints only.
    """

    columns: Mapping[str, Sequence[str]]
    merged: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    def table_of(self, column: exp.Column, what: str) -> str:
        """Return the alias of the table that ``column`` belongs to.

        Args:
            column: A column, with or without its table.
            what: What it is part of, for messages.

        Raises:
            QueryError: The table or column is unknown, or the column ambiguous.
        """
        if column.table:
            return self._qualified(column, what)
        if column.name.lower() in self.merged:
            return self.merged[column.name.lower()]
        owners = [a for a, names in self.columns.items() if spell(column.name, names)]
        if len(owners) > 1:
            raise QueryError(
                f"{what}: column {column.name!r} is ambiguous: "
                f"write {' or '.join(f'{owner}.{column.name}' for owner in owners)}"
            )
        if not owners:
            raise QueryError(f"{what}: {self._unknown(column.name)}")
        return owners[0]

    def tables(self, tree: exp.Expr, what: str) -> list[str]:
        """Return the aliases of the tables in ``tree``, in order of appearance."""
        columns = tree.find_all(exp.Column, bfs=False)
        return list(dict.fromkeys(self.table_of(column, what) for column in columns))

    def local(self, tree: exp.Expr, what: str) -> Local:
        """Return an expression that is known to be over one table."""
        table = self.tables(tree, what)[0]
        return Local(table, local_sql(tree, self.columns[table], what))

    def alias_of(self, name: str, what: str) -> str:
        """Return the alias that ``name`` spells.

        Raises:
            QueryError: No table is called so.
        """
        alias = spell(name, tuple(self.columns))
        if alias is None:
            raise QueryError(
                f"{what}: no table is called {name!r} here"
                f"{closest(name, tuple(self.columns))}; "
                f"tables: {', '.join(self.columns)}"
            )
        return alias

    def _qualified(self, column: exp.Column, what: str) -> str:
        alias = self.alias_of(column.table, what)
        names = self.columns[alias]
        if spell(column.name, names) is None:
            raise QueryError(
                f"{what}: table {alias!r} has no column {column.name!r}"
                f"{closest(column.name, names)}; columns: {', '.join(names)}"
            )
        return alias

    def _unknown(self, name: str) -> str:
        """Return the message for a column that no table has."""
        if name.lower() in (alias.lower() for alias in self.aliases):
            return (
                f"{name!r} is a name of the SELECT list, not a column: "
                "repeat its expression"
            )
        names = list(dict.fromkeys(chain.from_iterable(self.columns.values())))
        return (
            f"no table has a column {name!r}{closest(name, names)}; "
            f"tables: {', '.join(self.columns)}"
        )
