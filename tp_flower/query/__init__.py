"""The training set as SQL: what each table's sites run, and how their rows join."""

from tp_flower.query.bind import BoundQuery, Join, Query, Unlabelled
from tp_flower.query.fragment import Feature, Fragment, SubQuery
from tp_flower.query.parsing import DerivedTable, TableRef

__all__ = [
    "BoundQuery",
    "DerivedTable",
    "Feature",
    "Fragment",
    "Join",
    "Query",
    "SubQuery",
    "TableRef",
    "Unlabelled",
]
