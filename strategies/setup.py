"""Set-up: from a query and the sites' tables to a training problem, in three rounds.

``extract`` brings hashed join keys and labels, from which the server builds the
mapping; ``statistics`` brings what the encoders need, merged exactly over the shards;
``prepare`` sends encoders, multiplicities and the batch plan, and brings what training
starts from. A function with ``yield`` sends a :class:`Request` and receives its
:class:`Replies`.
"""

import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.compact import CompactTable, compact_tables
from strategies.exchange import Part, Replies, Request, ask
from strategies.federation import Federation, Table
from strategies.inventory import Inventory
from strategies.labels import Labels, choose_loss, read_labels
from strategies.lou import PartArrays, all_arrays, checked, gather_scores
from strategies.received import (
    array_of,
    fact_of,
    read_key,
    read_label,
    read_statistics,
    refuse,
)
from tp_flower.encoding import TableEncoder, fit, merge_tables
from tp_flower.errors import SchemaError, SettingsError
from tp_flower.experiment import Settings
from tp_flower.extracted import KeyColumn
from tp_flower.losses import FloatArray, Loss
from tp_flower.mapping import TableMapping, build_mapping, split_rows
from tp_flower.models import ModelSpec
from tp_flower.protocol import Action, Update, pack_bits
from tp_flower.query import BoundQuery, Fragment, Query
from tp_flower.randomness import Stream, generator

SetUp = Generator[Request, Replies, Federation]
UpdateChooser = Callable[[str, int, bool], Update]


@dataclass(frozen=True)
class Plan:
    """What a strategy decides about the set-up.

    Attributes:
        choose_update: (table, shards, is linear) -> how its shards train together.
        plan_arrays: (training mapping, tables) -> arrays sent with ``prepare``.
    """

    choose_update: UpdateChooser
    plan_arrays: Callable[[TableMapping, Mapping[str, CompactTable]], PartArrays]


@dataclass(frozen=True)
class _Extracted:
    """What the ``extract`` round brought.

    Attributes:
        parts: by table, in shard order.
        rows: by part, after the filters.
        keys: by (table, key number), in shard order.
        labels: of the label table.
    """

    parts: dict[str, tuple[Part, ...]]
    rows: dict[int, int]
    keys: dict[tuple[str, int], list[KeyColumn]]
    labels: Labels


def set_up(query: Query, settings: Settings, plan: Plan, inventory: Inventory) -> SetUp:
    """Run the set-up rounds and return the training problem.

    Raises:
        TPFlowerError: any of its kinds, before any training, if the query does not fit
            the tables or the label does not fit the task.
    """
    bound = query.bind(inventory.schemas())
    _check_models(settings, bound)
    extracted = yield from _extract(bound, settings, inventory)
    rows = {
        table: sum(extracted.rows[part.number] for part in parts)
        for table, parts in extracted.parts.items()
    }
    mapping, steps = build_mapping(bound.joins, extracted.keys, rows, bound.label_table)
    rng = generator(settings.seed, Stream.SPLIT)
    held_out = split_rows(rows[bound.label_table], settings.test_fraction, rng)
    label_rows = mapping.tables[bound.label_table]
    is_test = held_out[label_rows.row_of]
    train, test, compact = compact_tables(
        mapping, is_test, extracted.parts, extracted.rows
    )
    values = extracted.labels.values[label_rows.row_of]
    loss = choose_loss(extracted.labels, values[~is_test], settings)
    encoders = yield from _fit_encoders(bound, settings, extracted, held_out)
    problem = _Problem(
        bound, settings, loss, train, compact, encoders, values[~is_test]
    )
    tables, initial_scores = yield from _prepare(problem, plan)
    return Federation(
        tables=tables,
        train=train,
        test=test,
        train_labels=values[~is_test],
        test_labels=values[is_test],
        loss=loss,
        base_score=loss.base_score(values[~is_test]),
        initial_scores=initial_scores,
        l2=settings.l2,
        seed=settings.seed,
        classes=extracted.labels.classes,
        join_steps=steps,
        source_rows=rows,
        names={fragment.table: fragment.name for fragment in bound.fragments},
        encoders=encoders,
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
) -> Generator[Request, Replies, _Extracted]:
    parts: dict[str, tuple[Part, ...]] = {}
    number = 0
    for fragment in bound.fragments:
        shards = inventory.shards_of(fragment.name)
        parts[fragment.table] = tuple(
            Part(number + k, fragment.table, shard.site, shard.node, shard.position)
            for k, shard in enumerate(shards)
        )
        number += len(shards)
    orders = {
        part.number: {"shard": part.shard, "fragment": bound.fragment(table).to_json()}
        for table, own in parts.items()
        for part in own
    }
    every = [part for own in parts.values() for part in own]
    replies = yield ask(Action.EXTRACT, every, facts=orders)
    facts = replies.facts()
    rows = {part.number: fact_of(facts, part, "rows", int) for part in every}
    for part in every:
        if not rows[part.number]:
            raise _empty_shard(part, bound.fragment(part.table))
    return _Extracted(
        parts=parts,
        rows=rows,
        keys={
            (fragment.table, key): [
                read_key(replies, part, key, rows[part.number])
                for part in parts[fragment.table]
            ]
            for fragment in bound.fragments
            for key in range(len(fragment.keys))
        },
        labels=_labels(parts[bound.label_table], replies, rows, settings),
    )


