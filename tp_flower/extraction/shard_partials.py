"""The partial answers of one shard, as another shard of its table merges them.

They travel by keyed hash of the key, cutoff and partial column
(:class:`KeyedPartials`). The shard that merges finds its own keys among the hashes.

*Notation*

    n   pairs of a key and a cutoff
    m   partial columns (:mod:`tp_flower.extraction.partials`)
    k   distinct keys of the sub-query's table
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tp_flower.arrays import BoolArray
from tp_flower.duckdb_engine import quote_name, shared_cursor
from tp_flower.errors import QueryError, SourceError
from tp_flower.extraction.last_rows import last_rows_sql
from tp_flower.extraction.pairs import fetch_pairs, register_pairs
from tp_flower.extraction.partials import PartialPlan, partial_plan
from tp_flower.extraction.sealed_pairs import (
    ARROW_TYPES,
    MOST_PAIRS,
    TEXT,
    KeyedPairs,
    key_texts,
    opened_shard,
)
from tp_flower.extraction.select_plan import RELATION, kind_of, normal_texts
from tp_flower.keyed_hash import HashArray, KeyedHasher
from tp_flower.query.cutoffs import CUTOFF, PAIRS
from tp_flower.query.fragment import Fragment, SubQuery
from tp_flower.sources.shards import ShardSource, column_types

_TEXT: Final = "VARCHAR"
_BOOLEAN: Final = "BOOLEAN"
Words = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ShardPartials:
    """What the rows of one shard are for each pair.

    Attributes:
        plan: of the partial columns.
        rows: the pairs, their keys' canonical texts, and the partial columns, (n,).
        cutoff: the type of the cutoffs.
        types: those of the partial columns, in DuckDB's words.
    """

    plan: PartialPlan
    rows: pa.Table
    cutoff: str
    types: tuple[str, ...]

    def of_keys(self, texts: pa.Array) -> "ShardPartials":
        """Return the rows of some keys, by their canonical texts."""
        is_among = pc.is_in(self.rows[TEXT], value_set=texts)
        return replace(self, rows=self.rows.filter(is_among))


@dataclass(frozen=True, eq=False)
class KeyedPartials:
    """Partial answers that another shard merges.

    Attributes:
        pairs: their keys, hashed, and cutoffs.
        types: of the partial columns, in DuckDB's words.
        words: int64 (n, m), values: whole numbers and times, the bits of others, and of
            texts their position in ``texts``.
        present: bool (n, m), which of them are not NULL.
    """

    pairs: KeyedPairs
    types: tuple[str, ...]
    words: Words
    present: BoolArray
    texts: tuple[str, ...]

    def check(self, columns: int) -> "KeyedPartials":
        """Return answers from another site; QueryError for others than sites make."""
        self.pairs.check()
        shape = (len(self.pairs.cutoffs), columns)
        if len(self.types) != columns or self.words.shape != shape:
            raise QueryError(f"they have other columns than the {columns} of the query")
        for of in self.types:
            if not _travels(of):
                raise QueryError(f"a column is of type {of}")
        is_text = np.array([of == _TEXT for of in self.types])
        positions = self.words[self.present & is_text]
        if ((positions < 0) | (positions >= len(self.texts))).any():
            raise QueryError("a text is none of those beside it")
        return self

    def columns(self) -> list[pa.Array]:
        """Return the partial columns as values, (m,) of (n,)."""
        return [
            _values(of, self.words[:, number], self.present[:, number], self.texts)
            for number, of in enumerate(self.types)
        ]


def read_partials(
    source: ShardSource,
    fragment: Fragment,
    names: Sequence[str],
    pairs: pa.Table | None,
    order_key: bytes,
) -> ShardPartials:
    """Return the partial answers of a shard, without those of empty windows on a grid.

    ``names`` are the columns of the pairs in the order in which the join compares them.
    The ``pairs`` are those of other sites, or None for those of a grid.
    """
    with opened_shard(source, fragment, order_key) as opened:
        subquery = opened.fragment.subquery or SubQuery(())
        # with a sub-query there is one step
        list(opened.chunks())
        keys = normal_texts(opened.connection, subquery.groups, RELATION)
        plan = partial_plan(replace(subquery, groups=keys), fragment.table)
        if pairs is not None:
            register_pairs(opened.connection, PAIRS, pairs)
        last = last_rows_sql(opened.connection, plan.subquery, RELATION)
        relation = f"({last or plan.subquery.to_sql(RELATION)})"
        types = column_types(opened.connection, f"SELECT * FROM {relation}")
        kinds = tuple(types[name] for name in plan.names)
        items = [*map(quote_name, subquery.pair_names)]
        compared = {name: types[name] for name in names if name != CUTOFF}
        items.append(f"{key_texts(source, compared)} AS {quote_name(TEXT)}")
        for name, of in zip(plan.names, kinds, strict=True):
            if not _travels(of):
                raise SourceError(
                    f"{source}: {_column_of(plan, name)} is of type {of}, which other "
                    "shards of the table cannot be sent (sealed-partials): write a "
                    "number, a text, a date or a time, as EPOCH(x) of an interval"
                )
            is_exact = of in (_TEXT, _BOOLEAN, *ARROW_TYPES)
            items.append(name if is_exact else f"CAST({name} AS DOUBLE) AS {name}")
        select = f"SELECT {', '.join(items)} FROM {relation}"
        rows = fetch_pairs(opened.connection, select)
    return ShardPartials(plan, rows, types[CUTOFF], kinds)


def hash_partials(
    partials: ShardPartials, kinds: str, hasher: KeyedHasher
) -> KeyedPartials:
    """Return partial answers with hashes in place of keys, in the order of these.

    QueryError for too many of them.
    """
    rows = partials.rows
    names = partials.plan.names
    if len(rows) > MOST_PAIRS:
        raise QueryError(f"more than {MOST_PAIRS} partial answers are not sealed")
    texts = rows[TEXT].combine_chunks().dictionary_encode()
    hashes = hasher.tag_texts(texts.dictionary)[texts.indices.to_numpy()]
    cutoffs = _whole(rows[CUTOFF])
    order = np.lexsort((cutoffs, hashes[:, 1], hashes[:, 0]))
    found: dict[str, int] = {}
    words = np.zeros((len(rows), len(names)), np.int64)
    present = np.zeros((len(rows), len(names)), np.bool_)
    for number, (name, of) in enumerate(zip(names, partials.types, strict=True)):
        column = rows[name]
        present[:, number] = column.is_valid().to_numpy()
        words[:, number] = _words(of, column, found)
    pairs = KeyedPairs(
        np.ascontiguousarray(hashes[order]), cutoffs[order], partials.cutoff, kinds
    )
    return KeyedPartials(
        pairs, partials.types, words[order], present[order], tuple(found)
    )


def merge_partials(
    table: str,
    own: ShardPartials,
    own_keys: pa.Table,
    others: Sequence[tuple[KeyedPartials, KeyedHasher]],
) -> pa.Table:
    """Return the answers over the rows of several shards, as pairs with their answers.

    Args:
        table: the alias of the sub-query.
        own: the partial answers of this shard's rows to the keys that it merges.
        own_keys: these keys with their canonical texts, (k,).
        others: partial answers of other shards, and the hash of their keys.

    Raises:
        QueryError: another shard answers about a key that is none of these, or its
            columns differ in type.
    """
    plan = own.plan
    names = [name for name in plan.subquery.pair_names if name != CUTOFF]
    with closing(shared_cursor()) as cursor:
        register_pairs(cursor, "shard_0", own.rows)
        selects = [_typed_rows("shard_0", plan, own.types)]
        for number, (keyed, hasher) in enumerate(others, 1):
            _check_kinds(plan, table, own.types, keyed.types)
            places = _places(hasher.tag_texts(own_keys[TEXT]), keyed.pairs.hashes)
            columns = {name: own_keys[name].take(places) for name in names}
            columns[CUTOFF] = keyed.pairs.times()
            columns |= dict(zip(plan.names, keyed.columns(), strict=True))
            rows = pa.table(columns, metadata=own_keys.schema.metadata)
            register_pairs(cursor, f"shard_{number}", rows)
            selects.append(_typed_rows(f"shard_{number}", plan, keyed.types))
        return fetch_pairs(cursor, plan.merged_sql(f"({' UNION ALL '.join(selects)})"))


def _typed_rows(relation: str, plan: PartialPlan, types: Sequence[str]) -> str:
    """Return the SELECT of a shard's rows, each column of the type that it had."""
    items = [*map(quote_name, plan.subquery.pair_names)]
    pairs = zip(plan.names, types, strict=True)
    items += [f"CAST({name} AS {of}) AS {name}" for name, of in pairs]
    return f"SELECT {', '.join(items)} FROM {relation}"


