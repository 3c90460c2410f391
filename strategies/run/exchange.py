"""One round of messages: the requests, their way to the sites, and the replies.

A site answers a message once, however often it arrives, so it is always right to send
it again: after an error that may pass (a machine restarts, a disk is full), and if
there is no answer for a long time (a SuperNode was killed together with its message).
Flower's own loop polls every three seconds in deployment; this one polls more often.
Bytes are counted by table.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, Final, TypeVar

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from msgspec.structs import replace

from tp_flower.errors import ErrorKind, MessageError, ReplyError
from tp_flower.events import Value, log_event
from tp_flower.protocol import codec
from tp_flower.protocol.fields import PartBody
from tp_flower.protocol.fields import Reply as ReplyMessage
from tp_flower.protocol.fields import Request as RequestMessage
from tp_flower.protocol.messages import (
    ACTIONS,
    Action,
    Failure,
    ReplyEnvelope,
    RequestEnvelope,
)
from tp_flower.protocol.packet import Packet, header_of, message_bytes, pack

FIRST_POLL_SECONDS: Final = 0.001
QUICK_POLL_SECONDS: Final = 0.1
LONGEST_POLL_SECONDS: Final = 1.0
POLL_SHARE: Final = 0.1  # of the time that a reply has taken, after the first second

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 10.0  # before a message is sent again; the pauses double
SILENCE: Final = 60.0  # before an unanswered message is sent again; doubled
MOST_CRASHES: Final = 3  # attempts at a message that crashes its ClientApp
_PASSING: Final = frozenset({0, 3, 4, 5})
"""Flower's errors about nodes and messages that cannot be reached at the moment."""

PartArrays = dict[int, dict[str, Any]]  # by part and name of the field that carries it
AnyBody = TypeVar("AnyBody", bound=PartBody)
AnyReply = TypeVar("AnyReply", bound=ReplyMessage)


@dataclass(frozen=True)
class Part:
    """One shard of one table in one role, a participant of the run.

    Messages identify it by its number; ``shard`` is its position among the node's
    shards, ``table`` the alias in the query.
    """

    number: int
    table: str
    site: str
    node: int
    shard: int


@dataclass(frozen=True)
class Requests:
    """The requests of one round, by node and all together; epoch 0 is set-up."""

    action: Action
    packets: Mapping[int, Packet]
    message: RequestMessage
    parts: Mapping[int, Part] = field(default_factory=dict)
    epoch: int = 0
    phase: str = ""

    def parts_at(self, node: int) -> list[Part]:
        """Return the participants that a node hosts."""
        return [part for part in self.parts.values() if part.node == node]


@dataclass(frozen=True)
class Answer:
    """One node's reply, or its failure to make one."""

    packet: Packet
    message: ReplyMessage
    envelope: ReplyEnvelope

    @classmethod
    def read(cls, action: Action, packet: Packet) -> "Answer":
        """Return the answer to a request of a type."""
        message = codec.decode_reply(action.reply, packet)
        return cls(packet, message, codec.read_envelope(ReplyEnvelope, packet))


@dataclass(frozen=True)
class Replies:
    """The replies of one or several rounds, and the fields about each participant."""

    answers: Mapping[int, Answer]
    parts: Mapping[int, PartBody] = field(default_factory=dict)

    @classmethod
    def of(cls, answers: Mapping[int, Answer]) -> "Replies":
        """Return the replies that answers contain."""
        parts: dict[int, PartBody] = {}
        for answer in answers.values():
            parts |= getattr(answer.message, "parts", {})
        return cls(answers, parts)

    def then(self, later: "Replies") -> "Replies":
        """Return the replies of two rounds; for each participant the later one."""
        return Replies({**self.answers, **later.answers}, {**self.parts, **later.parts})

    def body(self, part: Part, kind: type[AnyBody]) -> AnyBody:
        """Return the fields about a participant."""
        body = self.parts.get(part.number)
        if not isinstance(body, kind):
            raise ReplyError(f"site {part.site!r}, table {part.table!r} sent nothing")
        return body

    def messages(self, kind: type[AnyReply]) -> dict[int, AnyReply]:
        """Return the messages of a type by node."""
        return {
            node: answer.message
            for node, answer in self.answers.items()
            if isinstance(answer.message, kind)
        }


