"""What a table's features are made of, as texts that two queries are compared by.

A model fits the rows of another query if the table's features are made alike, from the
table's own columns, in the same order. Filters may differ: they choose rows.
"""

from collections.abc import Sequence

from sqlglot import exp

from tp_flower.query.aggregates import parse_aggregate
from tp_flower.query.expressions import render
from tp_flower.query.fragment import Fragment


def feature_texts(fragments: Sequence[Fragment]) -> tuple[str, ...]:
    """Return ``name = expression`` of every feature of a table, in order.

    Args:
        fragments: of the table; several where a UNION ALL makes it.
    """
    return tuple(
        f"{feature.name} = {_made(fragments, index)}"
        for index, feature in enumerate(fragments[0].features)
    )


def label_text(fragments: Sequence[Fragment]) -> str | None:
    """Return the expression of the label; None if the table has none."""
    if fragments[0].label is None:
        return None
    texts = [_origin(own, own.label) for own in fragments if own.label is not None]
    return " | ".join(dict.fromkeys(texts))


def _made(fragments: Sequence[Fragment], index: int) -> str:
    texts = [_origin(own, own.features[index].sql) for own in fragments]
    return " | ".join(dict.fromkeys(texts))


def _origin(fragment: Fragment, sql: str) -> str:
    """Return an expression over the columns of the hosted table.

    The columns of a sub-query are replaced by what they stand for; what it groups by
    is a part of their meaning.
    """
    if fragment.subquery is None:
        return sql
    made = {column.name: column.sql for column in fragment.subquery.columns}
    holder = exp.Paren(this=parse_aggregate(sql, "feature"))
    for column in list(holder.find_all(exp.Column)):
        inner = parse_aggregate(made[column.name], "feature")
        is_whole = column is holder.this
        column.replace(inner if is_whole else exp.Paren(this=inner))
    groups = ", ".join(sorted(fragment.subquery.groups))
    return f"{render(holder.this, quote=True)} GROUP BY {groups}"
