"""What privacy costs: test metrics against epsilon, on flights and MovieLens.

    python scripts/bench/suites/privacy.py [--output DIR] [--movielens DIR]
        [--repeats N] [--methods NAME ...] [--epsilons E ...]

Every run protects the models of all tables with epsilon per row and table; the last row
of a method protects the labels too, with the settings of the TablePuppet papers. Noise
comes from a secure source also here, so that runs differ: cells are means of the
repeats, with their range. Test metrics are of the true labels. Writes privacy.json and
privacy.md.

Exit status: 0 if private statistics at epsilon 1 lose at most 0.02 of the AUC on
flights, else 1.
"""

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from client_apps.app import app
from client_apps.rounds.site import Site
from scripts.bench.movielens import SQL as MOVIELENS_SQL
from scripts.bench.movielens import TEST_FRACTION, has_movielens, read_movielens
from scripts.bench.runs import Check, Outcome
from strategies import STRATEGIES, RelationalStrategy
from strategies.run.grid import InProcessGrid
from strategies.setup.problem import TrainingProblem
from tp_flower.arrays import FloatArray
from tp_flower.files import home_folder
from tp_flower.learning.losses import LOSSES
from tp_flower.learning.metrics import evaluate
from tp_flower.query import Query
from tp_flower.reports.records import RoundReport
from tp_flower.settings import PrivacySettings, Settings
from tp_flower.sources.flights import FLIGHTS_SQL

Sites = int | Mapping[str, Mapping[str, pd.DataFrame]]

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
SUITE_EPSILONS = (1.0, 8.0)
DELTA = 1e-5
ORGANISATIONS = 5
PAPER_EPSILON = 1.0
PAPER_LABEL_NOISE = 0.5
RATINGS = (1.0, 5.0)
GOAL = 0.02


@dataclass(frozen=True)
class Method:
    """A way to train privately.

    Attributes:
        title: in the table.
        strategy: ``"admm"`` or ``"sgd"``.
        features: the mechanism, ``"dp-sgd"`` or ``"statistics"``.
    """

    title: str
    strategy: str
    features: str


METHODS = {
    "sgd": Method("SGD, DP-SGD", "sgd", "dp-sgd"),
    "admm": Method("ADMM, DP-SGD", "admm", "dp-sgd"),
    "statistics": Method("ADMM, private statistics", "admm", "statistics"),
}


@dataclass(frozen=True)
class Task:
    """A data set with a query.

    Attributes:
        name: of the data.
        loss: that is trained.
        metric: the test metric that is shown.
        sql: the query.
        settings: of a run without privacy.
        sites: who holds what.
        label_range: of the labels; empty for classes.
    """

    name: str
    loss: str
    metric: str
    sql: str
    settings: Settings
    sites: Sites
    label_range: tuple[float, ...] = ()

    def clear(self, strategy: str) -> Settings:
        """Return the settings of a run without privacy."""
        return replace(self.settings, strategy=strategy)

    def private(self, method: Method, epsilon: float) -> Settings:
        """Return the settings of a run with private models."""
        privacy = PrivacySettings(
            features=method.features, epsilon=epsilon, delta=DELTA
        )
        return replace(self.clear(method.strategy), privacy=privacy)

    def as_in_papers(self, method: Method) -> Settings:
        """Return the settings of the papers: private models and labels, C = 1."""
        private = self.private(method, PAPER_EPSILON)
        privacy = replace(
            private.privacy,
            labels="laplace",
            label_noise=PAPER_LABEL_NOISE,
            label_range=self.label_range,
        )
        return replace(private, privacy=privacy)


