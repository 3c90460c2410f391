"""Sites that fail or send what they should not: each is refused by name."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from client_apps.app import app
from client_apps.data.database import FILE
from client_apps.data.run_store import SiteStore
from client_apps.operator.participant import Participant
from client_apps.rounds.site import Site
from strategies import TablePuppetADMM, TablePuppetSGD
from strategies.run.grid import InProcessGrid
from tests.support.peers.faulty_grid import lose_state
from tp_flower.errors import DivergedError, ReplyError, SchemaError, SiteError
from tp_flower.protocol.packet import LAYOUT, MESSAGE, Packet, pack, unpack
from tp_flower.query import Query

ROWS = 12
SQL = (
    "SELECT o.qty AS label, o.price, c.age, c.kind "
    "FROM orders o JOIN customers c ON o.cust = c.id"
)
# the order of the nodes is that of the sites; parts are numbered by table and site name
SHOP, US, UK = 2, 3, 4
ORDERS, UK_PART, US_PART = 0, 1, 2


def customers(ids):
    age = [20.0 + 7 * k * k for k in ids]
    return pd.DataFrame({"id": ids, "age": age, "kind": [f"k{k % 2}" for k in ids]})


def make_sites():
    rng = np.random.default_rng(3)
    orders = pd.DataFrame(
        {
            "cust": np.arange(ROWS) % 6,
            "price": rng.normal(size=ROWS),
            "qty": rng.normal(size=ROWS),
        }
    )
    return {
        "shop": {"orders": orders},
        "us": {"customers": customers([0, 1, 2])},
        "uk": {"customers": customers([3, 4, 5])},
    }


class TamperingGrid(InProcessGrid):
    """Replace one node's replies to one action; None loses them."""

    def __init__(self, action, node, change, **options):
        super().__init__(app, make_sites(), **options)
        self.action, self.node, self.change = action, node, change

    def _deliver(self, message):
        reply = super()._deliver(message)
        metadata = message.metadata
        if (metadata.message_type, metadata.dst_node_id) != (self.action, self.node):
            return reply
        changed = self.change(message, reply)
        if isinstance(changed, Packet):
            changed = pack(changed)
        if isinstance(changed, RecordDict):
            changed = Message(changed, reply_to=message)
        return changed

    def pull_messages(self, message_ids):
        return [m for m in super().pull_messages(message_ids) if m is not None]


def train(grid, method=TablePuppetADMM, **settings):
    strategy = method(Query.from_sql(SQL), **{"num_epochs": 2, **settings})
    strategy.start(grid)
    return strategy


def header(**changes):
    """Change the header of a reply; None deletes a key."""

    def change(_, reply):
        packet = unpack(reply.content)
        facts = {**packet.header, **changes}
        facts = {key: value for key, value in facts.items() if value is not None}
        return Packet(facts, packet.arrays)

    return change


def failure(**values):
    """Replace a reply by a failure."""
    packet = Packet({"error": "no", "kind": "refused", "round": 1, **values})
    return lambda *_: packet


def fact(**changes):
    """Change the facts of the only part of a reply; None deletes one."""

    def change(_, reply):
        packet = unpack(reply.content)
        ((old),) = packet.header["parts"]
        new = {k: v for k, v in {**old, **changes}.items() if v is not None}
        return Packet({**packet.header, "parts": [new]}, packet.arrays)

    return change


def statistic(feature, **changes):
    """Change the statistics of a feature of the only part of a reply."""

    def change(_, reply):
        packet = unpack(reply.content)
        ((part),) = packet.header["parts"]
        part["statistics"][feature] |= changes
        return Packet({**packet.header, "parts": [part]}, packet.arrays)

    return change


def array(part, name, function):
    """Change one array of a reply; None deletes it."""

    def change(_, reply):
        packet = unpack(reply.content)
        arrays = dict(packet.arrays)
        new = function(arrays.pop((part, name)))
        if new is not None:
            arrays[part, name] = new
        return Packet(packet.header, arrays)

    return change


def layout(function):
    """Change the layout of a reply, not its payload."""

    def change(_, reply):
        record = reply.content.config_records[MESSAGE]
        entries = function(json.loads(str(record[LAYOUT])))
        return RecordDict(
            {MESSAGE: ConfigRecord({**record, LAYOUT: json.dumps(entries)})}
        )

    return change


