"""Every round of a run happens once at a site, whatever becomes of messages and files.

The sites are those of ``hostile``: tables files with policies, and state on disk. A
*kill* is an exception that nothing catches, at any call that changes a file, after
which the process has forgotten all that it had read.
"""

import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message
from flwr.common.serde import recorddict_to_proto

from client_apps.data.database import FILE, close_databases
from client_apps.data.ledger import Ledger
from client_apps.methods import sgd
from client_apps.rounds.transaction import STOPPED
from strategies.explain.explanation import Explain
from tests.support.federated import LocalGrid
from tests.support.peers.faulty_grid import (
    COMMITTED,
    change_row,
    committed_rows,
    flipped,
    forget_processes,
    rows_in,
)
from tests.support.peers.hostile import SHOP, US, HostileGrid, like, tables, train
from tp_flower.errors import SiteError
from tp_flower.methods.admm.messages import TRAIN_ADMM
from tp_flower.methods.coreset.messages import TRAIN_DRAW, TRAIN_MEASURE, TRAIN_WEIGH
from tp_flower.methods.sgd.messages import TRAIN_SGD, TRAIN_STEP
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import Packet, pack, unpack
from tp_flower.settings import PrivacySettings

COVERED = PrivacySettings(
    labels="laplace",
    label_epsilon=1.0,
    label_range=(-4.0, 4.0),
    features="statistics",
    epsilon=1.0,
    predictions=2.0,
)
FREE = (
    ("o", "price", "range(-5, 5)"),
    ("o", "day", "range(1, 28)"),
    ("c", "age", "range(0, 300)"),
    ("c", "kind", "categories(k0, k1)"),
)
BUDGET = """
    epsilon = 50.0
    delta = 1e-3
"""
SETTINGS = {
    "covered": {"privacy": COVERED, "encoders": FREE},
    "sgd": {"batch_size": 5, "num_epochs": 1},
    # enough draws to meet the three rows that the shop's policy asks for
    "coreset": {"coreset_size": 60, "num_epochs": 1},
}
KEPT = (
    "SELECT id, run, name, meta, layout, checksum, data FROM entries ORDER BY id",
    "SELECT seq, checksum, line FROM ledger ORDER BY seq",
)
CHANGING = (
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "write",
    "fsync",
    "fdatasync",
)


def bytes_of(message: Message) -> bytes:
    content = message.content
    return recorddict_to_proto(content).SerializeToString(deterministic=True)


def saying(packet: Packet, **header: object) -> Packet:
    """A request that says something else."""
    return Packet({**packet.header, **header}, packet.arrays)


class Sites(HostileGrid):
    """Sites that remember, by node, the requests that they got and their replies.

    ``before`` is called with the grid and every message before it is delivered.
    """

    def __init__(self, folder: Path, before=None, policies=None):
        super().__init__(folder, policies=policies)
        self.before = before or (lambda *_: None)
        self.asked: dict[int, list[tuple[Message, Message]]] = {}

    def ask(self, message: Message, packet=None, action="") -> Message:
        if packet is None:
            return LocalGrid._deliver(self, message)
        return LocalGrid._deliver(self, like(message, pack(packet), action))

    def answer(self, message: Message, packet=None, action="") -> Packet:
        return unpack(self.ask(message, packet, action).content)

    def _deliver(self, message):
        self.before(self, message)
        reply = self.ask(message)
        own = self.asked.setdefault(message.metadata.dst_node_id, [])
        own.append((message, reply))
        return reply

    def database(self, node) -> Path:
        return self.state_dir(node) / FILE

    def committed(self, node) -> list[tuple]:
        """The committed round of the run at a site, and its reply."""
        run = self.site(node).store.run
        return [row for row in committed_rows(self.database(node)) if row[0] == run]

    def kept(self, node) -> tuple:
        """All that the site has, but for when it was used last."""
        paths = [path for path in self.state_dir(node).rglob("*") if path.is_file()]
        files = {p: p.read_bytes() for p in paths if not p.name.startswith(FILE)}
        return files, *(rows_in(self.database(node), query) for query in KEPT)


