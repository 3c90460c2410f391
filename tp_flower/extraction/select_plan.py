"""The SELECT that evaluates a fragment on a shard, in DuckDB's SQL.

Numbers become DOUBLE, texts their normal form, and the parts of a join key one
*canonical* text, whose keyed hash leaves the site: equal values match even if their
types differ between sites. The text depends on the value alone, never on the type's
precision:

- numbers are written in full, without an exponent, trailing zeros or -0: 0.05, 100;
  a FLOAT or DOUBLE by its exact value if it is whole, else by the shortest decimal
  number that is read as it;
- times are microseconds since 1970 in UTC, with decimals where there are nanoseconds;
- texts are in Unicode normal form C, UUIDs in lower case with hyphens;
- NaN is NULL.

The kind is part of the text: text never matches a number. Every part of a composite key
is preceded by its length: ('a', 'bc') differs from ('ab', 'c'). Where this differs from
DuckDB's ``=`` on purpose, docs/reference/queries.md says so.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final, Literal

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from tp_flower.duckdb_engine import quote_name, safe_message
from tp_flower.errors import SourceError
from tp_flower.extraction.empty_answers import (
    KEY_OF_NO_ROWS,
    NO_ANSWERS,
    NULL_KEY,
    NoRows,
    answered_key,
    empty_answer_sql,
    null_key_sql,
)
from tp_flower.extraction.last_rows import last_rows_sql
from tp_flower.query import windows
from tp_flower.query.expressions import render
from tp_flower.query.fragment import Feature, Role, SubQuery
from tp_flower.sources.shards import Scan, column_types
from tp_flower.sources.tables_file import ShardSource

Kind = Literal["number", "text", "uuid", "time", "boolean", "vector"]

_FLOATS: Final = re.compile(r'FLOAT|REAL|DOUBLE|"NULL"')
_DECIMAL: Final = re.compile(r"(?:DECIMAL|NUMERIC)\((?P<digits>\d+), ?(?P<scale>\d+)\)")
_NUMBER: Final = (
    rf"U?(?:TINY|SMALL|BIG|HUGE)INT|U?INTEGER|{_FLOATS.pattern}"
    r"|(?:DECIMAL|NUMERIC)\(\d+, ?\d+\)"
)
PLAIN: Final = re.compile(r"U?(?:TINY|SMALL|BIG)INT|U?INTEGER|VARCHAR")
"""Types whose values differ if their canonical texts do."""
_VECTOR: Final = re.compile(rf"(?P<element>{_NUMBER})\[(?P<length>\d*)\]")
_KINDS: Final[dict[Kind, re.Pattern[str]]] = {
    "boolean": re.compile(r"BOOLEAN"),
    "number": re.compile(_NUMBER),
    "vector": _VECTOR,
    "time": re.compile(r"DATE|TIMESTAMP( WITH TIME ZONE|_S|_MS|_NS)?"),
    "text": re.compile(r"VARCHAR|ENUM\(.*\)", re.DOTALL),
    "uuid": re.compile(r"UUID"),
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

    A UUID is a text, except in keys: there the same UUID has many spellings as a text.

    >>> kind_of("DECIMAL(10,2)"), kind_of("DATE"), kind_of("FLOAT[3]"), kind_of("BLOB")
    ('number', 'time', 'vector', None)
    """
    for kind, pattern in _KINDS.items():
        if pattern.fullmatch(duckdb_type):
            return kind
    return None


def drop_enum_values(duckdb_type: str) -> str:
    """Return a type as it may leave a site, without the values of an enumeration.

    >>> drop_enum_values("STRUCT(mood ENUM('sad', 'it''s)'))[]")
    'STRUCT(mood VARCHAR)[]'
    """
    return _ENUM.sub("VARCHAR", duckdb_type)


def comparable_sql(column: TypedColumn) -> str:
    """Return the SQL of a value from which ``canonical_text`` is made.

    >>> comparable_sql(TypedColumn("x", "FLOAT", "number"))
    'CAST(x AS DOUBLE)'
    """
    if column.kind == "text":
        return f"nfc_normalize(CAST({column.sql} AS VARCHAR))"
    if _FLOATS.fullmatch(column.type):
        return f"CAST({column.sql} AS DOUBLE)"
    return column.sql


