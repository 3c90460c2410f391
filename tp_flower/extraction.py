"""Run a query's fragment on a shard: join keys, label and feature columns.

DuckDB evaluates the fragment's expressions once, into a table in the shard's own row
order; distinct values are then numbered, and hashed, once each. No Python object is
made per row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import duckdb
import numpy as np

from tp_flower.canonical import (
    TypedColumn,
    as_number,
    canonical_text,
    comparable,
    hash_expression,
    kind_of,
)
from tp_flower.columns import (
    CategoricalColumn,
    CodeArray,
    FeatureColumn,
    FloatArray,
    NumericColumn,
)
from tp_flower.engine_errors import safe_message
from tp_flower.errors import SourceError
from tp_flower.extracted import ExtractedShard, KeyColumn, LabelColumn
from tp_flower.fragment import Fragment
from tp_flower.sources import ShardSource, column_types, scan

__all__ = [
    "ExtractedShard",
    "KeyColumn",
    "LabelColumn",
    "extract",
    "hash_expression",
]

_NONE: Final = -1  # the code of a missing value


@dataclass(frozen=True)
class _Piece:
    """One expression of a fragment and the column of table ``extracted`` it fills."""

    name: str
    column: str
    value: TypedColumn

    @property
    def stored(self) -> TypedColumn:
        """The column of ``extracted``, as a value."""
        return TypedColumn(self.column, self.value.type, self.value.kind)

    @property
    def is_text(self) -> bool:
        return self.value.kind == "text"


@dataclass(frozen=True)
class _Plan:
    """All expressions of a fragment."""

    keys: tuple[tuple[_Piece, ...], ...]
    features: tuple[_Piece, ...]
    label: tuple[_Piece, ...]

    @property
    def key_parts(self) -> tuple[_Piece, ...]:
        """The parts of all keys."""
        return tuple(part for parts in self.keys for part in parts)

    @property
    def values(self) -> tuple[_Piece, ...]:
        """Features and label."""
        return (*self.features, *self.label)


def extract(source: ShardSource, fragment: Fragment) -> ExtractedShard:
    """Run a fragment on a shard.

    Rows come in the shard's own order, so that their position names them in every run.

    Raises:
        QueryError: the fragment is not what a site may run, or names a column that the
            shard does not have.
        SourceError: the source cannot be read, an expression fails on its values or is
            of a type that cannot be used, or a feature or label is infinite.
    """
    with scan(source, fragment) as opened:
        connection, fragment = opened.connection, opened.fragment
        plan = _plan(connection, source, fragment)
        rows = _evaluate(connection, source, plan, fragment.filters)
        numbers = _numbers(connection, source, plan.values)
        return ExtractedShard(
            table=fragment.table,
            rows=rows,
            keys=tuple(_key(connection, key, rows) for key in plan.keys),
            label=_label(connection, plan, numbers, rows),
            columns={
                piece.name: _feature(connection, piece, numbers, rows)
                for piece in plan.features
            },
        )


def _plan(
    connection: duckdb.DuckDBPyConnection, source: ShardSource, fragment: Fragment
) -> _Plan:
    """Find the type of each expression; none is evaluated yet."""
    features = [(item.name, item.sql) for item in fragment.features]
    label = [] if fragment.label is None else [("label", fragment.label)]
    keys = [[(f"join key {sql}", sql) for sql in parts] for parts in fragment.keys]
    flat = [*features, *label, *(part for parts in keys for part in parts)]
    selected = ", ".join(f"{sql} AS c{i}" for i, (_, sql) in enumerate(flat))
    types = column_types(connection, f"SELECT {selected or '0'} FROM shard").values()
    pieces = iter(
        [
            _piece(source, name, f"c{i}", sql, duckdb_type)
            for i, ((name, sql), duckdb_type) in enumerate(
                zip(flat, types, strict=False)
            )
        ]
    )
    return _Plan(
        features=tuple(next(pieces) for _ in features),
        label=tuple(next(pieces) for _ in label),
        keys=tuple(tuple(next(pieces) for _ in parts) for parts in keys),
    )


def _piece(
    source: ShardSource, name: str, column: str, sql: str, duckdb_type: str
) -> _Piece:
    kind = kind_of(duckdb_type)
    if kind is None:
        raise SourceError(
            f"{source}: {name!r} is of type {duckdb_type}, which cannot be used: "
            "CAST it to a number, a text, a date, a timestamp or a boolean"
        )
    return _Piece(name, column, TypedColumn(f"({sql})", duckdb_type, kind))


def _evaluate(
    connection: duckdb.DuckDBPyConnection,
    source: ShardSource,
    plan: _Plan,
    filters: Iterable[str],
) -> int:
    """Fill the table ``extracted``; return its number of rows."""
    selected = [
        f"{comparable(piece.value)} AS {piece.column}" for piece in plan.key_parts
    ] + [
        f"{comparable(v.value) if v.is_text else as_number(v.value)} AS {v.column}"
        for v in plan.values
    ]
    where = " AND ".join(f"({condition})" for condition in filters) or "true"
    try:
        connection.execute(
            f"CREATE TEMP TABLE extracted AS "
            f"SELECT {', '.join(selected) or '0 AS nothing'} FROM shard WHERE {where}"
        )
    except duckdb.Error as error:
        raise _failed_piece(connection, source, plan, filters) or error from None
    return int(connection.execute("SELECT count(*) FROM extracted").fetchall()[0][0])


def _failed_piece(
    connection: duckdb.DuckDBPyConnection,
    source: ShardSource,
    plan: _Plan,
    filters: Iterable[str],
) -> SourceError | None:
    """Return which expression fails on the shard's values, without quoting them."""
    where = " AND ".join(f"({condition})" for condition in filters) or "true"
    pieces = [("a filter", condition, "true") for condition in filters]
    pieces += [
        (repr(piece.name), piece.value.sql[1:-1], where)
        for piece in (*plan.key_parts, *plan.values)
    ]
    for name, sql, rows in pieces:
        try:
            connection.execute(
                f"SELECT count(CAST({sql} AS VARCHAR)) FROM shard WHERE {rows}"
            ).fetchall()
        except duckdb.Error as error:
            return SourceError(
                f"{source}: {name}, {sql}, fails on some value: {safe_message(error)}"
            )
    return None