def filled(value):
    return lambda old: np.full_like(old, value)


def first(value):
    def change(old):
        new = old.copy()
        new.reshape(-1)[0] = value
        return new

    return change


def shortened(old):
    return old[:-1]


def widened(old):
    return np.concatenate([old, old], axis=1)


def test_good_sites_train_under_the_wrapper():
    for method in (TablePuppetADMM, TablePuppetSGD):
        train(TamperingGrid("none", SHOP, None), method)


HOSTILE = [
    (
        "query.extract",
        SHOP,
        array(0, "label-values", shortened),
        "of shape 11 .rows.",
    ),
    ("query.extract", SHOP, array(0, "label-values", first(np.inf)), "not finite"),
    (
        "query.extract",
        SHOP,
        array(0, "label-values", lambda _: None),
        "no label for its 12",
    ),
    ("query.extract", SHOP, fact(label={"kind": "x", "categories": []}), "'label' is"),
    (
        "query.extract",
        SHOP,
        fact(label={"kind": "text", "categories": ["a"]}),
        "labels that are none of its categories",
    ),
    ("query.extract", SHOP, fact(label=None), "no label for its 12"),
    ("query.extract", SHOP, fact(rows=13), "codes of join key 0 for 12 of 13 rows"),
    ("query.extract", SHOP, fact(rows="12"), "'rows' is '12'; allowed: `int`"),
    ("query.extract", SHOP, fact(rows=-1), "'rows' is -1; allowed"),
    ("query.extract", SHOP, fact(keys=[]), "or type of join key 0"),
    ("query.extract", SHOP, fact(keys={"0": "number"}), "'keys' is .*allowed: `array`"),
    ("query.extract", SHOP, array(0, "codes/0", first(99)), "codes .* name no hash"),
    ("query.extract", SHOP, array(0, "codes/0", first(-2)), "allowed: from -1"),
    (
        "query.extract",
        SHOP,
        array(0, "codes/0", lambda old: old.astype(np.float64)),
        r"'codes/0' is float64 of shape \(12,\); allowed: int32",
    ),
    (
        "query.extract",
        SHOP,
        array(0, "hashes/0", lambda old: old[:, :1].copy()),
        r"'hashes/0' is uint64 of shape \(6, 1\); allowed: uint64 of shape .* x 2",
    ),
    ("query.statistics", SHOP, fact(statistics=None), "it has no 'statistics'"),
    (
        "query.statistics",
        SHOP,
        fact(statistics={}),
        "'statistics' is {}; allowed: `array`",
    ),
    (
        "query.statistics",
        SHOP,
        fact(statistics=[]),
        "statistics of 0 features, not of 1",
    ),
    (
        "query.statistics",
        SHOP,
        statistic(0, count=999),
        "statistics of feature 'price': count must be a whole number from 0 to 10",
    ),
    (
        "query.statistics",
        SHOP,
        statistic(0, m2=-1.0),
        r"allowed: `float` >= 0.0 - at `\$.statistics\[0\].m2`",
    ),
    ("query.extract", SHOP, fact(engine=7), "'engine' is 7; allowed: `str`"),
    ("query.extract", SHOP, fact(pushed="all"), "'pushed' is 'all'; allowed: `array`"),
    ("query.extract", SHOP, fact(pushed=[1]), r"'pushed' is \[1\]; allowed"),
    ("train.prepare", SHOP, fact(features=None), "it has no 'features'"),
    ("train.prepare", SHOP, fact(**{"mean-curvature": -1.0}), "'mean-curvature'"),
    (
        "train.admm",
        SHOP,
        array(0, "scores", shortened),
        r"sent 'scores' of shape \(11, 1\), expected \(12, 1\)",
    ),
    ("train.admm", SHOP, array(0, "scores", widened), r"shape \(12, 2\), expected"),
    ("train.admm", SHOP, array(0, "scores", lambda _: None), "sent no 'scores'"),
    ("train.admm", SHOP, array(0, "scores", first(np.nan)), "diverged"),
    ("train.admm", SHOP, array(0, "scores", first(1e35)), "diverged there. Lower"),
    (
        "train.admm",
        SHOP,
        array(0, "scores", lambda old: old.astype(np.int64)),
        "'scores' is int64",
    ),
]


