"""What every strategy sends: against Table 6 with its constants, VFL, and the least."""

from contextlib import closing
from pathlib import Path
from typing import Any

from client_apps.app import app
from scripts.bench.datasets import flights, movielens, store
from scripts.bench.movielens import has_movielens
from scripts.bench.runs import Check, Outcome, flights_frames, run_traced
from scripts.data.dataset import Dataset
from strategies import Explain, RelationalStrategy
from strategies.explain.cost import RunCost
from strategies.run.grid import InProcessGrid
from strategies.setup.problem import TrainingProblem
from strategies.training.traffic import Traffic
from tp_flower.methods import METHODS, PERSONAL
from tp_flower.query import Query
from tp_flower.reports.records import RoundReport
from tp_flower.settings import Settings
from tp_flower.sources.flights import FLIGHTS_SQL

BYTES_PER_NUMBER = 4
MARGIN = 1.05
EPOCHS = 2

OFF_FORMULA = 0.05
"""How far what was sent may be off the formulas."""

TIMES_FEWER = 3.0
"""How many times the bytes of ADMM VFL-ADMM sends, where the sizes allow it."""


def measure_bytes(folder: Path | None = None) -> Outcome:
    """Count what every strategy sends over flights, store and MovieLens.

    Args:
        folder: of MovieLens-100K; without its files that part is left out.
    """
    outcome = Outcome()
    datasets = [flights(), store()]
    if has_movielens(folder):
        datasets.append(movielens(folder))
    for dataset in datasets:
        runs = _against_formulas(dataset, outcome)
        _against_vfl(dataset, runs, outcome)
        if dataset.name == "flights":
            _against_floor(runs["admm"], outcome)
    _five_organisations(outcome)
    return outcome


JOINING = [
    name for name, own in METHODS.items() if not own.solvers and own.family != PERSONAL
]
"""The strategies that `explain` says the bytes of."""


def _against_formulas(
    dataset: Dataset, outcome: Outcome
) -> dict[str, RelationalStrategy[Any]]:
    """Compare what is sent with what `explain` says; return the runs by strategy."""
    runs = {}
    for name in JOINING:
        settings = _settings(dataset, name)
        own = run_traced(dataset.sql, settings, dataset.join_only()).strategy
        predicted = _predicted(dataset, name)
        sent, expected = epoch_bytes(own), total_bytes(predicted.epoch)
        whole = own.report.bytes_up + own.report.bytes_down
        outcome.checks.append(
            Check(
                f"{dataset.name}, {name}: bytes off the formulas, epoch and run",
                max(
                    abs(sent / expected - 1.0),
                    abs(whole / total_bytes(predicted.run) - 1.0),
                ),
                OFF_FORMULA,
                "%",
            )
        )
        what = f"{dataset.name}, {name}: an epoch's bytes, measured and by formula"
        outcome.facts[what] = [sent, round(expected)]
        runs[name] = own
    return runs


def _against_vfl(
    dataset: Dataset, runs: dict[str, RelationalStrategy[Any]], outcome: Outcome
) -> None:
    """Compare the methods with their VFL twins."""
    for name in ("admm", "sgd"):
        ratio = epoch_bytes(runs[f"vfl-{name}"]) / epoch_bytes(runs[name])
        outcome.facts[f"{dataset.name}: VFL's bytes over TablePuppet's, {name}"] = ratio
    allowed = vfl_ratio(runs["admm"])
    outcome.facts[f"{dataset.name}: the same by formula, admm"] = allowed
    if allowed >= TIMES_FEWER:
        outcome.checks.append(
            Check(
                f"{dataset.name}: ADMM's bytes over a third of VFL-ADMM's",
                TIMES_FEWER * epoch_bytes(runs["admm"]) / epoch_bytes(runs["vfl-admm"]),
                1.0,
            )
        )


