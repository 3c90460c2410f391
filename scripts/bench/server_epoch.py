"""The server's part of an ADMM epoch, against one copy of its arrays."""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from client_apps.app import app
from strategies import TablePuppetADMM
from strategies.run.grid import InProcessGrid
from strategies.run.strategy import EpochResult
from strategies.setup.problem import TrainingProblem
from strategies.training import admm
from tp_flower.arrays import FloatArray
from tp_flower.learning.admm import LocalScores
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.flights import FLIGHTS_SQL

EPOCHS = 12
FIRST_STEADY_EPOCH = 7  # Anderson's history is full
REPEATS = 15


class _Clock:
    """Adds up the time spent in functions, by name, per epoch.

    Args:
        now: the clock: wall time, or this thread's processor time, which other
            processes do not change.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.epochs: list[dict[str, float]] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def call(*arguments: Any, **named: Any) -> Any:
            started = self.now()
            try:
                return function(*arguments, **named)
            finally:
                spent = self.epochs[-1]
                spent[name] = spent.get(name, 0.0) + self.now() - started

        return call


def measure_server(frames: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server's fastest steady epoch, its metrics apart, and the floor."""
    federation, epochs = _run(frames, time.perf_counter)
    _, processor = _run(frames, time.thread_time)
    memory = Settings().anderson_memory
    arrays = touched_arrays(federation, memory)
    copy = copy_seconds(arrays, time.perf_counter)
    measured = {
        "epoch": epochs["all"] - epochs["metrics"],
        "metrics": epochs["metrics"],
        "targets": epochs["targets"],
        "copy": copy,
        "copy-without-history": copy_seconds(
            touched_arrays(federation, 0), time.perf_counter
        ),
        "epoch-cpu": processor["all"] - processor["metrics"],
        "copy-cpu": copy_seconds(arrays, time.thread_time),
    }
    return {
        **{f"{name}-ms": 1000.0 * seconds for name, seconds in measured.items()},
        "copied-mib": sum(array.nbytes for array in arrays) / (1 << 20),
    }


def _run(
    frames: Mapping[str, Any], now: Callable[[], float]
) -> tuple[TrainingProblem | None, dict[str, float]]:
    """Train with a clock in the server; return its fastest steady epoch."""
    clock = _Clock(now)

    class TimedServer(admm.AdmmServer):
        """The server with a clock."""

        def targets(self) -> dict[str, FloatArray]:
            clock.epochs.append({})
            return clock.timed("targets", super().targets)()  # type: ignore[no-any-return]

        def take(
            self, local_scores: LocalScores, *, is_tested: bool = True
        ) -> EpochResult:
            take = clock.timed("take", super().take)
            return take(local_scores, is_tested=is_tested)  # type: ignore[no-any-return]

    train_metrics = clock.timed("metrics", TrainingProblem.train_metrics)
    test_metrics = clock.timed("metrics", TrainingProblem.test_metrics)
    with (
        closing(InProcessGrid(app, frames)) as grid,
        patch.object(admm, "AdmmServer", TimedServer),
        patch.object(TrainingProblem, "train_metrics", train_metrics),
        patch.object(TrainingProblem, "test_metrics", test_metrics),
    ):
        strategy = TablePuppetADMM(Query.from_sql(FLIGHTS_SQL), num_epochs=EPOCHS)
        strategy.start(grid)
    steady = [
        {**spent, "all": spent["targets"] + spent["take"]}
        for spent in clock.epochs[FIRST_STEADY_EPOCH - 1 :]
    ]
    return strategy.training_problem, min(steady, key=lambda spent: spent["all"])


def touched_arrays(
    federation: TrainingProblem | None, memory: int
) -> list[npt.NDArray[Any]]:
    """Return arrays like those that one epoch cannot do without.

    ``row_of`` of all tables, local scores in, targets out; z, duals, scores and labels
    of the joined rows; and where there is Anderson mixing, its two matrices.
    """
    if federation is None:
        message = "the run had no set-up"
        raise RuntimeError(message)
    outputs, total = federation.loss.outputs, federation.train.joined_rows
    arrays: list[npt.NDArray[Any]] = []
    for name, rows in federation.train.tables.items():
        table = federation.tables[name]
        arrays.append(rows.row_of)
        # float32 as they travel
        arrays += [np.ones((table.total_rows, outputs), np.float32)] * 2
    arrays += [np.ones((total, outputs)) for _ in range(3)]
    # what Anderson mixing remembers: how point and step changed
    length = total + sum(table.total_rows for table in federation.tables.values())
    change = np.ones((memory, length * outputs), np.float32)
    arrays += [change] * 2 * bool(memory)
    return [*arrays, federation.train_labels]


def copy_seconds(arrays: list[npt.NDArray[Any]], now: Callable[[], float]) -> float:
    """Return the least time to copy all arrays once into memory that exists."""
    copies = [np.empty_like(array) for array in arrays]
    seconds = []
    for _ in range(REPEATS):
        started = now()
        for source, copy in zip(arrays, copies, strict=True):
            np.copyto(copy, source)
        seconds.append(now() - started)
    return min(seconds)
