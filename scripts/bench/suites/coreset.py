"""Coresets: the cost of a sample's solution on all rows, and of sending the sample.

The layout is that of the paper's Table 1: sizes 1,000 to 6,000, mean and deviation over
20 samples, by importance (C-) and uniform (U-), for both solvers of each problem. The
samples are drawn by the library over the tables' rows, as the server and the sites do;
one run of the strategy with the same size gives the bytes, and its cost must be one of
theirs. Ridge regression has the paper's lambda = 0.1 n, which is l2 = 0.1.

Communication is the paper's: numbers that are sent to choose the rows, and of the rows
themselves; of Central's, all joined rows. JoinedRows and statistics, which every method
over a join needs, are counted apart.

The join is never built: a linear score, or a squared distance, is a sum over the
tables, so that the cost of a model on all joined rows takes O(sum n_i d_i + N T).

Reference:
    Huang, Li, Sun, Zhao 2022, Coresets for Vertical Federated Learning, section 6.
"""

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scripts.bench.datasets import DATASETS, Dataset
from scripts.bench.harness import Options, Outcome, Results, train
from scripts.data.run_files import let_rows_leave, write_tables
from scripts.joined.centralized import JoinedTable
from scripts.joined.models import fit_ridge
from tp_flower.arrays import FloatArray
from tp_flower.coresets.importance import (
    augmented,
    cluster_shard,
    kmeans_scores,
    leverages,
    penalised,
    whitening,
)
from tp_flower.coresets.sampling import (
    Sample,
    draw_rows,
    uniform_sample,
    weigh_sample,
)
from tp_flower.coresets.solvers import (
    Solver,
    distdim,
    nearest,
    solve,
    weighted_kmeans,
)
from tp_flower.joins.mapping import TableRows
from tp_flower.learning.solvers import gram
from tp_flower.reports.records import RoundReport
from tp_flower.settings import Settings

SIZES = (1000, 2000, 3000, 4000, 5000, 6000)
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
Cost = Callable[[Sample, Generator], float]
"""The cost, on all rows, of the solution on a sample."""


