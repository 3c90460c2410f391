"""RoundStrategy: a Flower Strategy written as a generator of rounds.

The generator yields :class:`Requests`, receives the sites' :class:`Replies`, and so
reads like its algorithm. Flower's hooks drive it: ``configure_train`` sends the pending
request, and ``aggregate_train`` passes the replies to the generator, which returns its
next request. So wrappers that observe or change messages work, and ``start`` returns
Flower's ``Result``.
"""

import math
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from logging import INFO, WARNING
from typing import Any, ClassVar, Final, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from strategies.run import exchange
from strategies.run.replies import BehindSites
from strategies.run.session import DIVERGED, Session
from strategies.run.sites import Inventory
from tp_flower.arrays import FloatArray
from tp_flower.errors import DivergedError, TPFlowerError
from tp_flower.joins.ray_workers import open_workers
from tp_flower.joins.workers import Workers
from tp_flower.protocol.fields import Document
from tp_flower.query import Query
from tp_flower.reports.records import RoundReport, merge_last_epoch
from tp_flower.settings import Settings


@dataclass(frozen=True)
class EpochResult:
    """The metrics of an epoch, and how far it was from the optimum.

    There are none of test or validation rows if these were not scored. Residuals are
    relative: ADMM's ``primal`` and ``dual`` ones, or the ``gradient`` of conjugate
    gradients. ``predicted`` are the predictions of the test rows, ``row_losses`` their
    losses, (N',). A loss that may be NaN, as noise hides it, is not ``is_judged``.
    """

    epoch: int
    train: dict[str, float]
    test: dict[str, float]
    residuals: Mapping[str, float] = field(default_factory=dict)
    validation: Mapping[str, float] = field(default_factory=dict)
    predicted: FloatArray | None = None
    row_losses: FloatArray | None = None
    is_judged: bool = True

    def is_within(self, tolerance: float) -> bool:
        """Whether there are residuals, and all are below the tolerance."""
        return 0.0 <= max(self.residuals.values(), default=-1.0) < tolerance


# of a validation loss, relative to it: less is not worth a round
NOTABLE_FALL: Final = 2e-3


@dataclass(frozen=True)
class BestEpoch:
    """The epoch of the lowest validation loss so far, and whether it is the last.

    The epoch is 0 if there is none.

    The server says with its next message that the model before it is the best so far.
    The sites copy it into their state, which changes with the round: so a message that
    comes again, a killed process and a resumed run find the same copy. At the end of
    the run they save the copy, unless the last model is the best.

    >>> best = BestEpoch(patience=2)
    >>> for epoch, loss in enumerate([3.0, 1.0, 1.5, 0.999], 1):
    ...     best = best.after(epoch, loss)
    >>> best.epoch, best.is_last, best.is_over
    (4, True, True)
    """

    patience: int = 0
    epoch: int = 0
    loss: float = math.inf
    is_last: bool = False
    mark: float = math.inf  # the last loss that was notably lower
    epochs_since: int = 0  # the mark

    def after(self, epoch: int, loss: float) -> "BestEpoch":
        """Return the best epoch after one more, with its validation loss."""
        is_best = loss < self.loss
        mark = self.mark
        since = self.epochs_since + 1
        if mark - loss > NOTABLE_FALL * abs(loss):
            mark = loss
            since = 0
        best = (epoch, loss) if is_best else (self.epoch, self.loss)
        return BestEpoch(self.patience, *best, is_best, mark, since)

    @property
    def is_over(self) -> bool:
        """Whether training ends, because no epoch was notably better for too long."""
        return 0 < self.patience <= self.epochs_since


def tests_every_epoch(settings: Settings) -> bool:
    """Whether held-out rows are scored in every epoch, or only in the last one.

    With a sample their scores would cost more than the training. If any epoch may be
    the last, every epoch scores them.
    """
    return ends_early(settings) or not settings.training_sample


def ends_early(settings: Settings) -> bool:
    """Whether any epoch may be the last, or the one whose model is saved."""
    return settings.tolerance > 0.0 or settings.validation_share > 0.0


NO_WORKERS: Final = (
    "server-workers: strategy %r computes in the server's own process, and has no "
    "joined rows for workers"
)
MOST_RECORDS: Final = 1000
"""Records of single rounds: they grow with a run, as do report.json and its page."""

RoundListener = Callable[[RoundReport], None]
Value = TypeVar("Value")


@dataclass
class _Progress:
    """State of a run that is reset when the journal is replayed."""

    method: Generator[exchange.Requests, exchange.Replies, None] | None = None
    pending: exchange.Requests | None = None
    result: EpochResult | None = None
    history: list[RoundReport] = field(default_factory=list)
    ledgers: dict[int, list[Document]] = field(default_factory=dict)
    ledger_ends: dict[int, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)
    sent_at: float = 0.0
    returned: Result = field(default_factory=Result)


