"""The server's part of an ADMM epoch, against one copy of its arrays."""

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from scripts.bench.datasets import flights_frames
from scripts.bench.harness import problem_of, train
from scripts.bench.suites.micro import best_seconds
from strategies.setup.problem import TrainingProblem
from strategies.training import admm
from tp_flower.settings import Settings
from tp_flower.sources.flights import FLIGHTS_SQL

EPOCHS = 12
FIRST_STEADY_EPOCH = 7  # Anderson's history is full
REPEATS = 15
METHODS: tuple[tuple[type, str, str], ...] = (
    (admm.AdmmServer, "targets", "targets"),
    (admm.AdmmServer, "take", "take"),
    (TrainingProblem, "train_metrics", "metrics"),
    (TrainingProblem, "test_metrics", "metrics"),
)
"""Class, method, and the name that its time goes by."""


def measure_server() -> dict[str, Any]:
    """Return the server's fastest steady epoch, less its metrics, and the floor."""
    epochs: list[defaultdict[str, float]] = []

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if name == "targets":
                epochs.append(defaultdict(float))
            started = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                epochs[-1][name] += time.perf_counter() - started

        return call

    with ExitStack() as stack:
        for owner, method, name in METHODS:
            call = timed(name, getattr(owner, method))
            stack.enter_context(patch.object(owner, method, call))
        strategy = train(FLIGHTS_SQL, Settings(num_epochs=EPOCHS), flights_frames())
    fastest = min(
        epochs[FIRST_STEADY_EPOCH - 1 :],
        key=lambda spent: spent["targets"] + spent["take"],
    )
    arrays = touched_arrays(problem_of(strategy), Settings().anderson_memory)
    copies = [np.empty_like(array) for array in arrays]

    def copy_all() -> None:
        for source, copy in zip(arrays, copies, strict=True):
            np.copyto(copy, source)

    (copy,) = best_seconds(copy_all, repeats=REPEATS, clock=time.perf_counter)
    epoch = fastest["targets"] + fastest["take"] - fastest["metrics"]
    return {"epoch-ms": 1000.0 * epoch, "copy-ms": 1000.0 * copy}


def touched_arrays(problem: TrainingProblem, memory: int) -> list[npt.NDArray[Any]]:
    """Return arrays like those that one epoch cannot do without.

    ``row_of`` of all tables, local scores in, targets out; z, duals, scores and labels
    of the joined rows; and where there is Anderson mixing, its two matrices.
    """
    outputs, total = problem.loss.outputs, problem.train.joined_rows
    arrays: list[npt.NDArray[Any]] = [problem.train_labels]
    for name, rows in problem.train.tables.items():
        # float32 as they travel
        scores = np.ones((problem.tables[name].total_rows, outputs), np.float32)
        arrays += [rows.row_of, scores, scores.copy()]
    arrays += [np.ones((total, outputs)) for _ in range(3)]
    # what Anderson mixing remembers: how point and step changed
    length = total + sum(table.total_rows for table in problem.tables.values())
    change = np.ones((memory, length * outputs), np.float32)
    return arrays + [change] * 2 * bool(memory)
