"""Time and memory of ten epochs against the way without tp_flower, on flights.

Every measurement is a process of its own (`python scripts/bench_speed.py NAME` prints
one as JSON), so that peak memory is comparable. Data frames are in memory and all is
imported before the clock starts. The way without tp_flower: DuckDB joins the frames,
the result is encoded, scikit-learn's LogisticRegression is fitted to 80 % of the rows.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import duckdb
import numpy as np
import scipy.sparse as sp
from bench_processes import forget_peak, in_process_of_its_own, peak_memory
from bench_runs import Check, Outcome, by_table, flights_frames
from bench_server import measure_server
from centralized import (
    LABEL,
    Column,
    Item,
    encode,
    read_columns,
    read_label,
    select_items,
    simulated_hasher,
)
from optima import fit_scikit_learn

from client_apps.app import app
from strategies import TablePuppetADMM
from tp_flower.datasets import FLIGHTS_SQL
from tp_flower.encoding.choice import choose_encoders
from tp_flower.encoding.columns import BoolArray, CategoricalColumn
from tp_flower.encoding.encoder import SiteEncoder
from tp_flower.encoding.fitting import fit
from tp_flower.encoding.hashed import CategoryEncoding
from tp_flower.encoding.statistics import Sample, feature_statistics
from tp_flower.experiment import Settings
from tp_flower.grid import InProcessGrid
from tp_flower.joins.mapping import split_rows
from tp_flower.query import Query
from tp_flower.sources.shards import column_types

EPOCHS = 10
REPEATS = 2
MEBIBYTE = 1 << 20

Frames = Mapping[str, Mapping[str, Any]]
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
            5.0,
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
    return _run_joined(frames, _dense)


def run_sparse(frames: Frames) -> Measured:
    """Join, encode as CSR and fit."""
    return _run_joined(frames, _sparse)


def _run_joined(frames: Frames, make: Callable[..., object]) -> Measured:
    started = time.perf_counter()
    items, values = _join(frames)
    joined = time.perf_counter()
    rng = np.random.default_rng(0)
    total = values[LABEL].values.rows
    is_test = split_rows(total, Settings().test_fraction, rng)
    labels, _ = read_label(values.pop(LABEL), is_test, Settings())
    encoders = {}
    for table in dict.fromkeys(table for table, _ in items if table):
        own = {name: value for (t, name), value in values.items() if t == table}
        choice = choose_encoders((), {table: list(own)})[table]
        sample = Sample(simulated_hasher(0), rows=~is_test)
        statistics = {
            name: feature_statistics(choice, name, value.kind, value.values, sample)
            for name, value in own.items()
        }
        encoders[table] = fit(table, statistics).at_site(sample.hasher)
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


def _join(frames: Frames) -> tuple[list[Item], dict[Item, Column]]:
    query = Query.from_sql(FLIGHTS_SQL)
    with closing(duckdb.connect()) as connection:
        pieces: dict[str, list[str]] = {}
        for site, tables in frames.items():
            for table, frame in tables.items():
                connection.register(f"{table}_{site}", frame)
                pieces.setdefault(table, []).append(f'SELECT * FROM "{table}_{site}"')
        schemas = {}
        for table, selects in pieces.items():
            select = " UNION ALL ".join(selects)
            connection.execute(f"CREATE VIEW {table} AS {select}")
            schemas[table] = column_types(connection, f"SELECT * FROM {table}")
        items = select_items(query, schemas)
        columns = read_columns(connection, query.to_sql(), len(items))
    return items, dict(zip(items, columns, strict=True))


def _dense(
    encoders: Mapping[str, SiteEncoder],
    values: Mapping[Item, Column],
    rows: BoolArray,
) -> object:
    features, _ = encode(encoders, values, np.flatnonzero(rows))
    return features


def _sparse(
    encoders: Mapping[str, SiteEncoder],
    values: Mapping[Item, Column],
    rows: BoolArray,
) -> object:
    """The same matrix as CSR: one non-zero per category, numbers as they are."""
    chosen = np.flatnonzero(rows)
    blocks = []
    for table, encoder in encoders.items():
        for encoding in encoder.encoder.encodings:
            name = encoding.name
            alone = replace(encoder.encoder, encodings=(encoding,))
            column, one = values[table, name].values, SiteEncoder(alone, encoder.keys)
            is_text = isinstance(encoding, CategoryEncoding)
            if not is_text or not isinstance(column, CategoricalColumn):
                dense = one.transform({name: column}, rows=chosen)
                blocks.append(sp.csr_matrix(dense))
                continue
            # row k of this small matrix is how local category k is encoded
            codes = np.append(np.arange(len(column.texts)), -1).astype(np.int32)
            table_of = CategoricalColumn(codes, column.texts)
            small = sp.csr_matrix(one.transform({name: table_of}))
            blocks.append(small[column.codes[chosen]])
    return sp.hstack(blocks, format="csr", dtype=np.float32)


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
