"""RoundStrategy: a Flower Strategy that is written as a generator of rounds.

The generator yields a :class:`Request`, receives the sites' :class:`Replies`, and so
reads like its algorithm. Flower's hooks drive it: what ``configure_train`` sends is the
pending request, and ``aggregate_train`` feeds the replies in and runs to the next one.
So wrappers that look at or change messages work, and ``start`` returns Flower's
``Result``.
"""

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from strategies.exchange import (
    Replies,
    Request,
    count_bytes,
    make_messages,
    open_replies,
    send_and_receive,
)
from strategies.inventory import Inventory, find_sites
from tp_flower.experiment import Settings
from tp_flower.protocol import Action, Packet
from tp_flower.query import Query
from tp_flower.report import RoundReport

ABANDON_SECONDS = 10.0
"""To wait for the sites to forget a failed run."""

RoundListener = Callable[[RoundReport], None]


@dataclass(frozen=True)
class EpochResult:
    """How far an epoch got.

    Attributes:
        epoch: from 1.
        train: metrics on the training rows.
        test: metrics on the held-out rows.
        primal_residual: ADMM's, relative; None for SGD.
        dual_residual: ADMM's, relative; None for SGD.
    """

    epoch: int
    train: dict[str, float]
    test: dict[str, float]
    primal_residual: float | None = None
    dual_residual: float | None = None

    def is_within(self, tolerance: float) -> bool:
        """Whether both residuals are below the tolerance."""
        if self.primal_residual is None or self.dual_residual is None:
            return False
        return max(self.primal_residual, self.dual_residual) < tolerance


@dataclass
class _Progress:
    """What changes while a strategy runs."""

    method: Generator[Request, Replies, None] | None = None
    pending: Request | None = None
    result: EpochResult | None = None
    history: list[RoundReport] = field(default_factory=list)
    ledgers: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    sent_at: float = 0.0