@pytest.mark.parametrize(("action", "node", "change", "match"), HOSTILE)
def test_hostile_reply(action, node, change, match):
    named = r"site 'shop' \(table 'o'\).*" + match
    with pytest.raises(ReplyError, match=named):
        train(TamperingGrid(action, node, change))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("method", "action", "name"),
    [
        (TablePuppetADMM, "train.consensus", "scores"),
        (TablePuppetSGD, "train.sgd", "gradient"),
    ],
)
def test_a_reply_that_is_not_finite_is_refused(method, action, name, bad):
    grid = TamperingGrid(action, US, array(US_PART, name, filled(bad)))
    with pytest.raises(ReplyError, match=r"site 'us' .* not finite"):
        train(grid, method)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (array(US_PART, "moments", shortened), r"'moments' .* shape \(3, 1\), exp"),
        (array(US_PART, "moments", widened), r"'moments' .* shape \(4, 2\), exp"),
        (array(US_PART, "moments", filled(np.nan)), r"'moments' .*diverged"),
        (array(US_PART, "moments", lambda _: None), " no 'moments'"),
    ],
)
def test_hostile_moments(change, match):
    sql = SQL.replace("c.kind", "c.kind, c.id % 3 = 0 AS third")
    strategy = TablePuppetADMM(Query.from_sql(sql), num_epochs=2)
    with pytest.raises(ReplyError, match=rf"site 'us' \(table 'c'\) sent.*{match}"):
        strategy.start(TamperingGrid("train.admm", US, change))


@pytest.mark.parametrize(
    ("action", "change", "method", "settings"),
    [
        ("train.prepare", array(US_PART, "gram", shortened), TablePuppetADMM, {}),
        (
            "train.admm",
            array(US_PART, "proposal", shortened),
            TablePuppetADMM,
            {"lou": "consensus"},
        ),
        ("train.sgd", array(US_PART, "gradient", shortened), TablePuppetSGD, {}),
        (
            "train.step",
            array(US_PART, "batch-scores", lambda old: np.concatenate([old, old])),
            TablePuppetSGD,
            {"batch_size": 5},
        ),
        ("train.consensus", array(US_PART, "scores", shortened), TablePuppetADMM, {}),
    ],
)
def test_hostile_shard(action, change, method, settings):
    with pytest.raises(
        ReplyError, match=r"site 'us' \(table 'c'\) sent .*(expected|allowed)"
    ):
        train(TamperingGrid(action, US, change), method, **settings)


def test_fact_beyond_any_number():
    grid = TamperingGrid("train.prepare", US, fact(features=10**400))
    match = r"site 'us' \(table 'c'\) sent a reply .* 'features' is 1000"
    with pytest.raises(ReplyError, match=match):
        train(grid)


def test_shards_that_differ_in_their_number_of_features():
    grid = TamperingGrid("train.prepare", US, fact(features=7))
    match = r"site 'us' \(table 'c'\) sent another number of features than 'uk'"
    with pytest.raises(ReplyError, match=match):
        train(grid)