def _check_kinds(
    plan: PartialPlan, table: str, own: Sequence[str], others: Sequence[str]
) -> None:
    """Refuse partial columns that are no values of one kind."""
    for name, of, other in zip(plan.names, own, others, strict=True):
        if kind_of(of) != kind_of(other):
            raise QueryError(
                f"{_column_of(plan, name)} of sub-query {table!r} is of type {of} in "
                f"one shard and {other} in another: CAST it in the query"
            )


def _column_of(plan: PartialPlan, name: str) -> str:
    return next(c.sql for c in plan.subquery.columns if c.name == name)


def are_among(hashes: HashArray, others: HashArray) -> BoolArray:
    """Return which of some hashes (k, 2) are among others, (k,)."""
    one, other = (_as_items(each) for each in (hashes, others))
    return np.isin(one, other)


def _as_items(hashes: HashArray) -> npt.NDArray[np.void]:
    """Return hashes (n, 2) as items that compare, (n,)."""
    contiguous = np.ascontiguousarray(hashes, np.uint64)
    return contiguous.view([("high", np.uint64), ("low", np.uint64)])[:, 0]


def _places(own: HashArray, hashes: HashArray) -> npt.NDArray[np.int64]:
    """Return which of the own hashes (k, 2) each of some others (n, 2) is, (n,)."""
    own_keys, keys = (_as_items(each) for each in (own, hashes))
    order = np.argsort(own_keys)
    places = np.searchsorted(own_keys[order], keys)
    found = order[np.minimum(places, len(order) - 1)] if len(order) else places
    if len(keys) and not (len(order) and (own_keys[found] == keys).all()):
        raise QueryError("they are about other keys than this shard has told it")
    return found


