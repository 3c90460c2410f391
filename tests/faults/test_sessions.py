"""Sessions: the same runs as by Flower's messages, whatever happens on the way."""

import re
import socket
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from client_apps.methods import cg
from client_apps.rounds import session
from strategies import STRATEGIES
from strategies.run import channel
from strategies.run.channel import open_channel
from tests.support.federated import store, store_sql, train
from tests.support.peers.faulty_runs import place, plain, same_noise
from tests.support.peers.session_front import (
    Fault,
    Front,
    ThreadedGrid,
    UnixConnection,
    sessions,
)
from tests.support.servers import wait_until
from tp_flower.errors import SettingsError, SiteError
from tp_flower.node_config import SESSION_FRONT
from tp_flower.protocol import session_messages as wire
from tp_flower.query import Query
from tp_flower.settings import PrivacySettings

__all__ = ["place", "plain", "same_noise"]

SCHEDULES = 200
CHUNKS = 32
LABELS = PrivacySettings(labels="randomised-response", label_epsilon=2.0)
METHODS = {
    "cg": ("squared", {"task": "regression"}),
    "admm": ("squared", {"task": "regression"}),
    "sgd": ("logistic", {"batch_size": 20}),
    "boost": ("squared", {"task": "regression", "trees_per_round": 2}),
}


