"""TablePuppetSGD: learning over joins by mini-batch SGD, then over unions.

The batch plan is sent once. A batch costs one round if every table is one shard: Y of
batch t down, the local scores of batch t + 1 up. It costs two if some table is sharded:
the server sums its gradients in between (Eq. 17). Scores of held-out rows come with the
last batch of an epoch; the training metrics of an epoch are computed on its batches
before their own steps, except after the last epoch, when all rows are scored.
"""

import itertools
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from strategies.methods.sgd.batches import (
    BATCHES_PER_EPOCH,
    MOMENTUM,
    PRIVATE_BATCHES_PER_EPOCH,
    ShardedBatches,
    damped_rates,
    safe_rate,
)
from strategies.run.exchange import PartArrays, Replies, Requests, ask
from strategies.run.strategy import EpochResult, ends_early, tests_every_epoch
from strategies.setup.joined_rows import Layouts
from strategies.setup.problem import HeldOutMetrics, LocalScores, TrainingProblem
from strategies.training.join_method import JoinMethod
from strategies.training.strategy import TrainingStrategy
from strategies.training.traffic import ShardSize, TableSize, Tally, Traffic, shards_of
from strategies.training.trend import LEAST_FACTOR, StepControl, falling_rate
from strategies.training.working_memory import curvature_bytes
from tp_flower.arrays import FloatArray
from tp_flower.joins.batches import plan_batches
from tp_flower.joins.mapping import TableMapping
from tp_flower.methods.sgd.messages import (
    TRAIN_SGD,
    TRAIN_STEP,
    BatchMessages,
    BatchStep,
    BatchUpdate,
    MeanGradient,
    SgdRequest,
    StepRequest,
)
from tp_flower.protocol.fields import DP_SGD
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import Update
from tp_flower.randomness import Stream, generator
from tp_flower.settings import Settings

TESTED = "tested"
ALL = "all"


@dataclass(frozen=True)
class _Epoch:
    """One pass over the joined rows: the order of the batches, the learning rates."""

    number: int
    order: npt.NDArray[np.int64]
    rates: Mapping[str, float]


@dataclass(frozen=True)
class _Step:
    """One mini-batch of the schedule.

    ``next_batch`` is None after the last one; ``evaluate`` says which scores come with
    it: none, those of tested rows, or all.
    """

    epoch: _Epoch
    batch: int
    next_batch: int | None
    begins_epoch: bool = False
    ends_epoch: bool = False
    evaluate: str | None = None


