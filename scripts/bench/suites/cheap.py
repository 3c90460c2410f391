"""Beside a join that one could run: few numeric columns, where joining costs least.

Suite ``cheap``: a linear model by `cg` beside DuckDB's join and scikit-learn's logistic
regression, and boosted trees beside the join and LightGBM with 100 trees, on ten
numeric columns over two tables and more, one row of a table for each of another's or
many for many. It is the worst case for training without the join; suites ``speed`` and
``centralized`` have wide and categorical joins.

Both ways start from the same data frames in memory and end with the AUC on held-out
rows. CPU seconds count, in a process of its own: a machine that does something else
stretches them least. What Python imports is counted in neither.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import duckdb
import numpy as np
import pandas as pd

from scripts.bench.harness import Options, Outcome, train
from scripts.bench.processes import in_process_of_its_own, spent
from tp_flower.settings import Settings

REPEATS: Final = 2
COLUMNS: Final = 10
EVENTS: Final = "events"
LINEAR_LIMIT: Final = 2.0
LARGE: Final = 1_000_000
"""Joined rows from which the limit holds: below, a run's fixed half second counts."""
TREES: Final = 100

Frames = dict[str, pd.DataFrame]
Measured = dict[str, float]


@dataclass(frozen=True)
class Case:
    """Events, each with a key of each further table, which shares the columns.

    Attributes:
        rows: of the events.
        keys: distinct ones of each further table.
        copies: rows of a further table with the same key.
        tables: with the events.
        has_trees: whether boosted trees are measured, too.
    """

    rows: int
    keys: int
    copies: int = 1
    tables: int = 2
    has_trees: bool = False

    @property
    def joined_rows(self) -> int:
        """How many rows the query has."""
        copies: int = self.copies ** (self.tables - 1)
        return self.rows * copies

    @property
    def sql(self) -> str:
        """The query."""
        columns = ", ".join(
            f"t{number % self.tables}.x{number}" for number in range(COLUMNS)
        )
        joins = " ".join(
            f"JOIN dim{number} t{number} ON t0.key{number} = t{number}.id"
            for number in range(1, self.tables)
        )
        return f"SELECT t0.label AS label, {columns} FROM {EVENTS} t0 {joins}"

    def frames(self) -> Frames:
        """Return the tables; the label is drawn from a logistic model of the events."""
        rng = np.random.default_rng(0)
        owned = [
            [number for number in range(COLUMNS) if number % self.tables == table]
            for table in range(self.tables)
        ]
        events = pd.DataFrame({f"x{n}": rng.normal(size=self.rows) for n in owned[0]})
        scores = events.to_numpy() @ np.linspace(-1.0, 1.0, len(owned[0]))
        frames = {EVENTS: events}
        for table in range(1, self.tables):
            size = self.keys * self.copies
            ids = np.arange(size) % self.keys
            columns = {f"x{number}": rng.normal(size=size) for number in owned[table]}
            frames[f"dim{table}"] = pd.DataFrame({"id": ids, **columns})
            of_events = rng.integers(0, self.keys, self.rows)
            if self.keys == self.rows:
                of_events = rng.permutation(self.rows)
            events[f"key{table}"] = of_events
            # of several rows with a key, the first one tells
            for values in columns.values():
                scores += 0.5 * values[of_events]
        chances = 1.0 / (1.0 + np.exp(-scores))
        events["label"] = (rng.random(self.rows) < chances).astype(np.int64)
        return frames


CASES: Final[Mapping[str, Case]] = {
    "100,000 rows, 2 tables": Case(100_000, 5_000, has_trees=True),
    "1,000,000 rows, 2 tables": Case(1_000_000, 50_000, has_trees=True),
    "1,000,000 rows, one to one": Case(1_000_000, 1_000_000),
    "1,000,000 rows, 10 tables": Case(1_000_000, 5_000, tables=10),
    "2,000,000 rows, many to many": Case(100_000, 5_000, copies=20),
    "10,000,000 rows, 2 tables": Case(10_000_000, 500_000),
}


def measure_cheap(_: Options) -> Outcome:
    """Compare both ways in every case, and their AUC."""
    outcome = Outcome()
    for name, case in CASES.items():
        ours = _fastest(train_in_place, name, "cg")
        joined = _fastest(join_and_fit, name, "linear")
        outcome.facts[f"{name}: cg"] = ours
        outcome.facts[f"{name}: join, scikit-learn"] = joined
        ratio = ours["cpu-seconds"] / joined["cpu-seconds"]
        title = f"{name}: cg over join and scikit-learn"
        if case.joined_rows >= LARGE:
            outcome.check(title, ratio, LINEAR_LIMIT)
        else:
            outcome.facts[title] = ratio
        if case.has_trees:
            trees = _fastest(train_in_place, name, "boost")
            lightgbm = _fastest(join_and_fit, name, "trees")
            outcome.facts[f"{name}: boost"] = trees
            outcome.facts[f"{name}: join, LightGBM"] = lightgbm
            ratio = trees["cpu-seconds"] / lightgbm["cpu-seconds"]
            outcome.facts[f"{name}: boost over join and LightGBM"] = ratio
    return outcome


def train_in_place(name: str, strategy: str) -> Measured:
    """Train without a join."""
    case = CASES[name]
    sites = {f"site {table}": {table: rows} for table, rows in case.frames().items()}
    _warm_up(strategy)
    with spent() as measured:
        trained = train(case.sql, Settings(strategy=strategy, seed=1), sites)
        measured["auc"] = trained.report.final_test["auc"]
    return measured


def join_and_fit(name: str, model: str) -> Measured:
    """Join, standardise, and fit."""
    case = CASES[name]
    frames = case.frames()
    fit = _FITS[model]
    fit(np.eye(4), np.array([0, 1, 0, 1]))
    from sklearn.metrics import roc_auc_score

    with spent() as measured:
        with duckdb.connect() as connection:
            for table, rows in frames.items():
                connection.register(table, rows)
            joined = connection.execute(case.sql).df()
        labels = joined.pop("label").to_numpy()
        features = joined.to_numpy()
        draws = np.random.default_rng(1).random(len(labels))
        is_test = draws < Settings().test_fraction
        score = fit(features[~is_test], labels[~is_test])
        auc = roc_auc_score(labels[is_test], score(features[is_test]))
        measured["auc"] = float(auc)
    return measured


def _warm_up(strategy: str) -> None:
    """Have all imported that a run imports."""
    tables = Case(200, 20).frames()
    sites = {f"site {table}": {table: rows} for table, rows in tables.items()}
    train(Case(200, 20).sql, Settings(strategy=strategy, num_epochs=1), sites)


Matrix = np.ndarray
Score = Callable[[Matrix], Matrix]


def _fit_linear(features: Matrix, labels: Matrix) -> Score:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(features)
    model = LogisticRegression().fit(scaler.transform(features), labels)
    return lambda rows: model.decision_function(scaler.transform(rows))


def _fit_trees(features: Matrix, labels: Matrix) -> Score:
    import lightgbm

    data = lightgbm.Dataset(features, labels)
    model = lightgbm.train({"objective": "binary", "verbose": -1}, data, TREES)
    return lambda rows: np.asarray(model.predict(rows))


_FITS: Final = {"linear": _fit_linear, "trees": _fit_trees}


def _fastest(function: Callable[[str, str], Measured], *of_case: str) -> Measured:
    """Return the run that took the least of some."""
    run = partial(in_process_of_its_own, function, *of_case)
    runs = [run() for _ in range(REPEATS)]
    fastest: Measured = min(runs, key=lambda measured: measured["cpu-seconds"])
    return fastest