def renumbered(entries):
    return [[UK_PART, *entry[1:]] for entry in entries]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (layout(lambda _: [[0, "scores", "float32", [10**9, 1]]]), "exceeds the pay"),
        (layout(lambda _: [[0, "scores", "float32", [2**62, 2**62]]]), "exceeds the"),
        (layout(lambda _: [[0, "scores", "float32", [2**70, 2**70]]]), "bad entry"),
        (layout(lambda _: [[0, "scores", "float32", [-1, 1]]]), "bad entry"),
        (layout(lambda _: [[0, "scores", "float32", [0, 10**30]]]), "bad entry"),
        (layout(lambda _: [[0, "scores", "float32", [0, 2**62]]]), "shape of array"),
        (layout(lambda _: [[0, "scores", "float32", [0] * 9]]), "bad entry"),
        (layout(lambda old: [*old, old[0]]), "'scores' is there twice"),
        (layout(lambda _: []), "a payload but no layout"),
        (layout(lambda _: [[0, "scores", "object", [1]]]), "bad entry"),
        (layout(lambda _: [[0, "scores", "float16", [3, 1]]]), "bad entry"),
        (layout(lambda _: [[0, "scores", "float32", [3, 1], 0]]), "bad entry"),
        (layout(lambda _: [[0, "scores", "float32", [10**9]]]), "exceeds the pay"),
        (layout(lambda _: [[0, "scores"]]), "bad entry"),
        (layout(lambda _: [None]), "bad entry"),
        (layout(lambda _: {}), "wrong type"),
        (layout(lambda _: [[0, "scores", "float32", [3, 1]]]), "exceeds its layout"),
        (layout(renumbered), r"it is about parts \[1\], but its node hosts \[0\]"),
        (lambda *_: RecordDict(), "malformed message: it has no ConfigRecord"),
        (
            lambda *_: RecordDict(
                {MESSAGE: ConfigRecord({"header": "{", "layout": "[]"})}
            ),
            "malformed message: JSONDecodeError",
        ),
        (
            lambda *_: RecordDict(
                {MESSAGE: ConfigRecord({"header": "[" * 10**5, "layout": "[]"})}
            ),
            "malformed message: RecursionError",
        ),
        (header(seconds="1"), "'seconds' is '1'; allowed: `float"),
        (header(seconds=-1), "'seconds' is -1; allowed: `float"),
        (header(seconds=10**400), "'seconds' is 1000"),
    ],
)
def test_malformed_reply(change, match):
    named = f"site 'shop'.* sent a reply to train.admm that cannot be used: .*{match}"
    with pytest.raises(ReplyError, match=named):
        train(TamperingGrid("train.admm", SHOP, change))


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        (None, "'parts' must be a list of objects"),
        ({}, "'parts' must be a list of objects"),
        ([], r"it has arrays of parts \[0\], not listed"),
        ([{}], "an item of 'parts' has no 'id'; allowed: a whole number"),
        ([{"id": "0"}], "an item of 'parts' has no 'id'; allowed: a whole number"),
        ([{"id": 1}], r"it has arrays of parts \[0\], not listed"),
        ([{"id": 0}, {"id": 0}], "part 0 is listed twice"),
    ],
)
def test_reply_that_lists_the_wrong_parts(parts, match):
    named = f"^site 'shop' sent a reply to query.extract that cannot be used: {match}"
    with pytest.raises(ReplyError, match=named):
        train(TamperingGrid("query.extract", SHOP, header(parts=parts)))


@pytest.mark.parametrize("numbers", [[], [US_PART], [ORDERS, US_PART]])
def test_reply_about_parts_that_the_node_does_not_host(numbers):
    def change(_, reply):
        header = unpack(reply.content).header
        (part,) = header["parts"]
        own = {k: v for k, v in part.items() if k != "id"}
        return Packet({**header, "parts": [{"id": n, **own} for n in numbers]})

    match = rf"it is about parts \[{', '.join(map(str, numbers))}\], but its node hosts"
    with pytest.raises(ReplyError, match=match):
        train(TamperingGrid("query.extract", SHOP, change))


def test_malformed_description():
    for shards in ([{}], "x", 3, [{"table": "t", "columns": []}]):
        with pytest.raises(
            ReplyError,
            match=r"node 3 sent a reply to query.describe that cannot be used",
        ):
            train(TamperingGrid("query.describe", US, header(shards=shards)))
    with pytest.raises(ReplyError, match=r"node 3 sent .*'partitions' is '3'"):
        train(TamperingGrid("query.describe", US, header(partitions="3")))


# failures


def crash(code, reason, *, by_flower=False):
    def change(message, _):
        error = Message(Error(code, reason), reply_to=message)
        if by_flower:
            error.metadata.__dict__["_src_node_id"] = 1
        return error

    return change


def test_crashed_app_is_named():
    reason = "Traceback ...\n  File x\nValueError: boom\n\n"
    grid = TamperingGrid("train.admm", US, crash(2, reason))
    match = r"^site 'us' \(table 'c'\): no answer to train.admm \(Flower error 2\): "
    with pytest.raises(SiteError, match=match + "ValueError: boom$"):
        train(grid)


def test_error_that_flower_made_is_named():
    change = crash(8, "ClientApp stopped responding.", by_flower=True)
    match = r"^site 'us' \(table 'c'\): no answer .*Flower error 8\): ClientApp stopped"
    with pytest.raises(SiteError, match=match):
        train(TamperingGrid("train.admm", US, change))


def test_error_without_a_reason():
    with pytest.raises(SiteError, match=r"Flower error 5\): no reason given"):
        train(TamperingGrid("train.admm", US, crash(5, "")), site_timeout=0.2)


