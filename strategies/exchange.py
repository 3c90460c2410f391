"""One round of messages: to every addressed site one, and its reply or an error.

Flower's own loop polls every three seconds in deployment; this one polls often. What
went over the wire is counted by table. A reply that does not fit what was asked is
refused here, in the name of the site that sent it.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from tp_flower.errors import ReplyError, SiteError
from tp_flower.protocol import (
    Action,
    AnyArray,
    ArrayKey,
    Packet,
    message_bytes,
    pack,
    unpack,
)
from tp_flower.wire import Sent

FIRST_POLL_SECONDS = 0.001
LONGEST_POLL_SECONDS = 0.1

LONGEST_SECONDS = 1e9
"""No site works on one message for longer."""

REASON_CHARACTERS = 1000


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
        parts: by number, the parts that take part in the round.
        epoch: the epoch the round belongs to; 0 is set-up.
        phase: what the round is for, for the report.
    """

    action: Action
    packets: Mapping[int, Packet]
    parts: Mapping[int, Part] = field(default_factory=dict)
    epoch: int = 0
    phase: str = ""

    def tables_at(self, node: int) -> list[str]:
        """The tables that a node is asked about."""
        own = [part.table for part in self.parts.values() if part.node == node]
        return list(dict.fromkeys(own))


@dataclass(frozen=True)
class Replies:
    """What the nodes answered.

    Attributes:
        packets: by node.
        arrays: the arrays of all nodes by (part, name).
    """

    packets: Mapping[int, Packet]
    arrays: Mapping[ArrayKey, AnyArray]

    def facts(self) -> dict[int, dict[str, Any]]:
        """Return the JSON facts of every part, from the ``parts`` lists.

        ``open_replies`` has checked that those asked for are there, each once.
        """
        return {
            int(facts["id"]): facts
            for packet in self.packets.values()
            for facts in packet.header["parts"]
        }


