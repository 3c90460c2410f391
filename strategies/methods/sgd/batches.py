"""The batches of SGD by shard, and the learning rates."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from strategies.run.exchange import PartArrays, Replies
from strategies.setup.joined_rows import Layouts
from strategies.setup.problem import (
    LocalArray,
    LocalScores,
    PartRows,
    TrainedTable,
    TrainingProblem,
)
from tp_flower.arrays import AnyArray, FloatArray, effective_rows
from tp_flower.joins.batches import BatchPlan, TableBatches
from tp_flower.privacy.gradients import NOISE_DAMPING
from tp_flower.protocol.packet import row_numbers


class ShardedBatches:
    """The batch plan, split by shard.

    Within a batch the distinct rows of a table ascend, so that each shard's rows are
    one slice: the rows of shard k start at ``bounds[table][k, t]`` in batch t.
    """

    def __init__(self, plan: BatchPlan, layouts: Layouts) -> None:
        self.plan = plan
        self._layouts = layouts
        self._bounds = {
            name: _shard_bounds(plan.tables[name], layout.rows)
            for name, layout in layouts.items()
        }

    def arrays(self) -> PartArrays:
        """Return each part's rows of every batch, as ``prepare`` sends them."""
        arrays: PartArrays = {}
        for name, table in self._layouts.items():
            rows = self.plan.tables[name].rows
            bounds = self._bounds[name]
            for k, part in enumerate(table.parts):
                span = table.rows[k].slice
                is_own = (rows >= span.start) & (rows < span.stop)
                starts = np.append(0, np.cumsum(bounds[k + 1] - bounds[k]))
                arrays[part.number] = {
                    "batch_start": starts.astype(np.int32),
                    "batch_rows": (rows[is_own] - span.start).astype(np.int32),
                }
        return arrays

    def slices(self, table: str, batch: int) -> list[slice]:
        """Return the slice of each shard's rows among a table's rows in a batch."""
        return [
            slice(*pair) for pair in pairwise(self._bounds[table][:, batch].tolist())
        ]

    def select(self, batch: int, local: LocalScores) -> LocalScores:
        """Select a batch's scores (k, d_c) from the scores of all rows."""
        tables = self.plan.tables
        return {name: scores[tables[name].of(batch)] for name, scores in local.items()}

    def scatter(
        self, batch: int, derivatives: Mapping[str, FloatArray]
    ) -> dict[int, AnyArray]:
        """Return each part's Y (k, w) from d loss / d v_i (B, w) by table."""
        arrays: dict[int, AnyArray] = {}
        for name, table in self._layouts.items():
            summed = self.plan.segment_sum(name, batch, derivatives[name])
            for part, rows in zip(table.parts, self.slices(name, batch), strict=True):
                arrays[part.number] = row_numbers(summed[rows])
        return arrays

    def gather(
        self, batch: int, problem: TrainingProblem, replies: Replies
    ) -> LocalScores:
        """Return every table's scores (k, d_c) of a batch's distinct rows."""
        scores: dict[str, LocalArray] = {}
        for name, table in problem.tables.items():
            # of clear scores the sums are in float64
            blocks = [table.no_scores()[:0]]
            for index, rows in enumerate(self.slices(name, batch)):
                shape = (rows.stop - rows.start, table.outputs)
                blocks.append(table.scores(replies, index, "batch_scores", shape))
            scores[name] = np.concatenate(blocks)
        return scores


def _shard_bounds(
    table: TableBatches, shards: Sequence[PartRows]
) -> npt.NDArray[np.int64]:
    """Return (shards + 1, batches): where each shard's rows start within a batch."""
    total = sum(rows.total for rows in shards)
    batches = len(table.start) - 1
    batch_of = np.repeat(np.arange(batches), np.diff(table.start))
    edges = np.array([rows.start for rows in shards] + [total])
    batch_offsets = np.arange(batches) * total
    keys = batch_of * total + table.rows
    positions = np.searchsorted(keys, batch_offsets[None, :] + edges[:, None])
    bounds: npt.NDArray[np.int64] = positions - table.start[None, :-1]
    return bounds


BATCHES_PER_EPOCH = 100  # if their size is automatic (paper, section 8)
PRIVATE_BATCHES_PER_EPOCH = 20
"""The same for DP-SGD: a row pays for every batch that it is in, and the noise of a
batch is the smaller beside its gradient the more rows the batch has."""

MOMENTUM: Final = 0.9
NEAR_BASE: Final = 4.0
"""Times the curvature at the base score, where no bound is known: an exponential's, of
scores up to 1.4 away."""
NOISE_MARGIN = 4.0  # automatic learning rate: safety margin for steps on few rows


def safe_rate(problem: TrainingProblem, batch_rows: float) -> float:
    """Return 1 / (L + 4 T / averaged).

    For linear models L bounds the curvature of the whole objective: the largest
    eigenvalue of the joined features' Gram matrix is at most the sum of the tables'
    largest, times the loss's curvature. T bounds it by the trace instead, the mean
    curvature of single rows: steps on few rows must be smaller. ``averaged`` is batch
    size * (1 - `MOMENTUM`), the number of rows that the momentum averages; with
    weighted rows, the number of equal rows with the same variance. With other models L
    is T, that of an untrained MLP: a sixth of its features and its width, which scale
    scores.
    """
    tables: list[TrainedTable] = list(problem.tables.values())
    if all(table.is_linear for table in tables):
        scale = 1.0
        largest = sum(table.largest_curvature for table in tables)
        trace = sum(sum(table.mean_curvature) * table.width for table in tables)
    else:
        scale = problem.score_unit
        widths = (t.width + len(t.penalised) / (t.width + 1) for t in tables)
        largest = trace = sum(1.0 + width / 6.0 for width in widths)
    weights = problem.weighting.train_rows
    effective_share = 1.0
    if weights is not None:
        effective_share = effective_rows(weights) / len(weights)
    averaged = batch_rows * (1.0 - MOMENTUM) * effective_share
    bound = largest + NOISE_MARGIN * trace / averaged
    curvature = problem.objective.max_curvature
    if math.isinf(curvature):
        curvature = NEAR_BASE * problem.objective.curvature(problem.base_score)
    return 1.0 / (scale**2 * (curvature * bound + problem.l2))


def damped_rates(
    problem: TrainingProblem, rate: float, rows_per_batch: Mapping[str, float]
) -> dict[str, float]:
    """Return the tables' rates, reduced where steps must average noise.

    A rate is divided by the noise in a batch's gradient, relative to its largest size;
    ``rows_per_batch`` are a table's distinct rows in a mean batch.
    """
    rates = {}
    for name, table in problem.tables.items():
        in_batch = max(rows_per_batch[name], 1.0)
        noise = table.gradient_noise * math.sqrt(len(table.penalised)) / in_batch
        rates[name] = rate / (1.0 + NOISE_DAMPING * noise)
    return rates