def _travels(of: str) -> bool:
    """Return whether values of a type are sent to another shard."""
    return of == _TEXT or of in ARROW_TYPES or kind_of(of) in ("number", "boolean")


def _whole(column: pa.ChunkedArray) -> Words:
    """Return whole numbers, or times as such, NULL as 0, (n,)."""
    values = column.combine_chunks()
    if pa.types.is_date(values.type):
        values = values.cast(pa.int32())
    numbers: Words = values.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return numbers


def _words(of: str, column: pa.ChunkedArray, texts: dict[str, int]) -> Words:
    """Return the values of a partial column as words, (n,); new texts are added."""
    if of == _TEXT:
        encoded = column.combine_chunks().dictionary_encode()
        places = [
            texts.setdefault(t, len(texts)) for t in encoded.dictionary.to_pylist()
        ]
        positions = np.array([*places, 0], np.int64)
        found: Words = positions[encoded.indices.fill_null(len(places)).to_numpy()]
        return found
    if of in ARROW_TYPES or of == _BOOLEAN:
        return _whole(column)
    numbers = column.combine_chunks().fill_null(0.0).to_numpy(zero_copy_only=False)
    bits: Words = numbers.astype(np.float64).view(np.int64)
    return bits


def _values(
    of: str, words: Words, present: BoolArray, texts: Sequence[str]
) -> pa.Array:
    """Return a partial column as values of a type, (n,)."""
    mask = ~present
    if of == _TEXT:
        listed = pa.array([*texts], pa.string())
        return listed.take(pa.array(np.where(present, words, 0), mask=mask))
    if of == _BOOLEAN:
        return pa.array(words != 0, mask=mask)
    if of not in ARROW_TYPES:
        return pa.array(np.ascontiguousarray(words).view(np.float64), mask=mask)
    kind = ARROW_TYPES[of]
    numbers = pa.array(np.where(present, words, 0), mask=mask)
    try:
        if pa.types.is_date(kind):
            numbers = numbers.cast(pa.int32())
        return numbers.cast(kind)
    except pa.ArrowInvalid:
        raise QueryError(f"a value is none of type {of}") from None