def _numbers(
    connection: duckdb.DuckDBPyConnection, source: ShardSource, pieces: Sequence[_Piece]
) -> dict[str, FloatArray]:
    """The values that are not text, by column; refuse infinite ones."""
    numeric = [piece for piece in pieces if not piece.is_text]
    if not numeric:
        return {}
    selected = ", ".join(piece.column for piece in numeric)
    numbers = connection.execute(f"SELECT {selected} FROM extracted").fetchnumpy()
    for piece in numeric:
        if np.isinf(numbers[piece.column]).any():
            raise SourceError(
                f"{source}: {piece.name!r} has infinite values: "
                f"filter them out or replace them in the query"
            )
    return numbers


def _feature(
    connection: duckdb.DuckDBPyConnection,
    piece: _Piece,
    numbers: dict[str, FloatArray],
    rows: int,
) -> FeatureColumn:
    if not piece.is_text:
        return NumericColumn(numbers[piece.column])
    return _categories(connection, piece, rows)


def _label(
    connection: duckdb.DuckDBPyConnection,
    plan: _Plan,
    numbers: dict[str, FloatArray],
    rows: int,
) -> LabelColumn | None:
    for piece in plan.label:
        if not piece.is_text:
            return LabelColumn(piece.value.kind, numbers[piece.column])
        texts = _categories(connection, piece, rows)
        values = np.where(texts.codes < 0, np.nan, texts.codes)
        return LabelColumn("text", values, texts.categories)
    return None


def _categories(
    connection: duckdb.DuckDBPyConnection, piece: _Piece, rows: int
) -> CategoricalColumn:
    """Number the distinct texts in the order of their code points."""
    column = piece.column
    connection.execute(
        f"CREATE TEMP TABLE distinct_{column} AS "
        f"SELECT {column}, row_number() OVER (ORDER BY {column}) - 1 AS code "
        f"FROM (SELECT DISTINCT {column} FROM extracted WHERE {column} IS NOT NULL)"
    )
    names = connection.execute(
        f"SELECT {column} FROM distinct_{column} ORDER BY code"
    ).fetchall()
    codes = _codes(connection, f"distinct_{column}", [column], rows)
    return CategoricalColumn(codes, tuple(name for (name,) in names))


def _key(
    connection: duckdb.DuckDBPyConnection, parts: Sequence[_Piece], rows: int
) -> KeyColumn:
    """Number the distinct values of a key in the order of their hashes."""
    columns = [part.column for part in parts]
    listed = ", ".join(columns)
    table = f"distinct_{'_'.join(columns)}"
    first, second = hash_expression(canonical_text([part.stored for part in parts]))
    present = " AND ".join(f"{column} IS NOT NULL" for column in columns)
    connection.execute(
        f"CREATE TEMP TABLE {table} AS SELECT *, "
        "row_number() OVER (ORDER BY first_half, second_half) - 1 AS code "
        f"FROM (SELECT {listed}, {first} AS first_half, {second} AS second_half "
        f"FROM (SELECT DISTINCT {listed} FROM extracted WHERE {present}))"
    )
    halves = connection.execute(
        f"SELECT first_half, second_half FROM {table} ORDER BY code"
    ).fetchnumpy()
    return KeyColumn(
        codes=_codes(connection, table, columns, rows),
        hashes=np.column_stack([halves["first_half"], halves["second_half"]]),
        kind="+".join(part.value.kind for part in parts),
    )


def _codes(
    connection: duckdb.DuckDBPyConnection, table: str, columns: Sequence[str], rows: int
) -> CodeArray:
    """The code of each row of ``extracted`` by its values in these columns."""
    found = connection.execute(
        "SELECT extracted.rowid AS position, CAST(code AS INTEGER) AS code "
        f"FROM extracted JOIN {table} USING ({', '.join(columns)})"
    ).fetchnumpy()
    codes = np.full(rows, _NONE, dtype=np.int32)
    codes[found["position"]] = found["code"]  # a join keeps no order
    return codes