def spent(grid) -> dict[int, list[tuple]]:
    """What each site's ledger says of the run: what, and how often it was used."""
    ledgers = {
        node: Ledger(str(grid.state_dir(node))).lines(grid.site(node).store.run)
        for node in grid.contexts
    }
    keys = ("part", "what")
    return {
        node: [
            (line["event"], line.get("used"), *(line["release"][key] for key in keys))
            for line in lines
        ]
        for node, lines in ledgers.items()
    }


def run(folder: Path, kind: str, grid_class=Sites, before=None, **settings):
    folder.mkdir(exist_ok=True)
    grid = grid_class(folder, before)
    method = "sgd" if kind == "sgd" else "admm"
    return grid, train(grid, method, **{**SETTINGS[kind], **settings})


@pytest.fixture(scope="module")
def check_as_plain(tmp_path_factory):
    """Assert that a run paid, and learnt, as the same run where nothing happens."""
    plain = {}

    def check(grid, strategy, kind, **settings):
        key = (kind, *settings.items())
        if key not in plain:
            folder = tmp_path_factory.mktemp("plain")
            undisturbed, expected = run(folder, kind, **settings)
            plain[key] = spent(undisturbed), expected.report.final_train
        payments, final = plain[key]
        assert spent(grid) == payments
        if kind == "sgd":  # in the others sites draw anew
            assert strategy.report.final_train == pytest.approx(final, rel=1e-9)

    return check


class Twice(Sites):
    """A network that delivers every message twice, and some that nobody has sent."""

    actions: set[str]

    def _deliver(self, message):
        node = message.metadata.dst_node_id
        packet = unpack(message.content)
        first = super()._deliver(message)
        if message.metadata.message_type == Action.DESCRIBE:
            return first
        before = self.kept(node)
        forget_processes()
        assert bytes_of(self.ask(message)) == bytes_of(first)
        number = packet.header["round"]
        place = {key: packet.header.get(key) for key in ("run", "round", "after")}
        other = Packet({**place, "model-name": "another"})
        answer = self.answer(message, other, Action.FINISH)
        assert answer.header["error"].endswith("of this run to another request")
        for what, kind, at in (
            (saying(packet, round=number - 1, after=None), "refused", None),
            (saying(packet, round=number + 9, after=number + 4), "behind", number),
        ):
            is_end = message.metadata.message_type == Action.FINISH
            if kind == "behind" and is_end and not packet.header.get("keep-models"):
                continue  # it may come at any time
            answer = self.answer(message, what)
            assert answer.header["kind"] == ("refused" if is_end else kind)
            assert answer.header.get("at") == (None if is_end else at)
            assert not answer.arrays
        assert self.kept(node) == before
        assert not len(self.contexts[node].state)
        self.actions = {*getattr(self, "actions", ()), message.metadata.message_type}
        return first


@pytest.mark.cases("covered")
@pytest.mark.parametrize("kind", ["covered", "sgd", "coreset"])
def test_a_message_that_comes_twice_is_answered_once(tmp_path, check_as_plain, kind):
    grid, strategy = run(tmp_path, kind, Twice)
    check_as_plain(grid, strategy, kind)
    own = {Action.SEAL, Action.EXTRACT, Action.STATISTICS, Action.FINISH}
    sgd = {TRAIN_SGD, TRAIN_STEP}
    admm = {TRAIN_ADMM, Action.CONSENSUS}
    assert grid.actions >= {*own, Action.PREPARE, *(sgd if kind == "sgd" else admm)}
    drawing = {TRAIN_MEASURE, TRAIN_DRAW, TRAIN_WEIGH}
    assert grid.actions & drawing == (drawing if kind == "coreset" else set())


def test_what_a_run_of_mode_explain_asks_is_answered_once(tmp_path):
    grid = Twice(tmp_path)
    train(grid, Explain)
    assert Action.STATISTICS in grid.actions