def normal_texts(
    connection: duckdb.DuckDBPyConnection, keys: Sequence[str], relation: str
) -> tuple[str, ...]:
    """Return the SQL of keys of a relation, of texts their normal form.

    Two forms of a text are one key of a LATERAL sub-query, as in every join.
    """
    if not keys:
        return ()
    items = ", ".join(f"{sql} AS c{number}" for number, sql in enumerate(keys))
    types = column_types(connection, f"SELECT {items} FROM {relation}").values()
    return tuple(
        comparable_sql(TypedColumn(f"({sql})", of, "text"))
        if kind_of(of) == "text"
        else sql
        for sql, of in zip(keys, types, strict=True)
    )


def as_number(column: TypedColumn) -> str:
    """Return the value as a DOUBLE: 0/1, or seconds since 1970; NULL is NaN."""
    number = f"CAST({column.sql} AS DOUBLE)"
    if column.kind == "time":
        number = (
            f"CASE WHEN isinf({column.sql}) THEN CAST('inf' AS DOUBLE) ELSE "
            f"epoch({column.sql}) END"
        )
    return f"coalesce({number}, CAST('nan' AS DOUBLE))"


def as_vector(column: TypedColumn) -> str:
    """Return a list or an array of numbers as one of FLOAT or DOUBLE."""
    vector = _VECTOR.fullmatch(column.type)
    if vector is not None and vector["element"] in {"FLOAT", "REAL"}:
        element = "FLOAT"
    else:
        element = "DOUBLE"
    return f"CAST({column.sql} AS {element}[])"


def vector_width(duckdb_type: str) -> int | None:
    """Return the length of a fixed-size array type, None for other types.

    >>> vector_width("FLOAT[3]"), vector_width("FLOAT[]")
    (3, None)
    """
    vector = _VECTOR.fullmatch(duckdb_type)
    if vector and vector["length"]:
        return int(vector["length"])
    return None


def canonical_text(columns: Sequence[TypedColumn], *, null_is_value: bool) -> str:
    """Return the canonical text of a key, from its parts' ``comparable_sql``.

    In groups NULL is a value like any other, as in GROUP BY; in joins the text is NULL
    if any part is, so that it matches nothing.

    >>> canonical_text([TypedColumn("k", "VARCHAR", "text")], null_is_value=False)
    "CASE WHEN k IS NOT NULL THEN concat('text', strlen(k), ':', k) END"
    """
    otherwise = " ELSE 'null'" if null_is_value else ""
    parts = []
    for column in columns:
        text = _part_text(column)
        # one concat takes a third less time than ||, and for it a NULL is ''
        part = f"concat('{column.kind}', strlen({text}), ':', {text})"
        parts.append(f"CASE WHEN {text} IS NOT NULL THEN {part}{otherwise} END")
    return " || ".join(parts)


def canonical_texts(values: pa.Array, kind: Kind) -> pa.Array:
    """Return the canonical texts of keys of one integer or text, none NULL.

    >>> canonical_texts(pa.array([7, -12]), "number").to_pylist()
    ['number1:7', 'number3:-12']
    """
    texts = values.cast(pa.string())
    lengths = pc.binary_length(texts).cast(pa.string())
    return pc.binary_join_element_wise(kind, lengths, ":", texts, "")


def _part_text(column: TypedColumn) -> str:
    """Return the text of a value that is the same in all types that can hold it."""
    value = column.sql
    if column.kind == "text":
        return value
    if column.kind == "time":
        return _time_text(value, column.type)
    if _FLOATS.fullmatch(column.type):
        return _float_text(value)
    decimal = _DECIMAL.fullmatch(column.type)
    if decimal and decimal["scale"] != "0":
        has_integer_digits = decimal["digits"] != decimal["scale"]
        return _decimal_text(value, has_integer_digits=has_integer_digits)
    return f"CAST({value} AS VARCHAR)"


def _decimal_text(value: str, *, has_integer_digits: bool) -> str:
    """Return the text of a DECIMAL with digits after the point."""
    text = f"CAST({value} AS VARCHAR)"
    if not has_integer_digits:
        # DuckDB writes these without the zero before the point
        whole = f"CASE WHEN {value} < 0 THEN '-0.' ELSE '0.' END"
        text = f"{whole} || split_part({text}, '.', 2)"
    return f"rtrim(rtrim({text}, '0'), '.')"


