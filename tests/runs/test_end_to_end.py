"""The store example as a Flower simulation, started as a user starts it."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import ROOT, read_json

SECONDS = 1200  # of a busy machine
Run = Future[tuple[int, str]]


def script(name: str, *arguments: str, home: Path) -> tuple[int, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *arguments],
        env={**os.environ, "PYTHONPATH": path, "TP_FLOWER_HOME": str(home / "home")},
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return done.returncode, done.stdout


def run(config: Path, home: Path) -> tuple[int, str]:
    return script("run_app.py", "train", str(config), home=home)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store of four organisations, each with a SuperNode."""
    folder = tmp_path_factory.mktemp("store")
    sizes = ("--orders", "300", "--items", "20", "--customers", "40")
    status, printed = script("data/make_store.py", str(folder), *sizes, home=folder)
    assert status == 0, printed
    return folder


@pytest.fixture(scope="module")
def runs(store: Path) -> Iterator[dict[str, Run]]:
    """A run that completes and one that fails, at the same time: they wait a lot."""
    settings = f'task = "auto"\nnum-epochs = 3\noutput-dir = "{store / "out"}"'
    changes = {
        "good": ('task = "classification"', settings),
        "bad": ("c.income", "c.incom"),
    }
    with ThreadPoolExecutor(len(changes)) as pool:
        yield {
            name: pool.submit(run, changed(store, name, *change), home(store, name))
            for name, change in changes.items()
        }


def home(folder: Path, name: str) -> Path:
    own = folder / name
    own.mkdir()
    return own


def changed(folder: Path, name: str, old: str, new: str) -> Path:
    text = (folder / "my-run.toml").read_text()
    assert old in text
    path = folder / f"{name}.toml"
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.slow
def test_run_completes_and_reports(store, runs):
    status, printed = runs["good"].result()
    assert status == 0, printed
    assert f"Report: {store / 'out' / 'report.json'}" in printed
    report = read_json(store / "out" / "report.json")
    assert report["status"] == "completed"
    assert report["settings"]["num-epochs"] == 3
    assert report["epochs"] == 3
    # seal, extract, statistics, fit, prepare; two per epoch; finish. Customers are
    # sharded: hence fit, and the second round of an epoch
    assert report["rounds"] == 5 + 3 * 2 + 1
    tables = {table["table"]: table for table in report["tables"]}
    assert sorted(tables) == ["c", "i", "o"]
    assert (tables["o"]["rows"], tables["c"]["rows"]) == (300, 40)
    assert tables["c"]["sites"] == ["us", "uk"]
    assert report["final"]["test"]["auc"] > 0.7
    assert report["final"]["train"]["log_loss"] < 0.69
    # the sites have forgotten the run but for the last reply, which they may be asked
    # for again; they keep what a later run of the same query need not read again, their
    # models, and what has left them
    state = store / "good" / "home" / "state"
    assert {path.name for path in state.iterdir()} - {".lock"} <= {
        *("cache", "models", "row-order-key"),
        *("site.db", "site.db-shm", "site.db-wal"),
    }
    with closing(sqlite3.connect(state / "site.db")) as database:
        entries = database.execute("SELECT run, name, length(data) FROM entries")
        left = entries.fetchall()
    assert {run.partition("-")[2] for run, _, _ in left} == {"0", "1", "2", "3"}
    assert {name for _, name, _ in left} == {".round", ".reply"}
    assert sum(size for _, _, size in left) < 20_000


@pytest.mark.slow
def test_run_fails_with_its_message(runs):
    status, printed = runs["bad"].result()
    assert status == 1, printed
    message = "table 'c' has no column 'incom' (did you mean 'income'?)"
    assert f"FAILED: feature c.incom: {message}" in printed
    assert "Traceback" not in printed
    assert "The full trace is in" in printed.splitlines()[-1]


@pytest.mark.slow
def test_settings_are_refused_before_anything_starts(store):
    config = changed(store, "unknown", 'strategy = "admm"', 'stratgy = "admm"')
    status, printed = run(config, home(store, "unknown"))
    assert status == 2
    assert "stratgy: unknown setting. Did you mean strategy?" in printed
