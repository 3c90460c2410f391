"""What a round of SGD takes, in this process and in Flower's simulation, and how many.

In this process: the flights with every table cut in two halves, one per site, linear
models. In the simulation: the built-in flights at five organisations, by a real
`flwr run`.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import pandas as pd

from client_apps.app import app
from scripts.bench.runs import Check, Outcome, SkippedSuite, by_table, flights_frames
from strategies import TablePuppetSGD
from strategies.run.grid import InProcessGrid
from tp_flower.query import Query
from tp_flower.reports.records import RoundReport
from tp_flower.settings import Settings
from tp_flower.sources.flights import FLIGHTS_SQL

BATCH_ROWS = 10_000
SECONDS_IN_PROCESS = 0.005
SECONDS_IN_SIMULATION = 0.15
REPEATS = 2
EPOCHS = 5

Site = dict[str, list[pd.DataFrame]]


def measure_rounds() -> Outcome:
    """Time rounds in this process; count those of stale steps."""
    halves = _halves()
    together = [{t: [own[k]] for t, own in halves.items()} for k in range(2)]
    apart = [{t: [half]} for t, own in halves.items() for half in own]
    outcome = Outcome()
    for what, sites in (("2 sites", together), ("8 sites", apart)):
        runs = [_Run(sites, batch_size=BATCH_ROWS) for _ in range(REPEATS)]
        outcome.facts[f"rounds per second, {what}"] = 1 / min(r.seconds for r in runs)
        outcome.facts[f"rounds per second of CPU, {what}"] = 1 / min(
            r.cpu_seconds for r in runs
        )
        if sites is together:
            outcome.checks.append(
                Check(
                    f"round of {BATCH_ROWS:,} rows in this process",
                    min(run.seconds for run in runs),
                    SECONDS_IN_PROCESS,
                    "s",
                )
            )
    _compare_staleness(outcome, together)
    return outcome


def measure_simulation() -> Outcome:
    """Time rounds in Flower's simulation.

    Raises:
        SkippedSuite: there is no Ray.
    """
    if importlib.util.find_spec("ray") is None:
        raise SkippedSuite("no ray, which Flower's simulations need")
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="tp-flower-") as folder:
        rounds = [item for item in _simulate(Path(folder)) if item["epoch"]]
    parts = ("server-seconds", "client-seconds", "wait-seconds")
    outcome.checks = [
        Check(
            f"round of {BATCH_ROWS:,} rows in Flower's simulation",
            mean(sum(item[part] for part in parts) for item in rounds),
            SECONDS_IN_SIMULATION,
            "s",
        )
    ]
    for part in parts:
        outcome.facts[f"median {part}"] = median(item[part] for item in rounds)
    return outcome


class _Run:
    """A run in this process.

    Args:
        sites: the tables of each.
        settings: of the run.

    Attributes:
        strategy: what ran.
        seconds: wall time per round of the epochs.
        cpu_seconds: of this process, likewise.
    """

    def __init__(self, sites: list[Site], **settings: Any) -> None:
        clocks: list[tuple[float, float]] = []

        def on_round(report: RoundReport) -> None:
            if report.epoch or report.phase == "prepare":
                clocks.append((time.perf_counter(), time.process_time()))

        own = Settings(strategy="sgd", task="classification", **settings)
        self.strategy = TablePuppetSGD(Query.from_sql(FLIGHTS_SQL), own, on_round)
        grid = InProcessGrid(app, sites)
        try:
            self.strategy.start(grid)
        finally:
            grid.close()
        (start, cpu_start), (stop, cpu_stop) = clocks[0], clocks[-1]
        self.seconds = (stop - start) / (len(clocks) - 1)
        self.cpu_seconds = (cpu_stop - cpu_start) / (len(clocks) - 1)

    @property
    def rounds_by_epoch(self) -> list[int]:
        """How many rounds each epoch took."""
        history = self.strategy.history
        epochs = range(1, max(item.epoch for item in history) + 1)
        return [sum(item.epoch == number for item in history) for number in epochs]

    @property
    def test_loss(self) -> float:
        """Of the final model."""
        return self.strategy.report.final_test["loss"]


def _compare_staleness(outcome: Outcome, sites: list[Site]) -> None:
    fresh, late = (_Run(sites, num_epochs=EPOCHS, staleness=k) for k in (0, 1))
    batches = fresh.rounds_by_epoch[0] // 2
    outcome.checks += [
        Check(
            f"rounds per epoch of {batches} batches with staleness 1",
            max(late.rounds_by_epoch),
            batches + 1,
        ),
        Check(
            f"test loss after {EPOCHS} epochs with staleness 1, over that with 0",
            late.test_loss / fresh.test_loss,
            1.01,
        ),
    ]
    outcome.facts["rounds per epoch without staleness"] = fresh.rounds_by_epoch[0]
    outcome.facts["learning rates, staleness 0 and 1"] = [
        run.strategy.chosen["learning-rate"] for run in (fresh, late)
    ]


def _halves() -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
    cut = {}
    for table, frame in by_table(flights_frames()).items():
        middle = len(frame) // 2
        cut[table] = (
            frame.iloc[:middle].reset_index(drop=True),
            frame.iloc[middle:].reset_index(drop=True),
        )
    return cut


def _simulate(folder: Path) -> list[dict[str, Any]]:
    """Return the rounds of a real run.

    Raises:
        RuntimeError: it failed; the message has the end of its log.
    """
    config = {
        "strategy": '"sgd"',
        "task": '"classification"',
        "num-epochs": 2,
        "batch-size": BATCH_ROWS,
        "progress": "false",
        "output-dir": f'"{folder / "run"}"',
    }
    text = " ".join(f"{key}={value}" for key, value in config.items())
    script = Path(__file__).resolve().parents[2] / "run_app.py"
    result = subprocess.run(
        [sys.executable, str(script), "-c", text],
        env={**os.environ, "TP_FLOWER_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        message = f"the simulation failed:\n{(result.stdout + result.stderr)[-2000:]}"
        raise RuntimeError(message)
    report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
    history: list[dict[str, Any]] = report["history"]
    return history
