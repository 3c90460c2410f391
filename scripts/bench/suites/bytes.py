"""The bytes that every strategy sends, against formulas, VFL, and the least.

Flights, store and MovieLens with a site per table, at most two epochs each.
"""

from typing import Any

from scripts.bench.datasets import Dataset, at_hand
from scripts.bench.harness import Options, Outcome, problem_of, train
from strategies import TrainingStrategy
from tp_flower import api
from tp_flower.methods.method import METHODS
from tp_flower.settings import Settings

BYTES_PER_NUMBER = 4
MARGIN = 1.05
EPOCHS = 2

OFF_FORMULA = 0.05
"""How far the bytes may be off the formulas."""

TIMES_FEWER = 3.0
"""How many times the bytes of ADMM ADMM on the vertical partitions sends, at least."""

JOINING = [
    name for name, method in METHODS.items() if method.joins and not method.solvers
]
"""The strategies whose bytes `explain` forecasts."""


def measure_bytes(options: Options) -> Outcome:
    """Count the bytes of every strategy over every data set that is at hand."""
    outcome = Outcome()
    for dataset in at_hand(options.movielens, "flights", "store", "movielens"):
        runs = _against_formulas(dataset, outcome)
        admm, vfl = epoch_bytes(runs["admm"]), epoch_bytes(_on_partitions(dataset))
        title = f"{dataset.name}: ADMM's bytes over a third of VFL-ADMM's"
        outcome.check(title, TIMES_FEWER * admm / vfl, 1.0)
        if dataset.name == "flights":
            _against_floor(runs["admm"], outcome)
    return outcome


def _on_partitions(dataset: Dataset) -> TrainingStrategy:
    """Train by ADMM on the vertical partitions of the joined table."""
    config = {**dataset.settings, "strategy": "admm", "num-epochs": EPOCHS}
    vertical = dataset.vertical(Settings.from_run_config(config))
    settings = Settings.from_run_config({**config, **vertical.settings})
    return train(vertical.sql, settings, vertical.join_only())


def _against_formulas(
    dataset: Dataset, outcome: Outcome
) -> dict[str, TrainingStrategy]:
    """Compare the bytes with the forecast of `explain`; return the runs."""
    runs = {}
    for name in JOINING:
        config: dict[str, Any] = {**dataset.settings, "strategy": name}
        if name == "boost":
            # a divided table has more rows than any forecast knows
            config["regions"] = "none"
        # a method that solves once has one epoch
        config["num-epochs"] = min(EPOCHS, METHODS[name].epochs)
        settings = Settings.from_run_config(config)
        runs[name] = train(dataset.sql, settings, dataset.join_only())
        explanation = api.explain(dataset.sql, dataset.join_only(), **config)
        forecast = explanation.report["cost"]
        epoch, expected = epoch_bytes(runs[name]), sum(forecast["bytes"].values())
        title = f"{dataset.name}, {name}: bytes of an epoch off the formula"
        outcome.check(title, abs(epoch / expected - 1.0), OFF_FORMULA, "%")
        title = f"{dataset.name}, {name}: an epoch's bytes, measured and by formula"
        outcome.facts[title] = [epoch, expected]
    return runs


def _against_floor(strategy: TrainingStrategy, outcome: Outcome) -> None:
    """Compare ADMM with a float32 per output for each row, 4 d_c sum(n_i), each way."""
    last, problem = strategy.report.history[-2], problem_of(strategy)  # then "finish"
    rows = sum(table.total_rows for table in problem.tables.values())
    floor = BYTES_PER_NUMBER * problem.response.outputs * rows
    for direction, sent in (("up", last.bytes_up), ("down", last.bytes_down)):
        total = sum(sent.values())
        title = f"join-only ADMM, an epoch's bytes {direction} over the floor"
        outcome.check(title, total / floor, MARGIN)
    # one site per table, one message per site each way
    overhead = last.overhead_bytes / (2 * len(strategy.report.tables))
    outcome.facts["join-only: overhead per message"] = overhead


def epoch_bytes(strategy: TrainingStrategy) -> int:
    """Return the bytes of a run's first epoch, both ways.

    What a method sends of its own before it ends an epoch is part of the first.
    """
    phases = {action.phase for action in METHODS[strategy.name].actions}
    return sum(
        sum(item.bytes_up.values()) + sum(item.bytes_down.values())
        for item in strategy.report.history
        if item.epoch <= 1 and item.phase in phases
    )
