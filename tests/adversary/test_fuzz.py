"""Malformed messages, many of them: a site refuses each, and is as it was before."""

import logging
import os
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from client_apps.data.key_files import ROW_ORDER_KEY
from strategies import STRATEGIES, Explain, Personalised, TablePuppetADMM
from strategies.inference.predict import Evaluate
from strategies.run.grid import InProcessGrid
from strategies.run.strategy import RoundStrategy
from strategies.search.run import Search
from strategies.training.saving import make_manifest
from tests.support.files import case_table
from tests.support.peers.fuzzing import MARK, Fuzzer
from tests.support.peers.hostile import (
    OF_COVARIANCE,
    OF_MOMENTS,
    OF_SINGLE_SITES,
    SHOP,
    SQL,
    WITH_BINS,
    WITH_COVER,
    WITH_CUTOFFS,
    WITH_INSPECTION,
    WITH_REGIONS,
    HostileGrid,
    Kept,
    like,
    train,
)
from tests.support.predicted import predicting, unlabelled
from tp_flower.methods.boost.messages import TRAIN_REGIONS
from tp_flower.methods.coreset.messages import TRAIN_ROWS
from tp_flower.methods.moments.messages import (
    TRAIN_INFORMATION,
    TRAIN_MOMENTS,
    TRAIN_SOLVE,
)
from tp_flower.protocol.messages import ACTIONS, RUN_DIGITS, Action, action_named
from tp_flower.protocol.packet import HEADER, MESSAGE, unpack
from tp_flower.query import Query

ENOUGH = 10_000
MOST_BYTES = 1 << 25
"""No message that is sent is as large: nor may anything be that is made of one."""

SAID = {"error", "part", "kind", "at", "round"}
"""What a refusal may say."""

READ = ("cache", ROW_ORDER_KEY)
"""Where a refused request may leave the rows that it has read."""


def text_of(content: RecordDict) -> str:
    record = content.get(MESSAGE)
    return str(record.get(HEADER)) if isinstance(record, ConfigRecord) else ""


def check(kept: Kept, what: object, content: RecordDict) -> None:
    """Assert that a mutant has changed nothing.

    A round in progress may have begun entries of the run that the mutant names,
    which nobody sees until it is committed: they are taken away.
    """
    is_new = False
    for path in kept.changed(what):
        place = path.relative_to(kept.folder).parts
        if place[0] in READ:
            continue
        run = place[0][:RUN_DIGITS]
        is_new = True
        is_begun = run in text_of(content) and len(run) == RUN_DIGITS
        assert is_begun, (what, path)
        assert len(place) > 2, (what, path)
        assert path not in kept.contents, (what, path)
    if is_new:
        kept.restore()


def _policies(counts: dict) -> dict[str, str] | None:
    if Action.RANK in counts:
        return WITH_COVER
    if {TRAIN_MOMENTS, TRAIN_SOLVE} & counts.keys():
        return OF_MOMENTS
    if TRAIN_INFORMATION in counts:
        return OF_COVARIANCE
    if Action.INSPECT in counts:
        return WITH_INSPECTION
    if Action.BINS in counts:
        return WITH_BINS
    if {TRAIN_REGIONS, Action.DIVIDE} & counts.keys():
        return WITH_REGIONS
    if Action.CUTOFFS in counts:
        return WITH_CUTOFFS
    # centres are solved at the server, of parameters in the clear
    return OF_SINGLE_SITES if TRAIN_ROWS in counts else None


