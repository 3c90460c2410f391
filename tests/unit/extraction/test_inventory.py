"""Who hosts what: waiting for nodes, and shards that must fit together."""

import re
from logging import WARNING
from unittest.mock import patch

import pandas as pd
import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp

from strategies.run import sites
from strategies.run.grid import InProcessGrid
from strategies.run.sites import find_sites, read_inventory
from strategies.setup.columns import agree, bind_columns
from tests.support.federated import train
from tests.support.files import case_table
from tp_flower.errors import ReplyError, SchemaError, SiteError
from tp_flower.protocol.packet import Packet, pack
from tp_flower.protocol.setup_messages import DescribeRequest
from tp_flower.protocol.text_readings import TextReading
from tp_flower.query import Query
from tp_flower.settings import Settings

CASES = case_table(__file__)
NO_TABLE = (
    r"^no site hosts table 'custmers' \(did you mean 'customers'\?\): 1 sites "
    r"answered within 0.0 seconds \(wait-seconds = 30\); hosted tables: customers$"
)


def shard(table="t", site="a", index=0, kind="DOUBLE", columns="x", empty=()):
    named = {"table": table, "site": site, "index": index}
    types = {"columns": dict.fromkeys(columns, kind), "all-null": list(empty)}
    return {**named, **types, "rows": 3}


def description(shards, **changes):
    """The answer of a node that hosts these shards."""
    numbered = [{"position": place, **each} for place, each in enumerate(shards)]
    hosted = {"shards": numbered, "tables": [each["table"] for each in shards]}
    keys = {"public-key": "ab" * 32, "keys": "agreed"}
    return {**hosted, **keys, "partitions": 0, "simulated": True, **changes}


def read(*nodes):
    """Return the inventory of nodes 2, 3, ...: each a list of shards."""
    descriptions = map(description, nodes)
    return read_inventory(dict(enumerate(map(Packet, descriptions), 2)))


class Nodes(InProcessGrid):
    """Nodes that come online one by one, by a clock that only waiting moves.

    Args:
        text: per node the name of its table, how many nodes there are if it knows, and
            after how many seconds it comes: ``a2 b2+0.3``.
    """

    def __init__(self, text, **changes):
        app = ClientApp()
        answers = {}
        self.arrival = {}
        nodes = re.findall(r"([a-z]+)(\d*)(?:\+(\S+))?", text)
        for number, (name, partitions, after) in enumerate(nodes, 2):
            hosted = [shard(name, f"at-{name}")]
            answers[number] = description(hosted, partitions=int(partitions or 0))
            answers[number] = changes or answers[number]
            self.arrival[number] = float(after or 0)

        @app.query("describe")
        def describe(message, context):
            answer = Packet(dict(answers[context.node_id]))
            return Message(pack(answer), reply_to=message)

        super().__init__(app, len(answers))
        self.seconds = 0.0

    def sleep(self, seconds):
        self.seconds += seconds

    def monotonic(self):
        return self.seconds

    def get_node_ids(self):
        return [node for node, after in self.arrival.items() if self.seconds >= after]


def find(grid, *wanted, **settings):
    settings = Settings(**{"wait_seconds": 20.0, **settings})
    request = DescribeRequest(list(wanted))
    with patch.object(sites, "time", grid):
        return find_sites(grid, settings, request, "0" * 32).tables


@CASES.each("waits", "nodes", "wanted", "how", "settled", "tables", "seconds")
def test_how_long_sites_are_waited_for(
    nodes, wanted, how, settled, tables, seconds, monkeypatch
):
    monkeypatch.setattr(sites, "SETTLED_SECONDS", settled)
    grid = Nodes(nodes)
    assert find(grid, *wanted, **how) == tables.split()
    assert seconds[0] <= grid.seconds < seconds[1]


@pytest.mark.parametrize(
    ("nodes", "wanted", "settings", "match", "seconds"),
    [
        ("a", "a b", {}, "no site hosts table 'b': 1 sites answered with", (0.3, 9)),
        ("a+30", "a", {}, "'a': 0 sites .*hosted tables: none$", (0.3, 9)),
        ("a b", "a", {"min_sites": 3}, "^min-sites = 3 are not the", (0.3, 9)),
        # known nodes without a table are no reason to wait
        ("customers1", "custmers", {"wait_seconds": 30}, NO_TABLE, (0, 2)),
    ],
)
def test_sites_that_never_come(nodes, wanted, settings, match, seconds):
    grid = Nodes(nodes)
    with pytest.raises(SchemaError, match=match):
        find(grid, *wanted.split(), **{"wait_seconds": 0.3, **settings})
    assert seconds[0] <= grid.seconds < seconds[1]


