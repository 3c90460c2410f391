"""What the benchmarks share: options, runs with a curve, data, and what they report."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from client_apps.app import app
from client_apps.rounds.site import Site
from strategies import STRATEGIES, RelationalStrategy
from strategies.run.grid import InProcessGrid
from tp_flower.query import Query
from tp_flower.reports.records import Metrics, RoundReport
from tp_flower.settings import Settings
from tp_flower.sources.flights import flights_tables

Frames = Mapping[str, pd.DataFrame | Sequence[pd.DataFrame]]


class SkippedSuite(Exception):  # noqa: N818 - nothing went wrong
    """What a suite needs is not at hand."""


@dataclass(frozen=True)
class Options:
    """What the command line tells the suites.

    Attributes:
        movielens: folder with the files of MovieLens; None without.
        paper_scale: folder for synthetic tables of the papers' sizes; None without.
        factor: share of the papers' row counts.
        datasets: names of those that methods are compared on; all if empty.
        methods: names of those that are compared; all if empty.
        settings: run-config keys and values that all of these runs are given.
        vertical: folder with official files of the coreset paper; None without.
    """

    movielens: Path | None = None
    paper_scale: Path | None = None
    factor: float = 1.0
    datasets: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    vertical: Path | None = None


@dataclass(frozen=True)
class Check:
    """A figure and the limit that it must not exceed.

    Attributes:
        name: what was measured.
        measured: the figure.
        limit: the most that is accepted.
        unit: as in "s", or a format such as "%".
    """

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
    """What a suite found.

    Attributes:
        checks: figures with a limit.
        facts: other figures by name.
        curves: by title of the plot, a curve (value per epoch) by method.
    """

    checks: list[Check] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    curves: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types."""
        checks = [{**asdict(check), "is-met": check.is_met} for check in self.checks]
        return {"checks": checks, "facts": self.facts, "curves": self.curves}


@dataclass
class Trace:
    """A run, epoch by epoch.

    Attributes:
        strategy: what ran; it has the report and the federation.
        objective: mean training loss plus the penalty.
        test: metrics on the held-out rows.
        seconds: wall time from the start to the end of the epoch.
    """

    strategy: RelationalStrategy[Any]
    objective: list[float] = field(default_factory=list)
    test: list[Metrics] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def run_traced(
    sql: str, settings: Settings, sites: int | Mapping[str, Frames]
) -> Trace:
    """Train in this process and record every epoch."""
    grid = InProcessGrid(app, sites)
    watching = 0.0

    def on_round(report: RoundReport) -> None:
        nonlocal watching
        arrived = time.perf_counter()
        if report.train:
            penalty = 0.5 * settings.l2 * _squared_norm(grid)
            trace.objective.append(report.train["loss"] + penalty)
            trace.test.append(report.test)
            trace.seconds.append(arrived - started - watching)
        watching += time.perf_counter() - arrived

    strategy = STRATEGIES[settings.strategy](
        Query.from_sql(sql), settings, on_round=on_round
    )
    trace = Trace(strategy)
    started = time.perf_counter()
    try:
        strategy.start(grid)
    finally:
        grid.close()
    return trace


def _squared_norm(grid: InProcessGrid) -> float:
    """Return ||theta||^2 over all tables, as far as it is penalised."""
    by_table = {}
    for context in grid.contexts.values():
        for part in Site(context, grid.run_name).parts():
            model = part.shard.model
            # all shards of a table have the same parameters at the end of an epoch
            by_table[part.table] = float((model.parameters[model.penalised] ** 2).sum())
    return sum(by_table.values())


def flights_frames() -> dict[str, dict[str, pd.DataFrame]]:
    """Return the built-in flights as data frames, by organisation and table."""
    sites: dict[str, dict[str, pd.DataFrame]] = {}
    with duckdb.connect() as connection:
        for table, files in flights_tables().items():
            for site, path in files.items():
                frame = connection.read_parquet(str(path)).df()
                sites.setdefault(site, {})[table] = frame
    return sites


def by_table(
    sites: Mapping[str, Mapping[str, pd.DataFrame]],
) -> dict[str, pd.DataFrame]:
    """Return the tables unsharded."""
    shards: dict[str, list[pd.DataFrame]] = {}
    for tables in sites.values():
        for table, frame in tables.items():
            shards.setdefault(table, []).append(frame)
    return {
        table: pd.concat(frames, ignore_index=True) for table, frames in shards.items()
    }


def first_within(values: Sequence[float], limit: float) -> float:
    """Return the first epoch, from 1, whose value is at most the limit; inf if none."""
    for epoch, value in enumerate(values, start=1):
        if value <= limit:
            return epoch
    return float("inf")
