"""The joined rows of a query as tp_flower would train on them, and a plan in words.

Training never makes these rows; tests do, to compare them with an engine's answer.
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa

from tp_flower.extraction.empty_answers import NoRows
from tp_flower.extraction.extract import extract
from tp_flower.extraction.extracted import ExtractedShard, KeyColumn
from tp_flower.extraction.pairs import merge_pairs, read_pairs
from tp_flower.extraction.sealed_pairs import (
    TEXT,
    hash_pairs,
    match_pairs,
    read_key_texts,
    read_own_keys,
)
from tp_flower.extraction.shard_partials import (
    hash_partials,
    merge_partials,
    read_partials,
)
from tp_flower.features.columns import CategoricalColumn, FeatureColumn, NumericColumn
from tp_flower.joins.joining import JoinStep, build_mapping
from tp_flower.joins.mapping import TableMapping
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.query import BoundQuery, Fragment, Join
from tp_flower.query.cutoffs import CUTOFF
from tp_flower.query.lateral_tables import pair_names
from tp_flower.sources.policy import Policy
from tp_flower.sources.shards import ShardSource, load_tables, register_frames, release
from tp_flower.terms.cutoffs import answered_nulls, answering_joins

Value = float | str | None
Row = tuple[tuple[str, Value], ...]
Sources = Mapping[str, Sequence[ShardSource]]
HASHER = KeyedHasher(bytes(range(32))).purpose("join keys")
LABEL = "label"


def joined_rows(
    bound: BoundQuery,
    sources: Sources,
    *,
    matched: bool = False,
    sharing: bool = False,
) -> Counter[Row]:
    """The label and all features of each joined row; NULL where there is no match.

    Args:
        bound: the query.
        sources: the shards of each table, by the name at the sites.
        matched: whether to leave out rows that miss a match in some table.
        sharing: whether shards of LATERAL sub-queries merge partial answers.
    """
    shards = {
        table: shards_of(bound, table, sources, sharing=sharing)
        for table in bound.tables
    }
    mapping, _ = map_rows(bound, shards)
    columns: dict[str, list[Value]] = {}
    present = np.ones(mapping.joined_rows, bool)
    for table, own in shards.items():
        row_of = mapping.tables[table].row_of
        present &= row_of >= 0
        for name, values in table_values(own).items():
            padded = [*values, None]  # -1 takes the last one
            columns[name] = [padded[row] for row in row_of]
    names = [name.lower() for name in columns]
    rows = zip(*columns.values(), strict=True)
    return Counter(
        tuple(sorted(zip(names, row, strict=True)))
        for row, is_there in zip(rows, present, strict=True)
        if is_there or not matched
    )


def shards_of(
    bound: BoundQuery, table: str, sources: Sources, *, sharing: bool = False
) -> list[ExtractedShard]:
    """The rows of a table's shards, of which the last has the answer about no rows."""
    parts = [
        (fragment, source)
        for fragment in bound.fragments_of(table)
        for source in sources[fragment.name]
    ]
    answering = answering_of(bound)
    nulls = answered_nulls(bound.joins, answering, first_fragments(bound))
    return [
        extract(
            source,
            fragment,
            pairs=merged_pairs(bound, fragment, sources, number)
            if sharing and len(parts) > 1
            else pairs_of(bound, fragment, sources, source),
            no_rows=NoRows(
                number == len(parts) - 1 and table in answering.values(),
                nulls.get(table, frozenset()),
            ),
        )
        for number, (fragment, source) in enumerate(parts)
    ]


def first_fragments(bound: BoundQuery) -> dict[str, Fragment]:
    return {table: bound.fragments_of(table)[0] for table in bound.tables}


def answering_of(bound: BoundQuery) -> dict[int, str]:
    return answering_joins(bound.joins, bound.outer, first_fragments(bound))


