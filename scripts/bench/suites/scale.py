"""Cost at the size of the papers' data sets, and how it grows.

Suite ``linearity``: CPU time by joined rows of a store, and a site's set-up by the
number of a table's shards. Suite ``paper-scale``: an ADMM epoch at the size of the
papers' Yelp beside its floor, numpy's own X^T R and X theta in float32 over the memory
map of the largest table's features that the run has just used: its pages are in the
page cache in both.

Peak memory is all but mapped files: ``RssAnon`` of /proc/self/status, every 20 ms.
Tables of the papers' size are written to the folder of --paper-scale unless they are
there (10 GB at factor 1, and as much again for encoded features, which stay).
"""

import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from scripts.bench.harness import (
    OnRound,
    Options,
    Outcome,
    Results,
    SkippedSuite,
    best_seconds,
    participants_of,
    problem_of,
    train,
    train_timed,
)
from scripts.bench.processes import in_process_of_its_own, status_bytes
from scripts.data.make_store import STORE_SQL, make_store
from scripts.data.paper_scale import SQL, STARS, write_paper_scale
from scripts.data.run_files import write_tables
from strategies.run.grid import InProcessGrid
from tp_flower.features.sparse import dense
from tp_flower.learning.models.local_model import host_features
from tp_flower.reports.records import RoundReport
from tp_flower.settings import Settings
from tp_flower.sources.policy import OPEN

EPOCHS = 8
STEADY_EPOCH = 4
"""The first that counts: the page cache is warm."""
MOST_PASSES = 3.0
MOST_GIGABYTES = 6.0
SAMPLE_SECONDS = 0.02
FLOOR_REPEATS = 3
DATA = "yelp"

STORE_ROWS = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
PARTS_PER_ITEM = 2.5
MOST_SLOPE = 1.1
STORE_EPOCHS = 4

SHARDS = (10, 100, 1000)
ROWS_PER_SHARD = 50


def train_watched(
    sql: str, settings: Settings, tables: Path, on_round: OnRound = None
) -> tuple[Results, pd.DataFrame]:
    """Train at one site, whose state stays beside its tables.

    Returns figures of the whole run; and the seconds and CPU seconds of its rounds by
    epoch, of which 0 is set-up.
    """
    peak, stop = 0, threading.Event()

    def sample_memory() -> None:
        nonlocal peak
        while not stop.wait(SAMPLE_SECONDS):
            peak = max(peak, status_bytes("RssAnon"))

    thread = threading.Thread(target=sample_memory, daemon=True)
    thread.start()
    try:
        sites, state = {"all": tables}, tables.parent / "state"
        strategy, rounds = train_timed(sql, settings, sites, on_round, state)
    finally:
        stop.set()
        thread.join()
    figures = {
        "joined-rows": problem_of(strategy).train.joined_rows,
        "peak-gb": peak / 1e9,
        "train-loss": strategy.report.final_train["loss"],
        "test": dict(strategy.report.final_test),
    }
    return figures, rounds.groupby("epoch").sum()


def paper_tables(options: Options) -> Path:
    """Return the tables file of this size, written if it is not there."""
    if options.paper_scale is None:
        raise SkippedSuite("no folder given with --paper-scale")
    sized = options.paper_scale / f"{DATA}-{options.factor:g}"
    tables = sized / "tables.toml"  # which is written last
    return tables if tables.exists() else write_paper_scale(sized, options.factor)


def measure_paper_scale(options: Options) -> Outcome:
    """Train on the papers' sizes; at factor 1 40 GB of disk and ten minutes."""
    run = in_process_of_its_own(run_paper_scale, str(paper_tables(options)))
    outcome = Outcome(facts={f"{DATA}, factor {options.factor:g}": run})
    title = f"{DATA}: ADMM epoch over two plain passes over the largest table"
    outcome.check(title, run["epoch-seconds"] / run["floor-seconds"], MOST_PASSES)
    title = f"{DATA}: peak memory beside mapped files"
    outcome.check(title, run["peak-gb"], MOST_GIGABYTES, "GB")
    return outcome


