"""The example of hospitals: the tutorial's files, and the joined table's model."""

import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from client_apps.commands import runs_to_approve
from client_apps.data.saved_models import SavedModel
from examples.hospitals.hospitals import FOLDER, SITES, run
from examples.hospitals.make_databases import make
from tests.support.files import ROOT
from tests.support.reference.joins import joined_positions
from tests.support.reference.training import centralised
from tp_flower.errors import SiteError

PAGE = ROOT / "docs/tutorial/hospitals.md"
FILE = re.compile(r"```toml\n# (\S+\.toml)\n(.*?)```", re.DOTALL)
SETTINGS = {"test-fraction": 0.0, "tolerance": 1e-7, "l2": 0.01, "num-epochs": 0}
ALIASES = {"s": "stays", "b": "samples", "h": "histories"}


def test_files_are_those_of_the_page():
    blocks = dict(FILE.findall(PAGE.read_text(encoding="utf-8")))
    # of the two, each is the other's partner
    of_b = re.sub(
        "(?<=hospital-)[ab]",
        lambda name: "ba"["ab".index(name[0])],
        blocks["hospital-a/tables.toml"],
    )
    blocks["hospital-b/tables.toml"] = of_b
    files = [*FOLDER.glob("*.toml"), *FOLDER.glob("*/tables.toml")]
    assert blocks == {str(file.relative_to(FOLDER)): file.read_text() for file in files}


def test_an_approved_run_ends_in_the_model_of_the_joined_table(
    tmp_path,
):
    folder = Path(shutil.copytree(FOLDER, tmp_path / "hospitals"))
    make(folder, patients=(130, 100))
    for site in SITES:
        # to its optimum a training sends more scores than these owners let leave
        file = folder / site / "tables.toml"
        text = file.read_text().replace(
            "approved-runs", 'scores-per-rank = "any"\napproved-runs'
        )
        file.write_text(text)
    with pytest.raises(SiteError, match="approved-runs"):
        run(folder, "explain", **SETTINGS)
    shards = {}
    columns = {}
    for site in SITES:
        file = folder / site / "tables.toml"
        ((table, entry),) = tomllib.loads(file.read_text())["tables"].items()
        database = f"sqlite:///{folder / site}/omop.db"
        shards.setdefault(table, []).append(pd.read_sql(entry["sql"], database))
        columns[table] = entry["policy"]["columns"]
        (waiting,) = runs_to_approve(str(folder / site / "state"), str(file), None)
        waiting.approve()
    run(folder, "train", **SETTINGS)
    tables = {table: pd.concat(parts) for table, parts in shards.items()}
    sql = tomllib.loads((folder / "train.toml").read_text())["sql"]
    rows = joined_positions(shards, ALIASES, sql[sql.index("FROM") :])
    label, how = (
        ("s", tables["stays"]["readmitted"].to_numpy(float)),
        ("logistic", 0.01, b""),
    )
    columns = {alias: columns[table] for alias, table in ALIASES.items()}
    joined = centralised(tables, ALIASES, columns, rows, label, *how)
    models = [SavedModel.load(file.parent) for file in folder.rglob("model.json")]
    trained = {model.table: model.parameters for model in models}
    trained = np.concatenate([trained[alias] for alias in ALIASES])
    np.testing.assert_allclose(trained, joined.optimum(), atol=2e-5)
