"""Peak memory of every site and of the server, beside the forecast of `explain`.

Every site is a process of its own, as in a deployment; what it had after a run on a few
rows is its baseline. ``wide`` has 20,000 categories of 100,000 rows, each with a
column.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scripts.bench.datasets import Dataset, at_hand
from scripts.bench.harness import Options, Outcome
from scripts.bench.processes import in_process_of_its_own, peak_memory
from scripts.bench.site_processes import ProcessGrid, forget_peak, warm_up
from scripts.data.run_files import write_tables
from strategies import STRATEGIES
from tp_flower import api
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.policy import OPEN

WIDE_ROWS, WIDE_CATEGORIES, CUSTOMERS = 100_000, 20_000, 1_000
WIDE_SQL = """SELECT o.quantity AS label, o.article, o.day, c.age
FROM orders o JOIN customers c ON o.customer = c.id"""
LEAST_BYTES = 15e6
"""Of a process whose forecast is compared: below it the allocator's rounding counts."""
MOST_APART = 0.3
SERVER = "server"


def wide(rows: int = WIDE_ROWS, categories: int = WIDE_CATEGORIES) -> Dataset:
    """Return orders of so many articles that their columns are not stored densely."""
    rng = np.random.default_rng(0)
    article = rng.integers(0, categories, rows)
    article[:categories] = np.arange(categories)
    customer, day = rng.integers(0, CUSTOMERS, rows), rng.integers(1, 29, rows)
    age = rng.integers(18, 80, CUSTOMERS)
    quantity = rng.normal(size=categories)[article] + 0.02 * age[customer] + 0.1 * day
    orders = {"customer": customer, "day": day, "quantity": quantity}
    orders["article"] = np.char.add("a", article.astype("U8"))
    return Dataset(
        *("wide", "Orders of 20,000 articles", "rmse", WIDE_SQL),
        {"task": "regression", "encoders": f"o.article=one-hot({categories + 1})"},
        {
            "orders": pd.DataFrame(orders),
            "customers": pd.DataFrame({"id": np.arange(CUSTOMERS), "age": age}),
        },
    )


def measure_memory(options: Options) -> Outcome:
    """Train on the benchmark's data sets, and on wide one-hot columns."""
    outcome = Outcome()
    for dataset in _datasets(options):
        with tempfile.TemporaryDirectory() as folder:
            sites = write_sites(dataset, Path(folder))
            settings = {**dataset.settings, "num-epochs": 4}
            arguments = (
                dataset.sql,
                settings,
                {name: str(path) for name, path in sites.items()},
            )
            measured = in_process_of_its_own(run_measured, *arguments, folder)
        apart = []
        for process, peak in measured["measured"].items():
            predicted = measured["forecast"][process]
            name = f"{dataset.name}: {process}"
            outcome.facts |= {
                f"{name}: MB": peak / 1e6,
                f"{name}: forecast, MB": predicted / 1e6,
            }
            if max(peak, predicted) >= LEAST_BYTES:
                apart.append(abs(predicted / peak - 1.0))
        title = f"{dataset.name}: forecast of memory off the measured peak"
        outcome.check(title, max(apart, default=0.0), MOST_APART, "%")
    return outcome


def _datasets(options: Options) -> Iterator[Dataset]:
    yield from at_hand(options.movielens, "flights", "store", "movielens")
    yield wide()


def write_sites(dataset: Dataset, folder: Path) -> dict[str, Path]:
    """Write every table and the tables file of its site."""
    files = {}
    for site, tables in dataset.join_only().items():
        of_site = folder / site
        of_site.mkdir()
        for name, frame in tables.items():
            frame.to_parquet(of_site / f"{name}.parquet")
        shards = {name: [(f"{name}.parquet", site)] for name in tables}
        files[site] = write_tables(of_site, shards, OPEN)
    return files


def run_measured(
    sql: str, settings: Mapping[str, Any], sites: Mapping[str, str], folder: str
) -> dict[str, dict[str, float]]:
    """Return the peak bytes of each process over its baseline, and their forecast."""
    predicted = api.explain(sql, sites, **settings).report["memory"]
    return {
        "measured": in_process_of_its_own(measure_peaks, sql, settings, sites, folder),
        "forecast": {**predicted["sites"], SERVER: predicted["server"]},
    }


def measure_peaks(
    sql: str, settings: Mapping[str, Any], sites: Mapping[str, str], folder: str
) -> dict[str, float]:
    """Train with a process for each site; return the peak bytes over the baselines."""
    paths = {name: Path(path) for name, path in sites.items()}
    warm_up()
    with closing(ProcessGrid(paths, Path(folder) / "state")) as grid:
        grid.peaks()  # the peaks of starting, which are forgotten with it
        before = grid.peaks()
        forget_peak()
        server_before = peak_memory()
        chosen = Settings.from_run_config(settings)
        STRATEGIES[chosen.method_name](Query.from_sql(sql), chosen).start(grid)
        server = peak_memory() - server_before
        peaks = dict(zip(sites, grid.peaks(), strict=True))
    over = {
        name: peak - start
        for (name, peak), start in zip(peaks.items(), before, strict=True)
    }
    return {**over, SERVER: server}