def test_missing_reply_is_named():
    grid = TamperingGrid("train.admm", US, lambda *_: None)
    match = r"no reply to train.admm from site 'us' \(table 'c'\) within site-timeout"
    with pytest.raises(ReplyError, match=match):
        train(grid, site_timeout=0.2)


def test_reply_that_nobody_asked_for():
    def change(message, _):
        reply = Message(pack(Packet()), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 77
        reply.metadata.__dict__["_reply_to_message_id"] = "unknown"
        return reply

    grid = TamperingGrid("train.admm", US, change)
    match = "node 77 answered train.admm without being asked"
    with pytest.raises(ReplyError, match=match):
        train(grid, site_timeout=0.2)


def test_foreign_exception_tells_its_place_not_its_text(monkeypatch):
    def fail(*_):
        raise ValueError("secret value 42")

    monkeypatch.setattr("client_apps.operator.participant.Participant.moments", fail)
    with pytest.raises(SiteError) as caught:
        train(InProcessGrid(app, make_sites()))
    text = str(caught.value)
    assert re.match(
        r"site 'shop', table 'o': train.admm failed: ValueError at test_sites.py:\d+; "
        "its text is in the site's log",
        text,
    )
    assert "secret" not in text


def test_what_a_site_refuses_is_in_its_log_too(monkeypatch, caplog):
    def refuse(*_):
        raise SiteError("user or password are wrong")

    monkeypatch.setattr("client_apps.operator.participant.Participant.moments", refuse)
    with pytest.raises(SiteError):
        train(InProcessGrid(app, make_sites()))
    assert "action=train.admm" in caplog.text
    assert "user or password are wrong" in caplog.text


def test_long_error_is_cut():
    grid = TamperingGrid("train.admm", SHOP, failure(error="a\n" * 5000))
    with pytest.raises(SiteError, match=r"a a ?\.\.\.$") as caught:
        train(grid)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize("part", [US_PART, 99, None])
def test_error_about_a_part_of_another_site_names_the_sender(part):
    grid = TamperingGrid("train.admm", SHOP, failure(error="no", part=part))
    with pytest.raises(SiteError, match=r"^site 'shop': train\.admm failed: no$"):
        train(grid)


# models and divergence

MODELS = """
import torch

def raises(features, outputs, intercept):
    raise ValueError(f"no model for {features} features")

def returns_none(features, outputs, intercept):
    return None

def too_wide(features, outputs, intercept):
    return torch.nn.Linear(features, outputs + 1)

def too_many_features(features, outputs, intercept):
    return torch.nn.Linear(features + 1, outputs)

def not_a_number(features, outputs, intercept):
    layer = torch.nn.Linear(features, outputs)
    torch.nn.init.constant_(layer.weight, float("nan"))
    return layer

def good(features, outputs, intercept):
    return torch.nn.Linear(features, outputs, bias=intercept)
"""


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    (tmp_path / "tp_flower_test_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name: f"tp_flower_test_models:{name}"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("raises", "raised ValueError for 1 features and 1 outputs: no model for 1"),
        ("returns_none", "returned NoneType, not a torch.nn.Module"),
        ("too_wide", "does not turn rows of 1 features into 1 scores"),
        ("too_many_features", "does not turn rows of 1 features into 1 scores"),
        ("absent", "cannot be imported"),
    ],
)
def test_model_factory(own_models, name, match):
    named = f"site 'shop', table 'o': train.prepare failed: model .*{match}"
    with pytest.raises(SiteError, match=named):
        train(InProcessGrid(app, make_sites()), model=own_models(name))


def test_model_that_starts_as_nan(own_models):
    with pytest.raises((ReplyError, SiteError), match=r"site 'shop'.*table 'o'"):
        train(InProcessGrid(app, make_sites()), model=own_models("not_a_number"))


def test_good_factory_trains(own_models):
    train(InProcessGrid(app, make_sites()), model=own_models("good"))


@pytest.mark.parametrize("label", ["o.qty", "o.qty > 0"])
def test_diverged_sgd_says_what_to_do(label):
    sql = SQL.replace("o.qty AS", f"{label} AS")
    strategy = TablePuppetSGD(
        Query.from_sql(sql), num_epochs=300, learning_rate=1e6, batch_size=4, l2=1.0
    )
    # by the loss of an epoch, or by what a site sends before one is over
    match = r"diverged (there|in epoch \d+: .*)\. Lower learning-rate"
    with pytest.raises((DivergedError, ReplyError), match=match):
        strategy.start(InProcessGrid(app, make_sites()))


