"""A folder in RelBench's format becomes tables and a run; cutoff joins are refused."""

from pathlib import Path

import pandas as pd
import pytest
import yaml

from scripts.data.prepare_relbench import main
from tests.support.datasets import run_prepared
from tests.support.files import case_table

CASES = case_table(__file__)
DAYS = pd.date_range("2020-01-01", periods=40)


def labels(start: int, stop: int) -> pd.DataFrame:
    rows = range(start, stop)
    frame = pd.DataFrame({"day": DAYS[start:stop], "driver": [n % 8 for n in rows]})
    return frame.assign(points=[float(n % 8 + n % 3) for n in rows])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "rel"
    task = tmp_path / "rel" / "tasks" / "driver-points"
    for each in (path / "db", task):
        each.mkdir(parents=True)
    for name, columns in CASES["rows"].items():
        frame = pd.DataFrame(
            {k: DAYS[v] if k == "at" else v for k, v in columns.items()}
        )
        frame.to_parquet(path / "db" / f"{name}.parquet")
    for split, ends in {"train": (0, 24), "val": (24, 32), "test": (32, 40)}.items():
        labels(*ends).to_parquet(task / f"{split}.parquet")
    for place, content in ((path, CASES["dataset"]), (task, CASES["task"])):
        (place / "manifest.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def test_labels_join_what_their_entity_refers_to(folder, tmp_path):
    output = tmp_path / "out"
    assert main([str(folder), str(output), "--without", "results"]) == 0
    text = (output / "my-run.toml").read_text()
    assert [line for line in text.split("\n") if "JOIN" in line] == CASES["joins"]
    assert CASES["columns"] in text
    report = run_prepared(output)
    assert (report.joined_rows_train, report.joined_rows_test) == (24, 8)
    assert report.split["validation-rows"] == 8


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda case: case["message"])
def test_others_are_refused_by_name(folder, tmp_path, capsys, case):
    for file, changes in case.get("changes", {}).items():
        path = folder / file / "manifest.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))
    assert main([str(folder), str(tmp_path / "out"), *case["arguments"]]) == 2
    assert case["message"] in capsys.readouterr().err
