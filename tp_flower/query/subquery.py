"""An aggregated sub-query: what a table's sites run before anything else.

::

    JOIN (SELECT customer, AVG(amount) AS mean FROM payments GROUP BY customer) p ON ...

The fragment of ``p`` is then over the sub-query's columns ``customer`` and ``mean``.
A sub-query that does not group is not kept: its expressions are put in the place of
its columns when the query is bound.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlglot import exp

from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import QueryError
from tp_flower.query.aggregates import parse_aggregate, ungrouped_column
from tp_flower.query.expressions import parse_expression, shorten
from tp_flower.query.pieces import (
    Feature,
    check_condition,
    check_names,
    check_piece,
    features_in,
    fields_in,
    texts_in,
)

_FIELDS = ("columns", "filters", "groups", "having")


@dataclass(frozen=True)
class SubQuery:
    """A GROUP BY over one table.

    Expressions are over the bare, quoted columns of the base table.

    Attributes:
        columns: Output names, and expressions that may hold aggregates.
        filters: Conditions, each safe between two ANDs, that rows must meet.
        groups: What rows are grouped by, at least one; aliases, ordinals, ALL and
            DISTINCT are resolved.
        having: Conditions that groups must meet; they may hold aggregates.
    """

    columns: tuple[Feature, ...]
    filters: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    having: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the output columns."""
        return tuple(column.name for column in self.columns)

    def to_sql(self, relation: str) -> str:
        """Return the sub-query in DuckDB's SQL over a relation.

        Args:
            relation: The base table as it is written in FROM, quoted where needed.

        >>> mean = Feature("mean", 'AVG("amount")')
        >>> SubQuery((mean,), groups=('"customer"',)).to_sql("shard")
        'SELECT AVG("amount") AS "mean" FROM shard GROUP BY "customer"'
        """
        items = ", ".join(f"{c.sql} AS {quote_name(c.name)}" for c in self.columns)
        where = f" WHERE {' AND '.join(self.filters)}" if self.filters else ""
        having = f" HAVING {' AND '.join(self.having)}" if self.having else ""
        groups = ", ".join(self.groups)
        return f"SELECT {items} FROM {relation}{where} GROUP BY {groups}{having}"

    def to_json(self) -> dict[str, Any]:
        """Return the sub-query as plain JSON types."""
        return {
            "columns": [[column.name, column.sql] for column in self.columns],
            "filters": list(self.filters),
            "groups": list(self.groups),
            "having": list(self.having),
        }

    @classmethod
    def from_json(cls, data: object) -> "SubQuery":
        """Return the sub-query that :meth:`to_json` wrote.

        Raises:
            QueryError: A field is missing, unknown, or of another form.
        """
        data = fields_in(data, _FIELDS, "a sub-query")
        return cls(
            columns=features_in(data, "columns"),
            filters=texts_in(data, "filters"),
            groups=texts_in(data, "groups"),
            having=texts_in(data, "having"),
        )

    def check(self, columns: Collection[str], where: str) -> "SubQuery":
        """Return the sub-query re-rendered from parsed, allowed expressions.

        Args:
            columns: The columns of the base table.
            where: What the sub-query is part of, for messages.

        Raises:
            QueryError: A piece is not an expression over these columns, uses a
                function or an aggregate outside the allow-lists, or needs a column
                that is not grouped; the message names the piece.
        """
        where = f"{where}: sub-query"
        check_names(self.columns, f"{where} column")
        if not self.columns or not self.groups:
            raise QueryError(f"{where} needs a column and an expression to group by")
        groups = tuple(
            check_piece(sql, f"{where} group {index}", columns)
            for index, sql in enumerate(self.groups)
        )
        trees = [parse_expression(sql, f"{where} group") for sql in groups]
        for tree in trees:
            # a number would be read as the position of a column
            if tree.find(exp.Column) is None:
                raise QueryError(f"{where} group {tree.sql()} names no column")
        checked = SubQuery(
            columns=tuple(
                Feature(
                    c.name,
                    check_piece(
                        c.sql, f"{where} column {c.name!r}", columns, parse_aggregate
                    ),
                )
                for c in self.columns
            ),
            filters=tuple(
                check_condition(sql, f"{where} filter {index}", columns)
                for index, sql in enumerate(self.filters)
            ),
            groups=groups,
            having=tuple(
                check_condition(
                    sql, f"{where} having {index}", columns, parse_aggregate
                )
                for index, sql in enumerate(self.having)
            ),
        )
        checked._check_grouped(trees, where)
        return checked

    def _check_grouped(self, groups: Collection[exp.Expr], where: str) -> None:
        """Refuse a column that has several values in a group."""
        for sql in (*(column.sql for column in self.columns), *self.having):
            what = f"{where} expression {shorten(sql)}"
            column = ungrouped_column(parse_aggregate(sql, what), groups)
            if column is not None:
                raise QueryError(
                    f"{what} is refused: column {column.name!r} is neither in GROUP BY "
                    "nor in an aggregate"
                )
