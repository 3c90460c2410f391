"""The shape of a query: which clauses it has, checked before any schema is known.

A statement is ``SELECT items FROM table JOIN table ON ... WHERE ...`` and nothing
else: every clause, kind of join or form of table that is not in the lists below is
refused by name, so that no part of the operator's SQL is ever silently ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import sqlglot
from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.expressions import (
    DIALECT,
    check_expression,
    conjuncts,
    parse_expression,
    parse_statements,
    render,
    shorten,
)

LABEL = "label"

_CLAUSE_NAMES = {
    "with_": "WITH (a common table expression)",
    "distinct": "DISTINCT",
    "group": "GROUP BY",
    "having": "HAVING",
    "qualify": "QUALIFY",
    "windows": "WINDOW",
    "order": "ORDER BY",
    "limit": "LIMIT",
    "offset": "OFFSET",
    "sample": "USING SAMPLE",
    "into": "INTO",
    "locks": "FOR UPDATE",
}


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
class JoinClause:
    """How a table is attached: ON conditions, USING columns, or (neither) a comma."""

    alias: str
    on: tuple[str, ...] = ()
    using: tuple[str, ...] = ()


@dataclass(frozen=True)
class Statement:
    """A query in parts, each in DuckDB's SQL and checked on its own.

    Attributes:
        tables: The tables in FROM order; their aliases differ.
        items: The SELECT list; exactly one item is the label.
        joins: One clause per table after the first, in the same order.
        where: The conditions that WHERE joins by AND.
    """

    tables: tuple[TableRef, ...]
    items: tuple[SelectItem, ...]
    joins: tuple[JoinClause, ...]
    where: tuple[str, ...]

    def to_sql(self) -> str:
        """Return the canonical SQL; parsing and rendering it changes nothing."""
        items = ", ".join(_render_item(item) for item in self.items)
        tables = _render_table(self.tables[0])
        for table, join in zip(self.tables[1:], self.joins, strict=True):
            tables += _render_join(table, join)
        where = f" WHERE {' AND '.join(map(_operand, self.where))}"
        return f"SELECT {items} FROM {tables}{where if self.where else ''}"


def parse_statement(sql: str, dialect: str = DIALECT) -> Statement:
    """Return the parts of a query.

    Raises:
        QueryError: The SQL does not parse, or holds anything but one SELECT of a
            label and features from tables joined by INNER joins.
    """
    select = _parse_select(sql, dialect)
    tables = list(_parse_tables(select))
    _check_aliases(tables)
    where = select.args.get("where")
    return Statement(
        tables=tuple(tables),
        items=_parse_items(select.expressions),
        joins=_parse_joins(select, sql, dialect),
        where=_parse_conditions(where.this, "WHERE") if where else (),
    )


def item_name(item: SelectItem) -> str | None:
    """Return the name an item has in the result: its alias, or its column's name.

    >>> item_name(SelectItem(None, "f.dest")), item_name(SelectItem(None, "x + 1"))
    ('dest', None)
    """
    if item.name is not None:
        return item.name
    tree = parse_expression(item.sql, "SELECT item").unnest()
    return tree.name if isinstance(tree, exp.Column) else None


def is_label(item: SelectItem) -> bool:
    """Return whether an item is the label."""
    return (item_name(item) or "").lower() == LABEL


def _parse_select(sql: str, dialect: str) -> exp.Select:
    """Return the one SELECT that ``sql`` holds, with no clause we do not know."""
    statements = parse_statements(sql, dialect)
    if len(statements) != 1:
        raise QueryError(f"expected one SELECT statement, got {len(statements)}")
    select = statements[0]
    if isinstance(select, exp.SetOperation):
        raise QueryError(f"{select.key.upper()} is not supported: write one SELECT")
    if not isinstance(select, exp.Select):
        raise QueryError(f"expected a SELECT statement, got: {shorten(sql)}")
    if select.args.get("from_") is None:
        raise QueryError("the query has no FROM: name the tables to train on")
    known = {"expressions", "from_", "joins", "where"}
    for clause in (key for key, value in select.args.items() if value):
        if clause not in known:
            name = _CLAUSE_NAMES.get(clause, clause.strip("_").upper())
            raise QueryError(f"{name} is not supported in the query")
    return select


def _parse_tables(select: exp.Select) -> Iterator[TableRef]:
    """Yield the tables in FROM order."""
    sources = [select.args["from_"].this]
    sources += [join.this for join in select.args.get("joins") or ()]
    for source in sources:
        yield _parse_table(source)


def _parse_table(source: exp.Expr) -> TableRef:
    """Return a plain table; anything else that can stand in FROM is refused."""
    shown = shorten(source.sql(DIALECT))
    if isinstance(source, exp.Subquery | exp.Lateral | exp.Values):
        raise QueryError(f"sub-queries are not supported in FROM: {shown}")
    if not isinstance(source, exp.Table) or not isinstance(source.this, exp.Identifier):
        raise QueryError(f"only plain tables are supported in FROM: {shown}")
    if source.args.get("db"):
        raise QueryError(f"write the bare name of the table, not {shown}")
    if source.args.get("joins"):
        raise QueryError(f"write one join after the other, not nested: {shown}")
    alias = source.args.get("alias")
    odd = {key for key, value in source.args.items() if value} - {"this", "alias"}
    if odd or (alias is not None and alias.args.get("columns")):
        raise QueryError(f"only plain tables are supported in FROM: {shown}")
    return TableRef(alias=source.alias_or_name, name=source.name)


def _check_aliases(tables: list[TableRef]) -> None:
    """Refuse two tables under one name."""
    seen: set[str] = set()
    for table in tables:
        if table.alias.lower() in seen:
            raise QueryError(
                f"two tables are called {table.alias!r}: give each its own alias"
            )
        seen.add(table.alias.lower())


def _parse_items(trees: list[exp.Expr]) -> tuple[SelectItem, ...]:
    """Return the SELECT list, after checking that it has one label and a feature."""
    items = tuple(_parse_item(tree) for tree in trees)
    labels = [item for item in items if is_label(item)]
    if not items:
        raise QueryError("the SELECT list is empty: name a label and features")
    if not labels:
        raise QueryError(
            "the query has no label: write the value to predict as `... AS label`"
        )
    if len(labels) > 1:
        shown = ", ".join(item.sql for item in labels)
        raise QueryError(f"the query has {len(labels)} labels, expected one: {shown}")
    if len(items) == 1:
        raise QueryError("the query has no features: SELECT more than the label")
    return items


def _parse_item(tree: exp.Expr) -> SelectItem:
    """Return one item of the SELECT list."""
    if isinstance(tree, exp.Alias):
        return SelectItem(tree.alias, _canonical(tree.this, "SELECT item"))
    return SelectItem(None, _canonical(tree, "SELECT item"))


def _parse_joins(select: exp.Select, sql: str, dialect: str) -> tuple[JoinClause, ...]:
    """Return one clause per joined table."""
    joins = select.args.get("joins") or []
    commas = _commas_before(joins, sql, dialect)
    return tuple(
        _parse_join(join, after_comma)
        for join, after_comma in zip(joins, commas, strict=True)
    )


def _commas_before(joins: list[exp.Join], sql: str, dialect: str) -> list[bool]:
    """Return, per join, whether its table stands after a comma.

    sqlglot gives ``a, b`` and ``a JOIN b`` without a condition the same tree, so
    the token in front of the table's name decides.
    """
    tokens = sqlglot.tokenize(sql, dialect=dialect)
    before = {token.start: previous.token_type for previous, token in pairwise(tokens)}
    comma = sqlglot.TokenType.COMMA
    return [before.get(join.this.this.meta.get("start")) == comma for join in joins]


def _parse_join(join: exp.Join, after_comma: bool) -> JoinClause:
    """Return a join's conditions; only INNER joins with a condition are accepted."""
    alias = join.this.alias_or_name
    kind = " ".join(filter(None, (join.method, join.side, join.kind))).upper()
    if kind not in ("", "INNER"):
        raise QueryError(
            f"{kind} JOIN of {alias} is not supported: only INNER joins are"
        )
    on = join.args.get("on")
    using = tuple(column.name for column in join.args.get("using") or ())
    if on is None and not using and not after_comma:
        raise QueryError(f"join of {alias} has no equality condition: add ON or USING")
    return JoinClause(
        alias=alias,
        on=_parse_conditions(on, f"join of {alias}") if on is not None else (),
        using=using,
    )


