"""Defaults of linear models against overfitting: l2, and validation rows.

The loss on test rows by the weight of the penalty, and with validation rows, in percent
of the default's: on the data sets that are at hand, made-up races with wide categories,
and hard schemas. docs/reference/strategies.md says what follows.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final

import numpy as np

from scripts.bench import schemas
from scripts.bench.datasets import Dataset, at_hand, lahman
from scripts.bench.harness import Options, Outcome, SkippedSuite, train
from scripts.bench.races import races
from tp_flower.settings import Settings

SEEDS: Final = (1, 2)
DEFAULT: Final = "l2 = 0.0001"
CHOICES: Final[Mapping[str, Mapping[str, object]]] = {
    **{f"l2 = {l2:g}": {"l2": l2} for l2 in (0.0, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)},
    "validation rows": {"validation_fraction": 0.1, "patience": 5},
}
SNOWFLAKES: Final = 4


def measure_penalty(options: Options) -> Outcome:
    """Train every data set by every choice; leave each out of choosing the best."""
    outcome = Outcome()
    changes: dict[str, list[float]] = {}
    for dataset in _datasets(options):
        losses = np.array([_losses(dataset, seed) for seed in SEEDS])
        ratios = (losses / losses[:, [list(CHOICES).index(DEFAULT)]]).mean(axis=0)
        changes[dataset.title] = np.log(ratios).tolist()
        percent = [float(f"{100.0 * (ratio - 1.0):.2g}") for ratio in ratios]
        outcome.facts[f"{dataset.title}: loss (%) by {', '.join(CHOICES)}"] = percent
    logs = np.array(list(changes.values()))
    left_out = []
    for place in range(len(logs)):
        chosen = np.delete(logs, place, axis=0).mean(axis=0).argmin()
        left_out.append(logs[place, chosen])
    mean, most = (
        100.0 * (np.exp(x) - 1.0) for x in (np.mean(left_out), np.max(left_out))
    )
    outcome.facts["the choice that is best on all others: loss (%), mean and most"] = [
        mean,
        most,
    ]
    return outcome


def _datasets(options: Options) -> Iterator[Dataset]:
    yield from at_hand(options.movielens)
    with suppress(SkippedSuite):
        yield lahman()
    with suppress(SkippedSuite):
        yield from (
            schemas.dataset("TPC-H", schemas.tpch(task)) for task in schemas.TASKS
        )
    yield races(11)
    yield races(5, first=2016)
    yield from (schemas.dataset("music", schemas.music(task)) for task in schemas.TASKS)
    for number in range(SNOWFLAKES):
        yield schemas.dataset(f"snowflake {number}", schemas.snowflake(number))


def _losses(dataset: Dataset, seed: int) -> list[float]:
    """Return the loss on test rows of each choice."""
    settings = Settings.from_run_config(dataset.settings).with_fields(
        strategy="cg", seed=seed
    )
    return [
        _test_loss(dataset, settings.with_fields(**choice))
        for choice in CHOICES.values()
    ]


def _test_loss(dataset: Dataset, settings: Settings) -> float:
    report = train(dataset.sql, settings, [dataset.tables]).report
    return float(report.final_test["loss"])
