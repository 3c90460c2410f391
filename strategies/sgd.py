"""TablePuppetSGD: learning over joins by mini-batch SGD, then over unions.

The batch plan is sent once. A batch costs one round where every table is one shard: Y
of batch t down, the local scores of batch t + 1 up; two where some table is sharded,
whose gradients the server sums in between (Eq. 17). Scores of held-out rows ride along
with the last batch of an epoch; the training metrics of an epoch are those of its
batches before their own steps, except after the last epoch, where all rows are scored.
"""

import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies import loj, lou
from strategies.compact import CompactTable
from strategies.exchange import Replies, Request, ask
from strategies.federation import Federation, Table
from strategies.relational import EpochResult, RelationalStrategy
from strategies.setup import Plan
from tp_flower.experiment import Settings
from tp_flower.joins.batches import BatchPlan, plan_batches, poisson_batches
from tp_flower.joins.mapping import TableMapping
from tp_flower.learning.admm import LocalScores
from tp_flower.learning.losses import FloatArray
from tp_flower.learning.metrics import evaluate
from tp_flower.privacy.dp_fit import NOISE_DAMPING
from tp_flower.privacy.noise import NoiseSource
from tp_flower.privacy.settings import DP_SGD, OUTSIDER
from tp_flower.protocol import Action, Update
from tp_flower.randomness import Stream, generator
from tp_flower.wire import Precision, Rounding, Sent, with_feedback

BATCHES_PER_EPOCH = 100
"""Automatic batch size: 1/100 of the joined rows (paper, section 8)."""

PRIVATE_BATCHES_PER_EPOCH = 20
"""The same for DP-SGD: a row pays for every batch that it is in, and the noise of a
batch is the less beside its gradient the more rows it has."""

TORCH_LEARNING_RATE = 0.05
"""Automatic learning rate where some model is not linear."""

NOISE_MARGIN = 4.0
"""Automatic learning rate: how far it stays below the bound on steps of few rows."""

TESTED, ALL = "tested", "all"


@dataclass(frozen=True)
class _Step:
    """One mini-batch of the schedule.

    Attributes:
        epoch: from 1.
        batch: its number in the plan.
        next_batch: the batch after it, None after the last one.
        ends_epoch: whether it is the last batch of its epoch.
        evaluate: which scores ride along: none, ``"tested"`` or ``"all"``.
    """

    epoch: int
    batch: int
    next_batch: int | None
    ends_epoch: bool
    evaluate: str | None


