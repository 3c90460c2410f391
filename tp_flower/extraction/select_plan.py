"""The SELECT that evaluates a fragment on a shard.

Every expression of a fragment is a *piece*: a feature, the label, or a part of a key.
Numbers become DOUBLE, texts their normal form, and the parts of a key one canonical
text.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import duckdb

from tp_flower.duckdb_engine import quote_name, safe_message
from tp_flower.errors import SourceError
from tp_flower.extraction.canonical_keys import (
    TypedColumn,
    as_number,
    as_vector,
    canonical_text,
    comparable,
    kind_of,
    vector_width,
    without_values,
)
from tp_flower.query.fragment import Feature
from tp_flower.sources.shards import Scan, column_types
from tp_flower.sources.tables_file import ShardSource

RELATION: Final = "shard"
GROUPS: Final = "grouped_by"
"""Column of the canonical text of what a sub-query groups by."""
GROUP: Final = "(group)"
"""Begins the names of what a sub-query groups by: no name of a query does."""


@dataclass(frozen=True)
class Piece:
    """One expression of a fragment: a feature, the label, or a part of a key.

    ``column`` is its column in the inner SELECT of :attr:`Plan.select`.
    """

    name: str
    column: str
    value: TypedColumn

    @property
    def kind(self) -> str:
        """The kind of value."""
        return self.value.kind

    @property
    def width(self) -> int | None:
        """Length of the values if they are vectors of a type that says so."""
        return vector_width(self.value.type)

    @property
    def inner(self) -> str:
        """The value as the inner SELECT yields it."""
        if self.kind == "vector":
            return as_vector(self.value)
        return comparable(self.value) if self.kind == "text" else as_number(self.value)


@dataclass(frozen=True)
class Plan:
    """All expressions of a fragment, and the SELECT of them over a relation.

    There is one piece for each feature and part of a key, at most one label and weight;
    without a sub-query there are no groups.
    """

    source: ShardSource
    relation: str
    features: tuple[Piece, ...]
    label: tuple[Piece, ...]
    weight: tuple[Piece, ...]
    keys: tuple[tuple[Piece, ...], ...]
    groups: tuple[Piece, ...]
    filters: tuple[str, ...]

    @property
    def values(self) -> tuple[Piece, ...]:
        """Features, label and weight."""
        return (*self.features, *self.label, *self.weight)

    @property
    def parts(self) -> tuple[Piece, ...]:
        """The parts of all keys, and of the groups."""
        return (*(part for key in self.keys for part in key), *self.groups)

    @property
    def numbers(self) -> tuple[Piece, ...]:
        """Features, label and weight that are neither texts nor vectors."""
        return self._of_kinds("number", "boolean", "time")

    @property
    def texts(self) -> tuple[Piece, ...]:
        """Features and label that are texts."""
        return self._of_kinds("text")

    @property
    def vectors(self) -> tuple[Piece, ...]:
        """Features that are vectors."""
        return self._of_kinds("vector")

    def _of_kinds(self, *kinds: str) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.values if piece.kind in kinds)

    @property
    def key_kinds(self) -> dict[str, str]:
        """The kinds of the parts of each key and of the groups, by column."""
        return {
            column: "+".join(part.kind for part in parts)
            for column, parts in self._composites.items()
        }

    @property
    def listed(self) -> tuple[str, ...]:
        """The columns of texts: features and label, keys, groups."""
        return (*(piece.column for piece in self.texts), *self._composites)

    @property
    def _composites(self) -> dict[str, tuple[Piece, ...]]:
        """The parts of each key and of the groups, by column."""
        keys = {f"key{number}": parts for number, parts in enumerate(self.keys)}
        return {**keys, GROUPS: self.groups} if self.groups else keys

    @property
    def select(self) -> str:
        """The SELECT: numbers, texts, the canonical texts of keys, then vectors."""
        inner = [f"{piece.inner} AS {piece.column}" for piece in self.values]
        inner += [f"{comparable(p.value)} AS {p.column}" for p in self.parts]
        outer = [piece.column for piece in (*self.numbers, *self.texts)]
        outer += [
            f"{_canonical(parts, is_group=column == GROUPS)} AS {column}"
            for column, parts in self._composites.items()
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
        """Return which expression fails on the shard's values, without quoting them."""
        pieces = [("a filter", condition, "") for condition in self.filters]
        pieces += [
            (repr(piece.name), piece.value.sql[1:-1], self._where)
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


def _canonical(parts: Iterable[Piece], *, is_group: bool) -> str:
    columns = [TypedColumn(p.column, p.value.type, p.value.kind) for p in parts]
    return canonical_text(columns, null_is_value=is_group)


def make_plan(source: ShardSource, opened: Scan) -> Plan:
    """Return the plan of a shard's fragment; find the types, evaluate nothing."""
    fragment, (relation, groups) = opened.fragment, _relation(opened)
    features = [(item.name, item.sql) for item in fragment.features]
    label = [] if fragment.label is None else [("label", fragment.label)]
    weight = [] if fragment.weight is None else [("weight", fragment.weight)]
    keys = [[(f"join key {sql}", sql) for sql in parts] for parts in fragment.keys]
    parts = [part for parts in keys for part in parts]
    flat = [*features, *label, *weight, *parts, *groups]
    selected = ", ".join(f"{sql} AS c{i}" for i, (_, sql) in enumerate(flat))
    select = f"SELECT {selected or '0'} FROM {relation}"
    types = column_types(opened.connection, select)
    pieces = iter(
        [
            _piece(source, (name, f"c{i}", sql), kind, can_be_vector=i < len(features))
            for i, ((name, sql), kind) in enumerate(
                zip(flat, types.values(), strict=False)
            )
        ]
    )
    return Plan(
        source=source,
        relation=relation,
        features=tuple(next(pieces) for _ in features),
        label=tuple(next(pieces) for _ in label),
        weight=tuple(_as_weight(source, next(pieces)) for _ in weight),
        keys=tuple(tuple(next(pieces) for _ in parts) for parts in keys),
        groups=tuple(next(pieces) for _ in groups),
        filters=fragment.filters,
    )


def _relation(opened: Scan) -> tuple[str, list[tuple[str, str]]]:
    """Return the relation of the fragment, and the name and SQL of each group."""
    subquery = opened.fragment.subquery
    if subquery is None:
        return RELATION, []
    groups = [
        Feature(f"{GROUP} {number}", sql) for number, sql in enumerate(subquery.groups)
    ]
    whole = replace(subquery, columns=(*subquery.columns, *groups))
    named = [(f"group {group.sql}", quote_name(group.name)) for group in groups]
    return f"({whole.to_sql(RELATION)})", named


def _as_weight(source: ShardSource, piece: Piece) -> Piece:
    if piece.kind not in ("number", "boolean"):
        kind_text = without_values(piece.value.type)
        raise SourceError(
            f"{source}: the weight is of type {kind_text}; it must be a number: CAST it"
        )
    return piece


def _piece(
    source: ShardSource,
    spelled: tuple[str, str, str],
    duckdb_type: str,
    *,
    can_be_vector: bool,
) -> Piece:
    name, column, sql = spelled
    kind = kind_of(duckdb_type)
    if kind is None or (kind == "vector" and not can_be_vector):
        kind_text = without_values(duckdb_type)
        raise SourceError(
            f"{source}: {name!r} is of type {kind_text}, which cannot be used: "
            "CAST it to a number, a text, a date, a timestamp or a boolean"
        )
    return Piece(name, column, TypedColumn(f"({sql})", duckdb_type, kind))
