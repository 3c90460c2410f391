"""One round of messages: to every addressed site one, and what the sites answered.

What goes over the wire is counted by table.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import DEBUG, ERROR, INFO, WARNING
from typing import Any, TypeVar

import msgspec
from flwr.app import Message
from flwr.common.logger import log

from tp_flower.errors import ReplyError
from tp_flower.events import Fact, line
from tp_flower.protocol import (
    AFTER,
    ROUND,
    RUN,
    Action,
    Packet,
    PartBody,
    action_of,
    encode,
    message_bytes,
    pack,
)
from tp_flower.protocol import Reply as ReplyMessage
from tp_flower.protocol import Request as RequestMessage
from tp_flower.reports.records import RoundReport

PartArrays = dict[int, dict[str, Any]]
"""By part, arrays by the names of the fields that carry them."""

AnyBody = TypeVar("AnyBody", bound=PartBody)
AnyReply = TypeVar("AnyReply", bound=ReplyMessage)


@dataclass(frozen=True)
class Part:
    """One shard of one table, as the server sees it.

    Attributes:
        number: its name in the messages of this run.
        table: alias of the table in the query.
        site: the organisation that holds the shard.
        node: Flower's node that answers for it.
        shard: position among the shards that the node hosts.
    """

    number: int
    table: str
    site: str
    node: int
    shard: int


@dataclass(frozen=True)
class Request:
    """What one round asks of the sites.

    Attributes:
        action: the message type.
        packets: what each node is sent.
        message: the request of all nodes together.
        parts: by number, the parts that take part in the round.
        epoch: the epoch the round belongs to; 0 is set-up.
        phase: what the round is for, for the report.
    """

    action: Action
    packets: Mapping[int, Packet]
    message: RequestMessage
    parts: Mapping[int, Part] = field(default_factory=dict)
    epoch: int = 0
    phase: str = ""

    def tables_at(self, node: int) -> list[str]:
        """The tables that a node is asked about."""
        own = [part.table for part in self.parts.values() if part.node == node]
        return list(dict.fromkeys(own))


@dataclass(frozen=True)
class Answer:
    """What one node answered.

    Attributes:
        packet: as it arrived.
        message: that the packet carries.
    """

    packet: Packet
    message: ReplyMessage | None = None

    @property
    def seconds(self) -> float:
        """How long the node has computed."""
        return float(self.packet.header.get("seconds", 0.0))


@dataclass(frozen=True)
class Replies:
    """What the nodes answered.

    Attributes:
        answers: by node.
        parts: what was said of each participant, by number.
        stale: the nodes that were missing, and whose answers are of an earlier round.
    """

    answers: Mapping[int, Answer]
    parts: Mapping[int, PartBody] = field(default_factory=dict)
    stale: frozenset[int] = frozenset()

    @classmethod
    def of(cls, answers: Mapping[int, Answer], stale: Iterable[int] = ()) -> "Replies":
        """Return the replies that answers are."""
        parts: dict[int, PartBody] = {}
        for answer in answers.values():
            parts |= getattr(answer.message, "parts", {})
        return cls(answers, parts, frozenset(stale))

    def then(self, later: "Replies") -> "Replies":
        """Return the replies of two rounds; of a part what the later one says."""
        answers = {**self.answers, **later.answers}
        return Replies(answers, {**self.parts, **later.parts}, self.stale | later.stale)

    def body(self, part: Part, kind: type[AnyBody]) -> AnyBody:
        """Return what a participant's site said of it.

        Raises:
            ReplyError: it said nothing.
        """
        body = self.parts.get(part.number)
        if not isinstance(body, kind):
            raise ReplyError(f"site {part.site!r}, table {part.table!r} sent nothing")
        return body

    def messages(self, kind: type[AnyReply]) -> dict[int, AnyReply]:
        """Return the messages of the nodes that answered, by node."""
        return {
            node: answer.message
            for node, answer in self.answers.items()
            if isinstance(answer.message, kind)
        }


@dataclass
class Traffic:
    """Bytes of one round: array bytes by table and direction, and the rest."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    overhead: int = 0


def ask(
    message: RequestMessage,
    parts: Iterable[Part],
    by_node: Mapping[int, Mapping[str, Any]] | None = None,
) -> Request:
    """Return a request with one packet per node that hosts any of the parts.

    Args:
        message: what is asked; of its participants every node is sent its own.
        parts: that take part in the round.
        by_node: fields of the message that differ from node to node.
    """
    by_number = {part.number: part for part in parts}
    nodes: dict[int, list[int]] = {}
    for part in by_number.values():
        nodes.setdefault(part.node, []).append(part.number)
    fields = by_node or {}
    packets = {
        node: encode(_of(message, numbers, fields.get(node, {})))
        for node, numbers in nodes.items()
    }
    action = action_of(message)
    return Request(action, packets, message, by_number, phase=action.name.lower())


def _of(
    message: RequestMessage, numbers: Iterable[int], fields: Mapping[str, Any]
) -> RequestMessage:
    """Return a message with what it says of some participants, and a node's fields."""
    bodies: Mapping[int, PartBody] | None = getattr(message, "parts", None)
    if bodies is None:
        return msgspec.structs.replace(message, **fields)
    of_node = {number: bodies[number] for number in numbers if number in bodies}
    return msgspec.structs.replace(message, parts=of_node, **fields)