class TablePuppetSGD(RelationalStrategy):
    """Train over the result of a query by mini-batch SGD with momentum.

    Args:
        query: the training set.
        settings: of the run; keyword arguments override single ones.
    """

    name = "sgd"
    _batches: "_ShardedBatches"
    _per_epoch: int
    _rate: float
    _unsent: dict[str, FloatArray]

    def plan(self) -> Plan:
        """Plan the batches when the mapping is known."""
        return Plan(choose_update, self._plan_arrays, self._course)

    def _plan_arrays(
        self, mapping: TableMapping, compact: Mapping[str, CompactTable]
    ) -> lou.PartArrays:
        size = choose_batch_size(self.settings, mapping.joined_rows)
        self.chosen["batch-size"] = size
        self._per_epoch = math.ceil(mapping.joined_rows / size)
        if self._is_poisson:
            self._rate = size / mapping.joined_rows
            steps = self._per_epoch * self.settings.epochs
            # whoever could guess the seed would know the batches
            plan = poisson_batches(mapping, self._rate, steps, NoiseSource())
        else:
            self._rate = 0.0
            rng = generator(self.settings.seed, Stream.BATCHES)
            plan = plan_batches(mapping, size, rng)
        self._batches = _ShardedBatches(plan, compact)
        return self._batches.arrays()

    @property
    def _is_poisson(self) -> bool:
        """Whether batches are drawn so that they hide their rows from an outsider.

        Sub-sampling amplifies privacy where every batch takes every row with the same
        probability, whatever the others do; a partition of the rows does not.
        """
        own = self.settings.privacy
        return own.features == DP_SGD and own.adversary == OUTSIDER

    def _course(self) -> Mapping[str, Any]:
        uses = 1 if self._is_poisson else self.settings.epochs
        return {"batch-uses": uses, "batch-rate": self._rate}

    def epochs(self, federation: Federation) -> Generator[Request, Replies, None]:
        """Run the epochs, until the loss changes less than the tolerance, if set."""
        plan = self._batches.plan
        # rows of which the momentum makes an average
        averaged = len(plan.order) / plan.batches * (1.0 - self.settings.momentum)
        rate = self.settings.learning_rate or _safe_rate(federation, averaged)
        self.chosen["learning-rate"] = rate
        rates = dict.fromkeys(federation.tables, rate)
        if self.settings.privacy.covers_features and not self.settings.learning_rate:
            for name, table in federation.tables.items():
                rates[name] = rate / self._noise_damping(table)
            self.chosen["learning-rates"] = rates
        labels = federation.train_labels[plan.order]
        self._unsent = {}
        seen = np.empty((len(labels), federation.loss.outputs))
        local = {name: s.copy() for name, s in federation.initial_scores.items()}
        loss_before = math.inf
        schedule = list(self._schedule(federation))
        batch_scores = {
            name: local[name][plan.tables[name].of(schedule[0].batch)]
            for name in federation.tables
        }
        for step in schedule:
            span = plan.slice(step.batch)
            scores = plan.sum_scores(step.batch, federation.base_score, batch_scores)
            seen[span] = scores
            derivatives = federation.loss.gradient(scores, labels[span])
            replies = yield from self._exchange(federation, step, derivatives, rates)
            if step.next_batch is not None:
                batch_scores = self._batches.gather(
                    federation, replies, step.next_batch
                )
            if not step.ends_epoch:
                continue
            loss = self._end_epoch(federation, step, replies, local, seen)
            if abs(loss_before - loss) < self.settings.tolerance * abs(loss):
                return
            loss_before = loss

    def _schedule(self, federation: Federation) -> Iterator[_Step]:
        """Yield the batches of all epochs, each epoch in an order of its own."""
        rng = generator(federation.seed, Stream.ORDER)
        count, epochs = self._per_epoch, self.settings.epochs
        if self._is_poisson:
            order = np.arange(self._batches.plan.batches)
        else:
            order = np.concatenate([rng.permutation(count) for _ in range(epochs)])
        # with a tolerance any epoch may be the last one, whose metrics must be exact
        usual = ALL if self.settings.tolerance else TESTED
        for position, batch in enumerate(order.tolist()):
            is_last = position + 1 == len(order)
            ends_epoch = (position + 1) % count == 0
            yield _Step(
                epoch=position // count + 1,
                batch=batch,
                next_batch=None if is_last else int(order[position + 1]),
                ends_epoch=ends_epoch,
                evaluate=(ALL if is_last else usual) if ends_epoch else None,
            )

    def _exchange(
        self,
        federation: Federation,
        step: _Step,
        derivatives: FloatArray,
        rates: Mapping[str, float],
    ) -> Generator[Request, Replies, Replies]:
        """Send Y of a batch (Eq. 10); return the replies with the next scores."""
        decay = 1.0 + self.settings.decay * (step.epoch - 1)
        header: dict[str, Any] = {
            "batch": step.batch,
            # a drawn batch may have any number of rows: it is divided by the mean
            "batch-rows": self.chosen["batch-size"]
            if self._is_poisson
            else len(derivatives),
            "next-batch": step.next_batch,
            "evaluate": step.evaluate,
            "learning-rates": {name: rate / decay for name, rate in rates.items()},
            "momentum": self.settings.momentum,
            "draw": self.draw,
        }
        messages = self._batches.scatter(step.batch, derivatives, self.rounding())
        replies = yield self.request(
            ask(Action.SGD, federation.parts, header, messages)
        )
        if not federation.sharded:
            return replies
        sums: lou.PartArrays = {}
        for table in federation.sharded:
            summed = lou.sum_over_shards(table, replies, "gradient")
            gradient = self._with_feedback(table, summed)
            for part in table.parts:
                sums[part.number] = {"gradient": gradient}
        parts = [part for table in federation.sharded for part in table.parts]
        others = yield self.request(ask(Action.STEP, parts, header, sums))
        return Replies(
            {**replies.packets, **others.packets}, {**replies.arrays, **others.arrays}
        )

    def _with_feedback(self, table: Table, summed: FloatArray) -> Sent:
        """Return a summed gradient as it leaves; what rounding takes is kept."""
        unsent = self._unsent.get(table.name, np.zeros_like(summed))
        sent, self._unsent[table.name] = with_feedback(
            summed, unsent, Precision(self.settings.wire)
        )
        return sent

    def _noise_damping(self, table: Table) -> float:
        """Return what a table's steps are divided by: they must average its noise.

        The noise of a batch's gradient, over the largest that its rows can make it.
        """
        rows = len(self._batches.plan.tables[table.name].rows)
        in_batch = max(rows / self._batches.plan.batches, 1.0)
        noise = table.gradient_noise * math.sqrt(len(table.penalised)) / in_batch
        return 1.0 + NOISE_DAMPING * noise

    def _end_epoch(
        self,
        federation: Federation,
        step: _Step,
        replies: Replies,
        local: LocalScores,
        seen: FloatArray,
    ) -> float:
        """Record the epoch's metrics; return its training loss."""
        for name, table in federation.tables.items():
            if step.evaluate == ALL:
                local[name] = lou.gather_scores(table, replies)
            else:
                lou.gather_tested(table, replies, local[name])
        if step.evaluate == ALL:
            train = loj.train_metrics(federation, loj.gather(federation, local))
        else:
            rows = self._rows_of_epoch(step.epoch)
            order = self._batches.plan.order[rows]
            train = evaluate(
                federation.loss, seen[rows], federation.train_labels[order]
            )
        test = loj.test_metrics(federation, local)
        self.finish_epoch(EpochResult(step.epoch, train, test))
        return train["loss"]

    def _rows_of_epoch(self, epoch: int) -> slice:
        """Where the rows of an epoch's batches are in arrays of batch order."""
        plan = self._batches.plan
        if not self._is_poisson:
            return slice(0, len(plan.order))
        first, last = (plan.start[n * self._per_epoch] for n in (epoch - 1, epoch))
        return slice(int(first), int(last))


