"""The example of hospitals: the tutorial's policies, and the joined table's model."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from client_apps.commands import approvals
from client_apps.data.saved_models import SavedModel
from examples.hospitals.hospitals import COLUMNS, SITES, SQL, make, run
from tests.support.files import ROOT
from tests.support.reference.joins import weighted_positions
from tests.support.reference.training import centralised
from tp_flower.errors import SiteError

PAGE = ROOT / "docs/tutorial/hospitals.md"
POLICY = re.compile(r"```toml\n# (\S+)/tables.toml\n(.*?)```", re.DOTALL)
ALIASES = {"p": "patients", "s": "samples", "d": "districts"}
SOURCE = SQL[SQL.index("FROM") :]
WEIGHT = "1.0 / COUNT(*) OVER (PARTITION BY p.position_)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TP_FLOWER_HOME", "")  # which runs set
    make(tmp_path, patients=(200, 160))
    return tmp_path


def test_policies_are_those_of_the_page(folder: Path) -> None:
    policies = dict(POLICY.findall(PAGE.read_text(encoding="utf-8")))
    for site in SITES:
        written = (folder / site / "tables.toml").read_text()
        assert tomllib.loads(policies[site]) == tomllib.loads(written)


def test_an_approved_run_ends_in_the_model_of_the_joined_table(folder: Path) -> None:
    with pytest.raises(SiteError, match="approved-queries"):
        run(folder, "train")
    shards = {table: [] for table in COLUMNS}
    for site, table in SITES.items():
        shards[table].append(pd.read_csv(folder / site / f"{table}.csv"))
        file = folder / site / "tables.toml"
        (waiting,) = approvals(str(folder / site / "state"), str(file))
        digest = f'queries = ["{waiting.split()[0]}"]'
        file.write_text(file.read_text().replace("queries = []", digest))
    run(folder, "train", **{"test-fraction": 0.0, "tolerance": 1e-7, "l2": 0.01})
    tables = {table: pd.concat(parts) for table, parts in shards.items()}
    columns = {alias: COLUMNS[table] for alias, table in ALIASES.items()}
    rows, weights = weighted_positions(shards, ALIASES, SOURCE, WEIGHT)
    labels = tables["patients"]["readmitted"].to_numpy(float)
    label, how = ("p", labels), ("logistic", 0.01, b"")
    joined = centralised(tables, ALIASES, columns, rows, label, *how, np.array(weights))
    models = [SavedModel.load(file.parent) for file in folder.rglob("model.json")]
    theta = {model.table: model.parameters for model in models}
    trained = np.concatenate([theta[alias] for alias in ALIASES])
    np.testing.assert_allclose(trained, joined.optimum(), atol=2e-5)