class RoundStrategy(Strategy):
    """Base of all that exchanges messages with the sites of a query.

    Args:
        query: what it is about.
        settings: of the run; ``overrides`` replace single fields.
        on_round: called with the record of every round, for progress displays.

    Attributes:
        run: its name, drawn anew at every start.
    """

    name: str

    def __init__(
        self,
        query: Query,
        settings: Settings | None = None,
        on_round: RoundListener | None = None,
        **overrides: object,
    ) -> None:
        base = settings or self.default_settings()
        self.settings = base.with_fields(**overrides)
        self.query = query
        self._on_round = on_round
        self._epoch = 0
        self._inventory = Inventory(())
        self._progress = _Progress()
        self._started = datetime.now(UTC)
        self._clock = time.perf_counter()
        self.run = secrets.token_hex(16)

    @abstractmethod
    def default_settings(self) -> Settings:
        """Return the settings of a run that names none."""

    @abstractmethod
    def rounds(self) -> Generator[Request, Replies, None]:
        """Exchange messages, from the first round to the one that ends the run."""

    @property
    def inventory(self) -> Inventory:
        """What the sites host, after :meth:`start` has found them."""
        return self._inventory

    @property
    def history(self) -> list[RoundReport]:
        """The records of the rounds so far."""
        return self._progress.history

    @property
    def is_finished(self) -> bool:
        """Whether the method has come to its end."""
        return self._progress.method is not None and self._progress.pending is None

    @property
    def ledgers(self) -> dict[str, list[dict[str, Any]]]:
        """By site, the latest account of what the run's releases have cost."""
        names = self._inventory.site_names
        return {
            names.get(node, f"node {node}"): account
            for node, account in sorted(self._progress.ledgers.items())
        }

    @property
    def started_at(self) -> datetime:
        """When the run started."""
        return self._started

    @property
    def started(self) -> str:
        """When the run started, ISO 8601, UTC."""
        return self._started.isoformat(timespec="seconds")

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.perf_counter() - self._clock

    def result_arrays(self) -> ArrayRecord:
        """Return what Flower's result holds after an epoch."""
        return ArrayRecord()

    @property
    def epoch(self) -> int:
        """The epoch in progress, from 1; 0 during set-up."""
        return self._epoch

    def request(self, request: Request) -> Request:
        """Return a request as one of the epoch in progress."""
        return replace(request, epoch=self._epoch)

    def finish_epoch(self, result: EpochResult) -> None:
        """Record an epoch; its metrics belong to the round that just ended."""
        self._progress.result = result
        self._epoch = result.epoch + 1

    def start_epochs(self) -> None:
        """Count epochs from here: what came before was set-up."""
        self._epoch = 1

    def end_epochs(self) -> None:
        """What follows belongs to no epoch."""
        self._epoch = 0

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,  # noqa: ARG002 - sites keep their own models
        config: ConfigRecord,  # noqa: ARG002 - settings travel in our header
        grid: Grid,  # noqa: ARG002
    ) -> Iterable[Message]:
        """Return the messages of the pending request."""
        if self._progress.pending is None:
            return []
        messages = make_messages(self._progress.pending, server_round)
        self._progress.sent = messages
        self._progress.sent_at = time.perf_counter()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Feed the replies to the method and let it compute its next request.

        Raises:
            SiteError: if a site failed.
            ReplyError: if a reply is missing or malformed.
        """
        received_at = time.perf_counter()
        replies, request = list(replies), self._progress.pending
        if request is None:
            return None, None
        opened = open_replies(
            request, replies, self._inventory.site_names, self._progress.sent
        )
        for node, packet in opened.packets.items():
            if isinstance(account := packet.header.get("ledger"), list):
                self._progress.ledgers[node] = account
        self._advance(opened)
        self._record(server_round, request, replies, opened, received_at)
        result, self._progress.result = self._progress.result, None
        if result is None:
            return None, None
        return self.result_arrays(), MetricRecord(dict(result.train))

    def configure_evaluate(
        self,
        server_round: int,  # noqa: ARG002
        arrays: ArrayRecord,  # noqa: ARG002
        config: ConfigRecord,  # noqa: ARG002
        grid: Grid,  # noqa: ARG002
    ) -> Iterable[Message]:
        """Return nothing: scores of held-out rows ride along with training."""
        return []

    def aggregate_evaluate(
        self,
        server_round: int,  # noqa: ARG002
        replies: Iterable[Message],  # noqa: ARG002
    ) -> MetricRecord | None:
        """Return nothing, as there is nothing to evaluate apart."""
        return None

    def summary(self) -> None:
        """Log the settings that were changed from their defaults."""
        defaults = self.default_settings().to_dict()
        for key, value in self.settings.to_dict().items():
            if value != defaults[key] and key != "sql":
                log(INFO, "\t%s = %r", key, value)

    def start(  # noqa: PLR0913 - Flower's signature
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,  # noqa: ARG002
        num_rounds: int = 0,
        timeout: float = 0.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,  # noqa: ARG002
        evaluate_fn: object = None,  # noqa: ARG002
    ) -> Result:
        """Set up and train; every argument but the grid may be left out.

        Args:
            grid: how messages reach the sites.
            initial_arrays: not used; the sites make their own models.
            num_rounds: epochs, in place of ``num_epochs``, if not 0. Flower counts
                rounds; how many of them an epoch takes depends on the method.
            timeout: seconds to wait for a site, in place of ``site_timeout``, if not 0.
            train_config: passed to ``configure_train``, for wrappers.
            evaluate_config: not used.
            evaluate_fn: not used; held-out rows are evaluated every epoch.

        Returns:
            Flower's result: the base score in ``arrays``, and the training and test
            metrics of every epoch in ``train_metrics_clientapp`` and
            ``evaluate_metrics_serverapp``.

        Raises:
            TPFlowerError: any of its kinds; see the modules.
        """
        if num_rounds:
            self.settings = self.settings.with_fields(num_epochs=num_rounds)
        self._started, self._clock = datetime.now(UTC), time.perf_counter()
        self.run = secrets.token_hex(16)
        self._progress, self._epoch = _Progress(), 0
        log(INFO, "Starting %s strategy:", type(self).__name__)
        self.summary()
        wanted = list(self.query.names)
        config = ConfigRecord() if train_config is None else train_config
        try:
            self._inventory = find_sites(grid, self.settings, wanted)
            self._progress.method = self.rounds()
            self._progress.pending = next(self._progress.method)
            result = self._run(grid, config, timeout or self.settings.site_timeout)
        except Exception:
            # every site that was asked for its tables has made keys
            self._abandon(grid, grid.get_node_ids)
            raise
        hosts = {shard.node for shard in self._inventory.shards}
        self._abandon(grid, lambda: self._inventory.nodes.keys() - hosts)
        return result

    def _abandon(self, grid: Grid, nodes: Callable[[], Iterable[int]]) -> None:
        """Let sites forget the run, as far as they can be reached."""
        try:
            packets = {node: Packet() for node in nodes()}
            messages = make_messages(Request(Action.FINISH, packets), 0)
            send_and_receive(grid, messages, ABANDON_SECONDS)
        except Exception as error:  # noqa: BLE001 - the run's own outcome matters more
            log(WARNING, "the sites could not be told to forget the run: %s", error)

    def _run(self, grid: Grid, config: ConfigRecord, timeout: float) -> Result:
        result, arrays, server_round = Result(), ArrayRecord(), 0
        while self._progress.pending is not None:
            server_round += 1
            messages = list(self.configure_train(server_round, arrays, config, grid))
            replies = send_and_receive(grid, messages, timeout)
            new_arrays, metrics = self.aggregate_train(server_round, replies)
            if new_arrays is None or metrics is None:
                continue
            result.arrays = arrays = new_arrays
            ended = self._progress.history[-1]
            result.train_metrics_clientapp[ended.epoch] = metrics
            if ended.test:
                test = MetricRecord(dict(ended.test))
                result.evaluate_metrics_serverapp[ended.epoch] = test
        return result

    def _advance(self, replies: Replies) -> None:
        if self._progress.method is None:
            return
        try:
            self._progress.pending = self._progress.method.send(replies)
        except StopIteration:
            self._progress.pending = None

    def _record(
        self,
        server_round: int,
        request: Request,
        replies: list[Message],
        opened: Replies,
        received_at: float,
    ) -> None:
        traffic = count_bytes(request, opened, self._progress.sent, replies)
        result = self._progress.result
        client_seconds = max(
            (float(p.header.get("seconds", 0.0)) for p in opened.packets.values()),
            default=0.0,
        )
        report = RoundReport(
            round=server_round,
            epoch=request.epoch,
            phase=request.phase,
            train=result.train if result else {},
            test=result.test if result else {},
            bytes_up=dict(traffic.up),
            bytes_down=dict(traffic.down),
            overhead_bytes=traffic.overhead,
            server_seconds=time.perf_counter() - received_at,
            client_seconds=client_seconds,
            wait_seconds=max(
                received_at - self._progress.sent_at - client_seconds, 0.0
            ),
            primal_residual=result.primal_residual if result else None,
            dual_residual=result.dual_residual if result else None,
        )
        self._progress.history.append(report)
        if self._on_round is not None:
            self._on_round(report)
