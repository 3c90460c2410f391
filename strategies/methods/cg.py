"""TablePuppetCG: linear models over joins by preconditioned conjugate gradients.

One epoch costs one round where every table is one shard, and two where some table is
sharded: steps of the scores down and scores of the next direction up, for shards with a
sum of their gradients between. Neither penalty nor duals, and no memory of past epochs:
see :mod:`tp_flower.methods.cg.conjugate_gradients`.
"""

import dataclasses
import math
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import Final

import numpy as np
from msgspec.structs import replace

from strategies.disclosures import DisclosureValues
from strategies.methods.moments.assembly import PADS
from strategies.methods.moments.errors import SECTION, Errors
from strategies.methods.moments.information import (
    NOT_CONVERGED,
    InformationRound,
    check_information,
)
from strategies.run.exchange import Replies, Requests, ask
from strategies.run.replies import array_of
from strategies.run.strategy import EpochResult
from strategies.setup.joined_rows import JoinedTables, MappedRows
from strategies.setup.problem import LocalScores, TrainedTable, TrainingProblem
from strategies.training.join_method import JoinMethod
from strategies.training.outcome import Outcome
from strategies.training.strategy import TrainingStrategy
from strategies.training.traffic import (
    ShardSize,
    StepMessages,
    TableSize,
    Tally,
    Traffic,
    steps_epoch,
)
from strategies.training.working_memory import solver_bytes
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.learning.solvers import BY_COLUMNS, factorisation
from tp_flower.methods.cg.conjugate_gradients import (
    HEADROOM,
    REST,
    TOLERANCE,
    Descent,
    Products,
    follow_line,
    move_along,
    start_line,
)
from tp_flower.methods.cg.messages import (
    TRAIN_DESCENT,
    TRAIN_DIRECTION,
    DescentRequest,
    DescentStep,
    DescentTerms,
    DescentUpdate,
    DirectionRequest,
    SummedStep,
)
from tp_flower.methods.moments.messages import TRAIN_INFORMATION
from tp_flower.methods.moments.settings import has_errors
from tp_flower.privacy.sealed_sums import read_words
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import LineStep, Update
from tp_flower.reports.records import RunReport

ROW, SMALL = 4, 5.0  # see TOLERANCE
EXACT: Final = 1e-5
"""The tolerance of a model with standard errors: with standardised columns, its
coefficients were within 1e-5 of these, of six losses over a made-up snowflake, and z
within 6e-5 of R's on four real joins."""
BELOW_TOLERANCE = "converged: the gradient is below the tolerance"
BELOW_ROUNDING = "converged: the loss falls no further than messages are rounded"