@dataclass(frozen=True)
class Join:
    """Joined rows, as the rows of the tables behind them; labels (N,).

    Attributes:
        tables: by table its rows, and their encoded features (n_i, d_i).
        label: (n_1, 1) of the first table, which has the label.
    """

    tables: Sequence[tuple[TableRows, npt.NDArray[np.float32]]]
    labels: FloatArray
    label: FloatArray

    @classmethod
    def of(cls, joined: JoinedTable, chosen: npt.NDArray[np.bool_]) -> "Join":
        """Return some of the joined rows; the query's first table has the label."""
        tables, at = [], []
        for name, columns in joined.columns.items():
            _, first, place = np.unique(
                joined.rows[name][chosen], return_index=True, return_inverse=True
            )
            rows = TableRows(place.reshape(-1).astype(np.int32), len(first))
            at.append(np.flatnonzero(chosen)[first])
            tables.append((rows, joined.features[at[-1], columns]))
        return cls(tables, joined.labels[chosen], joined.labels[at[0], None])

    @property
    def size(self) -> int:
        """N."""
        return len(self.labels)

    @property
    def widths(self) -> list[int]:
        """d_i, the features of each table."""
        return [features.shape[1] for _, features in self.tables]

    def design(self, joined: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
        """Return the features of joined rows (k,), (k, d)."""
        blocks = [features[rows.row_of[joined]] for rows, features in self.tables]
        return np.concatenate(blocks, axis=1)

    def _sum(self, scores: Sequence[FloatArray]) -> FloatArray:
        """Return the sum over the tables of their rows' scores (n_i, ...), (N, ...)."""
        total = np.zeros((self.size, *scores[0].shape[1:]))
        for (rows, _), of_rows in zip(self.tables, scores, strict=True):
            rows.add_expanded(of_rows, total)
        return total

    def _split(self, columns: FloatArray, axis: int = 0) -> list[FloatArray]:
        return np.split(columns, np.cumsum(self.widths)[:-1], axis)

    def residuals(self, theta: FloatArray) -> FloatArray:
        """Return X theta + b - y of theta (d + 1, c), (N, c)."""
        parts = zip(self.tables, self._split(theta[:-1]), strict=True)
        scores = self._sum([features @ part for (_, features), part in parts])
        residuals: FloatArray = scores + theta[-1] - self.labels[:, None]
        return residuals

    def distances(self, centres: FloatArray) -> FloatArray:
        """Return the squared distance to the nearest of centres (k, d), (N,)."""
        local = []
        for (_, features), part in zip(
            self.tables, self._split(centres, axis=1), strict=True
        ):
            squares = np.einsum("ij,ij->i", features, features)[:, None]
            local.append(squares - 2.0 * (features @ part.T) + (part**2).sum(axis=1))
        nearest: FloatArray = np.maximum(self._sum(local).min(axis=1), 0.0)
        return nearest

    def regression_scores(self, l2: float) -> FloatArray:
        """Return the scores of the joined rows, without the uniform term, (N,)."""
        scores = []
        for place, (rows, features) in enumerate(self.tables):
            label = None if place else self.label
            columns = augmented(features, label, intercept=not place)
            clear = gram(columns, rows.multiplicity)
            basis = whitening(penalised(clear, features.shape[1], l2 * self.size))
            scores.append(leverages(columns, basis))
        return self._sum(scores)

    def cluster_scores(self, clusters: int, rng: Generator) -> FloatArray:
        """Return the scores of the joined rows, without the uniform term, (N,)."""
        shards = [
            cluster_shard(features, rows.multiplicity, clusters, rng)
            for rows, features in self.tables
        ]
        return self._sum([kmeans_scores(shard, shard.cost) for shard in shards])

    def local_clusters(
        self, sample: Sample, clusters: int, rng: Generator
    ) -> tuple[npt.NDArray[np.intp], list[FloatArray]]:
        """Return the sampled rows' local labels (k, T), and the centres by table."""
        labels, centres = [], []
        for rows, features in self.tables:
            taken, place = np.unique(rows.row_of[sample.joined], return_inverse=True)
            mass = np.bincount(place, sample.weights)
            local = cluster_shard(features[taken], mass, clusters, rng)
            labels.append(local.labels[place])
            centres.append(local.centres)
        return np.stack(labels, axis=1), centres


@dataclass(frozen=True)
class Sampler:
    """Draws samples of a join's rows: by importance where it has scores, or uniformly.

    Attributes:
        scores: (N,), s_j without the uniform term; None draws uniformly.
    """

    join: Join
    scores: FloatArray | None = None

    def draw(self, size: int, rng: Generator) -> Sample:
        """Return a sample of ``size`` rows."""
        if self.scores is None:
            return uniform_sample(self.join.size, size, None, rng)
        scores = self.scores + len(self.join.tables) / self.join.size
        draws = draw_rows(scores, size, rng)
        return weigh_sample(draws, scores[np.unique(draws)], float(scores.sum()))


def units(size: int, kind: str, widths: Sequence[int], labels: int) -> int:
    """Return the numbers that a sample and its choice take, as the paper counts.

    Of m rows, each with ``labels`` numbers for its label: with "C" totals, counts,
    samples, the samples to all tables, scores; with "U" the samples to all tables.
    """
    parties = len(widths)
    choice = 2 * parties + size + parties * size if kind == "C" else 0
    return choice + parties * size + size * (sum(widths) + labels)


@dataclass(frozen=True)
class Problem:
    """One of the two problems on a data set.

    Attributes:
        samplers: "C" and "U".
        solvers: by name.
        full: the cost of the solution on all rows, by solver; NaN where it was not run.
        metric: the cost in the last evaluated round of a run.
        labels: numbers of a row's label.
        most_over_full: the limit of the first solver's cost over that on all rows.
    """

    strategy: str
    samplers: Mapping[str, Sampler]
    solvers: Mapping[str, Cost]
    full: Mapping[str, float]
    metric: Callable[[RoundReport], float]
    labels: int
    most_over_full: float


def measure_coreset(_: Options) -> Outcome:
    """Measure flights and store."""
    outcome = Outcome()
    for name, is_checked in (("flights-delay", True), ("store", False)):
        measure_dataset(DATASETS[name](None), outcome, is_checked=is_checked)
    return outcome


def measure_dataset(dataset: Dataset, outcome: Outcome, *, is_checked: bool) -> None:
    """Measure ridge regression and k-means on a data set."""
    config = {**dataset.settings, "l2": L2, "clusters": CLUSTERS}
    joined = dataset.joined(Settings.from_run_config(config))
    training, test = (Join.of(joined, joined.is_test == k) for k in (False, True))
    whole = Join.of(joined, np.ones(len(joined.labels), np.bool_))
    fitted = fit_ridge(*joined.part(test=False), L2)
    optimum = np.append(fitted.weights, fitted.intercept)
    ridge, kmeans = ridge_problem(training, test, optimum), kmeans_problem(whole)
    facts: Results = {
        "title": dataset.title,
        "joined-rows": [training.size, test.size],
        "ridge": measure_problem(dataset, ridge),
        "kmeans": measure_problem(dataset, kmeans),
    }
    outcome.facts[dataset.name] = facts
    if is_checked:
        _check_limits(outcome, dataset.title, ridge, facts["ridge"])
        _check_limits(outcome, dataset.title, kmeans, facts["kmeans"])
        rows, clusters = ridge.samplers["C"], kmeans.samplers["C"]
        for kind, error in {
            "theta": theta_error(rows, optimum, np.random.default_rng(1)),
            "sets of centres": centres_error(clusters, np.random.default_rng(2)),
        }.items():
            title = f"worst cost of {PARAMETERS} {kind}, C({GUARANTEED_SIZE})"
            outcome.check(f"{dataset.title}: {title}", error, EPSILON, "%")


def ridge_problem(training: Join, test: Join, theta: FloatArray) -> Problem:
    """Return ridge regression: the cost is the squared error on the held-out rows."""

    def cost(solution: FloatArray) -> float:
        return float((test.residuals(solution[:, None]) ** 2).mean())

    def solved(solver: Solver) -> Cost:
        def run(sample: Sample, _: Generator) -> float:
            design = training.design(sample.joined)
            labels = training.labels[sample.joined]
            return cost(solve(design, labels, sample.weights, l2=L2, solver=solver))

        return run

    importance = Sampler(training, training.regression_scores(L2))
    return Problem(
        "coreset-ridge",
        {"C": importance, "U": Sampler(training)},
        {"Central": solved("exact"), "SAGA": solved("saga")},
        {"Central": cost(theta), "SAGA": math.nan},
        lambda report: report.test["rmse"] ** 2,
        labels=1,
        most_over_full=1.02,
    )


def kmeans_problem(join: Join) -> Problem:
    """Return k-means: the cost is the mean squared distance over all joined rows."""
    rng = np.random.default_rng(0)

    def cost(centres: FloatArray) -> float:
        return float(join.distances(centres).mean())

    def lloyd(sample: Sample, draw: Generator) -> float:
        points = join.design(sample.joined)
        return cost(weighted_kmeans(points, sample.weights, CLUSTERS, draw))

    def distributed(sample: Sample, draw: Generator) -> float:
        labels, centres = join.local_clusters(sample, CLUSTERS, draw)
        return cost(distdim(labels, centres, sample.weights, CLUSTERS, draw))

    solvers = {"Kmeans++": lloyd, "DistDim": distributed}
    everything = uniform_sample(join.size, join.size, None, rng)
    importance = Sampler(join, join.cluster_scores(CLUSTERS, rng))
    return Problem(
        "coreset-kmeans",
        {"C": importance, "U": Sampler(join)},
        solvers,
        {name: run(everything, rng) for name, run in solvers.items()},
        lambda report: report.test["loss"],
        labels=0,
        most_over_full=1.03,
    )


def measure_problem(dataset: Dataset, problem: Problem) -> Results:
    """Return the costs of all sizes, and the bytes of a run of each kind.

    All solvers of a size get the same ``REPEATS`` samples.
    """
    join = problem.samplers["C"].join
    sizes: dict[str, dict[str, dict[str, float]]] = {}
    for size, (kind, sampler) in product(SIZES, problem.samplers.items()):
        samples = [
            sampler.draw(size, np.random.default_rng([repeat, size]))
            for repeat in range(REPEATS)
        ]
        for place, (solver, run) in enumerate(problem.solvers.items()):
            costs = [
                run(sample, np.random.default_rng([repeat, place]))
                for repeat, sample in enumerate(samples)
            ]
            sizes.setdefault(f"{kind}-{solver}", {})[str(size)] = {
                "mean": float(np.mean(costs)),
                "std": float(np.std(costs, ddof=1)),
                "units": units(size, kind, join.widths, problem.labels),
            }
    return {
        "full": dict(problem.full),
        "full-units": join.size * (sum(join.widths) + problem.labels),
        "sizes": sizes,
        "runs": {kind: run_of(dataset, problem, kind) for kind in problem.samplers},
    }


def run_of(dataset: Dataset, problem: Problem, kind: str) -> Results:
    """Run the strategy at `MAIN_SIZE` over a site per table that lets rows leave.

    Returns the cost; and the bytes of choosing the rows, of the rows, and of all else,
    both ways.
    """
    config = {
        **dataset.settings,
        **({"l2": L2} if problem.labels else {}),
        "clusters": CLUSTERS,
        "strategy": problem.strategy,
        "coreset-size": MAIN_SIZE,
        "coreset-kind": "importance" if kind == "C" else "uniform",
    }
    with tempfile.TemporaryDirectory() as folder:
        sites = dict(open_tables(dataset, Path(folder)))
        report = train(dataset.sql, Settings.from_run_config(config), sites).report
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


def open_tables(dataset: Dataset, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield each table's site and its tables file: rows may leave it."""
    for name, frame in dataset.tables.items():
        site = folder / name
        site.mkdir()
        frame.to_parquet(site / "rows.parquet")
        path = write_tables(site, {name: [("rows.parquet", name)]})
        let_rows_leave(path, [name])
        yield name, path


def _check_limits(
    outcome: Outcome, title: str, problem: Problem, facts: Results
) -> None:
    solver, main = next(iter(problem.solvers)), str(MAIN_SIZE)
    cost, uniform = (facts["sizes"][f"{kind}-{solver}"] for kind in "CU")
    ratios = {size: cost[size]["mean"] / uniform[size]["mean"] for size in cost}
    # at every size for the regression, as for the paper's; k-means at the main one
    is_ridge = bool(problem.labels)
    worst = max(ratios.values()) if is_ridge else ratios[main]
    where = "the worst size" if is_ridge else f"{MAIN_SIZE:,} rows"
    run, name = facts["runs"]["C"], f"{title}, {solver}"
    sent = run["choice_bytes"] + run["row_bytes"]
    central = BYTES_PER_NUMBER * facts["full-units"]
    deviations = abs(run["cost"] - cost[main]["mean"]) / cost[main]["std"]
    over_full = cost[main]["mean"] / problem.full[solver]
    full = f"{name}: C({MAIN_SIZE}) over all rows"
    outcome.check(full, over_full, problem.most_over_full)
    outcome.check(f"{name}: C over U, {where}", worst, 1.0)
    share = f"{name}: bytes over those of all joined rows"
    outcome.check(share, sent / central, BYTES_SHARE, "%")
    off = f"{name}: a run's cost off the samples', in deviations"
    outcome.check(off, deviations, DEVIATIONS)


def theta_error(sampler: Sampler, optimum: FloatArray, rng: Generator) -> float:
    """Return the largest |weighted cost / cost - 1|: random thetas, and the optimum.

    Scores of a random theta vary about as much as the labels.
    """
    join = sampler.join
    random = rng.normal(size=(len(optimum), PARAMETERS)) * join.labels.std()
    random[:-1] /= np.sqrt(sum(join.widths))
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
        weighted = float(sample.weights @ nearest(points, centres)[1])
        ratio = weighted / float(join.distances(centres).sum())
        worst = max(worst, abs(ratio - 1.0))
    return worst