class Sgd(JoinMethod):
    """SGD at the server: a step after every batch of joined rows, or of all."""

    messages = (Action.PREPARE, TRAIN_SGD)
    messages_of_shards = (TRAIN_STEP,)
    copies_lowest = True
    trains_any_head = True

    # in SGD the bias of a clip at one deviation costs more than the noise of one at
    # three (test RMSE at epsilon 1 on MovieLens 1.116 and 1.110); in ADMM it does not
    label_reach = 3.0

    _batches: ShardedBatches
    _scores_number: int = 0

    def choose_update(self, table: str, shards: int, *, is_linear: bool) -> Update:
        """Sum the gradients of sharded tables."""
        del table, is_linear
        return Update.LOCAL if shards == 1 else Update.SUM

    def batch_size(self, joined_rows: int) -> int:
        """Return B, at most N."""
        if self.settings.method.is_full_batch:
            return joined_rows
        is_private = self.settings.privacy.features == DP_SGD
        batches = BATCHES_PER_EPOCH
        if is_private:
            batches = PRIVATE_BATCHES_PER_EPOCH
        return min(
            self.settings.batch_size or math.ceil(joined_rows / batches), joined_rows
        )

    @property
    def is_paced(self) -> bool:
        """Whether the losses decide how large the steps are."""
        return not (self.settings.learning_rate or self.settings.is_noisy)

    def plan_batches(self, mapping: TableMapping, layouts: Layouts) -> PartArrays:
        """Plan the batches once the mapping is known."""
        size = self.run.chosen["batch-size"] = self.batch_size(mapping.joined_rows)
        plan = plan_batches(
            mapping, size, generator(self.settings.seed, Stream.BATCHES)
        )
        self._batches = ShardedBatches(plan, layouts)
        return self._batches.arrays()

    def epoch_traffic(self, tables: Sequence[TableSize], batches: int) -> Traffic:
        """Return the traffic of an epoch."""
        return epoch_traffic(tables, batches, self.settings)

    def releases_per_epoch(self, batches: int, *, is_sharded: bool) -> int:
        """Return how often scores leave: once for each batch, and for an evaluation."""
        del is_sharded
        return batches + 1

    def working_bytes(self, table: TableSize, _: ShardSize) -> float:
        """Return the memory in which the steps' size is computed."""
        return curvature_bytes(table)

    def epochs(self, problem: TrainingProblem) -> Generator[Requests, Replies, None]:
        """Run the epochs, until the loss settles or changes less than the tolerance."""
        batches = self._batches
        # a run that is brought up to date sends the same requests anew
        self._scores_number = 0
        self._pace = StepControl(
            self.run.baseline, can_halve=not self.settings.method.is_full_batch
        )
        ordered = problem.objective.select(batches.plan.order)
        last_scores = np.empty((len(ordered), ordered.outputs))
        loss_before = math.inf
        schedule = self._schedule(problem)
        first = next(schedule)
        batch_scores = batches.select(first.batch, problem.initial_scores)
        for planned in itertools.chain([first], schedule):
            span = batches.plan.slice(planned.batch)
            vectors = self._vectors(problem, planned.batch, batch_scores)
            scores = problem.head.combine(problem.base_score, vectors)
            last_scores[span] = scores
            # D_j = w_j d loss / d h_j (Eq. 4)
            batch = ordered.select(span)
            derivatives = batch.weigh(batch.gradient(scores))
            by_table = problem.pull_back(derivatives, vectors)
            messages = {
                number: BatchMessages(array)
                for number, array in batches.scatter(planned.batch, by_table).items()
            }
            if self.is_paced:
                self._pace.after_batch(batch, scores, problem.base_score)
            step = self._decide(planned)
            replies = yield from self._exchange(
                problem, step, len(derivatives), messages
            )
            if step.next_batch is not None:
                batch_scores = batches.gather(step.next_batch, problem, replies)
            if not step.ends_epoch:
                continue
            loss = self._end_epoch(problem, step, replies, last_scores)
            is_settled = abs(loss_before - loss) < self.settings.tolerance * abs(loss)
            if is_settled or step.next_batch is None or self.run.best.is_over:
                return
            loss_before = loss

    def _vectors(
        self, problem: TrainingProblem, batch: int, scores: LocalScores
    ) -> FloatArray:
        """Return the head's input of a batch, from the tables' scores (k, w)."""
        by_table = problem.head.needs_tables
        plan = self._batches.plan
        return problem.read_sums(plan.expand(batch, scores, by_table=by_table))

    def _decide(self, step: _Step) -> _Step:
        """Return the step, as the last of the run if the pace is over."""
        if not (step.ends_epoch and self.is_paced):
            return step
        self._pace.after_epoch()
        is_last = self.run.ends_by_loss and self._pace.is_over
        if is_last:
            return replace(step, next_batch=None, evaluate=ALL)
        return step

    def judge(self, problem: TrainingProblem) -> str:
        """Return the verdict by how long steps are, or leave it to the losses.

        Those are then of the steps' own batches.
        """
        del problem
        self.run.losses = self._pace.losses or self.run.losses
        if self.run.ends_by_loss and self._pace.factor < LEAST_FACTOR:
            return "settled: smaller steps no longer lower the loss"
        return ""

    def _schedule(self, problem: TrainingProblem) -> Iterator[_Step]:
        """Yield the batches of all epochs.

        An epoch is decided on when the last step of the previous one is requested: the
        scores that come with that step belong to the next.
        """
        # any epoch may be the last or the best, whose metrics must be exact
        often = None
        if tests_every_epoch(self.settings):
            often = TESTED
        usual = ALL if ends_early(self.settings) else often
        rng = generator(self.settings.seed, Stream.ORDER)
        batches = self._batches.plan.batches
        upcoming = (
            _Epoch(number, rng.permutation(batches), self._rates(problem, number))
            for number in range(1, self.run.most_epochs + 1)
        )
        epoch = next(upcoming, None)
        while epoch is not None:
            order: list[int] = epoch.order.tolist()
            for batch, next_batch in itertools.pairwise(order):
                yield _Step(epoch, batch, next_batch, begins_epoch=batch == order[0])
            following = next(upcoming, None)
            step = _Step(
                epoch,
                order[-1],
                None,
                begins_epoch=len(order) == 1,
                ends_epoch=True,
                evaluate=ALL,
            )
            if following is not None:
                next_batch = int(following.order[0])
                step = replace(step, next_batch=next_batch, evaluate=usual)
            yield step
            epoch = following

    def _rates(self, problem: TrainingProblem, epoch: int) -> dict[str, float]:
        """Return the learning rate of every table in an epoch."""
        settings = self.settings
        plan = self._batches.plan
        rate = self.run.chosen["learning-rate"] = settings.learning_rate or safe_rate(
            problem, len(plan.order) / plan.batches
        )
        rates = dict.fromkeys(problem.tables, rate)
        if settings.privacy.covers_features and not settings.learning_rate:
            rows = {n: len(t.rows) / plan.batches for n, t in plan.tables.items()}
            rates = self.run.chosen["learning-rates"] = damped_rates(
                problem, rate, rows
            )
        if self.is_paced or settings.method.is_full_batch:
            return rates
        return {name: falling_rate(rate, epoch) for name, rate in rates.items()}

    def _exchange(
        self,
        problem: TrainingProblem,
        step: _Step,
        rows: int,
        parts: dict[int, BatchMessages],
    ) -> Generator[Requests, Replies, Replies]:
        """Send Y of a batch (Eq. 10); return the replies with the next scores."""
        self._scores_number += 1
        batch_step = BatchStep(
            scores_number=self._scores_number,
            next_batch=step.next_batch,
            evaluate=step.evaluate,
            learning_rates={
                n: self._pace.factor * r for n, r in step.epoch.rates.items()
            },
            # a step that was too long is not repeated
            momentum=0.0 if self._pace.peak else MOMENTUM,
        )
        request = SgdRequest(
            batch=step.batch,
            batch_rows=rows,
            is_best=self.run.is_best and step.begins_epoch,
            step=batch_step,
            parts=parts,
        )
        replies = yield self.run.request(ask(request, problem.parts))
        if not problem.sharded:
            return replies
        means: dict[int, MeanGradient] = {}
        for table in problem.sharded:
            means |= table.for_all(MeanGradient(table.sum_shares(replies)))
        sharded = [part for table in problem.sharded for part in table.parts]
        step_replies = yield self.run.request(
            ask(StepRequest(step=batch_step, parts=means), sharded)
        )
        return replies.then(step_replies)

    def _end_epoch(
        self,
        problem: TrainingProblem,
        step: _Step,
        replies: Replies,
        last_scores: FloatArray,
    ) -> float:
        """Record the epoch's metrics; return its training loss."""
        tables = problem.tables.items()
        held_out = HeldOutMetrics()
        if step.evaluate == ALL:
            scores = {name: table.gather_scores(replies) for name, table in tables}
            problem.gather(scores)
            train = problem.train_metrics()
            held_out = problem.held_out_metrics(scores)
        else:
            plan = self._batches.plan
            batches = step.epoch.order
            # in batch order, from the first of the epoch's batches to the last
            rows = slice(plan.start[batches.min()], plan.start[batches.max() + 1])
            visited = problem.objective.select(plan.order[rows])
            train = visited.metrics(last_scores[rows])
        if step.evaluate == TESTED:
            scores = {name: table.gather_tested(replies) for name, table in tables}
            held_out = problem.held_out_metrics(scores)
        self.run.finish_epoch(
            EpochResult(step.epoch.number, train, **held_out._asdict())
        )
        return train["loss"]


