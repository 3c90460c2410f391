"""The store example: made-up tables, and files that can be trained on."""

import subprocess
import sys
import tomllib
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest

from scripts.data.make_store import main
from scripts.data.store import STORE_SQL, make_store
from tests.support.paths import ROOT
from tp_flower.extraction.extract import extract
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.shards import describe, load_tables


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a store")
    sizes = ("--orders", "30", "--items", "5", "--customers", "9")
    output = subprocess.check_output(
        [sys.executable, ROOT / "scripts" / "data" / "make_store.py", folder, *sizes],
        # the script imports tp_flower, installed or not
        env={"PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert f"flwr run . --stream -c '{folder}/my-run.toml'" in output
    assert f"flwr run . --stream -c '{folder}/my-run-regression.toml'" in output
    return folder


@pytest.mark.parametrize(
    ("name", "task"),
    [("my-run", "classification"), ("my-run-regression", "regression")],
)
def test_the_runs_fit_the_tables(folder: Path, name: str, task: str) -> None:
    config = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
    settings = Settings.from_run_config(config)
    assert settings.task == task
    sources = load_tables(settings.tables)
    schemas = {source.table: describe(source).columns for source in sources}
    bound = Query.from_sql(settings.sql).bind(schemas)
    fragments = {fragment.name: fragment for fragment in bound.fragments}
    shards = [extract(source, fragments[source.table]) for source in sources]
    assert [shard.table for shard in shards] == ["o", "i", "c", "c"]
    assert shards[0].rows == 30


def test_each_organisation_has_its_shards(folder: Path) -> None:
    sources = load_tables(str(folder / "tables.toml"))
    assert [(source.table, source.site) for source in sources] == [
        ("orders", "shop"),
        ("items", "warehouse"),
        ("customers", "us"),
        ("customers", "uk"),
    ]
    orders, _, us, uk = (describe(source) for source in sources)
    assert (orders.rows, us.rows, uk.rows) == (30, 6, 3)
    assert us.columns == uk.columns


@pytest.mark.parametrize(
    ("place", "options", "problem"),
    [
        ("new", ["--customers", "1"], "error: the store needs at least 1 order"),
        ("file", [], "error: no folder can be made at {}: is a file\n"),
    ],
)
def test_what_cannot_be_made_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    place: str,
    options: list[str],
    problem: str,
) -> None:
    (tmp_path / "file").touch()
    assert main([str(tmp_path / place), *options]) == 2
    assert problem.format(tmp_path / place) in capsys.readouterr().err


def test_store_is_many_to_many_with_two_shards():
    store = make_store(orders=300, items=40, customers=60, seed=3)
    assert [len(shard) for shard in store["customers"]] == [40, 20]
    us, uk = store["customers"]
    assert set(us["country"]) == {"US"}
    assert set(uk["country"]) == {"UK"}
    (orders,), (items,) = store["orders"], store["items"]
    assert len(orders) == 300
    assert items["item_id"].nunique() == 40
    assert items.groupby("item_id").size().max() > 1
    assert orders.groupby("item_id").size().max() > 1
    assert not items.duplicated(["item_id", "part"]).any()


def test_store_is_seeded():
    first, again, other = (make_store(50, 10, 10, seed) for seed in (1, 1, 2))
    for name, shards in first.items():
        for shard, same in zip(shards, again[name], strict=True):
            pd.testing.assert_frame_equal(shard, same)
    assert not first["orders"][0].equals(other["orders"][0])


def test_every_table_explains_the_quantity():
    """Without a table's features, least squares explains clearly less."""
    tables = {name: pd.concat(shards) for name, shards in make_store().items()}
    with duckdb.connect() as connection:
        for name, table in tables.items():
            connection.register(name, table)
        joined = connection.execute(STORE_SQL).df()
    joined["price"] = np.log(joined["price"])
    parts = {
        "orders": ["discount", "channel"],
        "items": ["price", "part"],
        "customers": ["income", "age", "segment"],
    }

    def explained(names):
        features = pd.get_dummies(joined[[c for n in names for c in parts[n]]])
        filled = features.fillna(features.mean()).to_numpy(float)
        filled = np.column_stack([filled, np.ones(len(filled))])
        label = joined["label"].to_numpy(float)
        fitted = filled @ np.linalg.lstsq(filled, label, rcond=None)[0]
        return 1 - ((label - fitted) ** 2).mean() / label.var()

    everything = explained(parts)
    assert everything > 0.6
    for left_out in parts:
        assert (
            explained([name for name in parts if name != left_out]) < everything - 0.05
        )


@pytest.mark.parametrize("sizes", [(0, 1, 2), (1, 0, 2), (1, 1, 1)])
def test_store_refuses_empty_tables(sizes):
    with pytest.raises(
        ValueError, match="at least 1 order, 1 item, 2 customers and 1 part"
    ):
        make_store(*sizes)
