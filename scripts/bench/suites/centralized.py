"""Time and memory to a good linear model, against training on the materialised join.

Good is: within 1 % of the best linear model's test metric, on the same held-out rows.
Everything counts, from data frames in memory to the first epoch or iteration that is
good: set-up, join, encoding, training. Every measurement is a process of its own.

Each way without tp_flower joins the frames with DuckDB and encodes the result, dense or
as CSR; then it trains by L-BFGS, by mini-batches, or with scikit-learn, which is given
the fewest iterations that suffice (the closed form for a regression). tp_flower is
compared with the fastest and with the leanest of them.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

import duckdb
import numpy as np
import pandas as pd

from client_apps.app import app
from scripts.bench.processes import forget_peak, in_process_of_its_own, peak_memory
from scripts.bench.runs import Check, Outcome, by_table, flights_frames
from scripts.data.store import STORE_SQL, make_store
from scripts.joined.baselines import Until, train_lbfgs, train_scikit_learn, train_sgd
from scripts.joined.centralized import LABEL, join_tables, read_label
from scripts.joined.frames import (
    MARK,
    Frames,
    encode_dense,
    encode_sparse,
    fit_encoders,
    join_frames,
)
from scripts.joined.optima import LinearFit, fit_linear, fit_scikit_learn
from scripts.joined.problem import Problem
from strategies import TablePuppetADMM
from strategies.run.grid import InProcessGrid
from tp_flower.features.columns import NumericColumn
from tp_flower.joins.mapping import split_rows
from tp_flower.learning.metrics import evaluate
from tp_flower.query import Query
from tp_flower.randomness import Stream, generator
from tp_flower.reports.records import Metrics, RoundReport
from tp_flower.settings import Settings
from tp_flower.sources.flights import FLIGHTS_SQL
from tp_flower.sources.shards import (
    MEMORY_PREFIX,
    load_tables,
    register_frames,
    release,
)

MARGIN = 0.01
REPEATS = 3
EPOCHS = 12
MEBIBYTE = 1 << 20
HELD_OUT = "held out by the run"
MOST_ITERATIONS = 128

STORE_SIZES = {"orders": 160_000, "items": 2_000, "customers": 10_000, "parts": 24}
"""An order joins 12.5 rows on average: 2 million joined rows."""
SPECS = 32
"""More columns of a part: 54 features in all, of which the store has 22 without."""

_COLUMNS = ", ".join(f"i.spec_{number + 1}" for number in range(SPECS))
WIDE_STORE_SQL = STORE_SQL.replace("i.fragile,", f"i.fragile, {_COLUMNS},")

Measured = dict[str, float]


@dataclass(frozen=True)
class Case:
    """Tables with a query.

    Attributes:
        sql: the training set.
        task: regression or classification.
        label: alias and table of the label table.
        metric: the test metric, and whether more of it is better.
        frames: returns the tables.
        limits: of time and of peak memory, over those without tp_flower.
    """

    sql: str
    task: str
    label: tuple[str, str]
    metric: tuple[str, bool]
    frames: Callable[[], Frames]
    limits: Mapping[str, float]

    @property
    def settings(self) -> Settings:
        """Return the settings of all methods."""
        return Settings(task=self.task, num_epochs=EPOCHS)

    def until(self, optimum: float) -> Until:
        """Return whether metrics are within 1 % of the best linear model's."""
        name, more_is_better = self.metric
        if more_is_better:
            return lambda metrics: metrics[name] >= (1.0 - MARGIN) * optimum
        return lambda metrics: metrics[name] <= (1.0 + MARGIN) * optimum


def store_frames(specs: int = SPECS) -> Frames:
    """Return the store's tables: two organisations, and a shard of each country."""
    (orders,), (items,), (us, uk) = make_store(**STORE_SIZES, specs=specs).values()
    return {
        "shop": {"orders": orders},
        "warehouse": {"items": items},
        "us": {"customers": us},
        "uk": {"customers": uk},
    }


CASES: Mapping[str, Case] = {
    "flights": Case(
        FLIGHTS_SQL,
        "classification",
        ("f", "flights"),
        ("auc", True),
        flights_frames,
        {"time": 1.0},
    ),
    "store": Case(
        WIDE_STORE_SQL,
        "regression",
        ("o", "orders"),
        ("rmse", False),
        store_frames,
        {"time": 0.5, "memory": 0.5},
    ),
    # as few features as a join can have: shown, without a limit
    "narrow store": Case(
        STORE_SQL,
        "regression",
        ("o", "orders"),
        ("rmse", False),
        lambda: store_frames(specs=0),
        {},
    ),
}