_BIGINT_LIMIT: Final = 2.0**63
_UHUGEINT_LIMIT: Final = 2.0**128  # no exact type holds what is beyond


def _float_text(value: str) -> str:
    """Return the text of a DOUBLE, NULL for NaN.

    The test for NaN is one that DuckDB cannot decide by a Parquet file's least and
    greatest value, which leave NaN out.
    """
    shortest = f"CAST({value} AS VARCHAR)"
    sign = f"CASE WHEN {value} < 0 THEN '-' ELSE '' END"
    integer = f"CAST(CAST({value} AS BIGINT) AS VARCHAR)"
    huge = f"{sign} || CAST(CAST(abs({value}) AS UHUGEINT) AS VARCHAR)"
    # DuckDB writes -0.000012 as -1.2e-05
    digits = f"ltrim({shortest}, '-')"
    mantissa = f"split_part({digits}, 'e-', 1)"
    exponent = f"split_part({digits}, 'e-', 2)"
    zeros = f"repeat('0', CAST({exponent} AS INTEGER) - 1)"
    tiny = f"{sign} || '0.' || {zeros} || replace({mantissa}, '.', '')"
    return (
        f"CASE WHEN isinf({value}) THEN {shortest} WHEN isfinite({value}) THEN CASE"
        f" WHEN abs({value}) >= {_UHUGEINT_LIMIT!r} THEN {shortest}"
        f" WHEN abs({value}) >= {_BIGINT_LIMIT!r} THEN {huge}"
        f" WHEN {value} = trunc({value}) THEN {integer}"
        f" WHEN abs({value}) < 1e-4 THEN {tiny}"
        f" ELSE {shortest} END END"
    )


def _time_text(value: str, duckdb_type: str) -> str:
    """Return the microseconds since 1970, with up to three decimals for nanoseconds."""
    text = f"CAST(epoch_us({value}) AS VARCHAR)"
    if duckdb_type == "TIMESTAMP_NS":
        # epoch_us rounds
        nanoseconds = f"epoch_ns({value})"
        microseconds = (
            f"CAST({nanoseconds} AS DECIMAL(19,0)) * CAST(0.001 AS DECIMAL(4,3))"
        )
        text = (
            f"CASE WHEN {nanoseconds} % 1000 = 0"
            f" THEN CAST({nanoseconds} // 1000 AS VARCHAR)"
            f" ELSE {_decimal_text(microseconds, has_integer_digits=True)} END"
        )
    return f"CASE WHEN isinf({value}) THEN CAST({value} AS VARCHAR) ELSE {text} END"


RELATION: Final = "shard"
GROUPS: Final = "grouped_by"  # column of the canonical text of a sub-query's group
GROUP: Final = "(group)"  # prefix of grouping columns, in no query's names
UNIT: Final = "unit_of_privacy"  # column of the canonical text of a row's unit
UNIT_OF_ROW: Final = "(unit)"  # column of rows drawn by unit, in no query's names


