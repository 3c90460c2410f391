"""Row layout: which rows of each table are trained on, and how they are numbered.

A table goes by its own rows, each once with its multiplicity, or (VFL) by the joined
rows: then a row of the table is there for every joined row it is in. Within a shard the
trained rows come first, then those that are only tested.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from strategies.run.exchange import Part
from strategies.setup.problem import PartRows
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.joins.mapping import NO_ROW, IntArray, TableMapping, TableRows
from tp_flower.protocol.packet import pack_bits


@dataclass(frozen=True)
class TableLayout:
    """The rows of one table that take part.

    Attributes:
        rows: where each part's rows lie after renumbering.
        shard_rows: rows of each part's shard, whether they take part or not.
        fields: per part, the fields of ``PreparePart`` that say which rows take part.
        masses: per part, (trained rows,): G^w, which takes the place of G where joined
            rows are weighted; None where they are not.
    """

    name: str
    parts: tuple[Part, ...]
    rows: tuple[PartRows, ...]
    shard_rows: tuple[int, ...]
    fields: tuple[Mapping[str, Any], ...]
    masses: tuple[FloatArray, ...] | None = None

    @property
    def is_repeated(self) -> bool:
        """Whether it has a row for every joined row."""
        return "expanded_trained" in self.fields[0] if self.fields else False

    def set_up_fields(self) -> dict[int, dict[str, Any]]:
        """Return the fields that ``prepare`` sends to each part."""
        by_part = {
            part.number: dict(fields)
            for part, fields in zip(self.parts, self.fields, strict=True)
        }
        for part, masses in zip(self.parts, self.masses or (), strict=False):
            by_part[part.number].pop("multiplicity", None)
            by_part[part.number]["masses"] = masses
        return by_part

    def weighted(self, masses: FloatArray) -> "TableLayout":
        """Return the layout with G^w, (rows that take part,): float32 numbers."""
        parts = (masses[rows.trained_slice] for rows in self.rows)
        return replace(self, masses=tuple(part.astype(np.float32) for part in parts))


Layouts = Mapping[str, TableLayout]
Mappings = tuple[TableMapping, TableMapping | None]
"""Of the training rows, and of the held-out rows: None without any."""
LayOut = Callable[
    [TableMapping, BoolArray, Mapping[str, tuple[Part, ...]], Mapping[int, int]],
    tuple[Mappings, dict[str, TableLayout]],
]
_Numbers = tuple[IntArray, IntArray]
"""The row of a table behind each joined row to train on, and behind each held out."""


def _lay_out(
    lay_out: Callable[..., tuple[TableLayout, _Numbers]],
    mapping: TableMapping,
    is_test: BoolArray,
    parts: Mapping[str, tuple[Part, ...]],
    part_rows: Mapping[int, int],
) -> tuple[Mappings, dict[str, TableLayout]]:
    train, test = mapping.select(~is_test), mapping.select(is_test)
    layouts: dict[str, TableLayout] = {}
    trained: dict[str, TableRows] = {}
    tested: dict[str, TableRows] = {}
    for name, shards in parts.items():
        sizes = tuple(part_rows[part.number] for part in shards)
        layouts[name], numbers = lay_out(
            name, shards, sizes, train.tables[name], test.tables[name]
        )
        total = sum(rows.total for rows in layouts[name].rows)
        trained[name] = TableRows(numbers[0], total)
        tested[name] = TableRows(numbers[1], total)
    held_out = TableMapping(tested) if test.joined_rows else None
    return (TableMapping(trained), held_out), layouts


def _distinct(
    name: str,
    parts: tuple[Part, ...],
    sizes: tuple[int, ...],
    train: TableRows,
    test: TableRows,
) -> tuple[TableLayout, _Numbers]:
    is_trained, is_tested = train.multiplicity > 0, test.multiplicity > 0
    # the extra last entry stays: NO_ROW is renumbered to itself
    new_number = np.full(train.rows + 1, NO_ROW, dtype=np.int32)
    rows: list[PartRows] = []
    fields = []
    start = offset = 0
    for size in sizes:
        shard = slice(offset, offset + size)
        used, held_out = is_trained[shard], is_tested[shard]
        order = np.concatenate([np.flatnonzero(used), np.flatnonzero(held_out & ~used)])
        stop = start + len(order)
        new_number[offset + order] = np.arange(start, stop, dtype=np.int32)
        trained = int(np.count_nonzero(used))
        rows.append(PartRows(start, trained, len(order), held_out[order]))
        fields.append(
            {
                "trained": pack_bits(used),
                "tested": pack_bits(held_out),
                "multiplicity": train.multiplicity[shard][used].astype(np.int32),
            }
        )
        start, offset = stop, offset + size
    layout = TableLayout(name, parts, tuple(rows), sizes, tuple(fields))
    return layout, (new_number[train.row_of], new_number[test.row_of])


def _repeated(
    name: str,
    parts: tuple[Part, ...],
    sizes: tuple[int, ...],
    train: TableRows,
    test: TableRows,
) -> tuple[TableLayout, _Numbers]:
    row_of = train.row_of, test.row_of
    numbers = tuple(np.full(len(behind), NO_ROW, np.int32) for behind in row_of)
    rows: list[PartRows] = []
    fields = []
    start = offset = 0
    for size in sizes:
        to_train, to_test = (
            np.flatnonzero((behind >= offset) & (behind < offset + size))
            for behind in row_of
        )
        middle = start + len(to_train)
        stop = middle + len(to_test)
        numbers[0][to_train] = np.arange(start, middle, dtype=np.int32)
        numbers[1][to_test] = np.arange(middle, stop, dtype=np.int32)
        is_tested = np.arange(start, stop) >= middle
        rows.append(PartRows(start, len(to_train), stop - start, is_tested))
        fields.append(
            {
                "expanded_trained": train.row_of[to_train] - np.int32(offset),
                "expanded_tested": test.row_of[to_test] - np.int32(offset),
                "held_out_rows": len(test.row_of),
            }
        )
        start, offset = stop, offset + size
    layout = TableLayout(name, parts, tuple(rows), sizes, tuple(fields))
    return layout, (numbers[0], numbers[1])


distinct_rows: LayOut = partial(_lay_out, _distinct)
"""Splits the joined rows, and lays out each table's rows that take part, each once."""
repeated_rows: LayOut = partial(_lay_out, _repeated)
"""Does the same with a row of the table for every joined row that it is in."""
