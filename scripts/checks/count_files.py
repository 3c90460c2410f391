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
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from client_apps.app import app
from scripts.data.make_store import (
    STORE_CLASSIFICATION_SQL,
    make_store,
    one_per_site,
)
from strategies import Predict, TablePuppetADMM
from strategies.inference.manifest import make_manifest
from strategies.run.grid import InProcessGrid
from tp_flower.query import Query
from tp_flower.reports.records import RoundReport
from tp_flower.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tp_flower", "strategies", "client_apps")
UNLABELLED = STORE_CLASSIFICATION_SQL.replace("o.quantity > 12 AS label,", "")
EPOCHS = 4
EPOCH = 3
SCORES = -2
"""The round of scores is the last but one: then the sites are told to forget."""


def run_counted(
    make: Callable[..., Any], state: Path
) -> tuple[Any, list[tuple[int, set[str]]]]:
    """Run a strategy over the store, whose sites keep their state in a folder.

    Returns the strategy; and of each round the epoch, and the files whose functions
    were entered.
    """
    codes: set[CodeType] = set()
    rounds: list[tuple[int, set[str]]] = []

    def enter(frame: FrameType, event: str, _: object) -> None:
        # modules and bodies of classes are no functions: an import runs them
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            codes.add(frame.f_code)

    def end_round(report: RoundReport) -> None:
        paths = {Path(code.co_filename) for code in codes.copy()}
        relative = (p.relative_to(ROOT) for p in paths if p.is_relative_to(ROOT))
        files = {path.as_posix() for path in relative if path.parts[0] in PACKAGES}
        rounds.append((report.epoch, files))
        codes.clear()

    sites = one_per_site(make_store(60, 7, 12))
    strategy = make(on_round=end_round)
    with closing(InProcessGrid(app, sites, state=state)) as grid:
        sys.setprofile(enter)
        try:
            strategy.start(grid)
        finally:
            sys.setprofile(None)
    return strategy, rounds


def count(folder: Path) -> dict[str, list[str]]:
    """Return the files of an epoch of ADMM and of a prediction round."""
    settings = Settings(task="classification", device="cpu", num_epochs=EPOCHS)
    query = Query.from_sql(STORE_CLASSIFICATION_SQL)
    admm, trained = run_counted(partial(TablePuppetADMM, query, settings), folder)
    unlabelled = Query.from_sql(UNLABELLED, needs_label=False)
    predict = partial(Predict, unlabelled, make_manifest(admm), mode="predict")
    _, predicted = run_counted(predict, folder)
    epoch = (files for number, files in trained if number == EPOCH)
    return {
        "an epoch of ADMM": sorted(set().union(*epoch)),
        "a prediction round": sorted(predicted[SCORES][1]),
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