@pytest.fixture
def folder():
    """A folder whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="tp-") as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def quick():
    with (
        patch.object(session, "FIRST_PAUSE", 0.002),
        patch.object(channel, "LOOK_SECONDS", 0.02),
    ):
        yield


ONE_EACH = {(2, "query.session"): 1, (3, "query.session"): 1}


def sites():
    frames = store()
    return {
        "shop": {"orders": frames["orders"]},
        "us": {"customers": frames["customers"], "items": frames["items"]},
    }


def trained(grid, method="cg", loss="squared", **settings):
    settings = {"device": "cpu", "num_epochs": 2, **settings}
    strategy = STRATEGIES[method](Query.from_sql(store_sql(loss)), **settings)
    strategy.start(grid)
    return strategy


@pytest.mark.cases("sgd")
@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_the_same_and_takes_one_message_of_flower_per_site(method, folder):
    loss, settings = METHODS[method]
    plain = train(sites(), store_sql(loss), method, device="cpu", **settings)
    with sessions(sites(), folder) as (grid, front, flower):
        over_sessions = trained(grid, method, loss, **settings)
    assert over_sessions.losses == pytest.approx(plain.losses, rel=1e-6)
    assert Counter(flower.asked) == ONE_EACH
    assert front.requests >= 2 * len(over_sessions.history)
    assert not grid.refused
    assert not list(folder.iterdir()), "the socket is removed"


def test_messages_that_the_front_makes_up_do_not_even_end_a_session(folder):
    def every_third(number):
        return Fault.ANSWER_FORGED if number % 3 == 0 else None

    with sessions(sites(), folder, every_third) as (grid, front, flower):
        trained(grid)
    assert len(front.faults) > 3
    assert Counter(flower.asked) == ONE_EACH


@pytest.mark.cases("1")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_nothing_is_computed_or_paid_twice_under_random_faults(chunk, plain):
    for seed in range(chunk, SCHEDULES, CHUNKS):
        rng = np.random.default_rng(seed)
        faults = [*Fault, *[None] * int(rng.integers(8, 40))]
        drawn = [faults[n] for n in rng.integers(0, len(faults), 5000)]
        federation, expected = plain(("labels", "dp-sgd", "cg")[seed % 3])
        with tempfile.TemporaryDirectory(prefix="tp-") as name:
            faulty = federation.sites, Path(name), drawn.__getitem__
            with sessions(*faulty, state=federation.state) as (grid, front, _):
                ended = federation.train_over(grid, front.faults)
        ended.check_is(expected)


def post(folder, path, body=b"", key=bytes(32), address="192.0.2.1", **headers):
    digest = wire.digest_of(body)
    signature = wire.sign_request(key, path, len(body), digest)
    signed = {wire.DIGEST: digest, wire.SIGNATURE: signature, "X-Real-IP": address}
    with closing(UnixConnection(next(folder.glob("*.sock")))) as connection:
        connection.request("POST", path, body, {**signed, **headers})
        return connection.getresponse().status


def test_nobody_but_the_site_can_speak_for_it(folder):
    with sessions(sites(), folder) as (grid, *_):
        trained(grid)
        shop = grid.lines[2]
        us = grid.lines[3]
        path = wire.path_of(grid.channel, 2, shop.number + 1)
        unsigned = "not signed with the key of the site's session"
        attempts = [
            ({}, unsigned),
            ({"key": us.key}, unsigned),
            ({"key": shop.key, wire.SIGNATURE: ""}, unsigned),
            ({"key": shop.key, "address": "192.0.2.7"}, "from another address"),
            ({"key": shop.key, wire.DIGEST: wire.digest_of(b"x")}, unsigned),
            ({"key": shop.key, "Content-Length": str(1 << 40)}, unsigned),
            ({"key": shop.key, "Content-Length": ""}, unsigned),
        ]
        for count, (request, reason) in enumerate(attempts, start=1):
            assert post(folder, path, **request) == wire.FORBIDDEN, request
            assert sum(grid.refused.values()) == count
            assert any(key.startswith(reason) for key in grid.refused), request
        large = str(wire.MOST_BYTES + 1)
        signed = wire.sign_request(shop.key, path, int(large), wire.digest_of(b""))
        of_large = {"Content-Length": large, wire.SIGNATURE: signed}
        assert post(folder, path, **of_large) == wire.FORBIDDEN
        assert grid.refused["too large"] == 1
        for other in ("0" * 32, 2), (grid.channel, 9):
            assert post(folder, wire.path_of(*other, 1), key=shop.key) == wire.FORBIDDEN
        # a reply to an earlier message is no reply to this one
        replayed = wire.path_of(grid.channel, 2, 1)
        before = shop.number
        assert post(folder, replayed, b"old", key=shop.key) == wire.NOTHING
        assert shop.number == before
        assert trained(grid).losses, "the sessions go on"


def is_cut_off(client):
    client.setblocking(False)
    try:
        client.recv(1)
    except BlockingIOError:
        return False
    return True


def test_clients_that_dawdle_block_nobody(folder):
    with (
        patch.object(channel._Handler, "timeout", 300.0),
        sessions(sites(), folder) as (grid, *_),
    ):
        trained(grid)
        dawdlers = []
        with ExitStack() as dawdling:
            for _ in range(100):
                client = dawdling.enter_context(socket.socket(socket.AF_UNIX))
                client.connect(str(next(folder.glob("*.sock"))))
                client.send(b"POST /v1/tp/")
                dawdlers.append(client)
            trained(grid)
            # the run has not waited for the server to cut them off
            assert not any(map(is_cut_off, dawdlers))


def test_a_site_that_falls_silent_gets_a_new_session(folder):
    hung = threading.Event()
    reads = session._Line.computing
    opened = Counter()
    opens = channel.SessionGrid._open

    def opening(grid, line):
        opened[line.node] += 1
        return opens(grid, line)

    def computing(line, number):
        if number == 4 and not hung.is_set():
            hung.set()
            # it gives no sign of life until it is sent for again
            wait_until(lambda: max(opened.values()) >= 2)
        return reads(line, number)

    with (
        patch.object(channel, "SILENT_SECONDS", 0.5),
        patch.object(channel.SessionGrid, "_open", opening),
        patch.object(session._Line, "computing", computing),
        sessions(sites(), folder) as (grid, _, flower),
    ):
        strategy = trained(grid)
    plain = train(sites(), store_sql("squared"), "cg", device="cpu")
    assert strategy.losses == pytest.approx(plain.losses, rel=1e-6)
    assert max(Counter(flower.asked).values()) >= 2
    assert set(grid.refused) <= {"not signed with the key of the site's session"}


def test_a_site_that_computes_for_long_says_so(folder):
    descend = cg.descend
    first = threading.Lock()

    def slow(*arguments):
        # once, for longer than a site may be silent
        if first.acquire(blocking=False):
            time.sleep(3.0)
        return descend(*arguments)

    with (
        # many signs of life in the time of one: a busy machine gives some of them late
        patch.object(channel, "SILENT_SECONDS", 2.0),
        patch.object(wire, "PING_SECONDS", 0.1),
        patch.object(cg, "descend", slow),
        sessions(sites(), folder) as (grid, front, flower),
    ):
        trained(grid)
    assert any(path.endswith(wire.WORKING) for path in front.paths)
    assert set(Counter(flower.asked).values()) == {1}


def test_a_front_that_is_away_for_long_ends_sessions_which_are_opened_again(folder):
    with (
        patch.object(session, "LOST_SECONDS", 0.4),
        patch.object(channel, "SILENT_SECONDS", 0.2),
        sessions(sites(), folder) as (grid, front, flower),
    ):
        trained(grid)
        front.is_down = True

        def mend():
            while len(flower.asked) < 4:
                time.sleep(0.01)
            front.is_down = False

        threading.Thread(target=mend, daemon=True).start()
        assert trained(grid).losses
    assert {action for _, action in flower.asked} == {"query.session"}


def test_a_front_that_is_away_or_cuts_long_polls_is_no_hindrance(folder):
    with sessions(sites(), folder) as (grid, front, flower):
        front.is_down = True
        threading.Timer(0.3, setattr, (front, "is_down", False)).start()
        trained(grid)
        front.longest = 1.5
        # the sites ask in vain, until they ask for less
        time.sleep(2.5)
        trained(grid)
    assert set(Counter(flower.asked).values()) == {1}


@pytest.mark.parametrize(("idle", "seconds"), [(0.1, 60.0), (60.0, 1.0)])
def test_a_session_lets_others_use_the_site(idle, seconds, folder):
    with (
        patch.object(channel, "IDLE_SECONDS", idle),
        sessions(sites(), folder, seconds=seconds) as (grid, _, flower),
    ):
        trained(grid)
        # the sites are free for others
        wait_until(lambda: not any(line.since for line in grid.lines.values()))
        trained(grid)
    assert {action for _, action in flower.asked} == {"query.session"}


def test_a_site_that_can_open_none_is_asked_by_flower(folder):
    front = Front(folder)
    flower = ThreadedGrid(sites(), None)
    flower.contexts[2].node_config[SESSION_FRONT] = front.url
    threading.Thread(target=front.serve_forever, daemon=True).start()
    with (
        patch.dict("os.environ", {channel.SESSIONS: str(folder)}),
        open_channel(flower, "auto", 60.0) as grid,
    ):
        assert trained(grid).losses
        assert [node for node, line in grid.lines.items() if line.uses_flower] == [3]
    opened = Counter(action for node, action in flower.asked if node == 3)
    assert opened["query.session"] == 1
    assert opened["train.descent"] == 2
    front.shutdown()
    front.server_close()


def test_a_channel_that_must_be_had_is_refused_where_it_cannot(folder):
    flower = ThreadedGrid(sites(), None)
    match = r'channel = "session", but node [23] cannot open one: .* session-front'
    with (
        patch.dict("os.environ", {channel.SESSIONS: str(folder)}),
        open_channel(flower, "session", 60.0) as grid,
        pytest.raises(SiteError, match=match),
    ):
        trained(grid)
    nowhere = {channel.SESSIONS: str(folder / ("x" * 70))}
    for environment, match in (({}, "is not set"), (nowhere, "no socket in")):
        with (
            patch.dict("os.environ", environment),
            pytest.raises(SettingsError, match=match),
            open_channel(flower, "session", 60.0),
        ):
            pass
        with (
            patch.dict("os.environ", environment),
            open_channel(flower, "auto", 60.0) as grid,
        ):
            assert grid is flower


WRONG = "http://superlink.example.org:8443 ftp://127.0.0.1 https:// x http://10.0.0.1/"


@pytest.mark.parametrize("front", WRONG.split())
def test_where_a_site_connects_to_is_https_unless_it_is_this_machine(front):
    request = wire.SessionRequest(channel="0" * 32, key="0" * 64, limit=60.0)
    with pytest.raises(SettingsError, match=re.escape(f"is {front!r}; allowed: ")):
        session.hold_session(request, {SESSION_FRONT: front}, 2, lambda *_: None)
