"""The joined rows: which rows of the sites' tables are behind each of them.

A table is used either by its own rows, each once with its multiplicity, or (VFL) by the
joined rows: then a row of the table appears once for every joined row that it is in.
Within a shard the trained rows come first, then those that are only tested.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.run.exchange import Part, PartArrays
from strategies.run.sites import Inventory
from strategies.setup.extract import Extracted
from strategies.setup.labels import beside_offset
from strategies.setup.problem import PartRows, Weighting
from strategies.setup.row_weights import row_weights
from strategies.setup.splitting import Split, split_fold
from tp_flower.arrays import BoolArray, FloatArray, IndexArray
from tp_flower.features.choice import TableChoice, choose_encoders
from tp_flower.folds import OUT
from tp_flower.joins.joining import JoinStep, join_codes
from tp_flower.joins.mapping import (
    NO_ROW,
    RowNumbers,
    RowWeights,
    TableMapping,
    TableRows,
)
from tp_flower.objectives import EVENT, Objective, OffsetObjective, Target
from tp_flower.protocol.fields import MOST
from tp_flower.protocol.packet import pack_bits
from tp_flower.query import BoundQuery
from tp_flower.reports.records import SEVERAL_NAMES, min_mean_max
from tp_flower.settings import Settings
from tp_flower.settings.run import JOINED
from tp_flower.splits import TEST, TRAIN, VALIDATION, SubsetArray


@dataclass(frozen=True)
class TableLayout:
    """The rows of one table that take part.

    Attributes:
        rows: position of each part's rows after renumbering.
        fields: fields of ``PreparePart`` that say which rows of each part take part.
        masses: per part, (trained rows,): G^w, which replaces G if joined rows are
            weighted.
    """

    name: str
    parts: tuple[Part, ...]
    rows: tuple[PartRows, ...]
    fields: PartArrays
    masses: tuple[FloatArray, ...] | None = None

    @property
    def is_trained(self) -> bool:
        """Whether some row of the table is trained on."""
        return any(rows.trained for rows in self.rows)

    def set_up_fields(self) -> PartArrays:
        """Return the fields that ``prepare`` sends to each part."""
        by_part = {number: dict(fields) for number, fields in self.fields.items()}
        for part, masses in zip(self.parts, self.masses or (), strict=False):
            by_part[part.number].pop("multiplicity", None)
            by_part[part.number]["masses"] = masses
        return by_part

    def with_masses(self, masses: FloatArray) -> "TableLayout":
        """Return the layout with G^w, (rows that take part,): float32 numbers."""
        parts = (masses[rows.trained_slice] for rows in self.rows)
        return replace(self, masses=tuple(part.astype(np.float32) for part in parts))


Layouts = Mapping[str, TableLayout]
Mappings = tuple[TableMapping, TableMapping | None]
"""Mappings of the training rows, and of the held-out rows (None without any)."""
_ShardRows = tuple[list[PartRows], list[dict[str, Any]], RowNumbers]
"""By table, its parts' rows and fields for ``prepare``; and the new numbers of rows."""


def lay_out(
    mapping: TableMapping,
    is_test: BoolArray,
    extracted: Extracted,
) -> tuple[Mappings, dict[str, TableLayout]]:
    """Split the joined rows, and lay out the rows of each table that take part.

    Each row appears once.
    """
    train = mapping.select(~is_test)
    test = mapping.select(is_test)
    layouts: dict[str, TableLayout] = {}
    trained: dict[str, TableRows] = {}
    tested: dict[str, TableRows] = {}
    for name, shards in extracted.parts.items():
        sizes = tuple(extracted.rows[part.number] for part in shards)
        rows, fields, numbers = _lay_out_shards(
            sizes, train.tables[name], test.tables[name]
        )
        by_part = {
            part.number: part_fields
            for part, part_fields in zip(shards, fields, strict=True)
        }
        layouts[name] = TableLayout(name, shards, tuple(rows), by_part)
        total = sum(part_rows.total for part_rows in rows)
        trained[name] = train.tables[name].renumber(numbers, total)
        tested[name] = test.tables[name].renumber(numbers, total)
    return (
        TableMapping(trained),
        TableMapping(tested) if test.joined_rows else None,
    ), layouts