def _against_floor(strategy: RelationalStrategy[Any], outcome: Outcome) -> None:
    """Compare ADMM with a number per row that takes part, each way."""
    last = strategy.report.history[-2]  # the last one is "finish"
    floor, tables = floor_bytes(strategy), len(strategy.report.tables)
    for direction, sent in (("up", last.bytes_up), ("down", last.bytes_down)):
        total = sum(sent.values())
        outcome.checks.append(
            Check(
                f"join-only ADMM, an epoch's bytes {direction} over the floor",
                total / floor,
                MARGIN,
            )
        )
        outcome.facts[f"join-only: bytes {direction} per epoch"] = total
    outcome.facts |= {
        "join-only: floor, each way": floor,
        "join-only: rounds per epoch": rounds_of(strategy, EPOCHS),
        # one site per table, one message per site each way
        "join-only: overhead per message": last.overhead_bytes / (2 * tables),
    }


def _five_organisations(outcome: Outcome) -> None:
    """Count what ADMM sends over flights as they are, in shards."""
    own = run_traced(FLIGHTS_SQL, Settings(num_epochs=EPOCHS), flights_frames())
    rounds = [item for item in own.strategy.report.history if item.epoch == EPOCHS]
    outcome.facts |= {
        "five organisations: bytes up per epoch": _total(rounds, "bytes_up"),
        "five organisations: bytes down per epoch": _total(rounds, "bytes_down"),
        "five organisations: floor, each way": floor_bytes(own.strategy),
        "five organisations: rounds per epoch": len(rounds),
        "five organisations: overhead per epoch": sum(r.overhead_bytes for r in rounds),
    }


def _settings(dataset: Dataset, strategy: str) -> Settings:
    """Return the settings of a run of two epochs."""
    config = {**dataset.settings, "strategy": strategy, "num-epochs": EPOCHS}
    return Settings.from_run_config(config)


def _predicted(dataset: Dataset, name: str) -> RunCost:
    """Return what `explain` says that a strategy sends."""
    settings = _settings(dataset, name).with_fields(mode="explain")
    strategy = Explain(Query.from_sql(dataset.sql), settings)
    with closing(InProcessGrid(app, dataset.join_only())) as grid:
        strategy.start(grid)
    return strategy.explanation.cost


def epoch_bytes(strategy: RelationalStrategy[Any]) -> int:
    """Return the bytes of a run's first epoch, both ways."""
    rounds = [item for item in strategy.report.history if item.epoch == 1]
    return _total(rounds, "bytes_up") + _total(rounds, "bytes_down")


def total_bytes(traffic: Traffic) -> float:
    """Return the bytes of both ways."""
    return traffic.bytes_up + traffic.bytes_down


def vfl_ratio(strategy: RelationalStrategy[Any]) -> float:
    """Return how many times the bytes of an ADMM epoch VFL-ADMM sends, by Table 6.

    Every table in one shard: M (2 N + N') over the sum of n_i + m_i, where N' joined
    rows are held out, n_i rows of a table are trained on and m_i take part.
    """
    federation: TrainingProblem | None = strategy.training_problem
    if federation is None:
        raise RuntimeError(_NO_SET_UP)
    joined = 2 * federation.train.joined_rows + len(federation.test_labels)
    own = sum(
        rows.trained + rows.total
        for table in federation.tables.values()
        for rows in table.rows
    )
    return len(federation.tables) * joined / own


def floor_bytes(strategy: RelationalStrategy[Any]) -> int:
    """Return 4 d_c sum(n_i): one float32 per output for every row that takes part."""
    federation: TrainingProblem | None = strategy.training_problem
    if federation is None:
        raise RuntimeError(_NO_SET_UP)
    rows = sum(table.total_rows for table in federation.tables.values())
    return BYTES_PER_NUMBER * federation.loss.outputs * rows


_NO_SET_UP = "the run had no set-up"


def rounds_of(strategy: RelationalStrategy[Any], epoch: int) -> int:
    """Return how many rounds an epoch took."""
    return sum(item.epoch == epoch for item in strategy.report.history)


def _total(rounds: list[RoundReport], direction: str) -> int:
    return sum(sum(getattr(item, direction).values()) for item in rounds)
