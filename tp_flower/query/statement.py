"""The parts of a query, before any schema is known, and its canonical SQL.

A statement is ``SELECT items FROM table JOIN table ON ... WHERE ...``; a table may be
a sub-query over one table, or a ``UNION ALL`` of such.
:mod:`tp_flower.query.parsing` makes statements of SQL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeGuard

from sqlglot import exp

from tp_flower.query.expressions import parse_aggregate, render

LABEL = "label"
WEIGHT = "weight"


@dataclass(frozen=True)
class TableRef:
    """A table of the query: its alias, unique in the query, and its name."""

    alias: str
    name: str


@dataclass(frozen=True)
class SelectItem:
    """One item of the SELECT list: the name given with AS, if any, and its SQL."""

    name: str | None
    sql: str


@dataclass(frozen=True)
class StarItem:
    """``*``, or ``t.*``, in the SELECT list; EXCLUDE lists columns as SQL."""

    table: str | None = None
    exclude: tuple[str, ...] = ()


Item = SelectItem | StarItem


@dataclass(frozen=True)
class Branch:
    """One SELECT over one table: a sub-query, or a part of its UNION ALL.

    Attributes:
        items: Its SELECT list, which may hold aggregates.
        groups: GROUP BY as written: expressions, aliases, ordinals.
    """

    table: TableRef
    items: tuple[Item, ...]
    where: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    having: tuple[str, ...] = ()
    is_distinct: bool = False
    is_grouped_by_all: bool = False

    def to_sql(self) -> str:
        """Return the canonical SQL."""
        select = "SELECT DISTINCT" if self.is_distinct else "SELECT"
        groups = "ALL" if self.is_grouped_by_all else ", ".join(self.groups)
        return (
            f"{select} {_render_items(self.items)} FROM {_render_ref(self.table)}"
            f"{_clause('WHERE', self.where)}{f' GROUP BY {groups}' if groups else ''}"
            f"{_clause('HAVING', self.having)}"
        )


@dataclass(frozen=True)
class DerivedTable:
    """A sub-query in FROM: its alias, and the SELECTs that UNION ALL puts together."""

    alias: str
    branches: tuple[Branch, ...]


Table = TableRef | DerivedTable


@dataclass(frozen=True)
class JoinClause:
    """The join of a table: ON conditions, USING columns, or (neither) a comma."""

    alias: str
    on: tuple[str, ...] = ()
    using: tuple[str, ...] = ()
    is_left: bool = False


@dataclass(frozen=True)
class Statement:
    """A query in parts, each in DuckDB's SQL and checked on its own.

    Attributes:
        items: The SELECT list; one item at most is the label by name, and one the
            weight.
        joins: One clause per table after the first, in the same order.
    """

    tables: tuple[Table, ...]
    items: tuple[Item, ...]
    joins: tuple[JoinClause, ...]
    where: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tables that sites must host, each once."""
        tables = chain.from_iterable(
            (table,)
            if isinstance(table, TableRef)
            else (branch.table for branch in table.branches)
            for table in self.tables
        )
        return tuple(dict.fromkeys(table.name for table in tables))

    def to_sql(self) -> str:
        """Return the canonical SQL; parsing and rendering it changes nothing."""
        tables = _render_table(self.tables[0])
        for table, join in zip(self.tables[1:], self.joins, strict=True):
            tables += _render_join(table, join)
        where = _clause("WHERE", self.where)
        return f"SELECT {_render_items(self.items)} FROM {tables}{where}"


def item_name(item: SelectItem) -> str | None:
    """Return the name an item has in the result: its alias, or its column's name.

    >>> item_name(SelectItem(None, "f.dest")), item_name(SelectItem(None, "x + 1"))
    ('dest', None)
    """
    if item.name is not None:
        return item.name
    tree = parse_aggregate(item.sql, "SELECT item").unnest()
    return tree.name if isinstance(tree, exp.Column) else None


def is_label(item: Item) -> TypeGuard[SelectItem]:
    """Return whether an item is the label by its name."""
    return isinstance(item, SelectItem) and (item_name(item) or "").lower() == LABEL


def is_weight(item: Item) -> TypeGuard[SelectItem]:
    """Return whether an item is the weight of joined rows: only by ``AS weight``.

    A column that is called so is a feature: many tables have one.

    >>> is_weight(SelectItem("Weight", "p.w")), is_weight(SelectItem(None, "p.weight"))
    (True, False)
    """
    return isinstance(item, SelectItem) and (item.name or "").lower() == WEIGHT


def _clause(keyword: str, conditions: Sequence[str]) -> str:
    """Return a clause of conditions joined by AND, or an empty text."""
    if not conditions:
        return ""
    return f" {keyword} {' AND '.join(map(_operand, conditions))}"


def _operand(condition: str) -> str:
    """Return a condition that can stand between two ANDs."""
    tree = parse_aggregate(condition, "condition")
    return f"({condition})" if isinstance(tree, exp.Or) else condition


def _name(name: str) -> str:
    """Return an identifier, quoted where DuckDB needs it."""
    return render(exp.to_identifier(name))


def _render_items(items: Sequence[Item]) -> str:
    return ", ".join(map(_render_item, items))


def _render_item(item: Item) -> str:
    if isinstance(item, StarItem):
        star = "*" if item.table is None else f"{_name(item.table)}.*"
        return f"{star} EXCLUDE ({', '.join(item.exclude)})" if item.exclude else star
    return item.sql if item.name is None else f"{item.sql} AS {_name(item.name)}"


def _render_table(table: Table) -> str:
    if isinstance(table, TableRef):
        return _render_ref(table)
    branches = " UNION ALL ".join(branch.to_sql() for branch in table.branches)
    return f"({branches}) AS {_name(table.alias)}"


def _render_ref(table: TableRef) -> str:
    if table.alias == table.name:
        return _name(table.name)
    return f"{_name(table.name)} AS {_name(table.alias)}"


def _render_join(table: Table, join: JoinClause) -> str:
    keyword = "LEFT JOIN" if join.is_left else "JOIN"
    if join.using:
        columns = ", ".join(map(_name, join.using))
        return f" {keyword} {_render_table(table)} USING ({columns})"
    if join.on:
        return f" {keyword} {_render_table(table)}{_clause('ON', join.on)}"
    return f", {_render_table(table)}"