@dataclass(frozen=True)
class Plan:
    """All expressions of a fragment, and the SELECT of them over a relation.

    There is at most one label; ``by_role`` are the fragment's numbers of rows: its
    weight, say, where it has one. ``composites`` are the parts of each key
    and, under ``GROUPS``, the expressions that a sub-query groups by; under ``UNIT``
    the unit of privacy. With ``empty_answer``, the relation of a sub-query's answer
    about no rows, ``answered`` is the key by which joins find it; ``null_keys`` are
    the conditions under which keys are ``null_text`` in place of NULL.
    """

    source: ShardSource
    relation: str
    features: tuple[TypedColumn, ...]
    label: tuple[TypedColumn, ...]
    by_role: Mapping[Role, TypedColumn]
    composites: Mapping[str, tuple[TypedColumn, ...]]
    filters: tuple[str, ...]
    empty_answer: str = ""
    answered: str = ""
    null_keys: Mapping[str, str] = field(default_factory=dict)
    null_text: str = ""

    @property
    def values(self) -> tuple[TypedColumn, ...]:
        """Features, label and numbers of rows."""
        return (*self.features, *self.label, *self.by_role.values())

    @property
    def parts(self) -> tuple[TypedColumn, ...]:
        """The parts of all keys, and of the groups."""
        return tuple(chain.from_iterable(self.composites.values()))

    @property
    def numbers(self) -> tuple[TypedColumn, ...]:
        """Features, label and numbers of rows that are neither texts nor vectors."""
        return self._values_of("number", "boolean", "time")

    @property
    def vectors(self) -> tuple[TypedColumn, ...]:
        """Features that are vectors."""
        return self._values_of("vector")

    def _values_of(self, *kinds: str) -> tuple[TypedColumn, ...]:
        return tuple(piece for piece in self.values if piece.kind in kinds)

    @property
    def listed(self) -> tuple[str, ...]:
        """The columns of texts: features and label, keys, groups."""
        return (*(piece.column for piece in self._values_of("text")), *self.composites)

    @property
    def plain_keys(self) -> Mapping[str, Kind]:
        """By column, the kinds of keys that the SELECT yields as they are.

        Texts of distinct values are made faster than those of rows.
        """
        return {
            column: parts[0].kind
            for column, parts in self.composites.items()
            if len(parts) == 1
            and PLAIN.fullmatch(parts[0].type)
            and column not in (GROUPS, self.answered, *self.null_keys)
        }

    @property
    def select(self) -> str:
        """The SELECT: numbers, texts, keys or their canonical texts, then vectors."""
        items = self.items
        plain = self.plain_keys
        outer = [
            (self.composites[name][0].column if name in plain else sql, name)
            for sql, name in items["outer"]
        ]
        return (
            f"SELECT {_listed(outer)} FROM "
            f"(SELECT {_listed(items['inner'])} FROM {self.rows})"
        )

    @property
    def empty_select(self) -> str:
        """The same SELECT of the answer about no rows, whose key is of none."""
        items = self.empty_items
        return (
            f"SELECT {_listed(items['outer'])} FROM "
            f"(SELECT {_listed(items['inner'])} FROM {self.empty_answer})"
        )

    @property
    def empty_items(self) -> dict[str, list[tuple[str, str]]]:
        """The items of that SELECT, as :attr:`items`."""
        of_none = (self.answered, UNIT)
        parts = [
            piece
            for column, pieces in self.composites.items()
            if column not in of_none
            for piece in pieces
        ]
        inner = [(_value(piece), piece.column) for piece in self.values]
        inner += [(comparable_sql(piece), piece.column) for piece in parts]
        outer = [
            (f"'{KEY_OF_NO_ROWS}'" if name in of_none else sql, name)
            for sql, name in self.items["outer"]
        ]
        return {"inner": inner, "outer": outer}

    @property
    def items(self) -> dict[str, list[tuple[str, str]]]:
        """SQL and name of its `inner` items, over the rows, and of the `outer` ones.

        The latter are over the former; all keys are canonical texts.
        """
        inner = [(_value(piece), piece.column) for piece in self.values]
        inner += [(comparable_sql(piece), piece.column) for piece in self.parts]
        inner += [(sql, f"is_null_{column}") for column, sql in self.null_keys.items()]
        outer = [(p.column, p.column) for p in self.numbers]
        outer += [(p.column, p.column) for p in self._values_of("text")]
        outer += [(self._key_text(column), column) for column in self.composites]
        outer += [(piece.column, piece.column) for piece in self.vectors]
        return {"inner": inner, "outer": outer}

    def _key_text(self, column: str) -> str:
        """Return the canonical text of a key, perhaps also where it is NULL."""
        text = _canonical(self.composites[column], is_group=column == GROUPS)
        if column not in self.null_keys:
            return text
        null_text = self.null_text.replace("'", "''")
        return f"CASE WHEN is_null_{column} THEN '{null_text}' ELSE {text} END"

    @property
    def rows(self) -> str:
        """The rows that the filters keep, as FROM writes them."""
        return f"{self.relation}{self._where}"

    @property
    def _where(self) -> str:
        conditions = " AND ".join(f"({condition})" for condition in self.filters)
        if not conditions:
            return ""
        return f" WHERE {conditions}"

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
                    f"{self.source}: {name}, {sql}, fails on some value: "
                    f"{safe_message(error)}"
                )
        return None