def pairs_of(
    bound: BoundQuery, fragment: Fragment, sources: Sources, source: ShardSource
) -> pa.Table | None:
    """The keys and cutoffs of the table around a LATERAL sub-query, for one shard."""
    cutoffs = fragment.subquery and fragment.subquery.cutoffs
    if not cutoffs or not cutoffs.table:
        return None
    join = _join_of(bound, fragment)
    names = pair_names(fragment, join.right_key)
    outer = [
        (shard, around, join.left_key)
        for around in bound.fragments_of(cutoffs.table)
        for shard in sources[around.name]
    ]
    if cutoffs.sealed:
        own, _ = read_own_keys(source, fragment, names, b"")
        texts = [read_key_texts(*each, names.index(CUTOFF), b"") for each in outer]
        pairs = [
            match_pairs(own, hash_pairs(*each, HASHER).check(), HASHER)
            for each in texts
        ]
    else:
        pairs = [read_pairs(*each, names, b"") for each in outer]
    return merge_pairs(pairs, cutoffs.table)


def _join_of(bound: BoundQuery, fragment: Fragment) -> Join:
    (join,) = [join for join in bound.joins if join.right == fragment.table]
    return join


def merged_pairs(
    bound: BoundQuery, fragment: Fragment, sources: Sources, number: int
) -> pa.Table | None:
    """The answers of one of several shards, with partial ones of those after it."""
    if fragment.subquery is None or fragment.subquery.cutoffs is None:
        return None
    names = pair_names(fragment, _join_of(bound, fragment).right_key)
    earlier: set[str] = set()
    others = []
    own = own_keys = None
    for place, source in enumerate(sources[fragment.name]):
        keys, kinds = read_own_keys(source, fragment, names, b"")
        if place < number:
            earlier.update(keys[TEXT].to_pylist())
            continue
        pairs = pairs_of(bound, fragment, sources, source)
        partials = read_partials(source, fragment, names, pairs, b"")
        is_free = [text not in earlier for text in keys[TEXT].to_pylist()]
        if place == number:
            own_keys = keys.filter(pa.array(is_free, pa.bool_()))
            own = partials.of_keys(own_keys[TEXT].combine_chunks())
        else:
            partials = partials.of_keys(own_keys[TEXT].combine_chunks())
            others.append(
                (
                    hash_partials(partials, kinds, HASHER).check(len(partials.types)),
                    HASHER,
                )
            )
    return merge_partials(fragment.table, own, own_keys, others)


def run(
    frame: pd.DataFrame, wanted: Fragment, folder=None, order_key=b""
) -> ExtractedShard:
    token = register_frames({"table": frame}, site="here")
    try:
        (source,) = load_tables(f"memory:{token}")
        return extract(source, wanted, folder, order_key)
    finally:
        release(token)


def parquet_of(folder: Path, sql: str, table: str = "table") -> ShardSource:
    """Write the rows of a query to a Parquet file, with exactly their types."""
    path = folder / "t.parquet"
    duckdb.execute(f"COPY ({sql}) TO '{path}' (FORMAT parquet)")
    return ShardSource(table, "here", 0, str(path))


def slow_cutoffs(folder: Path) -> tuple[ShardSource, Fragment]:
    """A shard that may be read for a second, and a cutoff that takes longer."""
    rows = "SELECT repeat('a', 200) || i AS x, repeat('b', 200) AS w"
    source = parquet_of(folder, f"{rows} FROM range(200_000) r(i)")
    slow = 'LEVENSHTEIN(SUBSTR("x", 1), "w") * LEVENSHTEIN("w", SUBSTR("x", 2))'
    around = Fragment("o", "table", keys=((slow,),))
    return replace(source, policy=Policy(query_seconds=1)), around


def map_rows(
    bound: BoundQuery, shards: Mapping[str, Sequence[ExtractedShard]]
) -> tuple[TableMapping, tuple[JoinStep, ...]]:
    """The mapping of the query and its steps, from what its fragments yielded."""
    keys = {
        (table, number): [shard.keys[number].hashed(HASHER) for shard in own]
        for table, own in shards.items()
        for number in range(len(bound.fragments_of(table)[0].keys))
    }
    rows = {table: sum(shard.rows for shard in own) for table, own in shards.items()}
    return build_mapping(
        bound.joins,
        keys,
        rows,
        bound.label_table,
        outer=bound.outer,
        answering=answering_of(bound),
    )


