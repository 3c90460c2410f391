"""The SELECT that evaluates a fragment on a shard, in DuckDB's SQL.

Numbers become DOUBLE, texts their normal form, and the parts of a join key one
*canonical* text, whose keyed hash leaves the site: equal values match even if their
types differ between sites. Numbers are their shortest exact decimal text (1, 1.0 and
DECIMAL 1.00 agree), texts in Unicode normal form C, dates and timestamps microseconds
since 1970 in UTC. The kind is part of the text: text never matches a number. Every part
of a composite key is preceded by its length: ('a', 'bc') differs from ('ab', 'c').
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Literal

import duckdb

from tp_flower.duckdb_engine import quote_name, safe_message
from tp_flower.errors import SourceError
from tp_flower.query.fragment import Feature
from tp_flower.sources.shards import Scan, column_types
from tp_flower.sources.tables_file import ShardSource

Kind = Literal["number", "text", "time", "boolean", "vector"]

_FLOATS: Final = re.compile(r'FLOAT|REAL|DOUBLE|"NULL"')
_DECIMAL: Final = re.compile(r"(?:DECIMAL|NUMERIC)\(\d+, ?(\d+)\)")
_NUMBER: Final = rf"U?(?:TINY|SMALL|BIG|HUGE)INT|U?INTEGER|{_FLOATS.pattern}|{_DECIMAL.pattern}"
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
    """An expression with its type, a name for messages, and its column in a SELECT."""

    sql: str
    type: str
    kind: Kind
    name: str = ""
    column: str = ""


def kind_of(duckdb_type: str) -> Kind | None:
    """Return the kind of value that a DuckDB type holds, None if it is unsupported.

    >>> kind_of("DECIMAL(10,2)"), kind_of("DATE"), kind_of("FLOAT[3]"), kind_of("BLOB")
    ('number', 'time', 'vector', None)
    """
    for kind, pattern in _KINDS.items():
        if pattern.fullmatch(duckdb_type):
            return kind
    return None


def without_values(duckdb_type: str) -> str:
    """Return a type as it may leave a site, without the values of an enumeration.

    >>> without_values("STRUCT(mood ENUM('sad', 'it''s)'))[]")
    'STRUCT(mood VARCHAR)[]'
    """
    return _ENUM.sub("VARCHAR", duckdb_type)


def comparable(column: TypedColumn) -> str:
    """Return the SQL of a value for comparisons within a shard; NaN is NULL.

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
    """Return the value as a DOUBLE: 0/1, or seconds since 1970; NULL is NaN."""
    number = f"CAST({column.sql} AS DOUBLE)"
    if column.kind == "time":
        number = (
            f"CASE WHEN isinf({column.sql}) THEN CAST('inf' AS DOUBLE) ELSE epoch({column.sql}) END"
        )
    return f"coalesce({number}, CAST('nan' AS DOUBLE))"


def as_vector(column: TypedColumn) -> str:
    """Return a list or an array of numbers as one of FLOAT or DOUBLE."""
    vector = _VECTOR.fullmatch(column.type)
    element = "FLOAT" if vector is not None and vector["element"] in {"FLOAT", "REAL"} else "DOUBLE"
    return f"CAST({column.sql} AS {element}[])"


def vector_width(duckdb_type: str) -> int | None:
    """Return the length of a fixed-size array type, None for other types.

    >>> vector_width("FLOAT[3]"), vector_width("FLOAT[]")
    (3, None)
    """
    vector = _VECTOR.fullmatch(duckdb_type)
    return int(vector["length"]) if vector and vector["length"] else None