class RoundStrategy(Strategy):
    """Base of the strategies that exchange rounds of messages with a query's sites."""

    name: str
    goes_on_after: ClassVar[tuple[type[TPFlowerError], ...]] = (DivergedError,)
    """Errors of sites that the rounds are told of where they wait for replies."""
    idle_seconds = 0.0
    """Since the last replies, in which the server had nothing to do."""

    def __init__(
        self,
        query: Query,
        settings: Settings | None = None,
        on_round: RoundListener | None = None,
        **overrides: object,
    ) -> None:
        self.settings = (settings or self.default_settings()).with_fields(**overrides)
        query = query.on_grid(self.settings.cutoff_grid)
        self.query = query.sealing_cutoffs(is_set=self.settings.sealed_cutoffs)
        self._on_round = on_round
        # the one in progress, from 1; 0 during set-up and after the last one
        self.epoch = 0
        self._session: Session | None = None
        self._progress = _Progress()
        self.workers: Workers | None = None
        self.started_at = datetime.now(UTC)
        self._clock = time.perf_counter()

    def default_settings(self) -> Settings:
        """Return the settings that apply if a run gives none."""
        return Settings(mode=self.name)

    @abstractmethod
    def rounds(self) -> Generator[exchange.Requests, exchange.Replies, None]:
        """Exchange messages, from the first round to the one that ends the run."""

    def lend_run(self, other: "RoundStrategy") -> None:
        """Let another strategy take part in the run: its sites, rounds and clock."""
        shared = ("_session", "_progress", "workers", "started_at", "_clock")
        vars(other).update({name: vars(self)[name] for name in shared})

    @property
    def inventory(self) -> Inventory:
        """The sites' shards, known after :meth:`start` has found them."""
        if self._session is None:
            return Inventory(())
        return self._session.inventory

    @property
    def session(self) -> Session:
        """The rounds with the sites, available once :meth:`start` has found them."""
        if self._session is None:
            raise RuntimeError("the strategy has no sites before it starts")
        return self._session

    @property
    def can_be_resumed(self) -> bool:
        """Whether the run stopped and left a checkpoint."""
        journal = None
        if self._session is not None:
            journal = self._session.journal
        return journal is not None and journal.folder.is_dir()

    @property
    def history(self) -> list[RoundReport]:
        """The records of the rounds so far; in long runs, one per phase of an epoch."""
        return self._progress.history

    @property
    def rounds_done(self) -> int:
        """The number of rounds so far."""
        if not self.history:
            return 0
        return self.history[-1].round

    @property
    def warnings(self) -> list[str]:
        """Warnings about the result, a sentence each without its full stop."""
        return self._progress.warnings

    def warn(self, *texts: str) -> None:
        """Log warnings, each once.

        Console, report and page repeat them beside the result.
        """
        for text in texts:
            if text not in self.warnings:
                self.warnings.append(text)
                log(WARNING, text)

    @property
    def is_finished(self) -> bool:
        """Whether the method has finished."""
        return self._progress.method is not None and self._progress.pending is None

    @property
    def ledgers(self) -> dict[str, list[Document]]:
        """By site, its latest account of what the run's releases have cost."""
        return self._group_by_site(self._progress.ledgers)

    def _group_by_site(self, by_node: Mapping[int, Value]) -> dict[str, Value]:
        names = self.inventory.site_names
        return {
            names.get(node, f"node {node}"): value
            for node, value in sorted(by_node.items())
        }

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.perf_counter() - self._clock

    @property
    def record_fields(self) -> Document:
        """The fields that the record of a run has in every mode."""
        return {
            "settings": self.settings.to_dict(),
            "query": self.query.to_sql(),
            "history": self.history,
            "warnings": self.warnings,
            "ledger_ends": self._group_by_site(self._progress.ledger_ends),
            "output_dir": self.settings.output_dir,
            # ISO 8601, UTC
            "started": self.started_at.isoformat(timespec="seconds"),
            "seconds": self.seconds,
        }

    def result_arrays(self) -> ArrayRecord:
        """Return the arrays of Flower's result after an epoch."""
        return ArrayRecord()

    def request(self, request: exchange.Requests) -> exchange.Requests:
        """Return a request, marked as one of the epoch in progress."""
        return replace(request, epoch=self.epoch)

    def finish_epoch(self, result: EpochResult) -> None:
        """Record an epoch; its metrics belong to the round that just ended."""
        self._progress.result = result
        self.epoch = result.epoch + 1

    def configure_train(
        self, server_round: int, *_: Any, **__: Any
    ) -> Iterable[Message]:
        """Return the messages of the pending request; sites keep their models."""
        if self._progress.pending is None:
            return []
        messages = self._progress.sent = self.session.messages(
            self._progress.pending, server_round
        )
        self._progress.sent_at = time.perf_counter()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Pass the replies to the method and let it compute its next request."""
        received_at = time.perf_counter()
        self.idle_seconds = 0.0
        request = self._progress.pending
        if request is None:
            return None, None
        replies = list(replies)
        try:
            collected, answered = self.session.collect_replies(request, replies)
        except self.goes_on_after as error:
            return self._take_error(server_round, request, replies, error)
        self._take(collected)
        report = self._report(
            server_round, request, collected.answers, answered, received_at
        )
        self.session.end_round(request.action, report, answered)
        if self._on_round is not None:
            self._on_round(report)
        return self._epoch_result()

    def _take_error(
        self,
        server_round: int,
        request: exchange.Requests,
        replies: list[Message],
        error: TPFlowerError,
    ) -> tuple[None, None]:
        """Let the method go on after a round that some sites did not carry out.

        Raises:
            TPFlowerError: the method cannot go on.
        """
        received_at = time.perf_counter()
        self._throw(error)
        by_node = {
            self.session.transport.node_of(message): message for message in replies
        }
        diverged = error if isinstance(error, DivergedError) else None
        answered: dict[int, Message] = {}
        if diverged is not None:
            answered = {n: m for n, m in by_node.items() if n not in diverged.nodes}
        report = self._report(server_round, request, {}, answered, received_at)
        self.session.end_round(request.action, report, answered, diverged)
        if self._on_round is not None:
            self._on_round(report)
        return None, None

    def _throw(self, error: TPFlowerError) -> None:
        """Raise an error where the method waits for replies; take its next request."""
        if self._progress.method is None:
            raise error
        try:
            self._progress.pending = self._progress.method.throw(error)
        except StopIteration:
            self._progress.pending = None

    def _take(self, replies: exchange.Replies) -> None:
        """Record the accounts of the sites; give the method its replies."""
        for node, answer in replies.answers.items():
            if (account := getattr(answer.message, "ledger", None)) is not None:
                self._progress.ledgers[node] = account
            if answer.envelope.ledger_end is not None:
                self._progress.ledger_ends[node] = answer.envelope.ledger_end
        if self._progress.method is None:
            return
        try:
            self._progress.pending = self._progress.method.send(replies)
        except StopIteration:
            self._progress.pending = None

    def _epoch_result(self) -> tuple[ArrayRecord | None, MetricRecord | None]:
        result, self._progress.result = self._progress.result, None
        if result is None:
            return None, None
        return self.result_arrays(), MetricRecord(dict(result.train))

    def configure_evaluate(self, *_: Any, **__: Any) -> Iterable[Message]:
        """Return nothing: scores of held-out rows come with the training replies."""
        return []

    def aggregate_evaluate(self, *_: Any, **__: Any) -> None:
        """Return nothing: there is no separate evaluation."""

    def summary(self) -> None:
        """Log the settings that were changed from their defaults."""
        defaults = self.default_settings().to_dict()
        for key, value in self.settings.to_dict().items():
            if value != defaults[key] and key != "sql":
                log(INFO, "\t%s = %r", key, value)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,  # noqa: ARG002
        num_rounds: int = 0,
        timeout: float = 0.0,
        train_config: ConfigRecord | None = None,
        *_: Any,
        **__: Any,
    ) -> Result:
        """Set up and train; every argument except the grid may be omitted.

        ``num_rounds`` is the number of epochs and overrides ``num_epochs``; ``timeout``
        overrides ``site_timeout``; 0 leaves the setting as it is.

        The result has the base score in ``arrays``, training and test metrics of every
        epoch in ``train_metrics_clientapp`` and ``evaluate_metrics_serverapp``.
        """
        if num_rounds:
            self.settings = self.settings.with_fields(num_epochs=num_rounds)
        self._session = None
        self._clock = time.perf_counter()
        log(INFO, "Starting %s strategy:", type(self).__name__)
        self.summary()
        config = ConfigRecord() if train_config is None else train_config
        enter = Session.resume if self.settings.resume else Session.begin
        self._session = session = enter(grid, self.query, self.settings)
        self.started_at = session.started
        sites = sorted(set(session.site_names.values()))
        session.log.write(INFO, "start", strategy=type(self).__name__, sites=sites)
        try:
            with self._started_workers():
                self._catch_up()
                result = self._run(grid, config, timeout or self.settings.site_timeout)
        except Exception as error:
            session.stop(error, self.rounds_done, has_trained=bool(self.epoch))
            raise
        except BaseException:
            session.close()
            raise
        session.log.write(INFO, "finish", rounds=self.rounds_done, seconds=self.seconds)
        # whoever has stored the result closes the journal
        session.close()
        session.abandon(session.idle_nodes())
        return result

    @contextmanager
    def _started_workers(self) -> Iterator[None]:
        """Start the run's workers, and end them with it."""
        settings = self.settings
        if settings.has_idle_workers:
            self.warn(NO_WORKERS % settings.method_name)

        def on_loss(number: int) -> None:
            log(WARNING, "Worker %d of the server has died, and is replaced", number)

        with open_workers(settings.asked_workers, on_loss) as workers:
            if workers is not None:
                log(INFO, "Joined rows are at %d workers of the server", len(workers))
            self.workers = workers
            yield

    def _catch_up(self, lacking: BehindSites | None = None) -> None:
        """Run to the end of the journal, even if sites lose their state meanwhile."""
        if lacking is not None:
            self.session.start_again(lacking.positions)
        try:
            self._begin()
        except BehindSites as again:
            self._catch_up(again)

    def _begin(self) -> None:
        """Start the method, and replay the rounds that the journal has."""
        self._progress = _Progress()
        self.epoch = 0
        self._progress.method = self.rounds()
        self._progress.pending = next(self._progress.method)
        journal = self.session.journal
        for frame in journal.frames() if journal else ():
            replies = self.session.recall(self._progress.pending, frame)
            if DIVERGED in frame.facts:
                self._throw(DivergedError(*frame.facts[DIVERGED]))
            else:
                self._take(replies)
            self._record(RoundReport(**frame.facts["report"]))
            self._return(*self._epoch_result())
        if rounds := self.rounds_done:
            self.session.log.write(
                INFO, "resume", rounds=rounds, epochs=self.history[-1].epoch
            )

    def _run(self, grid: Grid, config: ConfigRecord, timeout: float) -> Result:
        """Run rounds until the method asks for no more; return the result."""
        while self._progress.pending is not None:
            number = self.rounds_done + 1
            arrays = self._progress.returned.arrays
            messages = list(self.configure_train(number, arrays, config, grid))
            seconds = self.patience(timeout)
            replies = self.session.send_and_wait(number, messages, seconds)
            try:
                self._return(*self.aggregate_train(number, replies))
            except BehindSites as lacking:
                self._catch_up(lacking)
        return self._progress.returned

    def patience(self, timeout: float) -> float:
        """Return the seconds to wait for the sites in the pending round."""
        return timeout

    def _return(self, arrays: ArrayRecord | None, metrics: MetricRecord | None) -> None:
        """Store an epoch's arrays and metrics in Flower's result."""
        if arrays is None or metrics is None:
            return
        returned = self._progress.returned
        ended = self._progress.history[-1]
        returned.arrays = arrays
        returned.train_metrics_clientapp[ended.epoch] = metrics
        if ended.test:
            returned.evaluate_metrics_serverapp[ended.epoch] = MetricRecord(
                dict(ended.test)
            )

    def _report(
        self,
        server_round: int,
        request: exchange.Requests,
        answers: Mapping[int, exchange.Answer],
        received: Mapping[int, Message],
        received_at: float,
    ) -> RoundReport:
        """Return the report of a round: bytes, seconds and the epoch's metrics."""
        packets = [answer.packet for answer in answers.values()]
        up, more_up = exchange.count_bytes(request, packets, received.values())
        down, more_down = exchange.count_bytes(
            request, request.packets.values(), self._progress.sent
        )
        result = self._progress.result or EpochResult(request.epoch, {}, {})
        elapsed = received_at - self._progress.sent_at
        # real sites round theirs up
        seconds_at = {
            n: min(item.envelope.seconds or 0.0, elapsed) for n, item in answers.items()
        }
        client_seconds = max(seconds_at.values(), default=0.0)
        site_seconds: defaultdict[str, float] = defaultdict(float)
        for node, seconds in seconds_at.items():
            site_seconds[self.session.site_names.get(node, f"node {node}")] += seconds
        report = RoundReport(
            round=server_round,
            epoch=request.epoch,
            phase=request.phase,
            train=result.train,
            test=result.test,
            bytes_up=up,
            bytes_down=down,
            overhead_bytes=more_up + more_down,
            server_seconds=time.perf_counter() - received_at - self.idle_seconds,
            client_seconds=client_seconds,
            site_seconds=dict(site_seconds),
            wait_seconds=elapsed - client_seconds,
            residuals=result.residuals,
            validation=result.validation,
        )
        self._record(report)
        return report

    def _record(self, report: RoundReport) -> None:
        """Add the record of a round.

        At the end of a late epoch it is merged with others.
        """
        self.history.append(report)
        if report.train and len(self.history) > MOST_RECORDS:
            merge_last_epoch(self.history)