def at_first(action, do, node=US):
    """Let something happen before a site is first asked for an action."""
    happened = []

    def before(grid, message):
        metadata = message.metadata
        is_it = (metadata.message_type, metadata.dst_node_id) == (action, node)
        if is_it and not happened:
            happened.append(True)
            do(grid, message)

    return before


def train_covered(folder, before):
    grid = Sites(folder, before, {"customers": BUDGET})
    train(grid, **SETTINGS["covered"], num_epochs=1)


def entries_of_run(grid, query, *values):
    """Find or change, by a query that ends before the run's name, a site's entries."""
    forget_processes()
    run = grid.site(US).store.run
    return rows_in(grid.database(US), f"{query} AND run = ?", *values, run)


def lose(change):
    """Change the rows of the committed round and its reply, by column."""
    return lambda grid: entries_of_run(grid, f"{change} WHERE {COMMITTED}")


def damage(name, column):
    """Change one byte in the middle of a row."""

    def change_it(grid):
        query = f"SELECT {column} FROM entries WHERE name = ?"
        ((text,),) = entries_of_run(grid, query, name)
        changed = (
            flipped(text) if isinstance(text, bytes) else text.replace("e", "f", 1)
        )
        assert changed != text
        query = f"UPDATE entries SET {column} = ? WHERE name = ?"
        entries_of_run(grid, query, changed, name)

    return change_it


LOSSES = {
    "gone": lose("DELETE FROM entries"),
    "empty": lose("UPDATE entries SET data = x''"),
    "cut": lose("UPDATE entries SET data = substr(data, 1, length(data) - 1)"),
    "its description": damage(".round", "meta"),
    "its layout": damage(".round", "layout"),
    "its numbers": damage(".round", "data"),
    "of another run": lose("UPDATE entries SET run = 'f' || run"),
    "no model": lambda grid: rows_in(
        grid.database(US), "DELETE FROM entries WHERE name = 'part-2'"
    ),
    "no features": lambda grid: shutil.rmtree(grid.state_dir(US) / "cache"),
}


def test_a_site_that_lost_its_state_is_told_all_again(tmp_path):
    """It then says, noise and all, what it has said before, and pays for it once."""

    def lose(grid, _):
        asked = grid.asked[US][1:]
        last, _ = asked[-1]
        number = unpack(last.content).header["round"]
        request = saying(unpack(last.content), round=number + 1, after=number)
        before = spent(grid)
        for what, loses in LOSSES.items():
            loses(grid)
            forget_processes()
            answer = grid.answer(last, request)
            assert answer.header["kind"] == "behind", (what, answer.header)
            assert "at" not in answer.header
            for message, reply in asked:
                assert_same(grid.answer(message), unpack(reply.content))
            assert spent(grid) == before
            lost.append(what)

    lost = []
    train_covered(tmp_path, at_first(Action.CONSENSUS, lose))
    assert lost == list(LOSSES)


def assert_same(again: Packet, first: Packet):
    for packet in (again, first):
        del packet.header["seconds"]
        # a ledger has grown since
        packet.header.pop("ledger", None)
        packet.header.pop("ledger-end", None)
    assert again.header == first.header
    assert again.arrays.keys() == first.arrays.keys()
    for key, array in first.arrays.items():
        np.testing.assert_array_equal(again.arrays[key], array)


def test_a_damaged_reply_is_not_sent(tmp_path):
    answers = []

    def lose(grid, _):
        damage(".reply", "data")(grid)
        message, _ = grid.asked[US][-1]
        answers.append(grid.answer(message))

    with pytest.raises(SiteError, match="us"):
        train_covered(tmp_path, at_first(Action.CONSENSUS, lose))
    (answer,) = answers
    assert answer.header["kind"] == "behind"
    assert "at" not in answer.header
    assert "reply of the last round is damaged" in answer.header["error"]