def measure_centralized() -> Outcome:
    """Compare a run with training on the materialised join, on flights and store."""
    outcome = Outcome()
    for name, case in CASES.items():
        optimum = _measure({"case": name, "method": "optimum"})["metric"]
        results = _measure_methods(name, optimum)
        own = results.pop("tp-flower")
        least = {
            "time": min(item["seconds"] for item in results.values()),
            "memory": min(item["peak-mib"] for item in results.values()),
        }
        ratios = {
            "time": own["seconds"] / least["time"],
            "memory": own["peak-mib"] / least["memory"],
        }
        outcome.facts[f"{name}: {case.metric[0]} of the best linear model"] = optimum
        outcome.facts[f"{name}: tp-flower"] = own
        for method, item in results.items():
            outcome.facts[f"{name}: join, {method}"] = item
        least_work = min(item["cpu-seconds"] for item in results.values())
        outcome.facts[f"{name}: CPU time over the least"] = (
            own["cpu-seconds"] / least_work
        )
        for kind, ratio in ratios.items():
            text = f"{name}: {kind} over the least without tp_flower"
            outcome.facts[text] = ratio
            if kind in case.limits:
                outcome.checks.append(Check(text, ratio, case.limits[kind]))
    return outcome


def _measure_methods(name: str, optimum: float) -> dict[str, Measured]:
    """Measure all methods; a case with limits repeats those that these compare."""
    given = {"case": name, "optimum": optimum}
    results = {
        method: _measure({**given, "method": method})
        for method in ("tp-flower", *OPPONENTS)
    }
    fastest = min(OPPONENTS, key=lambda method: results[method]["seconds"])
    repeated = ("tp-flower", fastest) if CASES[name].limits else ()
    for method in (REPEATS - 1) * repeated:
        again = _measure({**given, "method": method})
        results[method] = min(results[method], again, key=lambda m: m["seconds"])
    return results


def _measure(argument: dict[str, object]) -> Measured:
    return in_process_of_its_own(__file__, argument)


def run_tp_flower(case: Case, frames: Frames, until: Until) -> Measured:
    """Train by ADMM; the clock stops at the first epoch that is good.

    Raises:
        RuntimeError: no epoch is.
    """
    good: list[Measured] = []

    def on_round(report: RoundReport) -> None:
        if report.train and not good and until(report.test):
            seconds, spent = time.perf_counter() - started, time.process_time()
            good.append(
                {
                    "seconds": seconds,
                    "steps": report.epoch or 0,
                    "cpu-seconds": spent - cpu_started,
                }
            )

    query = Query.from_sql(case.sql)
    started, cpu_started = time.perf_counter(), time.process_time()
    with closing(InProcessGrid(app, frames)) as grid:
        TablePuppetADMM(query, case.settings, on_round=on_round).start(grid)
    if not good:
        raise RuntimeError("no epoch came within 1 % of the best linear model")
    return good[0]


def train_fewest_iterations(
    problem: Problem, settings: Settings, until: Until
) -> tuple[float, int]:
    """Return seconds and iterations of scikit-learn's cheapest fit that is good.

    The closed form for a regression. Else L-BFGS with the fewest iterations, which are
    looked for beforehand: the time of that one fit counts.

    Raises:
        RuntimeError: none is.
    """
    if problem.loss.name == "squared":
        curve = train_scikit_learn(problem, settings)
        return curve.seconds[-1], 1
    for iterations in range(1, MOST_ITERATIONS):
        started = time.perf_counter()
        fitted = fit_scikit_learn(
            problem.train, problem.train_labels, problem.l2, max_iter=iterations
        )
        seconds = time.perf_counter() - started
        if until(_test_metrics(problem, fitted)):
            return seconds, iterations
    raise RuntimeError("no fit came within 1 % of the best linear model")


def _test_metrics(problem: Problem, fitted: LinearFit) -> Metrics:
    scores = problem.test @ fitted.weights.astype(np.float32) + fitted.intercept
    return evaluate(problem.loss, np.asarray(scores, float), problem.test_labels)


def train_by_lbfgs(
    problem: Problem, settings: Settings, until: Until
) -> tuple[float, int]:
    """Return seconds and iterations of L-BFGS to the first good one."""
    curve = train_lbfgs(problem, settings, until)
    return curve.seconds[-1], len(curve.test)


def train_by_sgd(
    problem: Problem, settings: Settings, until: Until
) -> tuple[float, int]:
    """Return seconds and epochs of SGD to the first good one, inf if none is."""
    curve = train_sgd(problem, settings, until)
    good = until(curve.test[-1])
    return curve.seconds[-1] if good else float("inf"), len(curve.test)


