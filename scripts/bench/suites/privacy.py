"""The cost of privacy: test metrics on true labels, on flights and MovieLens.

Suite ``privacy``: private models of all tables, epsilon per row and table; the last
setting of a method protects the labels too, as in the TablePuppet papers. Suite
``labels``: ADMM on labels of every mechanism. *Corrected* is the loss that is unbiased
for the true labels, *plain* takes noisy classes for true ones; both see the same draws.
*Reported* are the run's own figures, which knows noisy labels only. In a regression
noise on labels changes the reported figures only.

Noise comes from a secure source also here, so that runs differ: figures are means of
the runs of ``--repeats``, with their range.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from scripts.bench import datasets
from scripts.bench.harness import (
    Options,
    Outcome,
    Sites,
    SkippedSuite,
    participants_of,
    problem_of,
    train,
)
from strategies.run.grid import InProcessGrid
from strategies.setup.labels import label_plan
from strategies.setup.problem import TrainingProblem
from tp_flower.arrays import FloatArray
from tp_flower.learning.label_noise import ClassNoise
from tp_flower.learning.losses import LOSSES
from tp_flower.learning.metrics import evaluate
from tp_flower.reports.records import Metrics, RoundReport
from tp_flower.settings import PrivacySettings, Settings
from tp_flower.sources.flights import FLIGHTS_SQL

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
LABEL_EPSILONS = (0.5, 1.0, 2.0, 4.0)
DELTA = 1e-5
ORGANISATIONS = 5
PAPER_EPSILON = 1.0
PAPER_LABEL_NOISE = 0.5
RATINGS = (1.0, 5.0)
MOST_AUC_LOST = 0.02
STATISTICS = "ADMM, private statistics"

METHODS: Mapping[str, tuple[str, str]] = {
    "SGD, DP-SGD": ("sgd", "dp-sgd"),
    "ADMM, DP-SGD": ("admm", "dp-sgd"),
    STATISTICS: ("admm", "statistics"),
}
"""Strategy and mechanism of the features, by the title of a method."""


@dataclass(frozen=True)
class Task:
    """A data set with a query.

    Attributes:
        name: before its figures; empty for flights.
        metrics: those that are reported; the first one is the method's.
        settings: of a run without privacy.
        label_range: of the labels; empty for classes.
    """

    name: str
    loss: str
    metrics: Sequence[str]
    sql: str
    settings: Settings
    sites: Sites
    label_range: tuple[float, ...] = ()


def flights() -> Task:
    """Return the built-in federation: is a flight late?"""
    settings = Settings(task="classification")
    metrics = ("auc", "log_loss", "accuracy")
    return Task("", "logistic", metrics, FLIGHTS_SQL, settings, ORGANISATIONS)


def tasks(options: Options) -> Iterator[Task]:
    """Yield flights, and MovieLens where its files are: which rating does one get?"""
    yield flights()
    try:
        data = datasets.movielens(options.movielens)
    except SkippedSuite:
        return
    settings = Settings.from_run_config(data.settings)
    name, metrics = "MovieLens-100K, ", ("rmse", "r2")
    yield Task(name, "squared", metrics, data.sql, settings, data.join_only(), RATINGS)


class Run(NamedTuple):
    """A finished run: its problem, and h of the held-out rows, (N_test, d_c)."""

    problem: TrainingProblem
    scores: FloatArray

    def metrics(self, task: Task, labels: FloatArray) -> Metrics:
        """Return the test metrics by these labels, (N_test,)."""
        loss = LOSSES[task.loss](outputs=self.scores.shape[1])
        return evaluate(loss, self.scores, labels)


def run(task: Task, settings: Settings) -> Run:
    """Train in this process; return what the models predict for held-out rows."""
    local: dict[str, FloatArray] = {}

    def on_round(report: RoundReport, grid: InProcessGrid) -> None:
        if report.train and report.epoch == settings.epochs:
            local.update(_local_scores(grid))

    problem = problem_of(train(task.sql, settings, task.sites, on_round))
    if problem.test is None:
        raise RuntimeError("the run has no held-out rows")
    return Run(problem, problem.test.sum_scores(problem.base_score, local))


def _local_scores(grid: InProcessGrid) -> dict[str, FloatArray]:
    """Return the scores of every table's rows, (n_i, d_c), straight from the models."""
    scores: dict[str, list[FloatArray]] = {}
    for part in sorted(participants_of(grid), key=lambda part: part.number):
        scores.setdefault(part.data.table, []).append(
            part.model.scores(part.data.features)
        )
    return {table: np.concatenate(shards) for table, shards in scores.items()}