def canonical_text(columns: Sequence[TypedColumn], *, null_is_value: bool) -> str:
    """Return the canonical text of a key, from its parts' ``comparable`` values.

    In groups NULL is a value like any other, as in GROUP BY; in joins the text is NULL
    if any part is, so that it matches nothing.

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
    as_text = f"CAST({value} AS VARCHAR)"
    if column.kind == "number" and _FLOATS.fullmatch(column.type):
        whole = f"{value} = trunc({value}) AND abs({value}) < 1e38"
        integer = f"CAST(CAST({value} AS HUGEINT) AS VARCHAR)"
        return f"CASE WHEN {whole} THEN {integer} ELSE {as_text} END"
    decimal = _DECIMAL.fullmatch(column.type)
    if decimal and decimal[1] != "0":
        # below 0.0001 a DOUBLE is written with an exponent, so a DECIMAL must be, too
        tiny = f"{value} <> 0 AND abs({value}) < 0.0001"
        exponent = f"CAST(CAST({value} AS DOUBLE) AS VARCHAR)"
        trimmed = f"rtrim(rtrim({as_text}, '0'), '.')"
        return f"CASE WHEN {tiny} THEN {exponent} ELSE {trimmed} END"
    return as_text


RELATION: Final = "shard"
GROUPS: Final = "grouped_by"  # column of the canonical text of a sub-query's group
GROUP: Final = "(group)"  # prefix of grouping columns, in no query's names
UNIT: Final = "unit_of_privacy"  # column of the canonical text of a row's unit
UNIT_OF_ROW: Final = "(unit)"  # column of rows drawn by unit, in no query's names


@dataclass(frozen=True)
class Plan:
    """All expressions of a fragment, and the SELECT of them over a relation.

    There is at most one label and weight. ``composites`` are the parts of each key and, under
    ``GROUPS``, the expressions that a sub-query groups by; under ``UNIT`` the unit of privacy.
    """

    source: ShardSource
    relation: str
    features: tuple[TypedColumn, ...]
    label: tuple[TypedColumn, ...]
    weight: tuple[TypedColumn, ...]
    composites: Mapping[str, tuple[TypedColumn, ...]]
    filters: tuple[str, ...]

    @property
    def values(self) -> tuple[TypedColumn, ...]:
        """Features, label and weight."""
        return (*self.features, *self.label, *self.weight)

    @property
    def parts(self) -> tuple[TypedColumn, ...]:
        """The parts of all keys, and of the groups."""
        return tuple(chain.from_iterable(self.composites.values()))

    @property
    def numbers(self) -> tuple[TypedColumn, ...]:
        """Features, label and weight that are neither texts nor vectors."""
        return self._of_kinds("number", "boolean", "time")

    @property
    def vectors(self) -> tuple[TypedColumn, ...]:
        """Features that are vectors."""
        return self._of_kinds("vector")

    def _of_kinds(self, *kinds: str) -> tuple[TypedColumn, ...]:
        return tuple(piece for piece in self.values if piece.kind in kinds)

    @property
    def listed(self) -> tuple[str, ...]:
        """The columns of texts: features and label, keys, groups."""
        return (*(piece.column for piece in self._of_kinds("text")), *self.composites)

    @property
    def select(self) -> str:
        """The SELECT: numbers, texts, the canonical texts of keys, then vectors."""
        inner = [f"{_value(piece)} AS {piece.column}" for piece in self.values]
        inner += [f"{comparable(piece)} AS {piece.column}" for piece in self.parts]
        outer = [piece.column for piece in (*self.numbers, *self._of_kinds("text"))]
        outer += [
            f"{_canonical(parts, is_group=column == GROUPS)} AS {column}"
            for column, parts in self.composites.items()
        ]
        outer += [piece.column for piece in self.vectors]
        return (
            f"SELECT {', '.join(outer) or '0'} FROM "
            f"(SELECT {', '.join(inner) or '0'} FROM {self.relation}{self._where})"
        )

    @property
    def _where(self) -> str:
        conditions = " AND ".join(f"({condition})" for condition in self.filters)
        return f" WHERE {conditions}" if conditions else ""

    def failure(self, connection: duckdb.DuckDBPyConnection) -> SourceError | None:
        """Return which expression fails on the shard's values, quoting no value."""
        pieces = [("a filter", condition, "") for condition in self.filters]
        pieces += [
            (repr(piece.name), piece.sql[1:-1], self._where)
            for piece in (*self.parts, *self.values)
        ]
        for name, sql, where in pieces:
            try:
                connection.execute(
                    f"SELECT count(CAST({sql} AS VARCHAR)) FROM {self.relation}{where}"
                ).fetchall()
            except duckdb.Error as error:
                return SourceError(
                    f"{self.source}: {name}, {sql}, fails on some value: {safe_message(error)}"
                )
        return None


def _value(piece: TypedColumn) -> str:
    """Return a feature, label or weight as the inner SELECT yields it."""
    if piece.kind == "vector":
        return as_vector(piece)
    return comparable(piece) if piece.kind == "text" else as_number(piece)


