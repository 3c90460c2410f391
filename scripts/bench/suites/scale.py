"""Cost at the size of the papers' data sets, and how it grows with the joined rows.

::

    python scripts/bench/suites/scale.py yelp --folder /data/yelp [--factor 0.05]
    python scripts/bench/suites/scale.py store --orders 100000

Each prints one line of JSON; ``measure_paper_scale`` and ``measure_linearity`` run them
in processes of their own. Peak memory is what the process holds beside files that are
mapped: ``RssAnon`` of /proc/self/status, sampled every 20 ms. The floor is numpy's own
X^T R and X theta, in float32, over the memory map of the largest table's features that
the run has just used: its pages are in the page cache in both.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from client_apps.app import app
from client_apps.rounds.site import Site
from scripts.bench.runs import Check, Outcome
from scripts.data.paper_scale import PAPER_SCALES, write_paper_scale
from scripts.data.store import STORE_SQL, make_store
from strategies import TablePuppetADMM
from strategies.run.grid import InProcessGrid
from tp_flower.learning.models.local_model import on_host
from tp_flower.query import Query
from tp_flower.reports.records import RoundReport

EPOCHS = 8
STEADY_EPOCH = 4
"""The first that counts: the page cache is warm, and Anderson mixing has a past."""
MOST_PASSES = 3.0
MOST_GIGABYTES = 6.0
SAMPLE_SECONDS = 0.02
FLOOR_REPEATS = 3

STORE_ROWS = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
PARTS_PER_ITEM = 2.5
MOST_SLOPE = 1.1
STORE_EPOCHS = 4

Measured = dict[str, Any]


@dataclass
class _Memory:
    """Peaks of the memory that is not a file's, in bytes.

    Attributes:
        peak: since the last look.
    """

    peak: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def look(self) -> int:
        """Return the peak since the last look, and start anew."""
        peak = max(self.peak, anonymous_bytes())
        self.peak = 0
        return peak

    def watch(self) -> None:
        """Sample until stopped."""
        while not self._stop.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, anonymous_bytes())

    @contextmanager
    def watched(self) -> Iterator["_Memory"]:
        """Sample in a thread meanwhile."""
        thread = threading.Thread(target=self.watch, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()


def anonymous_bytes() -> int:
    """Return this process's resident memory that is not a file's."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    message = "the system tells no RssAnon"
    raise RuntimeError(message)


@dataclass
class _Rounds:
    """Seconds and peak memory of a run's epochs, and of what came before them.

    Attributes:
        memory: watched.
        seconds: by epoch; 0 is set-up.
        peaks: likewise, bytes.
        test: metrics of the last epoch.
    """

    memory: _Memory
    seconds: dict[int, float] = field(default_factory=dict)
    processor: dict[int, float] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)
    _last: tuple[float, float] = field(
        default_factory=lambda: (time.perf_counter(), time.process_time())
    )

    def __call__(self, report: RoundReport) -> None:
        """Take a round's record."""
        now, epoch = (time.perf_counter(), time.process_time()), report.epoch
        # what follows the last epoch is no set-up
        if epoch or not self.test:
            for spent, start, end in zip(
                (self.seconds, self.processor), self._last, now, strict=True
            ):
                spent[epoch] = spent.get(epoch, 0.0) + end - start
            peak = self.memory.look()
            self.peaks[epoch] = max(self.peaks.get(epoch, 0), peak)
        self.test = dict(report.test) or self.test
        self._last = now

    @property
    def steady(self) -> list[float]:
        """Seconds of the epochs that count."""
        return [s for epoch, s in self.seconds.items() if epoch >= STEADY_EPOCH]


def run_paper_scale(name: str, folder: Path, factor: float) -> Measured:
    """Train ADMM's linear model on a data set of the papers' size; measure the floor.

    Args:
        name: of the data set.
        folder: for its files, which are made unless they are there, and for what the
            site keeps.
        factor: of the rows.
    """
    own = folder / f"{name}-{factor:g}"
    if not (own / "tables.toml").exists():
        write_paper_scale(name, own, factor)
    scale = PAPER_SCALES[name]
    floor: list[tuple[float, float]] = []
    grid = InProcessGrid(app, {"all": own / "tables.toml"}, state=own / "state")
    with closing(grid), _Memory().watched() as memory:
        rounds = _Rounds(memory)

        def on_round(report: RoundReport) -> None:
            rounds(report)
            if report.epoch == EPOCHS:
                floor.extend(_floor(grid, scale.table, scale.classes))

        strategy = TablePuppetADMM(
            Query.from_sql(scale.sql),
            task="classification",
            num_epochs=EPOCHS,
            on_round=on_round,
        )
        strategy.start(grid)
    every = [peak for epoch, peak in rounds.peaks.items() if epoch]
    joined = (
        0
        if strategy.training_problem is None
        else strategy.training_problem.train.joined_rows
    )
    return {
        "joined-rows": joined,
        "set-up-seconds": rounds.seconds[0],
        "epoch-seconds": min(rounds.steady),
        "epoch-seconds-median": float(np.median(rounds.steady)),
        "epoch-cpu-seconds": min(
            s for epoch, s in rounds.processor.items() if epoch >= STEADY_EPOCH
        ),
        "floor-seconds": min(wall for wall, _ in floor),
        "floor-cpu-seconds": min(cpu for _, cpu in floor),
        "set-up-peak-gb": rounds.peaks[0] / 1e9,
        "epoch-peak-gb": max(every) / 1e9,
        "test": rounds.test,
    }