def measure_privacy(options: Options, epsilons: Sequence[float] = EPSILONS) -> Outcome:
    """Return the test metric of private models, by method and epsilon."""
    outcome = Outcome()
    lost = math.nan
    for task in tasks(options):
        metric = task.metrics[0]
        for title, (strategy, mechanism) in METHODS.items():
            clear = replace(task.settings, strategy=strategy)
            plain = run(task, clear)
            # the run without privacy knows the true labels of the held-out rows
            truth = plain.problem.test_labels
            figures = {math.inf: plain.metrics(task, truth)[metric]}
            name = f"{task.name}{title}"
            label = f"test {metric.upper()}"
            outcome.facts[f"{name}, no privacy: {label}"] = figures[math.inf]
            for head, epsilon, settings in _private(task, clear, mechanism, epsilons):
                values = [
                    run(task, settings).metrics(task, truth)[metric]
                    for _ in range(options.repeats)
                ]
                figures.setdefault(epsilon, float(np.mean(values)))
                _keep(outcome, f"{name}, {head}: {label}", values)
            if name == STATISTICS:
                lost = figures[math.inf] - figures.get(1.0, math.nan)
    outcome.check(f"{STATISTICS}: AUC lost at epsilon 1", lost, MOST_AUC_LOST)
    return outcome


def _private(
    task: Task, clear: Settings, mechanism: str, epsilons: Sequence[float]
) -> Iterator[tuple[str, float, Settings]]:
    """Yield title, epsilon and settings of private runs, the papers' setting last."""
    for epsilon in epsilons:
        privacy = PrivacySettings(features=mechanism, epsilon=epsilon, delta=DELTA)
        yield f"eps {epsilon:g}", epsilon, replace(clear, privacy=privacy)
    papers = PrivacySettings(
        features=mechanism,
        epsilon=PAPER_EPSILON,
        delta=DELTA,
        labels="laplace",
        label_noise=PAPER_LABEL_NOISE,
        label_range=task.label_range,
    )
    head = f"eps {PAPER_EPSILON:g}, label noise {PAPER_LABEL_NOISE:g}"
    yield head, PAPER_EPSILON, replace(clear, privacy=papers)


def _keep(outcome: Outcome, name: str, values: Sequence[float]) -> None:
    outcome.facts[name] = float(np.mean(values))
    if len(values) > 1:
        outcome.facts[f"{name}, range"] = [min(values), max(values)]


def noises(task: Task) -> Iterator[tuple[str, PrivacySettings]]:
    """Yield the mechanisms of a task's labels, the papers' setting last."""
    limits = task.label_range
    for mechanism in ("laplace",) if limits else ("randomised-response", "laplace"):
        for epsilon in LABEL_EPSILONS:
            privacy = PrivacySettings(
                labels=mechanism, label_epsilon=epsilon, label_range=limits
            )
            yield f"{mechanism}, epsilon {epsilon:g}", privacy
    papers = PrivacySettings(
        labels="laplace", label_noise=PAPER_LABEL_NOISE, label_range=limits
    )
    plan = label_plan(replace(task.settings, privacy=papers))
    epsilon = plan.epsilon if plan else 0.0
    title = f"laplace, lambda {PAPER_LABEL_NOISE:g} (epsilon {epsilon:.2f})"
    yield title, replace(papers, label_noise=0.0, label_epsilon=epsilon)


def measure_labels(options: Options) -> Outcome:
    """Return test metrics by mechanism of the labels' noise."""
    outcome = Outcome()
    for task in tasks(options):
        clear = run(task, task.settings)
        truth = clear.problem.test_labels
        for key in task.metrics:
            figure = clear.metrics(task, truth)[key]
            outcome.facts[f"{task.name}no noise on labels: {key}"] = figure
        for title, privacy in noises(task):
            _measure_noise(outcome, task, title, privacy, truth, options.repeats)
    return outcome


def _measure_noise(
    outcome: Outcome,
    task: Task,
    title: str,
    privacy: PrivacySettings,
    truth: FloatArray,
    repeats: int,
) -> None:
    name = f"{task.name}{title}"
    plan = label_plan(replace(task.settings, privacy=privacy))
    is_class = plan is not None and isinstance(plan.noise, ClassNoise)
    if plan is not None and isinstance(plan.noise, ClassNoise):
        outcome.facts[f"{name}: classes that stay"] = plan.noise.keep
    runs: dict[str, list[Metrics]] = {}
    for repeat in range(repeats):
        # a draw is kept for its plan: each repeat has one of its own
        epsilon = privacy.label_epsilon * (1.0 + 1e-12 * repeat)
        drawn = replace(privacy, label_epsilon=epsilon)
        done = run(task, replace(task.settings, privacy=drawn))
        seen = evaluate(done.problem.loss, done.scores, done.problem.test_labels)
        runs.setdefault("corrected", []).append(done.metrics(task, truth))
        runs.setdefault("reported", []).append(seen)
        if is_class:
            plain = replace(drawn, label_correction=False)
            done = run(task, replace(task.settings, privacy=plain))
            runs.setdefault("plain", []).append(done.metrics(task, truth))
    for kind, metrics in runs.items():
        for key in task.metrics:
            values = [figures[key] for figures in metrics]
            _keep(outcome, f"{name}: {key}, {kind}", values)
