"""The server's part in how sites share a key: it relays, and never has the secret."""

from collections.abc import Collection, Generator, Mapping
from typing import Any

from strategies.run.exchange import Replies, Request
from strategies.run.sites import Inventory, Node
from tp_flower.errors import ReplyError, SettingsError
from tp_flower.privacy.key_agreement import KeySource
from tp_flower.protocol import Action, SealReply, SealRequest, encode
from tp_flower.query import BoundQuery


def relay_secret(
    inventory: Inventory, nodes: Collection[int], seed: int
) -> Generator[Request, Replies, dict[int, dict[str, Any]]]:
    """Let one of the nodes make a secret for all of them, unless they have one.

    Returns:
        Per node, the fields of ``extract`` by which it comes to the key of the run.

    Raises:
        SettingsError: the nodes take their key from different places, or have
            different secrets.
        ReplyError: the leader did not seal the secret to every node.
    """
    described = {node: inventory.nodes[node] for node in sorted(nodes)}
    names = {node: inventory.site_names.get(node, f"node {node}") for node in described}
    source = _common_source(described, names)
    fields: dict[str, Any] = {
        "keys": str(source),
        "public_keys": [node.public_key for node in described.values()],
    }
    if source is KeySource.FILE:
        return {node: dict(fields) for node in described}
    leader = min(described)
    request = SealRequest(
        keys=source.value,
        public_keys={str(node): own.public_key for node, own in described.items()},
        site_keys={str(node): own.site_key for node, own in described.items()},
        simulated=all(own.is_simulated for own in described.values()),
        seed=seed,
    )
    replies = yield Request(
        Action.SEAL, {leader: encode(request)}, phase="seal", message=request
    )
    sealed = replies.messages(SealReply)[leader].sealed
    if not {str(node) for node in described} <= sealed.keys():
        raise ReplyError(
            f"site {names[leader]!r} did not seal the run's secret to all sites"
        )
    fields["leader_key"] = described[leader].public_key
    fields["leader_site_key"] = described[leader].site_key
    return {node: {**fields, "sealed": sealed[str(node)]} for node in described}


def _common_source(
    described: Mapping[int, Node], names: Mapping[int, str]
) -> KeySource:
    """Return where all nodes take the key from, before anything is asked of them."""
    sources = {node: str(own.keys) for node, own in described.items()}
    by_source = _grouped(sources, names)
    if len(by_source) > 1:
        listed = "; ".join(f"{key}: {sites}" for key, sites in by_source.items())
        raise SettingsError(
            f"the sites take the key of the hashes from different places ({listed}): "
            "give every site secret-file in its node config, or every site "
            "allowed-keys, or no site either"
        )
    digests = {node: own.secret_digest for node, own in described.items()}
    by_secret = _grouped(digests, names)
    if len(by_secret) > 1:
        listed = " and ".join(by_secret.values())
        raise SettingsError(
            f"the secret files of the sites {listed} differ: copy one file to all sites"
        )
    return next(iter(described.values())).keys


def _grouped(values: Mapping[int, str], names: Mapping[int, str]) -> dict[str, str]:
    """Return the names of the nodes that have each value."""
    found: dict[str, list[str]] = {}
    for node, value in values.items():
        found.setdefault(value, []).append(repr(names[node]))
    return {value: ", ".join(listed) for value, listed in found.items()}


def key_groups(bound: BoundQuery) -> dict[str, list[str]]:
    """Return, by table, the group of each of its join keys.

    Keys are of one group if joins connect them: the groups are the components of the
    graph whose edges are the joins.
    """
    keys = [
        (table, number)
        for table in bound.tables
        for number in range(len(bound.fragments_of(table)[0].keys))
    ]
    group = {key: number for number, key in enumerate(keys)}
    for join in bound.joins:
        ends = {group[join.left, join.left_key], group[join.right, join.right_key]}
        group = {key: min(ends) if own in ends else own for key, own in group.items()}
    found: dict[str, list[str]] = {table: [] for table in bound.tables}
    for (table, _), own in group.items():
        found[table].append(f"group-{own}")
    return found
