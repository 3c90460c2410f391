"""Answers of sub-queries about no rows: those for keys that their tables lack.

A sub-query that looks back, or a correlated value, is joined by its keys, and SQL has
an answer for keys without rows, too: COUNT is 0, other aggregates are NULL. It is one
for all of them, which follows from the query. The site of the sub-query's table has it
as its last row, of no key, and joins take it for the keys that no other row has: it is
not told which these are.

A key that is NULL, or whose cutoff is, is equal to none, and SQL has that answer for
it, too. At the site of the table around it has a text of its own, which no other table
has: to joins it is a key without rows.

Where the cutoff is part of the answer, as in ``COALESCE(MAX(p.t), o.day)``, there would
be one for each cutoff; of a last row, or with HAVING, SQL has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlglot import exp

from tp_flower.duckdb_engine import quote_name
from tp_flower.query import expressions
from tp_flower.query.allowed import AGGREGATES
from tp_flower.query.cutoffs import CUTOFF, PAIRS, column_of_point
from tp_flower.query.fragment import Feature, Fragment, Piece, Role, SubQuery
from tp_flower.query.lateral import name_of_key

KEY_OF_NO_ROWS: Final = "(no rows)"
"""In place of a key's canonical text, which begins with the kind of a value."""

NULL_KEY: Final = "(null of {})"
"""The same of a key that is NULL, of the table with this name."""

_NULL_IF_ANY_IS: Final = (
    *(exp.Column, exp.Identifier, exp.Literal, exp.Paren, exp.Neg, exp.TimeToUnix),
    *(exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Cast, exp.DataType, exp.Interval),
    exp.Var,
)
_COMPARED: Final = (
    *(exp.LT, exp.LTE, exp.GT, exp.GTE, exp.EQ, exp.Between),
    *(exp.DateTrunc, exp.TimestampTrunc),
    *_NULL_IF_ANY_IS,
)
"""What a condition is made of that is not true where any of its columns is NULL."""


@dataclass(frozen=True)
class NoRows:
    """How a shard takes part in answers about no rows.

    Attributes:
        is_last_row: whether its last row is that answer.
        null_keys: positions of its join keys of which NULL is a key without rows.
    """

    is_last_row: bool = False
    null_keys: frozenset[int] = frozenset()


NO_ANSWERS: Final = NoRows()


def answered_key(fragment: Fragment) -> int | None:
    """Return the position of the join key that has an answer whatever its value is.

    It is None of a table without an answer about no rows. Where one site has all pairs
    of the rows around it, the answer is that of a NULL alone.
    """
    subquery = fragment.subquery
    if subquery is None or fragment.filters or not _has_one_answer(subquery):
        return None
    names = subquery.pair_names
    if subquery.cutoffs is None:
        groups = range(1, len(subquery.groups) + 1)
        names = tuple(name_of_key(fragment.table, number) for number in groups)
        if not set(names) <= set(subquery.names):
            return None
    elif not subquery.cutoffs.makes_pairs and not answers_nulls(subquery):
        return None
    compared = set(map(quote_name, names))
    places = (n for n, key in enumerate(fragment.keys) if set(key) == compared)
    return next(places, None)


def answers_nulls(subquery: SubQuery) -> bool:
    """Return whether the answer about no rows is that of a NULL key or cutoff, too.

    A NULL key is equal to none; with a NULL cutoff some condition must be never true.
    """
    if subquery.cutoffs is None:
        return True
    compared = (
        expressions.parse_expression(sql, "filter")
        for sql in subquery.filters
        if sql not in subquery.filters_of_rows
    )
    return any(
        all(type(node) in _COMPARED for node in tree.walk()) for tree in compared
    )


def null_key_sql(parts: Sequence[str]) -> str:
    """Return the condition that a key of these expressions is NULL.

    A cutoff that is not on the grid is none that is NULL.
    """
    trees = (expressions.parse_expression(sql, "join key") for sql in parts)
    columns = (quote_name(name) if (name := column_of_point(t)) else "" for t in trees)
    values = (column or sql for column, sql in zip(columns, parts, strict=True))
    return " OR ".join(f"({value}) IS NULL" for value in values)


def empty_answer_sql(subquery: SubQuery, relation: str) -> str:
    """Return the SELECT of a sub-query's answer about no rows, without its pairs."""
    columns = tuple(map(_over_no_rows, subquery.columns))
    if subquery.cutoffs is not None:
        grid = subquery.cutoffs.grid
        cutoffs = grid.points() if grid else f"SELECT {quote_name(CUTOFF)} FROM {PAIRS}"
        relation = f"{relation}, ({cutoffs}) AS cutoffs"
    return SubQuery(columns, filters=("FALSE",)).to_sql(relation)


def _has_one_answer(subquery: SubQuery) -> bool:
    """Return whether SQL has an answer for keys without rows, and one for all."""
    if subquery.last or subquery.having or subquery.is_windowed:
        return False
    return all(map(_is_of_no_cutoff, map(_parse, subquery.columns)))


def _is_of_no_cutoff(tree: exp.Expr) -> bool:
    """Return whether a column's value over no rows is the same at every cutoff.

    Outside of aggregates a cutoff may stand beside one that is NULL.
    """
    nodes = list(tree.walk(prune=_is_aggregate))
    aggregates = [node for node in nodes if _is_aggregate(node)]
    if not any(isinstance(n, exp.Column) and n.name == CUTOFF for n in nodes):
        return True
    has_null = any(node.find(exp.Count) is None for node in aggregates)
    others = [node for node in nodes if not _is_aggregate(node)]
    return has_null and all(type(node) in _NULL_IF_ANY_IS for node in others)


def _over_no_rows(column: Feature) -> Feature:
    """Return a column of aggregates alone: a key or cutoff beside them is NULL."""
    tree = _parse(column)
    for node in list(tree.walk(prune=_is_aggregate)):
        if isinstance(node, exp.Column):
            value = exp.AnyValue(this=node.copy())
            tree = value if node is tree else tree
            node.replace(value)
    return Feature(column.name, expressions.render(tree, quote=True))


def _parse(column: Feature) -> exp.Expr:
    return Piece(Role.INNER, f"column {column.name!r}", column.sql).parse()


def _is_aggregate(node: exp.Expr) -> bool:
    return isinstance(node, exp.Filter) or type(node) in AGGREGATES
