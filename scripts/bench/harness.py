"""The harness of the benchmark: options, runs in this process, figures, results file.

A suite is a function from `Options` to an `Outcome`: it declares its runs (query,
settings, sites), has them done by `train`, and keeps figures of their reports.

Schema of `benchmark.json`::

    schema   1
    suites   {name: {date, seconds, machine: {platform, processor, cores, memory-gib},
                     versions: {library: version},
                     checks: [{name, measured, limit, unit, is-met}],
                     facts: {name: figure}}}
    failed   {name: error}      suites that ended in an error in the last command

Numbers that are not finite are null.
"""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pandas as pd

from client_apps.app import app
from client_apps.operator.participant import Participant
from client_apps.operator.state import Stateless
from client_apps.rounds.site import Site
from strategies import STRATEGIES, TrainingStrategy
from strategies.run.grid import InProcessGrid, Tables
from strategies.setup.problem import TrainingProblem
from tp_flower.files import write_file
from tp_flower.query import Query
from tp_flower.reports.records import RoundReport, plain
from tp_flower.settings import Settings

SCHEMA: Final = 1
RESULTS_FILE: Final = "benchmark.json"
LIBRARIES: Final = ("duckdb", "flwr", "numpy", "scikit-learn", "scipy", "torch")
SIGNIFICANT_DIGITS: Final = 6

Sites = int | Sequence[Tables] | Mapping[str, Tables]
OnRound = Callable[[RoundReport, InProcessGrid], None] | None
Results = dict[str, Any]
"""The content of the results file, or of a part of it, in JSON types."""


class SkippedSuite(Exception):  # noqa: N818 - nothing went wrong
    """The data of a suite are not at hand."""


@dataclass(frozen=True)
class Options:
    """The options of the command line that suites read; see its help."""

    movielens: Path | None = None
    paper_scale: Path | None = None
    factor: float = 1.0
    repeats: int = 1


