"""TrainingStrategy: a Flower Strategy whose training set is the result of a query.

It trains by a method (:mod:`strategies.training.server_method`), and counts the epochs:
which is the best, whether training has converged or diverged, and what the run reports
at its end.
"""

import math
from collections.abc import Generator, Mapping
from dataclasses import replace
from logging import INFO
from typing import Any, ClassVar, Final

from flwr.app import Array, ArrayRecord
from flwr.common.logger import log
from flwr.serverapp.strategy import Result
from msgspec.structs import replace as replace_struct

from strategies.disclosures import disclosures, privacy_report
from strategies.ranks import ScoreForecast
from strategies.run.exchange import Replies, Requests, ask
from strategies.run.strategy import BestEpoch, EpochResult, RoundListener, RoundStrategy
from strategies.setup.problem import PreparedRun
from strategies.training.outcome import Outcome
from strategies.training.server_method import AnyMethod
from strategies.training.trend import (
    CONVERGED,
    DIVERGED,
    GOES_ON,
    NOT_CONVERGED,
    trend_verdict,
)
from tp_flower.errors import DivergedError, SettingsError
from tp_flower.model_names import ModelVersion, make_version
from tp_flower.objectives import Response
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.query import BoundQuery, Query
from tp_flower.reports.records import RunReport
from tp_flower.settings import Settings
from tp_flower.settings.search import fits_of

DIVERGENCE_FACTOR: Final = 100.0
"""Times the loss of the best constant score: an epoch of a training that converges is
never this bad."""


def check_epoch(epoch: int, loss: float, baseline: float) -> None:
    """Raise DivergedError if a loss is not finite, or far above a constant score's."""
    # a corrected loss may be 0 or negative
    if math.isfinite(loss) and loss <= DIVERGENCE_FACTOR * max(abs(baseline), 1.0):
        return
    raise DivergedError(
        f"training diverged in epoch {epoch}: its loss is {loss:.4g}, against "
        f"{baseline:.4g} for a constant score"
        + (f"; num-epochs = {epoch - 1} stops before it" if epoch > 1 else "")
    )


