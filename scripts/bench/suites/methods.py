"""Methods against each other on the same data: the cost of a good test metric.

As in the papers' section 6: figures 5 (epochs), 7 (communication), 8 (computing), 9 and
10 (shards). Every run is done once: seconds of computing are as steady as the machine.

The yardstick is the *centralised metric*: the test metric of the linear model at the
optimum of the same objective, on the joined table, with the same rows held out. A
method has *reached* it at the first epoch with a test metric within 1 % of it
(`is_within`). Costs are counted from the start of the run, set-up included.
Communication is modelled as in section 6.3: latency per round plus bytes over
bandwidth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from scripts.bench.datasets import Dataset, at_hand
from scripts.bench.harness import Options, Outcome, Results, train
from scripts.joined.models import Problem
from tp_flower.reports.records import RoundReport
from tp_flower.settings import Settings

TOLERANCE = 0.01
HIGHER_IS_BETTER = frozenset({"auc", "accuracy", "r2"})
COSTS = ("rounds", "bytes")
CG_CLAIM = "CG's communication time to 1 % over the least of the others, any network"
SGD_CLAIM = "TP-SGD's epochs to 1 % over the fewest of the others (1: a tie)"
UCQ = ", UCQ"


@dataclass(frozen=True)
class Network:
    """How long messages take: the latency of a round, whatever it carries, and bits."""

    name: str
    round_seconds: float
    bits_per_second: float

    def seconds(self, rounds: Any, sent: Any) -> Any:
        """Return latency per round plus bytes over bandwidth."""
        return rounds * self.round_seconds + 8.0 * sent / self.bits_per_second


US_UK = Network("US-UK", 0.136, 0.42e9)

PAPER_NETWORKS = (
    US_UK,
    Network("US-US", 0.067, 1.15e9),
    Network("US-East, US-West", 0.063, 8 * 60.0e6),
    Network("US-West, EU", 0.153, 8 * 26.2e6),
    Network("US-East, EU", 0.110, 8 * 33.8e6),
)
"""The last three are what the paper measured between AWS regions (Table 8)."""


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        title: the papers' name where there is one.
        is_sharded: whether every table is in two shards.
        is_vertical: whether it trains on the vertical partitions of the joined table.
        settings: run-config keys besides.
    """

    title: str
    strategy: str
    is_sharded: bool = False
    is_vertical: bool = False
    settings: Mapping[str, str | float] = field(default_factory=dict)


METHODS: Mapping[str, Method] = {
    "cg": Method("CG", "cg"),
    "admm": Method("TP-ADMM", "admm"),
    "sgd": Method("TP-SGD", "sgd"),
    "vfl-admm": Method("VFL-ADMM", "admm", is_vertical=True),
    "vfl-sgd": Method("VFL-SGD", "sgd", is_vertical=True),
    # an epoch is one step: it needs more of them
    "gd": Method("GD", "gd", settings={"num-epochs": 50}),
    "ucq-cg": Method("CG, UCQ", "cg", is_sharded=True),
    "ucq-admm": Method("TP-UCQ-ADMM", "admm", is_sharded=True),
    "ucq-sgd": Method("TP-UCQ-SGD", "sgd", is_sharded=True),
}


def measure_methods(options: Options) -> Outcome:
    """Run every method on every data set that is at hand."""
    outcome = Outcome()
    for dataset in at_hand(options.movielens):
        outcome.facts[dataset.name] = facts = measure_dataset(dataset)
        check_claims(outcome, facts)
    return outcome


def measure_dataset(dataset: Dataset) -> Results:
    """Run the reference and the methods."""
    settings = Settings.from_run_config(dataset.settings)
    problem = Problem.of(dataset.joined(settings), settings)
    facts: Results = {
        "title": dataset.title,
        "metric": dataset.metric,
        "reference": problem.test_metrics(problem.optimum())[dataset.metric],
        "joined-rows": [len(problem.mean_loss), len(problem.test_loss)],
        "methods": {},
    }
    vertical = dataset.vertical(settings)
    for name, method in METHODS.items():
        data = vertical if method.is_vertical else dataset
        config = {**data.settings, "strategy": method.strategy, **method.settings}
        sites = data.two_shards() if method.is_sharded else data.join_only()
        run = train(data.sql, Settings.from_run_config(config), sites)
        history = run.report.history
        curve = curve_of(history, dataset.metric)
        facts["methods"][name] = {"title": method.title, **summary(facts, curve)}
    return facts


