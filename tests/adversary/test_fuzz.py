"""Malformed messages, many of them: a site refuses each, and is as it was before."""

import logging
import os
import sqlite3
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from client_apps.data.key_files import ROW_ORDER_KEY
from strategies import (
    CoresetKMeans,
    Explain,
    Personalised,
    TablePuppetADMM,
    TablePuppetSGD,
)
from strategies.inference.manifest import make_manifest
from strategies.inference.predict import Predict
from strategies.run.grid import InProcessGrid
from strategies.run.strategy import RoundStrategy
from tests.support.peers.fuzzing import MARK, Fuzzer
from tests.support.peers.hostile import SHOP, SQL, HostileGrid, train
from tp_flower.protocol.messages import EXCHANGES, RUN_DIGITS
from tp_flower.protocol.packet import HEADER, MESSAGE, Action, unpack
from tp_flower.query import Query

ENOUGH = 10_000
MOST_BYTES = 1 << 25
"""No message that is sent is as large: nor may anything be that is made of one."""

SAID = {"error", "part", "kind", "at", "round"}
"""What a refusal may say."""

DATABASE, LOCK = "site.db", ".lock"
ENTRY = "id, run, name, touched, meta, layout, checksum, data"
READ = ("cache", ROW_ORDER_KEY)
"""Where a refused request may leave the rows that it has read."""

Files = dict[Path, bytes]


def files(folder: Path) -> Iterator[Path]:
    """The files of a site beside its database, but for locks."""
    found = (path for path in folder.rglob("*") if path.name != LOCK)
    return (path for path in found if path.is_file() and not is_database(path.name))


def is_database(name: str) -> bool:
    return name.startswith(DATABASE)


class Rows:
    """The rows of a site's database, to be compared and put back.

    Args:
        folder: of the site; without a database it has no rows.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / DATABASE
        self._rows = self._read()

    def check(self, what: object) -> None:
        assert self._read() == self._rows, what

    def restore(self) -> None:
        """Put the entries back; the ledger only grows."""
        if not self._path.exists():
            return
        marks = ", ".join("?" * len(ENTRY.split(",")))
        with closing(sqlite3.connect(self._path)) as database, database:
            database.execute("DELETE FROM entries")
            insert = f"INSERT INTO entries ({ENTRY}) VALUES ({marks})"
            database.executemany(insert, self._rows[0])
        self._rows = self._read()

    def _read(self) -> tuple[list, list]:
        if not self._path.exists():
            return [], []
        with closing(sqlite3.connect(self._path)) as database:
            entries = database.execute(f"SELECT {ENTRY} FROM entries ORDER BY id")
            ledger = database.execute("SELECT seq, line FROM ledger ORDER BY seq")
            return entries.fetchall(), ledger.fetchall()


def traces(folder: Path) -> dict[str, tuple[int, int]]:
    """What tells, without reading it, that a file of a site was written."""
    found, folders = {}, [str(folder)] if folder.exists() else []
    for name in folders:
        with os.scandir(name) as entries:
            for entry in entries:
                if entry.name in (*READ, LOCK) or is_database(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    status = entry.stat(follow_symlinks=False)
                    found[entry.path] = status.st_size, status.st_mtime_ns
    return found


def text_of(content: RecordDict) -> str:
    """The text of a message's header, if it has one."""
    record = content.get(MESSAGE)
    return str(record.get(HEADER)) if isinstance(record, ConfigRecord) else ""


