"""The command line on a small store: runs in this process, their failures, and
Flower's.
"""

import logging
import sys
import tomllib
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import pytest
from flwr.common.logger import console_handler

from strategies import app, commands
from strategies.run.failures import EXIT_CODES, LOG_FILE, reason_instead_of_trace
from tests.support.command_line import invoke, printed_by, refused_by, settings_of
from tests.support.federated import store_on_disk, store_sql
from tests.support.files import ROOT, case_table, output_of, read_json, toml_lines
from tp_flower.errors import QueryError
from tp_flower.settings import Settings

CASES = case_table(__file__)
SQL = store_sql("squared")
FAKE_FLWR = """#!{python}
import sys, tomllib
if sys.argv[1] == "run":
    config = tomllib.load(open(sys.argv[-1], "rb"))
    options, folder = sys.argv[3:-1], config["output-dir"]
    print("Successfully started run 7 in federation x", options, folder)
    print(config["sql"])
"""


@pytest.fixture
def store(home, monkeypatch):
    """The settings file of a small store; the home of its runs is beside it."""
    monkeypatch.chdir(home.parent)
    level = console_handler.level
    file = store_on_disk(home.with_name("store")).with_name("my-run.toml")
    settings = {"tables": "tables.toml", "sql": SQL, "output-dir": "out"}
    file.write_text(toml_lines(settings))
    yield file
    console_handler.setLevel(level)


def report_of(name="out"):
    return read_json(Path(name, "report.json"))


def final_of(name="out"):
    return report_of(name)["final"]


def test_the_version_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert printed_by("--version") == f"tp-flower {project['version']}\n"
    assert project["version"] == version(project["name"])


def test_a_run_of_each_mode_and_what_it_leaves(store):
    assert "customers, items, orders) fit together" in printed_by("check", store)
    # nothing was written
    assert sorted(path.name for path in store.parent.parent.iterdir()) == ["store"]
    text = printed_by("train", store, "--set", "num-epochs=2")
    assert "Result of cg" in text
    assert text.endswith(f"Report: {Path('out/report.json').absolute()}\n")
    assert report_of()["settings"]["num-epochs"] == 2
    assert "Result of cg" in printed_by("report", "out")
    for mode, words in (
        ("predict", "predictions are in"),
        ("evaluate", "RMSE"),
        ("explain", ""),
    ):
        text = printed_by(mode, store, "--set", f"output-dir={mode}")
        assert words in text
        assert Path(mode, "report.html").exists()
        assert report_of(mode)["mode"] == mode
    # on the screen of `explain`: at how many rows sites and server work out scores
    assert "by site   by server" in text
    assert "The join, step by step" in printed_by("report", "explain", "--full")
    full = printed_by("explain", store, "--set", "output-dir=full", "--full")
    assert "query.extract" in full
    assert "default@" in printed_by("models")
    state = Path("home/state").absolute()
    site = printed_by("models", "show", "default", "--state-dir", state)
    assert "table orders as o" in site


def test_what_moments_answer_is_printed_after_what_they_cost(store):
    text = printed_by("moments", store, "--set", "strategy=cg")
    first, _, rest = text.partition("\n")
    assert "every site's ledger will have its second moments" in first
    for title in ("R2 of the tables", "Variance inflation", "Principal components"):
        assert title in rest
    assert text.endswith(f"Report: {Path('out/report.json').absolute()}\n")
    assert report_of()["settings"]["strategy"] == "moments"
    assert "R2 of the tables" in printed_by("report", "out")


@pytest.mark.parametrize(("arguments", "status", "message"), CASES["refused"])
def test_what_is_refused_ends_with_its_reason(store, arguments, status, message):
    arguments = [str(store) if text == "FILE" else text for text in arguments]
    assert message in refused_by(*arguments, status=status)


