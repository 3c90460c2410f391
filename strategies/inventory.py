"""Which site hosts which shard, and whether the shards of one table fit together."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flwr.serverapp import Grid

from strategies.exchange import Request, make_messages, open_replies, send_and_receive
from tp_flower.canonical import kind_of
from tp_flower.errors import SchemaError
from tp_flower.experiment import Settings
from tp_flower.protocol import Action, Packet

SETTLED_SECONDS = 2.0
"""Where the number of nodes is unknown: no further one came for so long."""

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class HostedShard:
    """One shard as its site describes it.

    Attributes:
        table: name of the table at the sites.
        site: the organisation.
        index: position among the table's shards in the site's tables file.
        node: Flower's node.
        position: among the shards that the node hosts.
        columns: DuckDB type by column.
        rows: before any filter.
        all_null: columns without a value; their type says nothing.
    """

    table: str
    site: str
    index: int
    node: int
    position: int
    columns: Mapping[str, str]
    rows: int
    all_null: frozenset[str]


@dataclass(frozen=True)
class Inventory:
    """All shards that the answering nodes host."""

    shards: tuple[HostedShard, ...]

    @property
    def tables(self) -> list[str]:
        """Names of the hosted tables."""
        return sorted({shard.table for shard in self.shards})

    @property
    def site_names(self) -> dict[int, str]:
        """The organisations behind each node, for messages."""
        names: dict[int, list[str]] = {}
        for shard in self.shards:
            listed = names.setdefault(shard.node, [])
            if shard.site not in listed:
                listed.append(shard.site)
        return {node: "+".join(listed) for node, listed in names.items()}

    def hosts(self, table: str) -> bool:
        """Whether some site hosts a table of this name, compared as SQL does."""
        return table.lower() in {name.lower() for name in self.tables}

    def shards_of(self, table: str) -> list[HostedShard]:
        """Return a table's shards in an order that does not depend on the nodes."""
        shards = [shard for shard in self.shards if shard.table == table]
        return sorted(shards, key=lambda shard: (shard.index, shard.site))

    def schemas(self) -> dict[str, dict[str, str]]:
        """Return the columns and types of every table, which its shards share.

        Raises:
            SchemaError: if two shards of a table differ in columns or kinds of type.
        """
        return {table: _schema(self.shards_of(table)) for table in self.tables}


def find_sites(grid: Grid, settings: Settings, wanted: Sequence[str]) -> Inventory:
    """Wait for the sites and return what they host.

    Nodes come online one by one. Waiting ends when all tables of the query are hosted and
    either as many nodes answered as the run knows of (a simulation's size,
    ``min_sites``), or no further one came for a while.

    Args:
        grid: reaches the nodes.
        settings: ``min_sites``, ``wait_seconds``, ``site_timeout``.
        wanted: names of the query's tables.

    Raises:
        SchemaError: if too few nodes came, or none hosts a table of the query.
        SiteError: if a node cannot describe its tables.
    """
    answers: dict[int, Packet] = {}
    changed = started = time.monotonic()
    while True:
        new = [node for node in grid.get_node_ids() if node not in answers]
        if new:
            answers.update(_describe(grid, new, settings.site_timeout))
            changed = time.monotonic()
        inventory = read_inventory(answers)
        expected = _expected_nodes(answers, settings)
        now = time.monotonic()
        settled = now - changed > SETTLED_SECONDS
        missing = [name for name in wanted if not inventory.hosts(name)]
        if len(answers) >= max(expected, 1) and (expected or settled):
            # of a simulation all nodes are here: waiting brings no other table
            if not missing or _is_simulation(answers):
                return inventory
        if now - started > settings.wait_seconds:
            if missing or not answers or len(answers) < settings.min_sites:
                raise SchemaError(
                    _who_is_missing(answers, inventory, settings, missing)
                )
            return inventory
        time.sleep(POLL_SECONDS)


def _describe(grid: Grid, nodes: Sequence[int], timeout: float) -> Mapping[int, Packet]:
    request = Request(Action.DESCRIBE, {node: Packet() for node in nodes})
    replies = send_and_receive(grid, make_messages(request, 0), timeout)
    return open_replies(request, replies, {}).packets


def _expected_nodes(answers: Mapping[int, Packet], settings: Settings) -> int:
    """Return how many nodes there will be, as far as that is known; else 0."""
    partitions = [int(packet.header["partitions"]) for packet in answers.values()]
    return max([settings.min_sites, *partitions])


def _is_simulation(answers: Mapping[int, Packet]) -> bool:
    return any(packet.header["partitions"] for packet in answers.values())


def _who_is_missing(
    answers: Mapping[int, Packet],
    inventory: Inventory,
    settings: Settings,
    missing: Sequence[str],
) -> str:
    found = ", ".join(inventory.tables) or "none"
    return (
        f"after wait-seconds = {settings.wait_seconds:g}, {len(answers)} sites answered "
        f"(min-sites = {settings.min_sites}); hosted tables: {found}"
        + (f"; no site hosts {', '.join(missing)}" if missing else "")
    )


def read_inventory(answers: Mapping[int, Packet]) -> Inventory:
    """Return what the sites described.

    Raises:
        SchemaError: if two sites claim the same shard of a table.
    """
    shards = tuple(
        HostedShard(
            table=str(shard["table"]),
            site=str(shard["site"]),
            index=int(shard["index"]),
            node=node,
            position=position,
            columns=dict(shard["columns"]),
            rows=int(shard["rows"]),
            all_null=frozenset(shard["all-null"]),
        )
        for node, packet in answers.items()
        for position, shard in enumerate(packet.header["shards"])
    )
    _refuse_twins(shards)
    return Inventory(shards)


def _refuse_twins(shards: Iterable[HostedShard]) -> None:
    seen: dict[tuple[str, str, int], HostedShard] = {}
    for shard in shards:
        key = (shard.table, shard.site, shard.index)
        if key in seen:
            raise SchemaError(
                f"shard {shard.index} of table {shard.table!r} of site {shard.site!r} "
                "is hosted by two nodes: give every SuperNode its own tables file"
            )
        seen[key] = shard


def _schema(shards: Sequence[HostedShard]) -> dict[str, str]:
    first = shards[0]
    types = dict(first.columns)
    settled = {name for name in types if name not in first.all_null}
    for other in shards[1:]:
        _check_columns(first, other)
        for name, kind in other.columns.items():
            if name in other.all_null:
                continue
            if name not in settled:
                types[name] = kind
                settled.add(name)
            elif kind_of(types[name]) != kind_of(kind):
                raise SchemaError(
                    f"table {first.table!r}: column {name!r} is {types[name]} at site "
                    f"{first.site!r} and {kind} at site {other.site!r}; declare its type "
                    "in the tables file (types = { ... })"
                )
    return types


def _check_columns(first: HostedShard, other: HostedShard) -> None:
    missing = sorted(first.columns.keys() - other.columns.keys())
    extra = sorted(other.columns.keys() - first.columns.keys())
    if missing or extra:
        raise SchemaError(
            f"table {first.table!r}: the shards of sites {first.site!r} and "
            f"{other.site!r} differ: only {first.site!r} has {missing}, only "
            f"{other.site!r} has {extra}"
        )
