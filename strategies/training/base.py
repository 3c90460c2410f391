"""RelationalStrategy: a Flower Strategy whose training set is the result of a query."""

import math
from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO
from typing import Any, Final, Generic, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.common.logger import log

from strategies.disclosures import releases
from strategies.privacy_report import privacy_report
from strategies.run.exchange import Part, Replies, Request, ask
from strategies.run.replies import array_of, has_array
from strategies.run.strategy import EpochResult, RoundListener, RoundStrategy
from strategies.setup.problem import PreparedRun, Table, TrainingProblem, table_reports
from strategies.training.prepare import Plan, set_up
from tp_flower.arrays import FloatArray
from tp_flower.errors import DivergedError, ReplyError
from tp_flower.learning.admm import LocalScores
from tp_flower.learning.contributions import Contribution, contributions
from tp_flower.methods import CORESET
from tp_flower.model_names import ModelVersion, make_version
from tp_flower.protocol import FinishedPart, FinishRequest
from tp_flower.query import Query
from tp_flower.reports.records import RunReport
from tp_flower.settings import Settings

WORSE: Final = 100.0
"""Times the loss of the best constant score: no epoch of a training that converges is
so bad."""


def baseline_loss(problem: TrainingProblem) -> float:
    """Return the training loss of the base score alone."""
    shape = (len(problem.train_labels), len(problem.base_score))
    return problem.loss.value(
        np.broadcast_to(problem.base_score, shape),
        problem.train_labels,
        problem.weighting.train_rows,
    )


def check_epoch(epoch: int, loss: float, baseline: float) -> None:
    """Stop where an epoch's loss is not finite, or far beyond that of a constant.

    Raises:
        DivergedError: it is.
    """
    # a corrected loss may be 0 or below
    if math.isfinite(loss) and loss <= WORSE * max(abs(baseline), 1.0):
        return
    raise DivergedError(
        f"training diverged in epoch {epoch}: its loss is {loss:.4g}, that of the same "
        f"score for all rows {baseline:.4g}. Lower learning-rate (0 chooses it), set "
        "rho to 0 (chosen), or raise l2"
        + (f"; num-epochs = {epoch - 1} ends before" if epoch > 1 else "")
    )


INTERCEPT: Final = "(intercept)"


@dataclass(frozen=True)
class Outcome:
    """What a run has come to, besides its metrics.

    Attributes:
        digests: of the parts that sites keep, by number.
        coefficients: (d [+ 1], d_c) by table, of those that may be shown.
        contributions: by table.
    """

    digests: Mapping[int, str] = field(default_factory=dict)
    coefficients: Mapping[str, FloatArray] = field(default_factory=dict)
    contributions: Mapping[str, Contribution] = field(default_factory=dict)


def finish_request(model: ModelVersion) -> FinishRequest:
    """Return what ends a run that went well: the sites keep its models."""
    return FinishRequest(
        keep_models=True, model_name=model.name, model_version=model.version
    )


def read_outcome(
    replies: Replies, problem: TrainingProblem, local_scores: Mapping[str, FloatArray]
) -> Outcome:
    """Return what the sites' last replies, and their last scores, come to.

    Args:
        replies: to the message that ends the run.
        problem: the training problem.
        local_scores: (n_i, d_c) of the final models, by table.

    Raises:
        ReplyError: a digest or a coefficient is malformed.
    """
    shown = {
        name: weights
        for name, table in problem.tables.items()
        if (weights := _coefficients(replies, table)) is not None
    }
    return Outcome(
        digests=read_digests(replies, problem.parts),
        coefficients=shown,
        contributions=contributions(
            problem.train, local_scores, problem.weighting.train_rows
        ),
    )


def contribution_facts(outcome: Outcome) -> dict[str, dict[str, object]]:
    """Return what a report says of the tables' contributions."""
    return {
        table: {"share": own.share, "mean-score": own.mean_score.tolist()}
        for table, own in outcome.contributions.items()
    }


def coefficient_facts(
    outcome: Outcome, problem: PreparedRun
) -> dict[str, list[dict[str, object]]]:
    """Return what a report says of the coefficients that sites have shown.

    They are of encoded features, those of a standardised number per deviation. The
    output is a class, where there are several.
    """
    facts = {}
    for table, weights in outcome.coefficients.items():
        names = [*problem.encoders[table].feature_names, INTERCEPT]
        outputs = problem.classes if weights.shape[1] > 1 else ("score",)
        facts[table] = [
            {"feature": feature, "output": output, "value": float(value)}
            for feature, row in zip(names, weights, strict=False)
            for output, value in zip(outputs, row, strict=True)
        ]
    return facts


def read_digests(replies: Replies, parts: Iterable[Part]) -> dict[int, str]:
    """Return the digests that the sites report.

    A site without a state folder has none, nor has one that did not answer.
    """
    digests = {
        number: body.digest
        for number, body in replies.parts.items()
        if isinstance(body, FinishedPart)
    }
    return {part.number: digests.get(part.number) or "" for part in parts}


def _coefficients(replies: Replies, table: Table) -> FloatArray | None:
    """Return a linear model's coefficients, the mean of the shards that show them.

    Shards that agree through statistics or gradients have the same ones.
    """
    shape = (table.features + int(table.has_intercept), table.outputs)
    shown = [
        array_of(replies, part, "coefficients", shape).astype(np.float64)
        for part in table.parts
        if has_array(replies, part, "coefficients")
    ]
    if shown and not table.is_linear:
        raise ReplyError(f"table {table.name}: coefficients of a model that has none")
    return np.mean(shown, axis=0) if shown else None


