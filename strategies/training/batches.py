"""The batches of SGD by shard: what goes to which shard, and comes from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from strategies.run.exchange import Part, PartArrays, Replies
from strategies.setup.problem import Federation
from strategies.setup.row_layout import TableLayout
from strategies.training import unions
from tp_flower.arrays import FloatArray
from tp_flower.joins.batches import BatchPlan
from tp_flower.protocol import AnyArray, row_numbers


class ShardedBatches:
    """The batch plan, and which of a batch's rows lie in which shard.

    Within a batch the distinct rows of a table ascend, so that each shard's rows are
    one slice: ``bounds[table][k, t]`` is where those of shard k start in batch t.

    Attributes:
        plan: of the batches.
    """

    def __init__(self, plan: BatchPlan, compact: Mapping[str, TableLayout]) -> None:
        self.plan, self._compact = plan, compact
        self._bounds = {
            name: _shard_bounds(plan, name, table) for name, table in compact.items()
        }

    def arrays(self) -> PartArrays:
        """Return what ``prepare`` sends to each part: its rows of every batch."""
        arrays: PartArrays = {}
        for name, table in self._compact.items():
            rows, bounds = self.plan.tables[name].rows, self._bounds[name]
            for k, (part, own) in enumerate(zip(table.parts, table.rows, strict=True)):
                is_own = (rows >= own.start) & (rows < own.start + own.total)
                starts = np.append(0, np.cumsum(bounds[k + 1] - bounds[k]))
                arrays[part.number] = {
                    "batch_start": starts.astype(np.int32),
                    "batch_rows": (rows[is_own] - own.start).astype(np.int32),
                }
        return arrays

    def slices(self, table: str, batch: int) -> list[slice]:
        """Return where each shard's rows are among those of a table in a batch."""
        edges = self._bounds[table][:, batch].tolist()
        return [slice(*pair) for pair in pairwise(edges)]

    @property
    def parts(self) -> Mapping[str, tuple[Part, ...]]:
        """The shards of every table."""
        return {name: table.parts for name, table in self._compact.items()}


@dataclass(frozen=True)
class Batch:
    """One mini-batch.

    Attributes:
        batches: that it is one of.
        number: in their plan.
    """

    batches: ShardedBatches
    number: int

    @property
    def span(self) -> slice:
        """Where its joined rows are in arrays of batch order."""
        return self.batches.plan.slice(self.number)

    def sum_scores(
        self, base: FloatArray, local: Mapping[str, FloatArray]
    ) -> FloatArray:
        """Return h (B, d_c) from the tables' scores (k, d_c) of the batch's rows."""
        return self.batches.plan.sum_scores(self.number, base, local)

    def select(self, local: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
        """Return the scores (k, d_c) of its rows out of those of all rows."""
        tables = self.batches.plan.tables
        return {name: own[tables[name].of(self.number)] for name, own in local.items()}

    def scatter(self, derivatives: FloatArray) -> dict[int, AnyArray]:
        """Return each part's Y (k, d_c) from d loss / d h (B, d_c)."""
        arrays: dict[int, AnyArray] = {}
        plan = self.batches.plan
        for name, parts in self.batches.parts.items():
            summed = plan.segment_sum(name, self.number, derivatives)
            slices = self.batches.slices(name, self.number)
            for part, rows in zip(parts, slices, strict=True):
                arrays[part.number] = row_numbers(summed[rows])
        return arrays

    def gather(self, federation: Federation, replies: Replies) -> dict[str, FloatArray]:
        """Return every table's scores (k, d_c) of its distinct rows."""
        scores = {}
        for name, table in federation.tables.items():
            blocks = [
                unions.checked(
                    replies,
                    table,
                    index,
                    "batch_scores",
                    (rows.stop - rows.start, table.outputs),
                )
                for index, rows in enumerate(self.batches.slices(name, self.number))
            ]
            scores[name] = np.concatenate(blocks)
        return scores


def _shard_bounds(
    plan: BatchPlan, name: str, table: TableLayout
) -> npt.NDArray[np.int64]:
    """Return (shards + 1, batches): where each shard's rows start within a batch."""
    own = plan.tables[name]
    total = sum(rows.total for rows in table.rows)
    batch_of = np.repeat(np.arange(plan.batches), np.diff(own.start))
    keys = batch_of * total + own.rows
    edges = np.array([rows.start for rows in table.rows] + [total])
    first = np.arange(plan.batches) * total
    found = np.searchsorted(keys, first[None, :] + edges[:, None])
    bounds: npt.NDArray[np.int64] = found - own.start[None, :-1]
    return bounds