def _listed(items: Sequence[tuple[str, str]]) -> str:
    """Return items as SELECT lists them."""
    texts = (name if sql == name else f"{sql} AS {name}" for sql, name in items)
    return ", ".join(texts) or "0"


def _value(piece: TypedColumn) -> str:
    """Return a feature, label or number as the inner SELECT yields it."""
    if piece.kind == "vector":
        return as_vector(piece)
    if piece.kind == "text":
        return comparable_sql(piece)
    return as_number(piece)


def _canonical(parts: Iterable[TypedColumn], *, is_group: bool) -> str:
    columns = [replace(part, sql=part.column) for part in parts]
    return canonical_text(columns, null_is_value=is_group)


def make_plan(
    source: ShardSource,
    opened: Scan,
    no_rows: NoRows = NO_ANSWERS,
    answers: str = "",
) -> Plan:
    """Return the plan of a shard's fragment, with its types, without evaluating it.

    If it has the answer about no rows, that is a SELECT of its own. ``answers`` is the
    relation of a LATERAL sub-query's answers, if they are made already.
    """
    fragment = opened.fragment
    relation, groups = _relation(source, opened)
    if answers:
        relation = answers
    empty_answer = answered = ""
    if no_rows.is_last_row:
        empty_answer = _empty_relation(fragment.subquery or SubQuery(()))
        answered = f"key{answered_key(fragment)}"
    features = [(item.name, item.sql) for item in fragment.features]
    label = [] if fragment.label is None else [("label", fragment.label)]
    numbers = [(str(role), sql) for role, sql in fragment.numbers.items()]
    composites = [
        (f"key{number}", [(f"join key {sql}", sql) for sql in parts])
        for number, parts in enumerate(fragment.keys)
    ]
    composites += [(GROUPS, groups)] if groups else []
    if source.policy.privacy_unit:
        composites.append((UNIT, [("privacy-unit", quote_name(UNIT_OF_ROW))]))
    flat = [*features, *label, *numbers, *chain(*(parts for _, parts in composites))]
    selected = ", ".join(f"{sql} AS c{i}" for i, (_, sql) in enumerate(flat))
    types = column_types(opened.connection, f"SELECT {selected or '0'} FROM {relation}")
    pieces = (
        typed_piece(source, (name, f"c{i}", sql), kind, can_be_vector=i < len(features))
        for i, ((name, sql), kind) in enumerate(zip(flat, types.values(), strict=False))
    )
    return Plan(
        source=source,
        relation=relation,
        features=tuple(_as_value(next(pieces)) for _ in features),
        label=tuple(_as_value(next(pieces)) for _ in label),
        by_role={
            role: _as_number(source, role, next(pieces)) for role in fragment.numbers
        },
        composites={
            name: tuple(next(pieces) for _ in parts) for name, parts in composites
        },
        filters=fragment.filters,
        empty_answer=empty_answer,
        answered=answered,
        null_keys={
            f"key{number}": null_key_sql(fragment.keys[number])
            for number in sorted(no_rows.null_keys)
        },
        null_text=NULL_KEY.format(fragment.table),
    )


def _empty_relation(subquery: SubQuery) -> str:
    """Return the SQL of a sub-query's answer about no rows, with groups if it has."""
    if subquery.cutoffs is None:
        subquery = replace(subquery, columns=(*subquery.columns, *_groups(subquery)))
    return f"({empty_answer_sql(subquery, RELATION)})"


def _groups(subquery: SubQuery) -> list[Feature]:
    """Return what a sub-query groups by, as columns."""
    return [
        Feature(f"{GROUP} {number}", sql) for number, sql in enumerate(subquery.groups)
    ]