# the state of the sites


def last_rounds(grid):
    """What each site has kept of the round that it has answered last."""
    sites = [Site(context, grid.run_name) for context in grid.contexts.values()]
    return [site.store.last() for site in sites]


def state_bytes(grid, node):
    last = Site(grid.contexts[node], grid.run_name).store.last()
    return last and {key: own.tobytes() for key, own in last.arrays.items()}


def nothing_is_left(grid):
    """Whether the sites have nothing of the run but a reply, and Flower has nothing."""
    for context, last in zip(grid.contexts.values(), last_rounds(grid), strict=True):
        assert last is None or (last.is_over and not last.arrays)
        assert not Site(context, grid.run_name).store.names()
        assert not len(context.state)
    return True


@pytest.mark.parametrize(
    ("method", "method_name"),
    [
        (TablePuppetADMM, "fit_exactly"),
        (TablePuppetADMM, "release_scores"),
        (TablePuppetADMM, "moments"),
        (TablePuppetSGD, "step"),
        (TablePuppetSGD, "release_scores"),
    ],
)
def test_failed_action_leaves_its_site_alone(monkeypatch, method, method_name):
    pairs = []

    class Watched(InProcessGrid):
        def _deliver(self, message):
            node = message.metadata.dst_node_id
            before = state_bytes(self, node)
            reply = super()._deliver(message)
            if "error" in unpack(reply.content).header:
                pairs.append((before, state_bytes(self, node)))
            return reply

    calls = []
    original = getattr(Participant, method_name)

    def fail_later(self, *arguments):
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("boom")
        return original(self, *arguments)

    monkeypatch.setattr(Participant, method_name, fail_later)
    with pytest.raises(SiteError, match="ValueError at test_sites"):
        train(Watched(app, make_sites()), method, batch_size=4)
    assert pairs
    assert all(before and before == after for before, after in pairs)


def test_failed_extraction_leaves_no_state():
    grid = InProcessGrid(app, make_sites())
    sql = SQL.replace("o.price", "CAST('x' || o.price AS INTEGER) AS p")
    with pytest.raises(SiteError, match="fails on some value"):
        TablePuppetADMM(Query.from_sql(sql)).start(grid)
    assert nothing_is_left(grid)


@pytest.mark.parametrize("method", [TablePuppetADMM, TablePuppetSGD])
def test_second_run_on_the_same_grid_equals_the_first(method):
    grid = InProcessGrid(app, make_sites())
    first_run, second_run = (train(grid, method).report for _ in range(2))
    assert first_run.final_train == second_run.final_train
    assert first_run.final_test == second_run.final_test


@pytest.mark.parametrize("method", [TablePuppetADMM, TablePuppetSGD])
@pytest.mark.parametrize("forgets", [True, False])
def test_run_after_a_failed_one_equals_one_on_a_new_grid(method, forgets, monkeypatch):
    """A failed run over more tables leaves parts behind; the next one ignores them."""
    grid = InProcessGrid(app, make_sites())
    wide = f"{SQL} JOIN customers d ON d.id = o.cust".replace("c.age", "c.age, d.age")
    with monkeypatch.context() as patch:
        patch.setattr(Participant, "release_scores", lambda *_: 1 / 0)
        if not forgets:
            patch.setattr(SiteStore, "drop", lambda *_: None)
            patch.setattr(SiteStore, "end", lambda *_: None)
        with pytest.raises(SiteError, match="ZeroDivisionError"):
            method(Query.from_sql(wide), num_epochs=2).start(grid)
    names = [Site(own, grid.run_name).store.names() for own in grid.contexts.values()]
    assert any(names) != forgets
    again = train(grid, method).report
    assert (
        again.final_train
        == train(InProcessGrid(app, make_sites()), method).report.final_train
    )


