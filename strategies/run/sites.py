"""Which site hosts which shard of the query's tables."""

import difflib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING

from flwr.common.logger import log
from flwr.serverapp import Grid
from msgspec.structs import asdict

from strategies.run import exchange
from strategies.run.replies import collect_replies
from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import ReplyError, SchemaError
from tp_flower.privacy.key_agreement import KeySource
from tp_flower.protocol.codec import encode
from tp_flower.protocol.fields import Document
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import Packet
from tp_flower.protocol.setup_messages import (
    DescribeReply,
    DescribeRequest,
    ShardDescription,
)
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.settings.run import MEAN

SETTLED_SECONDS = 2.0  # without a new node, if their number is unknown
POLL_SECONDS = 0.1


class HostedShard(ShardDescription, frozen=True, kw_only=True):
    """One shard as its site describes it, with its Flower node."""

    node: int


@dataclass(frozen=True)
class Inventory:
    """The nodes that answered, and their shards of the query's tables.

    Positions are the last rounds of the run that nodes have answered; None for none.
    """

    shards: tuple[HostedShard, ...]
    nodes: Mapping[int, DescribeReply] = field(default_factory=dict)
    positions: Mapping[int, int | None] = field(default_factory=dict)
    described: Mapping[int, Document] = field(default_factory=dict)

    @property
    def tables(self) -> list[str]:
        """Names of the query's tables; names that differ only in case are equal."""
        return _distinct_names(shard.table for shard in self.shards)

    @property
    def all_tables(self) -> list[str]:
        """Names of all hosted tables."""
        return _distinct_names(
            name for node in self.nodes.values() for name in node.tables
        )

    @property
    def site_names(self) -> dict[int, str]:
        """The organisations behind each node, for messages."""
        names: dict[int, dict[str, None]] = {}
        for shard in self.shards:
            names.setdefault(shard.node, {})[shard.site] = None
        return {node: "+".join(sites) for node, sites in names.items()}

    @property
    def by_place(self) -> dict[tuple[int, int], HostedShard]:
        """The shards by node and position there."""
        return {(shard.node, shard.position): shard for shard in self.shards}

    def hosts(self, table: str) -> bool:
        """Whether some site hosts a table of this name, compared as in SQL."""
        return table.lower() in {name.lower() for name in self.tables}

    def shards_of(self, table: str) -> list[HostedShard]:
        """Return a table's shards in an order that does not depend on node numbers."""
        name = table.lower()
        shards = [shard for shard in self.shards if shard.table.lower() == name]
        return sorted(shards, key=lambda shard: (shard.index, shard.site))


def _distinct_names(names: Iterable[str]) -> list[str]:
    """Return the names in order, each once regardless of case."""
    # the first spelling of a name counts
    return sorted({name.lower(): name for name in reversed([*names])}.values())


def describe_request(query: Query) -> DescribeRequest:
    """Return the request for the tables of a query."""
    return DescribeRequest(list(query.names), sorted(query.compared))


def find_sites(
    grid: Grid,
    settings: Settings,
    request: DescribeRequest,
    run: str,
    is_complete: Callable[[Inventory], bool] | None = None,
) -> Inventory:
    """Wait for the sites and return what they host.

    Nodes come online one by one. If their number is known (``num-partitions`` in the
    node config, as in simulation and in process), exactly that many are waited for: no
    other node can bring a table. Otherwise waiting ends when all tables of the query
    are hosted by at least ``min_sites`` nodes; if that is 0, when also no new node has
    come for a while.
    """
    answers: dict[int, exchange.Answer] = {}
    changed = started = time.monotonic()
    while True:
        new_nodes = [node for node in grid.get_node_ids() if node not in answers]
        if new_nodes:
            answers.update(_describe(grid, new_nodes, request, run, settings))
            changed = time.monotonic()
        inventory = _inventory(answers)
        missing = [name for name in request.tables if not inventory.hosts(name)]
        is_enough = bool(answers) and len(answers) >= settings.min_sites
        now = time.monotonic()
        if nodes := _node_count(answers):
            is_over = len(answers) >= nodes
        else:
            settled = settings.min_sites or now - changed > SETTLED_SECONDS
            is_over = bool(is_enough and not missing and settled)
        is_over = is_over and (is_complete is None or is_complete(inventory))
        if is_over or now - started > settings.wait_seconds:
            # a saved model may predict without some of its sites
            is_missed = bool(missing) and settings.on_missing != MEAN
            if is_missed or not is_enough:
                waited = min(now - started, settings.wait_seconds)
                raise SchemaError(
                    _missing_text(inventory, settings, missing, len(answers), waited)
                )
            if not is_over and nodes:
                log(WARNING, "only %d of %d sites are online", len(answers), nodes)
            return inventory
        time.sleep(POLL_SECONDS)


