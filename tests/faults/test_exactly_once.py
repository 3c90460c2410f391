"""Every round of a run happens once at a site, whatever becomes of messages and files.

The sites are those of ``hostile``: tables files with policies, and state on disk. A
*kill* is an exception that nothing catches, at any call that changes a file, after
which the process has forgotten all that it had read.
"""

import os
import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message
from flwr.common.serde import recorddict_to_proto

from client_apps.app import app
from client_apps.data.database import FILE, close_databases
from client_apps.data.ledger import Ledger
from client_apps.operator.participant import Participant
from client_apps.rounds.site import Site
from strategies import TablePuppetADMM, TablePuppetSGD
from strategies.explain.explanation import Explain
from strategies.run.grid import InProcessGrid
from tests.support.peers.faulty_grid import (
    COMMITTED,
    HOOKS,
    Fault,
    change_row,
    committed_rows,
    flipped,
    forget_processes,
    rows_in,
)
from tests.support.peers.hostile import SHOP, US, HostileGrid, tables, train
from tp_flower.errors import SiteError
from tp_flower.protocol.packet import Action, Packet, pack, unpack
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
    "coreset": {"coreset_size": 8, "num_epochs": 1},
}
Change = Callable[[Packet], Packet]


def bytes_of(message: Message) -> bytes:
    content = message.content
    return recorddict_to_proto(content).SerializeToString(deterministic=True)


def told(packet: Packet, **header: object) -> Packet:
    """A request that says something else."""
    return Packet({**packet.header, **header}, packet.arrays)


class Sites(HostileGrid):
    """Sites that remember what they were asked.

    Args:
        folder: of their files.
        policies: by table.

    Attributes:
        asked: by node, the requests in order and their replies.
    """

    def __init__(self, folder: Path, policies=None):
        super().__init__(folder, policies=policies)
        self.asked: dict[int, list[tuple[Message, Message]]] = {}

    def ask(self, message: Message, packet: Packet | None = None) -> Message:
        """Return the reply to a request, or to one that says something else."""
        if packet is None:
            return InProcessGrid._deliver(self, message)
        changed = Message(pack(packet), dst_node_id=SHOP, message_type="query")
        changed.metadata.__dict__.update(message.metadata.__dict__)
        return InProcessGrid._deliver(self, changed)

    def answer(self, message: Message, packet: Packet | None = None) -> Packet:
        return unpack(self.ask(message, packet).content)

    def _deliver(self, message):
        reply = self.ask(message)
        own = self.asked.setdefault(message.metadata.dst_node_id, [])
        own.append((message, reply))
        return reply

    def site(self, node) -> Site:
        return Site(self.contexts[node], self.run_name)

    def state_dir(self, node) -> Path:
        return Path(self.contexts[node].node_config["state-dir"])

    def database(self, node) -> Path:
        return self.state_dir(node) / FILE

    def committed(self, node) -> list[tuple]:
        """The committed round of the run at a site, and its reply."""
        run = self.site(node).store.run
        return [row for row in committed_rows(self.database(node)) if row[0] == run]

    def kept(self, node) -> dict[str, object]:
        """All that the site has, but for when it was used last."""
        files = {
            path.relative_to(self.state_dir(node)).as_posix(): path.read_bytes()
            for path in sorted(self.state_dir(node).rglob("*"))
            if path.is_file() and not path.name.startswith(FILE)
        }
        path = self.database(node)
        columns = "id, run, name, meta, layout, checksum, data"
        entries = f"SELECT {columns} FROM entries ORDER BY id"
        lines = "SELECT seq, checksum, line FROM ledger ORDER BY seq"
        return {
            **files,
            "entries": rows_in(path, entries),
            "ledger": rows_in(path, lines),
        }


def spent(grid) -> dict[int, list[tuple]]:
    """What each site's ledger says of the run: what, and how often it was used."""
    found = {}
    for node in grid.contexts:
        site = grid.site(node)
        found[node] = [
            (own["event"], own["release"]["part"], own["release"]["what"], own["used"])
            if "used" in own
            else (own["event"], own["release"]["part"], own["release"]["what"])
            for own in Ledger(str(grid.state_dir(node))).lines(site.store.run)
        ]
    return found


