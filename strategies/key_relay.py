"""The server's part in the key agreement: it relays, and never has the secret."""

from collections.abc import Collection, Generator, Mapping
from typing import Any

from strategies.exchange import Replies, Request
from strategies.inventory import Inventory
from tp_flower.errors import ReplyError
from tp_flower.protocol import Action, Packet


def relay_secret(
    inventory: Inventory, nodes: Collection[int], seed: int
) -> Generator[Request, Replies, dict[int, dict[str, Any]]]:
    """Let one of the nodes make a secret for all of them.

    Returns:
        Per node, the header entries by which it opens the secret.

    Raises:
        ReplyError: the leader did not seal the secret to every node.
    """
    leader = min(nodes)
    described = {node: inventory.nodes[node] for node in sorted(nodes)}
    header = {
        "public-keys": {str(node): own.public_key for node, own in described.items()},
        "simulated": all(own.is_simulated for own in described.values()),
        "seed": seed,
    }
    replies = yield Request(Action.SEAL, {leader: Packet(header)}, phase="seal")
    sealed = replies.packets[leader].header.get("sealed")
    if not isinstance(sealed, Mapping) or not _are_texts(sealed, described):
        name = inventory.site_names.get(leader, f"node {leader}")
        raise ReplyError(f"site {name!r} did not seal the run's secret to all sites")
    key = described[leader].public_key
    return {
        node: {"sealed": sealed[str(node)], "leader-key": key} for node in described
    }


def _are_texts(sealed: Mapping[str, Any], nodes: Collection[int]) -> bool:
    return all(isinstance(sealed.get(str(node)), str) for node in nodes)
