"""Sites that fail or send what they should not: each is refused by name."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from client_apps.data.database import FILE
from client_apps.data.run_store import SiteStore
from client_apps.methods import sgd
from client_apps.operator.participant import Participant
from tests.support.federated import LocalGrid
from tests.support.peers.faulty_grid import lose_state
from tests.support.peers.hostile import (
    ORDERS,
    SHOP,
    SQL,
    UK_PART,
    US,
    US_PART,
    change_of,
    header,
    tables,
    train,
)
from tests.support.peers.hostile_runs import RUNS, refusals
from tests.support.policies import OPEN
from tp_flower.errors import ReplyError, SchemaError, SiteError, UnavailableError
from tp_flower.protocol.packet import LAYOUT, MESSAGE, Packet, pack, unpack
from tp_flower.settings import PrivacySettings

REPLIES = Path(__file__).with_name("refused_replies.toml")
NODES = {"shop": SHOP, "us": US}
NAMED = {"shop": r"site 'shop' \(table 'o'\)", "us": r"site 'us' \(table 'c'\)"}
CLEAR = PrivacySettings(scores="clear", unions="clear")
STOPPED = "ClientApp stopped responding."


class TamperingGrid(LocalGrid):
    """Replace one node's replies to one action.

    ``change`` makes the content of another reply of the message and the reply, or a
    message; None loses it.
    """

    def __init__(self, action, node, change, **options):
        super().__init__(tables(), **options)
        self.action = action
        self.node = node
        self.change = change

    def _deliver(self, message):
        reply = super()._deliver(message)
        metadata = message.metadata
        if (metadata.message_type, metadata.dst_node_id) != (self.action, self.node):
            return reply
        changed = self.change(message, reply)
        if isinstance(changed, RecordDict):
            changed = Message(changed, reply_to=message)
        return changed

    def pull_messages(self, message_ids):
        return [m for m in super().pull_messages(message_ids) if m is not None]


def packed(change):
    return lambda _, reply: pack(change(unpack(reply.content)))


def check_refused(run, site, action, change, match):
    method, settings = RUNS[run]
    # of masked words every value is one
    settings = {"privacy": CLEAR, **settings}
    with pytest.raises(ReplyError, match=match):
        train(TamperingGrid(action, NODES[site], change), method, **settings)


@refusals(REPLIES, "part")
def test_a_malformed_part_is_refused_by_site_and_table(
    run, site, action, change, match
):
    change = packed(change_of(change))
    check_refused(run, site, action, change, f"{NAMED[site]}.*{match}")


@refusals(REPLIES, "whole")
def test_a_malformed_reply_is_refused_by_site(run, site, action, change, match):
    sender = "node 3" if action == "query.describe" else f"site '{site}'"
    match = f"^{sender}.* sent a reply to {action} that cannot be used: .*{match}"
    check_refused(run, site, action, packed(change_of(change)), match)


def layout(function):
    """Change the layout of a reply, not its payload."""

    def change(_, reply):
        record = reply.content.config_records[MESSAGE]
        entries = function(json.loads(str(record[LAYOUT])))
        changed = ConfigRecord({**record, LAYOUT: json.dumps(entries)})
        return RecordDict({MESSAGE: changed})

    return change


def scores(*shape):
    return layout(lambda _: [[0, "scores", "float32", list(shape)]])


def text(header):
    record = ConfigRecord({"header": header, "layout": "[]"})
    return lambda *_: RecordDict({MESSAGE: record})


def renumbered(entries):
    return [[UK_PART, *entry[1:]] for entry in entries]


# what else a layout cannot be is in tests/unit/protocol/test_protocol.py
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (scores(10**9, 1), "exceeds the payload"),
        (scores(2**70, 2**70), "bad entry"),
        (layout(lambda old: [*old, old[0]]), "'scores' is there twice"),
        (layout(lambda _: []), "a payload but no layout"),
        (layout(renumbered), r"it is about parts \[1\], but its node hosts \[0\]"),
        (text("[" * 10**5), "malformed message: RecursionError"),
        (packed(header("seconds", value=10**400)), "'seconds' is 1000"),
    ],
)
def test_a_reply_whose_form_is_wrong_is_refused_by_site(change, match):
    match = f"site 'shop'.* sent a reply to train.admm that cannot be used: .*{match}"
    check_refused("admm", "shop", "train.admm", change, match)


@pytest.mark.parametrize("numbers", [[], [US_PART], [ORDERS, US_PART]])
def test_reply_about_parts_that_the_node_does_not_host(numbers):
    def change(packet):
        ((part),) = packet.header["parts"]
        return Packet({**packet.header, "parts": [{**part, "id": n} for n in numbers]})

    match = rf"it is about parts \[{', '.join(map(str, numbers))}\], but its node hosts"
    check_refused("admm", "shop", "query.extract", packed(change), match)


def crash(code, reason, *, by_flower=False):
    def change(message, _):
        error = Message(Error(code, reason), reply_to=message)
        if by_flower:
            error.metadata.__dict__["_src_node_id"] = 1
        return error

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            crash(2, "Traceback ...\n  File x\nValueError: boom\n\n"),
            "2): ValueError: boom",
        ),
        (crash(8, STOPPED, by_flower=True), f"8): {STOPPED}"),
        (crash(5, ""), "5): no reason given"),
    ],
)
def test_crashed_app_is_named(change, match):
    with pytest.raises(SiteError) as caught:
        train(TamperingGrid("train.admm", US, change), site_timeout=0.2)
    named = "site 'us' (table 'c'): no answer to train.admm (Flower error "
    assert str(caught.value).startswith(named + match)


@pytest.mark.parametrize("action", ["query.describe", "train.admm"])
def test_a_site_that_does_not_allow_the_app_is_sent_it_once(action):
    tries = []

    def change(message, reply):
        tries.append(message)
        return crash(7, f"app bundle {'5a' * 32}")(message, reply)

    grid = TamperingGrid(action, US, change)
    with pytest.raises(SiteError, match=f"{action} .*7.: app bundle 5a5a") as caught:
        train(grid)
    # what has passed by the time that a run is resumed is another error
    assert not isinstance(caught.value, UnavailableError)
    assert len(tries) == 1


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
    with pytest.raises(
        ReplyError, match=r"node 77 answered train.admm without being asked"
    ):
        train(grid, site_timeout=0.2)


def raising(error):
    def fail(*_):
        raise error

    return fail


def test_foreign_exception_tells_its_place_not_its_text(monkeypatch):
    monkeypatch.setattr(Participant, "moments", raising(ValueError("secret value 42")))
    with pytest.raises(SiteError) as caught:
        train(LocalGrid(tables()))
    text = str(caught.value)
    assert re.match(
        r"site 'shop', table 'o': train.admm failed: ValueError at test_sites.py:\d+; "
        "its text is in the site's log",
        text,
    )
    assert "secret" not in text


def test_what_a_site_refuses_is_in_its_log_too(monkeypatch, caplog):
    error = SiteError("user or password are wrong")
    monkeypatch.setattr(Participant, "moments", raising(error))
    with pytest.raises(SiteError):
        train(LocalGrid(tables()))
    assert "action=train.admm" in caplog.text
    assert "user or password are wrong" in caplog.text


def failure(**values):
    return lambda *_: pack(Packet({"kind": "refused", "round": 1, **values}))


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


MODELS = """
import torch

