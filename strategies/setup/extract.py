"""Extraction: what the sites tell of the rows of a query, by two rounds.

One site seals the run's secret for the others (``seal``), and every site runs its
fragment of the query (``extract``). What comes back is keyed hashes of join keys and
row positions; beside them labels and weights, where the query has them, and keyed
hashes of what names a row, where the rows are to be predicted.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.run.describe_fragment import SiteWork
from strategies.run.exchange import Part, Replies, Request, ask
from strategies.run.reply_checks import array_of, read_key, read_weight
from strategies.run.sites import Inventory
from strategies.setup.grouped_tables import check_groups, split_groups
from strategies.setup.key_groups import key_groups
from strategies.setup.keys import relay_secret
from strategies.setup.labels import label_plan
from strategies.setup.row_weights import query_weights
from tp_flower.arrays import FloatArray
from tp_flower.errors import SchemaError
from tp_flower.extraction.extracted import KeyColumn
from tp_flower.methods import PERSONAL
from tp_flower.protocol import (
    ExtractedPart,
    ExtractPart,
    ExtractRequest,
    RowKeyColumns,
)
from tp_flower.query import BoundQuery, Fragment
from tp_flower.settings import TRAIN, Settings

HashArray = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Extracted:
    """What the ``extract`` round brought.

    Attributes:
        parts: by table, in shard order; none of a table whose sites are all gone.
        rows: by part, after the filters.
        keys: by (table, key number), in shard order.
        work: by part, where its fragment ran.
        weights: what the query says that rows of the weight's table weigh; None without
            a weight.
        row_hashes: keyed hashes (n, 2) of what names the label table's rows; None where
            they do not leave.
        replies: all that the sites sent.
    """

    parts: dict[str, tuple[Part, ...]]
    rows: dict[int, int]
    keys: dict[tuple[str, int], list[KeyColumn]]
    work: dict[int, SiteWork]
    weights: FloatArray | None
    row_hashes: HashArray | None
    replies: Replies = field(repr=False)

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of each table after its filters, in the order of the query."""
        return {
            table: sum(self.rows[part.number] for part in parts)
            for table, parts in self.parts.items()
        }

    @property
    def all_parts(self) -> list[Part]:
        """The parts of all tables."""
        return [part for own in self.parts.values() for part in own]


def extract(
    bound: BoundQuery,
    settings: Settings,
    inventory: Inventory,
    row_key: RowKeyColumns | None = None,
) -> Generator[Request, Replies, Extracted]:
    """Run the two rounds.

    Args:
        bound: the query over the sites' columns.
        settings: of the run.
        inventory: of the sites.
        row_key: what names the label table's rows, if they are to be predicted.

    Raises:
        TPFlowerError: any of its kinds, if a fragment cannot be run, or a table that
            may not be empty is.
    """
    row_key = row_key or RowKeyColumns()
    fragments = _place(bound, inventory)
    parts: dict[str, tuple[Part, ...]] = dict.fromkeys(bound.tables, ())
    for part, fragment in fragments.items():
        parts[fragment.table] += (part,)
    nodes = {part.node for part in fragments}
    secrets = yield from relay_secret(inventory, nodes, settings.seed)
    grouped = split_groups(fragments)
    request = ExtractRequest(
        keys=next(iter(secrets.values()))["keys"],
        public_keys=[],
        parts=_orders(bound, settings, fragments, grouped, row_key),
    )
    replies = yield ask(request, fragments, secrets)
    check_groups(grouped, replies)
    sent = {part: replies.body(part, ExtractedPart) for part in fragments}
    rows = {part.number: body.rows for part, body in sent.items()}
    _check_filled(bound, parts, rows)
    return Extracted(
        parts=parts,
        rows=rows,
        keys=_keys(bound, parts, replies, rows, row_key),
        work={
            part.number: SiteWork(body.engine, tuple(body.pushed))
            for part, body in sent.items()
        },
        weights=_weights(bound, parts, replies, rows),
        row_hashes=_row_hashes(parts[bound.label_table], replies, rows)
        if row_key.is_sent
        else None,
        replies=replies,
    )