def ask(
    message: RequestMessage,
    parts: Iterable[Part],
    by_node: Mapping[int, RequestMessage] | None = None,
) -> Requests:
    """Return a request: per node a packet with its participants.

    If the nodes' messages differ in more than that, ``by_node`` has one for each.
    """
    by_number = {part.number: part for part in parts}
    nodes: dict[int, list[int]] = {}
    for part in by_number.values():
        nodes.setdefault(part.node, []).append(part.number)
    bodies: Mapping[int, PartBody] | None = getattr(message, "parts", None)
    packets = {}
    for node, numbers in nodes.items():
        for_node = message if by_node is None else by_node[node]
        if bodies is not None:
            hosted = {number: bodies[number] for number in numbers if number in bodies}
            for_node = replace(for_node, parts=hosted)
        packets[node] = codec.encode(for_node)
    action = ACTIONS[type(message)]
    return Requests(action, packets, message, by_number, phase=action.phase)


def make_messages(
    request: Requests, run: str, number: int, answered: Mapping[int, int]
) -> list[Message]:
    """Return a round's messages; ``answered`` has the last round of each node."""
    return [
        Message(
            content=pack(
                codec.add_envelope(
                    packet,
                    RequestEnvelope(run=run, round=number, after=answered.get(node)),
                )
            ),
            dst_node_id=node,
            message_type=str(request.action),
            group_id=str(number),
        )
        for node, packet in request.packets.items()
    ]


def count_bytes(
    request: Requests, packets: Iterable[Packet], messages: Iterable[Message]
) -> tuple[dict[str, int], int]:
    """Return the bytes of a round's arrays in one direction, by table, and the rest."""
    by_table: Counter[str] = Counter()
    for packet in packets:
        for part, size in packet.payload_bytes().items():
            by_table[request.parts[part].table] += size
    total = sum(message_bytes(message.content) for message in messages)
    return dict(by_table), total - by_table.total()


@dataclass(frozen=True)
class RunLog:
    """The log of one run."""

    run: str
    names: Mapping[int, str] = field(default_factory=dict)

    def write(self, level: int, event: str, **values: Value) -> None:
        """Log an event."""
        log_event(level, event, run=self.run, **values)


@dataclass
class PendingMessage:
    """One site's message of a round, its next attempt, and its last failure.

    ``silence`` is the wait before an unanswered message is sent again; a crash is one
    of the site's app, or its failure even to describe its tables.
    """

    message: Message
    pause: float = FIRST_PAUSE
    silence: float = SILENCE
    due: float = 0.0
    ids: set[str] = field(default_factory=set)
    crashes: int = 0
    answer: Message | None = None
    failure: Message | None = None

    def reason_to_retry(self, reply: Message) -> str | None:
        """Return why the message should be sent again, None if it should not."""
        if reply.has_error():
            code = reply.error.code
            if code == ErrorCode.INVALID_FAB:
                return None
            if code not in _PASSING:
                self.crashes += 1
            reason = f"Flower error {code}"
        elif _is_transient(reply):
            # before a run has begun, nothing is lost by soon reporting what may be a
            # wrong address
            self.crashes += self.message.metadata.message_type == Action.DESCRIBE
            reason = "the site cannot do it now"
        else:
            return None
        if self.crashes >= MOST_CRASHES:
            return None
        return reason