class FuzzingGrid(HostileGrid):
    """Send mutants of the first request of each kind before the request itself.

    ``counts`` says, by action, how many are to be refused; ``refused`` how many were.
    Others were good requests again.
    """

    def __init__(self, folder: Path, rng: np.random.Generator, counts: dict) -> None:
        super().__init__(folder, policies=_policies(counts))
        self._fuzzer = Fuzzer(rng, folder)
        self._counts = dict(counts)
        self.refused: Counter[str] = Counter()

    def _deliver(self, message: Message) -> Message:
        action = message.metadata.message_type
        node = message.metadata.dst_node_id
        # the shop is asked first; the others have parts of a sharded table
        of_shop = (Action.SEAL, Action.CUTOFFS, Action.DIVIDE, Action.INSPECT)
        of_shop = (*of_shop, TRAIN_SOLVE)
        if node != SHOP or action in of_shop:
            self.fuzz(message, self._counts.pop(action, 0))
        return InProcessGrid._deliver(self, message)

    def fuzz(self, message: Message, wanted: int) -> None:
        if not wanted:
            return
        action = message.metadata.message_type
        kept = Kept(self.contexts[message.metadata.dst_node_id])
        mutants = self._fuzzer.mutants(message.content, action_named(action).request)
        for number in count():
            if self.refused[action] == wanted:
                break
            what, content = next(mutants)
            with bounded(is_traced=number % 16 == 0):
                header = self._answer(message, content)
            if "error" in header:
                self.refused[action] += 1
                assert set(header) <= SAID, (action, what, header)
                if kept.is_stopped:
                    # it has refused for its rows, and would answer no more in this run
                    kept.restore()
                check(kept, (action, what, header), content)
            else:
                kept.restore()
        for path, data in kept.contents.items():
            assert path.read_bytes() == data, path

    def _answer(self, message: Message, content: RecordDict) -> dict:
        reply = InProcessGrid._deliver(self, like(message, content))
        assert not reply.has_error(), reply.error.reason
        return unpack(reply.content).header


@contextmanager
def bounded(*, is_traced: bool) -> Iterator[None]:
    """Fail where much is allocated meanwhile, touched or not."""
    if is_traced:
        tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES


TRAINING = {
    "admm": {},
    "cg": {},
    "boost": {},
    "sgd": {"batch_size": 5},
    "moments": {"num_epochs": 0, "test_fraction": 0.0},
    "coreset-kmeans": {"num_epochs": 0, "clusters": 2, "coreset_solver": "distdim"}
    | {"coreset_kind": "uniform"},
}
"""The settings of each method's run."""
COUNTS = {
    run: {action_named(action): count for action, count in counts.items()}
    for run, counts in case_table(__file__).items()
}
"""Malformed messages of each kind, by run."""

LEAST = 60
"""So many of each kind are sent on every change, or all if there are fewer."""
each_share = pytest.mark.parametrize("share", [4, 1], ids=["few", "all"])
"""On every change the first quarter of the malformed messages is sent."""


@pytest.fixture
def place(tmp_path, monkeypatch, caplog) -> Path:
    """A folder with a home and a working directory, to be looked at afterwards."""
    # to log each refusal takes as long as to refuse
    caplog.set_level(logging.CRITICAL, "flwr")
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