def _lay_out_shards(
    sizes: tuple[int, ...], train: TableRows, test: TableRows
) -> _ShardRows:
    """Return a table's rows by shard, trained ones first, and their new numbers."""
    is_trained = train.multiplicity > 0
    is_tested = test.is_joined
    new_number = np.full(train.rows, NO_ROW, dtype=np.int32)
    rows: list[PartRows] = []
    fields: list[dict[str, Any]] = []
    start = offset = 0
    for size in sizes:
        shard = slice(offset, offset + size)
        trained = is_trained[shard]
        held_out = is_tested[shard]
        order = np.concatenate(
            [np.flatnonzero(trained), np.flatnonzero(held_out & ~trained)]
        )
        stop = start + len(order)
        new_number[offset + order] = np.arange(start, stop, dtype=np.int32)
        rows.append(
            PartRows(start, int(np.count_nonzero(trained)), len(order), held_out[order])
        )
        arrays = {
            "trained": pack_bits(trained),
            "tested": pack_bits(held_out),
            "multiplicity": train.multiplicity[shard][trained].astype(
                np.int32, copy=False
            ),
        }
        fields.append(arrays)
        start = stop
        offset = offset + size
    return rows, fields, new_number


def encoder_choices(bound: BoundQuery, settings: Settings) -> dict[str, TableChoice]:
    """Return the encoders that each table's features are to have."""
    return choose_encoders(
        settings.encoders,
        {
            table: [feature.name for feature in bound.fragments_of(table)[0].features]
            for table in bound.tables
        },
        settings.max_categories,
        for_trees=settings.method.takes_codes,
        weighted=bound.weight_table is not None or settings.row_weight != JOINED,
    )


@dataclass(frozen=True, kw_only=True)
class SplitRows:
    """The rows of the tables; some of the label table's, (n,), are held out."""

    bound: BoundQuery
    choices: Mapping[str, TableChoice]
    extracted: Extracted
    held_out: BoolArray
    weighting: Weighting = field(default_factory=Weighting)

    def fitted_rows(self) -> PartArrays:
        """Return the fields that say which rows encoders are fitted to, by part."""
        shards = self.extracted.shards_of(self.bound.label_table)
        return {
            part.number: {"trained": pack_bits(~self.held_out[rows])}
            for part, rows in shards
        }

    @property
    def names(self) -> dict[str, str]:
        """The name of every table at the sites."""
        return {
            table: SEVERAL_NAMES.join(
                dict.fromkeys(fragment.name for fragment in fragments)
            )
            for table in self.bound.tables
            if (fragments := self.bound.fragments_of(table))
        }


