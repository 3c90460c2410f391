"""The SELECT by which a runner reads a table's rows: what the site's extraction runs.

The types of the columns are those of the training, so that the SQL can be written once:
a runner casts its rows to them. Join keys become their canonical texts
(``tp_flower/extraction/select_plan.py``), and so match those of every other table.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from tp_flower.duckdb_engine import quote_name, shared_cursor
from tp_flower.errors import ModelError
from tp_flower.extraction.empty_answers import NoRows, answered_key
from tp_flower.extraction.select_plan import Plan, make_plan
from tp_flower.query.fragment import Fragment, Role
from tp_flower.query.reads import reads
from tp_flower.sources.shards import Scan, regular_type
from tp_flower.sources.tables_file import ShardSource


@dataclass(frozen=True)
class ExportedSelect:
    """What a part reads, as `part.json` has it.

    Attributes:
        select: the pieces of the SELECT: SQL and name of the `inner` and the `outer`
            items, and what is selected `from`; which columns are features, with kinds
            and widths, which are keys, in the query's order, and which is the offset.
        columns: by name, those that the SQL reads.
        key_names: of the keys, with their kinds, as saved effects know them.
    """

    select: Mapping[str, Any]
    columns: tuple[str, ...]
    key_names: tuple[str, ...]


def selection(
    fragment: Fragment, types: Mapping[str, str], wanted: Mapping[str, int]
) -> ExportedSelect:
    """Return the selection of a fragment's filters, keys, offset and some features.

    Args:
        fragment: the part of the query that the table answers.
        types: the DuckDB types of the table's columns, by name.
        wanted: the features that the model reads, with the lengths of vectors, 0 for
            any.

    Raises:
        ModelError: rows of the table are made of another table's.
    """
    cutoffs = fragment.subquery and fragment.subquery.cutoffs
    if cutoffs and cutoffs.grid is None:
        raise ModelError(
            f"table {fragment.table!r} is a LATERAL sub-query, whose rows are made of "
            f"the cutoffs of table {cutoffs.table!r}, and cannot be exported: predict "
            "with predict(), or train it with a cutoff-grid"
        )
    fragment = replace(
        fragment,
        features=tuple(each for each in fragment.features if each.name in wanted),
        label=None,
        weight=None,
        event=None,
        entry=None,
        strata=None,
    )
    read = {each.column.lower() for each in reads(fragment)}
    columns = tuple(name for name in types if name.lower() in read)
    source = ShardSource(fragment.name, "export", 0)
    with closing(shared_cursor()) as connection:
        items = ", ".join(
            f"CAST(NULL AS {regular_type(types[name])}) AS {quote_name(name)}"
            for name in columns
        )
        connection.execute(
            f"CREATE OR REPLACE TEMP VIEW shard AS SELECT {items or '1 AS nothing'}"
        )
        scan = Scan(connection, fragment.check(columns))
        # which keys are answered the runner knows
        no_rows = NoRows(
            answered_key(scan.fragment) is not None,
            frozenset(range(len(scan.fragment.keys))),
        )
        plan = make_plan(source, scan, no_rows)
    return ExportedSelect(
        _pieces(plan, wanted), columns, _key_names(scan.fragment, plan)
    )


def _pieces(plan: Plan, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Return the pieces of the SELECT, and what its columns are."""
    keys = [column for column in plan.composites if column.startswith("key")]
    offset = plan.by_role.get(Role.OFFSET)
    empty = {"empty": {**plan.empty_items, "from": plan.empty_answer}}
    return {
        **plan.items,
        "from": plan.rows,
        **(empty if plan.empty_answer else {}),
        "features": [
            [piece.name, piece.column, piece.kind, lengths[piece.name]]
            for piece in plan.features
        ],
        "keys": keys,
        "offset": offset.column if offset else "",
    }


def _key_names(fragment: Fragment, plan: Plan) -> tuple[str, ...]:
    """Return the names of keys with their kinds."""
    return tuple(
        f"{', '.join(expressions)} ({'+'.join(part.kind for part in parts)})"
        for expressions, parts in zip(
            fragment.keys,
            (plan.composites[f"key{n}"] for n in range(len(fragment.keys))),
            strict=True,
        )
    )
