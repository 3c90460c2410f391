"""Count the product files that an epoch of ADMM and a prediction round run through.

    python scripts/checks/count_files.py

A file counts if one of its functions is entered, by a profiler's hook; what is run by
an import is not. The federation is in this process: three tables at three sites. The
epoch is one in the middle of a run, and the prediction round the one that brings the
sites' scores, in a second run with the same model: nothing is imported or set up then.
"""

import inspect
import logging
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import CodeType, FrameType

from client_apps.app import app
from scripts.data.make_store import STORE_CLASSIFICATION_SQL, make_store
from strategies import Predict, TablePuppetADMM
from strategies.inference.manifest import make_manifest
from strategies.run.grid import InProcessGrid
from strategies.run.strategy import RoundStrategy
from tp_flower.query import Query
from tp_flower.reports.records import RoundReport

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tp_flower", "strategies", "client_apps")
UNLABELLED = STORE_CLASSIFICATION_SQL.replace("o.quantity > 12 AS label,", "")
EPOCHS = 4
EPOCH = 3
SCORES = -2
"""The round of scores is the last but one: then the sites are told to forget."""


class FileCounter:
    """Collects the product files whose functions are entered, by epoch and round."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, set[str]]] = []
        self._codes: set[CodeType] = set()

    def end_round(self, report: RoundReport) -> None:
        """Take the record of a round, and begin with the next one."""
        paths = (Path(code.co_filename) for code in self._codes.copy())
        relative = (p.relative_to(ROOT) for p in paths if p.is_relative_to(ROOT))
        files = {path.as_posix() for path in relative if path.parts[0] in PACKAGES}
        self.rounds.append((report.epoch, files))
        self._codes.clear()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in this thread and in those that are started meanwhile."""
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _enter(self, frame: FrameType, event: str, _: object) -> None:
        # modules and bodies of classes are no functions: an import runs them
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            self._codes.add(frame.f_code)

    def run(self, strategy: RoundStrategy, state: Path) -> None:
        """Run a strategy over the store, whose sites keep their state in a folder."""
        sites = {
            f"{table}-{number}": {table: shard}
            for table, shards in make_store(60, 7, 12).items()
            for number, shard in enumerate(shards)
        }
        with closing(InProcessGrid(app, sites, state=state)) as grid, self.counting():
            strategy.start(grid)


def count(folder: Path) -> dict[str, list[str]]:
    """Return the files of an epoch of ADMM and of a prediction round."""
    query = Query.from_sql(STORE_CLASSIFICATION_SQL)
    unlabelled = Query.from_sql(UNLABELLED, needs_label=False)
    settings = {"task": "classification", "device": "cpu", "num_epochs": EPOCHS}
    trained, predicted = FileCounter(), FileCounter()
    admm = TablePuppetADMM(query, on_round=trained.end_round, **settings)
    trained.run(admm, folder)
    manifest = make_manifest(admm)
    predict = Predict(
        unlabelled, manifest, mode="predict", on_round=predicted.end_round
    )
    predicted.run(predict, folder)
    epoch = (files for number, files in trained.rounds if number == EPOCH)
    return {
        "an epoch of ADMM": sorted(set().union(*epoch)),
        "a prediction round": sorted(predicted.rounds[SCORES][1]),
    }


def main() -> None:
    """Print the counts, and the files."""
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        count(Path(folder))  # has the imports
        counts = count(Path(folder))
    for title, files in counts.items():
        packages = Counter(file.partition("/")[0] for file in files)
        by_package = ", ".join(f"{name} {packages[name]}" for name in PACKAGES)
        print(f"{title}: {len(files)} files ({by_package})")
        print("".join(f"  {file}\n" for file in files))


if __name__ == "__main__":
    main()
