"""The last rows before cutoffs, by DuckDB's ASOF JOIN.

A LATERAL sub-query that takes the last row compares every row of a key with every
cutoff of it, and sorts. An ASOF JOIN walks along both in the order of time, once::

    FROM cutoffs ASOF JOIN rows ON k = key AND t < cutoff

It gives the last time before each cutoff, of whose rows the sub-query's order chooses
one, where there is one upper bound of the time by which the last row is taken. A lower
bound of it keeps that time or leaves it out: if the last is too early, so are others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import duckdb
from sqlglot import exp

from tp_flower.duckdb_engine import quote_name
from tp_flower.query.cutoffs import CUTOFF, PAIRS, key_column
from tp_flower.query.expressions import parse_expression, render
from tp_flower.query.fragment import SubQuery, where_sql
from tp_flower.sources.shards import column_types

_SIGNS: Final[dict[type[exp.Expr], str]] = {
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}
_TURNED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_UPPER: Final = ("<", "<=")
_COMPARED: Final = (
    frozenset(("DATE", "TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP")),
    frozenset(("TIMESTAMP WITH TIME ZONE",)),
    frozenset(("TINYINT", "SMALLINT", "INTEGER", "BIGINT")),
)
"""Types of which any two compare without a loss: times that differ stay different."""


@dataclass(frozen=True)
class _Comparison:
    """A comparison of the table's own value with what is made of the cutoff."""

    own: str
    sign: str
    bound: str

    def __str__(self) -> str:
        return f"{self.own} {self.sign} {self.bound}"


def last_rows_sql(
    connection: duckdb.DuckDBPyConnection, subquery: SubQuery, relation: str
) -> str | None:
    """Return the SQL of the last rows of a relation; None where ASOF may differ.

    The relation of the pairs is registered, unless the cutoffs are those of a grid.
    """
    if not subquery.last or subquery.cutoffs is None:
        return None
    compared = [
        comparison
        for sql in subquery.filters
        if sql not in subquery.filters_of_rows
        for comparison in _comparisons(sql)
    ]
    time = subquery.last[0]
    upper = [str(c) for c in compared if c is not None and c.sign in _UPPER]
    if len(upper) != 1 or any(c is None or c.own != time for c in compared):
        return None
    pairs = _pairs(subquery, relation)
    if not _is_exact(connection, compared, f"{relation}, {pairs}"):
        return None
    names = [*map(quote_name, subquery.pair_names)]
    equal = [
        f"{sql} = {name}" for sql, name in zip(subquery.groups, names, strict=False)
    ]
    last_time = quote_name(key_column(len(subquery.groups)))
    lower = [str(c) for c in compared if c is not None and c.sign not in _UPPER]
    rows = f"(SELECT * FROM {relation}{_where_of_rows(subquery)}) AS rows"
    times = (
        f"(SELECT {', '.join(names)}, {time} AS {last_time} FROM {pairs} "
        f"ASOF JOIN {rows} ON {' AND '.join((*equal, *upper))}{where_sql(lower)})"
    )
    # several rows may have the last time
    order = ", ".join(f"{sql} DESC" for sql in subquery.order)
    chosen = (
        f"(SELECT * FROM {times} AS pairs JOIN {rows} "
        f"ON {' AND '.join((*equal, f'{time} = {last_time}'))} QUALIFY row_number() "
        f"OVER (PARTITION BY {', '.join(names)} ORDER BY {order}) = 1)"
    )
    values = (f"{c.sql} AS {quote_name(c.name)}" for c in subquery.columns)
    return f"SELECT {', '.join((*names, *values))} FROM {chosen}"


def _comparisons(sql: str) -> Iterator[_Comparison | None]:
    """Yield the comparisons that a filter with a cutoff is; None for anything else."""
    tree = parse_expression(sql, "filter").unnest()
    if isinstance(tree, exp.Between) and not tree.args.get("symmetric"):
        yield _comparison(tree.this, ">=", tree.args["low"])
        yield _comparison(tree.this, "<=", tree.args["high"])
    elif isinstance(tree, exp.Binary) and type(tree) in _SIGNS:
        sign = _SIGNS[type(tree)]
        if _has_cutoff(tree.left):
            yield _comparison(tree.right, _TURNED[sign], tree.left)
        else:
            yield _comparison(tree.left, sign, tree.right)
    else:
        yield None


def _comparison(time: exp.Expr, sign: str, bound: exp.Expr) -> _Comparison | None:
    """Return a comparison; None if the cutoff is not on one side, and alone there."""
    columns = {column.name for column in bound.find_all(exp.Column)}
    if _has_cutoff(time) or columns != {CUTOFF}:
        return None
    return _Comparison(render(time, quote=True), sign, render(bound, quote=True))


def _has_cutoff(tree: exp.Expr) -> bool:
    return any(column.name == CUTOFF for column in tree.find_all(exp.Column))


def _pairs(subquery: SubQuery, relation: str) -> str:
    """Return the relation of the pairs, as FROM writes it."""
    grid = subquery.cutoffs and subquery.cutoffs.grid
    if not grid:
        return f"{PAIRS} AS pairs"
    names = zip(subquery.groups, subquery.pair_names, strict=False)
    keys = ", ".join(f"{sql} AS {quote_name(name)}" for sql, name in names) or "1"
    rows = f"SELECT DISTINCT {keys} FROM {relation}{_where_of_rows(subquery)}"
    return f"(SELECT * FROM ({rows}), ({grid.points()})) AS pairs"


def _where_of_rows(subquery: SubQuery) -> str:
    """Return the WHERE of rows that may be the last of some pair."""
    present = f"{subquery.last[0]} IS NOT NULL"
    return where_sql((*subquery.filters_of_rows, present))


def _is_exact(
    connection: duckdb.DuckDBPyConnection,
    compared: Sequence[_Comparison | None],
    relation: str,
) -> bool:
    """Return whether times that differ still do where they are compared."""
    sides = [side for c in compared if c for side in (c.own, c.bound)]
    items = ", ".join(f"{sql} AS c{number}" for number, sql in enumerate(sides))
    types = set(column_types(connection, f"SELECT {items} FROM {relation}").values())
    return any(types <= together for together in _COMPARED)
