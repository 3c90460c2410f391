"""Time and memory against training on the materialised join.

Suite ``speed``: ten epochs on flights, set-up included, against scikit-learn fitted to
the joined training rows, and the server's part of an epoch against a copy.

Suite ``centralized``: everything until a good linear model, from data frames in memory
to the first epoch or iteration whose test metric is within 1 % of the best linear
model's, on the same held-out rows.

Every measurement is a process of its own. Each way without tp_flower joins the frames
with DuckDB and encodes the result, dense or as CSR; then it trains by L-BFGS. (By
mini-batches, and with scikit-learn, it was at most 4 % faster or smaller.)
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import duckdb
import numpy as np
import numpy.typing as npt
import pandas as pd
from sqlglot import exp

from scripts.bench.datasets import Dataset, Frames, Tables, by_table, flights_frames
from scripts.bench.harness import (
    Options,
    Outcome,
    best_seconds,
    problem_of,
    train,
    train_timed,
)
from scripts.bench.processes import in_process_of_its_own, spent
from scripts.bench.suites.methods import is_within
from scripts.data.make_store import STORE_SQL, make_store, one_per_site
from scripts.joined.centralized import (
    encode_dense,
    encode_sparse,
    fit_joined,
    join_frames,
    read_label,
)
from scripts.joined.models import Problem, Until, fit_logistic, train_lbfgs
from strategies.methods import admm
from strategies.run.grid import InProcessGrid
from strategies.setup.problem import TrainingProblem
from tp_flower.query import Query
from tp_flower.randomness import Stream, generator
from tp_flower.reports.records import RoundReport
from tp_flower.settings import Settings
from tp_flower.sources.flights import FLIGHTS_SQL
from tp_flower.splits import split_rows

REPEATS = 2
EPOCHS = {"speed": 10, "centralized": 12}
HELD_OUT = "held out by the run"

SERVER_EPOCHS = 12
FIRST_STEADY = 3
COPIES = 15
TIMED: tuple[tuple[type, str, str], ...] = (
    (admm.AdmmServer, "steps", "steps"),
    (admm.AdmmServer, "take", "take"),
    (TrainingProblem, "train_metrics", "metrics"),
    (TrainingProblem, "held_out_metrics", "metrics"),
)
"""Class, method, and the name that its time goes by."""

STORE_SIZES = {"orders": 160_000, "items": 2_000, "customers": 10_000, "parts": 24}
"""An order joins 12.5 rows on average: 2 million joined rows."""
SPECS = 32
"""More columns of a part: 54 features in all, of which the store has 22 without."""
_COLUMNS = ", ".join(f"i.spec_{number + 1}" for number in range(SPECS))
WIDE_STORE_SQL = STORE_SQL.replace("i.fragile,", f"i.fragile, {_COLUMNS},")

Measured = dict[str, float]
Encode = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """Tables with a query.

    Attributes:
        label: alias and table of the label table.
        frames: returns the tables.
        limits: of time and of peak memory, over those without tp_flower.
        passing: tells which rows of the label table pass the query's filter.
    """

    sql: str
    task: str
    label: tuple[str, str]
    metric: str
    frames: Callable[[], Frames]
    limits: Mapping[str, float]
    passing: Callable[[pd.DataFrame], pd.Series]

    @property
    def settings(self) -> Settings:
        """The settings of all methods."""
        return Settings(task=self.task, num_epochs=EPOCHS["centralized"])

    @property
    def mark(self) -> exp.Column:
        """Where `mark_held_out` marks the rows of the label table."""
        return exp.column(HELD_OUT, table=self.label[0], quoted=True)

    def until(self, optimum: float) -> Until:
        """Return whether metrics are within 1 % of the best linear model's."""
        name = self.metric
        return lambda metrics: is_within(metrics[name], name, optimum)


CASES: Mapping[str, Case] = {
    "flights": Case(
        *(FLIGHTS_SQL, "classification", ("f", "flights"), "auc"),
        *(flights_frames, {"time": 1.0}, lambda rows: rows["arr_delay"].notna()),
    ),
    "store": Case(
        *(WIDE_STORE_SQL, "regression", ("o", "orders"), "rmse"),
        lambda: one_per_site(make_store(**STORE_SIZES, specs=SPECS)),
        {"time": 0.5, "memory": 0.5},
        passing=lambda rows: rows["quantity"].notna(),
    ),
}


