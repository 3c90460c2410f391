"""Features of fragments, by name."""

from tp_flower.duckdb_engine import quote_name
from tp_flower.query import Feature


def features(**expressions: str) -> tuple[Feature, ...]:
    """Features with these names and expressions."""
    return tuple(Feature(name, sql) for name, sql in expressions.items())


def plain_features(*names: str) -> tuple[Feature, ...]:
    """Features that are columns, under their own names."""
    return tuple(Feature(name, quote_name(name)) for name in names)
