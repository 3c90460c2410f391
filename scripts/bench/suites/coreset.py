"""Coresets: the cost of a sample's solution on all rows, and of sending the sample.

As in the paper's Table 1: mean and deviation over 20 samples, drawn by importance (C-)
or uniform (U-), by the library's functions on the joined table. One run of the strategy
gives the bytes, and its cost must be one of the samples'. Ridge regression has the
paper's lambda = 0.1 n, which is l2 = 0.1; its cost is the squared error on the held-out
rows, that of k-means the squared distance over all joined rows.

Communication is what is sent to choose the rows, and of the rows themselves, against
all joined rows as float32. JoinedRows and statistics, which every method over a join
needs, are counted apart.

Notation
    N   joined rows that are drawn from       d   features of all tables

Reference:
    Huang, Li, Sun, Zhao 2022, Coresets for Vertical Federated Learning, section 6.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from scripts.bench.datasets import Dataset, flights_delay
from scripts.bench.harness import Options, Outcome, Results, train
from scripts.data.run_files import write_tables
from scripts.joined.centralized import JoinedTable
from tp_flower.arrays import FloatArray
from tp_flower.learning.solvers import gram
from tp_flower.methods.coreset import importance
from tp_flower.methods.coreset.sampling import (
    Sample,
    draw_rows,
    uniform_sample,
    weigh_sample,
)
from tp_flower.methods.coreset.solvers import nearest, solve, weighted_kmeans
from tp_flower.reports.records import RoundReport
from tp_flower.settings import Settings

SIZES = (1000, 2000, 6000)
REPEATS = 20
MAIN_SIZE = 2000
GUARANTEED_SIZE = 4000
CLUSTERS = 10
L2 = 0.1
PARAMETERS = 200
"""Random thetas, and random sets of centres, that a coreset is tried on."""

EPSILON = 0.1
BYTES_SHARE = 1 / 50
DEVIATIONS = 4.0
BYTES_PER_NUMBER = 4
CHOICE = ("measure", "draw", "weigh")
ROWS = "rows"

Generator = np.random.Generator
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Problem:
    """A problem on joined rows.

    Attributes:
        strategy: and the ``solver``'s name in the figures.
        scores: (N,), importance without the uniform term.
        cost: on all rows, of a sample's solution; ``full``: of the solution on all.
        trials: costs of rows (N, k) by parameters that a coreset is tried on.
        numbers: of the joined rows, labels included.
        metric: the cost in the last evaluated round of a run.
        most_over_full: the limit of the cost over ``full``.
    """

    strategy: str
    solver: str
    scores: FloatArray
    cost: Callable[[Sample, Generator], float]
    full: float
    trials: tuple[str, Callable[[Generator], FloatArray]]
    numbers: int
    metric: Callable[[RoundReport], float]
    most_over_full: float

    def draw(self, kind: str, size: int, tables: int, rng: Generator) -> Sample:
        """Return a sample of the rows, by importance ("C") or uniform ("U")."""
        rows = len(self.scores)
        if kind == "U":
            return uniform_sample(rows, size, None, rng)
        scores = self.scores + tables / rows
        draws = draw_rows(scores, size, rng)
        return weigh_sample(draws, scores[np.unique(draws)], float(scores.sum()))


def measure_coreset(_: Options, dataset: Dataset | None = None) -> Outcome:
    """Measure ridge regression and k-means on a data set, by default flights."""
    dataset, outcome = dataset or flights_delay(), Outcome()
    config = {**dataset.settings, "l2": L2, "clusters": CLUSTERS}
    joined = dataset.joined(Settings.from_run_config(config))
    facts: Results = {}
    outcome.facts[dataset.name] = facts
    for name, make in (("ridge", ridge_problem), ("kmeans", kmeans_problem)):
        problem = make(joined)
        facts[name] = measured = measure_problem(dataset, config, problem)
        check_limits(outcome, dataset, problem, measured)
    return outcome


def regression_scores(
    features: Float32Array, labels: FloatArray, tables: list[slice]
) -> FloatArray:
    """Return the sum of the tables' leverages of joined rows (N,).

    The label and the intercept are columns of the query's first table.
    """
    scores, ones = np.zeros(len(labels)), np.ones(len(labels))
    for place, columns in enumerate(tables):
        block = features[:, columns]
        label = None if place else labels[:, None]
        rows = importance.augment(block, label, intercept=not place)
        penalty = L2 * len(labels)
        clear = importance.add_penalty(gram(rows, ones), block.shape[1], penalty)
        scores += importance.leverages(rows, importance.whitening(clear))
    return scores


def ridge_problem(joined: JoinedTable) -> Problem:
    """Return ridge regression on the training rows."""
    (features, labels), test = (joined.part(test=is_test) for is_test in (False, True))
    optimum = solve(features, labels, np.ones(len(labels)), l2=L2)

    def cost(sample: Sample, _: Generator) -> float:
        rows = features[sample.joined], labels[sample.joined]
        return held_out_cost(solve(*rows, sample.weights, l2=L2))

    def held_out_cost(theta: FloatArray) -> float:
        return float(squares(*test, theta[:, None]).mean())

    def thetas(rng: Generator) -> FloatArray:
        # scores of a random theta vary about as much as the labels
        random = rng.normal(size=(len(optimum), PARAMETERS)) * labels.std()
        random[:-1] /= np.sqrt(features.shape[1])
        return squares(features, labels, np.column_stack([random, optimum]))

    return Problem(
        *("coreset-ridge", "Central"),
        regression_scores(features, labels, list(joined.columns.values())),
        cost,
        held_out_cost(optimum),
        ("theta", thetas),
        features.size + labels.size,
        lambda report: report.test["rmse"] ** 2,
        most_over_full=1.02,
    )


def squares(
    features: Float32Array, labels: FloatArray, theta: FloatArray
) -> FloatArray:
    """Return (X theta + b - y)^2 of theta and b (d + 1, k), (N, k)."""
    scores = features @ theta[:-1].astype(np.float32) + theta[-1]
    errors: FloatArray = (scores - labels[:, None]) ** 2
    return errors


def kmeans_problem(joined: JoinedTable) -> Problem:
    """Return k-means on all joined rows."""
    rng, features = np.random.default_rng(0), joined.features
    ones, scores = np.ones(len(features)), np.zeros(len(features))
    for columns in joined.columns.values():
        shard = importance.cluster_shard(features[:, columns], ones, CLUSTERS, rng)
        scores += importance.kmeans_scores(shard, shard.cost)

    def cost(points: Float32Array, weights: FloatArray, draw: Generator) -> float:
        centres = weighted_kmeans(points, weights, CLUSTERS, draw)
        return float(nearest(features, centres)[1].mean())

    def sets_of_centres(rng: Generator) -> FloatArray:
        chosen = rng.choice(len(features), (PARAMETERS, CLUSTERS))
        centres = features[chosen].astype(np.float64)
        distances = [nearest(features, each)[1] for each in centres]
        return np.column_stack(distances)

    return Problem(
        *("coreset-kmeans", "Kmeans++"),
        scores,
        lambda sample, draw: cost(features[sample.joined], sample.weights, draw),
        cost(features, ones, rng),
        ("sets of centres", sets_of_centres),
        features.size,
        lambda report: report.test["loss"],
        most_over_full=1.03,
    )


def measure_problem(
    dataset: Dataset, config: dict[str, Any], problem: Problem
) -> Results:
    """Return the costs of all sizes, and the bytes of a run of each kind."""
    sizes: dict[str, dict[str, dict[str, float]]] = {}
    tables = len(dataset.tables)
    for kind in "CU":
        of_kind = sizes[f"{kind}-{problem.solver}"] = {}
        for size in SIZES:
            rngs = [np.random.default_rng([k, size]) for k in range(REPEATS)]
            costs = [
                problem.cost(problem.draw(kind, size, tables, rng), rng) for rng in rngs
            ]
            mean, std = float(np.mean(costs)), float(np.std(costs, ddof=1))
            of_kind[str(size)] = {"mean": mean, "std": std}
    return {
        "full": {problem.solver: problem.full},
        "sizes": sizes,
        "runs": {kind: run_of(dataset, config, problem, kind) for kind in "CU"},
    }


def run_of(
    dataset: Dataset, config: dict[str, Any], problem: Problem, kind: str
) -> Results:
    """Run the strategy at `MAIN_SIZE` over a site per table that lets rows leave.

    Returns the cost; and the bytes of choosing the rows, of the rows, and of all else,
    both ways.
    """
    choices = {"strategy": problem.strategy, "coreset-size": MAIN_SIZE}
    choices["coreset-kind"] = "importance" if kind == "C" else "uniform"
    settings = Settings.from_run_config({**config, **choices})
    with tempfile.TemporaryDirectory() as folder:
        sites = dict(open_tables(dataset, Path(folder)))
        report = train(dataset.sql, settings, sites).report
    sent: Counter[str] = Counter()
    for item in report.history:
        sent[item.phase] += sum((*item.bytes_up.values(), *item.bytes_down.values()))
    choice = sum(sent[phase] for phase in CHOICE)
    return {
        "cost": problem.metric(report.history[-2]),
        "choice_bytes": choice,
        "row_bytes": sent[ROWS],
        "other_bytes": sent.total() - choice - sent[ROWS],
    }


ROWS_LEAVE: Final = """expressions = true
min-count = 1
scores-per-rank = "any"
cover = 0
min-rows = 1
models = ["linear", "centres"]
releases = { rows = "clear", scores = "clear" }
"""
"""The rest of a policy that lets sampled rows leave."""


def open_tables(dataset: Dataset, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield each table's site and its tables file: rows may leave it."""
    for name, frame in dataset.tables.items():
        site = folder / name
        site.mkdir()
        frame.to_parquet(site / "rows.parquet")
        path = write_tables(site, {name: [("rows.parquet", name)]})
        names = json.dumps([str(column) for column in frame.columns])
        lists = "".join(
            f"{key} = {names}\n" for key in ("columns", "labels", "filters", "keys")
        )
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\n[tables.{name}.policy]\n{lists}{ROWS_LEAVE}")
        yield name, path


