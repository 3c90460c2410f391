"""The store example as a Flower simulation, started as a user starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 240


def script(name: str, *arguments: str, home: Path) -> tuple[int, str]:
    """Run a script of the project; return its exit status and all it printed."""
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
    nodes = "num-supernodes=2 client-resources-num-cpus=1"
    arguments = ("-c", str(config), "--federation-config", nodes)
    return script("run_app.py", *arguments, home=home)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A small store; its four organisations share two SuperNodes."""
    sizes = ("--orders", "300", "--items", "20", "--customers", "40")
    status, printed = script("make_store.py", str(tmp_path), *sizes, home=tmp_path)
    assert status == 0, printed
    return tmp_path


def changed(folder: Path, old: str, new: str) -> Path:
    """Write a run config in which a text is replaced."""
    text = (folder / "my-run.toml").read_text()
    assert old in text
    path = folder / "changed.toml"
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.slow
def test_run_completes_and_reports(store: Path) -> None:
    settings = f'task = "auto"\nnum-epochs = 3\noutput-dir = "{store / "out"}"'
    config = changed(store, 'task = "classification"', settings)
    status, printed = run(config, store)
    assert status == 0, printed
    assert f"Report: {store / 'out' / 'report.json'}" in printed
    report = json.loads((store / "out" / "report.json").read_text())
    assert report["status"] == "completed"
    assert report["settings"]["num-epochs"] == 3
    assert report["epochs"] == 3
    # extract, statistics, prepare; two per epoch, as customers are sharded; finish
    assert report["rounds"] == 4 + 3 * 2 + 1
    tables = {table["table"]: table for table in report["tables"]}
    assert {name: table["rows"] for name, table in tables.items()} == {
        "o": 300,
        "i": tables["i"]["rows"],
        "c": 40,
    }
    assert tables["c"]["sites"] == ["us", "uk"]
    assert report["final"]["test"]["auc"] > 0.7
    assert report["final"]["train"]["log_loss"] < 0.69
    # the sites have forgotten the run
    # what a later run of the same query need not read again, the sites' models, and
    # what has left them
    state = store / "home" / "state"
    kept = sorted(own.name for own in state.iterdir())
    assert kept == ["cache", "models", "privacy"]


@pytest.mark.slow
def test_run_fails_with_its_message(store: Path) -> None:
    config = changed(store, "c.income", "c.incom")
    status, printed = run(config, store)
    assert status == 1, printed
    message = "table 'c' has no column 'incom' (did you mean 'income'?)"
    assert f"FAILED: feature c.incom: {message}" in printed
    assert "error: the run ended as finished:failed: " in printed
    assert message in printed.splitlines()[-1]


@pytest.mark.slow
def test_settings_are_refused_before_anything_starts(store: Path) -> None:
    config = changed(store, 'strategy = "admm"', 'stratgy = "admm"')
    status, printed = run(config, store)
    assert status == 2
    assert "stratgy: unknown setting. Did you mean strategy?" in printed
    assert "Valid settings: sql, task, tables, strategy" in printed
