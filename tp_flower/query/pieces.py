"""The pieces that fragments and sub-queries are made of, and their way over the wire.

A piece is a small SQL expression over the bare, quoted columns of one relation.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.query.expressions import (
    as_filter,
    closest,
    parse_expression,
    render,
    shorten,
)

Parser = Callable[[str, str], exp.Expr]


@dataclass(frozen=True)
class Feature:
    """A named expression: an input of a table's model, or a column of a sub-query."""

    name: str
    sql: str


def spell(name: str, columns: Collection[str]) -> str | None:
    """Return the column that DuckDB means by ``name``, whatever its case.

    >>> spell("ORIGIN", ["Origin", "dest"])
    'Origin'
    """
    if name in columns:
        return name
    return next((c for c in columns if c.lower() == name.lower()), None)


def local_sql(tree: exp.Expr, columns: Collection[str], what: str) -> str:
    """Return ``tree`` over bare, quoted columns, in the table's own spelling.

    Raises:
        QueryError: A column is not one of ``columns``.
    """
    tree = tree.copy()
    for column in list(tree.find_all(exp.Column)):
        spelled = spell(column.name, columns)
        if spelled is None:
            raise QueryError(
                f"{what} is refused: no column {column.name!r}"
                f"{closest(column.name, columns)}; columns: {', '.join(columns)}"
            )
        column.set("table", None)
        column.set("this", exp.Identifier(this=spelled, quoted=True))
    return render(tree, quote=True)


def check_piece(
    sql: str, what: str, columns: Collection[str], parse: Parser = parse_expression
) -> str:
    """Return one piece from the wire, rendered from its checked tree.

    Args:
        sql: The piece.
        what: What it is, for messages.
        columns: What it may name.
        parse: (text, what) -> the tree, checked against the allow-list that applies.

    Raises:
        QueryError: It is refused.
    """
    tree = parse(sql, what)
    qualified = next((c for c in tree.find_all(exp.Column) if c.table), None)
    if qualified is not None:
        raise QueryError(
            f"{what} is refused: only columns of the table itself, without prefix: "
            f"{shorten(render(qualified))}"
        )
    return local_sql(tree, columns, what)


def check_condition(
    sql: str, what: str, columns: Collection[str], parse: Parser = parse_expression
) -> str:
    """Return one condition from the wire, which keeps its meaning between two ANDs.

    Raises:
        QueryError: It is refused, as :func:`check_piece` says.
    """
    return check_piece(sql, what, columns, lambda *text: as_filter(parse(*text)))


def check_names(features: Collection[Feature], where: str) -> None:
    """Refuse names that are empty or equal.

    Raises:
        QueryError: Lists the names.
    """
    names = [feature.name.lower() for feature in features]
    if "" in names or len(set(names)) != len(names):
        raise QueryError(
            f"{where} names must differ and not be empty, "
            f"got {[feature.name for feature in features]}"
        )


def as_text(value: object, field: str) -> str:
    """Return ``value`` if it is a text.

    Raises:
        QueryError: It is something else.
    """
    if not isinstance(value, str):
        raise QueryError(f"fragment: {field!r} must hold texts, got {value!r}")
    return value


def fields_in(data: object, fields: Collection[str], what: str) -> Mapping[str, Any]:
    """Return ``data`` if it has these fields and no others.

    Raises:
        QueryError: It has not.
    """
    if not isinstance(data, Mapping) or set(data) != set(fields):
        got = ", ".join(map(str, data)) if isinstance(data, Mapping) else data
        raise QueryError(f"{what} has the fields {', '.join(fields)}; got {got}")
    return data


def list_in(data: Mapping[str, Any], field: str) -> list[Any]:
    """Return the list in a field.

    Raises:
        QueryError: It is something else.
    """
    value = data[field]
    if not isinstance(value, list):
        raise QueryError(f"fragment: {field!r} must be a list, got {value!r}")
    return value


def texts_in(data: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Return the texts listed in a field.

    Raises:
        QueryError: It holds something else.
    """
    return tuple(as_text(text, field) for text in list_in(data, field))


def features_in(data: Mapping[str, Any], field: str) -> tuple[Feature, ...]:
    """Return the features listed in a field, each written as ``[name, sql]``.

    Raises:
        QueryError: It holds something else.
    """
    return tuple(_feature(pair, field) for pair in list_in(data, field))


def _feature(pair: object, field: str) -> Feature:
    if not isinstance(pair, list) or len(pair) != 2:
        raise QueryError(f"fragment: a feature must be [name, sql], got {pair!r}")
    return Feature(as_text(pair[0], field), as_text(pair[1], field))
