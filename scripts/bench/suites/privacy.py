"""The cost of privacy: test metrics on true labels, on flights and MovieLens.

Suite ``privacy``: private models of all tables, epsilon per row and table; the last
setting of a method protects the labels too, as in the TablePuppet papers. Suite
``labels``: ADMM on labels of every mechanism. *Corrected* is the loss that is unbiased
for the true labels, *plain* takes noisy classes for true ones; both see the same draws.

Noise comes from a secure source also here, so that runs differ: figures are means of
the runs of ``--repeats``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import numpy as np

from client_apps.operator.participant import Participant
from client_apps.operator.state import Stateless
from scripts.bench.datasets import Dataset, at_hand, flights
from scripts.bench.harness import (
    Options,
    Outcome,
    Sites,
    participants_of,
    problem_of,
    train,
)
from strategies.run.grid import InProcessGrid
from strategies.setup.problem import TrainingProblem
from tp_flower.arrays import FloatArray
from tp_flower.objectives import ClassNoise
from tp_flower.reports.records import RoundReport
from tp_flower.settings import PrivacySettings, Settings
from tp_flower.terms.extraction import label_plan

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
    """A data set with a query, and what a run without privacy learns of it.

    Attributes:
        name: before its figures; empty for flights.
        metrics: those that are reported; the first one is the method's.
        label_range: of the labels; empty for classes.
    """

    name: str
    metrics: Sequence[str]
    data: Dataset
    sites: Sites
    label_range: tuple[float, ...] = ()

    @cached_property
    def settings(self) -> Settings:
        """The settings of a run without privacy."""
        return Settings.from_run_config(self.data.settings)

    @cached_property
    def truth(self) -> TrainingProblem:
        """The problem without noise: its loss, and the true labels."""
        return self.run(self.settings)[0]

    def run(self, settings: Settings) -> tuple[TrainingProblem, FloatArray]:
        """Train; return the problem, and h of the held-out rows, (N, d)."""
        parts: list[Participant[Stateless]] = []

        def on_round(report: RoundReport, grid: InProcessGrid) -> None:
            if report.train:
                # any epoch may be the last
                parts[:] = sorted(participants_of(grid), key=lambda x: x.number)

        problem = problem_of(train(self.data.sql, settings, self.sites, on_round))
        local: dict[str, list[FloatArray]] = {}
        for part in parts:
            scores = part.model.scores(part.data.features)
            local.setdefault(part.data.table, []).append(scores)
        if problem.test is None:
            raise RuntimeError("the run has no held-out rows")
        tables = {table: np.concatenate(shards) for table, shards in local.items()}
        vectors = problem.test.expand(tables)
        return problem, problem.head.combine(problem.base_score, vectors)

    def mean_metrics(self, runs: Iterable[Settings]) -> Mapping[str, float]:
        """Return the means of the runs' test metrics by the true labels."""
        truth = self.truth.held_out
        metrics = [truth.metrics(self.run(settings)[1]) for settings in runs]
        return {key: fmean(each[key] for each in metrics) for key in self.metrics}


def tasks(options: Options) -> Iterator[Task]:
    """Yield flights, and MovieLens where its files are: which rating does one get?"""
    metrics = ("auc", "log_loss", "accuracy")
    yield Task("", metrics, flights(), ORGANISATIONS)
    for data in at_hand(options.movielens, "movielens"):
        yield Task("MovieLens-100K, ", ("rmse", "r2"), data, data.join_only(), RATINGS)


def measure_privacy(options: Options) -> Outcome:
    """Return the test metric of private models, by method and epsilon."""
    outcome = Outcome()
    for task in tasks(options):
        metric = task.metrics[0]
        label = f"test {metric.upper()}"
        for title, (strategy, mechanism) in METHODS.items():
            clear, name = replace(task.settings, strategy=strategy), task.name + title
            plain = task.mean_metrics([clear])[metric]
            outcome.facts[f"{name}, no privacy: {label}"] = plain
            for head, settings in _private(task, clear, mechanism):
                value = task.mean_metrics(options.repeats * [settings])[metric]
                outcome.facts[f"{name}, {head}: {label}"] = value
                if (name, head) == (STATISTICS, "eps 1"):
                    lost = f"{STATISTICS}: AUC lost at epsilon 1"
                    outcome.check(lost, plain - value, MOST_AUC_LOST)
    return outcome


def _private(
    task: Task, clear: Settings, mechanism: str
) -> Iterator[tuple[str, Settings]]:
    """Yield title and settings of private runs, the papers' setting last."""
    for epsilon in EPSILONS:
        privacy = PrivacySettings(features=mechanism, epsilon=epsilon, delta=DELTA)
        yield f"eps {epsilon:g}", replace(clear, privacy=privacy)
    papers = PrivacySettings(
        features=mechanism,
        epsilon=PAPER_EPSILON,
        delta=DELTA,
        labels="laplace",
        label_noise=PAPER_LABEL_NOISE,
        label_range=task.label_range,
    )
    head = f"eps {PAPER_EPSILON:g}, label noise {PAPER_LABEL_NOISE:g}"
    yield head, replace(clear, privacy=papers)


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
        for key, value in task.mean_metrics([task.settings]).items():
            outcome.facts[f"{task.name}no noise on labels: {key}"] = value
        for title, privacy in noises(task):
            name = f"{task.name}{title}"
            plan = label_plan(replace(task.settings, privacy=privacy))
            kinds = {"corrected": True}
            if plan is not None and isinstance(plan.noise, ClassNoise):
                outcome.facts[f"{name}: classes that stay"] = plan.noise.keep
                kinds["plain"] = False
            for kind, is_corrected in kinds.items():
                runs = []
                for repeat in range(options.repeats):
                    # a draw is kept for its plan: each repeat has one of its own
                    epsilon = privacy.label_epsilon * (1.0 + 1e-12 * repeat)
                    drawn = replace(
                        privacy, label_epsilon=epsilon, label_correction=is_corrected
                    )
                    runs.append(replace(task.settings, privacy=drawn))
                for key, value in task.mean_metrics(runs).items():
                    outcome.facts[f"{name}: {key}, {kind}"] = value
    return outcome