@dataclass
class Cell:
    """The runs of a method with one epsilon.

    Attributes:
        task: name of the task.
        method: title of the method.
        epsilon: of a table's row; infinity is no privacy.
        labels: whether labels were private too.
        metrics: test metrics of every repeat, on the true labels.
        seconds: of every repeat.
    """

    task: str
    method: str
    epsilon: float
    labels: bool = False
    metrics: list[dict[str, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, task: Task, done: "Run", labels: FloatArray) -> None:
        """Add a run, judged by the true labels of the held-out rows."""
        loss = LOSSES[task.loss](outputs=done.scores.shape[1])
        self.metrics.append(evaluate(loss, done.scores, labels))
        self.seconds.append(done.seconds)

    def values(self, metric: str) -> list[float]:
        """Return one metric of the repeats."""
        return [own[metric] for own in self.metrics]

    @property
    def head(self) -> str:
        """What its column is called."""
        if math.isinf(self.epsilon):
            return "no privacy"
        if self.labels:
            return f"eps {self.epsilon:g}, label noise {PAPER_LABEL_NOISE:g}"
        return f"eps {self.epsilon:g}"

    def shown(self, metric: str) -> str:
        """Return the mean and the range of the repeats."""
        values = self.values(metric)
        mean = f"{np.mean(values):.4f}"
        if len(values) == 1:
            return mean
        return f"{mean} ({min(values):.4f} to {max(values):.4f})"


@dataclass
class Run:
    """A finished run.

    Attributes:
        training_problem: of the run.
        scores: h of the held-out rows at the end, (N_test, d_c).
        seconds: of the run.
    """

    training_problem: TrainingProblem
    scores: FloatArray
    seconds: float


def run(task: Task, settings: Settings) -> Run:
    """Train in this process; return what the models predict for held-out rows."""
    grid = InProcessGrid(app, task.sites)
    local: dict[str, FloatArray] = {}

    def on_round(report: RoundReport) -> None:
        if report.train and report.epoch == settings.epochs:
            local.update(_local_scores(grid))

    strategy: RelationalStrategy[Any] = STRATEGIES[settings.strategy](
        Query.from_sql(task.sql), settings, on_round=on_round
    )
    started = time.perf_counter()
    try:
        strategy.start(grid)
    finally:
        grid.close()
    seconds = time.perf_counter() - started
    federation = strategy.training_problem
    if federation is None or federation.test is None:
        raise RuntimeError("the run has no held-out rows")
    scores = federation.test.sum_scores(federation.base_score, local)
    return Run(federation, scores, seconds)


def _local_scores(grid: InProcessGrid) -> dict[str, FloatArray]:
    """Return the scores of every table's rows, (n_i, d_c), straight from the models."""
    parts = [
        part
        for context in grid.contexts.values()
        for part in Site(context, grid.run_name).parts()
    ]
    parts.sort(key=lambda part: part.number)
    scores: dict[str, list[FloatArray]] = {}
    for part in parts:
        scores.setdefault(part.table, []).append(part.shard.scores())
    return {table: np.concatenate(own) for table, own in scores.items()}


def flights() -> Task:
    """Return the built-in federation: is a flight late?"""
    settings = Settings(task="classification")
    return Task("flights", "logistic", "auc", FLIGHTS_SQL, settings, ORGANISATIONS)


def movielens(folder: Path) -> Task:
    """Return the papers' data: which rating does a movie get?"""
    settings = Settings(task="regression", test_fraction=TEST_FRACTION)
    sites = {name: {name: frame} for name, frame in read_movielens(folder).items()}
    name = "MovieLens-100K"
    return Task(name, "squared", "rmse", MOVIELENS_SQL, settings, sites, RATINGS)


def measure(
    task: Task, methods: Sequence[Method], epsilons: Sequence[float], repeats: int
) -> Iterator[Cell]:
    """Yield a cell per method and epsilon, and one of the papers' setting."""
    strategies = {method.strategy for method in methods}
    clear = {name: run(task, task.clear(name)) for name in sorted(strategies)}
    # the runs without privacy know the true labels of the held-out rows
    labels = next(iter(clear.values())).training_problem.test_labels
    for method in methods:
        cell = Cell(task.name, method.title, math.inf)
        cell.add(task, clear[method.strategy], labels)
        yield cell
        asked = [
            (task.private(method, epsilon), epsilon, False) for epsilon in epsilons
        ]
        asked.append((task.as_in_papers(method), PAPER_EPSILON, True))
        for settings, epsilon, has_private_labels in asked:
            cell = Cell(task.name, method.title, epsilon, has_private_labels)
            for _ in range(repeats):
                cell.add(task, run(task, settings), labels)
            yield cell


def table(task: Task, cells: Sequence[Cell]) -> str:
    """Return the cells of a task as a Markdown table, a row per method."""
    own = [cell for cell in cells if cell.task == task.name]
    heads = list(dict.fromkeys(cell.head for cell in own))
    lines = [
        f"**{task.name}** ({task.loss} loss): test {task.metric.upper()}",
        "",
        f"| method | {' | '.join(heads)} |",
        f"|---|{'---:|' * len(heads)}",
    ]
    for method in dict.fromkeys(cell.method for cell in own):
        shown = {
            cell.head: cell.shown(task.metric) for cell in own if cell.method == method
        }
        lines.append(f"| {method} | {' | '.join(shown[head] for head in heads)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Measure and write the tables; return the exit status."""
    options = _parse(arguments)
    # Flower tells of every run what these tables tell better
    logging.getLogger("flwr").setLevel(logging.WARNING)
    tasks = [flights()]
    if has_movielens(options.movielens):
        tasks.append(movielens(options.movielens))
    methods = [METHODS[name] for name in options.methods]
    cells: list[Cell] = []
    for task in tasks:
        for cell in measure(task, methods, options.epsilons, options.repeats):
            cells.append(cell)
            seconds = np.mean(cell.seconds)
            figure = f"{task.metric} {cell.shown(task.metric)}"
            print(f"{task.name}, {cell.method}, {cell.head}: {figure}, {seconds:.1f} s")
    text = "\n\n".join(table(task, cells) for task in tasks)
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    written = [asdict(cell) | {"epsilon": str(cell.epsilon)} for cell in cells]
    facts = {"delta": DELTA, "repeats": options.repeats, "cells": written}
    (folder / "privacy.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    (folder / "privacy.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\nResults: {folder}")
    return 0 if _is_goal_met(cells) else 1


def _is_goal_met(cells: Sequence[Cell]) -> bool:
    """Whether private statistics at epsilon 1 are within the goal on flights."""
    lost = _auc_lost(cells)
    title = METHODS["statistics"].title
    print(f"flights, {title}: AUC lost at epsilon 1: {lost:.4f}, at most {GOAL}")
    return not lost > GOAL


def _auc_lost(cells: Sequence[Cell]) -> float:
    """Return what private statistics at epsilon 1 lose on flights; NaN if not run."""
    method = METHODS["statistics"].title
    found = {
        cell.epsilon: float(np.mean(cell.values("auc")))
        for cell in cells
        if cell.task == "flights" and cell.method == method and not cell.labels
    }
    return found.get(math.inf, math.nan) - found.get(1.0, math.nan)


def measure_privacy() -> Outcome:
    """Return the test AUC of private models on flights, a run per cell."""
    cells = list(measure(flights(), list(METHODS.values()), SUITE_EPSILONS, 1))
    facts: dict[str, object] = {}
    for cell in cells:
        facts[f"{cell.method}, {cell.head}: test AUC"] = cell.values("auc")[0]
    title = METHODS["statistics"].title
    return Outcome(
        [Check(f"{title}: AUC lost at epsilon 1", _auc_lost(cells), GOAL)], facts
    )


def option_parser(purpose: str, name: str) -> argparse.ArgumentParser:
    """Return the options that the benchmarks of privacy have in common.

    Args:
        purpose: the script's docstring.
        name: begins the default output folder's.
    """
    parser = argparse.ArgumentParser(description=purpose.partition("\n")[0])
    stamp = time.strftime("%Y%m%d-%H%M%S")
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        metavar="DIR",
        default=home_folder() / "benchmarks" / f"{name}-{stamp}",
        help="folder for the results (default: a new one under ~/.tp_flower)",
    )
    add(
        "--movielens",
        type=Path,
        metavar="DIR",
        help="folder with u.data, u.item and u.user of MovieLens-100K",
    )
    add("--repeats", type=int, default=3, help="runs per cell (default: 3)")
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = option_parser(__doc__ or "", "privacy")
    add = parser.add_argument
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--epsilons", nargs="+", type=float, default=EPSILONS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
