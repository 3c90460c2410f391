"""One round of messages: to every addressed site one, and its reply or an error.

Flower's own loop polls every three seconds in deployment; this one polls often. What went
over the wire is counted by table.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from tp_flower.errors import ReplyError, SiteError
from tp_flower.protocol import Action, AnyArray, ArrayKey, Packet
from tp_flower.protocol import message_bytes, pack, unpack

FIRST_POLL_SECONDS = 0.001
LONGEST_POLL_SECONDS = 0.1


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
        table_of: the table of each part, to count bytes by table.
        epoch: the epoch the round belongs to; 0 is set-up.
        phase: what the round is for, for the report.
    """

    action: Action
    packets: Mapping[int, Packet]
    table_of: Mapping[int, str] = field(default_factory=dict)
    epoch: int = 0
    phase: str = ""


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
        """Return the JSON facts of every part, from the ``parts`` lists."""
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
    arrays: Mapping[int, Mapping[str, AnyArray]] | None = None,
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
    table_of: dict[int, str] = {}
    for part in parts:
        table_of[part.number] = part.table
        packet = packets.setdefault(part.node, Packet(dict(header or {})))
        if facts is not None:
            told = {"id": part.number, **facts[part.number]}
            packet.header.setdefault("parts", []).append(told)
        for name, array in (arrays or {}).get(part.number, {}).items():
            packet.arrays[part.number, name] = array
    return Request(action, packets, table_of, phase=action.name.lower())


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
    request: Request, replies: Iterable[Message], site_names: Mapping[int, str]
) -> Replies:
    """Return what the sites answered.

    Args:
        request: what was asked.
        replies: the replies that arrived.
        site_names: the organisations behind each node, for messages.

    Raises:
        SiteError: if a site reported an error or its app crashed.
        ReplyError: if a reply is missing or malformed.
    """
    packets: dict[int, Packet] = {}
    for message in replies:
        if message.has_error():
            raise _failure(request, message, site_names)
        node = message.metadata.src_node_id
        packet = unpack(message.content)
        if "error" in packet.header:
            raise SiteError(
                f"{_name(node, site_names)} could not answer {request.action}: "
                f"{packet.header['error']}"
            )
        packets[node] = packet
    if missing := request.packets.keys() - packets.keys():
        names = ", ".join(_name(node, site_names) for node in sorted(missing))
        raise ReplyError(
            f"no reply to {request.action} from {names} within site-timeout"
        )
    arrays = {
        key: array
        for packet in packets.values()
        for key, array in packet.arrays.items()
    }
    return Replies(packets, arrays)


def _failure(
    request: Request, message: Message, site_names: Mapping[int, str]
) -> SiteError:
    node = message.metadata.src_node_id
    # errors that Flower makes itself come from node 1, not from the site
    name = _name(node, site_names) if node in site_names else "a site"
    reason = message.error.reason or f"Flower error code {message.error.code}"
    lines = [line for line in reason.strip().splitlines() if line.strip()]
    return SiteError(f"{name} failed in {request.action}: {lines[-1] if lines else ''}")


def _name(node: int, site_names: Mapping[int, str]) -> str:
    return f"site {site_names[node]!r}" if node in site_names else f"node {node}"


def count_bytes(
    sent: Iterable[Message], received: Iterable[Message], table_of: Mapping[int, str]
) -> Traffic:
    """Return what a round's messages carried, by table and direction."""
    traffic = Traffic()
    for messages, counter in ((sent, traffic.down), (received, traffic.up)):
        for message in messages:
            if message.has_error():
                continue
            content = message.content
            total = message_bytes(content)
            for part, size in unpack(content).payload_bytes().items():
                counter[table_of[part]] += size
                total -= size
            traffic.overhead += total
    return traffic