@dataclass(frozen=True)
class Check:
    """A figure and the most that is accepted of it, in "s", "%" or another unit."""

    name: str
    measured: float
    limit: float
    unit: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the figure is within its limit; NaN is not."""
        return self.measured <= self.limit


@dataclass
class Outcome:
    """The figures of a suite: with a limit, and others."""

    checks: list[Check] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)

    def check(self, name: str, measured: float, limit: float, unit: str = "") -> None:
        """Add a figure with a limit."""
        self.checks.append(Check(name, measured, limit, unit))

    def to_json(self) -> Results:
        """Return JSON types, numbers with six digits."""
        checks = [{**vars(check), "is-met": check.is_met} for check in self.checks]
        content = plain({"checks": checks, "facts": self.facts})
        text = json.dumps(content, allow_nan=False)
        rounded: Results = json.loads(
            text, parse_float=lambda x: float(f"{float(x):.{SIGNIFICANT_DIGITS}g}")
        )
        return rounded


def train(
    sql: str,
    settings: Settings,
    sites: Sites,
    on_round: OnRound = None,
    state: Path | None = None,
) -> TrainingStrategy:
    """Run a strategy in this process; return it, with its report.

    ``sites`` and ``state`` are those of `InProcessGrid`.
    """
    with closing(InProcessGrid(app, sites, state=state)) as grid:
        strategy: TrainingStrategy = STRATEGIES[settings.method_name](
            Query.from_sql(sql),
            settings,
            on_round=lambda report: on_round(report, grid) if on_round else None,
        )
        strategy.start(grid)
    return strategy


def train_timed(
    sql: str,
    settings: Settings,
    sites: Sites,
    on_round: OnRound = None,
    state: Path | None = None,
) -> tuple[TrainingStrategy, pd.DataFrame]:
    """Train as `train` does; return the strategy, and what its rounds took.

    The rounds have ``epoch``, ``seconds`` and ``cpu`` seconds, without those of
    ``on_round``; the one that ends the run is left out.
    """
    rounds: list[tuple[int, float, float]] = []
    last = time.perf_counter(), time.process_time()

    def watch(report: RoundReport, grid: InProcessGrid) -> None:
        nonlocal last
        now = time.perf_counter(), time.process_time()
        if report.phase != "finish":
            rounds.append((report.epoch, now[0] - last[0], now[1] - last[1]))
        if on_round is not None:
            on_round(report, grid)
        last = time.perf_counter(), time.process_time()

    strategy = train(sql, settings, sites, watch, state)
    return strategy, pd.DataFrame(rounds, columns=["epoch", "seconds", "cpu"])


def problem_of(strategy: TrainingStrategy) -> TrainingProblem:
    """Return the training problem of a finished run."""
    problem = strategy.training_problem
    if not isinstance(problem, TrainingProblem):
        raise TypeError("the run has not set up a training over joins")
    return problem


def run_traced(sql: str, settings: Settings, sites: Sites) -> pd.DataFrame:
    """Train in this process and record every epoch; recording takes no time of it.

    Returns the training ``objective``, ``seconds`` from the start, and test metrics.
    """
    epochs: list[Mapping[str, float | None]] = []

    def on_round(report: RoundReport, grid: InProcessGrid) -> None:
        if report.train:
            penalty = 0.5 * settings.l2 * squared_norm(grid)
            loss = report.train["loss"]
            epochs.append({**report.test, "loss_": loss, "penalty": penalty})

    _, rounds = train_timed(sql, settings, sites, on_round)
    seconds = rounds.groupby("epoch")["seconds"].sum().cumsum()
    trace = pd.DataFrame(epochs, index=seconds.index[1:]).assign(seconds=seconds)
    # sites take a step of conjugate gradients with the next message
    late = int(settings.method_name == "cg")
    penalty = trace.pop("penalty").shift(-late)
    return trace.assign(objective=trace.pop("loss_") + penalty)


def squared_norm(grid: InProcessGrid) -> float:
    """Return ||theta||^2 over all tables, as far as it is penalised."""
    # all shards of a table have the same parameters at the end of an epoch
    models = {part.data.table: part.model for part in participants_of(grid)}
    return sum(
        float((model.parameters[model.penalised] ** 2).sum())
        for model in models.values()
    )


def participants_of(grid: InProcessGrid) -> Iterator[Participant[Stateless]]:
    """Yield the shards of all sites in their roles, at the last message."""
    for context in grid.contexts.values():
        yield from Site(context, grid.run_name).parts(Stateless)


def best_seconds(
    *works: Callable[[], object],
    repeats: int,
    times: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> list[float]:
    """Return the least seconds of each, taken in turns."""
    least = [math.inf] * len(works)
    for _ in range(repeats):
        for number, work in enumerate(works):
            started = clock()
            for _ in range(times):
                work()
            least[number] = min(least[number], (clock() - started) / times)
    return least


def first_within(values: Sequence[float], limit: float) -> float:
    """Return the first epoch, from 1, whose value is at most the limit; inf if none."""
    return next((n for n, x in enumerate(values, 1) if x <= limit), float("inf"))


def new_results() -> Results:
    """Return the results of no suite."""
    return {"schema": SCHEMA, "suites": {}, "failed": {}}


def read_results(path: Path) -> Results:
    """Return the results in a file; ValueError where it is of another schema."""
    content = json.loads(path.read_text(encoding="utf-8"))
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path}: schema {schema!r}, not {SCHEMA}: run it anew")
    return dict(content)


def write_results(path: Path, results: Results) -> None:
    """Write the file; a reader sees the old one or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, allow_nan=False) + "\n"
    write_file(path, [text.encode()], is_durable=False, mode=0o644)


def put_outcome(results: Results, name: str, outcome: Outcome, seconds: float) -> None:
    """Enter the figures of a suite, in place of those from before."""
    results["suites"][name] = {
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        "machine": machine(),
        "versions": {library: version(library) for library in LIBRARIES},
        **outcome.to_json(),
    }
    results["failed"].pop(name, None)


def machine() -> dict[str, object]:
    """Return what the figures depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.exists() else []
    models = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return {
        "platform": platform.platform(terse=True),
        "processor": models[0].strip() if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory-gib": round(memory / 2**30),
        "python": platform.python_version(),
    }