class _ShardedBatches:
    """The batch plan, and which of a batch's rows lie in which shard.

    Within a batch the distinct rows of a table ascend, so that each shard's rows are
    one slice: ``bounds[table][k, t]`` is where those of shard k start in batch t.
    """

    def __init__(self, plan: BatchPlan, compact: Mapping[str, CompactTable]) -> None:
        self.plan, self._compact = plan, compact
        self._bounds = {
            name: _shard_bounds(plan, name, table) for name, table in compact.items()
        }

    def arrays(self) -> lou.PartArrays:
        """Return what ``prepare`` sends to each part: its rows of every batch."""
        arrays: lou.PartArrays = {}
        for name, table in self._compact.items():
            rows, bounds = self.plan.tables[name].rows, self._bounds[name]
            for k, (part, own) in enumerate(zip(table.parts, table.rows, strict=True)):
                is_own = (rows >= own.start) & (rows < own.start + own.total)
                starts = np.append(0, np.cumsum(bounds[k + 1] - bounds[k]))
                arrays[part.number] = {
                    "batch-start": starts.astype(np.int32),
                    "batch-rows": (rows[is_own] - own.start).astype(np.int32),
                }
        return arrays

    def scatter(
        self, batch: int, derivatives: FloatArray, rounding: Rounding
    ) -> lou.PartArrays:
        """Return each part's Y (k, d_c) from d loss / d h (B, d_c) of a batch."""
        arrays: lou.PartArrays = {}
        for name, table in self._compact.items():
            summed = self.plan.segment_sum(name, batch, derivatives)
            bounds = self._bounds[name][:, batch]
            for k, part in enumerate(table.parts):
                own = summed[bounds[k] : bounds[k + 1]]
                arrays[part.number] = {"messages": rounding.rows(own)}
        return arrays

    def gather(
        self, federation: Federation, replies: Replies, batch: int
    ) -> dict[str, FloatArray]:
        """Return every table's scores (k, d_c) of a batch's distinct rows."""
        scores = {}
        for name, table in federation.tables.items():
            counts = np.diff(self._bounds[name][:, batch])
            blocks = [
                lou.checked(
                    replies, table, k, "batch-scores", (int(count), table.outputs)
                )
                for k, count in enumerate(counts)
            ]
            scores[name] = np.concatenate(blocks)
        return scores


def _shard_bounds(
    plan: BatchPlan, name: str, table: CompactTable
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


def choose_batch_size(settings: Settings, joined_rows: int) -> int:
    """Return B, at most N."""
    is_private = settings.privacy.features == DP_SGD
    batches = PRIVATE_BATCHES_PER_EPOCH if is_private else BATCHES_PER_EPOCH
    size = settings.batch_size or math.ceil(joined_rows / batches)
    return min(size, joined_rows)


def choose_update(table: str, shards: int, is_linear: bool) -> Update:  # noqa: ARG001
    """Return how the shards of a table train together."""
    return Update.LOCAL if shards == 1 else Update.SUM


def _safe_rate(federation: Federation, averaged: float) -> float:
    """Return 1 / (L + 4 T / averaged) for linear models.

    L bounds the curvature of the whole objective: the largest eigenvalue of the joined
    features' Gram matrix is at most the sum of the tables' own, and the loss's
    curvature multiplies it. T does so with its trace, the mean curvature of single
    rows: steps on few of them must be smaller. ``averaged`` is batch size *
    (1 - momentum).
    """
    tables: list[Table] = list(federation.tables.values())
    if not all(table.is_linear for table in tables):
        return TORCH_LEARNING_RATE
    largest = sum(table.largest_curvature for table in tables)
    trace = sum(
        sum(table.mean_curvature) * (table.features + table.has_intercept)
        for table in tables
    )
    bound = federation.loss.max_curvature * (largest + NOISE_MARGIN * trace / averaged)
    return 1.0 / (bound + federation.l2)
