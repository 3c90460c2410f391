"""The training set as SQL: parse a query, then bind it to the sites' tables.

::

    SELECT <label> AS label, <features>
    FROM a
    JOIN b ON a.k = b.k
    LEFT JOIN (SELECT k, AVG(x) AS mean FROM c GROUP BY k) d ON d.k = a.k
    WHERE ...

:meth:`Query.from_sql` checks the shape of the SQL, which needs no schema, and
:meth:`Query.bind` resolves the columns. The result is the fragment that each table's
sites run on their own, and the equi-joins between the keys that they return. The query
itself is never run. A sub-query is over one table; it may group, or list the table's
parts with UNION ALL.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tp_flower.query.bind import BoundQuery, Unlabelled, bind_statement
from tp_flower.query.expressions import DIALECT
from tp_flower.query.parsing import parse_statement
from tp_flower.query.statement import Statement


@dataclass(frozen=True)
class Query:
    """A query that was parsed and checked, but not yet bound to tables.

    Two queries are equal if their statements are, however they were written.

    >>> query = Query.from_sql("select x, y label from t where x>0")
    >>> query.to_sql()
    'SELECT x, y AS label FROM t WHERE x > 0'
    >>> query.bind({"t": {"x": "DOUBLE", "y": "DOUBLE"}}).fragment("t").filters
    ('"x" > 0',)
    """

    statement: Statement

    @classmethod
    def from_sql(
        cls, sql: str, dialect: str = DIALECT, *, needs_label: bool = True
    ) -> "Query":
        """Return the query that ``sql`` writes, in a dialect as sqlglot names it.

        Rows that a model predicts have no label, and their query needs none. A
        QueryError names the part that is not supported.
        """
        return cls(parse_statement(sql, dialect, needs_label=needs_label))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tables that sites must host, each once."""
        return self.statement.names

    def bind(
        self,
        schemas: Mapping[str, Mapping[str, str]],
        unlabelled: Unlabelled | None = None,
    ) -> BoundQuery:
        """Return the fragments and joins over tables with these columns.

        Raises:
            QueryError: A table or column is unknown or ambiguous, an expression
                needs two tables at once, a table is not joined with the others, or a
                LEFT JOIN asks for rows that no site has.

        >>> query = Query.from_sql("SELECT x FROM t", needs_label=False)
        >>> bound = query.bind({"t": {"x": "DOUBLE"}}, Unlabelled("t"))
        >>> bound.label_table, bound.fragment("t").label
        ('t', None)
        """
        return bind_statement(self.statement, schemas, unlabelled)

    def to_sql(self) -> str:
        """Return the canonical SQL; parsing and rendering it changes nothing."""
        return self.statement.sql