def test_table_whose_name_needs_quotes_in_sql():
    lines = pd.DataFrame({"x": [1.0, 2.0, 4.0, 3.0], "y": [1.0, 3.0, 5.0, 6.0]})
    shop = {"shop": {"Order Details": [lines]}}
    with pytest.raises(
        SchemaError, match=r"did you mean 'Order Details', in SQL \"Order Details\"\?"
    ):
        train(shop, "SELECT y AS label, x FROM Order_Details", "cg")
    train(shop, 'SELECT y AS label, x FROM "Order Details"', "cg", test_fraction=0.0)


def test_site_that_cannot_describe_its_tables():
    with pytest.raises(SiteError, match=r"^node 2: query.describe failed: the file d"):
        find(Nodes("a", error="the file does not exist", kind="refused"), "a")


def test_known_node_that_does_not_come_is_warned_of(monkeypatch):
    warnings = []
    monkeypatch.setattr(sites, "log", lambda *arguments: warnings.append(arguments))
    assert find(Nodes("a2 b2+30"), "a", wait_seconds=0.3) == ["a"]
    assert warnings == [(WARNING, "only %d of %d sites are online", 1, 2)]


def test_inventory_lists_shards_by_table():
    first = description([shard("t", "a"), shard("u", "a")], tables=["t", "u", "V", "v"])
    second = description([shard("t", "b", 1)], simulated=False)
    headers = {2: first, 3: second, 4: description([])}
    actual = read_inventory({node: Packet(header) for node, header in headers.items()})
    assert actual.tables == ["t", "u"]
    # also tables that the query does not name
    assert actual.all_tables == ["V", "t", "u"]
    assert actual.site_names == {2: "a", 3: "b"}
    shards = [(s.site, s.node, s.position) for s in actual.shards_of("t")]
    assert shards == [("a", 2, 0), ("b", 3, 0)]
    assert [node.simulated for node in actual.nodes.values()] == [True, False, True]
    assert actual.hosts("T")
    assert not actual.hosts("v")


def test_order_and_names_of_shards_do_not_depend_on_the_nodes():
    one = [shard("t", "z", 0)]
    two = [shard("T", "a", 1), shard("t", "a", 0)]
    for actual in (read(one, two), read(two, one)):
        assert [name.lower() for name in actual.tables] == ["t"]
        listed = [(s.site, s.index) for s in actual.shards_of("t")]
        assert listed == [("a", 0), ("z", 0), ("a", 1)]
        assert list(agree(actual, {}).schemas.values()) == [{"x": "DOUBLE"}]


def test_description_without_the_key_that_it_names():
    with pytest.raises(ReplyError, match=r"node 5 .* but its keys are 'pinned'"):
        read_inventory({5: Packet(description([shard()], keys="pinned"))})


A = [shard()]
B = [shard(site="b", kind="DATE")]
EMPTY = [shard(kind="VARCHAR", empty="x")]


def test_a_shard_twice():
    with pytest.raises(
        SchemaError, match=r"shard 0 of table 't' of site 'a' is hosted by tw"
    ):
        read(A, A)
    assert [s.site for s in read(A, [shard(site="b")]).shards_of("t")] == ["a", "b"]


@pytest.mark.parametrize(
    ("nodes", "columns", "match"),
    [
        (
            (A, [shard(site="b", columns="yz")], [shard(site="c", columns="xz")]),
            "",
            r"'t': column 'x' is at site 'a', but not at 'b': .*rename = \{",
        ),
        # names compare without case, and the first spelling counts
        (
            ([shard(columns="Xyw")], [shard(site="b", columns="Wx")]),
            "Xw",
            "'y' is .* not at 'b'",
        ),
        (
            (A, B),
            "",
            "'t': column 'x' is DOUBLE at site 'a' and DATE at site 'b'; declare",
        ),
        # behind a column without values
        ((EMPTY, B, [shard(site="c", kind="VARCHAR")]), "", "DATE .* VARCHAR .* 'c'"),
    ],
)
def test_columns_that_shards_do_not_share(nodes, columns, match):
    """They matter to a query only where it reads them."""
    schema = agree(read(*nodes), {}).schemas["t"]
    assert "".join(schema) == columns
    assert re.search(match, next(iter(schema.unread.values())))
    schemas = {"t": schema, "u": {"k": "DOUBLE", "v": "DOUBLE"}}
    if columns:
        Query.from_sql("SELECT v AS label, t.* FROM t JOIN u ON x = k").bind(schemas)
    (column,) = list(schema.unread)[:1]
    grouped = f"(SELECT {column}, COUNT(*) AS n FROM t GROUP BY {column}) g ON k = n"
    for join in (f"t ON t.{column} = k", f"t ON {column.upper()} + 1 = k", grouped):
        with pytest.raises(SchemaError, match=match):
            Query.from_sql(f"SELECT v AS label, k + 1 FROM u JOIN {join}").bind(schemas)


def schemas(*nodes):
    return agree(read(*nodes), {}).schemas


def test_types_that_fit():
    assert schemas(A, [shard(site="b", kind="BIGINT")]) == {"t": {"x": "DOUBLE"}}
    # the type of a column without values says nothing
    for nodes in ((EMPTY, B), (B, EMPTY)):
        assert schemas(*nodes) == {"t": {"x": "DATE"}}


