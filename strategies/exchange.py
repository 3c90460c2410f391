"""One round of messages: to every addressed site one, and what the sites answered.

What goes over the wire is counted by table.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import Message

from tp_flower.protocol import (
    AFTER,
    ROUND,
    RUN,
    Action,
    AnyArray,
    ArrayKey,
    Packet,
    message_bytes,
    pack,
)


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
        stale: the nodes that were missing, and whose packets are of an earlier round.
    """

    packets: Mapping[int, Packet]
    arrays: Mapping[ArrayKey, AnyArray]
    stale: frozenset[int] = frozenset()

    @classmethod
    def of(cls, packets: Mapping[int, Packet], stale: Iterable[int] = ()) -> "Replies":
        """Return the replies that packets are."""
        arrays = {
            key: array
            for packet in packets.values()
            for key, array in packet.arrays.items()
        }
        return cls(packets, arrays, frozenset(stale))

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
    by_number: dict[int, Part] = {}
    carried: defaultdict[int, dict[ArrayKey, AnyArray]] = defaultdict(dict)
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
    answers: Mapping[int, Packet],
    sent: Iterable[Message],
    received: Iterable[Message],
) -> Traffic:
    """Return what a round's messages carried, by table and direction.

    Args:
        request: of the round.
        answers: the packets of the nodes that answered.
        sent: the messages of the request.
        received: those of the answers.
    """
    traffic = Traffic()
    for messages, packets, counter in (
        (sent, request.packets, traffic.down),
        (received, answers, traffic.up),
    ):
        for packet in packets.values():
            for part, size in packet.payload_bytes().items():
                counter[request.parts[part].table] += size
        total = sum(message_bytes(message.content) for message in messages)
        traffic.overhead += total - counter.total()
    return traffic


def computing_seconds(
    packets: Mapping[int, Packet], site_names: Mapping[int, str]
) -> dict[str, float]:
    """Return how long each site has computed, by its name.

    >>> computing_seconds({7: Packet({"seconds": 0.5})}, {7: "EWR"})
    {'EWR': 0.5}
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for node, packet in packets.items():
        spent = float(packet.header.get("seconds", 0.0))
        seconds[site_names.get(node, f"node {node}")] += spent
    return dict(seconds)