@dataclass
class Traffic:
    """Bytes of one round: array bytes by table and direction, and the rest."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    overhead: int = 0


def ask(
    action: Action,
    parts: Iterable[Part],
    header: Mapping[str, Any] | None = None,
    arrays: Mapping[int, Mapping[str, Sent]] | None = None,
    facts: Mapping[int, Mapping[str, Any]] | None = None,
) -> Request:
    """Return a request with one packet per node that hosts any of the parts.

    Args:
        action: what the sites shall do.
        parts: the parts that take part in the round.
        header: sent to every node.
        arrays: what each part is sent, by part number and name.
        facts: what each part is told, listed under ``parts`` in its node's header.
    """
    packets: dict[int, Packet] = {}
    by_number: dict[int, Part] = {}
    carried: defaultdict[int, dict[ArrayKey, Sent]] = defaultdict(dict)
    for part in parts:
        by_number[part.number] = part
        own = carried[part.node]
        packet = packets.setdefault(part.node, Packet(dict(header or {}), own))
        if facts is not None:
            told = {"id": part.number, **facts[part.number]}
            packet.header.setdefault("parts", []).append(told)
        for name, array in (arrays or {}).get(part.number, {}).items():
            own[part.number, name] = array
    return Request(action, packets, by_number, phase=action.name.lower())


def make_messages(request: Request, server_round: int) -> list[Message]:
    """Return the Flower messages of a round."""
    return [
        Message(
            content=pack(packet),
            dst_node_id=node,
            message_type=str(request.action),
            group_id=str(server_round),
        )
        for node, packet in request.packets.items()
    ]


def send_and_receive(
    grid: Grid, messages: list[Message], timeout: float
) -> list[Message]:
    """Send the messages and wait for the replies, at most ``timeout`` seconds."""
    waiting = {message_id for message_id in grid.push_messages(messages) if message_id}
    replies: list[Message] = []
    deadline = time.monotonic() + timeout
    pause = FIRST_POLL_SECONDS
    while True:
        arrived = list(grid.pull_messages(waiting))
        replies += arrived
        waiting -= {message.metadata.reply_to_message_id for message in arrived}
        if not waiting or time.monotonic() > deadline:
            return replies
        pause = (
            FIRST_POLL_SECONDS if arrived else min(1.5 * pause, LONGEST_POLL_SECONDS)
        )
        time.sleep(pause)


def open_replies(
    request: Request,
    replies: Iterable[Message],
    site_names: Mapping[int, str],
    sent: Iterable[Message] = (),
) -> Replies:
    """Return what the sites answered.

    Args:
        request: what was asked.
        replies: the replies that arrived.
        site_names: the organisations behind each node, for messages.
        sent: the messages that were sent. Errors that Flower makes itself do not say
            which site they are about, but which message.

    Raises:
        SiteError: if a site reported an error or its app crashed.
        ReplyError: if a reply is missing or malformed.
    """
    asked_by = {m.metadata.message_id: m.metadata.dst_node_id for m in sent}
    by_node = [
        (asked_by.get(m.metadata.reply_to_message_id, m.metadata.src_node_id), m)
        for m in replies
    ]
    packets: dict[int, Packet] = {}
    # of several failures always the same one is raised
    for node, message in sorted(by_node, key=lambda pair: pair[0]):
        name = _name(node, site_names)
        if message.has_error():
            raise _crash(request, message, node, name)
        packets[node] = _open_reply(request, message, node, name)
    if missing := request.packets.keys() - packets.keys():
        names = ", ".join(
            _name(node, site_names) + _about(request.tables_at(node))
            for node in sorted(missing)
        )
        raise ReplyError(
            f"no reply to {request.action} from {names} within site-timeout"
        )
    arrays = {
        key: array
        for packet in packets.values()
        for key, array in packet.wide_arrays().items()
    }
    return Replies(packets, arrays)


def _open_reply(request: Request, message: Message, node: int, name: str) -> Packet:
    """Return what one site answered, after checks that fit every action."""
    if node not in request.packets:
        raise ReplyError(f"{name} answered {request.action} without being asked")
    try:
        packet = unpack(message.content)
        if "error" in packet.header:
            raise _failure(request, packet, node, name)
        _check_header(request, packet, node)
    except ReplyError as error:
        raise ReplyError(
            f"the reply of {name} to {request.action} cannot be used: {error}"
        ) from None
    return packet


def _check_header(request: Request, packet: Packet, node: int) -> None:
    """Refuse a reply that speaks of other parts than the node was asked about."""
    hosted = {part.number for part in request.parts.values() if part.node == node}
    if foreign := {part for part, _ in packet.arrays} - hosted:
        raise ReplyError(f"it has arrays of parts {sorted(foreign)}, not its own")
    told = request.packets[node].header.get("parts", [])
    listed = packet.header.get("parts", []) if told else []
    if not _lists_once(listed, {entry["id"] for entry in told}):
        raise ReplyError("it does not list every part it was asked about, each once")
    seconds = packet.header.get("seconds", 0.0)
    # false for NaN, and for a whole number of any size
    if not (isinstance(seconds, int | float) and 0 <= seconds <= LONGEST_SECONDS):
        raise ReplyError("its 'seconds' is not a duration")


def _lists_once(listed: object, wanted: set[int]) -> bool:
    if not isinstance(listed, list) or len(listed) != len(wanted):
        return False
    if not all(isinstance(facts, dict) for facts in listed):
        return False
    numbers = [facts.get("id") for facts in listed]
    return all(type(n) is int for n in numbers) and set(numbers) == wanted


def _failure(request: Request, packet: Packet, node: int, name: str) -> SiteError:
    """Return the error that a site reported, naming the part that it was at."""
    part = None
    if type(packet.header.get("part")) is int:
        part = request.parts.get(packet.header["part"])
    if part is not None and part.node == node:
        where = f"site {part.site!r}, table {part.table!r}"
    else:
        where = name
    reason = _one_line(str(packet.header["error"]))
    return SiteError(f"{where}: {request.action} failed: {reason}")


def _crash(request: Request, message: Message, node: int, name: str) -> SiteError:
    """Return the error that Flower made of a site that could not answer at all."""
    code, lines = message.error.code, (message.error.reason or "").splitlines()
    # the last line of a traceback is what was raised
    last = next((line for line in reversed(lines) if line.strip()), "no reason given")
    return SiteError(
        f"{name}{_about(request.tables_at(node))}: no answer to {request.action} "
        f"(Flower error {code}): {_one_line(last)}"
    )


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= REASON_CHARACTERS:
        return line
    return line[: REASON_CHARACTERS - 3] + "..."


def _about(tables: Sequence[str]) -> str:
    if not tables:
        return ""
    listed = ", ".join(map(repr, tables))
    return f" (table {listed})" if len(tables) == 1 else f" (tables {listed})"


def _name(node: int, site_names: Mapping[int, str]) -> str:
    return f"site {site_names[node]!r}" if node in site_names else f"node {node}"


def count_bytes(
    request: Request,
    opened: Replies,
    sent: Iterable[Message],
    received: Iterable[Message],
) -> Traffic:
    """Return what a round's messages carried, by table and direction."""
    traffic = Traffic()
    for messages, packets, counter in (
        (sent, request.packets, traffic.down),
        (received, opened.packets, traffic.up),
    ):
        for packet in packets.values():
            for part, size in packet.payload_bytes().items():
                counter[request.parts[part].table] += size
        total = sum(message_bytes(message.content) for message in messages)
        traffic.overhead += total - counter.total()
    return traffic
