"""Alignment: which rows of the sites' tables are behind each joined row.

Two rounds: one site seals the run's secret for the others (``seal``), and every site
runs its fragment of the query (``extract``). What comes back is keyed hashes of join
keys, row positions, and the labels; from it the server makes the table mapping, splits
the label table's rows and chooses the loss.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strategies.compact import TableLayout, compact_tables, weighted_tables
from strategies.exchange import Part, Replies, Request, ask
from strategies.feature_ranges import check_ranges
from strategies.groups import GROUPS, check_groups, split_groups
from strategies.inventory import Inventory
from strategies.key_groups import KEY_GROUPS, key_groups
from strategies.key_relay import relay_secret
from strategies.labels import (
    Labels,
    choose_loss,
    label_plan,
    read_labels,
    read_private_labels,
)
from strategies.received import fact_of, read_key, read_label, read_weight, read_work
from strategies.row_weights import (
    Weighting,
    asked_weighting,
    query_weights,
    weigh,
    without_weightless,
)
from tp_flower.encoding.choice import TableChoice, choose_encoders
from tp_flower.errors import SchemaError, SettingsError
from tp_flower.experiment import Settings
from tp_flower.explain.words import SiteWork
from tp_flower.extraction.extracted import KeyColumn
from tp_flower.joins.mapping import JoinStep, TableMapping, build_mapping, split_rows
from tp_flower.learning.losses import FloatArray, Loss
from tp_flower.privacy.labels import LABEL_PRIVACY
from tp_flower.protocol import Action
from tp_flower.query import BoundQuery, Fragment, Query
from tp_flower.randomness import Stream, generator

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Extracted:
    """What the ``extract`` round brought.

    Attributes:
        parts: by table, in shard order.
        rows: by part, after the filters.
        keys: by (table, key number), in shard order.
        work: by part, where its fragment ran.
        labels: of the label table.
        weights: what the query says that rows of the weight's table weigh; None without
            a weight.
    """

    parts: dict[str, tuple[Part, ...]]
    rows: dict[int, int]
    keys: dict[tuple[str, int], list[KeyColumn]]
    work: dict[int, SiteWork]
    labels: Labels
    weights: FloatArray | None

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of each table after its filters, in the order of the query."""
        return {
            table: sum(self.rows[part.number] for part in parts)
            for table, parts in self.parts.items()
        }


@dataclass(frozen=True)
class Alignment:
    """The joined rows, as far as the server knows them.

    Attributes:
        bound: the query over the sites' columns.
        choices: the encoders that each table's features are to have.
        extracted: what the sites sent.
        mapping: of all joined rows, over all rows of the tables.
        steps: of the join.
        held_out: (rows of the label table,), those for testing.
        is_test: (joined rows,).
        train: mapping of the training rows, over the tables' rows that take part.
        test: mapping of the held-out rows, None without any.
        compact: the rows of each table that take part.
        values: (joined rows,), labels.
        loss: chosen by the labels and the settings.
        weighting: what the joined rows weigh.
    """

    bound: BoundQuery
    choices: Mapping[str, TableChoice]
    extracted: Extracted
    mapping: TableMapping
    steps: tuple[JoinStep, ...]
    held_out: BoolArray
    is_test: BoolArray
    train: TableMapping
    test: TableMapping | None
    compact: Mapping[str, TableLayout]
    values: FloatArray
    loss: Loss
    weighting: Weighting

    @property
    def names(self) -> dict[str, str]:
        """Name of every table at the sites."""
        return {
            table: " + ".join(dict.fromkeys(own.name for own in fragments))
            for table in self.bound.tables
            if (fragments := self.bound.fragments_of(table))
        }

    @property
    def train_labels(self) -> FloatArray:
        """Labels of the training rows."""
        return self.values[~self.is_test]

    @property
    def test_labels(self) -> FloatArray:
        """Labels of the held-out rows."""
        return self.values[self.is_test]