class TrainingStrategy(RoundStrategy):
    """Train on the rows of a query, by the method of a subclass.

    ``overrides`` replace single settings; ``on_round`` is called with the record of
    every round. ``chosen`` has the values of settings that were 0, "" or "auto".

    A subclass binds a method to its name and adds nothing else: what differs between
    trainings are the methods.
    """

    method_type: ClassVar[type[AnyMethod]]
    final = EpochResult(0, {}, {})  # of the epoch whose model is saved
    # of the epoch of lowest loss on the test rows
    lowest_test = EpochResult(0, {}, {})
    response: Response | None = None  # of the saved model, once it is trained
    is_trial = False  # whether it is one of a search that saves no model
    _copied = EpochResult(0, {}, {})  # of the epoch whose model the sites have copied

    def __init__(
        self,
        query: Query,
        settings: Settings | None = None,
        on_round: RoundListener | None = None,
        **overrides: object,
    ) -> None:
        # sites are told the strategy that trains, whatever the settings name
        overrides["strategy"] = self.name
        super().__init__(query, settings, on_round, **overrides)
        self.method = self.method_type(self)
        self.chosen: dict[str, object] = {}
        self.training_problem: PreparedRun | None = None
        self.outcome = Outcome()
        self.baseline = math.inf
        self.held_out_digest = self.tested_digest = ""
        self.best = BestEpoch(self.settings.patience_epochs)
        self.losses: list[float] = []
        # by training loss, where no rows validate; what a training that diverges ends
        # with
        self.lowest = BestEpoch()
        self.verdict = ""
        self.split_entry: dict[str, object] = {"name": self.settings.split_name}
        # of a search, of which this may be one
        self.fits = len(fits_of(self.settings)) if self.settings.folds else 0
        # epochs, and the policy's rule
        self._limit = self.settings.epochs
        self._limited_by = ""

    def start(self, *args: Any, **options: Any) -> Result:
        """Set up and train; an error of divergence advises which setting to change."""
        try:
            return super().start(*args, **options)
        except DivergedError as error:
            raise DivergedError(f"{error}. {self._advice}") from error

    def bind(self, schemas: Mapping[str, Mapping[str, str]]) -> BoundQuery:
        """Return the query over the sites' columns."""
        return self.method.bind(schemas)

    def default_settings(self) -> Settings:
        """Return the defaults of the method."""
        return Settings(strategy=self.name)

    def rounds(self) -> Generator[Requests, Replies, None]:
        """Set up, train, and let the sites forget the run."""
        last = yield from self.train(self.method.set_up())
        replies = yield last
        self.end(replies)

    def train(
        self, set_up: Generator[Requests, Replies, PreparedRun]
    ) -> Generator[Requests, Replies, Requests]:
        """Train on the problem of a set-up; return the request that ends the run."""
        self._limit = self.settings.epochs
        self._limited_by = ""
        self.chosen["num-epochs"] = self.settings.epochs
        self.best = BestEpoch(self.settings.patience_epochs)
        self.lowest = BestEpoch()
        self.lowest_test = EpochResult(0, {}, {})
        self.losses = []
        problem = self.training_problem = yield from set_up
        _log_dropped(problem)
        self.baseline = self.method.baseline(problem)
        self.epoch = 1
        try:
            yield from self.method.epochs(problem)
        except DivergedError as error:
            if not self.has_usable_model:
                raise
            problem = self.training_problem
            last = self._end_with_best(problem, error)
        else:
            # the method may have changed what the rows of its tables are
            problem = self.training_problem
            if not self.is_trial:
                yield from self.method.collect(problem)
            self._end(problem)
            last = ask(self.last_request(), problem.parts)
        self.epoch = 0
        if self.verdict.startswith((NOT_CONVERGED, DIVERGED)):
            self.warn(self.verdict)
        return last

    def end(self, replies: Replies) -> None:
        """Read the outcome of the run, from the replies to its last message."""
        if self.training_problem is not None:
            self.outcome = self.method.outcome_of(replies, self.training_problem)

    @property
    def trainer(self) -> "TrainingStrategy":
        """The strategy that trains the model: this one."""
        return self

    @property
    def most_epochs(self) -> int:
        """The number of epochs, at most."""
        return min(self._limit, self.settings.epochs)

    @property
    def is_cut_short(self) -> bool:
        """Whether policies have cut the training short.

        The last epoch that they allow has ended, and the settings allow more.
        """
        return bool(self._limited_by) and self.epoch > self._limit

    def limit_epochs(self, forecast: ScoreForecast) -> None:
        """Train for at most as many epochs as a part's policy allows.

        Raises:
            SettingsError: it allows none, or the settings ask for more.
        """
        most = forecast.epochs
        if not most or self.settings.num_epochs > most:
            raise SettingsError(forecast.refusal)
        if most < self._limit:
            self._limit = most
            self._limited_by = str(forecast)
            self.chosen["num-epochs"] = most
            log(INFO, "At most %d epochs: %s", most, forecast)

    @property
    def is_best(self) -> bool:
        """Whether the last epoch's model is the best so far: the sites copy it."""
        return self.best.is_last or self.lowest.is_last

    @property
    def has_usable_model(self) -> bool:
        """Whether the sites hold a copy of an epoch better than a constant score."""
        epoch = self.best.epoch or self.lowest.epoch
        return bool(epoch) and self.losses[epoch - 1] < self.baseline < math.inf

    def _end(self, problem: PreparedRun) -> None:
        """Judge a training that has ended, and refine its model."""
        self.verdict = self.method.judge(problem) or self._judge_losses(problem)
        if self.is_cut_short:
            self._end_cut_short()
        self.method.refine(problem)
        # otherwise the scores are not those of the model that is saved
        if not (self.is_cut_short and self.lowest.epoch):
            self.response = problem.fit_response()
            if metrics := problem.fitted_metrics(self.response):
                test = {**self.final.test, **metrics}
                self.final = replace(self.final, test=test)
            self.warn(*self.response.cautions)

    def _end_cut_short(self) -> None:
        """Warn of the end of training by an error; its best model so far is saved."""
        if self.lowest.epoch:
            self.final = self._copied
        if not self.verdict.startswith(CONVERGED):
            self.verdict = f"{GOES_ON.sub('', self.verdict)}; {self._limited_by}"
            self.warn(self.verdict)

    def _end_with_best(self, problem: PreparedRun, error: DivergedError) -> Requests:
        """Return the request that ends a diverged run with the model of its best epoch.

        A site that could not take a round has not copied the model that came before it.
        """
        kind = "validation" if self.best.epoch else "training"
        self.verdict = (
            f"{DIVERGED} in epoch {self.epoch}: the model of epoch "
            f"{self.best.epoch or self.lowest.epoch}, of the lowest {kind} loss, is "
            f"saved ({error}). {self._advice}"
        )
        self.final = self._copied
        copied = replace_struct(
            self.last_request(), step=None, is_best=False, has_diverged=True
        )
        pending = self._progress.pending
        is_lost = pending is not None and getattr(pending.message, "is_best", False)
        uncopied = replace_struct(self.last_request(), is_best=True, has_diverged=True)
        by_node = {
            part.node: uncopied if is_lost and part.node in error.nodes else copied
            for part in problem.parts
        }
        return ask(copied, problem.parts, by_node)

    @property
    def _advice(self) -> str:
        """The change of settings that may help after divergence."""
        rate = self.chosen.get("learning-rate", self.settings.learning_rate)
        if rate:
            change = f"Lower learning-rate (here {rate})"
        else:
            change = self.method.steadied_by
        return f"{change}, or look for extreme values"

    @property
    def ends_by_loss(self) -> bool:
        """Whether training ends once its loss settles, not after num-epochs."""
        settings = self.settings
        has_end = settings.num_epochs or settings.is_noisy
        return not (has_end or settings.training_sample)

    def _judge_losses(self, problem: PreparedRun) -> str:
        """Return the verdict on the training by its losses, one per epoch."""
        if self.settings.is_noisy:
            return "not judged: noise hides the trend of the loss"
        if self.best.is_over:
            return f"converged: epoch {self.best.epoch} had the lowest validation loss"
        is_convex = all(table.is_linear for table in problem.tables.values())
        return trend_verdict(
            self.losses, is_convex=is_convex, rounding=problem.rounding
        )

    def last_request(self) -> FinishRequest:
        """Return the request that ends the run: the sites save its models."""
        name = self.model.name
        version = self.model.version
        # without validation rows the last model is saved, unless a policy has ended the
        # training
        is_best = self.best.is_last or math.isinf(self.best.loss)
        if self.is_cut_short and self.lowest.epoch:
            is_best = self.lowest.is_last
        request = FinishRequest(
            keep_models=self.method.saves_model,
            model_name=name,
            model_version=version,
            is_best=is_best,
            parts=dict(self.method.last_parts),
        )
        return self.method.with_last_step(request)

    def finish_epoch(self, result: EpochResult) -> None:
        """Record an epoch; its metrics belong to the round that just ended."""
        if result.is_judged:
            check_epoch(result.epoch, result.train["loss"], self.baseline)
        self.losses.append(result.train["loss"])
        if result.validation:
            self.best = self.best.after(result.epoch, result.validation["loss"])
            self.chosen["best-epoch"] = self.best.epoch
        elif self.method.copies_lowest and not self.settings.is_noisy:
            self.lowest = self.lowest.after(result.epoch, result.train["loss"])
        if self.is_best:
            self._copied = result
        if self.best.is_last:
            self.method.mark_best()
        # without validation rows, the last model is the best
        if self.best.epoch == result.epoch or math.isinf(self.best.loss):
            self.final = result
        if result.test and not result.test["loss"] >= self.lowest_test.test.get(
            "loss", math.inf
        ):
            self.lowest_test = result
        super().finish_epoch(result)

    @property
    def model(self) -> ModelVersion:
        """Name and version of the run's model."""
        version = make_version(self.started_at, self.session.run)
        return ModelVersion(self.settings.model_name, version)

    def request(self, request: Requests) -> Requests:
        """Return a request as one of the epoch, if its disclosures are explained."""
        problem = self.training_problem
        if problem is not None and request.action not in problem.exposure.messages:
            raise RuntimeError(
                f"{type(self.method).__name__} sends {request.action}, and neither "
                "explain nor the report would say what it discloses: list it in the "
                "method's "
                "`messages` or `messages_of_shards`"
            )
        return super().request(request)

    def result_arrays(self) -> ArrayRecord:
        """Return the base score."""
        if (problem := self.training_problem) is None:
            return ArrayRecord()
        return ArrayRecord({"base-score": Array(problem.base_score)})

    @property
    def _has_saved(self) -> bool:
        return self.is_finished and self.method.saves_model

    @property
    def _response_entries(self) -> Mapping[str, object]:
        """The report's entries on what training rows add to the meaning of scores."""
        return {} if self.response is None else self.response.report_entries()

    @property
    def report(self) -> RunReport:
        """The record of the run so far."""
        problem = self.training_problem
        if problem is None:
            raise RuntimeError("there is no report before the set-up is done")
        train_rows, test_rows = problem.joined_rows
        report = RunReport(
            **self.record_fields,
            chosen=self.chosen,
            tables=problem.table_reports(),
            joined_rows_train=train_rows,
            joined_rows_test=test_rows,
            split=self.split_entry,
            join_steps=problem.join_steps,
            final_train=self.final.train,
            final_test=self.final.test,
            model=str(self.model) if self._has_saved else "",
            verdict=self.verdict,
            contributions={
                table: {
                    "share": contribution.share,
                    "mean-score": contribution.mean_score.tolist(),
                }
                for table, contribution in self.outcome.contributions.items()
            },
            coefficients=self.outcome.coefficients_entry(problem),
            outcomes={**self.outcome.comparison, **self._response_entries},
            privacy={
                **privacy_report(
                    disclosures(problem.exposure),
                    self.ledgers,
                    self.settings.privacy,
                    is_complete=self.is_finished,
                ),
                "readings": self.method.readings(problem),
            },
        )
        return self.method.complete(report)


def _log_dropped(problem: PreparedRun) -> None:
    """Log which features are constant, and so are no columns."""
    for table, encoder in problem.encoders.items():
        if encoder.dropped:
            names = ", ".join(encoder.dropped)
            log(INFO, "table %s: constant features dropped: %s", table, names)