def _relation(source: ShardSource, opened: Scan) -> tuple[str, list[tuple[str, str]]]:
    """Return the SQL of what is selected from, and a sub-query's groups by name."""
    subquery = opened.fragment.subquery
    if subquery is None:
        return RELATION, []
    if subquery.cutoffs is not None:
        keys = normal_texts(opened.connection, subquery.groups, RELATION)
        subquery = replace(subquery, groups=keys)
        last = last_rows_sql(opened.connection, subquery, RELATION)
        return f"({last or subquery.to_sql(RELATION)})", []
    if subquery.is_windowed:
        return _windowed_relation(source, subquery), []
    groups = _groups(subquery)
    columns = [*subquery.columns, *groups]
    if source.policy.privacy_unit:
        # a group has the rows of one unit
        columns.append(Feature(UNIT_OF_ROW, f"any_value({quote_name(UNIT_OF_ROW)})"))
    group_names = [(f"group {group.sql}", quote_name(group.name)) for group in groups]
    return (
        f"({replace(subquery, columns=tuple(columns)).to_sql(RELATION)})",
        group_names,
    )


def _windowed_relation(source: ShardSource, subquery: SubQuery) -> str:
    """Return the SQL of a sub-query with windows, whose order has no ties."""
    trees = [piece.parse() for piece in subquery.pieces()]
    relation = windows.with_digests(RELATION, trees)
    subquery = subquery.map(
        lambda piece: render(windows.break_ties(piece.parse()), quote=True, copy=False)
    )
    columns = subquery.columns
    if source.policy.privacy_unit:
        # a row is of the unit that all rows of its windows are of
        columns = (*columns, Feature(UNIT_OF_ROW, quote_name(UNIT_OF_ROW)))
    return f"({replace(subquery, columns=columns).to_sql(relation)})"


def _as_value(piece: TypedColumn) -> TypedColumn:
    """Return a feature or label; a UUID is a category like any text."""
    if piece.kind == "uuid":
        return replace(piece, kind="text")
    return piece


_CAST: Final = "it must be a number: CAST it"
_HOW: Final = {Role.EVENT: "write a condition, such as status = 'died' AS event"}
"""What to write in place of an expression that is no number."""


def _as_number(source: ShardSource, role: Role, piece: TypedColumn) -> TypedColumn:
    """Return the column of a weight, say; refuse what is no number.

    Texts of strata, which are only compared, are numbers of 52 bits of their hash, the
    same at all shards.
    """
    if role is Role.STRATA and piece.kind in ("text", "uuid"):
        text = comparable_sql(replace(piece, kind="text"))
        hashed = f"(CAST(md5_number_lower({text}) >> 12 AS DOUBLE))"
        return replace(piece, sql=hashed, type="DOUBLE", kind="number")
    kinds = {"number"} if role in (Role.OFFSET, Role.ENTRY) else {"number", "boolean"}
    if piece.kind not in kinds:
        kind_text = drop_enum_values(piece.type)
        raise SourceError(
            f"{source}: the {role} is of type {kind_text}; {_HOW.get(role, _CAST)}"
        )
    return piece


def _usable_form(duckdb_type: str, sql: str) -> str:
    """Return what makes a number or a text of a value whose type has no kind."""
    text = f"CAST({sql} AS VARCHAR) is a text"
    if duckdb_type.startswith("TIME"):
        return (
            f"EPOCH({sql}) is a number, the seconds since midnight, as is HOUR({sql}); "
            f"{text}"
        )
    if duckdb_type == "INTERVAL":
        return f"EPOCH({sql}) is a number, of seconds; {text}"
    if duckdb_type in ("UHUGEINT", "BIGNUM", "BIT"):
        return f"CAST({sql} AS DOUBLE) is a number; {text}"
    if duckdb_type.endswith("]"):
        return f"LENGTH({sql}) is a number; {text}"
    return text


def typed_piece(
    source: ShardSource,
    spelled: tuple[str, str, str],
    duckdb_type: str,
    *,
    can_be_vector: bool,
) -> TypedColumn:
    """Return a piece from its name, column and SQL; refuse types without a kind."""
    name, column, sql = spelled
    kind = kind_of(duckdb_type)
    if kind is None or (kind == "vector" and not can_be_vector):
        raise SourceError(
            f"{source}: {name!r} is of type {drop_enum_values(duckdb_type)}, which "
            f"cannot be used: {_usable_form(duckdb_type, sql)}, or leave it out, of a "
            "star with EXCLUDE"
        )
    return TypedColumn(f"({sql})", duckdb_type, kind, name, column)