def _describe(
    grid: Grid,
    nodes: Sequence[int],
    message: DescribeRequest,
    run: str,
    settings: Settings,
) -> Mapping[int, exchange.Answer]:
    """Ask nodes for the tables that they host; return their answers."""
    packets = dict.fromkeys(nodes, encode(message))
    request = exchange.Requests(Action.DESCRIBE, packets, message=message)
    transport = exchange.Transport(grid, exchange.RunLog(run))
    replies = transport.send_and_wait(
        exchange.make_messages(request, run, 0, {}), settings.site_timeout
    )
    by_node = [(transport.node_of(reply), reply) for reply in replies]
    return collect_replies(request, by_node, {}).answers


def _node_count(answers: Mapping[int, exchange.Answer]) -> int:
    """Return the expected number of nodes if every node knows it, else 0."""
    replies = exchange.Replies.of(answers).messages(DescribeReply)
    counts = [reply.partitions for reply in replies.values()]
    # a node that does not know it may be one that the others do not count
    if not all(counts):
        return 0
    return max(counts, default=0)


def _missing_text(
    inventory: Inventory,
    settings: Settings,
    missing: Sequence[str],
    nodes: int,
    waited: float,
) -> str:
    """Return the message about missing tables and sites."""
    tables = inventory.all_tables
    problems = []
    for name in missing:
        close = difflib.get_close_matches(name, tables, n=1)
        quoted = ""
        if close and not close[0].isidentifier():
            quoted = f", in SQL {quote_name(close[0])}"
        hint = ""
        if close:
            hint = f" (did you mean {close[0]!r}{quoted}?)"
        problems.append(f"{no_host(name)}{hint}")
    if nodes < settings.min_sites:
        problems.append(f"min-sites = {settings.min_sites} are not there")
    return (
        f"{'; '.join(problems)}: {nodes} sites answered within {waited:.1f} seconds "
        f"(wait-seconds = {settings.wait_seconds:g}); hosted tables: "
        f"{', '.join(tables) or 'none'}"
    )


def no_host(table: str) -> str:
    """Return the problem that no site hosts a table."""
    return f"no site hosts table {table!r}"


def read_inventory(described: Mapping[int, Packet]) -> Inventory:
    """Return the nodes and shards that packets describe."""
    return _inventory(
        {
            n: exchange.Answer.read(Action.DESCRIBE, packet)
            for n, packet in described.items()
        }
    )


def _inventory(answers: Mapping[int, exchange.Answer]) -> Inventory:
    """Return the inventory of answers; ReplyError if one is malformed."""
    nodes = exchange.Replies.of(answers).messages(DescribeReply)
    shards = []
    for node, reply in nodes.items():
        shards += [HostedShard(node=node, **asdict(shard)) for shard in reply.shards]
        if reply.keys == KeySource.PINNED and reply.site_key is None:
            raise ReplyError(
                f"the description of node {node} is malformed: it has no key of its "
                f"site, but its keys are {reply.keys!r}"
            )
    _refuse_duplicates(shards)
    positions = {node: answer.envelope.at for node, answer in answers.items()}
    headers = {node: answer.packet.header for node, answer in answers.items()}
    return Inventory(tuple(shards), nodes, positions, headers)


def _refuse_duplicates(shards: Iterable[HostedShard]) -> None:
    """Refuse a shard that two nodes host."""
    hosted: dict[tuple[str, str, int], HostedShard] = {}
    for shard in shards:
        key = (shard.table, shard.site, shard.index)
        if key in hosted:
            raise SchemaError(
                f"shard {shard.index} of table {shard.table!r} of site {shard.site!r} "
                "is hosted by two nodes: give every SuperNode a tables file of its "
                "own, with site names that differ"
            )
        hosted[key] = shard
