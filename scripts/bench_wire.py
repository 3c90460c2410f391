"""What half the bytes on the wire cost in accuracy, and what packing costs in time.

    python scripts/benchmark.py --suite wire

Every run is one of the same seed, with only the setting ``wire`` changed.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from bench_movielens import SQL as MOVIELENS_SQL
from bench_movielens import TEST_FRACTION, has_movielens, read_movielens
from bench_runs import Check, Frames, Outcome, run_traced

from tp_flower.datasets import (
    FLIGHTS_REGRESSION_SQL,
    FLIGHTS_SQL,
    STORE_SQL,
    make_store,
)
from tp_flower.experiment import Settings
from tp_flower.protocol import Packet, pack, unpack
from tp_flower.report import RunReport
from tp_flower.wire import Precision, round_stochastically

METRIC = {"classification": "auc", "regression": "rmse"}
NARROW = ("float16", "bfloat16")

MOST_CHANGE = 0.001
"""Of the test metric, float16 against float32."""

MOST_BYTES = 0.5 * 1.02
"""Of the targets, messages and scores of an epoch, against float32's."""

ROW_PHASES = ("admm", "sgd")
"""Rounds whose messages down hold numbers per row and nothing else."""

EPOCHS = {"admm": 0, "sgd": 3}
ORGANISATIONS = 5

ROUNDED = 1_000_000
GIGABIT_SECONDS = 16e-9 * ROUNDED
"""Two bytes per number over 1 Gb/s."""

PACKED_ARRAYS = 8
PACKED_ROWS = 500
PACK_SECONDS = 60e-6
LARGE_BYTES = 64 << 20
REPEATS = 7


@dataclass(frozen=True)
class _Data:
    """A training set.

    Attributes:
        name: for people.
        sql: the query.
        sites: the tables of each site, or how many there are.
        settings: that all runs on it have.
    """

    name: str
    sql: str
    sites: int | Mapping[str, Frames]
    settings: Settings


def measure_wire(movielens: Path | None = None) -> Outcome:
    """Train on each data set with each method and precision; MovieLens if it is there.

    Args:
        movielens: folder of MovieLens-100K's files.
    """
    outcome = Outcome()
    for data in _data_sets(movielens):
        for method in EPOCHS:
            _measure_method(outcome, data, method)
    return outcome


def _data_sets(movielens: Path | None) -> list[_Data]:
    tables = make_store(orders=20_000, items=300, customers=1_500, seed=1)
    store = {name: {name: shards} for name, shards in tables.items()}
    found = [
        _Data(f"flights {task}", sql, ORGANISATIONS, Settings(task=task))
        for task, sql in (
            ("classification", FLIGHTS_SQL),
            ("regression", FLIGHTS_REGRESSION_SQL),
        )
    ]
    found.append(_Data("store", STORE_SQL, store, Settings(task="regression")))
    if movielens is not None and has_movielens(movielens):
        sites = {n: {n: frame} for n, frame in read_movielens(movielens).items()}
        settings = Settings(task="regression", test_fraction=TEST_FRACTION)
        found.append(_Data("MovieLens", MOVIELENS_SQL, sites, settings))
    return found


def _measure_method(outcome: Outcome, data: _Data, method: str) -> None:
    metric = METRIC[data.settings.task]
    own = data.settings.with_fields(strategy=method, num_epochs=EPOCHS[method])
    reports: dict[str, RunReport] = {
        wire: run_traced(
            data.sql, own.with_fields(wire=wire), data.sites
        ).strategy.report
        for wire in ("float32", *NARROW)
    }
    before = reports["float32"]
    name = f"{data.name}, {method}"
    outcome.facts[f"{name}: test {metric}, float32"] = before.final_test[metric]
    for wire in NARROW:
        after = reports[wire]
        change = abs(after.final_test[metric] / before.final_test[metric] - 1.0)
        rows = row_bytes(after) / row_bytes(before)
        outcome.facts[f"{name}, {wire}: change of the test {metric}"] = change
        outcome.facts[f"{name}, {wire}: bytes of rows over float32's"] = rows
        outcome.facts[f"{name}, {wire}: all bytes over float32's"] = epoch_bytes(
            after
        ) / epoch_bytes(before)
        if wire == "float16":
            what = f"{name}, float16"
            outcome.checks += [
                Check(f"{what}: change of the test {metric}", change, MOST_CHANGE, "%"),
                Check(f"{what}: bytes of an epoch's rows", rows, MOST_BYTES),
            ]


def row_bytes(report: RunReport) -> int:
    """Return the bytes down of the rounds that carry nothing but numbers per row."""
    return sum(
        sum(item.bytes_down.values())
        for item in report.history
        if item.epoch and item.phase in ROW_PHASES
    )


def epoch_bytes(report: RunReport) -> int:
    """Return the bytes of all epochs, both ways, with statistics and gradients."""
    return sum(
        sum(item.bytes_up.values()) + sum(item.bytes_down.values())
        for item in report.history
        if item.epoch
    )


def measure_packing() -> Outcome:
    """Time rounding, packing and unpacking: the machine's own seconds, best of some."""
    rng = np.random.default_rng(0)
    outcome = Outcome()
    values = rng.normal(size=(ROUNDED, 1))
    for precision in (Precision.FLOAT16, Precision.BFLOAT16):
        narrow = round_stochastically(values, precision, rng)
        rounding = best_seconds(partial(round_stochastically, values, precision, rng))
        outcome.facts[f"{precision}: seconds to round 10^6 numbers"] = rounding
        outcome.facts[f"{precision}: seconds to read them"] = best_seconds(narrow.wide)
        outcome.checks.append(
            Check(
                f"{precision}: rounding over sending at 1 Gb/s",
                rounding / GIGABIT_SECONDS,
                0.5,
            )
        )
    small = Packet(
        {"batch": 1, "next-batch": 2, "evaluate": None, "momentum": 0.9},
        {
            (part, "messages"): rng.normal(size=(PACKED_ROWS, 1)).astype(np.float32)
            for part in range(PACKED_ARRAYS)
        },
    )
    seconds = best_seconds(lambda: unpack(pack(small)), times=200)
    name = f"packing and unpacking {PACKED_ARRAYS} arrays of {PACKED_ROWS} rows"
    outcome.checks.append(Check(name, seconds, PACK_SECONDS, "s"))
    array = np.ones(LARGE_BYTES // 8)
    large = Packet({}, {(0, "x"): array})
    packing, copying = best_seconds(lambda: pack(large)), best_seconds(array.tobytes)
    content = pack(large)
    outcome.facts |= {
        "packing 64 MiB over one copy": packing / copying,
        "unpacking 64 MiB over one copy": best_seconds(lambda: unpack(content))
        / copying,
    }
    return outcome


def best_seconds(function: Callable[[], object], times: int = 1) -> float:
    """Return the least processor seconds that a call took."""
    found = []
    for _ in range(REPEATS):
        started = time.process_time()
        for _ in range(times):
            function()
        found.append((time.process_time() - started) / times)
    return min(found)
