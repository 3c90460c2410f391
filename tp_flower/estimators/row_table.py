"""The table of a query that X is, beside the tables of the other sites.

scikit-learn's tools divide the rows of one array or data frame, X, and its target, y.
Here X is the label's table: the one table of the query that the other sites do not
have. It is joined with theirs, each time that a model is trained, predicts or is
scored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
from sqlglot import exp

from tp_flower.errors import QueryError, SettingsError
from tp_flower.query import Query, TableRef
from tp_flower.query.expressions import render
from tp_flower.sources.frames import read_frame

if TYPE_CHECKING:
    import pandas as pd

OtherSites: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By site its tables, by their names: those of :mod:`tp_flower.api`."""
PLACE: Final = "X"
"""The site that has the rows of X."""
LABEL: Final = "label"
"""The column of y, where the query does not name one."""


@dataclass(frozen=True)
class RowTable:
    """The table of a query whose rows X is.

    Attributes:
        name: of the table.
        aliases: that the query has for it, outside of sub-queries; one at least.
    """

    query: Query
    name: str
    aliases: tuple[str, ...]

    @classmethod
    def of(cls, query: str | Query, others: OtherSites) -> "RowTable":
        """Return the one table of a query that no other site has.

        Raises:
            QueryError: the query is refused, or reads the table in sub-queries alone.
            SettingsError: the sites have all tables of the query, or lack several.
        """
        if isinstance(query, str):
            query = Query.from_sql(query, needs_label=False)
        name = _missing_table(query, others)
        aliases = tuple(
            table.alias
            for table in query.statement.tables
            if isinstance(table, TableRef) and table.name == name
        )
        if not aliases:
            raise QueryError(
                f"X is the rows of table {name!r}, which the query reads in a "
                "sub-query alone: compute what the sub-query returns before the run, "
                "and give it as X"
            )
        return cls(query, name, aliases)

    def beside(self, rows: "pd.DataFrame", others: OtherSites) -> dict[str, Any]:
        """Return the sites of a run: the others, and that of the table's rows."""
        return {**others, PLACE: {**others.get(PLACE, {}), self.name: rows}}

    def labelled(
        self, rows: "pd.DataFrame", target: Any = None
    ) -> "tuple[Query, pd.DataFrame]":
        """Return the query and the rows, with a target (n,) as label if there is one.

        The target replaces the column of the query's label; a query without a label
        gets one.

        Raises:
            QueryError: the label is not of this table, or there is neither a label nor
                a target; or there is a target, and the label is an expression.
        """
        label = self.query.label
        if label is None:
            if target is None:
                raise QueryError(
                    "the query has no label, and y is None: write y AS label, or give y"
                )
            query = self.query.with_label(LABEL, self.aliases[0])
            return query, rows.assign(**{LABEL: target})
        self._check_label(rows, has_target=target is not None)
        if target is None:
            return self.query, rows
        if not isinstance(label, exp.Column):
            raise QueryError(
                f"the label is the expression {render(label)}, and y is given: leave "
                "one of them out"
            )
        return self.query, rows.assign(**{_spelled(label.name, rows): target})

    def unlabelled(self, rows: "pd.DataFrame") -> "pd.DataFrame":
        """Return the rows to predict, whose label and weight need not be there.

        A star stands for all columns but these, whose names it therefore needs.
        """
        if not self.query.has_stars:
            return rows
        names = {str(name).casefold() for name in rows.columns}
        missing = {
            column.name: np.nan
            for column in self.query.trained_columns
            if column.name.casefold() not in names and self._has(column)
        }
        return rows.assign(**missing)

    def _has(self, column: exp.Column) -> bool:
        """Whether a column may be of this table: it is, or it is of none by name."""
        aliases = {alias.casefold() for alias in self.aliases}
        return not column.table or column.table.casefold() in aliases

    def _check_label(self, rows: "pd.DataFrame", *, has_target: bool) -> None:
        """Refuse a label that is not of this table."""
        label = cast(exp.Expr, self.query.label)
        names = {str(name).casefold() for name in rows.columns}
        for column in label.find_all(exp.Column):
            is_there = has_target or column.table or column.name.casefold() in names
            if not (self._has(column) and is_there):
                raise QueryError(
                    f"X is the rows of table {self.name!r}, and the label "
                    f"{render(label)} is not of it: X is the label's table; the other "
                    "tables are those of sites"
                )


def read_rows(values: Any, estimator: Any) -> "pd.DataFrame":
    """Return X (n, m) as a data frame, whose rows are in its order.

    The columns of an array are called x0, x1, ..., and hold finite numbers or NaN; what
    those of a data frame may be is what a site's table may be.
    """
    import pandas as pd
    from sklearn.utils import check_array

    frame = None if isinstance(values, np.ndarray) else read_frame(values)
    if frame is None:
        numbers = check_array(
            values, ensure_all_finite="allow-nan", estimator=estimator
        )
        names = [f"x{k}" for k in range(numbers.shape[1])]
        return pd.DataFrame(numbers, columns=names)
    if not len(frame):
        raise ValueError("Found array with 0 sample(s): X is a data frame without rows")
    return frame


def _spelled(name: str, rows: "pd.DataFrame") -> str:
    """Return the name of a column as the rows spell it; SQL has one for all cases."""
    spellings = {str(column).casefold(): str(column) for column in rows.columns}
    return spellings.get(name.casefold(), name)


def _missing_table(query: Query, others: OtherSites) -> str:
    """Return the one table of a query that is at no site, else raise SettingsError."""
    for site, tables in others.items():
        if not isinstance(tables, Mapping):
            raise SettingsError(
                f"sites: {site!r} has {tables!r}: write a dictionary of its tables, "
                f"{{{site!r}: {{'t': 't.csv'}}}}"
            )
    hosted = {name.casefold() for tables in others.values() for name in tables}
    missing = [name for name in query.names if name.casefold() not in hosted]
    if len(missing) == 1:
        return missing[0]
    if not missing:
        raise SettingsError(
            f"sites: they have all tables of the query ({', '.join(query.names)}), and "
            "X is the rows of one: leave that table out"
        )
    raise SettingsError(
        f"sites: X is the rows of one table of the query, and {len(missing)} are at no "
        f"site: {', '.join(missing)}. Add the others"
    )