def raises(features, outputs, intercept):
    raise ValueError(f"no model for {features} features")

def too_wide(features, outputs, intercept):
    return torch.nn.Linear(features, outputs + 1)

def not_a_number(features, outputs, intercept):
    layer = torch.nn.Linear(features, outputs)
    torch.nn.init.constant_(layer.weight, float("nan"))
    return layer
"""
UNUSABLE = r"site 'shop', table 'o': train.prepare failed: model .*"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("raises", f"{UNUSABLE}raised ValueError for 2 features and 1 outputs: no mod"),
        ("too_wide", f"{UNUSABLE}does not turn rows of 2 features into 1 scores"),
        ("not_a_number", "site 'shop'.*table 'o'"),
    ],
)
def test_model_factory(tmp_path, monkeypatch, name, match):
    (tmp_path / "tp_flower_test_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((ReplyError, SiteError), match=match):
        train(LocalGrid(tables()), model=f"tp_flower_test_models:{name}")


def test_factory_of_a_good_model_trains():
    train(LocalGrid(tables()), model="torch.nn:Linear")


def stores(grid):
    """By node, what its site keeps of the run."""
    return {node: grid.site(node).store for node in grid.contexts}


def state_bytes(grid, node):
    last = stores(grid)[node].last()
    return last and {key: own.tobytes() for key, own in last.arrays.items()}


def nothing_is_left(grid):
    """Whether the sites have nothing of the run but a reply, and Flower has nothing."""
    for node, store in stores(grid).items():
        last = store.last()
        assert last is None or (last.is_over and not last.arrays)
        assert not store.names()
        assert not len(grid.contexts[node].state)
    return True


@pytest.mark.parametrize(
    ("method", "owner", "name"),
    [
        ("admm", Participant, "release_rows"),
        ("admm", Participant, "begin_scores"),
        ("admm", Participant, "moments"),
        ("sgd", sgd, "take_step"),
        ("sgd", Participant, "release_batch"),
    ],
)
def test_failed_action_leaves_its_site_alone(monkeypatch, method, owner, name):
    pairs = []

    class Watched(LocalGrid):
        def _deliver(self, message):
            node = message.metadata.dst_node_id
            before = state_bytes(self, node)
            reply = super()._deliver(message)
            if "error" in unpack(reply.content).header:
                pairs.append((before, state_bytes(self, node)))
            return reply

    calls = []
    original = getattr(owner, name)

    def fail_later(*arguments, **named):
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("boom")
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, fail_later)
    with pytest.raises(SiteError, match="ValueError at test_sites"):
        train(Watched(tables()), method, batch_size=4)
    assert pairs
    assert all(before and before == after for before, after in pairs)


def test_failed_extraction_leaves_no_state():
    grid = LocalGrid(tables())
    sql = SQL.replace("o.price", "CAST('x' || o.price AS INTEGER) AS p")
    with pytest.raises(SiteError, match="fails on some value"):
        train(grid, sql=sql)
    assert nothing_is_left(grid)


@pytest.mark.cases("True-sgd", "False-admm")
@pytest.mark.parametrize("method", ["admm", "sgd"])
@pytest.mark.parametrize("forgets", [True, False])
def test_run_after_others_equals_one_on_a_new_grid(method, forgets, monkeypatch):
    """A failed run over more tables leaves parts behind; the next ones ignore them."""
    grid = LocalGrid(tables())
    wide = f"{SQL} JOIN customers d ON d.id = o.cust".replace("c.age", "c.age, d.age")
    with monkeypatch.context() as patch:
        patch.setattr(Participant, "begin_scores", lambda *_: 1 / 0)
        if not forgets:
            patch.setattr(SiteStore, "drop", lambda *_: None)
            patch.setattr(SiteStore, "end", lambda *_: None)
        with pytest.raises(SiteError, match="ZeroDivisionError"):
            train(grid, method, wide)
    assert any(store.names() for store in stores(grid).values()) != forgets
    grids = (grid, grid, LocalGrid(tables()))
    *again, new = (train(each, method).report for each in grids)
    for report in again:
        assert report.final_train == new.final_train
        assert report.final_test == new.final_test


def left_in(folder):
    """By site, what its state folder has but for locks, last replies and the ledger."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if not path.name.startswith((".lock", FILE))]
    return {path.relative_to(folder).parts[:2] for path in files}


