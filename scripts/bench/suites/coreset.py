"""Coresets: what a sample's solution costs on all rows, and what it takes to send it.

The layout is that of the paper's Table 1: sizes 1,000 to 6,000, mean and deviation over
20 samples, by importance (C-) and uniform (U-), for both solvers of each problem. The
samples are drawn by the library over the tables' rows, as the server and the sites do;
one run of the strategy with the same size gives the bytes, and its cost must be one of
theirs. Ridge regression has the paper's lambda = 0.1 n, which is l2 = 0.1.

Communication is the paper's: numbers that are sent to choose the rows, and of the rows
themselves; of Central's, all joined rows. JoinedRows and statistics, which every method
over a join needs, are counted apart.

Reference:
    Huang, Li, Sun, Zhao 2022, Coresets for Vertical Federated Learning, section 6.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from client_apps.app import app
from scripts.bench.coreset_join import FloatArray, Join, Sampler, units
from scripts.bench.datasets import DATASETS
from scripts.bench.runs import Check, Outcome
from scripts.data.dataset import Dataset
from scripts.data.prepare_vertical import vertical_datasets
from scripts.data.run_files import let_rows_leave, write_tables
from scripts.joined.optima import fit_ridge
from strategies import STRATEGIES
from strategies.run.grid import InProcessGrid
from tp_flower.coresets.sampling import Sample
from tp_flower.coresets.solvers import (
    Solver,
    distdim,
    kmeans_cost,
    solve,
    weighted_kmeans,
)
from tp_flower.query import Query
from tp_flower.reports.records import RunReport
from tp_flower.settings import Settings

SIZES = (1000, 2000, 3000, 4000, 5000, 6000)
REPEATS = 20
MAIN_SIZE = 2000
GUARANTEED_SIZE = 4000
CLUSTERS = 10
L2 = 0.1
PARAMETERS = 200
"""Random thetas, and random sets of centres, that a coreset is tried on."""

RIDGE_OVER_CENTRAL = 1.02
KMEANS_OVER_FULL = 1.03
EPSILON = 0.1
BYTES_SHARE = 1 / 50
DEVIATIONS = 4.0
BYTES_PER_NUMBER = 4
CHOICE = ("measure", "draw", "weigh")
ROWS = "rows"

Generator = np.random.Generator
Found = dict[str, Any]
Solve = Callable[[Sample, Generator], float]
"""What the solution on a sample costs on all rows."""


@dataclass(frozen=True)
class Problem:
    """One of the two problems on a data set.

    Attributes:
        strategy: that solves it in a run.
        samplers: "C" and "U".
        solvers: by name.
        full: what the solution on all rows costs, by solver; NaN where it was not run.
        metric: of a run's report that is the cost, over ``scale``.
        labels: numbers of a row's label.
    """

    strategy: str
    samplers: Mapping[str, Sampler]
    solvers: Mapping[str, Solve]
    full: Mapping[str, float]
    metric: Callable[[RunReport], float]
    labels: int


def measure_coreset(vertical: Path | None = None) -> Outcome:
    """Measure flights, store, and what official files are in ``vertical``."""
    outcome = Outcome()
    made = [DATASETS[name](None) for name in ("flights-delay", "store")]
    for dataset in [*made, *vertical_datasets(vertical)]:
        measured = measure_dataset(dataset)
        outcome.facts[dataset.name] = measured.facts
        if dataset.name == "flights-delay":
            outcome.checks += measured.checks()
    return outcome


@dataclass(frozen=True)
class Measured:
    """A data set that both problems were measured on.

    Attributes:
        facts: for the file.
        rows: the sampler of ridge regression by importance.
        optimum: theta of all rows, (d + 1,).
        clusters: the sampler of k-means by importance.
    """

    facts: Found
    rows: Sampler
    optimum: FloatArray
    clusters: Sampler

    def checks(self) -> list[Check]:
        """Return what a coreset has to reach."""
        title = str(self.facts["title"])
        return [
            *limits(title, self.facts),
            *guarantees(title, self.rows, self.optimum, self.clusters),
        ]


def measure_dataset(dataset: Dataset) -> Measured:
    """Measure ridge regression and k-means on a data set."""
    config = {**dataset.settings, "l2": L2, "clusters": CLUSTERS}
    settings = Settings.from_run_config(config)
    joined = dataset.joined(settings)
    train, test = (Join.of(joined, joined.is_test == own) for own in (False, True))
    whole = Join.of(joined, np.ones(len(joined.labels), np.bool_))
    fitted = fit_ridge(*joined.part(test=False), L2)
    optimum = np.append(fitted.weights, fitted.intercept)
    ridge = ridge_problem(train, test, optimum)
    kmeans = kmeans_problem(whole)
    facts = {
        "title": dataset.title,
        "joined-rows": [train.size, test.size],
        "features": train.width,
        "tables": len(train.tables),
        "ridge": measure_problem(dataset, settings, ridge),
        "kmeans": measure_problem(dataset, settings, kmeans),
    }
    return Measured(facts, ridge.samplers["C"], optimum, kmeans.samplers["C"])


def ridge_problem(train: Join, test: Join, theta: FloatArray) -> Problem:
    """Return ridge regression: the cost is the squared error on the held-out rows."""

    def cost(found: FloatArray) -> float:
        return float((test.residuals(found[:, None]) ** 2).mean())

    def solved(solver: Solver) -> Solve:
        def run(sample: Sample, _: Generator) -> float:
            design, labels = train.design(sample.joined), train.labels[sample.joined]
            return cost(solve(design, labels, sample.weights, l2=L2, solver=solver))

        return run

    return Problem(
        "coreset-ridge",
        {
            "C": Sampler.by_importance(train, train.regression_scores(L2)),
            "U": Sampler(train),
        },
        {"Central": solved("exact"), "SAGA": solved("saga")},
        {"Central": cost(theta), "SAGA": math.nan},
        lambda report: report.history[-2].test["rmse"] ** 2,
        labels=1,
    )


def kmeans_problem(join: Join) -> Problem:
    """Return k-means: the cost is the mean squared distance over all joined rows."""
    rng = np.random.default_rng(0)

    def cost(centres: FloatArray) -> float:
        return float(join.distances(centres).mean())

    def lloyd(sample: Sample, own: Generator) -> float:
        points = join.design(sample.joined)
        return cost(weighted_kmeans(points, sample.weights, CLUSTERS, own))

    def distributed(sample: Sample, own: Generator) -> float:
        labels, centres = join.local_clusters(sample, CLUSTERS, own)
        return cost(distdim(labels, centres, sample.weights, CLUSTERS, own))

    solvers = {"Kmeans++": lloyd, "DistDim": distributed}
    everything = Sample(
        np.arange(join.size), np.ones(join.size, int), np.ones(join.size), join.size
    )
    return Problem(
        "coreset-kmeans",
        {
            "C": Sampler.by_importance(join, join.cluster_scores(CLUSTERS, rng)),
            "U": Sampler(join),
        },
        solvers,
        {name: run(everything, rng) for name, run in solvers.items()},
        lambda report: report.history[-2].test["loss"],
        labels=0,
    )


def measure_problem(dataset: Dataset, settings: Settings, problem: Problem) -> Found:
    """Return the costs of all sizes, and what a run sends."""
    join = problem.samplers["C"].join
    widths = {str(k): own.features.shape[1] for k, own in enumerate(join.tables)}
    sizes: dict[str, dict[str, dict[str, float]]] = {}
    for size in SIZES:
        for kind, sampler in problem.samplers.items():
            sent = units(
                size, "importance" if kind == "C" else "uniform", widths, problem.labels
            )
            costs = repeated(sampler, problem.solvers, size)
            for solver, found in costs.items():
                own = sizes.setdefault(f"{kind}-{solver}", {})
                own[str(size)] = {
                    "mean": float(np.mean(found)),
                    "std": float(np.std(found, ddof=1)),
                    "units": sent,
                }
    first = next(iter(problem.solvers))
    return {
        "full": dict(problem.full),
        "full-units": join.size * (join.width + problem.labels),
        "sizes": sizes,
        "runs": {
            kind: asdict(run_of(dataset, settings, problem, kind, sizes))
            for kind in problem.samplers
        },
        "over-full": sizes[f"C-{first}"][str(MAIN_SIZE)]["mean"] / problem.full[first],
    }


def repeated(
    sampler: Sampler, solvers: Mapping[str, Solve], size: int
) -> dict[str, list[float]]:
    """Return by solver the costs on ``REPEATS`` samples, the same for all solvers."""
    found: dict[str, list[float]] = {name: [] for name in solvers}
    for repeat in range(REPEATS):
        sample = sampler.draw(size, np.random.default_rng([repeat, size]))
        for place, (name, run) in enumerate(solvers.items()):
            found[name].append(run(sample, np.random.default_rng([repeat, place])))
    return found


@dataclass(frozen=True)
class RunFacts:
    """A run of the strategy at ``MAIN_SIZE``.

    Attributes:
        cost: as the costs of the samples.
        deviations: how many of theirs it is from their mean.
        choice_bytes: of choosing the rows, both ways.
        row_bytes: of the rows.
        other_bytes: of all else: alignment, statistics, set-up, evaluation.
    """

    cost: float
    deviations: float
    choice_bytes: int
    row_bytes: int
    other_bytes: int


def run_of(
    dataset: Dataset,
    settings: Settings,
    problem: Problem,
    kind: str,
    sizes: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> RunFacts:
    """Run the strategy over one site per table, whose policies let rows leave."""
    config = {
        **dataset.settings,
        "l2": L2 if problem.labels else settings.l2,
        "clusters": CLUSTERS,
        "strategy": problem.strategy,
        "coreset-size": MAIN_SIZE,
        "coreset-kind": "importance" if kind == "C" else "uniform",
    }
    with tempfile.TemporaryDirectory() as folder:
        grid = InProcessGrid(app, dict(open_tables(dataset, Path(folder))))
        own = Settings.from_run_config(config)
        strategy = STRATEGIES[own.strategy](Query.from_sql(dataset.sql), own)
        try:
            strategy.start(grid)
        finally:
            grid.close()
    report = strategy.report
    sent: dict[str, int] = {}
    for item in report.history:
        total = sum(item.bytes_up.values()) + sum(item.bytes_down.values())
        sent[item.phase] = sent.get(item.phase, 0) + total
    known = sizes[f"{kind}-{next(iter(problem.solvers))}"][str(MAIN_SIZE)]
    cost = problem.metric(report)
    choice = sum(sent.get(phase, 0) for phase in CHOICE)
    return RunFacts(
        cost,
        (cost - known["mean"]) / known["std"],
        choice,
        sent[ROWS],
        sum(sent.values()) - choice - sent[ROWS],
    )


def open_tables(dataset: Dataset, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield each table's site and its tables file: rows may leave it."""
    for name, frame in dataset.tables.items():
        own = folder / name
        own.mkdir()
        frame.to_parquet(own / "rows.parquet")
        path = write_tables(own, {name: [("rows.parquet", name)]})
        let_rows_leave(path, [name])
        yield name, path