def _orders(
    bound: BoundQuery,
    settings: Settings,
    fragments: Mapping[Part, Fragment],
    grouped: Sequence[Sequence[Part]],
    row_key: RowKeyColumns,
) -> dict[int, ExtractPart]:
    """Return what each part is asked."""
    plan = label_plan(settings)
    stays = settings.method.family == PERSONAL and settings.mode == TRAIN
    of_label: dict[str, Any] = {
        "label_privacy": None if plan is None else plan.to_json(),
        "local_label": settings.task if stays else None,
    }
    rows_named: dict[str, Any] = {"row_key": row_key if row_key.columns else None}
    with_groups = {part for parts in grouped for part in parts}
    named = key_groups(bound)
    if row_key.columns:
        # no join compares them
        named[bound.label_table] = named[bound.label_table][: -row_key.columns]
    return {
        part.number: ExtractPart(
            shard=part.shard,
            fragment=fragment.to_json(),
            groups=part in with_groups,
            key_groups=named[fragment.table],
            **(of_label if fragment.label is not None else {}),
            **(rows_named if fragment.table == bound.label_table else {}),
        )
        for part, fragment in fragments.items()
    }


def _place(bound: BoundQuery, inventory: Inventory) -> dict[Part, Fragment]:
    """Return the parts of the run, in the order of the query, with their fragments."""
    placed: dict[Part, Fragment] = {}
    for fragment in bound.fragments:
        for shard in inventory.shards_of(fragment.name):
            part = Part(
                len(placed), fragment.table, shard.site, shard.node, shard.position
            )
            placed[part] = fragment
    return placed


def _check_filled(
    bound: BoundQuery,
    parts: Mapping[str, Sequence[Part]],
    rows: Mapping[int, int],
) -> None:
    """Refuse a table without any row, unless rows may do without a match in it."""
    for table, own in parts.items():
        if table in bound.outer or any(rows[part.number] for part in own):
            continue
        fragments = bound.fragments_of(table)
        is_filtered = any(f.filters or f.subquery for f in fragments)
        after = " after the query's filters" if is_filtered else ""
        sites = ", ".join(dict.fromkeys(part.site for part in own))
        raise SchemaError(
            f"table {table!r} is empty{after}: none of its sites ({sites}) has a row"
        )


def _keys(
    bound: BoundQuery,
    parts: Mapping[str, Sequence[Part]],
    replies: Replies,
    rows: Mapping[int, int],
    row_key: RowKeyColumns,
) -> dict[tuple[str, int], list[KeyColumn]]:
    """Return the keys that joins compare; of a table without parts, no value."""
    none = KeyColumn(np.zeros(0, np.int32), np.zeros((0, 2), np.uint64), "")
    found = {}
    for table, own in parts.items():
        count = len(bound.fragments_of(table)[0].keys)
        if table == bound.label_table:
            count -= row_key.columns
        for key in range(count):
            sent = [read_key(replies, part, key, rows[part.number]) for part in own]
            found[table, key] = sent or [none]
    return found


def _weights(
    bound: BoundQuery,
    parts: Mapping[str, Sequence[Part]],
    replies: Replies,
    rows: Mapping[int, int],
) -> FloatArray | None:
    table = bound.weight_table
    if table is None:
        return None
    found = [read_weight(replies, part, rows[part.number]) for part in parts[table]]
    return query_weights(found, f"{table}: {bound.fragments_of(table)[0].weight}")


def _row_hashes(
    parts: Sequence[Part], replies: Replies, rows: Mapping[int, int]
) -> HashArray:
    found = [
        array_of(replies, part, "row_hashes", (rows[part.number], 2)) for part in parts
    ]
    return np.concatenate(found)
