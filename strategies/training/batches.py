"""The batches of SGD by shard, and the size of their steps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from strategies.run.exchange import Part, PartArrays, Replies
from strategies.setup.problem import Table, TrainingProblem
from strategies.setup.row_layout import Layouts, TableLayout
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.joins.batches import BatchPlan
from tp_flower.privacy.gradients import NOISE_DAMPING
from tp_flower.protocol.packet import row_numbers


class ShardedBatches:
    """The batch plan, split by shard.

    Within a batch the distinct rows of a table ascend, so that each shard's rows are
    one slice: ``bounds[table][k, t]`` is where those of shard k start in batch t.
    """

    def __init__(self, plan: BatchPlan, layouts: Layouts) -> None:
        self.plan, self._layouts = plan, layouts
        self._bounds = {
            name: _shard_bounds(plan, name, table) for name, table in layouts.items()
        }

    def arrays(self) -> PartArrays:
        """Return what ``prepare`` sends to each part: its rows of every batch."""
        arrays: PartArrays = {}
        for name, table in self._layouts.items():
            rows, bounds = self.plan.tables[name].rows, self._bounds[name]
            for k, (part, layout_rows) in enumerate(
                zip(table.parts, table.rows, strict=True)
            ):
                is_own = (rows >= layout_rows.start) & (
                    rows < layout_rows.start + layout_rows.total
                )
                starts = np.append(0, np.cumsum(bounds[k + 1] - bounds[k]))
                arrays[part.number] = {
                    "batch_start": starts.astype(np.int32),
                    "batch_rows": (rows[is_own] - layout_rows.start).astype(np.int32),
                }
        return arrays

    def slices(self, table: str, batch: int) -> list[slice]:
        """Return where each shard's rows are among those of a table in a batch."""
        edges = self._bounds[table][:, batch].tolist()
        return [slice(*pair) for pair in pairwise(edges)]

    @property
    def parts(self) -> Mapping[str, tuple[Part, ...]]:
        """The shards of every table."""
        return {name: table.parts for name, table in self._layouts.items()}


@dataclass(frozen=True)
class Batch:
    """One mini-batch."""

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
        return {
            name: scores[tables[name].of(self.number)] for name, scores in local.items()
        }

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

    def gather(
        self, problem: TrainingProblem, replies: Replies
    ) -> dict[str, FloatArray]:
        """Return every table's scores (k, d_c) of its distinct rows."""
        scores = {}
        for name, table in problem.tables.items():
            blocks = [
                table.array(
                    replies,
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
    places = np.searchsorted(keys, first[None, :] + edges[:, None])
    bounds: npt.NDArray[np.int64] = places - own.start[None, :-1]
    return bounds


BATCHES_PER_EPOCH = 100
"""Automatic batch size: 1/100 of the joined rows (paper, section 8)."""

PRIVATE_BATCHES_PER_EPOCH = 20
"""The same for DP-SGD: a row pays for every batch that it is in, and the noise of a
batch is the less beside its gradient the more rows it has."""

TORCH_LEARNING_RATE = 0.05
"""Automatic learning rate where some model is not linear. It is far below what is
stable: on flights, MLPs reach the same loss with it whether scores are stale or not,
and 0.018 more in three epochs with an eighth of it."""

NOISE_MARGIN = 4.0
"""Automatic learning rate: how far it stays below the bound on steps of few rows."""

STALE_MARGIN = 0.5
"""How far steps on stale scores stay below what is stable: oscillations then die away
nearly as fast as without delay (by 0.960 per step instead of 0.949 at momentum 0.9)."""


def safe_rate(
    problem: TrainingProblem, batch_rows: float, momentum: float, *, is_stale: bool
) -> float:
    """Return 1 / (L / s + 4 T / averaged) for linear models.

    L bounds the curvature of the whole objective: the largest eigenvalue of the joined
    features' Gram matrix is at most the sum of the tables' own, and the loss's
    curvature multiplies it. T does so with its trace, the mean curvature of single
    rows: steps on few of them must be smaller. ``averaged`` is batch size *
    (1 - momentum), the rows of which the momentum makes an average; where rows are
    weighted, the equal ones whose average is as sure. s is 1, or less where scores are
    stale. Other models have a rate of their own.
    """
    tables: list[Table] = list(problem.tables.values())
    if not all(table.is_linear for table in tables):
        return TORCH_LEARNING_RATE
    largest = sum(table.largest_curvature for table in tables)
    trace = sum(
        sum(table.mean_curvature) * (table.features + table.has_intercept)
        for table in tables
    )
    weights = problem.weighting.train
    counted = 1.0 if weights is None else weights.effective_share
    averaged = batch_rows * (1.0 - momentum) * counted
    share = STALE_MARGIN * stale_limit(momentum) if is_stale else 1.0
    bound = largest / share + NOISE_MARGIN * trace / averaged
    return 1.0 / (problem.loss.max_curvature * bound + problem.l2)


def stale_limit(momentum: float) -> float:
    """Return the a below which SGD with scores of one step ago is stable.

    a is learning rate * curvature. On a quadratic, momentum mu and scores that lack
    the last gradient only (``strategies.training.sgd``) make

        (z - 1)(z - mu)(z - a) + a z^2 = 0

    the equation of its modes. All |z| < 1 (Jury) where mu^2 a^2 + (1 - mu^2) a < 1 -
    mu. Without delay it is a < 2 (1 + mu).

    >>> round(stale_limit(0.9), 3), stale_limit(0.0)
    (0.253, 1.0)
    """
    if not momentum:
        return 1.0
    square = momentum**2
    root = math.sqrt((1.0 - square) ** 2 + 4.0 * square * (1.0 - momentum))
    return (root - (1.0 - square)) / (2.0 * square)


def damped_rates(
    problem: TrainingProblem, rate: float, rows_per_batch: Mapping[str, float]
) -> dict[str, float]:
    """Return the rates of the tables where their steps must average noise.

    A rate is divided by the noise of a batch's gradient over the largest that its rows
    can make it.

    ``rows_per_batch`` is the mean number of distinct rows of a table in a batch.
    """

    def damping(table: Table) -> float:
        in_batch = max(rows_per_batch[table.name], 1.0)
        noise = table.gradient_noise * math.sqrt(len(table.penalised)) / in_batch
        return 1.0 + NOISE_DAMPING * noise

    return {name: rate / damping(table) for name, table in problem.tables.items()}