def measure_speed(_: Options) -> Outcome:
    """Compare ten epochs with DuckDB, encoding and scikit-learn, dense and sparse."""
    ways = (OURS, *ENCODERS)
    ours, dense, sparse = (_fastest(ten_epochs_or_join, way) for way in ways)
    server = in_process_of_its_own(measure_server)
    facts = {
        "ten epochs": ours,
        "DuckDB + dense + scikit-learn": dense,
        "DuckDB + CSR + scikit-learn": sparse,
        "server's part of an epoch": server,
    }
    outcome = Outcome(facts=facts)
    title = f"{EPOCHS['speed']} epochs over DuckDB + encoding + scikit-learn, time"
    outcome.check(title, ours["seconds"] / dense["seconds"], 1.0)
    ratio = ours["peak-mib"] / dense["peak-mib"]
    outcome.check("the same, peak memory", ratio, 1.0)
    title = "server's part of an epoch over one copy of its arrays"
    # at most 5 while the mixer's history was in float64: it halved, and so did the copy
    outcome.check(title, server["epoch-ms"] / server["copy-ms"], 8.0)
    return outcome


def measure_server() -> dict[str, Any]:
    """Return the server's fastest steady epoch, less its metrics, and the floor."""
    calls: list[tuple[str, float]] = []

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = method(*arguments, **named)
            calls.append((name, time.perf_counter() - started))
            return result

        return call

    with ExitStack() as stack:
        for owner, method, name in TIMED:
            call = timed(name, getattr(owner, method))
            stack.enter_context(patch.object(owner, method, call))
        settings = Settings(strategy="admm", num_epochs=SERVER_EPOCHS)
        strategy = train(FLIGHTS_SQL, settings, flights_frames())
    frame = pd.DataFrame(calls, columns=["name", "seconds"])
    frame["epoch"] = (frame["name"] == "steps").cumsum()
    epochs = frame.pivot_table("seconds", "epoch", "name", "sum").loc[FIRST_STEADY:]
    # metrics are computed where the scores are taken
    least = (epochs["steps"] + epochs["take"] - epochs["metrics"]).min()
    arrays = touched_arrays(problem_of(strategy))
    copies = [np.empty_like(array) for array in arrays]

    def copy_all() -> None:
        for source, copy in zip(arrays, copies, strict=True):
            np.copyto(copy, source)

    (copy,) = best_seconds(copy_all, repeats=COPIES, clock=time.perf_counter)
    return {"epoch-ms": 1000.0 * float(least), "copy-ms": 1000.0 * copy}


def touched_arrays(problem: TrainingProblem) -> list[npt.NDArray[Any]]:
    """Return arrays like those that one epoch cannot do without.

    ``row_of`` of all tables, local scores in, targets out; z, duals, scores and labels
    of the joined rows.
    """
    outputs, total = problem.response.outputs, problem.train.joined_rows
    arrays: list[npt.NDArray[Any]] = [problem.objective.target.columns]
    for name, rows in problem.train.tables.items():
        # float32 as they travel
        scores = np.ones((problem.tables[name].total_rows, outputs), np.float32)
        arrays += [rows.row_of, scores, scores.copy()]
    return arrays + [np.ones((total, outputs)) for _ in range(3)]


def ten_epochs_or_join(way: str) -> Measured:
    """Train ten epochs on flights, or join, encode and fit scikit-learn."""
    frames, case = flights_frames(), CASES["flights"]
    if way == OURS:
        return _measured(partial(_ten_epochs, frames))
    return _measured(partial(_join_and_fit, way, case, mark_held_out(case, frames)))


def _ten_epochs(frames: Frames) -> Measured:
    settings = Settings(strategy="admm", num_epochs=EPOCHS["speed"])
    strategy, rounds = train_timed(FLIGHTS_SQL, settings, frames)
    return {
        "set-up-seconds": float(rounds["seconds"][rounds["epoch"] == 0].sum()),
        "test-auc": strategy.report.final_test["auc"],
    }


def _join_and_fit(way: str, case: Case, tables: Tables) -> Measured:
    columns, label, is_test = join_frames(Query.from_sql(case.sql), tables, case.mark)
    labels = read_label(label, is_test, case.settings).target.numbers
    features = ENCODERS[way](fit_joined(columns, ~is_test), columns, ~is_test)
    fit_logistic(features, labels[~is_test], case.settings.l2)
    return {}


def _measured(run: Callable[[], Measured]) -> Measured:
    """Return what a run says and spends; DuckDB and the BLAS have started before."""
    with duckdb.connect() as connection:
        connection.execute("SELECT 1.0 AS a").fetchnumpy()
    np.linalg.eigh(np.eye(4))
    with spent() as measured:
        measured.update(run())
    return measured


