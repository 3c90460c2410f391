"""Partial answers of a LATERAL sub-query: shards of its table make one answer of them.

Where rows of one key are in several shards, each has for every pair of a key and a
cutoff what its own rows add, and one of them merges these. Of aggregates that is

    COUNT, SUM, MIN, MAX    themselves
    AVG                     sum and count
    STDDEV, VARIANCE        count n, mean m and mean square d around it: the squares
                            around the common mean M are  sum n d + sum n (m - M)^2

(Chan, Golub and LeVeque 1983: nothing cancels), each with its FILTER; of a last row all
that it is chosen by, and its values. What needs the values of all rows, as DISTINCT and
MEDIAN do, has no such parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from sqlglot import exp, parse_one

from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import QueryError
from tp_flower.query import expressions
from tp_flower.query.allowed import AGGREGATES
from tp_flower.query.fragment import Feature, SubQuery

_ITSELF: Final[dict[type[exp.Expr], str]] = {
    exp.Count: "CAST(COALESCE(SUM({0}), 0) AS BIGINT)",
    exp.Sum: "SUM({0})",
    exp.Min: "MIN({0})",
    exp.Max: "MAX({0})",
    exp.LogicalAnd: "BOOL_AND({0})",
    exp.LogicalOr: "BOOL_OR({0})",
}
"""How the values of shards merge that are the aggregate itself."""
_MEAN: Final = "CAST(SUM({0}) AS DOUBLE) / NULLIF(SUM({1}), 0)"
_SQUARES: Final = "(SUM({0} * {2}) + SUM({0} * ({1} - {3}) * ({1} - {3})))"
_SAMPLE: Final = f"{_SQUARES} / NULLIF(SUM({{0}}) - 1, 0)"
_POPULATION: Final = f"{_SQUARES} / NULLIF(SUM({{0}}), 0)"
_SPREADS: Final[dict[type[exp.Expr], str]] = {
    exp.Variance: _SAMPLE,
    exp.VariancePop: _POPULATION,
    exp.Stddev: f"SQRT({_SAMPLE})",
    exp.StddevSamp: f"SQRT({_SAMPLE})",
    exp.StddevPop: f"SQRT({_POPULATION})",
}
"""Of n {0}, mean {1}, mean square {2} and the common mean {3}."""


@dataclass(frozen=True)
class PartialPlan:
    """What a shard has for each pair, and how the shards' values become the answer.

    Attributes:
        subquery: of a shard, with the partial columns for its columns.
        items: the answer's columns, over the shards' rows of a pair.
        having: conditions on the answer, over the same.
        means: by name, the count and the mean of which a common mean is made.
        order: of a last row, the columns that it is chosen by.
    """

    subquery: SubQuery
    items: tuple[Feature, ...]
    having: tuple[str, ...]
    means: tuple[tuple[str, str, str], ...]
    order: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the partial columns."""
        return tuple(column.name for column in self.subquery.columns)

    def merged_sql(self, relation: str) -> str:
        """Return the SELECT of the answers from the relation of all shards' rows."""
        pairs = ", ".join(map(quote_name, self.subquery.pair_names))
        items = "".join(
            f", {item.sql} AS {quote_name(item.name)}" for item in self.items
        )
        if self.order:
            turn = f"PARTITION BY {pairs} ORDER BY {' DESC, '.join(self.order)} DESC"
            return (
                f"SELECT {pairs}{items} FROM {relation} "
                f"QUALIFY row_number() OVER ({turn}) = 1"
            )
        of_pair = f"OVER (PARTITION BY {pairs})"
        means = "".join(
            f", SUM({count} * {mean}) {of_pair} / NULLIF(SUM({count}) {of_pair}, 0) "
            f"AS {name}"
            for name, count, mean in self.means
        )
        having = f" HAVING {' AND '.join(self.having)}" if self.having else ""
        return (
            f"SELECT {pairs}{items} FROM (SELECT *{means} FROM {relation}) "
            f"GROUP BY {pairs}{having}"
        )


class _PartialColumns:
    """Collects partial columns, equal ones once, and the means made of them."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._means: dict[tuple[str, str], str] = {}

    @property
    def features(self) -> tuple[Feature, ...]:
        return tuple(Feature(name, sql) for sql, name in self._names.items())

    @property
    def means(self) -> tuple[tuple[str, str, str], ...]:
        return tuple((name, *pair) for pair, name in self._means.items())

    def add(self, sql: str) -> str:
        """Return the name of a partial column."""
        return self._names.setdefault(sql, f"partial_{len(self._names)}")

    def merged(self, sql: str, table: str) -> str:
        """Return an expression over aggregates as one over the shards' rows."""
        tree = expressions.parse_expression(sql, "column", aggregates=True)
        for node in list(tree.walk(prune=_is_aggregate)):
            if _is_aggregate(node):
                merged = exp.paren(
                    parse_one(self._aggregate(node, table), read=expressions.DIALECT)
                )
                tree = merged if node is tree else tree
                node.replace(merged)
        return expressions.render(tree, quote=True)

    def _aggregate(self, node: exp.Expr, table: str) -> str:
        """Return how one aggregate is merged."""
        aggregate, condition = node, ""
        if isinstance(node, exp.Filter):
            aggregate = node.this
            condition = f" FILTER ({expressions.render(node.expression, quote=True)})"
        kind = type(aggregate)
        is_whole = aggregate.find(exp.Distinct) is None
        if is_whole and kind in _ITSELF:
            return _ITSELF[kind].format(self.add(expressions.render(node, quote=True)))

        def add(function: str) -> str:
            value = expressions.render(aggregate.this, quote=True)
            return self.add(f"{function}({value}){condition}")

        if is_whole and kind is exp.Avg:
            return _MEAN.format(add("SUM"), add("COUNT"))
        if is_whole and kind in _SPREADS:
            count, mean, square = (add(name) for name in ("COUNT", "AVG", "VAR_POP"))
            common = self._means.setdefault((count, mean), f"mean_{len(self._means)}")
            return _SPREADS[kind].format(count, mean, square, common)
        text = expressions.shorten(node.sql(expressions.DIALECT))
        raise QueryError(
            f"sub-query {table!r}: {text} needs the values of all rows, and the rows "
            "of one key may be in several shards (sealed-partials): write COUNT, SUM, "
            "AVG, MIN, MAX, STDDEV or VARIANCE without DISTINCT, or the last row"
        )


def partial_plan(subquery: SubQuery, table: str) -> PartialPlan:
    """Return the partial columns of a LATERAL sub-query of a table, an alias.

    Raises:
        QueryError: an aggregate cannot be made of those of shards.
    """
    columns = _PartialColumns()
    if subquery.last:
        order = tuple(columns.add(sql) for sql in subquery.order)
        items = tuple(Feature(c.name, columns.add(c.sql)) for c in subquery.columns)
        having: Sequence[str] = ()
    else:
        order = ()
        items = tuple(
            Feature(c.name, columns.merged(c.sql, table)) for c in subquery.columns
        )
        having = [columns.merged(sql, table) for sql in subquery.having]
    shard = replace(subquery, columns=columns.features, having=())
    return PartialPlan(shard, items, tuple(having), columns.means, order)


def _is_aggregate(node: exp.Expr) -> bool:
    return isinstance(node, exp.Filter) or type(node) in AGGREGATES
