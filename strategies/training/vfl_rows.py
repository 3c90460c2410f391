"""The rows of every table as VFL takes them: one for each joined row that has one.

VFL is what TablePuppet is compared with: training on the vertical partitions of the
joined table (paper, section 5). Here these are the tables' own rows, repeated as the
join repeats them, so that all else is the code that trains on the tables. Every row of
this mapping is in one joined row; encoders, splits, batches and seeds are those of the
same run on the tables, and so are the iterates, up to the rounding of messages.

It is for comparisons only: a site learns which of its rows is behind each joined row,
in their order, and its messages have a number for each.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.run.exchange import Part
from strategies.setup.joined_rows import Alignment
from strategies.setup.problem import PartRows
from strategies.setup.row_layout import TableLayout, weighted_tables
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.joins.row_weights import RowWeights
from tp_flower.joins.table_rows import NO_ROW

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ExpandedTable(TableLayout):
    """One table's rows, repeated.

    Attributes:
        trained: per part, the row of the shard behind each of its joined training rows.
        tested: the same of joined rows that are held out.
        sizes: rows of each part's shard.
    """

    trained: tuple[IntArray, ...]
    tested: tuple[IntArray, ...]
    sizes: tuple[int, ...]

    @property
    def shard_rows(self) -> tuple[int, ...]:
        """Rows of each part's shard."""
        return self.sizes

    def set_up_arrays(self) -> dict[int, dict[str, Any]]:
        """Return what ``prepare`` sends to each part: its list of rows."""
        return {
            part.number: {
                "expanded_trained": self.trained[k],
                "expanded_tested": self.tested[k],
                **({} if self.masses is None else {"masses": self.masses[k]}),
            }
            for k, part in enumerate(self.parts)
        }


def expand(aligned: Alignment) -> Alignment:
    """Return the same joined rows over rows of the tables that are repeated."""
    train = aligned.mapping.select(~aligned.is_test)
    test = aligned.mapping.select(aligned.is_test)
    train_rows: dict[str, TableRows] = {}
    test_rows: dict[str, TableRows] = {}
    tables: dict[str, ExpandedTable] = {}
    for name, parts in aligned.extracted.parts.items():
        sizes = tuple(aligned.extracted.rows[part.number] for part in parts)
        row_of = train.tables[name].row_of, test.tables[name].row_of
        table, numbers = _expand(name, parts, sizes, row_of)
        tables[name] = table
        total = sum(rows.total for rows in table.rows)
        train_rows[name] = TableRows(numbers[0], total)
        test_rows[name] = TableRows(numbers[1], total)
    expanded, weighting = TableMapping(train_rows), aligned.weighting
    if weighting.train is not None:
        own = RowWeights.of(weighting.train.rows, expanded)
        weighting = replace(weighting, train=own)
        tables = weighted_tables(tables, own.masses)
    return replace(
        aligned,
        train=expanded,
        test=None if aligned.test is None else TableMapping(test_rows),
        compact=tables,
        weighting=weighting,
    )


def _expand(
    name: str,
    parts: tuple[Part, ...],
    sizes: tuple[int, ...],
    row_of: tuple[IntArray, IntArray],
) -> tuple[ExpandedTable, tuple[IntArray, IntArray]]:
    """Return the repeated table, and its row behind each joined row.

    Args:
        name: of the table.
        parts: its shards.
        sizes: their rows.
        row_of: the row of the table behind each joined row to train on, and held out.
    """
    trained, tested = (np.full(len(rows), NO_ROW, np.int32) for rows in row_of)
    layout: list[PartRows] = []
    behind: tuple[list[IntArray], list[IntArray]] = [], []
    start = offset = 0
    for size in sizes:
        to_train, to_test = (
            np.flatnonzero((rows >= offset) & (rows < offset + size)) for rows in row_of
        )
        middle = start + len(to_train)
        stop = middle + len(to_test)
        trained[to_train] = np.arange(start, middle, dtype=np.int32)
        tested[to_test] = np.arange(middle, stop, dtype=np.int32)
        behind[0].append(row_of[0][to_train] - np.int32(offset))
        behind[1].append(row_of[1][to_test] - np.int32(offset))
        is_tested = np.arange(start, stop) >= middle
        layout.append(PartRows(start, len(to_train), stop - start, is_tested))
        start, offset = stop, offset + size
    table = ExpandedTable(
        name, parts, tuple(layout), tuple(behind[0]), tuple(behind[1]), sizes
    )
    return table, (trained, tested)