def _fastest(function: Callable[..., Any], *arguments: object) -> Measured:
    """Return the fastest of some repeats, each in a process of its own."""
    runs = [in_process_of_its_own(function, *arguments) for _ in range(REPEATS)]
    fastest: Measured = min(runs, key=lambda run: float(run["seconds"]))
    return fastest


def measure_centralized(_: Options) -> Outcome:
    """Compare a run with training on the materialised join, on flights and store."""
    outcome = Outcome()
    for name, case in CASES.items():
        optimum = in_process_of_its_own(best_metric, name)
        ours, *others = (
            _fastest(to_good_model, name, way, optimum) for way in (OURS, *ENCODERS)
        )
        outcome.facts[f"{name}: {case.metric} of the best linear model"] = optimum
        outcome.facts[f"{name}: tp-flower"] = ours
        joins = zip(ENCODERS, others, strict=True)
        outcome.facts |= {f"{name}: join, {way}, L-BFGS": run for way, run in joins}
        for kind, key in (("time", "seconds"), ("memory", "peak-mib")):
            title = f"{name}: {kind} over the least without tp_flower"
            ratio = ours[key] / min(run[key] for run in others)
            outcome.facts[title] = ratio
            if kind in case.limits:
                outcome.check(title, ratio, case.limits[kind])
    return outcome


def best_metric(name: str) -> float:
    """Return the test metric of a case's best linear model."""
    case = CASES[name]
    dataset = Dataset("", "", case.metric, case.sql, {}, by_table(case.frames()))
    problem = Problem.of(dataset.joined(case.settings), case.settings)
    return float(problem.test_metrics(problem.optimum())[case.metric])


def to_good_model(name: str, way: str, optimum: float) -> Measured:
    """Measure one way until the metric is within 1 % of the best linear model's."""
    case = CASES[name]
    frames, until = case.frames(), case.until(optimum)
    if way == OURS:
        return _measured(partial(run_tp_flower, case, frames, until))
    tables = mark_held_out(case, frames)
    return _measured(partial(run_joined, way, case, tables, until))


def run_tp_flower(case: Case, frames: Frames, until: Until) -> Measured:
    """Train by ADMM; the clock stops at the first epoch that is good.

    Raises:
        RuntimeError: no epoch is.
    """
    good: Measured = {}

    def on_round(report: RoundReport, _: InProcessGrid) -> None:
        if report.train and not good and until(report.test):
            good["seconds"] = time.perf_counter() - started
            good["cpu-seconds"] = time.process_time() - cpu_started
            good["steps"] = report.epoch

    started, cpu_started = time.perf_counter(), time.process_time()
    train(case.sql, case.settings, frames, on_round)
    if not good:
        raise RuntimeError("no epoch came within 1 % of the best linear model")
    return good


def run_joined(way: str, case: Case, tables: Tables, until: Until) -> Measured:
    """Join, encode and train; which rows are held out is marked beforehand."""
    encode, settings = ENCODERS[way], case.settings
    started = time.perf_counter()
    columns, label, is_test = join_frames(Query.from_sql(case.sql), tables, case.mark)
    joined = time.perf_counter()
    objective = read_label(label, is_test, settings)
    encoder = fit_joined(columns, ~is_test)
    problem = Problem(
        train=encode(encoder, columns, ~is_test),
        mean_loss=objective.select(~is_test),
        test=encode(encoder, columns, is_test),
        test_loss=objective.select(is_test),
        l2=settings.l2,
    )
    del columns, label  # the joined table is not needed any more
    encoded = time.perf_counter()
    curve = train_lbfgs(problem, until)
    is_good = until(curve.test[-1])
    return {
        "seconds": encoded - started + (curve.seconds[-1] if is_good else math.inf),
        "join-seconds": joined - started,
        "encode-seconds": encoded - joined,
        "steps": len(curve.test),
    }


def mark_held_out(case: Case, frames: Frames) -> Tables:
    """Return the whole tables, with a column that says which rows a run holds out."""
    tables, table = by_table(frames), case.label[1]
    # what is held out is counted among the rows that pass the filter
    passing = case.passing(tables[table]).to_numpy()
    rng = generator(case.settings.seed, Stream.SPLIT)
    held_out = np.zeros(len(passing), dtype=bool)
    fraction = case.settings.test_fraction
    held_out[passing] = split_rows(int(passing.sum()), fraction, rng)
    tables[table] = tables[table].assign(**{HELD_OUT: held_out})
    return tables


OURS = "tp-flower"
ENCODERS: Mapping[str, Encode] = {"dense": encode_dense, "CSR": encode_sparse}