def curve_of(history: Sequence[RoundReport], metric: str) -> pd.DataFrame:
    """Return the test metric of every epoch, and the costs from the start to its end.

    Row 0 is set-up. Rounds after the last epoch, which only end the run, do not count.
    The metric is NaN where it was not computed.
    """
    rounds = pd.DataFrame(
        [
            (
                *(item.epoch, item.test.get(metric, math.nan), 1),
                item.overhead_bytes
                + sum((*item.bytes_up.values(), *item.bytes_down.values())),
            )
            for item in history
        ],
        columns=["epoch", "metric", *COSTS],
    )
    rounds = rounds[(rounds["epoch"] > 0) | (rounds["epoch"].cummax() == 0)]
    epochs = rounds.groupby("epoch")
    curve = epochs[list(COSTS)].sum().cumsum()
    return curve.assign(metric=epochs["metric"].last())


def worst_within(metric: str, reference: float) -> float:
    """Return the worst value of a test metric that is within 1 % of a reference."""
    sign = -1.0 if metric in HIGHER_IS_BETTER else 1.0
    return (1.0 + sign * TOLERANCE) * reference


def is_within(value: float, metric: str, reference: float) -> bool:
    """Whether a test metric is within 1 % of a reference, or better; NaN never is."""
    worst = worst_within(metric, reference)
    return value >= worst if metric in HIGHER_IS_BETTER else value <= worst


def summary(dataset: Results, curve: pd.DataFrame) -> Results:
    """Return a run's curve, and its costs until the metric is reached (epoch 0: never).

    The data set's figures have the ``metric`` and its ``reference``.
    """
    epochs = curve.loc[1:]
    goal = dataset["metric"], dataset["reference"]
    reached = [is_within(value, *goal) for value in epochs["metric"]]
    lists = {name: epochs[name].tolist() for name in ("metric", *COSTS)}
    facts: Results = {
        "curve": {**lists, "set-up": curve.loc[0, list(COSTS)].tolist()},
        "epochs-to-1%": reached.index(True) + 1 if any(reached) else 0,
    }
    if any(reached):
        cost = epochs.loc[facts["epochs-to-1%"]]
        rounds, sent = int(cost["rounds"]), int(cost["bytes"])
        facts["to-1%"] = {
            "rounds": rounds,
            "bytes": sent,
            "communication-seconds": {
                network.name: network.seconds(rounds, sent)
                for network in PAPER_NETWORKS
            },
        }
    return facts


def check_claims(outcome: Outcome, dataset: Results) -> None:
    """Check the claims, join-only and over shards.

    CG needs the least modelled communication time on every network, and of the papers'
    methods SGD over tables the fewest epochs, to reach the centralised metric. The
    figures are ratios to the best of the other methods, to a thousandth: at most 1, and
    1 is a tie.
    """
    runs = dataset["methods"]
    for suffix, cg, sgd in (("", "cg", "sgd"), (UCQ, "ucq-cg", "ucq-sgd")):
        group = {
            name: _to_reach(run)
            for name, run in runs.items()
            if METHODS[name].is_sharded == bool(suffix)
        }
        costs = pd.DataFrame(group)
        for method, claim, kinds in (
            (cg, CG_CLAIM, [network.name for network in PAPER_NETWORKS]),
            (sgd, SGD_CLAIM, ["epochs"]),
        ):
            others = costs.drop(columns=[cg, method], errors="ignore")
            if method not in group or others.empty:
                continue
            ratios = costs[method] / others.min(axis=1)
            # who never gets there has lost to all, also to others who do not
            worst = ratios[kinds].max() if "to-1%" in runs[method] else math.inf
            title = f"{dataset['title']}{suffix}: {claim}"
            outcome.check(title, round(worst, 3), 1.0)


def _to_reach(run: Results) -> dict[str, float]:
    """Return epochs, and seconds by network, until the metric is reached."""
    if "to-1%" not in run:
        names = ["epochs", *(network.name for network in PAPER_NETWORKS)]
        return dict.fromkeys(names, math.inf)
    seconds: dict[str, float] = run["to-1%"]["communication-seconds"]
    return {"epochs": float(run["epochs-to-1%"]), **seconds}
