"""Kinds of values, and the one form in which a join key is hashed.

A join key becomes the keyed hash of a *canonical* text, so that equal values match
whatever their type is at each site: numbers as their shortest exact decimal text (1,
1.0 and DECIMAL 1.00 agree), text in Unicode normal form C, dates and timestamps as
microseconds since 1970 in UTC. The kind is part of the text: text never matches a
number. Every part of a composite key carries its length: ('a', 'bc') is not
('ab', 'c').

All functions that write something return SQL of DuckDB.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["number", "text", "time", "boolean", "vector"]

_FLOATS: Final = re.compile(r'FLOAT|REAL|DOUBLE|"NULL"')
_DECIMAL: Final = re.compile(r"(?:DECIMAL|NUMERIC)\(\d+, ?(\d+)\)")
_NUMBER: Final = (
    rf"U?(?:TINY|SMALL|BIG|HUGE)INT|U?INTEGER|{_FLOATS.pattern}|{_DECIMAL.pattern}"
)
_VECTOR: Final = re.compile(rf"(?P<element>{_NUMBER})\[(?P<length>\d*)\]")
_KINDS: Final[dict[Kind, re.Pattern[str]]] = {
    "boolean": re.compile(r"BOOLEAN"),
    "number": re.compile(_NUMBER),
    "vector": _VECTOR,
    "time": re.compile(r"DATE|TIMESTAMP( WITH TIME ZONE|_S|_MS|_NS)?"),
    "text": re.compile(r"VARCHAR|UUID|ENUM\(.*\)", re.DOTALL),
}
_ENUM: Final = re.compile(r"ENUM\((?:'(?:[^']|'')*'(?:, *)?)*\)")


@dataclass(frozen=True)
class TypedColumn:
    """A column, or any expression, and its DuckDB type."""

    sql: str
    type: str
    kind: Kind


def kind_of(duckdb_type: str) -> Kind | None:
    """Return the kind of value a DuckDB type holds, None if there is no use for it.

    >>> kind_of("DECIMAL(10,2)"), kind_of("DATE"), kind_of("FLOAT[3]"), kind_of("BLOB")
    ('number', 'time', 'vector', None)
    """
    for kind, pattern in _KINDS.items():
        if pattern.fullmatch(duckdb_type):
            return kind
    return None


def without_values(duckdb_type: str) -> str:
    """Return a type as it may leave a site: an enumeration lists the column's values.

    >>> without_values("STRUCT(mood ENUM('sad', 'it''s)'))[]")
    'STRUCT(mood VARCHAR)[]'
    """
    return _ENUM.sub("VARCHAR", duckdb_type)


def comparable(column: TypedColumn) -> str:
    """Return the value as it is compared within a shard; NaN is NULL.

    >>> comparable(TypedColumn("x", "DATE", "time"))
    'epoch_us(x)'
    """
    if column.kind == "text":
        return f"nfc_normalize(CAST({column.sql} AS VARCHAR))"
    if column.kind == "time":
        return f"epoch_us({column.sql})"
    if _FLOATS.fullmatch(column.type):
        return f"nullif(CAST({column.sql} AS DOUBLE), CAST('nan' AS DOUBLE))"
    return column.sql


def as_number(column: TypedColumn) -> str:
    """Return the value as a DOUBLE: 0/1 for a boolean, seconds since 1970 for a time.

    NULL becomes NaN, and an infinite time infinity.
    """
    number = f"CAST({column.sql} AS DOUBLE)"
    if column.kind == "time":
        number = (
            f"CASE WHEN isinf({column.sql}) THEN CAST('inf' AS DOUBLE) "
            f"ELSE epoch({column.sql}) END"
        )
    return f"coalesce({number}, CAST('nan' AS DOUBLE))"


def as_vector(column: TypedColumn) -> str:
    """Return a list or an array of numbers as one of FLOAT or DOUBLE."""
    vector = _VECTOR.fullmatch(column.type)
    is_single = vector is not None and vector["element"] in {"FLOAT", "REAL"}
    element = "FLOAT" if is_single else "DOUBLE"
    return f"CAST({column.sql} AS {element}[])"


def vector_width(duckdb_type: str) -> int | None:
    """Return the length of a fixed-size array type, None for other types.

    >>> vector_width("FLOAT[3]"), vector_width("FLOAT[]")
    (3, None)
    """
    vector = _VECTOR.fullmatch(duckdb_type)
    return int(vector["length"]) if vector and vector["length"] else None


def canonical_text(columns: Sequence[TypedColumn], *, null_is_value: bool) -> str:
    """Return the text that stands for a key, from its parts' ``comparable`` values.

    NULL is a value like others, as in GROUP BY; else the text is NULL if any part is,
    so that it matches nothing, as in a join.

    >>> canonical_text([TypedColumn("k", "VARCHAR", "text")], null_is_value=False)
    "'text' || strlen(k) || ':' || k"
    """
    parts = []
    for column in columns:
        text = _part_text(column)
        part = f"'{column.kind}' || strlen({text}) || ':' || {text}"
        parts.append(f"coalesce({part}, 'null')" if null_is_value else part)
    return " || ".join(parts)


def _part_text(column: TypedColumn) -> str:
    value = column.sql
    if column.kind == "text":
        return value
    plain = f"CAST({value} AS VARCHAR)"
    if column.kind == "number" and _FLOATS.fullmatch(column.type):
        whole = f"{value} = trunc({value}) AND abs({value}) < 1e38"
        integer = f"CAST(CAST({value} AS HUGEINT) AS VARCHAR)"
        return f"CASE WHEN {whole} THEN {integer} ELSE {plain} END"
    decimal = _DECIMAL.fullmatch(column.type)
    if decimal and decimal[1] != "0":
        # below 0.0001 a DOUBLE is written with an exponent: so must a DECIMAL be
        tiny = f"{value} <> 0 AND abs({value}) < 0.0001"
        exponent = f"CAST(CAST({value} AS DOUBLE) AS VARCHAR)"
        trimmed = f"rtrim(rtrim({plain}, '0'), '.')"
        return f"CASE WHEN {tiny} THEN {exponent} ELSE {trimmed} END"
    return plain