def _empty_shard(part: Part, fragment: Fragment) -> SchemaError:
    after = " after the query's filters" if fragment.filters else ""
    return SchemaError(
        f"the shard of table {fragment.name!r} at site {part.site!r} is empty{after}"
    )


def _labels(
    parts: Sequence[Part],
    replies: Replies,
    rows: Mapping[int, int],
    settings: Settings,
) -> Labels:
    columns = [read_label(replies, part, rows[part.number]) for part in parts]
    return read_labels(
        [{"kind": own.kind, "categories": own.categories} for own in columns],
        [own.values for own in columns],
        settings.task,
    )


def _fit_encoders(
    bound: BoundQuery,
    settings: Settings,
    extracted: _Extracted,
    held_out: np.ndarray[Any, np.dtype[np.bool_]],
) -> Generator[Request, Replies, dict[str, TableEncoder]]:
    """Merge the shards' statistics; the label table's are of its training rows only."""
    arrays: PartArrays = {}
    start = 0
    for part in extracted.parts[bound.label_table]:
        stop = start + extracted.rows[part.number]
        arrays[part.number] = {"rows": pack_bits(~held_out[start:stop])}
        start = stop
    every = [part for own in extracted.parts.values() for part in own]
    replies = yield ask(
        Action.STATISTICS, every, arrays=arrays, facts={p.number: {} for p in every}
    )
    facts = replies.facts()
    return {
        table: fit(
            merge_tables(
                [
                    read_statistics(facts, part, extracted.rows[part.number])
                    for part in parts
                ]
            ),
            settings.max_categories,
        )
        for table, parts in extracted.parts.items()
    }


@dataclass(frozen=True)
class _Problem:
    """What ``prepare`` is made from."""

    bound: BoundQuery
    settings: Settings
    loss: Loss
    train: TableMapping
    compact: Mapping[str, CompactTable]
    encoders: Mapping[str, TableEncoder]
    labels: FloatArray

    def spec(self, table: str) -> ModelSpec:
        """Return the local model of a table."""
        scale = float(self.labels.std()) if self.loss.name == "squared" else 1.0
        return ModelSpec(
            kind=self.settings.model_of(table),
            outputs=self.loss.outputs,
            intercept=table == self.bound.label_table,
            hidden_sizes=self.settings.hidden_sizes,
            output_scale=scale,
            # one start for all shards of a table, another for every table
            seed=zlib.crc32(f"{self.settings.seed}/{table}".encode()),
        )


def _prepare(
    problem: _Problem, plan: Plan
) -> Generator[Request, Replies, tuple[dict[str, Table], dict[str, FloatArray]]]:
    orders: dict[int, dict[str, Any]] = {}
    arrays: PartArrays = {}
    updates: dict[str, Update] = {}
    specs = {table: problem.spec(table) for table in problem.compact}
    for table, own in problem.compact.items():
        is_linear = specs[table].kind == "linear"
        updates[table] = plan.choose_update(table, len(own.parts), is_linear)
        order = {
            "encoder": problem.encoders[table].to_json(),
            "model": specs[table].to_json(),
            "update": str(updates[table]),
            "joined-rows": problem.train.joined_rows,
            "l2": problem.settings.l2,
            "device": problem.settings.device,
        }
        for part in own.parts:
            orders[part.number] = order
        arrays.update(own.set_up_arrays())
    arrays = all_arrays(arrays, plan.plan_arrays(problem.train, problem.compact))
    every = [part for own in problem.compact.values() for part in own.parts]
    replies = yield ask(Action.PREPARE, every, arrays=arrays, facts=orders)
    facts = replies.facts()
    tables, initial = {}, {}
    for name, own in problem.compact.items():
        trained = _table(own, specs[name], updates[name], facts, replies)
        if updates[name] is Update.GRAM:
            trained = _with_gram(trained, replies)
        tables[name] = trained
        zero = np.zeros((trained.total_rows, problem.loss.outputs))
        initial[name] = zero if trained.is_linear else gather_scores(trained, replies)
    return tables, initial


def _table(
    own: CompactTable,
    spec: ModelSpec,
    update: Update,
    facts: Mapping[int, Mapping[str, Any]],
    replies: Replies,
) -> Table:
    first = own.parts[0]
    features = fact_of(facts, first, "features", int)
    penalised = array_of(replies, first, "penalised", (None,), ("uint8",))
    for part in own.parts[1:]:
        if fact_of(facts, part, "features", int) != features:
            raise refuse(part, f"another number of features than {first.site!r}")
        array_of(replies, part, "penalised", penalised.shape, ("uint8",))
    is_linear = spec.kind == "linear"
    return Table(
        name=own.name,
        parts=own.parts,
        rows=own.rows,
        update=update,
        features=features,
        outputs=spec.outputs,
        has_intercept=spec.intercept,
        is_linear=is_linear,
        # the largest eigenvalue of a sum is at most the sum of the largest
        largest_curvature=sum(
            fact_of(facts, part, "largest-curvature", float)
            for part in own.parts
            if is_linear
        ),
        mean_curvature=tuple(
            fact_of(facts, part, "mean-curvature", float) for part in own.parts
        ),
        penalised=penalised.astype(np.bool_),
        gram=None,
    )


def _with_gram(table: Table, replies: Replies) -> Table:
    width = table.features + int(table.has_intercept)
    total = np.zeros((width, width))
    for index in range(len(table.parts)):
        total += checked(replies, table, index, "gram", (width, width))
    return table.with_gram(total)
