"""The cost of a blind server: runs as they are by default, and in the clear.

Both runs of a pair train on the same rows, in turns.
"""

from collections.abc import Iterator, Mapping

import pandas as pd

from scripts.bench.datasets import Dataset, Tables, at_hand
from scripts.bench.harness import Options, Outcome, train_timed
from tp_flower.settings import Settings

STRATEGIES = ("admm", "sgd")
CLEAR: Mapping[str, str] = {"privacy.scores": "clear", "privacy.unions": "clear"}
REPEATS = 2
TOLERANCE = 1e-4
LIMITS = {
    "relative difference of the test metric": 1e-4,
    "epochs more or less": 1,
    "rounds more": 1,
    "bytes up, relative to the clear": 1.01,
    "bytes down, relative to the clear": 1.01,
    "time of a round, relative to the clear": 1.15,
}


def measure_blind(options: Options) -> Outcome:
    """Compare metrics, epochs, rounds, bytes and time of both ways; worst of all."""
    outcome = Outcome()
    pairs = pd.DataFrame(
        {name: pair for data in at_hand(options.movielens) for name, pair in _of(data)}
    )
    for figure, limit in LIMITS.items():
        worst = pairs.loc[figure].idxmax()
        outcome.check(figure, pairs.at[figure, worst], limit)
        outcome.facts[f"{figure}: largest in"] = worst
        outcome.facts[f"{figure}: median"] = pairs.loc[figure].median()
    return outcome


def _of(data: Dataset) -> Iterator[tuple[str, pd.Series]]:
    """Yield the figures of every pair on a data set, with its name."""
    ways = {"one shard": data.join_only(), "two shards": data.two_shards()}
    for way, sites in ways.items():
        for strategy in STRATEGIES:
            yield f"{data.title}, {strategy}, {way}", _compare(data, sites, strategy)


def _compare(data: Dataset, sites: Mapping[str, Tables], strategy: str) -> pd.Series:
    config = {**data.settings, "strategy": strategy, "tolerance": TOLERANCE}
    blind = Settings.from_run_config(config)
    clear = Settings.from_run_config({**config, **CLEAR})
    turns = [
        (_figures(data, sites, blind), _figures(data, sites, clear))
        for _ in range(REPEATS)
    ]
    (one, other), *_ = turns
    seconds = [min(run["seconds"] for run in runs) for runs in zip(*turns, strict=True)]
    return pd.Series(
        [
            abs(one["metric"] / other["metric"] - 1),
            abs(one["epochs"] - other["epochs"]),
            one["rounds"] - other["rounds"],
            one["up"] / other["up"],
            one["down"] / other["down"],
            seconds[0] / seconds[1],
        ],
        index=list(LIMITS),
    )


def _figures(
    data: Dataset, sites: Mapping[str, Tables], settings: Settings
) -> Mapping[str, float]:
    """Return the figures of one run; seconds are those of a round of training."""
    strategy, rounds = train_timed(data.sql, settings, sites)
    report = strategy.report
    return {
        "metric": report.final_test[data.metric],
        "epochs": rounds["epoch"].max(),
        "rounds": len(rounds),
        "up": report.bytes_up,
        "down": report.bytes_down,
        "seconds": rounds.loc[rounds["epoch"] > 0, "seconds"].mean(),
    }
