"""How reports and benchmarks of two versions are compared, and files are counted."""

import json
import math
from subprocess import CalledProcessError

import pandas as pd
import pytest

from scripts.checks import checkouts, paired_benchmark, same_numbers
from scripts.checks.checkouts import Checkout, check_out
from scripts.checks.paired_benchmark import Pair, pair_up
from scripts.checks.same_numbers import compare, flatten
from tests.support.files import case_table

CASES = case_table(__file__)
REPORT = CASES["report"]
REPORT["history"][0]["primal-residual"] = None  # which TOML cannot say


def compared(path, value):
    """The report's figures beside those with one value replaced."""
    report = json.loads(json.dumps(REPORT))
    target = report
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return compare(flatten(REPORT), flatten(report))


def test_figures_are_named_by_what_they_are_of() -> None:
    assert flatten(REPORT) == CASES["figures"]
    step = {"epoch": 1, "phase": "batch"}
    history = [{**step, "round": 1, "loss": 1.0}, {**step, "round": 2, "loss": 2.0}]
    assert flatten({"history": history}) == {
        "history/epoch 1, phase batch/loss": 1.0,
        "history/epoch 1, phase batch (2)/loss": 2.0,
    }


@pytest.mark.parametrize(
    ("path", "value", "failure"),
    [
        *CASES["failures"],
        (["history", 1, "train", "loss"], None, "0.5 before, None now"),
    ],
)
def test_what_fails(path, value, failure) -> None:
    assert any(failure in text for text in compared(path, value).failures)


@pytest.mark.parametrize(
    ("path", "value", "notes"),
    [*CASES["notes"], (["tables"], REPORT["tables"][::-1], 0)],
)
def test_what_may_change(path, value, notes) -> None:
    difference = compared(path, value)
    assert (difference.failures, len(difference.notes)) == ([], notes)


def test_runs_are_named_with_those_that_they_need() -> None:
    assert same_numbers.run_names("evaluate") == ["store-2", "evaluate"]
    assert same_numbers.run_names("flights-sgd") == ["flights-sgd"]
    with pytest.raises(SystemExit, match="no run 'x'; there are fl"):
        same_numbers.run_names("x,store-2")


def test_predictions_are_the_same_in_any_order(tmp_path) -> None:
    def figures(*scores: float) -> dict[str, float]:
        table = pd.DataFrame({"row": range(3), "score": scores})
        table.to_parquet(tmp_path / "predictions.parquet")
        return same_numbers.prediction_figures(tmp_path)

    assert figures(3.0, 1.0, 2.0) == figures(1.0, 2.0, 3.0)
    expected = {"predictions/rows": 3, "predictions/score/mean": 3.0}
    for number, quartile in enumerate([1.0, 1.5, 2.0, 4.0, 6.0]):
        expected[f"predictions/score/quartile {number}"] = quartile
    assert figures(1.0, 2.0, 6.0) == expected


def test_a_run_has_its_settings_the_same_noise_and_the_versions_modules(
    tmp_path,
) -> None:
    (tmp_path / "tp_flower").mkdir()
    (tmp_path / "tp_flower" / "__init__.py").write_text("NAME = 'old version'\n")
    script = tmp_path / "scripts" / "run_app.py"
    script.parent.mkdir()
    script.write_text(
        "import json, os, pathlib, secrets, sys, tomllib, tp_flower\n"
        "from cryptography.hazmat.primitives.ciphers import Cipher\n"
        "from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20\n"
        "cipher = ChaCha20(secrets.token_bytes(32), bytes(16))\n"
        "stream = Cipher(cipher, mode=None).encryptor().update(bytes(8))\n"
        "settings = tomllib.loads(pathlib.Path(sys.argv[2]).read_text())\n"
        "output = pathlib.Path(settings.pop('output-dir'))\n"
        "output.mkdir(exist_ok=True)\n"
        "names = {'name': tp_flower.NAME, 'home': os.getcwd(), 'noise': stream.hex()}\n"
        "(output / 'report.json').write_text(json.dumps({**settings, **names}))\n"
    )
    checkout = Checkout(tmp_path, "c0ffee")
    first, again = (
        same_numbers.run_figures(checkout, "flights-regression", tmp_path) for _ in "ab"
    )
    assert first == again
    assert first.pop("noise") != bytes(8).hex()
    names = {"name": "old version", "home": str(tmp_path)}
    chosen = {"strategy": "admm", "task": "regression", "num-epochs": 3}
    assert first == chosen | names
    script.write_text("print('why', 1 / 0)")
    with pytest.raises(same_numbers.FailedRun, match="ZeroDivisionError"):
        same_numbers.run_figures(checkout, "flights-sgd", tmp_path)


def test_a_run_that_failed_is_not_equal(capsys) -> None:
    old = {"commit": "a", "runs": {"x": flatten(REPORT), "y": {}}}
    new = {"commit": "b", "runs": {"x": flatten(REPORT)}}
    assert same_numbers.print_comparison(old, new, ["x"]) == 0
    assert same_numbers.print_comparison(old, new, ["x", "y"]) == 1
    printed = capsys.readouterr().out
    assert "x: 12 figures, furthest apart 0.0e+00; payload 340 bytes" in printed
    assert "NOT COMPARED: y is missing or failed" in printed


def test_a_version_is_a_folder_or_a_commit() -> None:
    with check_out(str(checkouts.ROOT)) as checkout:
        assert checkout.folder == checkouts.ROOT
    with pytest.raises(CalledProcessError), check_out("no-such-commit"):
        pass


def test_figures_of_a_benchmark() -> None:
    suite = {
        "checks": [{"name": "epochs", "measured": None, "limit": 3.0}],
        "facts": {"ten epochs": {"seconds": 2.5, "machine": "x"}, "sizes": [1, 2]},
    }
    assert paired_benchmark.flatten({"suites": {"speed": suite}}) == {
        "speed/epochs": math.inf,
        "speed/ten epochs/seconds": 2.5,
        "speed/sizes/0": 1.0,
        "speed/sizes/1": 2.0,
    }


@pytest.mark.parametrize(("name", "old", "new", "is_worse"), CASES["worse"])
def test_which_figures_are_worse(name, old, new, is_worse) -> None:
    assert Pair(name, old, new).is_worse is is_worse


def test_the_best_of_several_repeats_counts() -> None:
    fast, slow = "rounds/rounds per second", "speed/ten epochs/seconds"
    old = [{fast: 100.0, slow: 3.0}, {fast: 120.0, slow: 2.0}]
    new = [{fast: 90.0, slow: 4.0, "speed/new": 1.0}]
    pairs = {pair.name: pair for pair in pair_up(old, new)}
    assert (pairs[fast].old, pairs[fast].new) == (120.0, 90.0)
    assert (pairs[slow].old, pairs[slow].new) == (2.0, 4.0)
    assert math.isnan(pairs["speed/new"].old)