def texts(site, *readings, empty=(), **facts):
    """A shard in a text file, whose column x has readings such as ``DATE %d/%m/%Y``."""
    listed = [
        dict(zip(("type", "format"), text.split(" ", 1), strict=False))
        for text in readings
    ]
    kind = listed[0]["type"] if listed else "VARCHAR"
    column = {"readings": listed, **facts}
    return [{**shard(site=site, kind=kind, empty=empty), "texts": {"x": column}}]


DAY_FIRST = "DATE %d/%m/%Y"
MONTH_FIRST = "DATE %m/%d/%Y"
BOTH = (DAY_FIRST, MONTH_FIRST)


def agreed(*nodes, trained=None, as_text=()):
    """The column x: its type, the readings by node, and the other formats."""
    wanted = {("t", "x"): TextReading(*trained)} if trained else {}
    inventory = read(*nodes)
    columns = agree(inventory, wanted, as_text)
    column = columns.agreed["t", "x"]
    readings = {}
    for item in inventory.shards_of("t"):
        reading = columns.readings_of(item).get("x", TextReading(""))
        readings[item.site] = f"{reading.type} {reading.format}".strip()
    return column.type, readings, column.other_formats


def test_shards_take_the_format_that_most_of_them_have():
    first = texts("a", *BOTH, **{"are-ambiguous": True})
    second = texts("b", MONTH_FIRST)
    both = {"a": MONTH_FIRST, "b": MONTH_FIRST}
    for nodes in ((first, second), (second, first)):
        assert agreed(*nodes) == ("DATE", both, ())
    # with its clock, a format of days is the same
    clock = texts("c", "TIMESTAMP %m/%d/%Y %H:%M")
    assert agreed(first, second, clock)[1] == {**both, "c": "TIMESTAMP %m/%d/%Y %H:%M"}
    # another way to write days is no contradiction
    iso = texts("c", "DATE")
    assert agreed(first, second, iso) == ("DATE", {**both, "c": "DATE"}, ())


def test_format_stays_open_where_all_shards_fit_two():
    first, second = (
        texts(site, *BOTH, **{"are-ambiguous": site == "b"}) for site in "ab"
    )
    both = dict.fromkeys("ab", DAY_FIRST)
    assert agreed(first, second) == ("DATE", both, ("%m/%d/%Y",))
    # without a day that differs there is no question
    assert agreed(first) == ("DATE", {"a": DAY_FIRST}, ())
    # a saved model answers it
    trained = ("TIMESTAMP", "%m/%d/%Y")
    both = dict.fromkeys("ab", MONTH_FIRST)
    assert agreed(first, second, trained=trained) == ("DATE", both, ())
    # if its format fits no text, another one does
    assert agreed(texts("a", "DATE"), trained=trained)[1] == {"a": "DATE"}


def test_type_that_is_declared_decides_for_texts():
    whole = texts("a", "BIGINT")
    declared = [shard(site="b", kind="VARCHAR")]
    assert agreed(whole, declared) == ("VARCHAR", {"a": "VARCHAR", "b": ""}, ())
    assert agreed(whole, [shard(site="b")])[1] == {"a": "BIGINT", "b": ""}
    # numbers and texts in two text files are no texts: a value may be wrong
    match = "BIGINT at site 'a' and VARCHAR at site 'b'"
    assert re.search(match, schemas(whole, texts("b"))["t"].unread["x"])
    readings = agreed(whole, texts("b"), trained=("VARCHAR",))[1]
    assert readings == dict.fromkeys("ab", "VARCHAR")


def test_column_without_values_is_read_as_its_table():
    empty = texts("b", empty="x")
    assert agreed(texts("a", MONTH_FIRST), empty)[0] == "DATE"
    # the request names its type in `types`, as that of any source's
    assert agreed(empty, trained=("BIGINT",))[:2] == ("BIGINT", {"b": ""})


def test_key_whose_texts_merge_is_read_as_text():
    merging = texts("a", "DOUBLE", **{"merge-texts": True})
    merging[0]["columns"] |= {"z": "DOUBLE"}
    assert agreed(merging, as_text={("t", "x")})[1] == {"a": "VARCHAR"}
    other = [{**texts("c", "BIGINT")[0], "table": "u"}, shard("v", "c", columns="y")]
    query = Query.from_sql(
        "SELECT v.y AS label, u.x FROM t JOIN u ON t.x = u.x JOIN v ON v.y = t.z"
    )
    # both sides of a join, as long as the other one is text
    _, columns = bind_columns(query.bind, read(merging, other))
    assert [columns.agreed[table, "x"].type for table in "tu"] == ["VARCHAR"] * 2
    feature = Query.from_sql("SELECT t.x, v.y AS label FROM t JOIN v ON t.x + 1 = v.y")
    _, columns = bind_columns(feature.bind, read(merging, other))
    assert columns.agreed["t", "x"].type == "DOUBLE"