class Cg(JoinMethod):
    """Conjugate gradients at the server."""

    messages = (Action.PREPARE, TRAIN_DESCENT)
    messages_of_shards = (TRAIN_DIRECTION,)
    copies_lowest = True
    usual_epochs = 5

    _step: LineStep | None = None
    _end = ""
    _joined: JoinedTables
    _errors: Errors | None = None

    def run_messages(
        self, *, is_sharded: bool, is_ranked: bool = False
    ) -> tuple[Action, ...]:
        """Return the messages of a run, that of standard errors if it has some."""
        messages = super().run_messages(is_sharded=is_sharded, is_ranked=is_ranked)
        if has_errors(self.settings):
            messages += (TRAIN_INFORMATION,)
        return messages

    def disclosure_values(self, joined: JoinedTables) -> DisclosureValues:
        """Return what covers the sums that standard errors are made of."""
        del joined
        return DisclosureValues(protections={"pads": PADS})

    def divide(self, rows: MappedRows, fold: int | None = None) -> JoinedTables:
        """Return the joined rows; refuse those that would have no standard errors."""
        joined = super().divide(rows, fold)
        if has_errors(self.settings):
            check_information(joined, self.settings)
            # else training does without the rows that take no part
            self._joined = joined
        return joined

    def collect(self, problem: TrainingProblem) -> Generator[Requests, Replies, None]:
        """Ask for the sums that standard errors are made of, at the optimum."""
        yield from super().collect(problem)
        if not has_errors(self.settings):
            return
        self._errors = Errors(problem, self.settings, note=NOT_CONVERGED)
        # else the coefficients may be off by a part of their errors
        if self._end == BELOW_TOLERANCE:
            information = InformationRound(self._joined, problem, self.settings)
            information_matrix, note = yield from information.run()
            self._errors = Errors(
                problem,
                self.settings,
                information_matrix,
                note,
                information.clusters,
            )
        if self._errors.note:
            self.run.warn(self._errors.note)

    def outcome_of(self, replies: Replies, problem: TrainingProblem) -> Outcome:
        """Return the outcome of the sites' replies, with errors of coefficients."""
        outcome = super().outcome_of(replies, problem)
        if self._errors is None:
            return outcome
        self._errors = self._errors.of_outcome(outcome)
        return dataclasses.replace(
            outcome,
            coefficients=self._errors.coefficients,
            statistics=self._errors.statistics(),
        )

    def complete(self, report: RunReport) -> RunReport:
        """Return the report with what is known of the coefficients."""
        if self._errors is None:
            return report
        return dataclasses.replace(report, sections={SECTION: self._errors.section()})

    def choose_update(self, table: str, shards: int, *, is_linear: bool) -> Update:
        """Sum the Gram matrices and the gradients of sharded tables."""
        del table, is_linear
        return Update.LOCAL if shards == 1 else Update.GRAM

    def epoch_traffic(self, tables: Sequence[TableSize], _: int) -> Traffic:
        """Return the traffic of an epoch.

        It is that of steps, and four products of a table, 8 bytes each.
        """
        messages = StepMessages(DescentStep, DescentUpdate, SummedStep)
        steps = steps_epoch(tables, messages, is_tested=True)
        tally = Tally()
        for table in tables:
            tally.add_up(table.sizes(table.shards[0]), DescentUpdate, "products")
        return dataclasses.replace(steps, up=steps.up + tally.up)

    def working_bytes(self, table: TableSize, shard: ShardSize) -> float:
        """Return the memory of the solver of a shard."""
        return solver_bytes(table, shard, is_exact=False)

    def with_last_step(self, request: FinishRequest) -> FinishRequest:
        """Return the request that ends the run, with the last step along the line."""
        return replace(request, step=self._step)

    def epochs(self, problem: TrainingProblem) -> Generator[Requests, Replies, None]:
        """Run the epochs until the gradient is small, for some epochs or very much."""
        base = problem.base_score
        descent = Descent(problem.rows, problem.objective, base, problem.rounding)
        for rows in problem.scored_rows:
            start_line(rows, base)
        default = EXACT if has_errors(self.settings) else TOLERANCE
        tolerance = max(self.settings.tolerance or default, REST)
        self.run.chosen |= {
            "tolerance": tolerance,
            "solver": {t.name: _factorisation(t) for t in problem.tables.values()},
        }
        self._step = None
        self._end = ""
        ratios = [math.inf] * ROW
        for epoch in range(1, self.run.most_epochs + 1):
            unit, scores, products = yield from self._exchange(problem, descent)
            read = partial(_read, problem, unit)
            descent.step(scores, read, products, _rounding(problem, unit))
            self._step = LineStep(length=descent.length, conjugacy=descent.conjugacy)
            for held_out in problem.scored_rows[1:]:
                follow_line(held_out, descent.conjugacy, read, scores)
                move_along(held_out, descent.length)
            train = problem.train_metrics(descent.total)
            norm = descent.gradient_norm(train["loss"])
            metrics = problem.metrics_of_held_out()._asdict()
            self.run.finish_epoch(
                EpochResult(epoch, train, residuals={"gradient": norm}, **metrics)
            )
            ratios.append(norm / max(tolerance, descent.noise_norm(train["loss"])))
            if norm < REST or ratios[-1] < 1.0 / SMALL or max(ratios[-ROW:]) < 1.0:
                self._end = BELOW_TOLERANCE if norm < tolerance else BELOW_ROUNDING
                return
            if self.run.best.is_over:
                return

    def judge(self, problem: TrainingProblem) -> str:
        """Return the verdict by the gradient, if training has ended by it."""
        del problem
        return self._end

    def _exchange(
        self, problem: TrainingProblem, descent: Descent
    ) -> Generator[Requests, Replies, tuple[float, LocalScores, Products]]:
        """Send steps; return the next scores with their unit, and the products."""
        unit = float(problem.score_unit)
        product_unit = unit**2
        if self.run.epoch > 1:
            product_unit = descent.product_unit(self.run.losses[-1])
        terms = DescentTerms(
            curvature=descent.curvature,
            score_unit=min(HEADROOM * descent.size / unit, 1.0),
            product_unit=product_unit,
            tables=len(problem.tables),
            scores_number=self.run.epoch,
        )
        steps: dict[int, DescentStep] = {}
        blocks = problem.scatter_steps(descent.derivatives(), 1.0)
        for position, (name, block) in enumerate(blocks.items()):
            table = problem.tables[name]
            # in the first epoch every shard makes the solver of its table
            gram = table.gram if self.run.epoch == 1 else None
            numbered = None
            if table.update is not Update.GRAM:
                numbered = position
            steps |= {
                number: DescentStep(step=rows, sum=gram, place=numbered)
                for number, rows in table.scatter_rows(block).items()
            }
        request = DescentRequest(
            terms=terms, line=self._step, is_best=self.run.is_best, parts=steps
        )
        replies = yield self.run.request(ask(request, problem.parts))
        if problem.sharded:
            directed = yield from self._direct(problem, replies, terms)
            replies = replies.then(directed)
        tables = problem.tables.values()
        scores = {table.name: table.gather_scores(replies) for table in tables}
        products = terms.product_unit * _products(replies, tables)
        return terms.score_unit, scores, Products(*products.tolist())

    def _direct(
        self, problem: TrainingProblem, replies: Replies, terms: DescentTerms
    ) -> Generator[Requests, Replies, Replies]:
        """Send the sums of the shards' gradients; return their replies."""
        names = list(problem.tables)
        sums: dict[int, SummedStep] = {}
        for table in problem.sharded:
            position = names.index(table.name)
            total = table.sum_shares(replies)
            sums |= {
                part.number: SummedStep(
                    sum=total, place=position if part is table.parts[0] else None
                )
                for part in table.parts
            }
        parts = [part for part in problem.parts if part.number in sums]
        return (
            yield self.run.request(
                ask(DirectionRequest(terms=terms, parts=sums), parts)
            )
        )


class TablePuppetCG(TrainingStrategy):
    """Train linear models over the result of a query by conjugate gradients."""

    name = "cg"
    method_type = Cg


def _read(problem: TrainingProblem, unit: float, sums: AnyArray) -> FloatArray:
    """Return the scores of v, from sums (B, d_c) over tables in a unit."""
    return unit * problem.read_sums(sums)


def _rounding(problem: TrainingProblem, unit: float) -> float:
    """Return the root-mean-square error of sums of scores in ``unit``.

    It is 0 if they are sent as plain numbers.
    """
    point = problem.fixed_point
    if point is None:
        return 0.0
    return unit * point.rounding


def _factorisation(table: TrainedTable) -> str:
    """Return how the sites factorise the table's block of the Hessian."""
    if table.update is Update.GRAM:
        return BY_COLUMNS
    return factorisation(table.rows[0].trained, table.features, is_exact=False)


def _products(replies: Replies, tables: Iterable[TrainedTable]) -> FloatArray:
    """Return the sums of the tables' products, (4,), in their unit."""
    total = np.zeros(4, np.uint64)
    for table in tables:
        total += array_of(replies, table.parts[0], "products", (4,))
    return read_words(total.view(np.int64))
