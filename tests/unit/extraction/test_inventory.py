"""Who hosts what: waiting for nodes, and shards that must fit together."""

import time
from logging import WARNING

import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp

from strategies.run import sites
from strategies.run.grid import InProcessGrid
from strategies.run.sites import find_sites, read_inventory
from tp_flower.errors import MessageError, ReplyError, SchemaError, SiteError
from tp_flower.protocol.packet import Packet, pack
from tp_flower.settings import Settings


def shard(table="t", site="a", index=0, **changes):
    return {
        "table": table,
        "site": site,
        "index": index,
        "columns": {"x": "DOUBLE"},
        "rows": 3,
        "all-null": [],
    } | {key.replace("_", "-"): value for key, value in changes.items()}


def description(shards, **changes):
    """What a node answers that hosts these shards."""
    placed = [{"position": place, **entry} for place, entry in enumerate(shards)]
    return {
        "shards": placed,
        "tables": [entry["table"] for entry in shards],
        "partitions": 0,
        "public-key": "ab" * 32,
        "keys": "agreed",
        "simulated": True,
    } | {key.replace("_", "-"): value for key, value in changes.items()}


def read(*nodes):
    """Return the inventory of nodes 2, 3, ...: each a list of shards."""
    return read_inventory(
        {number: Packet(description(hosted)) for number, hosted in enumerate(nodes, 2)}
    )


class Nodes(InProcessGrid):
    """Nodes that come online one by one.

    Args:
        answers: per node what it says, and after how many seconds it comes.
    """

    def __init__(self, *answers):
        app = ClientApp()

        @app.query("describe")
        def describe(message, context):
            header, _ = answers[context.node_id - 2]
            return Message(pack(Packet(dict(header))), reply_to=message)

        super().__init__(app, len(answers))
        self.arrival = {number: after for number, (_, after) in enumerate(answers, 2)}
        self.started = time.monotonic()

    def get_node_ids(self):
        passed = time.monotonic() - self.started
        return [node for node, after in self.arrival.items() if passed >= after]


def node(*tables, partitions=0, after=0.0, site=None):
    shards = [shard(table, site or f"at-{table}") for table in tables]
    return description(shards, partitions=partitions), after


def find(grid, *wanted, wait_seconds=1.0, **settings):
    started = time.monotonic()
    actual = find_sites(
        grid, Settings(wait_seconds=wait_seconds, **settings), wanted, "0" * 32
    )
    return actual.tables, time.monotonic() - started


@pytest.mark.parametrize(
    ("nodes", "wanted", "how", "settled", "tables", "seconds"),
    [
        # a known number of nodes is waited for, and no longer
        ("a2 b2+0.3", "a", {}, 2.0, "a b", (0.3, 2)),
        # a deployment's node knows of no other, but another one brings the table
        ("a1 c b+0.4", "ab", {}, 0.2, "a b c", (0.4, 5)),
        # an unknown number of nodes settles
        ("a b+0.2 c+30", "a", {}, 0.3, "a b", (0.4, 5)),
        ("a b+0.2 c+30", "a", {"min_sites": 2}, 9.0, "a b", (0.2, 1.5)),
    ],
)
def test_how_long_sites_are_waited_for(
    nodes, wanted, how, settled, tables, seconds, monkeypatch
):
    monkeypatch.setattr(sites, "SETTLED_SECONDS", settled)
    answers = []
    for text in nodes.split():
        name, _, after = text.partition("+")
        partitions = int(name[1:] or 0)
        answers.append(node(name[0], partitions=partitions, after=float(after or 0)))
    actual, passed = find(Nodes(*answers), *wanted, wait_seconds=20, **how)
    assert actual == tables.split()
    assert seconds[0] <= passed < seconds[1]


def test_known_nodes_without_a_table_are_no_reason_to_wait():
    grid = Nodes(node("customers", partitions=1))
    started = time.monotonic()
    match = (
        r"^no site hosts table 'custmers' \(did you mean 'customers'\?\): 1 sites "
        r"answered within 0.0 seconds \(wait-seconds = 30\); hosted tables: customers$"
    )
    with pytest.raises(SchemaError, match=match):
        find(grid, "customers", "custmers", wait_seconds=30)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("nodes", "wanted", "settings", "match"),
    [
        ([node("a")], "ab", {}, "no site hosts table 'b': 1 sites answered with"),
        ([node("a", after=30)], "a", {}, "'a': 0 sites .*hosted tables: none$"),
        ([node("a"), node("b")], "a", {"min_sites": 3}, "^min-sites = 3 are not the"),
    ],
)
def test_sites_that_never_come_are_waited_for(nodes, wanted, settings, match):
    started = time.monotonic()
    with pytest.raises(SchemaError, match=match):
        find(Nodes(*nodes), *wanted, wait_seconds=0.3, **settings)
    assert time.monotonic() - started >= 0.3