def _parse_conditions(tree: exp.Expr, what: str) -> tuple[str, ...]:
    """Return the conditions that ``tree`` joins by AND."""
    return tuple(_canonical(part, f"{what}: condition") for part in conjuncts(tree))


def _canonical(tree: exp.Expr, what: str) -> str:
    """Return a checked expression as DuckDB SQL that parses back to itself."""
    what = f"{what} {shorten(tree.sql(DIALECT, comments=False))}"
    check_expression(tree, what)
    return render(parse_expression(render(tree), what))


def _operand(condition: str) -> str:
    """Return a condition that can stand between two ANDs."""
    tree = parse_expression(condition, "condition")
    return f"({condition})" if isinstance(tree, exp.Or) else condition


def _name(name: str) -> str:
    """Return an identifier, quoted where DuckDB needs it."""
    return render(exp.to_identifier(name))


def _render_item(item: SelectItem) -> str:
    return item.sql if item.name is None else f"{item.sql} AS {_name(item.name)}"


def _render_table(table: TableRef) -> str:
    if table.alias == table.name:
        return _name(table.name)
    return f"{_name(table.name)} AS {_name(table.alias)}"


def _render_join(table: TableRef, join: JoinClause) -> str:
    if join.using:
        columns = ", ".join(map(_name, join.using))
        return f" JOIN {_render_table(table)} USING ({columns})"
    if join.on:
        return f" JOIN {_render_table(table)} ON {' AND '.join(map(_operand, join.on))}"
    return f", {_render_table(table)}"
