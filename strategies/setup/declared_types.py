"""Check a query against the types that sites describe, before any row is read.

DuckDB binds every fragment over an empty table with the described columns, as a site
binds it over its rows. So expressions that do not fit the types, keys whose kinds
differ and labels that cannot be learned are refused as the run would refuse them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import duckdb
import numpy as np

from strategies.run.sites import Inventory
from strategies.setup.columns import Columns
from strategies.setup.labels import check_kind
from tp_flower.duckdb_engine import new_engine, quote_name, safe_message
from tp_flower.errors import QueryError
from tp_flower.extraction.extracted import KeyColumn
from tp_flower.extraction.select_plan import RELATION, Plan, make_plan
from tp_flower.joins.joining import join_codes
from tp_flower.query import BoundQuery, Fragment
from tp_flower.query.cutoffs import PAIRS
from tp_flower.query.fragment import Role
from tp_flower.query.lateral_tables import pair_names
from tp_flower.query.reads import reads
from tp_flower.query.relations import typed_nulls
from tp_flower.settings import Settings
from tp_flower.sources.shards import Scan
from tp_flower.sources.tables_file import ShardSource


def check_types(
    bound: BoundQuery, inventory: Inventory, columns: Columns, settings: Settings
) -> None:
    """Refuse a query whose expressions, keys or label do not fit the columns' types."""
    schemas = {name.lower(): schema for name, schema in columns.schemas.items()}
    keys: dict[tuple[str, int], list[KeyColumn]] = {}
    for fragment in bound.fragments:
        source = ShardSource(
            fragment.name, inventory.shards_of(fragment.name)[0].site, 0
        )
        pairs = declared_pairs(bound, fragment, schemas)
        schema = schemas[fragment.name.lower()]
        plan = declared_plan(source, fragment, schema, pairs)
        untyped = columns_without_values(inventory, fragment.name)
        for number, parts in enumerate(fragment.keys):
            kind = "+".join(part.kind for part in plan.composites[f"key{number}"])
            values = 1
            if untyped & columns_of_key(fragment, parts):
                values = 0
            keys.setdefault((fragment.table, number), []).append(_key_of(kind, values))
        for label in plan.label:
            check_kind(label.kind, settings.task)
    for join in bound.joins:
        # joining compares the kinds of keys that have values
        join_codes(
            join, keys[join.left, join.left_key], keys[join.right, join.right_key]
        )


def declared_plan(
    source: ShardSource,
    fragment: Fragment,
    schema: Mapping[str, str],
    pairs: Mapping[str, str],
) -> Plan:
    """Return the plan of a fragment over an empty table with these columns and types.

    ``pairs`` are the types of a LATERAL sub-query's keys and cutoff, if they are those
    of another table's rows.

    Raises:
        QueryError: an expression does not fit the types.
    """
    with _empty_plan(source, fragment, schema, pairs) as (_, plan):
        return plan


def declared_pairs(
    bound: BoundQuery, fragment: Fragment, schemas: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return the types of the keys and the cutoff that another table has for it.

    {} of what is no LATERAL sub-query, or takes its cutoffs from a grid.
    """
    cutoffs = fragment.subquery.cutoffs if fragment.subquery else None
    if cutoffs is None or not cutoffs.table:
        return {}
    around = bound.fragments_of(cutoffs.table)[0]
    key, around_key = next(
        (join.right_key, join.left_key)
        for join in bound.joins
        if (join.left, join.right) == (around.table, fragment.table)
    )
    parts = zip(around.keys[around_key], pair_names(fragment, key), strict=True)
    items = ", ".join(f"{sql} AS {quote_name(name)}" for sql, name in parts)
    source = ShardSource(around.name, "", 0)
    schema = schemas[around.name.lower()]
    with _empty_plan(source, around, schema, {}) as (connection, plan):
        rows = connection.sql(f"SELECT {items} FROM {plan.rows}")
        return dict(zip(rows.columns, map(str, rows.types), strict=True))


@contextmanager
def _empty_plan(
    source: ShardSource,
    fragment: Fragment,
    schema: Mapping[str, str],
    pairs: Mapping[str, str],
) -> Iterator[tuple[duckdb.DuckDBPyConnection, Plan]]:
    """Yield an engine with empty tables of these types, and the plan over them."""
    names = dict.fromkeys(read.column for read in reads(fragment))
    columns = {name: schema[name] for name in names}
    with new_engine() as connection:
        for relation, types in ((RELATION, columns), (PAIRS, pairs)):
            connection.execute(
                f"CREATE TEMP VIEW {relation} AS FROM {typed_nulls(types)} WHERE false"
            )
        try:
            plan = make_plan(source, Scan(connection, fragment))
            # filters, too
            connection.execute(f"DESCRIBE {plan.select}")
            yield connection, plan
        except duckdb.Error as error:
            raise QueryError(f"{source}: {safe_message(error)}") from None


def columns_without_values(inventory: Inventory, table: str) -> set[str]:
    """Return the columns that no shard of a table has a value in, in lower case.

    The type of such a column is meaningless.
    """
    empty = [
        {name.lower() for name in shard.all_null}
        for shard in inventory.shards_of(table)
    ]
    return set.intersection(*empty)


def columns_of_key(fragment: Fragment, parts: tuple[str, ...]) -> set[str]:
    """Return the columns that a join key reads, in lower case."""
    key_reads = reads(replace(fragment, keys=(parts,)))
    return {read.column.lower() for read in key_reads if read.role is Role.KEY}


def _key_of(kind: str, values: int) -> KeyColumn:
    """Return a key of a kind, with so many values."""
    return KeyColumn(np.zeros(values, np.int32), np.zeros((values, 2), np.uint64), kind)
