"""The value that DuckDB gives an expression whose columns are all NULL.

A row of a LEFT JOIN without a match has NULL in every column of the missing side. The
expressions come from the query and the types from the sites: the first have passed the
allow-list, the second are parsed, and the engine is in memory and locked.
"""

from collections.abc import Mapping
from functools import lru_cache

import duckdb
from sqlglot import exp

from tp_flower.duckdb_engine import quote_name, safe_message, shared_cursor
from tp_flower.errors import QueryError
from tp_flower.query.expressions import parse_expression, shorten


def typed_nulls(types: Mapping[str, str]) -> str:
    """Return a relation of one row, NULL in each of these columns.

    >>> typed_nulls({"x": "INT"})
    '(SELECT CAST(NULL AS INTEGER) AS "x")'
    """
    columns = ", ".join(
        f"CAST(NULL AS {_known_type(column, name)}) AS {quote_name(column)}"
        for column, name in types.items()
    )
    return f"(SELECT {columns or '1'})"


def output_types(select: str) -> dict[str, str]:
    """Return the DuckDB type of each column of a SELECT over typed NULLs."""
    rows = _rows(f"DESCRIBE {select}")
    return {str(name): str(kind) for name, kind, *_ in rows}


def is_null_on_nulls(sql: str, types: Mapping[str, str]) -> bool:
    """Return whether an expression is NULL where all its columns are.

    >>> is_null_on_nulls('"x" + 1', {"x": "INT"})
    True
    >>> is_null_on_nulls('COALESCE("x", 1)', {"x": "INT"})
    False
    """
    return bool(_on_nulls(f"({sql}) IS NULL", sql, types))


def is_true_on_nulls(sql: str, types: Mapping[str, str]) -> bool:
    """Return whether a condition keeps a row in which all its columns are NULL.

    >>> is_true_on_nulls('"x" > 1', {"x": "INT"})
    False
    >>> is_true_on_nulls('"x" IS NULL', {"x": "INT"})
    True
    """
    return bool(_on_nulls(f"CASE WHEN {sql} THEN true ELSE false END", sql, types))


def _on_nulls(test: str, sql: str, types: Mapping[str, str]) -> object:
    columns = parse_expression(sql, f"expression {shorten(sql)}").find_all(exp.Column)
    used = {column.name: types[column.name] for column in columns}
    ((value,),) = _rows(f"SELECT {test} FROM {typed_nulls(used)}")
    return value


def _known_type(column: str, name: str) -> str:
    """Return a type as DuckDB itself writes it, so that it is nothing but a type."""
    try:
        return str(shared_cursor().type(name))
    except duckdb.Error as error:
        raise QueryError(
            f"column {column!r} has a type that DuckDB does not know: {shorten(name)}"
        ) from error


@lru_cache(maxsize=256)
def _rows(query: str) -> list[tuple[object, ...]]:
    try:
        return shared_cursor().execute(query).fetchall()
    except duckdb.Error as error:
        raise QueryError(
            f"the query does not fit the columns' types: {safe_message(error)}"
        ) from error