__all__ = ["EpochResult", "JoinStrategy", "RelationalStrategy"]

Run = TypeVar("Run", bound=PreparedRun)


class RelationalStrategy(RoundStrategy, Generic[Run]):
    """Base of the methods that train on the rows of a query.

    Args:
        query: the training set.
        settings: of the run; ``overrides`` replace single fields.
        on_round: called with the record of every round, for progress displays.

    Attributes:
        chosen: what was chosen for settings that are 0, "" or "auto".
        problem: the training problem, after set-up.
        outcome: what the run has come to, once it has ended well.
    """

    def __init__(
        self,
        query: Query,
        settings: Settings | None = None,
        on_round: RoundListener | None = None,
        **overrides: object,
    ) -> None:
        # the sites are told what trains, whatever the settings were made for
        super().__init__(
            query, settings, on_round, **{**overrides, "strategy": self.name}
        )
        self.chosen: dict[str, object] = {}
        self.training_problem: Run | None = None
        self.outcome = Outcome()
        self._baseline = math.inf

    @abstractmethod
    def set_up(self) -> Generator[Request, Replies, Run]:
        """Run the set-up rounds and return the training problem."""

    @abstractmethod
    def epochs(self, problem: Run) -> Generator[Request, Replies, None]:
        """Train; call :meth:`finish_epoch` at the end of every epoch."""

    @abstractmethod
    def outcome_of(self, replies: Replies, problem: Run) -> Outcome:
        """Return what the run has come to, by the replies to its last message."""

    def baseline(self, problem: Run) -> float:  # noqa: ARG002
        """Return the loss of a constant score; infinity where nothing tells it."""
        return math.inf

    def default_settings(self) -> Settings:
        """Return the defaults of the method."""
        return Settings(strategy=self.name)

    def rounds(self) -> Generator[Request, Replies, None]:
        """Set up, train, and let the sites forget the run."""
        self.chosen["num-epochs"] = self.settings.epochs
        problem = yield from self.set_up()
        self.training_problem = problem
        self.chosen |= problem.chosen
        for table, encoder in problem.encoders.items():
            if encoder.dropped:
                names = ", ".join(encoder.dropped)
                log(INFO, "table %s: constant features dropped: %s", table, names)
        self._baseline = self.baseline(problem)
        self.start_epochs()
        yield from self.epochs(problem)
        self.end_epochs()
        replies = yield ask(finish_request(self.model), problem.parts)
        self.outcome = self.outcome_of(replies, problem)

    def finish_epoch(self, result: EpochResult) -> None:
        """Record an epoch; its metrics belong to the round that just ended.

        Raises:
            DivergedError: training goes nowhere.
        """
        check_epoch(result.epoch, result.train["loss"], self._baseline)
        super().finish_epoch(result)

    @property
    def model(self) -> ModelVersion:
        """What the run's model is called."""
        version = make_version(self.started_at, self.run)
        return ModelVersion(self.settings.model_name, version)

    def result_arrays(self) -> ArrayRecord:
        """Return the base score."""
        if self.training_problem is None:
            return ArrayRecord()
        return ArrayRecord({"base-score": Array(self.training_problem.base_score)})

    @property
    def report(self) -> RunReport:
        """The record of the run so far.

        Raises:
            RuntimeError: before set-up is done.
        """
        problem = self.training_problem
        if problem is None:
            raise RuntimeError("there is no report before the set-up is done")
        train_rows, test_rows = problem.joined_rows
        ended = [item for item in self.history if item.train]
        return RunReport(
            settings=self.settings.to_dict(),
            chosen=self.chosen,
            query=self.query.to_sql(),
            tables=table_reports(problem),
            joined_rows_train=train_rows,
            joined_rows_test=test_rows,
            join_steps=problem.join_steps,
            history=self.history,
            final_train=ended[-1].train if ended else {},
            final_test=ended[-1].test if ended else {},
            model=str(self.model) if self.is_finished else "",
            contributions=contribution_facts(self.outcome),
            coefficients=coefficient_facts(self.outcome, problem),
            privacy=privacy_report(
                releases(problem.audience),
                self.ledgers,
                self.settings.privacy,
                is_complete=self.is_finished,
            ),
            output_dir=self.settings.output_dir,
            started=self.started,
            seconds=self.seconds,
        )


class JoinStrategy(RelationalStrategy[TrainingProblem]):
    """Base of the methods that train over joins and unions.

    Attributes:
        local_scores: (n_i, d_c) by table, as the sites sent them last; at the end of
            :meth:`epochs` those of the final models.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_scores: LocalScores = {}

    @abstractmethod
    def plan(self) -> Plan:
        """Return what the method decides about the set-up."""

    def set_up(self) -> Generator[Request, Replies, TrainingProblem]:
        """Run the set-up rounds and return the training problem."""
        return (
            yield from set_up(self.query, self.settings, self.plan(), self.inventory)
        )

    def baseline(self, problem: TrainingProblem) -> float:
        """Return the loss of a constant score, which no good training is far beyond."""
        own, is_solved = self.settings.privacy, self.settings.family == CORESET
        if own.covers_features or own.covers_predictions or is_solved:
            # noise alone can make an epoch this bad, and the next one good; what is
            # solved at once goes nowhere
            return math.inf
        return baseline_loss(problem)

    def outcome_of(self, replies: Replies, problem: TrainingProblem) -> Outcome:
        """Return the digests, the coefficients and each table's contribution."""
        return read_outcome(replies, problem, self.local_scores)