def test_a_run_that_fails_in_set_up_leaves_report_page_and_trace(store):
    wrong = SQL.replace("c.age", "c.aeg")
    result = invoke("train", store, "--set", f"sql={wrong}")
    reason = "feature c.aeg: table 'c' has no column 'aeg' (did you mean 'age'?)"
    *_, first, last = result.stderr.splitlines()
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 2)
    assert first.startswith(f"FAILED: {reason}")
    assert last == f"The full trace is in {Path('out', LOG_FILE).absolute()}"
    assert "Traceback" in Path("out", LOG_FILE).read_text()
    assert report_of()["status"].startswith(f"failed: {reason}")
    assert "no column" in Path("out/report.html").read_text()
    assert f"failed: {reason}" in printed_by("report", "out")
    # it has nothing to lose; the next one has
    printed_by("train", store, "--set", "num-epochs=1")
    assert refused_by("train", store, status=2).endswith(
        "has the report of a run, which is not overwritten: choose another folder"
    )
    assert report_of()["status"] == "completed"
    printed_by("train", store, *settings_of("num-epochs=1", "output-dir=another"))


@pytest.mark.usefixtures("home")
def test_runs_that_begin_in_one_second_have_folders_of_their_own(monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls, zone):
            return datetime(2026, 11, 22, 0, 15, tzinfo=zone)

    monkeypatch.setattr(app, "datetime", Clock)
    run_ids = (0x3F9A, 0x23F9A, 0x3FFFF, 0x1FFFF)
    folders = [app.output_folder(Settings(), run_id).name for run_id in run_ids]
    ends = [name.removeprefix("20261122-001500-") for name in folders]
    assert ends == ["3f9a", "3f9b", "ffff", "0000"]


def test_an_interrupted_run_says_how_it_goes_on(store, monkeypatch):
    settings = settings_of("strategy=admm", "num-epochs=4")
    printed_by("train", store, *settings, "--set", "output-dir=whole")
    line = app.epoch_line

    def interrupt(rounds, *others):
        if rounds[-1].epoch == 2:
            raise KeyboardInterrupt
        return line(rounds, *others)

    with monkeypatch.context() as patch:
        patch.setattr(app, "epoch_line", interrupt)
        result = invoke("train", store, *settings)
    assert (result.exit_code, report_of()["status"]) == (1, "failed: interrupted")
    reason, way_on, *_ = result.stderr.splitlines()
    assert reason == "FAILED: interrupted"
    assert "or resume its run" in refused_by("train", store, *settings, status=2)
    printed_by(*way_on.partition("To go on: tp-flower ")[2].split())
    assert (report_of()["status"], final_of()) == ("completed", final_of("whole"))


def test_flower_logs_a_reason_without_trace_and_exit_code(caplog):
    logger = logging.getLogger("flwr.of-this-test")
    logger.addFilter(reason_instead_of_trace)
    error = QueryError("no such column")
    error.add_note("Write another.")
    for exception in (error, ValueError("a bug")):
        logger.error("ServerApp raised an exception", exc_info=exception)
    logger.error("%sAn unhandled exception", EXIT_CODES[0])
    first, second = caplog.records
    assert first.getMessage() == "FAILED: no such column\nWrite another."
    assert first.exc_info is None
    assert second.exc_info


@pytest.mark.parametrize(
    ("last", "status"), [("Report: /x/report.json", 0), ("FAILED: no", 1)]
)
def test_a_run_through_flower_has_its_status(
    store, tmp_path, monkeypatch, last, status
):
    flower = tmp_path / "flwr"
    code = FAKE_FLWR.format(python=sys.executable)
    flower.write_text(f"{code}    print({last!r})\n")
    flower.chmod(0o700)
    monkeypatch.setattr(commands, "FLWR", flower)
    result = invoke("train", store, "--flower", "--superlink", "prod")
    assert (result.exit_code, result.stderr) == (status, "")
    assert "run 7 in federation x ['prod', '--stream', '-c'] out" in result.stdout
    assert result.stdout.endswith(f"{SQL}\n{last}\n")


def test_a_command_imports_what_it_needs():
    code = "import sys; from tp_flower.command_line import app; print(*sys.modules)"
    modules = set(output_of(code).split())
    heavy = {"flwr", "torch", "pandas", "strategies", "client_apps", "tp_flower.query"}
    assert not modules & heavy
