"""The folders of examples that a person copies: each runs as it stands."""

import re
import runpy
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pandas as pd
import pytest

from tests.support.command_line import invoke, settings_of
from tests.support.files import ROOT, read_json

PAGE = ROOT / "docs" / "how-to" / "use-from-python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOTEBOOK = ROOT / "examples" / "notebook" / "first_run.ipynb"


@pytest.mark.usefixtures("home")
def test_own_tables_end_in_least_squares_on_the_join(tmp_path):
    folder = tmp_path / "a copy"
    shutil.copytree(ROOT / "examples" / "own_tables", folder)
    runpy.run_path(str(folder / "make_database.py"), run_name="__main__")
    options = settings_of("test-fraction=0.0", "l2=0.0", "tolerance=1e-6")
    options += settings_of(f"output-dir={tmp_path / 'out'}")
    invoke("train", folder / "my-run.toml", *options)
    report = read_json(tmp_path / "out" / "report.json")
    with closing(sqlite3.connect(folder / "crm.db")) as database:
        customers = pd.read_sql("SELECT * FROM customers", database)
    joined = pd.read_csv(folder / "orders.csv").merge(
        customers, "inner", None, "customer_id", "id"
    )
    hot = pd.get_dummies(
        joined[["channel", "segment", "discount", "age", "income"]], dtype=float
    )
    label = joined["quantity"].to_numpy(float)
    features = hot.to_numpy()
    residual = label - features @ np.linalg.lstsq(features, label)[0]
    rmse = np.sqrt(np.mean(residual**2))
    assert report["final"]["train"]["rmse"] == pytest.approx(rmse, 1e-5)


def test_the_notebook_runs_and_explains_most_of_the_label():
    cells = read_json(NOTEBOOK)["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        assert not cell.get("outputs"), "a notebook is committed without output"
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    # income and discount against noise of deviation 1: 0.1 * 12 and 10 * 0.08
    assert names["model"].metrics["test"]["r2"] > 0.5


def test_the_page_about_python_runs_from_its_first_line_to_its_last(home, monkeypatch):
    monkeypatch.chdir(home.parent)
    names: dict[str, object] = {}
    page = PAGE.read_text(encoding="utf-8")
    blocks = BLOCK.findall(page)
    for block in blocks:
        exec(compile(block, PAGE, "exec"), names)
    assert len(blocks) == page.count("```python")
    # the model predicts the same wherever it lies
    model = names["model"]
    again = names["again"]
    sites = names["sites"]
    pd.testing.assert_frame_equal(model.predict().frame, again.predict(sites).frame)
    assert not home.exists()


def test_the_page_about_scikit_learn_runs_from_its_first_line_to_its_last(home):
    names: dict[str, object] = {}
    page = PAGE.with_name("use-from-scikit-learn.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(page)
    for block in blocks:
        exec(block, names)
    assert len(blocks) == page.count("```python")
    # noise of deviation 3, where incomes have one of 10
    assert names["model"].score(names["orders"]) == pytest.approx(0.9, abs=0.05)
    assert not home.exists()
