"""Keys and cutoffs of a table's rows, for a LATERAL sub-query at another site.

The site of the table around hashes its keys (:class:`KeyedPairs`). The sub-query's site
finds its own keys among the hashes, and answers for these: a key of which it has no row
has no answer.

*Notation*

    n   distinct pairs of a key and a cutoff
    k   distinct keys of the sub-query's table
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tp_flower.duckdb_engine import quote_name, safe_message
from tp_flower.errors import QueryError, SourceError
from tp_flower.extraction.pairs import fetch_pairs
from tp_flower.extraction.select_plan import (
    PLAIN,
    RELATION,
    TypedColumn,
    canonical_text,
    canonical_texts,
    comparable_sql,
    make_plan,
    normal_texts,
    typed_piece,
)
from tp_flower.extraction.time_limit import TimeLimit
from tp_flower.extraction.unit_rows import scan_drawn_rows
from tp_flower.keyed_hash import HashArray, KeyedHasher, order_of_hashes
from tp_flower.query.cutoffs import CUTOFF, SEALED_TYPES, key_column
from tp_flower.query.fragment import Fragment, SubQuery, where_sql
from tp_flower.sources.shards import Scan, ShardSource, column_types

MOST_PAIRS: Final = 4_000_000
"""The pairs of one sub-query, 24 bytes each; DuckDB answers them one by one."""

TEXT: Final = "(text)"
"""The column of a key's canonical text, in no query's names."""

ARROW_TYPES: Final[Mapping[str, pa.DataType]] = dict(
    zip(
        SEALED_TYPES,
        (
            *(pa.date32(), pa.timestamp("us"), pa.timestamp("s"), pa.timestamp("ms")),
            *(pa.timestamp("ns"), pa.timestamp("us", tz="UTC")),
            *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
            *(pa.uint8(), pa.uint16(), pa.uint32()),
        ),
        strict=True,
    )
)


@dataclass(frozen=True, eq=False)
class KeyedPairs:
    """Distinct pairs of a key and a cutoff, in the order of the hashes.

    Attributes:
        hashes: uint64 (n, 2), keyed hashes of the keys.
        cutoffs: int64 (n,), days or fractions of a second since 1970, or numbers.
        type: of the cutoffs, in DuckDB's words.
        kinds: of the keys' values, such as "number+text".
    """

    hashes: HashArray
    cutoffs: npt.NDArray[np.int64]
    type: str
    kinds: str = ""

    def check(self) -> "KeyedPairs":
        """Return pairs from another site; QueryError for others than sites make."""
        if len(self.cutoffs) > MOST_PAIRS:
            raise QueryError(f"there are more than {MOST_PAIRS} of them")
        columns = (*self.hashes.T, self.cutoffs)
        is_later = np.zeros(max(len(self.cutoffs) - 1, 0), bool)
        for column in columns[::-1]:
            before, after = column[:-1], column[1:]
            is_later = (after > before) | ((after == before) & is_later)
        if not is_later.all():
            raise QueryError("they are not distinct, or not sorted")
        self.times()
        return self

    def times(self) -> pa.Array:
        """Return the cutoffs as values of their type, (n,)."""
        kind = ARROW_TYPES[self.type]
        try:
            numbers = pa.array(self.cutoffs)
            return (
                numbers.cast(pa.int32()) if pa.types.is_date(kind) else numbers
            ).cast(kind)
        except pa.ArrowInvalid:
            raise QueryError(f"a cutoff is no value of type {self.type}") from None


def read_key_texts(
    source: ShardSource, fragment: Fragment, key: int, cutoff: int, order_key: bytes
) -> tuple[pa.Table, str, str]:
    """Return the distinct pairs of a shard's join key, and the types of both.

    They are the type of the cutoffs, and the kinds of the keys' values. ``cutoff`` is
    the position of the cutoff among the key's parts; the others are one canonical text.
    Pairs with a NULL match nothing, and are left out.
    """
    names = [key_column(number) for number in range(len(fragment.keys[key]))]
    names[cutoff] = CUTOFF
    tables = []
    kind = kinds = ""
    with opened_shard(source, fragment, order_key) as opened:
        plan = make_plan(source, opened)
        # what was checked, not what has arrived
        parts = zip(opened.fragment.keys[key], names, strict=True)
        items = ", ".join(f"{sql} AS {quote_name(name)}" for sql, name in parts)
        distinct = f"SELECT DISTINCT {items} FROM {plan.rows}"
        for _ in opened.chunks():
            types = column_types(opened.connection, distinct)
            kind = types.pop(CUTOFF)
            if kind not in SEALED_TYPES:
                raise SourceError(
                    f"{source}: a cutoff of type {kind} cannot be sealed for a LATERAL "
                    f"sub-query; the types that can are {', '.join(SEALED_TYPES)}"
                )
            keys = _key_pieces(source, types)
            kinds = _kinds_of(keys)
            select = _select_texts(distinct, keys, (CUTOFF,))
            tables.append(_fetch_texts(opened.connection, select, keys))
    return pa.concat_tables(tables), kind, kinds


def hash_pairs(
    pairs: pa.Table, kind: str, kinds: str, hasher: KeyedHasher
) -> KeyedPairs:
    """Return pairs with hashes in place of texts; QueryError for too many of them."""
    texts = pairs[TEXT].combine_chunks().dictionary_encode()
    hashes = hasher.tag_texts(texts.dictionary)
    by_hash = order_of_hashes(hashes)
    ranks = np.empty(len(by_hash), np.int64)
    ranks[by_hash] = np.arange(len(by_hash))
    values = pairs[CUTOFF].combine_chunks()
    if kind == "DATE":
        values = values.cast(pa.int32())
    cutoffs, cutoff_of = np.unique(values.cast(pa.int64()), return_inverse=True)
    rank_of = ranks[texts.indices.to_numpy()]
    numbers = np.sort(rank_of * len(cutoffs) + cutoff_of)
    # several values may have one text, and steps of a large shard pairs in common
    numbers = numbers[np.diff(numbers, prepend=-1) > 0]
    if len(numbers) > MOST_PAIRS:
        raise QueryError(
            f"more than {MOST_PAIRS} pairs of a key and a cutoff are not sealed: set "
            "cutoff-grid in place of sealed-cutoffs"
        )
    ranks, cutoff_of = np.divmod(numbers, max(len(cutoffs), 1))
    return KeyedPairs(hashes[by_hash[ranks]], cutoffs[cutoff_of], kind, kinds)


def read_own_keys(
    source: ShardSource, fragment: Fragment, names: Sequence[str], order_key: bytes
) -> tuple[pa.Table, str]:
    """Return the distinct keys of a LATERAL sub-query's table, with their texts, (k,).

    Return also the kinds of their values. ``names`` are the columns of its pairs in the
    order in which the join compares them, of which the texts are made on the other
    side, too. A sub-query without keys has one of no values. Of values with one text
    the first is taken.
    """
    with opened_shard(source, fragment, order_key) as opened:
        subquery = opened.fragment.subquery or SubQuery(())
        # with a sub-query there is one step
        list(opened.chunks())
        if not subquery.groups:
            return pa.table({TEXT: [""]}), ""
        normal = normal_texts(opened.connection, subquery.groups, RELATION)
        sources = replace(subquery, groups=normal).sources
        keys = [name for name in names if name != CUTOFF]
        items = ", ".join(f"{sources[name]} AS {quote_name(name)}" for name in keys)
        where = where_sql(subquery.filters_of_rows)
        distinct = f"SELECT DISTINCT {items} FROM {RELATION}{where}"
        types = column_types(opened.connection, distinct)
        pieces = _key_pieces(source, types)
        select = _select_texts(distinct, pieces, types)
        if not all(PLAIN.fullmatch(piece.type) for piece in pieces):
            select = (
                f"SELECT DISTINCT ON ({quote_name(TEXT)}) * FROM ({select}) "
                "ORDER BY ALL"
            )
        return _fetch_texts(opened.connection, select, pieces), _kinds_of(pieces)


def match_pairs(own_keys: pa.Table, pairs: KeyedPairs, hasher: KeyedHasher) -> pa.Table:
    """Return the pairs whose keys are among a table's own, with their values, sorted.

    The pairs are in the order of the hashes, and those of a key in that of the cutoffs.
    """
    names = [name for name in own_keys.column_names if name != TEXT]
    if names:
        own_keys = own_keys.sort_by([(name, "ascending") for name in names])
    hashes = hasher.tag_texts(own_keys[TEXT])
    key_of = pc.index_in(_as_items(pairs.hashes), value_set=_as_items(hashes))
    matched = np.flatnonzero(key_of.is_valid())
    key_of = key_of.drop_null()
    order = np.argsort(key_of, kind="stable")
    key_of = key_of.take(order)
    columns = {name: own_keys[name].take(key_of) for name in names}
    columns[CUTOFF] = pairs.times().take(matched[order])
    return pa.table(columns, metadata=own_keys.schema.metadata)


def _as_items(hashes: HashArray) -> pa.Array:
    """Return hashes (n, 2) as items of 16 bytes, (n,)."""
    content = pa.py_buffer(np.ascontiguousarray(hashes))
    return pa.Array.from_buffers(pa.binary(16), len(hashes), [None, content])


def _key_pieces(source: ShardSource, types: Mapping[str, str]) -> list[TypedColumn]:
    """Return the columns of keys; SourceError for a type without a kind."""
    return [
        typed_piece(source, (name, "", quote_name(name)), kind, can_be_vector=False)
        for name, kind in types.items()
    ]


def _kinds_of(keys: Sequence[TypedColumn]) -> str:
    return "+".join(key.kind for key in keys)


def key_texts(source: ShardSource, types: Mapping[str, str]) -> str:
    """Return the SQL of the canonical text of a key, of columns of some types."""
    return _text_of(_key_pieces(source, types))


def _text_of(pieces: Sequence[TypedColumn]) -> str:
    values = [replace(piece, sql=f"({comparable_sql(piece)})") for piece in pieces]
    return canonical_text(values, null_is_value=False) or "''"


def _select_texts(
    relation: str, pieces: Sequence[TypedColumn], others: Iterable[str]
) -> str:
    """Return the SELECT of the texts of keys, beside columns, for _fetch_texts()."""
    text = comparable_sql(pieces[0]) if _is_plain(pieces) else _text_of(pieces)
    names = ", ".join(map(quote_name, (TEXT, *others)))
    return f"SELECT {text} AS {names} FROM ({relation})"


def _fetch_texts(
    connection: duckdb.DuckDBPyConnection, select: str, pieces: Sequence[TypedColumn]
) -> pa.Table:
    """Return columns beside the canonical texts of keys, where none is NULL.

    DuckDB would look for a NULL before DISTINCT, and make the texts of all rows for it.
    """
    rows = fetch_pairs(connection, select).drop_null()
    if _is_plain(pieces):
        texts = canonical_texts(rows[TEXT], pieces[0].kind)
        rows = rows.set_column(0, TEXT, texts)
    return rows


def _is_plain(pieces: Sequence[TypedColumn]) -> bool:
    """Return whether keys are of one column whose texts Arrow makes, and faster."""
    return len(pieces) == 1 and PLAIN.fullmatch(pieces[0].type) is not None


@contextmanager
def opened_shard(
    source: ShardSource, fragment: Fragment, order_key: bytes
) -> Iterator[Scan]:
    """Open a shard for the time that its policy allows."""
    with scan_drawn_rows(source, fragment, order_key) as opened:
        limit = TimeLimit(source, fragment.table)
        with limit.interrupt_late(opened.connection):
            try:
                yield opened
            except duckdb.Error as error:
                limit.check()
                raise SourceError(
                    f"{source}: a key or cutoff of a LATERAL sub-query fails on some "
                    f"value: {safe_message(error)}"
                ) from None
