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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scripts.bench.datasets import DATASETS
from scripts.bench.harness import Options, Outcome, Results, train
from scripts.data.dataset import Dataset
from scripts.data.prepare_vertical import vertical_datasets
from scripts.data.run_files import let_rows_leave, write_tables
from scripts.joined.centralized import JoinedTable
from scripts.joined.models import fit_ridge
from tp_flower.arrays import FloatArray
from tp_flower.coresets.importance import (
    ShardClusters,
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

RIDGE_OVER_CENTRAL = 1.02
KMEANS_OVER_FULL = 1.03
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
class Table:
    """A table of the join.

    Attributes:
        features: (n_i, d_i), encoded.
        label: (n_i, 1) at the label table.
    """

    rows: TableRows
    features: npt.NDArray[np.float32]
    label: FloatArray | None = None


@dataclass(frozen=True)
class Join:
    """Joined rows, as the rows of the tables behind them; labels (N,)."""

    tables: Sequence[Table]
    labels: FloatArray

    @classmethod
    def of(cls, joined: JoinedTable, chosen: npt.NDArray[np.bool_]) -> "Join":
        """Return some of the joined rows; the query's first table has the label."""
        tables: list[Table] = []
        for name, columns in joined.columns.items():
            _, first, place = np.unique(
                joined.rows[name][chosen], return_index=True, return_inverse=True
            )
            rows = TableRows(place.reshape(-1).astype(np.int32), len(first))
            at = np.flatnonzero(chosen)[first]
            label = None if tables else joined.labels[at, None]
            tables.append(Table(rows, joined.features[at, columns], label))
        return cls(tables, joined.labels[chosen])

    @property
    def size(self) -> int:
        """N."""
        return len(self.labels)

    @property
    def widths(self) -> list[int]:
        """d_i, the features of each table."""
        return [table.features.shape[1] for table in self.tables]

    @property
    def _edges(self) -> npt.NDArray[np.intp]:
        return np.cumsum(self.widths)[:-1]

    def design(self, joined: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
        """Return the features of joined rows (k,), (k, d)."""
        blocks = [table.features[table.rows.row_of[joined]] for table in self.tables]
        return np.concatenate(blocks, axis=1)

    def residuals(self, theta: FloatArray) -> FloatArray:
        """Return X theta + b - y of theta (d + 1, c), (N, c)."""
        total: FloatArray = theta[-1] - self.labels[:, None]
        parts = np.split(theta[:-1], self._edges)
        for table, part in zip(self.tables, parts, strict=True):
            table.rows.add_expanded(table.features @ part, total)
        return total

    def distances(self, centres: FloatArray) -> FloatArray:
        """Return the squared distance to the nearest of centres (k, d), (N,)."""
        total = np.zeros((self.size, len(centres)))
        parts = np.split(centres, self._edges, axis=1)
        for table, part in zip(self.tables, parts, strict=True):
            squares = np.einsum("ij,ij->i", table.features, table.features)
            local = squares[:, None] - 2.0 * (table.features @ part.T)
            table.rows.add_expanded(local + (part**2).sum(axis=1), total)
        nearest: FloatArray = np.maximum(total.min(axis=1), 0.0)
        return nearest

    def regression_scores(self, l2: float) -> FloatArray:
        """Return the scores of the joined rows, without the uniform term, (N,)."""
        return self._expanded(self._leverages(table, l2) for table in self.tables)

    def _leverages(self, table: Table, l2: float) -> FloatArray:
        rows = augmented(table.features, table.label, intercept=table.label is not None)
        clear = gram(rows, table.rows.multiplicity)
        basis = whitening(penalised(clear, table.features.shape[1], l2 * self.size))
        return leverages(rows, basis)

    def cluster_scores(self, clusters: int, rng: Generator) -> FloatArray:
        """Return the scores of the joined rows, without the uniform term, (N,)."""
        return self._expanded(
            kmeans_scores(shard, shard.cost) for shard in self._clusters(clusters, rng)
        )

    def _clusters(self, clusters: int, rng: Generator) -> Iterator[ShardClusters]:
        for table in self.tables:
            counts = table.rows.multiplicity
            yield cluster_shard(table.features, counts, clusters, rng)

    def _expanded(self, scores: Iterable[FloatArray]) -> FloatArray:
        """Return the sum over the tables of their rows' scores, (N,)."""
        total = np.zeros(self.size)
        for table, of_rows in zip(self.tables, scores, strict=True):
            table.rows.add_expanded(of_rows, total)
        return total

    def local_clusters(
        self, sample: Sample, clusters: int, rng: Generator
    ) -> tuple[npt.NDArray[np.intp], list[FloatArray]]:
        """Return what DistDim takes of the sampled rows: (k, T) labels, and centres."""
        labels, centres = [], []
        for table in self.tables:
            rows = table.rows.row_of[sample.joined]
            taken, place = np.unique(rows, return_inverse=True)
            mass = np.bincount(place, sample.weights)
            local = cluster_shard(table.features[taken], mass, clusters, rng)
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

    Args:
        size: m.
        kind: "C": totals, counts, samples, the samples to all tables, scores; "U": the
            samples to all tables.
        widths: features by table.
        labels: numbers per row that are its label.
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
    """

    strategy: str
    samplers: Mapping[str, Sampler]
    solvers: Mapping[str, Cost]
    full: Mapping[str, float]
    metric: Callable[[RoundReport], float]
    labels: int


def measure_coreset(options: Options) -> Outcome:
    """Measure flights, store, and the official files in the folder of --vertical."""
    outcome = Outcome()
    made = [DATASETS[name](None) for name in ("flights-delay", "store")]
    for dataset in [*made, *vertical_datasets(options.vertical)]:
        is_checked = dataset.name == "flights-delay"
        measure_dataset(dataset, outcome, is_checked=is_checked)
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
        "features": sum(training.widths),
        "tables": len(training.tables),
        "ridge": measure_problem(dataset, ridge),
        "kmeans": measure_problem(dataset, kmeans),
    }
    outcome.facts[dataset.name] = facts
    if is_checked:
        _check_limits(outcome, facts)
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
    everything = Sample(
        np.arange(join.size), np.ones(join.size, int), np.ones(join.size), join.size
    )
    importance = Sampler(join, join.cluster_scores(CLUSTERS, rng))
    return Problem(
        "coreset-kmeans",
        {"C": importance, "U": Sampler(join)},
        solvers,
        {name: run(everything, rng) for name, run in solvers.items()},
        lambda report: report.test["loss"],
        labels=0,
    )


def measure_problem(dataset: Dataset, problem: Problem) -> Results:
    """Return the costs of all sizes, and the bytes of a run of each kind."""
    join = problem.samplers["C"].join
    sizes: dict[str, dict[str, dict[str, float]]] = {}
    for size in SIZES:
        for kind, sampler in problem.samplers.items():
            sent = units(size, kind, join.widths, problem.labels)
            for solver, costs in repeated(sampler, problem.solvers, size).items():
                sizes.setdefault(f"{kind}-{solver}", {})[str(size)] = {
                    "mean": float(np.mean(costs)),
                    "std": float(np.std(costs, ddof=1)),
                    "units": sent,
                }
    first = next(iter(problem.solvers))
    main = {kind: sizes[f"{kind}-{first}"][str(MAIN_SIZE)] for kind in problem.samplers}
    return {
        "full": dict(problem.full),
        "full-units": join.size * (sum(join.widths) + problem.labels),
        "sizes": sizes,
        "runs": {
            kind: run_of(dataset, problem, kind, cell) for kind, cell in main.items()
        },
        "over-full": main["C"]["mean"] / problem.full[first],
    }


def repeated(
    sampler: Sampler, solvers: Mapping[str, Cost], size: int
) -> dict[str, list[float]]:
    """Return by solver the costs on ``REPEATS`` samples, the same for all solvers."""
    costs: dict[str, list[float]] = {name: [] for name in solvers}
    for repeat in range(REPEATS):
        sample = sampler.draw(size, np.random.default_rng([repeat, size]))
        for place, (name, run) in enumerate(solvers.items()):
            costs[name].append(run(sample, np.random.default_rng([repeat, place])))
    return costs


def run_of(
    dataset: Dataset, problem: Problem, kind: str, samples: Mapping[str, float]
) -> Results:
    """Run the strategy at `MAIN_SIZE` over a site per table that lets rows leave.

    Returns the cost; by how many deviations it is off the mean of the ``samples``; and
    the bytes of choosing the rows, of the rows, and of all else, both ways.
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
    sent: dict[str, int] = {}
    for item in report.history:
        total = sum(item.bytes_up.values()) + sum(item.bytes_down.values())
        sent[item.phase] = sent.get(item.phase, 0) + total
    cost = problem.metric(report.history[-2])
    choice = sum(sent.get(phase, 0) for phase in CHOICE)
    return {
        "cost": cost,
        "deviations": (cost - samples["mean"]) / samples["std"],
        "choice_bytes": choice,
        "row_bytes": sent[ROWS],
        "other_bytes": sum(sent.values()) - choice - sent[ROWS],
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


def _check_limits(outcome: Outcome, facts: Results) -> None:
    for name, solver, limit in (
        ("ridge", "Central", RIDGE_OVER_CENTRAL),
        ("kmeans", "Kmeans++", KMEANS_OVER_FULL),
    ):
        problem = facts[name]
        sizes, run = problem["sizes"], problem["runs"]["C"]
        ratios = {
            size: sizes[f"C-{solver}"][size]["mean"] / cell["mean"]
            for size, cell in sizes[f"U-{solver}"].items()
        }
        # at every size for the regression, as for the paper's; k-means at the main one
        worst = max(ratios.values()) if name == "ridge" else ratios[str(MAIN_SIZE)]
        where = "the worst size" if name == "ridge" else f"{MAIN_SIZE:,} rows"
        sent = run["choice_bytes"] + run["row_bytes"]
        central = BYTES_PER_NUMBER * problem["full-units"]
        title = f"{facts['title']}, {solver}"
        full = f"{title}: C({MAIN_SIZE}) over all rows"
        outcome.check(full, problem["over-full"], limit)
        outcome.check(f"{title}: C over U, {where}", worst, 1.0)
        share = f"{title}: bytes over those of all joined rows"
        outcome.check(share, sent / central, BYTES_SHARE, "%")
        off = f"{title}: a run's cost off the samples', in deviations"
        outcome.check(off, abs(run["deviations"]), DEVIATIONS)


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