class Transport:
    """Carries the messages of one run to its sites, and the replies back.

    ``addresses`` are the present numbers of nodes that had another one at the start.
    """

    def __init__(
        self, grid: Grid, log: RunLog, addresses: Mapping[int, int] | None = None
    ) -> None:
        self._grid = grid
        self._log = log
        self._addresses = addresses or {}
        # a grid of sessions knows when a reply comes
        self._wait = getattr(grid, "wait", time.sleep)
        self._node_of: dict[str, int] = {}
        self._strangers: list[Message] = []

    def node_of(self, reply: Message) -> int:
        """Return the node that a reply is from.

        Errors that Flower itself makes do not name their node, only their message.
        """
        metadata = reply.metadata
        return self._node_of.get(metadata.reply_to_message_id, metadata.src_node_id)

    def send_and_wait(
        self, messages: Iterable[Message], timeout: float
    ) -> list[Message]:
        """Send messages and return the replies, in place of a missing one its error."""
        by_node = {m.metadata.dst_node_id: PendingMessage(m) for m in messages}
        pending = by_node.values()
        deadline = time.monotonic() + timeout
        pause = FIRST_POLL_SECONDS
        waiting_since = time.monotonic()
        self._node_of = {}
        self._strangers = []
        while True:
            now = time.monotonic()
            self._send([p for p in pending if not p.answer and p.due <= now])
            arrived = self._collect(by_node)
            if (
                not any(p.answer is None for p in pending)
                or time.monotonic() > deadline
            ):
                replies = [reply for p in pending if (reply := p.answer or p.failure)]
                # whoever reads the replies refuses those of nodes without a request
                return replies + self._strangers
            if arrived:
                pause = FIRST_POLL_SECONDS
                waiting_since = time.monotonic()
            else:
                pause = min(1.5 * pause, _longest_poll(waiting_since))
            self._wait(pause)

    def _send(self, pending: Sequence[PendingMessage]) -> None:
        """Push messages that are due; set when they are due again."""
        if not pending:
            return
        messages = []
        for item in pending:
            # a new message for every attempt, because Flower numbers them
            message = item.message
            metadata = item.message.metadata
            node = self._addresses.get(metadata.dst_node_id, metadata.dst_node_id)
            kind = metadata.message_type
            group = metadata.group_id
            messages.append(Message(message.content, node, kind, group_id=group))
        identifiers = list(self._grid.push_messages(messages))
        now = time.monotonic()
        for item, identifier in zip(pending, identifiers, strict=False):
            if identifier:
                item.ids.add(identifier)
                self._node_of[identifier] = item.message.metadata.dst_node_id
                item.due = now + item.silence
                item.silence = 2 * item.silence
            else:
                # a node that is not online, or not yet
                item.due = now + item.pause
                item.pause = _next_pause(item.pause)

    def _collect(self, by_node: Mapping[int, PendingMessage]) -> int:
        """Take the replies that have arrived; return how many there are."""
        ids = {i for p in by_node.values() if p.answer is None for i in p.ids}
        if not ids:
            return 0
        replies = list(self._grid.pull_messages(ids))
        for reply in replies:
            node = self.node_of(reply)
            if node not in by_node:
                self._strangers.append(reply)
                continue
            by_node[node].ids.discard(reply.metadata.reply_to_message_id)
            self._take(node, by_node[node], reply)
        return len(replies)

    def _take(self, node: int, pending: PendingMessage, reply: Message) -> None:
        """Record a reply: an answer, or a reason to send the message again."""
        if pending.answer is not None:
            return
        reason = pending.reason_to_retry(reply)
        if reason is None:
            pending.answer = reply
            return
        pending.failure = reply
        metadata = pending.message.metadata
        self._log.write(
            WARNING,
            "retry",
            site=self._log.names.get(node, f"node {node}"),
            round=metadata.group_id,
            action=metadata.message_type,
            reason=reason,
            pause=pending.pause,
        )
        pending.due = time.monotonic() + pending.pause
        # the site has answered: its silence is counted anew
        pending.pause = _next_pause(pending.pause)
        pending.silence = SILENCE


def _is_transient(reply: Message) -> bool:
    """Whether a site says that it cannot answer at the moment."""
    try:
        packet = Packet(header_of(reply.content))
        failure = None
        if codec.is_failure(packet):
            failure = codec.decode(Failure, packet)
    except (ReplyError, MessageError):
        # malformed: refused by whoever reads the replies
        return False
    return failure is not None and failure.kind is ErrorKind.TRANSIENT


def _longest_poll(since: float) -> float:
    """Return the longest pause between two looks for a reply.

    A look costs the SuperLink a request and two queries; a site that takes seconds
    is not asked for ten times in each.
    """
    share = POLL_SHARE * (time.monotonic() - since)
    return min(max(share, QUICK_POLL_SECONDS), LONGEST_POLL_SECONDS)


def _next_pause(pause: float) -> float:
    return min(2 * pause, LONGEST_PAUSE)