def fuzz(folder: Path, strategy: RoundStrategy, run: str, share: int) -> None:
    counts = {
        action: max(count // share, min(count, LEAST))
        for action, count in COUNTS[run].items()
    }
    grid = FuzzingGrid(folder, np.random.default_rng(12), counts)
    before = outside(folder)
    try:
        strategy.start(grid)
    finally:
        grid.close()
    assert grid.refused == counts
    assert outside(folder) == before
    assert not strangers(folder)


@pytest.mark.cases("few-boost", "few-coreset-kmeans", "few-moments")
@pytest.mark.parametrize("name", TRAINING)
@each_share
def test_malformed_messages_are_refused_and_change_nothing(name, place, share):
    method = STRATEGIES[name]
    settings = TRAINING[name]
    strategy = method(Query.from_sql(SQL), **{"num_epochs": 2, **settings})
    fuzz(place, strategy, name, share)
    # nor is the run another one
    (place / "plain").mkdir()
    plain = train(
        HostileGrid(place / "plain", policies=_policies(COUNTS[name])),
        method,
        **settings,
    )
    assert strategy.report.final_train == plain.report.final_train


@pytest.mark.cases("few")
@each_share
def test_malformed_messages_about_ranks_are_refused(place, share):
    fuzz(place, Explain(Query.from_sql(SQL)), "explain", share)


@pytest.mark.cases("few")
@each_share
def test_malformed_messages_about_a_coreset_are_refused(place, share):
    # the shop's policy asks for three rows, which eight random draws may not meet
    strategy = TablePuppetADMM(Query.from_sql(SQL), num_epochs=1, coreset_size=60)
    fuzz(place, strategy, "drawing", share)
    assert strategy.report.chosen["coreset"]["size"] == 60


@pytest.mark.cases("few")
@each_share
def test_malformed_messages_about_bins_are_refused(place, share):
    how = {"num_epochs": 1, "bins": 4, "validation_fraction": 0.3}
    strategy = STRATEGIES["cg"](Query.from_sql(SQL), **how)
    fuzz(place, strategy, "binned", share)
    assert "bins" in strategy.report.chosen


@pytest.mark.cases("few")
@each_share
def test_malformed_messages_about_the_fits_of_a_search_are_refused(place, share):
    strategy = Search(Query.from_sql(SQL), num_epochs=1, folds=2)
    fuzz(place, strategy, "search", share)
    assert len(strategy.report.sections["search"]["fits"]) == 2


@pytest.mark.cases("few")
@each_share
def test_malformed_messages_about_standard_errors_are_refused(place, share):
    how = {"standard_errors": "model", "test_fraction": 0.0, "l2": 1.0}
    strategy = STRATEGIES["cg"](Query.from_sql(SQL), tolerance=0.5, **how)
    fuzz(place, strategy, "errors", share)
    assert strategy.report.sections["inference"]["tests"] is not None


@pytest.mark.cases("few")
@each_share
def test_malformed_messages_to_the_site_that_reads_moments_are_refused(place, share):
    how = {"moments_to": "label-site", "test_fraction": 0.0}
    strategy = STRATEGIES["moments"](Query.from_sql(SQL), **how)
    fuzz(place, strategy, "reading", share)
    assert strategy.report.final_train["r2"] > 0.0


@pytest.mark.cases("few")
@each_share
def test_malformed_messages_about_regions_are_refused(place, share):
    how = {"num_epochs": 3, "min_rows_per_leaf": 1, "test_fraction": 0.0}
    how |= {"regions": "o", "validation_fraction": 0.0}
    strategy = STRATEGIES["boost"](Query.from_sql(SQL), **how)
    fuzz(place, strategy, "divided", share)
    assert strategy.report.chosen["regions"]["table"] == "o"
    predicted = predicting(make_manifest(strategy), unlabelled(SQL), row_key="price")
    fuzz(place, predicted, "regions", share)


@pytest.mark.cases("few")
@each_share
def test_malformed_messages_about_sealed_cutoffs_are_refused(place, share):
    sql = """SELECT o.qty AS label, o.price, w.n FROM orders o LEFT JOIN LATERAL
    (SELECT COUNT(*) AS n FROM customers p WHERE p.id = o.cust AND p.age < o.day) w
    ON TRUE"""
    query = Query.from_sql(sql)
    sealed = {"sealed_cutoffs": True, "sealed_partials": True}
    strategy = STRATEGIES["cg"](query, num_epochs=1, **sealed)
    fuzz(place, strategy, "sealed", share)


@pytest.mark.cases("few")
@each_share
def test_malformed_messages_about_a_model_of_a_sites_own_are_refused(place, share):
    query = Query.from_sql("SELECT c.age AS label, c.id, c.kind FROM customers c")
    strategy = Personalised(query, num_epochs=1, graph="data")
    fuzz(place, strategy, "personalised", share)


@pytest.mark.cases("few")
@each_share
def test_malformed_messages_about_a_saved_model_are_refused(place, share):
    manifest = make_manifest(train(HostileGrid(place), num_epochs=1))
    strategy = predicting(manifest, unlabelled(SQL), row_key="price")
    fuzz(place, strategy, "predicting", share)


@pytest.mark.cases("few")
@each_share
def test_malformed_messages_about_an_inspection_are_refused(place, share):
    grid = HostileGrid(place, policies=WITH_INSPECTION)
    manifest = make_manifest(train(grid, num_epochs=1))
    how = {"mode": "evaluate", "importances": 1, "metrics_by": "o.day"}
    strategy = Evaluate(Query.from_sql(SQL), manifest, **how)
    fuzz(place, strategy, "inspecting", share)
    assert strategy.outcomes["importances"]["items"]


def test_every_action_gets_its_share():
    # a session is opened before a run, and attacked in tests/faults/test_sessions.py
    missing = ({*ACTIONS.values()} - {Action.SESSION}).difference(*COUNTS.values())
    assert not missing, "count mutants of them in a run above that sends them"
    assert sum(sum(each.values()) for each in COUNTS.values()) >= ENOUGH
