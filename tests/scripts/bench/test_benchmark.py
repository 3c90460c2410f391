"""The benchmark program, its results file, and the page that is made from it."""

import argparse
import json
import re
from pathlib import Path

import pytest

from scripts import benchmark
from scripts.bench import harness, processes, render
from scripts.bench.registry import SUITES
from tests.support.files import read_json

PAGE_TEXT = render.PAGE.read_text(encoding="utf-8")


def good(_: harness.Options) -> harness.Outcome:
    outcome = harness.Outcome(facts={"figure": 0.123456789})
    outcome.check("within", 1.0, 2.0)
    return outcome


def missed(_: harness.Options) -> harness.Outcome:
    outcome = harness.Outcome(facts={"new": 1})
    outcome.check("beyond", float("inf"), 2.0)
    return outcome


def failing(_: harness.Options) -> harness.Outcome:
    raise OSError("disk full")


def skipped(_: harness.Options) -> harness.Outcome:
    raise harness.SkippedSuite("no data")


@pytest.fixture
def run(monkeypatch, tmp_path):
    def call(suites, *arguments, output=tmp_path / "out"):
        monkeypatch.setattr(benchmark, "SUITES", suites)
        where = [] if "--update" in arguments else ["--output", str(output)]
        status = benchmark.main([*where, *arguments])
        return status, read_json(tmp_path / "out" / harness.RESULTS_FILE)

    return call


def page_of(folder):
    return (folder / "out" / "benchmark.md").read_text("utf-8")


def test_suites_are_named_in_their_order():
    assert list(SUITES) == list(render.DECLARED["suites"])
    names = list(SUITES)
    assert benchmark.suite_names("all") == names
    assert benchmark.suite_names(f"{names[2]},{names[0]}") == [names[0], names[2]]
    with pytest.raises(argparse.ArgumentTypeError, match="no suite 'byte'; there are"):
        benchmark.suite_names("byte")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "flihgts"], "no suite 'flihgts'; there are all, "),
        (["--output", __file__], "--output: "),
        (["--update", __file__], "--update: "),
        (["--render", "/nowhere"], "'/nowhere' is no benchmark.json: "),
    ],
)
def test_what_cannot_work_is_refused_before_measuring(run, capsys, arguments, message):
    def measure(_: harness.Options) -> harness.Outcome:
        pytest.fail("measured")

    with pytest.raises(SystemExit) as status:
        run({"a": measure}, *arguments)
    assert status.value.code == 2
    assert message in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_measured(run, capsys, tmp_path):
    def interrupted(_: harness.Options) -> harness.Outcome:
        raise KeyboardInterrupt

    status, content = run({"a": good, "b": interrupted, "c": good})
    assert status == 130
    assert list(content["suites"]) == ["a"]
    assert "interrupted" in capsys.readouterr().out
    page = page_of(tmp_path)
    assert "**Suite a** (`--suite a`)" in page
    assert "| within | 1 | 2 |" in page


def test_an_error_loses_nothing_of_the_other_suites(run, capsys, tmp_path):
    status, content = run(
        {"a": good, "b": failing, "c": skipped, "d": good}, "--suite", "all"
    )
    assert status == 1
    assert list(content["suites"]) == ["a", "d"]
    assert content["suites"]["a"]["facts"] == {"figure": 0.123457}
    assert content["failed"] == {"b": "OSError: disk full"}
    suite = content["suites"]["a"]
    assert {"date", "seconds", "machine", "versions"} < set(suite)
    assert {"processor", "cores", "memory-gib", "python"} < set(suite["machine"])
    assert set(suite["versions"]) == set(harness.LIBRARIES)
    printed = capsys.readouterr().out
    assert "MISSED: b failed: disk full" in printed
    assert "c is skipped: no data" in printed
    assert "Suite b failed: OSError: disk full" in page_of(tmp_path)


def test_update_replaces_what_is_named_and_keeps_the_rest(run, tmp_path, capsys):
    _, before = run({"a": good, "b": good})
    path = tmp_path / "out" / "benchmark.json"
    status, after = run({"a": missed, "b": failing}, "--update", str(path))
    assert status == 1
    assert "MISSED: beyond" in capsys.readouterr().out
    assert after["suites"]["a"]["facts"] == {"new": 1}
    (check,) = after["suites"]["a"]["checks"]
    # JSON knows no infinity
    assert (check["measured"], check["is-met"]) == (None, False)
    assert "| beyond | **-** | 2 |" in page_of(tmp_path)
    # a failed suite keeps what it found before
    assert after["suites"]["b"] == before["suites"]["b"]
    assert after["failed"] == {"b": "OSError: disk full"}
    _, last = run({"b": good}, "--update", str(path))
    assert last["failed"] == {}
    assert last["suites"]["a"] == after["suites"]["a"]


@pytest.mark.parametrize("option", ["--update", "--render"])
@pytest.mark.parametrize("content", ["[]", '{"schema": 0}', '{"machine": {}}'])
def test_a_file_of_another_schema_is_refused(run, tmp_path, capsys, content, option):
    path: Path = tmp_path / "old.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit):
        run({"a": good}, option, str(path))
    assert "not 1: run it anew" in capsys.readouterr().err
    assert render.PAGE.read_text(encoding="utf-8") == PAGE_TEXT


def test_a_measurement_in_a_process_of_its_own():
    assert processes.in_process_of_its_own(json.dumps, [1, 2]) == "[1, 2]"
    with pytest.raises(RuntimeError, match=r"json:loads failed:[\s\S]*JSONDecodeError"):
        processes.in_process_of_its_own(json.loads, "{")


def test_memory_and_time_of_a_block():
    with processes.spent() as figures:
        held = bytearray(256 << 20)
        figures["seconds"] = 7.0
    assert len(held) == 256 << 20
    # less what this process has given back meanwhile
    assert figures["peak-mib"] >= 200.0
    assert figures["seconds"] == 7.0
    assert figures["cpu-seconds"] > 0.0


def test_nobody_edits_figures_by_hand():
    committed = harness.read_results(render.FOLDER / harness.RESULTS_FILE)
    section = render.render(committed, "../scripts/bench/results/")
    advice = "run python scripts/benchmark.py --render"
    assert render.with_section(PAGE_TEXT, section) == PAGE_TEXT, advice
    readme = render.README.read_text(encoding="utf-8")
    assert render.with_section(readme, render.summary(committed)) == readme, advice
    assert committed["failed"] == {}


def test_every_image_is_there_and_none_is_left_over():
    section = PAGE_TEXT.partition(render.BEGIN)[2].partition(render.END)[0]
    named = {
        (render.PAGE.parent / path).resolve()
        for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", section)
    }
    assert named == set(render.FOLDER.glob("*.png"))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in named)
    text = (render.FOLDER / harness.RESULTS_FILE).read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert str(Path.home()) not in text


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("no markers", "the page needs one"),
        (f"{render.BEGIN} {render.BEGIN} {render.END}", "the page needs one"),
        (f"{render.END} {render.BEGIN}", "stands before"),
    ],
)
def test_markers_are_needed(page, message):
    with pytest.raises(ValueError, match=message):
        render.with_section(page, "new")
    page = f"before\n{render.BEGIN}\nold\n{render.END}\nafter\n"
    assert (
        render.with_section(page, "new")
        == f"before\n{render.BEGIN}\n\nnew\n\n{render.END}\nafter\n"
    )
