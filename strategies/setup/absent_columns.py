"""Columns that some shards of a table lack, by ``absent`` in their tables file.

The paper's "umbrella schema" (section 8): a shard without a column has missing values
in it, so that a run equals one over the union of the shards with NULLs in that column.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from strategies.run.exchange import Part
from strategies.run.sites import HostedShard, Inventory
from tp_flower.errors import SchemaError
from tp_flower.protocol.setup_messages import TYPE_NAME
from tp_flower.query import BoundQuery, Fragment
from tp_flower.query.fragment import Role, spell
from tp_flower.query.reads import Read, reads
from tp_flower.query.scope import TableSchema
from tp_flower.reports.console import format_count

_REFUSED = {
    Role.LABEL: "rows without a label cannot be trained on",
    Role.WEIGHT: "rows without a weight cannot be trained on",
    Role.OFFSET: "rows without an offset cannot be trained on",
    Role.EVENT: "rows without an event cannot be trained on",
    Role.ENTRY: "rows without an entry cannot be trained on",
    Role.STRATA: "rows without a stratum cannot be trained on",
    Role.KEY: "none of its rows would match, or be named, by it",
}


def check_absent(bound: BoundQuery, inventory: Inventory) -> None:
    """Refuse a label, a weight, an offset or a key from a column that a shard lacks."""
    for fragment in bound.fragments:
        for shard in inventory.shards_of(fragment.name):
            for read in _absent_reads(fragment, shard):
                if read.role in _REFUSED:
                    raise SchemaError(
                        f"table {shard.table!r} at site {shard.site!r}: {read.element} "
                        f"reads column {read.column!r}, which is absent there (absent "
                        f"in its tables file): {_REFUSED[read.role]}. Run without this "
                        "shard, or add the column to it"
                    )


def check_present(bound: BoundQuery, inventory: Inventory) -> None:
    """Refuse to train on a column that all shards of its table lack."""
    for fragment in bound.fragments:
        shards = inventory.shards_of(fragment.name)
        lacking = [
            {r.column.lower() for r in _absent_reads(fragment, s)} for s in shards
        ]
        for name in sorted(set.intersection(*lacking)) if lacking else ():
            raise SchemaError(
                f"table {shards[0].table!r}: column {name!r} is absent at all its "
                f"sites ({_list_sites(shards)}), so that there is nothing to train on: "
                "leave it out of the query"
            )


def describe_absent(
    bound: BoundQuery, inventory: Inventory, rows: Mapping[Part, int]
) -> Iterator[str]:
    """Yield a sentence on each column that some shards lack, with their share of rows.

    ``rows`` are those after the filters, by part.
    """
    by_place = {
        (part.table, part.node, part.shard): count for part, count in rows.items()
    }
    for fragment in bound.fragments:
        shards = inventory.shards_of(fragment.name)
        counts = [by_place.get((fragment.table, s.node, s.position), 0) for s in shards]
        total = sum(counts)
        lacking: dict[str, list[int]] = {}
        for number, shard in enumerate(shards):
            for name in sorted(
                {read.column for read in _absent_reads(fragment, shard)}
            ):
                lacking.setdefault(name, []).append(number)
        for name, numbers in lacking.items():
            without = sum(counts[number] for number in numbers)
            share = ""
            if total:
                share = f" ({100 * without / total:.0f} %)"
            sites = _list_sites(shards[number] for number in numbers)
            yield (
                f"table {fragment.table!r}: column {name!r} is absent at "
                f"{sites}, and so missing in "
                f"{format_count(without)} of {format_count(total)} rows{share}"
            )


def missing_types(
    fragment: Fragment, shard: HostedShard, schema: TableSchema
) -> dict[str, str]:
    """Return the types, in other shards, of the columns without values in a shard.

    Without a type an expression such as EXTRACT(year FROM day) has no meaning there.
    """
    types = {}
    for read in reads(fragment):
        name = spell(read.column, shard.all_null)
        shared = spell(read.column, schema)
        if name is None or shared is None:
            continue
        if schema[shared] != shard.columns.get(name):
            types[name] = schema[shared]
    # a type in parentheses but DECIMAL's, such as a STRUCT's, has nothing that computes
    # with it
    return {name: kind for name, kind in types.items() if re.fullmatch(TYPE_NAME, kind)}


def _absent_reads(fragment: Fragment, shard: HostedShard) -> Iterator[Read]:
    return (
        read for read in reads(fragment) if spell(read.column, shard.absent) is not None
    )


def _list_sites(shards: Iterable[HostedShard]) -> str:
    return ", ".join(dict.fromkeys(repr(shard.site) for shard in shards))