def _canonical(parts: Iterable[TypedColumn], *, is_group: bool) -> str:
    columns = [replace(part, sql=part.column) for part in parts]
    return canonical_text(columns, null_is_value=is_group)


def make_plan(source: ShardSource, opened: Scan) -> Plan:
    """Return the plan of a shard's fragment, with its types, without evaluating it."""
    fragment, (relation, groups) = opened.fragment, _relation(source, opened)
    features = [(item.name, item.sql) for item in fragment.features]
    label = [] if fragment.label is None else [("label", fragment.label)]
    weight = [] if fragment.weight is None else [("weight", fragment.weight)]
    composites = [
        (f"key{number}", [(f"join key {sql}", sql) for sql in parts])
        for number, parts in enumerate(fragment.keys)
    ]
    composites += [(GROUPS, groups)] if groups else []
    if source.policy.privacy_unit:
        composites.append((UNIT, [("privacy-unit", quote_name(UNIT_OF_ROW))]))
    flat = [*features, *label, *weight, *chain(*(parts for _, parts in composites))]
    selected = ", ".join(f"{sql} AS c{i}" for i, (_, sql) in enumerate(flat))
    types = column_types(opened.connection, f"SELECT {selected or '0'} FROM {relation}")
    pieces = (
        typed_piece(source, (name, f"c{i}", sql), kind, can_be_vector=i < len(features))
        for i, ((name, sql), kind) in enumerate(zip(flat, types.values(), strict=False))
    )
    return Plan(
        source=source,
        relation=relation,
        features=tuple(next(pieces) for _ in features),
        label=tuple(next(pieces) for _ in label),
        weight=tuple(_as_weight(source, next(pieces)) for _ in weight),
        composites={name: tuple(next(pieces) for _ in parts) for name, parts in composites},
        filters=fragment.filters,
    )


def _relation(source: ShardSource, opened: Scan) -> tuple[str, list[tuple[str, str]]]:
    subquery = opened.fragment.subquery
    if subquery is None:
        return RELATION, []
    groups = [Feature(f"{GROUP} {number}", sql) for number, sql in enumerate(subquery.groups)]
    columns = [*subquery.columns, *groups]
    if source.policy.privacy_unit:
        # a group has the rows of one unit
        columns.append(Feature(UNIT_OF_ROW, f"any_value({quote_name(UNIT_OF_ROW)})"))
    group_names = [(f"group {group.sql}", quote_name(group.name)) for group in groups]
    return f"({replace(subquery, columns=tuple(columns)).to_sql(RELATION)})", group_names


def _as_weight(source: ShardSource, piece: TypedColumn) -> TypedColumn:
    if piece.kind not in ("number", "boolean"):
        kind_text = without_values(piece.type)
        raise SourceError(
            f"{source}: the weight is of type {kind_text}; it must be a number: CAST it"
        )
    return piece


def _usable(duckdb_type: str, sql: str) -> str:
    """Return what makes a number or a text of a value whose type has no kind."""
    text = f"CAST({sql} AS VARCHAR) is a text"
    if duckdb_type.startswith("TIME"):
        return f"EPOCH({sql}) is a number, the seconds since midnight, as is HOUR({sql}); {text}"
    if duckdb_type == "INTERVAL":
        return f"EPOCH({sql}) is a number, of seconds; {text}"
    if duckdb_type in ("UHUGEINT", "BIGNUM", "BIT"):
        return f"CAST({sql} AS DOUBLE) is a number; {text}"
    if duckdb_type.endswith("]"):
        return f"LENGTH({sql}) is a number; {text}"
    return text


def typed_piece(
    source: ShardSource, spelled: tuple[str, str, str], duckdb_type: str, *, can_be_vector: bool
) -> TypedColumn:
    """Return a piece from its name, column and SQL; refuse types without a kind."""
    name, column, sql = spelled
    kind = kind_of(duckdb_type)
    if kind is None or (kind == "vector" and not can_be_vector):
        raise SourceError(
            f"{source}: {name!r} is of type {without_values(duckdb_type)}, which cannot be used: "
            f"{_usable(duckdb_type, sql)}, or leave it out, of a star with EXCLUDE"
        )
    return TypedColumn(f"({sql})", duckdb_type, kind, name, column)
