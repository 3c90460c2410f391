"""Reports: what the records say is what is written, in JSON that anything can read."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples.reports import small_report
from tests.support.files import ROOT, text_of
from tp_flower.reports.records import report_dict, report_line, write_json


def report_with(**changes):
    """The content of the small report, with changes to its records."""
    return report_dict(replace(small_report(), **changes))


def test_a_report_says_what_its_records_say():
    content = report_with()
    assert content["totals"] == {
        "bytes-up": {"f": 120, "p": 1},
        "bytes-down": {"f": 40, "p": 2},
        "overhead-bytes": 7,
        "server-seconds": 0.5,
        "client-seconds": 0.5,
        "wait-seconds": 0.125,
    }
    train = {"loss": 0.25, "auc": 0.75}
    test = {"loss": 0.375, "auc": 0.625}
    assert content["final"] == {"train": train, "test": test}
    first, second = content["join-steps"]
    assert first["table"] == "f"
    assert first["rows"] == 30
    step = ["p", 27, "f.p = p.id", False, 30, 0, 1.0, 1, 3, 2, 3, 0, 0, "", []]
    assert [*second.values()] == step
    lost = [{"step": "p on f.p = p.id", "rows": 3}]
    assert content["label-rows"] == {"rows": 30, "joined": 27, "lost": lost}
    table = content["tables"][1]
    assert table["sites"] == ["registry"]
    assert table["dropped"] == ["engine"]
    assert table["multiplicity"] == {"min": 0, "mean": 5.4, "max": 9}
    of_round = content["history"][1]
    assert of_round["site-seconds"] == {"EWR": 0.5, "registry": 0.25}
    assert of_round["residuals"] == {"primal": 0.1, "dual": 0.2}
    content = report_with(history=(), final_train={}, status="no such table")
    assert content["epochs"] == 0
    assert content["rounds"] == 0
    assert content["bytes_up"] == 0
    assert content["status"] == "no such table"


def test_the_docstring_lists_every_key():
    # the docstrings are the schema's documentation
    from strategies import disclosures
    from tp_flower.reports import records as report

    documented = set(re.findall(r"[a-z_-]+", f"{report.__doc__} {disclosures.__doc__}"))

    free = {
        "settings",
        "chosen",
        "site-seconds",
        "bytes-up",
        "bytes-down",
        "train",
        "test",
    }

    def keys(value):
        if isinstance(value, dict):
            inner = [keys(item) for key, item in value.items() if key not in free]
            return set(value).union(*inner)
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    assert keys(report_with()) <= documented


def test_a_report_replaces_the_old_one_or_keeps_it(tmp_path):
    folder = tmp_path / "new" / "folder"
    path = write_json(report_with(), folder)
    assert path == folder / "report.json"
    assert json.loads(text_of(path)) == report_with()
    write_json(report_with(seconds=4.5), folder)
    with pytest.raises(TypeError, match="of type object cannot be written to a report"):
        write_json(report_with(chosen={"rho": object()}), folder)
    assert [path.name for path in folder.iterdir()] == ["report.json"]
    assert json.loads(text_of(path))["seconds"] == 4.5


@given(st.floats(), st.floats(width=32))
def test_json_has_finite_numbers_only_also_of_numpy(value, single):
    final = {"auc": value, "loss": np.float32(single)}
    chosen = {"a": np.int64(3), "b": np.bool_(True), "c": [np.float64(0.5)]}
    report = report_with(final_test=final, chosen=chosen)
    content = json.loads(json.dumps(report, allow_nan=False))
    assert content["final"]["test"] == {
        "auc": value if math.isfinite(value) else None,
        "loss": single if math.isfinite(single) else None,
    }
    assert json.dumps(content["chosen"]) == '{"a": 3, "b": true, "c": [0.5]}'


def test_the_scripts_find_the_report_by_its_line():
    assert report_line(Path("/a b/report.json")) == "Report: /a b/report.json"
    assert "REPORT_LINE" in text_of(ROOT / "strategies" / "commands.py")