OPPONENTS: Mapping[str, tuple[Callable[..., object], Callable[..., tuple[float, int]]]]
OPPONENTS = {
    "dense, L-BFGS": (encode_dense, train_by_lbfgs),
    "dense, scikit-learn": (encode_dense, train_fewest_iterations),
    "dense, SGD": (encode_dense, train_by_sgd),
    "CSR, L-BFGS": (encode_sparse, train_by_lbfgs),
    "CSR, scikit-learn": (encode_sparse, train_fewest_iterations),
}


def run_joined(method: str, case: Case, frames: Frames, until: Until) -> Measured:
    """Join, encode and train; which rows are held out is known beforehand."""
    encode, train = OPPONENTS[method]
    settings = case.settings
    started = time.perf_counter()
    values = join_frames(
        Query.from_sql(case.sql), frames, marks={case.label[0]: HELD_OUT}
    )
    joined = time.perf_counter()
    mark = values.pop(MARK).values
    if not isinstance(mark, NumericColumn):
        raise TypeError("the mark of held-out rows is true or false")
    is_test = mark.values > 0.0
    labels, loss = read_label(values.pop(LABEL), is_test, settings)
    encoders = fit_encoders(values, ~is_test)
    problem = Problem(
        *(encode(encoders, values, ~is_test), labels[~is_test]),
        *(encode(encoders, values, is_test), labels[is_test]),
        *(loss, settings.l2),
    )
    # the joined table is not needed any more
    del values, mark
    encoded = time.perf_counter()
    seconds, steps = train(problem, settings, until)
    return {
        "seconds": encoded - started + seconds,
        "join-seconds": joined - started,
        "encode-seconds": encoded - joined,
        "steps": steps,
    }


def in_order(frames: Frames) -> Frames:
    """Return the sites in the order in which a run counts the rows of a table."""
    return dict(sorted(frames.items()))


def mark_held_out(case: Case, frames: Frames) -> Frames:
    """Return the frames with a column that says which rows a run holds out."""
    alias, table = case.label
    frames = in_order(frames)
    whole = by_table(frames)[table]
    settings = case.settings
    with duckdb.connect() as connection:
        connection.register(table, whole)
        schemas = {
            name: dict.fromkeys(frame.columns, "VARCHAR")
            for name, frame in by_table(frames).items()
        }
        fragment = Query.from_sql(case.sql).bind(schemas).fragment(alias)
        condition = " AND ".join(f"({text})" for text in fragment.filters) or "true"
        passing = connection.execute(f"SELECT {condition} AS ok FROM {table}").df()
    held_out = np.zeros(len(whole), dtype=bool)
    places = np.flatnonzero(passing["ok"].fillna(value=False).to_numpy(bool))
    rng = generator(settings.seed, Stream.SPLIT)
    held_out[places] = split_rows(len(places), settings.test_fraction, rng)
    marked, start = {}, 0
    for site, tables in frames.items():
        own = dict(tables)
        if table in own:
            end = start + len(own[table])
            own[table] = own[table].assign(**{HELD_OUT: held_out[start:end]})
            start = end
        marked[site] = own
    return marked


def best_linear(case: Case, frames: Frames) -> Measured:
    """Return the test metric of the best linear model."""
    tables = by_table(in_order(frames))
    token = register_frames(tables, site="all")
    joined = join_tables(
        Query.from_sql(case.sql), case.settings, load_tables(MEMORY_PREFIX + token)
    )
    release(token)
    training = joined.part(test=False)
    fitted = fit_linear(joined.loss, *training, case.settings.l2)
    features, labels = joined.part(test=True)
    metrics = evaluate(joined.loss, fitted.scores(features), labels)
    return {"metric": metrics[case.metric[0]]}


def main(argument: str) -> None:
    """Print one measurement as JSON."""
    chosen = json.loads(argument)
    case, method = CASES[chosen["case"]], chosen["method"]
    frames = case.frames()
    if method == "optimum":
        print(json.dumps(best_linear(case, frames)))
        return
    until = case.until(chosen["optimum"])
    if method != "tp-flower":
        frames = mark_held_out(case, frames)
    # what DuckDB and the BLAS set up once per process is nobody's work
    warm = pd.DataFrame({"a": [1.0]})
    with duckdb.connect() as connection:
        connection.register("warm", warm)
        connection.execute("SELECT * FROM warm").fetchnumpy()
    np.linalg.eigh(np.eye(4))
    warnings.simplefilter("ignore")  # scikit-learn is stopped before it converges
    forget_peak()
    before, cpu_before = peak_memory(), time.process_time()
    if method == "tp-flower":
        measured = run_tp_flower(case, frames, until)
    else:
        measured = run_joined(method, case, frames, until)
    # tp_flower's run goes on after the first good epoch
    measured.setdefault("cpu-seconds", time.process_time() - cpu_before)
    measured["peak-mib"] = (peak_memory() - before) / MEBIBYTE
    print(json.dumps(measured))


if __name__ == "__main__":
    main(sys.argv[1])