class Kept:
    """What a site keeps, to be compared, and put back after a good request.

    Args:
        context: of the site.
    """

    def __init__(self, context: Context) -> None:
        self.folder = Path(str(context.node_config["state-dir"]))
        self._files = {path: path.read_bytes() for path in files(self.folder)}
        self._seen = traces(self.folder)
        self._rows = Rows(self.folder)

    def check(self, what: object, content: RecordDict) -> None:
        """Assert that a mutant has changed nothing.

        A round in progress may have begun entries of the run that the mutant names,
        which nobody sees until it is committed: they are taken away.
        """
        self._rows.check(what)
        now = traces(self.folder)
        if now == self._seen:
            return
        for path in {Path(name) for name, _ in now.items() ^ self._seen.items()}:
            place = path.relative_to(self.folder).parts
            run = place[0][:RUN_DIGITS]
            is_begun = run in text_of(content) and len(run) == RUN_DIGITS
            is_begun = is_begun and len(place) > 2
            assert is_begun, (what, path)
            assert path not in self._files, (what, path)
        self.restore()

    def restore(self) -> None:
        """Put it back; the ledger only grows."""
        for path in list(files(self.folder)):
            if path not in self._files:
                path.unlink()
                with suppress(OSError):  # there are others in it
                    path.parent.rmdir()
        for path, data in self._files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
        self._rows.restore()
        self._seen = traces(self.folder)

    def check_content(self) -> None:
        """Assert that the files are the same, byte for byte."""
        for path, data in self._files.items():
            assert path.read_bytes() == data, path


class FuzzingGrid(HostileGrid):
    """Send mutants of the first request of each kind before the request itself.

    Args:
        folder: for the sites' files.
        rng: makes the mutants.
        counts: by action, how many are to be refused.

    Attributes:
        refused: how many of each action were.
        accepted: how many were good requests again.
    """

    def __init__(self, folder: Path, rng: np.random.Generator, counts: dict) -> None:
        super().__init__(folder)
        self._fuzzer = Fuzzer(rng, folder)
        self._counts = dict(counts)
        self.refused: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()

    def _deliver(self, message: Message) -> Message:
        action, node = message.metadata.message_type, message.metadata.dst_node_id
        # the shop is asked first; the others have parts of a sharded table
        if node != SHOP or action in (Action.SEAL, Action.DELIVER):
            self.fuzz(message, self._counts.pop(action, 0))
        return InProcessGrid._deliver(self, message)

    def fuzz(self, message: Message, wanted: int) -> None:
        """Send mutants of a request until so many were refused; nothing changes."""
        if not wanted:
            return
        action = message.metadata.message_type
        kept = Kept(self.contexts[message.metadata.dst_node_id])
        mutants = self._fuzzer.mutants(message.content, EXCHANGES[action].request)
        for number in count():
            if self.refused[action] == wanted:
                break
            what, content = next(mutants)
            with bounded(is_traced=number % 16 == 0):
                header = self._answer(message, content)
            if "error" in header:
                self.refused[action] += 1
                assert set(header) <= SAID, (action, what, header)
                kept.check((action, what, header), content)
            else:
                self.accepted[action] += 1
                kept.restore()
        kept.check_content()

    def _answer(self, message: Message, content: RecordDict) -> dict:
        """Return the header of what the site's app answers to a mutant."""
        mutant = Message(content, dst_node_id=SHOP, message_type="query")
        mutant.metadata.__dict__.update(message.metadata.__dict__)
        reply = InProcessGrid._deliver(self, mutant)
        assert not reply.has_error(), reply.error.reason
        return unpack(reply.content).header


@contextmanager
def bounded(*, is_traced: bool) -> Iterator[None]:
    """Fail where much is allocated meanwhile, touched or not."""
    if not is_traced:
        yield
        return
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES


