"""The keys and cutoffs of a table's rows, for a LATERAL sub-query at the same site."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Final

import duckdb
import pyarrow as pa

from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import QueryError
from tp_flower.extraction.select_plan import RELATION, make_plan, normal_texts
from tp_flower.extraction.time_limit import TimeLimit
from tp_flower.extraction.unit_rows import scan_drawn_rows
from tp_flower.query.cutoffs import PAIRS
from tp_flower.query.fragment import Feature, Fragment, SubQuery
from tp_flower.sources.shards import ShardSource

_UUIDS: Final = b"uuids"


def fetch_pairs(connection: duckdb.DuckDBPyConnection, select: str) -> pa.Table:
    """Return the rows of a SELECT, and which columns are UUIDs, texts in Arrow."""
    relation = connection.sql(select)
    columns = zip(relation.columns, relation.types, strict=True)
    uuids = [name for name, kind in columns if str(kind) == "UUID"]
    metadata = {_UUIDS: "\n".join(uuids)}
    return relation.to_arrow_table().replace_schema_metadata(metadata)


def register_pairs(
    connection: duckdb.DuckDBPyConnection, name: str, pairs: pa.Table
) -> None:
    """Make fetched pairs a relation of a connection, with the types they had."""
    connection.register(f"{name}_texts", pairs)
    uuids = _uuids(pairs)
    items = ", ".join(
        f"CAST({quote_name(c)} AS UUID) AS {quote_name(c)}"
        if c in uuids
        else quote_name(c)
        for c in pairs.column_names
    )
    connection.execute(
        f"CREATE OR REPLACE TEMP VIEW {quote_name(name)} AS "
        f"SELECT {items} FROM {quote_name(f'{name}_texts')}"
    )


def _uuids(pairs: pa.Table) -> list[str]:
    names: bytes = (pairs.schema.metadata or {}).get(_UUIDS, b"")
    return names.decode().split("\n")


def read_pairs(
    source: ShardSource,
    fragment: Fragment,
    key: int,
    names: Sequence[str],
    order_key: bytes,
) -> pa.Table:
    """Return the distinct values of a join key of a shard's rows, sorted.

    They are the pairs of a LATERAL sub-query, whose columns have these ``names``. Those
    with a NULL match nothing, and are left out.
    """
    tables = []
    with scan_drawn_rows(source, fragment, order_key) as opened:
        limit = TimeLimit(source, fragment.table)
        with limit.interrupt_late(opened.connection):
            plan = make_plan(source, opened)
            # what was checked, not what has arrived
            keys = opened.fragment.keys[key]
            keys = normal_texts(opened.connection, keys, plan.relation)
            parts = zip(keys, names, strict=True)
            items = ", ".join(f"{sql} AS {quote_name(name)}" for sql, name in parts)
            present = " AND ".join(f"{quote_name(name)} IS NOT NULL" for name in names)
            select = (
                f"SELECT * FROM (SELECT DISTINCT {items} FROM {plan.rows}) "
                f"WHERE {present} ORDER BY ALL"
            )
            try:
                for _ in opened.chunks():
                    limit.check()
                    tables.append(fetch_pairs(opened.connection, select))
            except duckdb.Error as error:
                # before what was interrupted is run again, to find what fails
                limit.check()
                raise plan.failure(opened.connection) or error from None
    return merge_pairs(tables, fragment.table)


def split_pairs(
    source: ShardSource,
    fragment: Fragment,
    pairs: pa.Table,
    order_key: bytes,
    *,
    is_own: bool,
) -> pa.Table:
    """Return the pairs whose keys a shard has, at whatever time, or all others.

    ``fragment`` is that of the LATERAL sub-query, and the shard is one of its table.
    """
    with scan_drawn_rows(source, fragment, order_key) as opened:
        limit = TimeLimit(source, fragment.table)
        with limit.interrupt_late(opened.connection):
            subquery = opened.fragment.subquery or SubQuery(())
            counts = replace(
                subquery,
                groups=normal_texts(opened.connection, subquery.groups, RELATION),
                columns=(Feature("rows", "COUNT(*)"),),
                filters=subquery.filters_of_rows,
                having=("COUNT(*) > 0" if is_own else "COUNT(*) = 0",),
                last=(),
            )
            names = ", ".join(map(quote_name, subquery.pair_names))
            rows = counts.to_sql(RELATION)
            register_pairs(opened.connection, PAIRS, pairs)
            try:
                # with a sub-query there is one step
                list(opened.chunks())
                select = f"SELECT {names} FROM ({rows}) ORDER BY ALL"
                return fetch_pairs(opened.connection, select)
            except duckdb.Error:
                limit.check()
                raise


def merge_pairs(tables: Sequence[pa.Table], table: str) -> pa.Table:
    """Return the distinct pairs, sorted, of shards of a table, each with such pairs."""
    if len(tables) == 1:
        return tables[0]
    kinds = {tuple(sorted(_uuids(pairs))) for pairs in tables}
    try:
        if len(kinds) > 1:
            raise pa.ArrowTypeError("a UUID is no text")
        pairs = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise QueryError(
            f"a LATERAL sub-query takes its cutoffs from table {table!r}, whose parts "
            "have them, or the keys beside them, in different types: CAST them to one "
            "type in each SELECT of its UNION ALL"
        ) from error
    names = pairs.column_names
    distinct = pairs.group_by(names, use_threads=False).aggregate([])
    distinct = distinct.select(names).sort_by([(name, "ascending") for name in names])
    return distinct.replace_schema_metadata(pairs.schema.metadata)


def digest_of(pairs: pa.Table) -> str:
    """Return a text that differs for other pairs."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pairs.schema) as file:
        file.write_table(pairs)
    return sha256(sink.getvalue()).hexdigest()
