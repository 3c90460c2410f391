"""Time and memory of ten epochs against the way without tp_flower, on flights.

Every measurement is a process of its own (`python scripts/bench/suites/speed.py NAME`
prints one as JSON), so that peak memory is comparable. Data frames are in memory and
all is imported before the clock starts. The way without tp_flower: DuckDB joins the
frames, the result is encoded, scikit-learn's LogisticRegression is fitted to 80 % of
the rows.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from client_apps.app import app
from scripts.bench.processes import forget_peak, in_process_of_its_own, peak_memory
from scripts.bench.runs import Check, Outcome, by_table, flights_frames
from scripts.bench.server_epoch import measure_server
from scripts.joined.centralized import LABEL, read_label
from scripts.joined.frames import (
    Frames,
    encode_dense,
    encode_sparse,
    fit_encoders,
    join_frames,
)
from scripts.joined.optima import fit_scikit_learn
from strategies import TablePuppetADMM
from strategies.run.grid import InProcessGrid
from tp_flower.joins.mapping import split_rows
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.flights import FLIGHTS_SQL

EPOCHS = 10
REPEATS = 2
MEBIBYTE = 1 << 20

Measured = dict[str, Any]


def measure_speed() -> Outcome:
    """Compare a run with DuckDB, encoding and scikit-learn, dense and sparse."""
    own, dense, sparse = _best_of(REPEATS, ("tp-flower", "dense", "sparse"))
    server = in_process_of_its_own(__file__, "server")
    outcome = Outcome()
    outcome.facts = {
        "ten epochs": own,
        "DuckDB + dense + scikit-learn": dense,
        "DuckDB + CSR + scikit-learn": sparse,
        "CPU time over that of the dense way": own["cpu-seconds"]
        / dense["cpu-seconds"],
        "time over that of the sparse way": own["seconds"] / sparse["seconds"],
        "CPU time over that of the sparse way": own["cpu-seconds"]
        / sparse["cpu-seconds"],
        "peak over that of the sparse way": own["peak-mib"] / sparse["peak-mib"],
        "server's part of an epoch": server,
    }
    outcome.checks = [
        Check(
            f"{EPOCHS} epochs over DuckDB + encoding + scikit-learn, time",
            own["seconds"] / dense["seconds"],
            1.0,
        ),
        Check("the same, peak memory", own["peak-mib"] / dense["peak-mib"], 1.0),
        Check(
            "server's part of an epoch over one copy of its arrays",
            server["epoch-ms"] / server["copy-ms"],
            # 5 while the mixer's history was in float64: it halved, and so did the copy
            8.0,
        ),
    ]
    return outcome


def _best_of(repeats: int, names: Sequence[str]) -> list[Measured]:
    """Return the fastest of several measurements of each, taken in turns."""
    rounds = [
        [in_process_of_its_own(__file__, name) for name in names]
        for _ in range(repeats)
    ]
    return [
        min(same, key=lambda measured: float(measured["seconds"]))
        for same in zip(*rounds, strict=True)
    ]


def run_tp_flower(frames: Frames) -> Measured:
    """Train ten epochs with the default settings, set-up included."""
    started = time.perf_counter()
    with closing(InProcessGrid(app, frames)) as grid:
        strategy = TablePuppetADMM(Query.from_sql(FLIGHTS_SQL), num_epochs=EPOCHS)
        strategy.start(grid)
    seconds = time.perf_counter() - started
    history = strategy.report.history
    in_set_up = [item for item in history if item.epoch == 0]
    set_up = sum(
        item.server_seconds + item.client_seconds + item.wait_seconds
        for item in in_set_up
    )
    return {
        "seconds": seconds,
        "set-up-seconds": set_up,
        "test-auc": strategy.report.final_test["auc"],
    }


def run_dense(frames: Frames) -> Measured:
    """Join, encode as float32 and fit."""
    return _run_joined(frames, encode_dense)


def run_sparse(frames: Frames) -> Measured:
    """Join, encode as CSR and fit."""
    return _run_joined(frames, encode_sparse)


def _run_joined(frames: Frames, make: Callable[..., object]) -> Measured:
    started = time.perf_counter()
    values = join_frames(Query.from_sql(FLIGHTS_SQL), frames)
    joined = time.perf_counter()
    rng = np.random.default_rng(0)
    total = values[LABEL].values.rows
    is_test = split_rows(total, Settings().test_fraction, rng)
    labels, _ = read_label(values.pop(LABEL), is_test, Settings())
    encoders = fit_encoders(values, ~is_test)
    features = make(encoders, values, ~is_test)
    encoded = time.perf_counter()
    fitted = fit_scikit_learn(features, labels[~is_test], Settings().l2)
    ended = time.perf_counter()
    return {
        "seconds": ended - started,
        "join-seconds": joined - started,
        "encode-seconds": encoded - joined,
        "fit-seconds": ended - encoded,
        "iterations": fitted.steps,
    }


MEASUREMENTS: Mapping[str, Callable[[Frames], Measured]] = {
    "tp-flower": run_tp_flower,
    "server": measure_server,
    "dense": run_dense,
    "sparse": run_sparse,
}


def main(name: str) -> None:
    """Print one measurement as JSON."""
    frames = flights_frames()
    # what DuckDB and the BLAS set up once per process is nobody's work
    by_table({"warm": {"up": next(iter(frames.values()))["weather"]}})
    np.linalg.eigh(np.eye(4))
    forget_peak()
    before, cpu_before = peak_memory(), time.process_time()
    measured = MEASUREMENTS[name](frames)
    measured["cpu-seconds"] = time.process_time() - cpu_before
    measured["peak-mib"] = (peak_memory() - before) / MEBIBYTE
    print(json.dumps({**measured, "baseline-mib": before / MEBIBYTE}))


if __name__ == "__main__":
    main(sys.argv[1])
