"""The batch plan of SGD: which rows of every table a mini-batch of joined rows needs.

The plan is drawn once and sent to the sites at set-up; later rounds refer to a batch by
number, and epochs permute the order of the batches. Within a batch the server sums over
the duplicates of a table's row (Eq. 10), so that a site sees each row once. A joined
row without a row of some table is in a batch, too, and contributes nothing there.

Batches are a random partition of the joined rows. No accountant counts amplification by
sampling for it, and against the server, which draws the batches, there is none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray, IntArray
from tp_flower.joins.mapping import NO_ROW, Number, TableMapping, TableRows


@dataclass(frozen=True)
class TableBatches:
    """The batches from the view of one table, in compressed sparse row form.

    Attributes:
        start: (batches + 1,), into ``rows``: distinct rows, ascending within a batch.
        slots: (N,), for each joined row in batch order, the position of its row of the
            table among the batch's distinct rows, or -1 if it has none.
    """

    start: IntArray
    rows: IntArray
    slots: npt.NDArray[np.int32]

    def of(self, batch: int) -> IntArray:
        """Return the distinct rows of a batch, (k,)."""
        return self.rows[self.start[batch] : self.start[batch + 1]]


@dataclass(frozen=True)
class BatchPlan:
    """All mini-batches of one run.

    Batch t holds the joined rows ``order[start[t] : start[t + 1]]``, with ``order``
    (N,).
    """

    order: IntArray
    start: IntArray
    tables: Mapping[str, TableBatches]

    @property
    def batches(self) -> int:
        """Number of batches."""
        return len(self.start) - 1

    def slice(self, batch: int) -> slice:
        """Return the slice of a batch in arrays in batch order."""
        return slice(int(self.start[batch]), int(self.start[batch + 1]))

    def expand(
        self,
        batch: int,
        local: Mapping[str, npt.NDArray[Number]],
        *,
        by_table: bool = False,
    ) -> npt.NDArray[Number]:
        """Return the sums (B, c) of the tables' values (k, c) of the batch's rows.

        With ``by_table``, return the values of each table instead, (B, M, c).
        """
        tables = {table: self._rows_of(table, batch) for table in self.tables}
        return TableMapping(tables).expand(local, by_table=by_table)

    def segment_sum(self, table: str, batch: int, values: FloatArray) -> FloatArray:
        """Return Y_i (k, d_c): values (B, d_c) summed per distinct row (Eq. 10)."""
        return self._rows_of(table, batch).segment_sum(values)

    def _rows_of(self, table: str, batch: int) -> TableRows:
        plan = self.tables[table]
        return TableRows(plan.slots[self.slice(batch)], len(plan.of(batch)))


def plan_batches(
    mapping: TableMapping, batch_size: int, rng: np.random.Generator
) -> BatchPlan:
    """Draw a random partition of the joined rows into batches of ``batch_size``."""
    total = mapping.joined_rows
    order = rng.permutation(total)
    count = -(-total // batch_size)
    start = np.minimum(np.arange(count + 1) * batch_size, total)
    batch_of = np.repeat(np.arange(count), np.diff(start))
    tables = {
        table: _table_batches(rows.row_of[order], rows.rows, batch_of, count)
        for table, rows in mapping.tables.items()
    }
    return BatchPlan(order, start, tables)


def _table_batches(
    row_of: npt.NDArray[np.integer], rows: int, batch_of: IntArray, count: int
) -> TableBatches:
    """Return a table's distinct rows per batch, from its row (N,) and batch (N,)."""
    matched = np.flatnonzero(row_of >= 0)
    batches = batch_of[matched]
    pairs, pair_index = np.unique(batches * rows + row_of[matched], return_inverse=True)
    start = np.searchsorted(pairs, np.arange(count + 1) * rows)
    slots = np.full(len(row_of), NO_ROW, dtype=np.int32)
    slots[matched] = pair_index - start[batches]
    return TableBatches(start, pairs % max(rows, 1), slots)
