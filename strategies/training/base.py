"""RelationalStrategy: a Flower Strategy whose training set is the result of a query."""

import math
from abc import abstractmethod
from collections.abc import Generator
from logging import INFO

from flwr.app import Array, ArrayRecord
from flwr.common.logger import log

from strategies.disclosures.privacy_report import privacy_report
from strategies.disclosures.releases import releases
from strategies.run.epochs import EpochResult
from strategies.run.exchange import Replies, Request, ask
from strategies.run.strategy import RoundListener, RoundStrategy
from strategies.setup.problem import Federation, table_reports
from strategies.training.divergence import baseline_loss, check_epoch
from strategies.training.outcome import (
    Outcome,
    coefficient_facts,
    contribution_facts,
    finish_request,
    read_outcome,
)
from strategies.training.prepare import Plan, set_up
from tp_flower.learning.admm import LocalScores
from tp_flower.methods import CORESET
from tp_flower.model_names import ModelVersion, make_version
from tp_flower.query import Query
from tp_flower.reports.records import RunReport
from tp_flower.settings import Settings

__all__ = ["EpochResult", "RelationalStrategy"]


class RelationalStrategy(RoundStrategy):
    """Base of the methods that train over joins and unions.

    Args:
        query: the training set.
        settings: of the run; ``overrides`` replace single fields.
        on_round: called with the record of every round, for progress displays.

    Attributes:
        chosen: what was chosen for settings that are 0, "" or "auto".
        federation: the training problem, after set-up.
        local_scores: (n_i, d_c) by table, as the sites sent them last; set by
            :meth:`epochs`.
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
        self.federation: Federation | None = None
        self.local_scores: LocalScores = {}
        self.outcome = Outcome()
        self._baseline = math.inf

    @abstractmethod
    def plan(self) -> Plan:
        """Return what the method decides about the set-up."""

    @abstractmethod
    def epochs(self, federation: Federation) -> Generator[Request, Replies, None]:
        """Train; call :meth:`finish_epoch` at the end of every epoch.

        At the end, ``local_scores`` are those of the final models.
        """

    def default_settings(self) -> Settings:
        """Return the defaults of the method."""
        return Settings(strategy=self.name)

    def rounds(self) -> Generator[Request, Replies, None]:
        """Set up, train, and let the sites forget the run."""
        self.chosen["num-epochs"] = self.settings.epochs
        federation = yield from self.set_up()
        self.federation = federation
        self.chosen |= {"loss": federation.loss.name}
        if federation.weight_facts:
            self.chosen["row-weight"] = federation.weight_facts
        if federation.coreset is not None:
            self.chosen["coreset"] = federation.coreset.facts()
        for table, encoder in federation.encoders.items():
            if encoder.dropped:
                names = ", ".join(encoder.dropped)
                log(INFO, "table %s: constant features dropped: %s", table, names)
        self._baseline = self.baseline(federation)
        self.start_epochs()
        yield from self.epochs(federation)
        self.end_epochs()
        replies = yield ask(finish_request(self.model), federation.parts)
        self.outcome = self.outcome_of(replies, federation)

    def set_up(self) -> Generator[Request, Replies, Federation]:
        """Run the set-up rounds and return the training problem."""
        return (
            yield from set_up(self.query, self.settings, self.plan(), self.inventory)
        )

    def baseline(self, federation: Federation) -> float:
        """Return the loss that none of a training that converges is far beyond."""
        own, is_solved = self.settings.privacy, self.settings.family == CORESET
        if own.covers_features or own.covers_predictions or is_solved:
            # noise alone can make an epoch this bad, and the next one good; what is
            # solved at once goes nowhere
            return math.inf
        return baseline_loss(federation)

    def outcome_of(self, replies: Replies, federation: Federation) -> Outcome:
        """Return what the run has come to, by the replies to its last message."""
        return read_outcome(replies, federation, self.local_scores)

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
        if self.federation is None:
            return ArrayRecord()
        return ArrayRecord({"base-score": Array(self.federation.base_score)})

    @property
    def report(self) -> RunReport:
        """The record of the run so far.

        Raises:
            RuntimeError: before set-up is done.
        """
        federation = self.federation
        if federation is None:
            raise RuntimeError("there is no report before the set-up is done")
        ended = [item for item in self.history if item.train]
        return RunReport(
            settings=self.settings.to_dict(),
            chosen=self.chosen,
            query=self.query.to_sql(),
            tables=table_reports(federation),
            joined_rows_train=federation.train.joined_rows,
            joined_rows_test=len(federation.test_labels),
            join_steps=federation.join_steps,
            history=self.history,
            final_train=ended[-1].train if ended else {},
            final_test=ended[-1].test if ended else {},
            model=str(self.model) if self.is_finished else "",
            contributions=contribution_facts(self.outcome),
            coefficients=coefficient_facts(self.outcome, federation),
            privacy=privacy_report(
                releases(federation.audience),
                self.ledgers,
                self.settings.privacy,
                is_complete=self.is_finished,
            ),
            output_dir=self.settings.output_dir,
            started=self.started,
            seconds=self.seconds,
        )