def _floor(grid: InProcessGrid, table: str, outputs: int) -> list[tuple[float, float]]:
    """Return wall and processor seconds of X^T R and X theta, repeatedly."""
    outputs = 1 if outputs == 2 else outputs
    (features,) = [
        on_host(part.shard.data.features)
        for context in grid.contexts.values()
        for part in Site(context, grid.run_name).parts()
        if part.table == table
    ]
    rng = np.random.default_rng(0)
    theta = rng.standard_normal((features.shape[1], outputs), dtype=np.float32)
    residual = rng.standard_normal((len(features), outputs), dtype=np.float32)
    seconds = []
    for _ in range(FLOOR_REPEATS):
        started = time.perf_counter(), time.process_time()
        _ = features.T @ residual
        _ = features @ theta
        ended = time.perf_counter(), time.process_time()
        seconds.append((ended[0] - started[0], ended[1] - started[1]))
    return seconds


def run_store(orders: int) -> Measured:
    """Train on a store with so many orders, from files; 2.5 joined rows each."""
    items, customers = max(orders // 50, 10), max(orders // 10, 10)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        tables = _write_store(folder, orders, items, customers)
        grid = InProcessGrid(app, {"all": tables}, state=folder / "state")
        with closing(grid), _Memory().watched() as memory:
            rounds = _Rounds(memory)
            strategy = TablePuppetADMM(
                Query.from_sql(STORE_SQL), num_epochs=STORE_EPOCHS, on_round=rounds
            )
            strategy.start(grid)
    epochs = [s for epoch, s in rounds.processor.items() if epoch > 1]
    joined = (
        0
        if strategy.training_problem is None
        else strategy.training_problem.train.joined_rows
    )
    return {
        "joined-rows": joined,
        "epoch-cpu-seconds": min(epochs),
        "set-up-cpu-seconds": rounds.processor[0],
        "peak-gb": max(rounds.peaks.values()) / 1e9,
    }


def _write_store(folder: Path, orders: int, items: int, customers: int) -> Path:
    """Write a store's tables as Parquet; return its tables file."""
    entries = []
    for table, shards in make_store(orders, items, customers).items():
        for number, shard in enumerate(shards):
            file = f"{table}-{number}.parquet"
            shard.to_parquet(folder / file, index=False)
            entries.append(
                f'[[tables.{table}.shards]]\npath = "{file}"\n'
                f'site = "{table}-{number}"\n'
            )
    path = folder / "tables.toml"
    path.write_text("\n".join(entries), encoding="utf-8")
    return path


def measure_paper_scale(
    factor: float, folder: Path, names: Sequence[str] = ("yelp",)
) -> Outcome:
    """Train on the papers' sizes, each in a process of its own.

    Args:
        factor: of the rows; 1 needs 40 GB of disk and ten minutes.
        folder: for files, which stay: another measurement does without making them.
        names: of the data sets.
    """
    outcome = Outcome()
    for name in names:
        found = _in_process_of_its_own(
            name, "--folder", str(folder), "--factor", str(factor)
        )
        outcome.facts[f"{name}, factor {factor:g}"] = found
        outcome.checks += [
            Check(
                f"{name}: ADMM epoch over two plain passes over the largest table",
                found["epoch-seconds"] / found["floor-seconds"],
                MOST_PASSES,
            ),
            Check(
                f"{name}: peak memory beside mapped files",
                max(found["set-up-peak-gb"], found["epoch-peak-gb"]),
                MOST_GIGABYTES,
                "GB",
            ),
        ]
    return outcome


def measure_linearity(rows: Sequence[int] = STORE_ROWS) -> Outcome:
    """Train on stores of growing size; cost must grow no faster than the joined rows.

    Args:
        rows: joined rows, about.
    """
    runs = [
        _in_process_of_its_own("store", "--orders", str(round(n / PARTS_PER_ITEM)))
        for n in rows
    ]
    outcome = Outcome()
    outcome.facts = {f"store, {run['joined-rows']:,} rows": run for run in runs}
    joined = [float(run["joined-rows"]) for run in runs]
    for what in ("epoch", "set-up"):
        spent = [float(run[f"{what}-cpu-seconds"]) for run in runs]
        slope = log_slope(joined, spent)
        outcome.facts[f"store, {what}: steepest slope between two sizes"] = max(
            log_slope(n, s)
            for n, s in zip(pairwise(joined), pairwise(spent), strict=True)
        )
        outcome.checks.append(
            Check(f"store, {what}: slope of log time over log rows", slope, MOST_SLOPE)
        )
    return outcome


def log_slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the least-squares slope of log cost over log size.

    >>> round(log_slope([1, 10, 100], [2, 20, 200]), 6)
    1.0
    """
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def _in_process_of_its_own(*arguments: str) -> Measured:
    result = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        message = f"the measurement {arguments} failed:\n{result.stderr[-2000:]}"
        raise RuntimeError(message)
    measured: Measured = json.loads(result.stdout.splitlines()[-1])
    return measured


def main(arguments: Sequence[str]) -> None:
    """Measure what the command line names, and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=(*PAPER_SCALES, "store"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--orders", type=int, default=40_000)
    given = parser.parse_args(arguments)
    if given.what == "store":
        found = run_store(given.orders)
    else:
        found = run_paper_scale(given.what, given.folder, given.factor)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