def limits(title: str, facts: Found) -> list[Check]:
    """Return what a coreset has to reach on a data set."""
    checks = []
    for name, solver, limit in (
        ("ridge", "Central", RIDGE_OVER_CENTRAL),
        ("kmeans", "Kmeans++", KMEANS_OVER_FULL),
    ):
        found = facts[name]
        sizes, run = found["sizes"], found["runs"]["C"]
        ratios = {
            size: sizes[f"C-{solver}"][size]["mean"] / cell["mean"]
            for size, cell in sizes[f"U-{solver}"].items()
        }
        # at every size for the regression, as for the paper's; k-means at the main one
        worst = max(ratios.values()) if name == "ridge" else ratios[str(MAIN_SIZE)]
        where = "the worst size" if name == "ridge" else f"{MAIN_SIZE:,} rows"
        sent = run["choice_bytes"] + run["row_bytes"]
        central = BYTES_PER_NUMBER * found["full-units"]
        checks += [
            Check(
                f"{title}, {solver}: C({MAIN_SIZE}) over all rows",
                found["over-full"],
                limit,
            ),
            Check(f"{title}, {solver}: C over U, {where}", worst, 1.0),
            Check(
                f"{title}, {solver}: bytes over those of all joined rows",
                sent / central,
                BYTES_SHARE,
                "%",
            ),
            Check(
                f"{title}, {solver}: a run's cost off the samples', in deviations",
                abs(run["deviations"]),
                DEVIATIONS,
            ),
        ]
    return checks