@dataclass(frozen=True, kw_only=True)
class MappedRows:
    """The joined rows before some are held out.

    Attributes:
        weights: of the query, (N,); None without any.
        weighting: which columns and entities decide how much rows count.
        sampled: the label table's rows that take part, (n,).
        folds: the fold that has been divided last, by what decides how.
    """

    bound: BoundQuery
    extracted: Extracted
    labels: Target
    mapping: TableMapping
    steps: tuple[JoinStep, ...]
    weights: FloatArray | None
    weighting: Weighting
    sampled: BoolArray
    inventory: Inventory
    folds: dict[tuple[object, ...], "JoinedTables"] = field(default_factory=dict)

    def in_fold(self, settings: Settings, fold: int) -> "tuple[MappedRows, Split]":
        """Return the joined rows that take part in a fold of a search, and its split.

        The fold is tested on.
        """
        split = split_fold(
            self.bound,
            self.extracted.parts.get(self.bound.split_table, ()),
            self.extracted.replies,
            self.mapping,
            settings,
            fold,
        )
        takes_part = split.subset != OUT
        rows = replace(
            self,
            mapping=self.mapping.select(takes_part),
            weights=None if self.weights is None else self.weights[takes_part],
        )
        return rows, split._replace(subset=split.subset[takes_part])

    def divide(
        self,
        subset: SubsetArray,
        held_out: BoolArray,
        choices: Mapping[str, TableChoice],
        objective_of: Callable[[Target, BoolArray], Objective],
    ) -> "JoinedTables":
        """Return the joined rows, of which some are held out.

        Args:
            subset: what each joined row is for, (N,).
            held_out: the label table's rows that are held out, (n,).
            choices: the encoders of each table.
            objective_of: makes the objective of a target, by which rows are trained on.
        """
        is_test = subset != TRAIN
        train_weights, test_weights = (
            row_weights(self.weighting, self.weights, self.mapping, chosen)
            for chosen in (~is_test, is_test)
        )
        (train, test), layouts = lay_out(self.mapping, is_test, self.extracted)
        label_rows = self.mapping.tables[self.bound.label_table]
        target = self.labels.with_columns(label_rows.expand(self.labels.stored))
        objective = objective_of(target, ~is_test)
        joined = JoinedTables(
            bound=self.bound,
            choices=choices,
            extracted=self.extracted,
            labels=self.labels,
            mapping=self.mapping,
            steps=self.steps,
            held_out=held_out | ~self.sampled,
            subset=subset,
            train=train,
            test=test,
            layouts=layouts,
            objective=beside_offset(objective, self.extracted.offset_of(label_rows)),
            weighting=replace(self.weighting, test=test_weights),
        )
        return joined.with_weights(train_weights)