def left_in(folder):
    """The files in a state folder, but for locks, last replies and the ledger."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if not path.name.startswith((".lock", FILE))]


@pytest.mark.parametrize("method", [TablePuppetADMM, TablePuppetSGD])
def test_finish_leaves_the_models_alone(tmp_path, method):
    grid = InProcessGrid(app, make_sites())
    seen = []
    for context in grid.contexts.values():
        context.node_config["state-dir"] = str(tmp_path)
    strategy = method(
        Query.from_sql(SQL),
        num_epochs=1,
        on_round=lambda _: seen.append(len(list(tmp_path.iterdir()))),
    )
    strategy.start(grid)
    # the database with its log and its index, the cache, and the models at the end
    assert max(seen) == 5
    left = {path.relative_to(tmp_path).parts[0] for path in left_in(tmp_path)}
    assert left == {"models"}
    assert nothing_is_left(grid)


@pytest.mark.parametrize(
    "action", ["query.statistics", "train.admm", "train.consensus"]
)
def test_failed_run_leaves_nothing(tmp_path, action):
    grid = TamperingGrid(action, US, crash(2, "boom"))
    for context in grid.contexts.values():
        context.node_config["state-dir"] = str(tmp_path)
    with pytest.raises(SiteError, match="boom"):
        train(grid)
    assert left_in(tmp_path) == []
    assert nothing_is_left(grid)


def test_site_without_a_part_keeps_no_key(tmp_path):
    idle = {"bank": {"accounts": pd.DataFrame({"a": [1]})}}
    grid = InProcessGrid(app, make_sites() | idle)
    for context in grid.contexts.values():
        context.node_config["state-dir"] = str(tmp_path)
    train(grid)
    assert {p.relative_to(tmp_path).parts[0] for p in left_in(tmp_path)} == {"models"}


def test_run_without_all_tables_leaves_no_key(tmp_path):
    shop = {"shop": make_sites()["shop"]}
    grid = InProcessGrid(app, shop)
    for context in grid.contexts.values():
        context.node_config["state-dir"] = str(tmp_path)
    with pytest.raises(SchemaError, match="no site hosts table 'customers'"):
        train(grid)
    assert left_in(tmp_path) == []


def test_failed_run_keeps_its_error_when_the_sites_are_gone():
    grid = TamperingGrid("train.admm", US, crash(2, "boom"))
    push = grid.push_messages

    def push_until_failure(messages):
        if messages[0].metadata.message_type == "query.finish":
            raise ConnectionError("gone")
        return push(messages)

    grid.push_messages = push_until_failure
    with pytest.raises(SiteError, match="boom"):
        train(grid)
    assert all(last and last.arrays for last in last_rounds(grid))


def test_lost_files_are_reported(tmp_path):
    grid = InProcessGrid(app, make_sites())
    for context in grid.contexts.values():
        context.node_config["state-dir"] = str(tmp_path)

    def lose(report):
        if report.phase == "prepare":
            lose_state(Site(grid.contexts[US], grid.run_name).store)

    strategy = TablePuppetADMM(Query.from_sql(SQL), on_round=lose)
    match = "state of this run is lost at 'us' .* no checkpoint"
    with pytest.raises(SiteError, match=match):
        strategy.start(grid)


def test_lost_state_is_reported():
    grid = InProcessGrid(app, make_sites())

    def restart(report):
        if report.phase == "prepare":
            lose_state(Site(grid.contexts[US], grid.run_name).store)

    strategy = TablePuppetADMM(Query.from_sql(SQL), on_round=restart)
    match = "state of this run is lost at 'us' .* no checkpoint"
    with pytest.raises(SiteError, match=match):
        strategy.start(grid)


def test_state_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    grid = InProcessGrid(app, make_sites())
    grid.contexts[US].node_config["state-dir"] = str(file)
    match = "node 3: query.describe failed: cannot write to the state .*state-dir"
    with pytest.raises(SiteError, match=match):
        train(grid)


def test_places_of_a_real_site_stay_in_its_log(tmp_path, caplog):
    tables = tmp_path / "tables.toml"
    for text, told in [
        ("[tables.customers]\npath = 'a.csv'\n", r"\(its file\): the file does not"),
        (
            "[tables.customers]\nuri = 'sqlite:///a.db'\ntable = 't'\n",
            r"\(its sqlite\)",
        ),
        ("[tables]\n", "the tables file of the site names no tables"),
    ]:
        tables.write_text(text)
        caplog.clear()
        grid = InProcessGrid(app, {**make_sites(), "us": str(tables)})
        with pytest.raises(SiteError, match=told) as caught:
            train(grid)
        assert str(tmp_path) not in str(caught.value)
        assert str(tmp_path) in caplog.text
