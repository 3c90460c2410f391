"""The parts of a query, before any schema is known.

A statement is ``SELECT items FROM table JOIN table ON ... WHERE ...``; a table may be
a sub-query over one table, or a ``UNION ALL`` of such.
:mod:`tp_flower.query.parsing` makes statements of SQL.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import TypeGuard

from sqlglot import exp

from tp_flower.query.expressions import parse_aggregate

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
        sql: The whole query in canonical SQL, which parses to the same parts.
    """

    tables: tuple[Table, ...]
    items: tuple[Item, ...]
    joins: tuple[JoinClause, ...]
    where: tuple[str, ...]
    sql: str = field(compare=False)

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