@dataclass(frozen=True, kw_only=True)
class JoinedTables(SplitRows):
    """The joined rows, as far as the server knows them.

    ``mapping`` covers all joined rows, over all rows of the tables; ``train`` and
    ``test``, None without held-out rows, cover the rows that take part. ``labels`` are
    the label table's; the ``objective`` is that of all joined rows, without weights.
    """

    labels: Target
    mapping: TableMapping
    steps: tuple[JoinStep, ...]
    subset: SubsetArray
    train: TableMapping
    test: TableMapping | None
    layouts: Layouts
    objective: Objective

    @property
    def parts(self) -> list[Part]:
        """The parts of all tables."""
        return self.extracted.all_parts

    @property
    def is_test(self) -> BoolArray:
        """Which joined rows are held out, to test or to validate."""
        is_test: BoolArray = self.subset != TRAIN
        return is_test

    @property
    def validates(self) -> BoolArray:
        """Which of the held-out rows validate."""
        validates: BoolArray = self.subset[self.is_test] == VALIDATION
        return validates

    def key_codes(self, number: int) -> dict[str, npt.NDArray[np.int32]]:
        """Return by table the number of each row's key of a join, (n,); -1 for NULL."""
        keys = self.extracted.keys
        join = self.bound.joins[number]
        left, right = join_codes(
            join,
            keys[join.left, join.left_key],
            keys[join.right, join.right_key],
            self.extracted.answering.get(number, ""),
        )
        return {join.left: left, join.right: right}

    @property
    def fan_out(self) -> dict[str, dict[str, float]]:
        """By table, the least, mean and most joined rows that a row of it is in."""
        return {
            name: min_mean_max(rows.multiplicity)
            for name, rows in self.mapping.tables.items()
        }

    @property
    def digest_of_tested(self) -> str:
        """A digest of the choice of test rows, and of their labels unless noisy."""
        is_tested = self.subset == TEST
        tested = self.target.select(is_tested)
        labels = b"" if tested.noise else tested.columns.tobytes()
        return hashlib.sha256(is_tested.tobytes() + labels).hexdigest()

    @property
    def target(self) -> Target:
        """The label of all joined rows."""
        return self.objective.target

    @cached_property
    def train_objective(self) -> Objective:
        """The objective of the training rows."""
        rows = self.objective.select(~self.is_test)
        return rows.weighted(self.weighting.train_rows)

    @cached_property
    def test_objective(self) -> Objective:
        """The objective of the held-out rows."""
        return self.objective.select(self.is_test).weighted(self.weighting.test)

    def report_entries(self) -> dict[str, object]:
        """Return the report's entries on the loss, and on the rows' numbers."""
        entries: dict[str, object] = {"loss": self.objective.name}
        weights = self.weighting.report_entry(self.train.joined_rows)
        if weights is not None:
            entries["row-weight"] = weights
        if (offset := self.offset_entry()) is not None:
            entries["offset"] = offset
        if (events := self.events_entry()) is not None:
            entries["events"] = events
        return entries

    def events_entry(self) -> dict[str, int] | None:
        """Return how many rows have an event; None where labels are no times of one."""
        events = self.target.column(EVENT)
        if events is None:
            return None
        return {
            "train": int(np.count_nonzero(events[~self.is_test])),
            "total": int(np.count_nonzero(events)),
        }

    def offset_entry(self) -> dict[str, object] | None:
        """Return the report's entry on the training rows' offset; None without one."""
        objective = self.train_objective
        if not isinstance(objective, OffsetObjective):
            return None
        return {
            "column": f"{self.bound.label_table}: {self.bound.offset_sql}",
            "min": float(objective.offset.min()),
            "max": float(objective.offset.max()),
        }

    def fitted_rows(self) -> PartArrays:
        """Return the fields that say how often rows count in encoders, by part."""
        # weights are counted in parts of a joined row, so many that none overflow
        subdivisions = max(MOST // self.train.joined_rows, 1)
        fields: PartArrays = {}
        for layout in self.layouts.values():
            for row, (number, rows) in enumerate(layout.fields.items()):
                counts = rows["multiplicity"]
                if layout.masses is not None:
                    counts = np.maximum(
                        layout.masses[row] * float(subdivisions), 1.0
                    ).astype(np.int32)
                fields[number] = {"trained": rows["trained"], "multiplicity": counts}
        return fields

    def trained_rows(self, table: str) -> npt.NDArray[np.int64]:
        """Return G of each row of a table that is trained on, (n_trained,)."""
        counts = self.train.tables[table].multiplicity
        return counts[counts > 0]

    def restrict(
        self, rows: IndexArray, weights: FloatArray, tested: IndexArray | None = None
    ) -> "JoinedTables":
        """Return the joined rows, restricted to some of the training rows.

        All of them with unchanged weights are the same problem. The ``rows`` stay in
        order; ``tested`` replaces the held-out rows.
        """
        train = np.flatnonzero(~self.is_test)[rows]
        if tested is None:
            tested = np.flatnonzero(self.is_test)
        chosen = np.concatenate([train, tested])
        held_out = self.subset[tested]
        held_out[held_out == TRAIN] = TEST
        restricted = replace(
            self,
            mapping=self.mapping.select(chosen),
            subset=np.concatenate([self.subset[train], held_out]),
            objective=self.objective.select(chosen),
        )
        # a run with equal weights must equal an unweighted one to the bit
        are_equal = bool(np.all(weights[:1] == weights))
        return restricted.lay_out_anew(None if are_equal else weights)

    def lay_out_anew(self, weights: FloatArray | None) -> "JoinedTables":
        """Return the joined rows over rows of the tables that are laid out anew."""
        (train, test), layouts = lay_out(self.mapping, self.is_test, self.extracted)
        return replace(self, train=train, test=test, layouts=layouts).with_weights(
            weights
        )

    def with_weights(self, weights: FloatArray | None) -> "JoinedTables":
        """Return the joined rows with weights of the training rows, (N,)."""
        if weights is None:
            return replace(self, weighting=replace(self.weighting, train=None))
        train_weights = RowWeights.of(weights, self.train)
        layouts = {
            name: layout.with_masses(train_weights.multiplicity[name])
            for name, layout in self.layouts.items()
        }
        weighting = replace(self.weighting, train=train_weights)
        return replace(self, layouts=layouts, weighting=weighting)