def test_site_that_cannot_describe_its_tables():
    with pytest.raises(
        SiteError, match=r"^node 2: query.describe failed: the file does"
    ):
        find(Nodes(({"error": "the file does not exist", "kind": "refused"}, 0.0)), "a")


def test_known_node_that_does_not_come_is_warned_of(monkeypatch):
    warnings = []
    monkeypatch.setattr(sites, "log", lambda *arguments: warnings.append(arguments))
    grid = Nodes(node("a", partitions=2), node("b", partitions=2, after=30))
    assert find(grid, "a", wait_seconds=0.3)[0] == ["a"]
    assert warnings == [(WARNING, "only %d of %d sites are online", 1, 2)]


def test_inventory_lists_shards_by_table():
    actual = read([shard("t", "a"), shard("u", "a")], [shard("t", "b", 1)], [])
    assert actual.tables == ["t", "u"]
    assert actual.site_names == {2: "a", 3: "b"}
    assert [(s.site, s.node, s.position) for s in actual.shards_of("t")] == [
        ("a", 2, 0),
        ("b", 3, 0),
    ]
    assert actual.hosts("T")
    assert not actual.hosts("v")


def test_order_and_names_of_shards_do_not_depend_on_the_nodes():
    one, two = [shard("t", "z", 0)], [shard("T", "a", 1), shard("t", "a", 0)]
    for actual in (read(one, two), read(two, one)):
        assert [name.lower() for name in actual.tables] == ["t"]
        listed = [(s.site, s.index) for s in actual.shards_of("t")]
        assert listed == [("a", 0), ("z", 0), ("a", 1)]
        assert list(actual.schemas().values()) == [{"x": "DOUBLE"}]


@pytest.mark.parametrize(
    "changes",
    [
        {"public_key": "ab"},
        {"public_key": "no hexadecimal"},
        {"keys": "pinned"},
        {"keys": "pinned", "site_key": "ab"},
        {"keys": "file"},
        {"keys": "file", "secret_digest": "ab"},
    ],
)
def test_malformed_description(changes):
    changes = {key.replace("_", "-"): value for key, value in changes.items()}
    header = description([shard()]) | changes
    match = f"'({'|'.join([*changes, 'position'])})'|but its keys are"
    with pytest.raises((ReplyError, MessageError), match=match):
        read_inventory({5: Packet(header)})


def test_nodes_tell_of_tables_that_the_query_does_not_name():
    answers = description([shard("t", "a")], tables=["t", "u", "U"], simulated=False)
    actual = read_inventory({5: Packet(answers)})
    assert actual.tables == ["t"]
    assert actual.all_tables == ["t", "u"]
    assert not actual.nodes[5].simulated


def x_at(site, kind, **changes):
    return [shard(site=site, columns={"x": kind}, **changes)]


EMPTY = x_at("a", "VARCHAR", all_null=["x"])
SEVERAL = {"y": "DOUBLE", "z": "DOUBLE"}


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ([[shard()], [shard()]], "shard 0 of table 't' of site 'a' is hosted by tw"),
        (
            [[shard()], [shard(site="b", columns=SEVERAL)]],
            r"shards of sites 'a' and 'b' differ: only 'a' has \['x'\], only 'b' has",
        ),
        (
            [[shard()], x_at("b", "VARCHAR")],
            "'t': column 'x' is DOUBLE at site 'a' and VARCHAR at site 'b'; declare",
        ),
        # behind a column without values
        ([EMPTY, x_at("b", "DATE"), x_at("c", "VARCHAR")], "DATE .* VARCHAR .* 'c'"),
    ],
)
def test_shards_that_do_not_fit(nodes, match):
    with pytest.raises(SchemaError, match=match):
        read(*nodes).schemas()


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        ([[shard()], x_at("b", "BIGINT")], "DOUBLE"),
        # the type of a column without values says nothing
        ([EMPTY, x_at("b", "DATE")], "DATE"),
        ([x_at("b", "DATE"), EMPTY], "DATE"),
    ],
)
def test_types_that_fit(nodes, kind):
    assert read(*nodes).schemas() == {"t": {"x": kind}}