@pytest.mark.parametrize("method", ["admm", "sgd"])
def test_finish_leaves_the_models_alone(tmp_path, method):
    idle = {"bank": {"accounts": pd.DataFrame({"a": [1]})}}
    grid = LocalGrid(tables() | idle, state=tmp_path)
    seen = set()

    def look(_):
        seen.update(path.name for path in tmp_path.glob("*/*"))

    train(grid, method, num_epochs=1, on_round=look)
    # the database with its log and its index, the cache, and the models at the end
    assert seen == {FILE, f"{FILE}-wal", f"{FILE}-shm", "cache", "models"}
    assert left_in(tmp_path) == {(site, "models") for site in ("shop", "us", "uk")}
    assert nothing_is_left(grid)


@pytest.mark.parametrize(
    "action", ["query.statistics", "train.admm", "train.consensus"]
)
def test_failed_run_leaves_nothing(tmp_path, action):
    grid = TamperingGrid(action, US, crash(2, "boom"), state=tmp_path)
    with pytest.raises(SiteError, match="boom"):
        train(grid)
    assert not left_in(tmp_path)
    assert nothing_is_left(grid)


def test_run_without_all_tables_leaves_no_key(tmp_path):
    grid = LocalGrid({"shop": tables()["shop"]}, state=tmp_path)
    with pytest.raises(SchemaError, match="no site hosts table 'customers'"):
        train(grid)
    assert not left_in(tmp_path)


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
    last_rounds = [store.last() for store in stores(grid).values()]
    assert all(last and last.arrays for last in last_rounds)


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_lost_state_is_reported(tmp_path, is_on_disk):
    grid = LocalGrid(tables(), state=tmp_path if is_on_disk else None)

    def lose(report):
        if report.phase == "prepare":
            lose_state(stores(grid)[US])

    with pytest.raises(
        SiteError, match=r"state of this run is lost at 'us' .* no checkpoint"
    ):
        train(grid, on_round=lose)
    train(grid)


def test_state_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    grid = LocalGrid(tables())
    grid.keep_state(US, file)
    match = "node 3: query.describe failed: cannot write to the state .*state-dir"
    with pytest.raises(SiteError, match=match):
        train(grid)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (
            f"[tables.customers]\n{OPEN}path = 'a.csv'",
            r"\(its file\): the file does not",
        ),
        (
            f"[tables.customers]\n{OPEN}uri = 'sqlite:///a.db'\ntable = 't'",
            r"\(its sqlite\)",
        ),
        ("[tables]", "the tables file of the site names no tables"),
    ],
)
def test_places_of_a_real_site_stay_in_its_log(tmp_path, caplog, content, match):
    file = tmp_path / "tables.toml"
    file.write_text(content)
    with pytest.raises(SiteError, match=match) as caught:
        train(LocalGrid({**tables(), "us": str(file)}))
    assert str(tmp_path) not in str(caught.value)
    assert str(tmp_path) in caplog.text
