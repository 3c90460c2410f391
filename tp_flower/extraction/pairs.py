"""The keys and cutoffs of a table's rows, for a LATERAL sub-query at the same site."""

from collections.abc import Sequence
from hashlib import sha256

import pyarrow as pa
from sqlglot import exp

from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import QueryError
from tp_flower.extraction.select_plan import make_plan
from tp_flower.extraction.time_limit import TimeLimit
from tp_flower.extraction.unit_rows import scan_drawn_rows
from tp_flower.query.cutoffs import is_reserved
from tp_flower.query.expressions import parse_expression
from tp_flower.query.fragment import Fragment
from tp_flower.sources.shards import ShardSource


def pair_columns(key: Sequence[str], around: Sequence[str]) -> dict[str, str]:
    """Return by column of the pairs the SQL of the table around that it is equal to.

    >>> pair_columns(['"(cutoff)"', '"(key 0)"'], ['"day"', '"customer"'])
    {'(cutoff)': '"day"', '(key 0)': '"customer"'}
    """
    columns = {}
    for own, outer in zip(key, around, strict=True):
        tree = parse_expression(own, "join key")
        names = [column.name for column in tree.find_all(exp.Column)]
        if len(names) != 1 or not is_reserved(names[0]):
            raise QueryError(
                "the join of a LATERAL sub-query compares its keys and cutoff alone, "
                f"not {own}"
            )
        columns[names[0]] = outer
    return columns


def read_pairs(
    source: ShardSource, fragment: Fragment, columns: dict[str, str], order_key: bytes
) -> pa.Table:
    """Return the distinct keys and cutoffs of the rows of a shard, sorted.

    Those with a NULL match nothing, and are left out.
    """
    with scan_drawn_rows(source, fragment, order_key) as opened:
        limit = TimeLimit(source, fragment.table)
        with limit.interrupt_late(opened.connection):
            relation = make_plan(source, opened).rows
            items = ", ".join(
                f"{sql} AS {quote_name(name)}" for name, sql in columns.items()
            )
            present = " AND ".join(
                f"{quote_name(name)} IS NOT NULL" for name in columns
            )
            select = (
                f"SELECT * FROM (SELECT DISTINCT {items} FROM {relation}) "
                f"WHERE {present} ORDER BY ALL"
            )
            tables = []
            for _ in opened.chunks():
                limit.check()
                tables.append(opened.connection.sql(select).to_arrow_table())
    return pa.concat_tables(tables)


def merge_pairs(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the distinct pairs of several shards."""
    pairs = pa.concat_tables(tables, promote_options="permissive")
    names = pairs.column_names
    distinct = pairs.group_by(names, use_threads=False).aggregate([])
    return distinct.select(names).sort_by([(name, "ascending") for name in names])


def digest_of(pairs: pa.Table) -> str:
    """Return a text that differs for other pairs."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pairs.schema) as file:
        file.write_table(pairs)
    return sha256(sink.getvalue()).hexdigest()