def restore_old(take, put, check):
    """Put a copy of a site's state, two rounds old, in its place, and call
    ``check``.
    """
    copies = []

    def restore(grid, message):
        copy = message.metadata.dst_node_id == US and take(grid)
        if not copy:
            return
        copies.append(copy)
        if len(copies) == 7:
            forget_processes()
            put(grid, copies[4])
            check(grid, message)

    return restore


def test_a_state_that_was_restored_from_a_copy_is_behind(tmp_path, check_as_plain):
    restored = []

    def put(grid, rows):
        restored.append([row[:2] for row in grid.committed(US)])
        for row in rows:
            change_row(grid.database(US), row, row[-1])

    def check(grid, message):
        answer = grid.answer(message)
        asked = grid.asked[US]
        assert answer.header["kind"] == "behind"
        assert answer.header["at"] == unpack(asked[-3][0].content).header["round"]
        for earlier, reply in asked[-2:]:
            assert_same(grid.answer(earlier), unpack(reply.content))
        assert [row[:2] for row in grid.committed(US)] == restored[0]

    before = restore_old(lambda grid: grid.committed(US), put, check)
    grid, strategy = run(tmp_path, "covered", before=before)
    assert restored
    check_as_plain(grid, strategy, "covered")


def test_a_database_that_was_restored_from_a_copy_answers_nothing(tmp_path):
    """Its ledger has forgotten what was spent since, and its masks what they have
    hidden.
    """
    answers = []

    def take(grid):
        close_databases()
        path = grid.database(US)
        return path.exists() and path.read_bytes()

    def put(grid, data):
        grid.database(US).write_bytes(data)

    def check(grid, message):
        before = grid.kept(US)
        answers.extend(
            grid.answer(own) for own, _ in [*grid.asked[US], (message, None)]
        )
        assert grid.kept(US) == before

    with pytest.raises(
        SiteError, match=r"'us'.* failed: the site's database site.db is behind"
    ):
        run(tmp_path, "covered", before=restore_old(take, put, check))
    assert len(answers) == 8
    for answer in answers:
        assert answer.header["kind"] == "refused"
        assert "behind site.counter: it is an older copy" in answer.header["error"]
        assert not answer.arrays


class KilledError(BaseException):
    """The process is no more."""


@contextmanager
def killed_at(point: int):
    """Kill the process at a call that changes files: before it, or after it.

    From then on no such call is possible. Yields a list of how many there were.
    """
    calls = [0]

    def patched(real):
        @wraps(real)
        def function(*arguments, **options):
            calls[0] += 1
            done = calls[0] - 1
            if done == point and point % 2:
                real(*arguments, **options)
            if done >= point:
                raise KilledError
            return real(*arguments, **options)

        return function

    class Connection(sqlite3.Connection):
        """Of a process that may be killed at any statement."""

    for name in ("execute", "executemany", "executescript"):
        setattr(Connection, name, patched(getattr(sqlite3.Connection, name)))
    connect = partial(sqlite3.connect, factory=Connection)
    with pytest.MonkeyPatch.context() as changes:
        for name in CHANGING:
            changes.setattr(f"os.{name}", patched(getattr(os, name)))
        changes.setattr("tp_flower.database.sqlite3.connect", connect)
        forget_processes()
        try:
            yield calls
        finally:
            forget_processes()