def align(
    query: Query, settings: Settings, inventory: Inventory
) -> Generator[Request, Replies, Alignment]:
    """Run the two rounds and return the joined rows.

    Raises:
        TPFlowerError: any of its kinds, if the query does not fit the tables or the
            label does not fit the task.
    """
    schemas = inventory.schemas()
    bound = query.bind(schemas)
    _check_models(settings, bound)
    asked = asked_weighting(bound, settings)
    choices = choose_encoders(
        settings.encoders,
        {
            table: [feature.name for feature in bound.fragments_of(table)[0].features]
            for table in bound.tables
        },
        settings.max_categories,
    )
    check_ranges(bound, schemas, choices, settings.privacy)
    extracted = yield from _extract(bound, settings, inventory)
    rows = extracted.table_rows
    mapping, steps = build_mapping(
        bound.joins,
        extracted.keys,
        rows,
        bound.label_table,
        bound.outer,
        settings.max_joined_rows,
    )
    mapping, weights, asked = without_weightless(
        mapping, extracted.weights, asked, bound.weight_table or ""
    )
    rng = generator(settings.seed, Stream.SPLIT)
    held_out = split_rows(rows[bound.label_table], settings.test_fraction, rng)
    label_rows = mapping.tables[bound.label_table]
    is_test = held_out[label_rows.row_of]
    train, test, compact = compact_tables(
        mapping, is_test, extracted.parts, extracted.rows
    )
    weighting = weigh(asked, weights, is_test, train, test)
    if weighting.masses is not None:
        compact = weighted_tables(compact, weighting.masses)
    values = extracted.labels.values[label_rows.row_of]
    return Alignment(
        bound=bound,
        choices=choices,
        extracted=extracted,
        mapping=mapping,
        steps=steps,
        held_out=held_out,
        is_test=is_test,
        train=train,
        test=test,
        compact=compact,
        values=values,
        loss=choose_loss(extracted.labels, values[~is_test], settings),
        weighting=weighting,
    )


def _check_models(settings: Settings, bound: BoundQuery) -> None:
    known = {table.lower() for table in bound.tables}
    for alias, _ in settings.models:
        if alias.lower() not in known:
            raise SettingsError(
                f"models names table {alias!r}; the query has {', '.join(bound.tables)}"
            )


def _extract(
    bound: BoundQuery, settings: Settings, inventory: Inventory
) -> Generator[Request, Replies, Extracted]:
    plan = label_plan(settings)
    private = {} if plan is None else {LABEL_PRIVACY: plan.to_json()}
    fragments = _place(bound, inventory)
    parts: dict[str, tuple[Part, ...]] = dict.fromkeys(bound.tables, ())
    for part, fragment in fragments.items():
        parts[fragment.table] += (part,)
    nodes = {part.node for part in fragments}
    secrets = yield from relay_secret(inventory, nodes, settings.seed)
    grouped = split_groups(fragments)
    with_groups = {part for parts in grouped for part in parts}
    named = key_groups(bound)
    orders = {
        part.number: {
            "shard": part.shard,
            "fragment": fragment.to_json(),
            GROUPS: part in with_groups,
            KEY_GROUPS: named[fragment.table],
            **(private if fragment.label is not None else {}),
        }
        for part, fragment in fragments.items()
    }
    request = ask(Action.EXTRACT, fragments, facts=orders)
    for node, packet in request.packets.items():
        packet.header.update(secrets[node])
    replies = yield request
    check_groups(grouped, replies)
    facts = replies.facts()
    rows = {part.number: fact_of(facts, part, "rows", int) for part in fragments}
    _check_filled(bound, parts, rows)
    return Extracted(
        parts=parts,
        rows=rows,
        keys={
            (table, key): [
                read_key(replies, part, key, rows[part.number]) for part in own
            ]
            for table, own in parts.items()
            for key in range(len(bound.fragments_of(table)[0].keys))
        },
        work={part.number: read_work(facts, part) for part in fragments},
        labels=_labels(parts[bound.label_table], replies, rows, settings),
        weights=_weights(bound, parts, replies, rows),
    )


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


def _labels(
    parts: Sequence[Part],
    replies: Replies,
    rows: Mapping[int, int],
    settings: Settings,
) -> Labels:
    # the label of a shard without rows may be of any type
    columns = [
        (part, read_label(replies, part, rows[part.number]))
        for part in parts
        if rows[part.number]
    ]
    if plan := label_plan(settings):
        return read_private_labels(columns, plan)
    return read_labels(
        [{"kind": own.kind, "categories": own.categories} for _, own in columns],
        [own.values for _, own in columns],
        settings.task,
    )
