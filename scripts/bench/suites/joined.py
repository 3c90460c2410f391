"""Boosted trees by default beside the best models of the joined table.

Every row is a data set with a way to hold rows out. All models of a row have the same
columns, training, validation and held-out rows; ours has the defaults everywhere. By
how much ours is behind is told by the ratio of root mean squared errors, or of AUCs the
other way round, less 1: below 0, ours is better.

    best     the best held-out metric of: LightGBM of 7, 15, 31 or 127 leaves, that of
             least validation loss; a matrix factorisation where rows have two ids; the
             linear optimum
    one      LightGBM of as many leaves, each tree on one table's columns
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from scripts.bench.datasets import (
    Dataset,
    diabetes,
    flights,
    flights_delay,
    house_prices,
    lahman,
    movielens,
    music_paid,
    music_returned,
    prices,
    store,
)
from scripts.bench.harness import Options, Outcome, SkippedSuite, train
from scripts.bench.suites.boost import with_ids
from scripts.joined.centralized import JoinedTable
from scripts.joined.models import (
    Problem,
    fit_factors,
    grow_trees,
    one_table_each,
    tree_metrics,
)
from tp_flower.settings import Settings

Make = Callable[[Path | None], Dataset]

LEAVES: Final = (7, 15, 31, 127)
MOST_TREES: Final = 2_000
"""Validation rows end the witnesses long before."""
BEST: Final = "best of the join"
DEFAULT, NOTHING_MORE, BINS = "default", "nothing more allowed", "bins"
PRODUCTS: Final[Mapping[str, Mapping[str, str | int]]] = {
    DEFAULT: {},
    # what a policy of before regions, factors and bins allows
    NOTHING_MORE: {"regions": "none", "factors": "none"},
    BINS: {"bins": 64},
}
JOINT, ONE, LINEAR, FACTORS = (
    *("LightGBM on the join", "LightGBM of a table for each tree"),
    *("linear optimum", "matrix factorisation"),
)


@dataclass(frozen=True)
class Case:
    """A data set, and its splits by what they are called.

    Attributes:
        ids: alias, table and column of the two ids that joined rows have.
        aims: the most that a split's metric may be.
    """

    make: Make
    splits: Mapping[str, str]
    ids: tuple[tuple[str, str, str], ...] = ()
    aims: Mapping[str, float] = field(default_factory=dict)


RANDOM: Final = {"random": "random"}
ZOO: Final = (
    Case(flights, {**RANDOM, "days": "group(f.month, f.day)"}),
    Case(flights_delay, {**RANDOM, "last": "time(f.time_hour)"}),
    Case(store, RANDOM),
    Case(prices, RANDOM),
    Case(music_paid, RANDOM),
    Case(music_returned, RANDOM),
    Case(diabetes, RANDOM),
    Case(house_prices, {**RANDOM, "last": "time(h.date)"}),
    Case(
        lahman,
        {**RANDOM, "players": "group(s.playerID)", "last": "time(s.yearID)"},
        aims={"random": 0.62},
    ),
    Case(movielens, RANDOM, aims={"random": 0.93}),
    Case(
        lambda folder: with_ids(movielens(folder)),
        {**RANDOM, "users": "group(u.user_id)"},
        ids=(("u", "users", "user_id"), ("m", "movies", "movie_id")),
        aims={"random": 0.93},
    ),
)


def measure_joined(options: Options) -> Outcome:
    """Measure all rows of the zoo whose data are at hand."""
    outcome, behind = Outcome(), list[float]()
    for case in ZOO:
        try:
            dataset = case.make(options.movielens)
        except SkippedSuite as reason:
            print(f"  without a data set: {reason}", flush=True)
            continue
        for title, split in case.splits.items():
            found = measure_row(dataset, split, case.ids)
            name = f"{dataset.title}, {title}"
            outcome.facts[name] = found
            print(f"  {name}: {found}", flush=True)
            behind.append(_check(outcome, name, dataset.metric, found))
            if aim := case.aims.get(title):
                outcome.check(f"{name}: {dataset.metric}", found[DEFAULT], aim)
    outcome.check(f"median: {DEFAULT}, behind the {BEST}", median(behind), 0.0, "%")
    return outcome


def measure_row(
    dataset: Dataset, split: str, ids: tuple[tuple[str, str, str], ...] = ()
) -> dict[str, Any]:
    """Return the held-out metric of all models, and of our default its rounds."""
    config = {**dataset.settings, "strategy": "boost", "test-split": split}
    settings, metric = Settings.from_run_config(config), dataset.metric
    joined = dataset.joined(settings)
    found: dict[str, Any] = {"joined rows": len(joined.labels)}
    for name, more in PRODUCTS.items():
        chosen = Settings.from_run_config({**config, **more})
        report = train(dataset.sql, chosen, dataset.join_only()).report
        found[name] = report.final_test[metric]
        if name == DEFAULT:
            found["rounds"] = len(report.history)
    found |= {
        JOINT: _best_trees(joined, settings, metric),
        ONE: _best_trees(joined, settings, metric, **one_table_each(joined)),
        LINEAR: _linear(dataset, config),
    }
    if ids:
        codes = [
            np.unique(
                dataset.tables[table][column].to_numpy()[joined.rows[alias]],
                return_inverse=True,
            )[1]
            for alias, table, column in ids
        ]
        scores = fit_factors(joined, codes)[joined.is_test, None]
        tested = joined.objective.select(joined.is_test)
        found[FACTORS] = tested.metrics(scores)[metric]
    choose = max if metric == "auc" else min
    found[BEST] = choose(found[x] for x in (JOINT, LINEAR, FACTORS) if x in found)
    return found


def _best_trees(
    joined: JoinedTable, settings: Settings, metric: str, **options: Any
) -> float:
    """Return the metric of the LightGBM whose leaves validate best."""
    metrics: dict[float, float] = {}
    for leaves in LEAVES:
        booster = grow_trees(joined, settings, MOST_TREES, num_leaves=leaves, **options)
        (losses,) = booster.best_score.values()
        (loss,) = losses.values()
        tested = tree_metrics(joined, booster, booster.best_iteration)
        metrics[loss] = tested[metric]
    return metrics[min(metrics)]


def _linear(dataset: Dataset, config: Mapping[str, object]) -> float:
    """Return the metric of the linear optimum on the same training rows."""
    linear = {**config, "strategy": "cg", "validation-fraction": 0.1}
    settings = Settings.from_run_config(linear)
    problem = Problem.of(dataset.joined(settings), settings)
    return problem.test_metrics(problem.optimum())[dataset.metric]


def lag(metric: str, ours: float, theirs: float) -> float:
    """Return by how much ours is behind, as a share."""
    return (theirs / ours if metric == "auc" else ours / theirs) - 1.0


def _check(
    outcome: Outcome, name: str, metric: str, found: Mapping[str, float]
) -> float:
    """Add the checks of a row; return by how much the default is behind the best."""
    for ours, theirs, most in (
        (DEFAULT, BEST, 0.03),
        (BINS, BEST, 0.01),
        (NOTHING_MORE, LINEAR, 0.002),
        (NOTHING_MORE, ONE, 0.01),
    ):
        behind = lag(metric, found[ours], found[theirs])
        outcome.check(f"{name}: {ours}, behind the {theirs}", behind, most, "%")
    return lag(metric, found[DEFAULT], found[BEST])