TRAINING = {
    "admm": (
        TablePuppetADMM,
        {},
        {
            Action.DESCRIBE: 400,
            Action.SEAL: 1000,
            Action.EXTRACT: 500,
            Action.STATISTICS: 700,
            Action.PREPARE: 900,
            Action.ADMM: 1100,
            Action.CONSENSUS: 1100,
            Action.FINISH: 1000,
        },
    ),
    "sgd": (
        TablePuppetSGD,
        {"batch_size": 5},
        {Action.PREPARE: 100, Action.SGD: 1100, Action.STEP: 1100},
    ),
    "coreset": (
        CoresetKMeans,
        {
            "num_epochs": 0,
            "coreset_kind": "uniform",
            "clusters": 2,
            "coreset_solver": "distdim",
        },
        {Action.PREPARE: 30, Action.ROWS: 200, Action.CONSENSUS: 30},
    ),
}
CHECKING = {Action.CHECK: 400}
DRAWING = {Action.MEASURE: 300, Action.DRAW: 150, Action.WEIGH: 150}
PERSONAL = {Action.PERSONALISE: 150, Action.SUMMARISE: 100, Action.PERSONAL: 150}
PREDICTING = {Action.SCORE: 500, Action.DELIVER: 500}


@pytest.fixture
def quiet() -> Iterator[None]:
    """What is refused is logged each time, and takes as long as refusing it."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.fixture
def place(tmp_path, monkeypatch, quiet) -> Path:  # noqa: ARG001 - it is for all
    """A folder with a home and a working directory, to be looked at afterwards."""
    # whether a disk has it is for other tests
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def outside(folder: Path) -> set[str]:
    """What there is, but for what lies in the sites' state folders."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in found if name.split("/")[1:2] != ["state"]}


def strangers(folder: Path) -> list[Path]:
    """What path tricks have made in the folders that they lead to."""
    places = {*folder.parents, Path("/tmp"), Path.cwd(), Path("~").expanduser()}
    return [path for place in places for path in place.glob(f"*{MARK}*")]


def fuzz(folder: Path, strategy: RoundStrategy, counts: dict) -> None:
    """Run a strategy among mutants of its requests."""
    grid = FuzzingGrid(folder, np.random.default_rng(11), counts)
    before = outside(folder)
    try:
        strategy.start(grid)
    finally:
        grid.close()
    assert grid.refused == counts
    assert outside(folder) == before
    assert not strangers(folder)


@pytest.mark.parametrize("name", TRAINING)
def test_malformed_messages_are_refused_and_change_nothing(name, place):
    method, settings, counts = TRAINING[name]
    strategy = method(Query.from_sql(SQL), **{"num_epochs": 2, **settings})
    fuzz(place, strategy, counts)
    # nor is the run another one
    (place / "plain").mkdir()
    plain = train(HostileGrid(place / "plain"), method, **settings)
    assert strategy.report.final_train == plain.report.final_train


def test_malformed_messages_of_a_check_are_refused(place):
    fuzz(place, Explain(Query.from_sql(SQL), mode="explain"), CHECKING)


def test_malformed_messages_about_a_coreset_are_refused(place):
    strategy = TablePuppetADMM(Query.from_sql(SQL), num_epochs=1, coreset_size=8)
    fuzz(place, strategy, DRAWING)
    assert strategy.report.chosen["coreset"]["size"] == 8


def test_malformed_messages_about_a_model_of_a_sites_own_are_refused(place):
    query = Query.from_sql("SELECT c.age AS label, c.id, c.kind FROM customers c")
    strategy = Personalised(query, num_epochs=1, graph="data", update_penalty=0.1)
    fuzz(place, strategy, PERSONAL)


def test_malformed_messages_about_a_saved_model_are_refused(place):
    manifest = make_manifest(train(HostileGrid(place), num_epochs=1))
    query = Query.from_sql(SQL.replace("o.qty AS label, ", ""), needs_label=False)
    settings = {"mode": "predict", "predictions_at": "label-site", "row_key": "price"}
    fuzz(place, Predict(query, manifest, **settings), PREDICTING)


def test_every_action_gets_its_share():
    counts = [counts for *_, counts in TRAINING.values()]
    counts += [CHECKING, PREDICTING, DRAWING, PERSONAL]
    assert {action for each in counts for action in each} == set(Action)
    assert sum(sum(each.values()) for each in counts) >= ENOUGH
