"""The store example: made-up tables, and files that can be trained on."""

import tomllib
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest

from scripts.data.make_store import STORE_SQL, main, make_store
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.shards import describe, load_tables

SIZES = ["--orders", "30", "--items", "5", "--customers", "9"]


def test_each_organisation_has_its_shards_and_both_runs_fit_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a store"
    assert main([str(folder), *SIZES]) == 0
    output = capsys.readouterr().out
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
    schemas = {source.table: describe(source).columns for source in sources}
    for name, task in (
        ("my-run", "classification"),
        ("my-run-regression", "regression"),
    ):
        assert f"flwr run . --stream -c '{folder}/{name}.toml'" in output
        config = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
        settings = Settings.from_run_config(config)
        assert settings.task == task
        fragments = Query.from_sql(settings.sql).bind(schemas).fragments
        assert [fragment.name for fragment in fragments] == list(schemas)


@pytest.mark.parametrize(
    ("place", "options", "problem"),
    [
        ("new", ["--customers", "1"], "error: the store needs at least 1 order"),
        ("new", ["--orders", "0"], "error: the store needs at least 1 order"),
        ("new", ["--items", "0"], "error: the store needs at least 1 order"),
        ("file", [], "File exists: '{}'\n"),
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


def test_store_is_many_to_many_with_two_shards_and_seeded():
    store = make_store(orders=300, items=40, customers=60, seed=3)
    us, uk = store["customers"]
    assert (len(us), set(us["country"])) == (40, {"US"})
    assert (len(uk), set(uk["country"])) == (20, {"UK"})
    (orders,), (items,) = store["orders"], store["items"]
    assert (len(orders), items["item_id"].nunique()) == (300, 40)
    assert items.groupby("item_id").size().max() > 1
    assert orders.groupby("item_id").size().max() > 1
    assert not items.duplicated(["item_id", "part"]).any()
    again, other = (make_store(300, 40, 60, seed) for seed in (3, 4))
    for name, shards in store.items():
        for shard, same in zip(shards, again[name], strict=True):
            pd.testing.assert_frame_equal(shard, same)
    assert not orders.equals(other["orders"][0])


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

    assert explained(parts) > 0.6
    for left_out in parts:
        assert explained(parts.keys() - {left_out}) < explained(parts) - 0.05