class TablePuppetSGD(TrainingStrategy):
    """Train over the result of a query by mini-batch SGD with momentum."""

    name = "sgd"
    method_type = Sgd


class GradientDescent(TrainingStrategy):
    """Train by gradient descent with momentum (heavy ball), a step per epoch.

    It is the baseline of the paper's section 6.
    """

    name = "gd"
    method_type = Sgd


def epoch_traffic(
    tables: Sequence[TableSize], batches: int, settings: Settings
) -> Traffic:
    """Return the traffic of an epoch of SGD that is not the last one.

    Per batch Y goes down and the scores of the next batch come up, 4 k d_c each; with
    several shards also a gradient goes up and the mean gradient down, 8 (p + 1) each.
    The last batch also brings scores of held-out rows, or of all if a tolerance is set.
    """
    tally = Tally()
    scores_all = ends_early(settings)
    is_tested = tests_every_epoch(settings)
    for table, shard in shards_of(tables):
        tested = shard.tested if is_tested else 0
        sizes = {
            **table.sizes(shard),
            "batch_rows": shard.batch_rows,
            "next_rows": shard.batch_rows,
            "total": shard.total if scores_all else tested,
        }
        tally.add_down(sizes, BatchMessages, "messages")
        tally.add_up(sizes, BatchUpdate, "batch_scores", "scores")
        if table.update is Update.SUM:
            tally.add_up(sizes, BatchUpdate, "share", times=batches)
            tally.add_down(sizes, MeanGradient, "sum", times=batches)
    is_sharded = any(table.update is Update.SUM for table in tables)
    return tally.traffic(2 * batches if is_sharded else batches)