def number_key(values: Sequence[int | None], kind: str = "number") -> KeyColumn:
    """Codes of small numbers, hashed to themselves; None is NULL."""
    distinct = sorted({value for value in values if value is not None})
    codes = [-1 if value is None else distinct.index(value) for value in values]
    hashes = np.array([[value, 17] for value in distinct], np.uint64).reshape(-1, 2)
    return KeyColumn(np.array(codes, np.int32), hashes, kind)


def table_values(shards: Sequence[ExtractedShard]) -> dict[str, list[Value]]:
    """The features and the label of a table's rows, shard after shard."""
    found: dict[str, list[Value]] = {}
    for shard in shards:
        for feature in shard.features:
            values = column_values(shard.column(feature.name))
            found.setdefault(feature.name, []).extend(values)
        if (label := shard.label) is not None:
            column = (
                CategoricalColumn(label.codes, label.categories)
                if label.kind == "text"
                else NumericColumn(label.values)
            )
            found.setdefault(LABEL, []).extend(column_values(column))
    return found


def column_values(column: FeatureColumn) -> list[Value]:
    if isinstance(column, CategoricalColumn):
        texts = [*column.texts.to_pylist(), None]
        return [texts[code] for code in column.codes]
    assert isinstance(column, NumericColumn)
    return [plain(value) for value in column.values]


def plain(value: object) -> Value:
    """A value of any engine as tp_flower sees it; numbers to 9 digits.

    Booleans are 0 and 1, times seconds since 1970, texts in normal form C.
    """
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, date):
        moment = (
            value if isinstance(value, datetime) else datetime.combine(value, time())
        )
        return plain(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp())
    if value is None or (isinstance(value, float | np.floating) and math.isnan(value)):
        return None
    assert isinstance(value, bool | int | float | Decimal | np.number), type(value)
    return float(f"{float(value):.9g}") + 0.0  # no -0.0


def engine_rows(
    connection: duckdb.DuckDBPyConnection, sql: str, names: Iterable[str]
) -> Counter[Row]:
    """DuckDB's own answer, these columns of it."""
    cursor = connection.execute(sql)
    found = [column[0].lower() for column in cursor.description]
    places = {name.lower(): found.index(name.lower()) for name in names}
    return Counter(
        tuple(sorted((name, plain(row[place])) for name, place in places.items()))
        for row in cursor.fetchall()
    )


def result_names(bound: BoundQuery) -> list[str]:
    features = [
        feature.name
        for table in bound.tables
        for feature in bound.fragments_of(table)[0].features
    ]
    return [LABEL, *features]


def plan(bound: BoundQuery) -> list[str]:
    """A bound query in words: a line per fragment, then a line per join."""
    lines = [_fragment_line(fragment) for fragment in bound.fragments]
    for join in bound.joins:
        kind = "LEFT JOIN" if join.right in bound.outer else "JOIN"
        left = bound.fragments_of(join.left)[0].keys[join.left_key]
        right = bound.fragments_of(join.right)[0].keys[join.right_key]
        lines.append(
            f"{join.left} {kind} {join.right}: {_listed(left)} = {_listed(right)}"
        )
    return [line.replace('"', "") for line in lines]


def _fragment_line(fragment: Fragment) -> str:
    relation = fragment.name
    if fragment.subquery is not None:
        relation = f"({fragment.subquery.to_sql(fragment.name)})"
    own = [
        f.sql if f.sql == f'"{f.name}"' else f"{f.name}: {f.sql}"
        for f in fragment.features
    ]
    label = [] if fragment.label is None else [f"label: {fragment.label}"]
    where = f" WHERE {' AND '.join(fragment.filters)}" if fragment.filters else ""
    line = f"{fragment.table} is {relation}{where} | {', '.join([*label, *own])}"
    return line.rstrip()


def _listed(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)})"
