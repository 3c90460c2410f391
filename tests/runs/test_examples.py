"""The folders of examples that a person copies: each runs as it stands."""

import json
import re
import runpy
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.support.command_line import invoke
from tests.support.files import ROOT

PAGE = ROOT / "docs" / "how-to" / "use-from-python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOTEBOOK = ROOT / "examples" / "notebook" / "first_run.ipynb"


def test_own_tables_end_in_least_squares_on_the_join(tmp_path, monkeypatch):
    monkeypatch.setenv("TP_FLOWER_HOME", str(tmp_path / "home"))
    folder = Path(
        shutil.copytree(ROOT / "examples" / "own_tables", tmp_path / "a copy")
    )
    runpy.run_path(str(folder / "make_database.py"), run_name="__main__")
    settings = (
        "test-fraction=0.0",
        "l2=0.0",
        "tolerance=1e-6",
        f"output-dir={tmp_path / 'out'}",
    )
    options = [option for setting in settings for option in ("--set", setting)]
    invoke("train", folder / "my-run.toml", *options)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    with closing(sqlite3.connect(folder / "crm.db")) as database:
        customers = pd.read_sql("SELECT * FROM customers", database)
    joined = pd.read_csv(folder / "orders.csv").merge(
        customers, "inner", None, "customer_id", "id"
    )
    hot = pd.get_dummies(
        joined[["channel", "segment", "discount", "age", "income"]], dtype=float
    )
    label, features = joined["quantity"].to_numpy(float), hot.to_numpy()
    residual = label - features @ np.linalg.lstsq(features, label)[0]
    assert report["final"]["train"]["rmse"] == pytest.approx(
        np.sqrt(np.mean(residual**2)), 1e-5
    )


def test_the_notebook_runs_and_explains_most_of_the_label():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        assert not cell.get("outputs"), "a notebook is committed without output"
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    # income and discount against noise of deviation 1: 0.1 * 12 and 10 * 0.08
    assert names["model"].metrics["test"]["r2"] > 0.5


def test_the_page_about_python_runs_from_its_first_line_to_its_last(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TP_FLOWER_HOME", str(tmp_path / "home"))
    names: dict[str, object] = {}
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    for block in blocks:
        exec(compile(block, PAGE, "exec"), names)
    assert len(blocks) == PAGE.read_text(encoding="utf-8").count("```python")
    # the model predicts the same wherever it lies
    model, again, sites = names["model"], names["again"], names["sites"]
    pd.testing.assert_frame_equal(model.predict().frame, again.predict(sites).frame)
    assert not (tmp_path / "home").exists()
