"""From SQL to a statement: which clauses it has, checked before any schema is known.

Every clause, kind of join or form of table that is not known here is refused by name,
so that no part of the operator's SQL is ever silently ignored.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import sqlglot
from sqlglot import TokenType, exp

from tp_flower.errors import QueryError
from tp_flower.query.expressions import DIALECT, parse_statements, shorten
from tp_flower.query.select_parts import (
    check_clauses,
    parse_conditions,
    parse_items,
    parse_ref,
)
from tp_flower.query.statement import (
    Item,
    JoinClause,
    SelectItem,
    StarItem,
    Statement,
    Table,
    is_label,
    is_weight,
)
from tp_flower.query.subselects import parse_derived

_AGGREGATE_FIRST = (
    "aggregate one table at a time, JOIN (SELECT k, ... FROM t GROUP BY k) AS a"
)
_ADVICE = {
    "group": _AGGREGATE_FIRST,
    "having": _AGGREGATE_FIRST,
    "distinct": "every row of the result is one example; "
    "JOIN (SELECT DISTINCT ... FROM t) AS a makes one table's rows distinct",
    "with_": "write it in FROM: (SELECT ... FROM t) AS a",
}
_OPENING = {TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE}
_CLOSING = {TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE}


def parse_statement(
    sql: str, dialect: str = DIALECT, *, needs_label: bool = True
) -> Statement:
    """Return the parts of a query.

    Args:
        sql: the query.
        dialect: it is written in.
        needs_label: whether it is refused without a label.

    Raises:
        QueryError: The SQL does not parse, or holds anything but one SELECT of a
            label and features from tables joined by INNER and LEFT joins.
    """
    select = _parse_select(sql, dialect)
    tables = list(_parse_tables(select))
    _check_aliases(tables)
    where = select.args.get("where")
    return Statement(
        tables=tuple(tables),
        items=_check_items(parse_items(select.expressions), needs_label=needs_label),
        joins=_parse_joins(select, sql, dialect),
        where=parse_conditions(where.this, "WHERE") if where else (),
    )


def _parse_select(sql: str, dialect: str) -> exp.Select:
    """Return the one SELECT that ``sql`` holds, with no clause we do not know."""
    statements = parse_statements(sql, dialect)
    if len(statements) != 1:
        raise QueryError(f"expected one SELECT statement, got {len(statements)}")
    select = statements[0]
    if isinstance(select, exp.SetOperation):
        raise QueryError(
            f"{select.key.upper()} is not supported: write one SELECT; the parts of "
            "one table are FROM (SELECT ... UNION ALL SELECT ...) AS t"
        )
    if not isinstance(select, exp.Select):
        raise QueryError(f"expected a SELECT statement, got: {shorten(sql)}")
    if select.args.get("from_") is None:
        raise QueryError("the query has no FROM: name the tables to train on")
    known = {"expressions", "from_", "joins", "where"}
    check_clauses(select, known, "the query", _ADVICE)
    return select


def _parse_tables(select: exp.Select) -> Iterator[Table]:
    """Yield the tables in FROM order."""
    sources = [select.args["from_"].this]
    sources += [join.this for join in select.args.get("joins") or ()]
    for source in sources:
        if isinstance(source, exp.Subquery):
            yield parse_derived(source)
        else:
            yield parse_ref(source)


def _check_aliases(tables: list[Table]) -> None:
    """Refuse two tables under one name."""
    seen: set[str] = set()
    for table in tables:
        if table.alias.lower() in seen:
            raise QueryError(
                f"two tables are called {table.alias!r}: give each its own alias"
            )
        seen.add(table.alias.lower())


def _check_items(items: tuple[Item, ...], *, needs_label: bool) -> tuple[Item, ...]:
    """Refuse a SELECT list without a label that it needs, or without a feature.

    A star may bring either: then only the columns can tell.
    """
    if not items:
        raise QueryError("the SELECT list is empty: name a label and features")
    labels = [item for item in items if isinstance(item, SelectItem) and is_label(item)]
    if len(labels) > 1:
        shown = ", ".join(item.sql for item in labels)
        raise QueryError(f"the query has {len(labels)} labels, expected one: {shown}")
    weights = [
        item for item in items if isinstance(item, SelectItem) and is_weight(item)
    ]
    if len(weights) > 1:
        shown = ", ".join(item.sql for item in weights)
        raise QueryError(
            f"the query has {len(weights)} weights, expected one at most: {shown}"
        )
    if any(isinstance(item, StarItem) for item in items):
        return items
    if needs_label and not labels:
        raise QueryError(
            "the query has no label: write the value to predict as `... AS label`"
        )
    if len(items) == len(labels) + len(weights):
        raise QueryError("the query has no features: SELECT more than the label")
    return items


def _parse_joins(select: exp.Select, sql: str, dialect: str) -> tuple[JoinClause, ...]:
    """Return one clause per joined table."""
    joins = select.args.get("joins") or []
    commas = _commas_before(joins, sql, dialect)
    return tuple(
        _parse_join(join, after_comma)
        for join, after_comma in zip(joins, commas, strict=True)
    )


def _commas_before(joins: Sequence[exp.Join], sql: str, dialect: str) -> list[bool]:
    """Return, per join, whether its table stands after a comma.

    sqlglot gives ``a, b`` and ``a JOIN b`` without a condition the same tree, so
    the tokens between the tables decide.
    """
    found = list(_separators(sqlglot.tokenize(sql, dialect=dialect)))
    # more or fewer: joins that are nested or of a kind that is refused by name
    return found if len(found) == len(joins) else [False] * len(joins)


def _separators(tokens: Sequence[sqlglot.Token]) -> Iterator[bool]:
    """Yield, for each comma or JOIN between tables, whether it is a comma."""
    depth, is_inside = 0, False
    for previous, token in pairwise(tokens):
        kind = token.token_type
        depth += (kind in _OPENING) - (kind in _CLOSING)
        if depth:
            continue
        if kind == TokenType.FROM and previous.token_type != TokenType.DISTINCT:
            is_inside = True
        elif kind in (TokenType.WHERE, TokenType.SELECT):
            is_inside = False
        elif is_inside and kind in (TokenType.COMMA, TokenType.JOIN):
            yield kind == TokenType.COMMA


def _parse_join(join: exp.Join, after_comma: bool) -> JoinClause:
    """Return a join's conditions; INNER and LEFT joins with one are accepted."""
    alias = join.this.alias_or_name
    kind = " ".join(filter(None, (join.method, join.side, join.kind))).upper()
    if kind not in ("", "INNER", "LEFT", "LEFT OUTER"):
        raise QueryError(
            f"{kind} JOIN of {alias} is not supported: only INNER and LEFT joins are"
        )
    on = join.args.get("on")
    using = tuple(column.name for column in join.args.get("using") or ())
    if on is None and not using and not after_comma:
        raise QueryError(f"join of {alias} has no equality condition: add ON or USING")
    return JoinClause(
        alias=alias,
        on=parse_conditions(on, f"join of {alias}") if on is not None else (),
        using=using,
        is_left=kind.startswith("LEFT"),
    )