def guarantees(
    title: str, rows: Sampler, optimum: FloatArray, clusters: Sampler
) -> list[Check]:
    """Return how far weighted costs are from the costs, for many parameters."""
    errors = {
        "theta": theta_error(rows, optimum, np.random.default_rng(1)),
        "sets of centres": centres_error(clusters, np.random.default_rng(2)),
    }
    return [
        Check(
            f"{title}: worst cost of {PARAMETERS} {what}, C({GUARANTEED_SIZE})",
            error,
            EPSILON,
            "%",
        )
        for what, error in errors.items()
    ]


def theta_error(sampler: Sampler, optimum: FloatArray, rng: Generator) -> float:
    """Return the largest |weighted cost / cost - 1|: random thetas, and the optimum.

    Scores of a random theta vary about as much as the labels.
    """
    join = sampler.join
    random = rng.normal(size=(len(optimum), PARAMETERS)) * join.labels.std()
    random[:-1] /= np.sqrt(join.width)
    squares = join.residuals(np.column_stack([random, optimum])) ** 2
    sample = sampler.draw(GUARANTEED_SIZE, rng)
    ratios = (sample.weights @ squares[sample.joined]) / squares.sum(axis=0)
    return float(np.abs(ratios - 1.0).max())


def centres_error(sampler: Sampler, rng: Generator) -> float:
    """Return the largest |weighted cost / cost - 1|: sets of joined rows as centres."""
    join = sampler.join
    sample = sampler.draw(GUARANTEED_SIZE, rng)
    points = join.design(sample.joined).astype(np.float64)
    worst = 0.0
    for _ in range(PARAMETERS):
        centres = join.design(rng.choice(join.size, CLUSTERS)).astype(np.float64)
        weighted = kmeans_cost(points, centres, sample.weights)
        ratio = weighted / float(join.distances(centres).sum())
        worst = max(worst, abs(ratio - 1.0))
    return worst