@dataclass(frozen=True)
class Envelope:
    """What every message of a round says besides its request.

    Attributes:
        run: name of the run.
        number: of the round.
        answered: by node, the last round that it has answered.
    """

    run: str
    number: int
    answered: Mapping[int, int]

    def header(self, node: int) -> dict[str, Any]:
        """Return the entries for a node's header."""
        return {
            RUN: self.run,
            ROUND: self.number,
            AFTER: self.answered.get(node),
        }


def make_messages(request: Request, envelope: Envelope) -> list[Message]:
    """Return the Flower messages of a round."""
    return [
        Message(
            content=pack(
                replace(packet, header={**packet.header, **envelope.header(node)})
            ),
            dst_node_id=node,
            message_type=str(request.action),
            group_id=str(envelope.number),
        )
        for node, packet in request.packets.items()
    ]


def count_bytes(
    request: Request,
    answers: Mapping[int, Answer],
    sent: Iterable[Message],
    received: Iterable[Message],
) -> Traffic:
    """Return what a round's messages carried, by table and direction.

    Args:
        request: of the round.
        answers: of the nodes that answered.
        sent: the messages of the request.
        received: those of the answers.
    """
    traffic = Traffic()
    for messages, packets, counter in (
        (sent, request.packets, traffic.down),
        (received, {n: a.packet for n, a in answers.items()}, traffic.up),
    ):
        for packet in packets.values():
            for part, size in packet.payload_bytes().items():
                counter[request.parts[part].table] += size
        total = sum(message_bytes(message.content) for message in messages)
        traffic.overhead += total - counter.total()
    return traffic


def computing_seconds(
    answers: Mapping[int, Answer], site_names: Mapping[int, str]
) -> dict[str, float]:
    """Return how long each site has computed, by its name.

    >>> computing_seconds({7: Answer(Packet({"seconds": 0.5}))}, {7: "EWR"})
    {'EWR': 0.5}
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for node, answer in answers.items():
        seconds[site_names.get(node, f"node {node}")] += answer.seconds
    return dict(seconds)


@dataclass(frozen=True)
class RunLog:
    """The log of one run.

    Attributes:
        run: its name.
        names: of the organisations behind each node.
    """

    run: str
    names: Mapping[int, str] = field(default_factory=dict)

    def started(self, strategy: str) -> None:
        """The sites of a run have been found."""
        sites = sorted(set(self.names.values()))
        self._write(INFO, "start", strategy=strategy, sites=sites)

    def sent(self, number: int, messages: Sequence[Message]) -> None:
        """The messages of a round leave."""
        actions = sorted({message.metadata.message_type for message in messages})
        sites = len(messages)
        self._write(DEBUG, "sent", round=number, action=actions, sites=sites)

    def retry(self, node: int, message: Message, reason: str, pause: float) -> None:
        """A message will be sent again, after a pause in seconds."""
        told = message.metadata
        facts = {"round": told.group_id, "action": told.message_type}
        site = self._name(node)
        self._write(WARNING, "retry", site=site, **facts, reason=reason, pause=pause)

    def stale(self, node: int, request: Request, reason: Exception) -> None:
        """A round goes on with what a site sent in an earlier one."""
        facts = {"action": str(request.action), "reason": str(reason)}
        site, epoch = self._name(node), request.epoch
        self._write(WARNING, "stale", site=site, epoch=epoch, **facts)

    def round_done(
        self, action: str, report: RoundReport, answers: Mapping[int, Answer]
    ) -> None:
        """A round is over, and in the checkpoint of a run that keeps one.

        Args:
            action: of the round.
            report: of the round.
            answers: of the sites, by node.
        """
        number = report.round
        for node, answer in sorted(answers.items()):
            facts: dict[str, Fact] = {"action": action, "seconds": answer.seconds}
            self._write(DEBUG, "reply", site=self._name(node), round=number, **facts)
        self._write(
            DEBUG,
            "round",
            round=number,
            action=action,
            epoch=report.epoch,
            wait_seconds=report.wait_seconds,
            site_seconds=report.client_seconds,
            server_seconds=report.server_seconds,
            bytes_up=sum(report.bytes_up.values()),
            bytes_down=sum(report.bytes_down.values()),
        )

    def found_again(self, sites: str) -> None:
        """The sites of a run that stopped are there."""
        self._write(INFO, "found-again", sites=sites)

    def resumed(self, rounds: int, epochs: int) -> None:
        """A run goes on from its checkpoint."""
        self._write(INFO, "resume", rounds=rounds, epochs=epochs)

    def behind(self, sites: str) -> None:
        """Sites lack rounds, and are brought up to date."""
        self._write(WARNING, "behind", sites=sites)

    def unreached(self, error: Exception) -> None:
        """The sites could not be told to forget the run."""
        self._write(WARNING, "unreached", error=type(error).__name__, reason=str(error))

    def finished(self, rounds: int, seconds: float) -> None:
        """A run has come to its end."""
        self._write(INFO, "finish", rounds=rounds, seconds=seconds)

    def stopped(self, error: Exception, rounds: int, *, is_kept: bool) -> None:
        """A run has failed; its error is told where it is raised to.

        Args:
            error: of the run.
            rounds: that were done.
            is_kept: whether the run can be resumed.
        """
        facts: dict[str, Fact] = {"rounds": rounds, "error": type(error).__name__}
        self._write(ERROR, "stop", **facts, checkpoint=is_kept)

    def _name(self, node: int) -> str:
        return self.names.get(node, f"node {node}")

    def _write(self, level: int, event: str, **facts: Fact) -> None:
        log(level, line(event, run=self.run, **facts))
