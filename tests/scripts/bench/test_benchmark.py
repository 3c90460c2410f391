"""The benchmark program: suites by name, and what happens to their results."""

import argparse
import json
from pathlib import Path

import pytest

from scripts import benchmark
from scripts.bench import results_file
from scripts.bench.runs import Check, Options, Outcome, SkippedSuite


def good(_: Options) -> Outcome:
    return Outcome([Check("within", 1.0, 2.0)], {"figure": 0.123456789})


def missed(_: Options) -> Outcome:
    return Outcome([Check("beyond", float("inf"), 2.0)], {"new": 1})


def failing(_: Options) -> Outcome:
    raise OSError("disk full")


def skipped(_: Options) -> Outcome:
    raise SkippedSuite("no data")


@pytest.fixture
def run(monkeypatch, tmp_path):
    def call(suites, *arguments, output=tmp_path / "out"):
        monkeypatch.setattr(benchmark, "SUITES", suites)
        where = [] if "--update" in arguments else ["--output", str(output)]
        status = benchmark.main([*where, *arguments])
        path = tmp_path / "out" / "benchmark.json"
        return status, json.loads(path.read_text(encoding="utf-8"))

    return call


def test_suites_are_named_in_their_order() -> None:
    names = list(benchmark.SUITES)
    assert benchmark.suite_names("all") == names
    assert benchmark.suite_names(f"{names[2]},{names[0]}") == [names[0], names[2]]
    with pytest.raises(argparse.ArgumentTypeError, match="no suite 'byte'; there are"):
        benchmark.suite_names("byte")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--datasets", "flihgts"], "no data set 'flihgts'; there are flights,"),
        (["--methods", "admm,amdm"], "no method 'amdm'; there are admm, sgd,"),
        (["--set", "mdl=mlp"], "mdl: unknown setting"),
        (["--set", "batch-size=100"], "for method gd: 1 setting is not usable"),
        (["--movielens", "/nowhere"], "'/nowhere' is not the folder or .zip of Movie"),
        (["--vertical", "/nowhere"], "'/nowhere' has none of the files YearPredict"),
        (["--factor", "-1"], "-1 is not a number above 0"),
        (["--output", __file__], "--output: "),
    ],
)
def test_what_cannot_work_is_refused_before_measuring(
    run, capsys, arguments, told
) -> None:
    def measured(_: Options) -> Outcome:
        pytest.fail("measured")

    with pytest.raises(SystemExit) as status:
        run({"a": measured}, *arguments)
    assert status.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("columns", "expected"), [("80", 80), ("300", 110)])
def test_tables_fit_into_the_terminal(monkeypatch, columns, expected) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert benchmark.console_width() == expected


def test_settings_are_of_the_methods_to_run(run) -> None:
    arguments = ["--methods", "admm,sgd", "--set", "batch-size=100"]
    status, _ = run({"a": good}, *arguments)
    assert status == 0


def test_an_interrupt_keeps_what_was_measured(run, capsys, tmp_path) -> None:
    def interrupted(_: Options) -> Outcome:
        raise KeyboardInterrupt

    status, content = run({"a": good, "b": interrupted, "c": good})
    assert status == 130
    assert list(content["suites"]) == ["a"]
    assert "interrupted" in capsys.readouterr().out
    assert (tmp_path / "out" / "benchmark.html").exists()


def test_an_error_loses_nothing_of_the_other_suites(run, capsys) -> None:
    suites = {"a": good, "b": failing, "c": skipped, "d": good}
    status, content = run(suites, "--suite", "all")
    assert status == 1
    assert list(content["suites"]) == ["a", "d"]
    assert content["suites"]["a"]["facts"] == {"figure": 0.123457}
    assert content["failed"] == {"b": "OSError: disk full"}
    printed = capsys.readouterr().out
    assert "MISSED: b failed: disk full" in printed
    assert "c is skipped: no data" in printed


def test_a_missed_limit_is_told_and_written(run, capsys) -> None:
    status, content = run({"a": missed})
    assert status == 1
    assert "MISSED: beyond" in capsys.readouterr().out
    (check,) = content["suites"]["a"]["checks"]
    # JSON knows no infinity
    assert (check["measured"], check["is-met"]) == (None, False)


def test_update_replaces_what_is_named_and_keeps_the_rest(run, tmp_path) -> None:
    _, before = run({"a": good, "b": good})
    path = tmp_path / "out" / "benchmark.json"
    status, after = run({"a": missed, "b": failing}, "--update", str(path))
    assert status == 1
    assert after["suites"]["a"]["facts"] == {"new": 1}
    # a failed suite keeps what it found before
    assert after["suites"]["b"] == before["suites"]["b"]
    assert after["failed"] == {"b": "OSError: disk full"}
    _, last = run({"b": good}, "--update", str(path))
    assert last["failed"] == {}
    assert last["suites"]["a"] == after["suites"]["a"]


@pytest.mark.parametrize("content", ["[]", '{"schema": 0}', '{"machine": {}}'])
def test_a_file_of_another_schema_is_refused(run, tmp_path, capsys, content) -> None:
    path: Path = tmp_path / "old.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit):
        run({"a": good}, "--update", str(path))
    assert "not 1: run it anew" in capsys.readouterr().err


def test_a_result_says_where_and_when(run) -> None:
    _, content = run({"a": good})
    own = content["suites"]["a"]
    assert {"date", "seconds", "machine", "versions"} < set(own)
    assert {"processor", "cores", "memory-gib", "python"} < set(own["machine"])
    assert set(own["versions"]) == set(results_file.LIBRARIES)