class Killed(Sites):
    """Sites whose process is killed at many places of every message.

    Attributes:
        kills: by action, how often.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kills: dict[str, int] = {}

    def _deliver(self, message):
        point = 0
        action = message.metadata.message_type
        while True:
            try:
                with killed_at(point):
                    reply = super()._deliver(message)
            except KilledError:
                self.kills[action] = self.kills.get(action, 0) + 1
                # all of the last calls of a short message, some of a long one's
                point += 1 if point < 6 else 17
            else:
                return reply


@pytest.mark.cases("covered")
@pytest.mark.parametrize("kind", ["covered", "sgd"])
def test_wherever_a_site_is_killed_the_same_message_does_it_all(
    tmp_path, check_as_plain, kind
):
    grid, strategy = run(tmp_path, kind, Killed, num_epochs=1)
    check_as_plain(grid, strategy, kind, num_epochs=1)
    assert min(grid.kills.values()) >= 5
    # a query that was begun many times was answered, and counts, once
    for node in grid.contexts:
        query = "SELECT part FROM ledger WHERE event IN ('answer', 'refuse')"
        assert len(rows_in(grid.database(node), query)) == 1
    assert not {
        name for node in grid.contexts for name in grid.site(node).store.names()
    }


def test_a_model_that_is_not_finite_stays_as_it_was(tmp_path, monkeypatch):
    def overflow(shard, *_):
        shard.model.parameters = np.full_like(shard.model.parameters, np.nan)

    def diverge(grid, message):
        before = grid.kept(SHOP)
        with monkeypatch.context() as broken:
            broken.setattr(sgd, "take_step", overflow)
            seen.append(grid.answer(message))
        # but for the request that the site answers before any other of the run
        files, entries, lines = grid.kept(SHOP)
        others = [row for row in entries if row[2] != STOPPED]
        assert (files, others, lines) == before
        assert len(entries) == len(others) + 1

    seen = []
    # the same request is answered, as it does not diverge here; no other one is
    with pytest.raises(
        SiteError, match="has refused a request of this run because of its rows"
    ):
        run(tmp_path, "sgd", before=at_first(TRAIN_SGD, diverge, SHOP))
    (answer,) = seen
    assert answer.header["kind"] == "diverged"
    assert "table o: the model is no longer finite" in answer.header["error"]
    assert answer.header["part"] == 0
    assert not answer.arrays


def test_messages_that_come_at_once_are_answered_one_after_the_other(
    tmp_path, check_as_plain
):
    class AtOnce(Sites):
        def _deliver(self, message):
            if message.metadata.message_type != TRAIN_ADMM:
                return super()._deliver(message)
            with ThreadPoolExecutor(4) as pool:
                replies = list(pool.map(lambda _: self.ask(message), range(4)))
            assert len({bytes_of(reply) for reply in replies}) == 1
            return replies[0]

    grid, strategy = run(tmp_path, "covered", AtOnce)
    check_as_plain(grid, strategy, "covered")


# what else an envelope cannot be is in tests/unit/protocol/test_messages.py
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"run": None}, "'run' is None; allowed: `str`"),
        ({"run": "../" + "a" * 29}, "allowed: `str`"),
        ({"run": "a" * 32 + "\n"}, "allowed: `str`"),
        ({"run": "0" * 32}, f"'run' is '{'0' * 32}', which is not a run"),
        ({"round": True}, "'round' is True; allowed: `int"),
        ({"round": 3, "after": 3}, "'after' is 3, but must be below 'round', 3"),
    ],
)
def test_a_message_of_no_run_or_round_is_refused(tmp_path, changes, match):
    grid = Sites(tmp_path)
    answer = grid.answer(finish_message(**changes))
    assert match in answer.header["error"]
    assert answer.header["kind"] == "refused"
    assert not grid.state_dir(US).exists()
    grid.close()


def finish_message(**header):
    packet = Packet({"run": "ab" * 16, "round": 7, "after": 5, **header})
    return Message(pack(packet), dst_node_id=US, message_type=Action.FINISH)


def test_the_end_of_a_run_that_nobody_knows_leaves_nothing(tmp_path):
    grid = Sites(tmp_path)
    answer = grid.answer(finish_message())
    assert (answer.header["round"], answer.header["ledger"]) == (7, [])
    assert not list(grid.state_dir(US).glob("ab*"))
    grid.close()


def test_what_is_asked_again_in_memory_is_answered_once():
    class Again(LocalGrid):
        def _deliver(self, message):
            first = super()._deliver(message)
            if message.metadata.message_type != Action.DESCRIBE:
                assert bytes_of(super()._deliver(message)) == bytes_of(first)
            return first

    first, second = (
        train(grid_class(tables()), "sgd", **SETTINGS["sgd"]).report
        for grid_class in (Again, LocalGrid)
    )
    assert first.final_train == second.final_train
