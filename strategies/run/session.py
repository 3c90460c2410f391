"""A run's session with its sites: rounds that survive crashes on either side.

It knows the run's name, who hosts which shards, the last round of each site, and the
journal; a strategy makes the requests and computes with the replies.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from logging import ERROR, INFO, WARNING
from pathlib import Path
from secrets import token_hex
from typing import Final

from flwr.app import Message
from flwr.serverapp import Grid

from strategies.run.exchange import (
    Answer,
    Replies,
    Requests,
    RunLog,
    Transport,
    make_messages,
)
from strategies.run.journal import FOLDER, Frame, Journal
from strategies.run.replies import collect_replies
from strategies.run.resume import check_same, find_again, positions_text
from strategies.run.sites import Inventory, describe_request, find_sites, read_inventory
from tp_flower import errors
from tp_flower.protocol.codec import encode
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.protocol.messages import RUN_DIGITS, Action
from tp_flower.protocol.packet import Packet, open_parcel, parcel_of, unpack
from tp_flower.query import Query
from tp_flower.reports.records import RoundReport
from tp_flower.settings import Settings
from tp_flower.settings.run import TRAIN

# of a round's facts in the journal: the error, and its nodes
DIVERGED: Final = "diverged"
MOST_LOSSES: Final = 2  # how often a site may lose its state during one round
ABANDON_SECONDS: Final = 10.0  # seconds to wait for the sites to forget a failed run


@dataclass
class Session:
    """The rounds of one run, from the server's side.

    Attributes:
        journal: record of the rounds; None if the run keeps none.
        started: when the run began.
        behind: the sites that may lack rounds of the journal, with the last round that
            each has answered.
        addresses: present numbers of nodes that had another one at the start.
        answered: by node, the last round that it has answered.
        is_replaying: whether the rounds are being replayed from the journal.
    """

    grid: Grid
    settings: Settings
    run: str
    inventory: Inventory
    journal: Journal | None = None
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    behind: dict[int, int | None] = field(default_factory=dict)
    addresses: Mapping[int, int] = field(default_factory=dict)
    answered: dict[int, int] = field(default_factory=dict)
    is_replaying: bool = False

    def __post_init__(self) -> None:
        self.site_names = self.inventory.site_names
        self.log = RunLog(self.run, self.site_names)
        self.transport = Transport(self.grid, self.log, self.addresses)
        self._losses: Counter[int] = Counter()

    @classmethod
    def begin(cls, grid: Grid, query: Query, settings: Settings) -> "Session":
        """Find the sites of a new run."""
        run = token_hex(RUN_DIGITS // 2)
        try:
            inventory = find_sites(grid, settings, describe_request(query), run)
        except Exception:
            # every site that was asked for its tables has generated keys
            cls(grid, settings, run, Inventory(())).abandon(grid.get_node_ids())
            raise
        session = cls(grid, settings, run, inventory)
        if settings.mode == TRAIN and settings.output_dir:
            head = {
                "run": run,
                "started": session.started.isoformat(),
                "settings": settings.to_dict(),
                "query": query.to_sql(),
                "described": [
                    [node, dict(header)] for node, header in inventory.described.items()
                ],
            }
            try:
                session.journal = Journal.begin(
                    Path(settings.output_dir) / FOLDER, head
                )
            except OSError as error:
                session.abandon()
                raise errors.SettingsError(
                    f"output-dir {settings.output_dir!r} cannot be written: "
                    f"{error.strerror}"
                ) from error
        return session

    @classmethod
    def resume(cls, grid: Grid, query: Query, settings: Settings) -> "Session":
        """Find the sites of a run that stopped."""
        journal = Journal(Path(settings.resume) / FOLDER)
        try:
            head = journal.head
            check_same(settings, head["settings"])
            if query.to_sql() != head["query"]:
                raise errors.SettingsError(
                    f"the run of {settings.resume} has another query"
                )
            old_inventory = read_inventory(
                {n: Packet(header) for n, header in head["described"]}
            )
            addresses, positions = find_again(
                grid, settings, head["run"], old_inventory, describe_request(query)
            )
        except BaseException:
            journal.close()
            raise
        session = cls(
            grid,
            settings,
            head["run"],
            old_inventory,
            journal,
            datetime.fromisoformat(head["started"]),
            positions,
            addresses,
            is_replaying=True,
        )
        session.log.write(INFO, "found-again", sites=positions_text(positions))
        return session

    def messages(self, request: Requests, number: int) -> list[Message]:
        """Return the messages of a round, after a restart with the same content."""
        messages = make_messages(request, self.run, number, self.answered)
        parcels = {} if self.journal is None else self.journal.in_flight(number)
        for message in messages:
            if parcel := parcels.get(message.metadata.dst_node_id):
                message.content = open_parcel(parcel)
        return messages

    def send_and_wait(
        self, number: int, messages: Sequence[Message], timeout: float
    ) -> list[Message]:
        """Send the messages of a round and return the replies."""
        if self.journal is not None:
            self.journal.send_off(number, messages)
        return self.transport.send_and_wait(messages, timeout)

    def collect_replies(
        self, request: Requests, messages: Sequence[Message]
    ) -> tuple[Replies, dict[int, Message]]:
        """Return the replies of a round, and the message of each node."""
        by_node = [(self.transport.node_of(message), message) for message in messages]
        return collect_replies(request, by_node, self.site_names), dict(by_node)

    def end_round(
        self,
        action: Action,
        report: RoundReport,
        answered: Mapping[int, Message],
        diverged: errors.DivergedError | None = None,
    ) -> None:
        """Record a round: completed, or not taken by sites that diverged."""
        self.answered |= dict.fromkeys(answered, report.round)
        for node in answered:
            self.behind.pop(node, None)
        self._losses.clear()
        self.is_replaying = False
        if self.journal is not None:
            parcels = {node: parcel_of(m.content) for node, m in answered.items()}
            record = {
                "number": report.round,
                "action": action,
                "report": asdict(report),
            }
            if diverged is not None:
                record[DIVERGED] = [str(diverged), sorted(diverged.nodes)]
            self.journal.append(Frame(record, parcels))

    def start_again(self, positions: Mapping[int, int | None]) -> None:
        """Prepare to replay the journal, for sites that lack rounds."""
        names = [self.site_names.get(n, f"node {n}") for n in sorted(positions)]
        site_list = ", ".join(map(repr, names))
        if self.journal is None:
            raise errors.SiteError(
                f"the state of this run is lost at {site_list} (restarted with another "
                "state-dir?), and the run has no checkpoint, as it has no output-dir; "
                "start the run again"
            )
        self._losses.update(positions.keys())
        if max(self._losses.values()) > MOST_LOSSES:
            raise errors.SiteError(
                f"{site_list}: the state of this run keeps getting lost"
            )
        self.log.write(WARNING, "behind", sites=positions_text(positions))
        self.behind |= positions
        self.is_replaying = True
        self.answered.clear()

    def recall(self, request: Requests | None, frame: Frame) -> Replies:
        """Return a round's replies from the journal; resend it if they were lost."""
        number = int(frame.facts["number"])
        if request is None or frame.facts["action"] != request.action:
            raise errors.SettingsError(
                f"round {number} of the checkpoint is {frame.facts['action']}, which "
                "this version does not send at that point: resume with the version "
                "that the run began with"
            )
        packets = {n: unpack(open_parcel(item)) for n, item in frame.parcels.items()}
        self._bring_up(request, number, packets)
        self.answered |= dict.fromkeys(packets, number)
        return Replies.of(
            {n: Answer.read(request.action, item) for n, item in packets.items()}
        )

    def _bring_up(
        self, request: Requests, number: int, packets: Mapping[int, Packet]
    ) -> None:
        """Send a round to the sites that lack it; the journal has their replies."""
        lacking = {
            node: packet
            for node, packet in request.packets.items()
            # nodes that may not have taken the round
            if node in packets and (self.behind.get(node, number) or 0) < number
        }
        if not lacking:
            return
        late_request = replace(request, packets=lacking)
        messages = make_messages(late_request, self.run, number, self.answered)
        replies = self.transport.send_and_wait(messages, self.settings.site_timeout)
        try:
            answers = self.collect_replies(late_request, replies)[0].answers
        except errors.UnavailableError:
            raise
        except errors.SiteError as error:
            raise errors.SiteError(
                f"{error} (it has lost its state, and cannot be brought up to date; "
                "start the run again)"
            ) from error
        for node, answer in answers.items():
            if answer.packet.header.get("parts") != packets[node].header.get("parts"):
                raise errors.SiteError(
                    f"site {self.site_names.get(node)!r} lost its state, and its "
                    "tables have changed since the run began; start the run again"
                )
            self.behind[node] = number

    def stop(self, error: Exception, rounds: int, *, has_trained: bool) -> None:
        """Keep the run for resuming if that may help, or let the sites forget it."""
        is_passing = isinstance(
            error, errors.MissingSiteError | errors.UnavailableError
        )
        is_foreign = not isinstance(error, errors.TPFlowerError)
        may_help = is_passing or is_foreign or has_trained or self.is_replaying
        is_resumable = self.journal is not None and may_help
        # the error itself is logged by whoever catches it
        name = type(error).__name__
        self.log.write(
            ERROR, "stop", rounds=rounds, error=name, checkpoint=is_resumable
        )
        if is_resumable:
            self.close()
            return
        self.abandon()
        self.end()

    def abandon(self, nodes: Iterable[int] | None = None) -> None:
        """Let sites (None: all) forget the run, as far as they can be reached."""
        try:
            finish = FinishRequest()
            nodes = self.grid.get_node_ids() if nodes is None else nodes
            request = Requests(
                Action.FINISH, dict.fromkeys(nodes, encode(finish)), message=finish
            )
            # a number that no round has
            number = max(self.answered.values(), default=0) + 2
            messages = make_messages(request, self.run, number, {})
            Transport(self.grid, self.log).send_and_wait(messages, ABANDON_SECONDS)
        except Exception as error:  # noqa: BLE001 - the run's own outcome matters more
            self.log.write(
                WARNING, "unreached", error=type(error).__name__, reason=str(error)
            )

    def idle_nodes(self) -> list[int]:
        """Return the nodes that answered but have no table of the query."""
        if self.addresses:
            # they have other numbers now
            return []
        return sorted(
            self.inventory.nodes.keys()
            - {shard.node for shard in self.inventory.shards}
        )

    def close(self) -> None:
        """Stop, and leave the journal to whoever resumes the run."""
        if self.journal is not None:
            self.journal.close()

    def end(self) -> None:
        """Delete the journal: the run is over."""
        if self.journal is not None:
            self.journal.remove()
