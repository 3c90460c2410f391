"""The data sets of the benchmarks, and runs over what the scripts have prepared."""

import functools
import os
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from scripts.bench.datasets import by_table, flights_frames
from scripts.data.make_store import STORE_SQL, make_store
from scripts.data.prepare_movielens import SQL as MOVIELENS_SQL
from scripts.data.prepare_movielens import read_movielens
from tests.support.federated import LocalGrid, Sites, one_per_site, pieces, train
from tests.support.files import ROOT
from tp_flower.reports.records import RunReport
from tp_flower.settings import Settings
from tp_flower.sources.flights import FLIGHTS_SQL

DEFAULT = ROOT.parent / "shared" / "data" / "ml-100k"
FOLDER = Path(os.environ.get("TP_FLOWER_MOVIELENS", DEFAULT))
SQL = {"flights": FLIGHTS_SQL, "store": STORE_SQL, "movielens": MOVIELENS_SQL}
is_absent = pytest.mark.skipif(
    not (FOLDER / "u.data").exists(), reason="no folder with MovieLens-100K"
)
each_data_set = pytest.mark.parametrize(
    "name", ["flights", "store", pytest.param("movielens", marks=is_absent)]
)


@functools.cache
def tables_of(name: str) -> dict[str, pd.DataFrame]:
    """Return every table whole."""
    if name == "flights":
        return by_table(flights_frames())
    if name == "store":
        # a fan-out of ten or more
        frames = make_store(orders=4_000, items=40, customers=120, seed=3)
        return {name: pd.concat(own, ignore_index=True) for name, own in frames.items()}
    return read_movielens(FOLDER)


def few_rows(name: str, rows: int) -> dict[str, pd.DataFrame]:
    """Return the tables with a sample of the label table's rows, the first."""
    tables = dict(tables_of(name))
    label = next(iter(tables))
    some = tables[label].sample(min(rows, len(tables[label])), random_state=1)
    return {**tables, label: some.reset_index(drop=True)}


def sites_of(tables: dict[str, pd.DataFrame], *, is_sharded: bool) -> Sites:
    """Deal the tables to sites; sharded, each is cut in two at a third."""
    cut = {
        name: pieces(frame, *[len(frame) // 3] * is_sharded)
        for name, frame in tables.items()
    }
    return one_per_site(cut)


def run_prepared(output: Path, **changes: Any) -> RunReport:
    """Train two epochs in process, on two nodes, as OUTPUT/my-run.toml says."""
    config = tomllib.loads((output / "my-run.toml").read_text(encoding="utf-8"))
    settings = Settings.from_run_config({**config, "num-epochs": 2, **changes})
    grid = LocalGrid(2, run_config={"tables": settings.tables})
    return train(grid, settings.sql, settings.method_name, settings=settings).report


def table(output: Path, name: str) -> pd.DataFrame:
    return pd.read_parquet(output / f"{name}.parquet")