def run(folder: Path, kind: str, grid_class=Sites, **settings):
    """Train in one of the ways; return the grid and the strategy."""
    folder.mkdir(exist_ok=True)
    grid = grid_class(folder)
    method = TablePuppetSGD if kind == "sgd" else TablePuppetADMM
    return grid, train(grid, method, **{**SETTINGS[kind], **settings})


# the same message twice, and others that look like it


class Twice(Sites):
    """A network that delivers every message twice, and some that nobody has sent."""

    actions: set[str]

    def _deliver(self, message):
        node, packet = message.metadata.dst_node_id, unpack(message.content)
        first = super()._deliver(message)
        if message.metadata.message_type == Action.DESCRIBE:
            return first
        before = self.kept(node)
        forget_processes()
        assert bytes_of(self.ask(message)) == bytes_of(first)
        number = packet.header["round"]
        for what, kind, at in (
            (told(packet, more=1), "refused", None),
            (told(packet, round=number - 1, after=None), "refused", None),
            (told(packet, round=number + 9, after=number + 4), "behind", number),
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


@pytest.mark.parametrize("kind", ["covered", "sgd", "coreset"])
def test_a_message_that_comes_twice_is_answered_once(tmp_path, kind):
    grid, strategy = run(tmp_path / "twice", kind, Twice)
    plain, expected = run(tmp_path / "plain", kind)
    assert spent(grid) == spent(plain)
    if kind == "sgd":  # in the others sites draw anew
        assert strategy.report.final_train == pytest.approx(
            expected.report.final_train, rel=1e-9
        )
    own = {Action.SEAL, Action.EXTRACT, Action.STATISTICS, Action.FINISH}
    sgd, admm = {Action.SGD, Action.STEP}, {Action.ADMM, Action.CONSENSUS}
    assert grid.actions >= {*own, Action.PREPARE, *(sgd if kind == "sgd" else admm)}
    drawing = {Action.MEASURE, Action.DRAW, Action.WEIGH}
    assert grid.actions & drawing == (drawing if kind == "coreset" else set())


def test_what_a_run_of_mode_explain_asks_is_answered_once(tmp_path):
    grid = Twice(tmp_path)
    train(grid, Explain)
    assert Action.CHECK in grid.actions


# state that is lost, damaged or restored


class Losing(Sites):
    """Sites of which one loses something before it is asked for a certain action.

    Args:
        folder: of their files.
        action: before which it happens, at the site in the USA.
        lose: what happens, called with the grid.
    """

    def __init__(self, folder, action, lose):
        super().__init__(folder, {"customers": BUDGET})
        self.action, self.lose = action, lose

    def _deliver(self, message):
        metadata = message.metadata
        if (metadata.message_type, metadata.dst_node_id) == (self.action, US):
            self.lose(self)
            self.action = ""
        return super()._deliver(message)


def lose(change):
    """Change the rows of the committed round and its reply, by column."""

    def change_them(grid):
        forget_processes()
        run, path = grid.site(US).store.run, grid.database(US)
        rows_in(path, f"{change} WHERE run = ? AND {COMMITTED}", run)

    return change_them


def damage(name, column):
    """Change one byte in the middle of a row."""

    def change_it(grid):
        forget_processes()
        run, path = grid.site(US).store.run, grid.database(US)
        query = f"SELECT {column} FROM entries WHERE run = ? AND name = ?"
        ((text,),) = rows_in(path, query, run, name)
        changed = (
            flipped(text) if isinstance(text, bytes) else text.replace("e", "f", 1)
        )
        assert changed != text
        query = f"UPDATE entries SET {column} = ? WHERE run = ? AND name = ?"
        rows_in(path, query, changed, run, name)

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

    def lose(grid):
        asked = grid.asked[US][1:]
        last, _ = asked[-1]
        number = unpack(last.content).header["round"]
        request = told(unpack(last.content), round=number + 1, after=number)
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

    lost: list[str] = []
    grid = Losing(tmp_path, Action.CONSENSUS, lose)
    train(grid, **SETTINGS["covered"], num_epochs=1)
    assert lost == list(LOSSES)


def assert_same(again: Packet, first: Packet):
    for packet in (again, first):
        del packet.header["seconds"]
        # a ledger's account has grown since
        packet.header.pop("ledger", None)
    assert again.header == first.header
    assert again.arrays.keys() == first.arrays.keys()
    for key, array in first.arrays.items():
        np.testing.assert_array_equal(again.arrays[key], array)


def test_a_damaged_reply_is_not_sent(tmp_path):
    answers = []

    def lose(grid):
        damage(".reply", "data")(grid)
        message, _ = grid.asked[US][-1]
        answers.append(grid.answer(message))

    grid = Losing(tmp_path, Action.CONSENSUS, lose)
    with pytest.raises(SiteError, match="us"):
        train(grid, **SETTINGS["covered"], num_epochs=1)
    (answer,) = answers
    assert answer.header["kind"] == "behind"
    assert "at" not in answer.header
    assert "reply of the last round is damaged" in answer.header["error"]


def test_a_state_that_was_restored_from_a_copy_is_behind(tmp_path):
    copies: list[list[tuple]] = []

    class Restoring(Sites):
        def _deliver(self, message):
            path, asked = self.database(US), self.asked.get(US, [])
            if message.metadata.dst_node_id != US or not self.committed(US):
                return super()._deliver(message)
            copies.append(self.committed(US))
            if len(copies) == 6:
                forget_processes()
                for row in copies[3]:
                    change_row(path, row, row[-1])
                numbers = [unpack(m.content).header["round"] for m, _ in asked]
                answer = self.answer(message)
                assert (answer.header["kind"], answer.header["at"]) == (
                    "behind",
                    numbers[-3],
                )
                for earlier, reply in asked[-2:]:
                    assert_same(self.answer(earlier), unpack(reply.content))
                again = [row[:2] for row in self.committed(US)]
                assert again == [row[:2] for row in copies[-1]]
            return super()._deliver(message)

    run(tmp_path, "covered", Restoring)
    assert len(copies) > 6


def test_a_database_that_was_restored_from_a_copy_is_behind(tmp_path):
    """Its ledger is as old as its state: what is said again is paid for again there."""
    copies: list[bytes] = []

    class Restoring(Sites):
        def _deliver(self, message):
            if message.metadata.dst_node_id != US or not self.database(US).exists():
                return super()._deliver(message)
            close_databases()
            copies.append(self.database(US).read_bytes())
            if len(copies) == 6:
                self.database(US).write_bytes(copies[3])
                forget_processes()
                answer = self.answer(message)
                assert answer.header["kind"] == "behind"
                for earlier, reply in self.asked[US][-2:]:
                    assert_same(self.answer(earlier), unpack(reply.content))
            return super()._deliver(message)

    grid, _ = run(tmp_path / "restored", "covered", Restoring)
    plain, _ = run(tmp_path / "plain", "covered")
    assert len(copies) > 6
    assert spent(grid) == spent(plain)


# kills


class KilledError(BaseException):
    """The process is no more."""


CHANGING = ("mkdir", "rename", "replace", "unlink", "rmdir", "write", "fsync")


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

    def __init__(self, folder, policies=None):
        super().__init__(folder, policies)
        self.kills: dict[str, int] = {}

    def _deliver(self, message):
        point, action = 0, message.metadata.message_type
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


@pytest.mark.parametrize("kind", ["covered", "sgd"])
def test_wherever_a_site_is_killed_the_same_message_does_it_all(tmp_path, kind):
    grid, strategy = run(tmp_path / "killed", kind, Killed, num_epochs=1)
    plain, expected = run(tmp_path / "plain", kind, num_epochs=1)
    assert spent(grid) == spent(plain)
    if kind == "sgd":  # in the others sites draw anew
        assert strategy.report.final_train == pytest.approx(
            expected.report.final_train, rel=1e-9
        )
    assert min(grid.kills.values()) >= 5
    assert not {
        name for node in grid.contexts for name in grid.site(node).store.names()
    }


# what else may go wrong


def test_a_full_disk_is_over_some_time(tmp_path):
    """The site says so, nothing has happened, and the same message does it all."""

    class Full(Sites):
        def _deliver(self, message):
            if message.metadata.message_type == Action.CONSENSUS and not seen:
                seen.append(self.site(US).store.last().number)
                with HOOKS[Fault.DISK_FULL]():
                    answer = self.answer(message)
                assert answer.header["kind"] == "transient"
                assert "No space left" in answer.header["error"]
                assert self.site(US).store.last().number == seen[0]
            return super()._deliver(message)

    seen: list[int] = []
    grid, _ = run(tmp_path / "full", "covered", Full, num_epochs=1)
    plain, _ = run(tmp_path / "plain", "covered", num_epochs=1)
    assert seen
    assert spent(grid) == spent(plain)


def test_a_model_that_is_not_finite_stays_as_it_was(tmp_path, monkeypatch):
    class Diverging(Sites):
        def _deliver(self, message):
            if message.metadata.message_type == Action.SGD and not seen:
                node = message.metadata.dst_node_id
                before = self.kept(node)
                with monkeypatch.context() as broken:
                    broken.setattr(Participant, "step", overflow)
                    seen.append(self.answer(message))
                assert self.kept(node) == before
            return super()._deliver(message)

    def overflow(shard, *_):
        shard.model.parameters = np.full_like(shard.model.parameters, np.nan)

    seen: list[Packet] = []
    run(tmp_path, "sgd", Diverging)
    (answer,) = seen
    assert answer.header["kind"] == "diverged"
    assert "table o: the model is not finite any more" in answer.header["error"]
    assert answer.header["part"] == 0
    assert not answer.arrays


def test_messages_that_come_at_once_are_answered_one_after_the_other(tmp_path):
    class AtOnce(Sites):
        def _deliver(self, message):
            if message.metadata.message_type != Action.ADMM:
                return super()._deliver(message)
            with ThreadPoolExecutor(4) as pool:
                replies = list(pool.map(lambda _: self.ask(message), range(4)))
            assert len({bytes_of(reply) for reply in replies}) == 1
            return replies[0]

    grid, _ = run(tmp_path / "at-once", "covered", AtOnce)
    plain, _ = run(tmp_path / "plain", "covered")
    assert spent(grid) == spent(plain)


RUN_FORM = "allowed: `str`"
ROUND_FORM = "allowed: `int"
ENVELOPES = {
    "no run": ({"run": None}, f"'run' is None; {RUN_FORM}"),
    "a path": ({"run": "../" + "a" * 29}, RUN_FORM),
    "a line": ({"run": "a" * 32 + "\n"}, RUN_FORM),
    "upper case": ({"run": "A" * 32}, RUN_FORM),
    "no run's": ({"run": "0" * 32}, f"'run' is '{'0' * 32}', which names none"),
    "no round": ({"round": None}, f"'round' is None; {ROUND_FORM}"),
    "below 0": ({"round": -1}, f"'round' is -1; {ROUND_FORM}"),
    "a float": ({"round": 1.0}, f"'round' is 1.0; {ROUND_FORM}"),
    "a truth": ({"round": True}, f"'round' is True; {ROUND_FORM}"),
    "itself": ({"round": 3, "after": 3}, "'after' is 3, but must be below 'round', 3"),
    "text": ({"after": "1"}, f"'after' is '1'; {ROUND_FORM}"),
}


@pytest.mark.parametrize("what", ENVELOPES)
def test_a_message_of_no_run_or_round_is_refused(tmp_path, what):
    changes, match = ENVELOPES[what]
    grid = Sites(tmp_path)
    header = {"run": "ab" * 16, "round": 1, "after": None, **changes}
    message = Message(pack(Packet(header)), dst_node_id=US, message_type=Action.FINISH)
    answer = grid.answer(message)
    assert match in answer.header["error"]
    assert answer.header["kind"] == "refused"
    assert not grid.state_dir(US).exists()
    grid.close()


def test_the_end_of_a_run_that_nobody_knows_leaves_nothing(tmp_path):
    grid = Sites(tmp_path)
    header = {"run": "ab" * 16, "round": 7, "after": 5}
    message = Message(pack(Packet(header)), dst_node_id=US, message_type=Action.FINISH)
    answer = grid.answer(message)
    assert (answer.header["round"], answer.header["ledger"]) == (7, [])
    assert not list(grid.state_dir(US).glob("ab*"))
    grid.close()


def test_what_is_asked_again_in_memory_is_answered_once():
    class Again(InProcessGrid):
        def _deliver(self, message):
            first = super()._deliver(message)
            if message.metadata.message_type != Action.DESCRIBE:
                assert bytes_of(super()._deliver(message)) == bytes_of(first)
            return first

    strategies = []
    for grid_class in (Again, InProcessGrid):
        grid = grid_class(app, tables())
        strategies.append(train(grid, TablePuppetSGD, num_epochs=1, batch_size=5))
    first, second = strategies
    assert first.report.final_train == second.report.final_train