def run_paper_scale(tables: str) -> Results:
    """Train ADMM's linear model at the papers' size; measure the floor."""
    floor: list[float] = []

    def on_round(report: RoundReport, grid: InProcessGrid) -> None:
        if report.epoch == EPOCHS:
            floor.extend(_floor(grid))

    settings = Settings(strategy="admm", task="classification", num_epochs=EPOCHS)
    figures, epochs = train_watched(SQL, settings, Path(tables), on_round)
    return figures | {
        "set-up-seconds": float(epochs["seconds"][0]),
        "epoch-seconds": float(epochs["seconds"].loc[STEADY_EPOCH:].min()),
        "floor-seconds": min(floor),
    }


def _floor(grid: InProcessGrid) -> list[float]:
    """Return the seconds of X^T R and X theta of the reviews."""
    (features,) = [
        dense(host_features(part.data.features))
        for part in participants_of(grid)
        if part.data.table == "reviews"
    ]
    rng = np.random.default_rng(0)
    theta = rng.standard_normal((features.shape[1], STARS), dtype=np.float32)
    residual = rng.standard_normal((len(features), STARS), dtype=np.float32)

    def two_passes() -> None:
        _ = features.T @ residual
        _ = features @ theta

    clock = time.perf_counter
    return best_seconds(two_passes, repeats=FLOOR_REPEATS, clock=clock)


def measure_linearity(
    _: Options, rows: Sequence[int] = STORE_ROWS, shards: Sequence[int] = SHARDS
) -> Outcome:
    """Train on stores of growing size; cost must grow no faster than it.

    ``rows`` are joined rows, about; ``shards`` of the orders, at one site.
    """
    outcome = Outcome()
    orders = [round(n / PARTS_PER_ITEM) for n in rows]
    runs = [in_process_of_its_own(run_store, number) for number in orders]
    joined = [run["joined-rows"] for run in runs]
    outcome.facts |= {f"store, {run['joined-rows']:,} rows": run for run in runs}
    for part in ("epoch", "set-up"):
        slope = log_slope(joined, [run[f"{part}-cpu-seconds"] for run in runs])
        title = f"store, {part}: slope of log time over log rows"
        outcome.check(title, slope, MOST_SLOPE)
    seconds = [shard_set_up(number) for number in shards]
    for number, spent in zip(shards, seconds, strict=True):
        outcome.facts[f"store, {number} shards: seconds of a site's set-up"] = spent
    title = "store, a site's set-up: slope of log time over log shards"
    outcome.check(title, log_slope(shards, seconds), MOST_SLOPE)
    return outcome


def run_store(orders: int) -> Results:
    """Train on a store with so many orders, from files; 2.5 joined rows each."""
    with tempfile.TemporaryDirectory() as text:
        tables = _write_store(Path(text), orders)
        settings = Settings(strategy="admm", num_epochs=STORE_EPOCHS)
        figures, epochs = train_watched(STORE_SQL, settings, tables)
    return figures | {
        "epoch-cpu-seconds": float(epochs["cpu"].loc[2:].min()),
        "set-up-cpu-seconds": float(epochs["cpu"][0]),
    }


def _write_store(folder: Path, orders: int) -> Path:
    """Write a store's tables; no frame of them is left in memory."""
    sizes = (orders, max(orders // 50, 10), max(orders // 10, 10))
    shards: dict[str, list[tuple[str, str]]] = {}
    for table, frames in make_store(*sizes).items():
        for k, frame in enumerate(frames):
            name = f"{table}-{k}"
            frame.to_parquet(folder / f"{name}.parquet", index=False)
            shards.setdefault(table, []).append((f"{name}.parquet", name))
    return write_tables(folder, shards, OPEN)


def shard_set_up(shards: int) -> float:
    """Return the seconds of a site's set-up with as many shards of the orders."""
    tables = make_store(shards * ROWS_PER_SHARD, items=100, customers=300)
    (orders,) = tables["orders"]
    tables["orders"] = [
        orders.iloc[start : start + ROWS_PER_SHARD].reset_index(drop=True)
        for start in range(0, len(orders), ROWS_PER_SHARD)
    ]
    report = train(STORE_SQL, Settings(strategy="admm", num_epochs=1), [tables]).report
    set_up = (x for x in report.history if not x.epoch and x.phase != "finish")
    return sum(item.client_seconds for item in set_up)


def log_slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the least-squares slope of log cost over log size."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])