def check_limits(
    outcome: Outcome, dataset: Dataset, problem: Problem, facts: Results
) -> None:
    """Check the costs of samples, of the run, and of random parameters."""
    main, name = str(MAIN_SIZE), f"{dataset.title}, {problem.solver}"
    cost, uniform = (facts["sizes"][f"{kind}-{problem.solver}"] for kind in "CU")
    full = f"{name}: C({MAIN_SIZE}) over all rows"
    outcome.check(full, cost[main]["mean"] / problem.full, problem.most_over_full)
    # at every size for the regression, as for the paper's; k-means at the main one
    sizes = cost if problem.strategy == "coreset-ridge" else [main]
    worst = max(cost[size]["mean"] / uniform[size]["mean"] for size in sizes)
    where = "the worst size" if len(sizes) > 1 else f"{MAIN_SIZE:,} rows"
    outcome.check(f"{name}: C over U, {where}", worst, 1.0)
    run = facts["runs"]["C"]
    sent = run["choice_bytes"] + run["row_bytes"]
    share = f"{name}: bytes over those of all joined rows"
    outcome.check(share, sent / BYTES_PER_NUMBER / problem.numbers, BYTES_SHARE, "%")
    deviations = abs(run["cost"] - cost[main]["mean"]) / cost[main]["std"]
    off = f"{name}: a run's cost off the samples', in deviations"
    outcome.check(off, deviations, DEVIATIONS)
    kind, trials = problem.trials
    error = f"{dataset.title}: worst cost of {PARAMETERS} {kind}, C({GUARANTEED_SIZE})"
    rng = np.random.default_rng(1)
    costs = trials(rng)
    sample = problem.draw("C", GUARANTEED_SIZE, len(dataset.tables), rng)
    weighed = (sample.weights @ costs[sample.joined]) / costs.sum(axis=0)
    outcome.check(error, float(np.abs(weighed - 1.0).max()), EPSILON, "%")
