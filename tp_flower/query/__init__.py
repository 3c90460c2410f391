"""The training set as SQL: what each table's sites run, and how their rows join."""

from tp_flower.query.query import (
    BoundQuery,
    DerivedTable,
    Feature,
    Fragment,
    Join,
    Query,
    TableRef,
)

__all__ = [
    "BoundQuery",
    "DerivedTable",
    "Feature",
    "Fragment",
    "Join",
    "Query",
    "TableRef",
]
