"""Renumber the rows that take part in training, per shard the trained ones first.

Most messages of a run carry one number per row. Rows that no joined row comes from are
left out, and rows that are only tested come last, so that a shard's target and a
shard's scores are slices, here and at the site. Of a LEFT JOINed table there may be no
trained row at all.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from strategies.run.exchange import Part
from strategies.setup.problem import PartRows
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.joins.table_rows import NO_ROW, FloatArray
from tp_flower.protocol import pack_bits

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TableLayout(ABC):
    """How the rows of one table that take part are numbered.

    Attributes:
        name: alias of the table.
        parts: its shards.
        rows: where each part's rows lie after renumbering.
        masses: per part, (trained rows,): G^w, which takes the place of G where joined
            rows are weighted; None where they are not.
    """

    name: str
    parts: tuple[Part, ...]
    rows: tuple[PartRows, ...]
    masses: tuple[npt.NDArray[np.float32], ...] | None = field(
        default=None, kw_only=True
    )

    @property
    @abstractmethod
    def shard_rows(self) -> tuple[int, ...]:
        """Rows of each part's shard, whether they take part or not."""

    @abstractmethod
    def set_up_arrays(self) -> dict[int, dict[str, Any]]:
        """Return what ``prepare`` sends to each part."""


Layout = TypeVar("Layout", bound=TableLayout)


@dataclass(frozen=True)
class CompactTable(TableLayout):
    """One table's rows that take part, each once.

    Attributes:
        trained: per part, (rows of the shard,) bool.
        tested: per part, (rows of the shard,) bool.
        multiplicity: per part, (trained rows,): G of its trained rows.
    """

    trained: tuple[BoolArray, ...]
    tested: tuple[BoolArray, ...]
    multiplicity: tuple[npt.NDArray[np.int32], ...]

    @property
    def shard_rows(self) -> tuple[int, ...]:
        """Rows of each part's shard."""
        return tuple(len(own) for own in self.trained)

    def set_up_arrays(self) -> dict[int, dict[str, Any]]:
        """Return what ``prepare`` sends to each part."""
        return {
            part.number: {
                "trained": pack_bits(self.trained[k]),
                "tested": pack_bits(self.tested[k]),
                **(
                    {"multiplicity": self.multiplicity[k]}
                    if self.masses is None
                    else {"masses": self.masses[k]}
                ),
            }
            for k, part in enumerate(self.parts)
        }


def compact_tables(
    mapping: TableMapping,
    is_test: BoolArray,
    parts: Mapping[str, tuple[Part, ...]],
    part_rows: Mapping[int, int],
) -> tuple[TableMapping, TableMapping | None, dict[str, CompactTable]]:
    """Split the joined rows and renumber every table's rows.

    Args:
        mapping: of all joined rows.
        is_test: (N_all,) bool, the held-out joined rows.
        parts: by table, in shard order.
        part_rows: rows of every part.

    Returns:
        The mapping of the training rows, that of the held-out rows (None without any),
        and the renumbered tables.
    """
    train, test = mapping.select(~is_test), mapping.select(is_test)
    return compact_rows(train, test, parts, part_rows)


def compact_rows(
    train: TableMapping,
    test: TableMapping,
    parts: Mapping[str, tuple[Part, ...]],
    part_rows: Mapping[int, int],
) -> tuple[TableMapping, TableMapping | None, dict[str, CompactTable]]:
    """Renumber the rows of every table that are in some joined rows.

    Args:
        train: mapping of the joined rows to train on, over all rows of the tables.
        test: likewise of those to test on; some may be the same.
        parts: by table, in shard order.
        part_rows: rows of every part.

    Returns:
        Both mappings over the renumbered rows (None for a test without any), and the
        renumbered tables.
    """
    train_rows: dict[str, TableRows] = {}
    test_rows: dict[str, TableRows] = {}
    compact: dict[str, CompactTable] = {}
    for name, own in parts.items():
        counts = train.tables[name].multiplicity
        tested = test.tables[name].multiplicity > 0
        sizes = [part_rows[part.number] for part in own]
        compact[name], new_number = _compact(name, own, sizes, counts, tested)
        total = sum(rows.total for rows in compact[name].rows)
        train_rows[name] = TableRows(new_number[train.tables[name].row_of], total)
        test_rows[name] = TableRows(new_number[test.tables[name].row_of], total)
    return (
        TableMapping(train_rows),
        TableMapping(test_rows) if test.joined_rows else None,
        compact,
    )


def weighted_tables(
    tables: Mapping[str, Layout], masses: Mapping[str, FloatArray]
) -> dict[str, Layout]:
    """Return the tables with what the training rows of each row weigh.

    Args:
        tables: by name.
        masses: by name G^w, (rows that take part,): numbers that float32 has.
    """
    return {
        name: replace(
            own,
            masses=tuple(
                masses[name][rows.trained_slice].astype(np.float32) for rows in own.rows
            ),
        )
        for name, own in tables.items()
    }


def _compact(
    name: str,
    parts: tuple[Part, ...],
    sizes: list[int],
    counts: npt.NDArray[np.int64],
    tested: BoolArray,
) -> tuple[CompactTable, npt.NDArray[np.int32]]:
    """Return the renumbered table and the new number of each old row, (n_i + 1,)."""
    # the extra last entry stays: NO_ROW is renumbered to itself
    new_number = np.full(len(counts) + 1, NO_ROW, dtype=np.int32)
    rows, trained_masks, tested_masks, multiplicity = [], [], [], []
    start = offset = 0
    for size in sizes:
        own_counts = counts[offset : offset + size]
        own_tested = tested[offset : offset + size]
        own_trained = own_counts > 0
        kept = np.concatenate(
            [np.flatnonzero(own_trained), np.flatnonzero(own_tested & ~own_trained)]
        )
        new_number[offset + kept] = np.arange(start, start + len(kept), dtype=np.int32)
        trained = int(np.count_nonzero(own_trained))
        rows.append(PartRows(start, trained, len(kept), own_tested[kept]))
        trained_masks.append(own_trained)
        tested_masks.append(own_tested)
        multiplicity.append(own_counts[own_trained].astype(np.int32))
        start, offset = start + len(kept), offset + size
    table = CompactTable(
        name,
        parts,
        tuple(rows),
        tuple(trained_masks),
        tuple(tested_masks),
        tuple(multiplicity),
    )
    return table, new_number
