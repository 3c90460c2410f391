"""Count the product files that an epoch of ADMM and a prediction round run through.

    python scripts/checks/count_files.py [--checkout FOLDER] [--no-list] [--json FILE]

A file counts if one of its functions is entered, by a profiler's hook; what is run by
an import is not. The federation is in this process: three tables at three sites. The
epoch is one in the middle of a run, and the prediction round the one that brings the
sites' scores, in a second run with the same model: nothing is imported or set up then.
"""

import argparse
import importlib
import inspect
import json
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tp_flower", "strategies", "client_apps")

NAMES: Mapping[str, tuple[str, ...]] = {
    "app": ("client_apps.app",),
    "Query": ("tp_flower.query",),
    "TablePuppetADMM": ("strategies",),
    "InProcessGrid": (
        *("tp_flower.grid", "strategies.grid"),
        *("strategies.run.grid", "strategies.run.exchange"),
    ),
    "Predict": ("strategies.predict", "strategies.inference.predict", "strategies"),
    "make_manifest": (
        *("strategies.model_manifest", "strategies.inference.manifest"),
        *("strategies.inference.manifest", "strategies.inference"),
    ),
}
"""By name, the modules that it is in: the first of them that has it is taken."""

SOURCE = """c.age, c.region, i.price
FROM orders o JOIN customers c ON o.customer = c.id JOIN items i ON o.item = i.item"""
LABELLED = f"SELECT o.quantity > 3 AS label, o.day, {SOURCE}"
UNLABELLED = f"SELECT o.day, {SOURCE}"
EPOCHS = 4
EPOCH = 3
SCORES = -2
"""The round of scores is the last but one: then the sites are told to forget."""

Rounds = list[tuple[int, set[str]]]
Sites = Mapping[str, Mapping[str, pd.DataFrame]]


class MovedError(Exception):
    """A name is in none of the modules where it is looked for."""


class FileCounter:
    """Collects the files whose functions are entered.

    Args:
        root: of the project.

    Attributes:
        rounds: epoch and files of every round that has ended.
    """

    def __init__(self, root: Path) -> None:
        self.rounds: Rounds = []
        self._codes: set[CodeType] = set()
        self._root = root

    def end_round(self, report: Any) -> None:
        """Take the record of a round, and begin with the next one."""
        codes, self._codes = self._codes, set()
        files = product_files({code.co_filename for code in codes}, self._root)
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


def product_files(paths: set[str], root: Path) -> set[str]:
    """Return those of the product, relative to the root.

    >>> found = product_files({"/p/strategies/a.py", "/p/tests/b.py"}, Path("/p"))
    >>> sorted(found)
    ['strategies/a.py']
    """
    inside = (Path(path) for path in paths if Path(path).is_relative_to(root))
    relative = (path.relative_to(root) for path in inside)
    return {path.as_posix() for path in relative if path.parts[0] in PACKAGES}


def load(name: str) -> Any:
    """Return what a name of `NAMES` stands for.

    Raises:
        MovedError: it is in none of the modules.
    """
    for module in NAMES[name]:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    message = f"{name} is not in {', '.join(NAMES[name])}: add its module to NAMES"
    raise MovedError(message)


def small_store(seed: int = 0) -> Sites:
    """Return three tables of a few rows, each at a site of its own."""
    rng = np.random.default_rng(seed)
    orders, customers, items = 60, 12, 7
    customer = rng.integers(0, customers, orders)
    item = rng.integers(0, items, orders)
    table = pd.DataFrame({"customer": customer, "item": item})
    table["day"] = rng.integers(1, 29, orders)
    table["quantity"] = 3 + 0.1 * (table["day"] - 14) + rng.normal(size=orders)
    people = pd.DataFrame({"id": np.arange(customers)})
    people["age"] = rng.integers(18, 80, customers).astype(float)
    people["region"] = rng.choice(["US", "UK", "FR"], customers)
    parts = pd.DataFrame({"item": np.repeat(np.arange(items), 2)})
    parts["price"] = rng.gamma(2.0, 3.0, len(parts)).round(2)
    return {
        "shop": {"orders": table},
        "office": {"customers": people},
        "warehouse": {"items": parts},
    }


def train(root: Path, state: Path | None) -> tuple[Any, Rounds]:
    """Return what ADMM's run came to, and its rounds.

    Args:
        root: of the project.
        state: folder for what the sites keep; None keeps it in memory.
    """
    counter = FileCounter(root)
    query = load("Query").from_sql(LABELLED)
    settings = {"task": "classification", "device": "cpu", "num_epochs": EPOCHS}
    strategy = load("TablePuppetADMM")(query, on_round=counter.end_round, **settings)
    grid = load("InProcessGrid")(load("app"), small_store(), state=state)
    with closing(grid), counter.counting():
        strategy.start(grid)
    return strategy, counter.rounds


def predict(root: Path, state: Path, manifest: Any) -> Rounds:
    """Return the rounds of a run that predicts with a saved model."""
    counter = FileCounter(root)
    query = load("Query").from_sql(UNLABELLED, needs_label=False)
    strategy = load("Predict")(
        query, manifest, mode="predict", on_round=counter.end_round
    )
    grid = load("InProcessGrid")(load("app"), small_store(), state=state)
    with closing(grid), counter.counting():
        strategy.start(grid)
    return counter.rounds


def count(root: Path) -> dict[str, list[str]]:
    """Return the files by what runs through them."""
    train(root, None)  # imports
    _, in_memory = train(root, None)
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        strategy, on_disk = train(root, state)
        manifest = load("make_manifest")(strategy)
        predict(root, state, manifest)  # imports
        predicted = predict(root, state, manifest)
    return {
        "an epoch of ADMM": sorted(_epoch_files(in_memory)),
        "an epoch of ADMM, state on disk": sorted(_epoch_files(on_disk)),
        "a prediction round": sorted(predicted[SCORES][1]),
    }


def _epoch_files(rounds: Rounds) -> set[str]:
    return set().union(*(files for epoch, files in rounds if epoch == EPOCH))


def main(arguments: Sequence[str]) -> int:
    """Print the counts, and the files; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkout", type=Path, default=ROOT, metavar="FOLDER")
    parser.add_argument("--no-list", action="store_true", help="print counts alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lists")
    options = parser.parse_args(arguments)
    root: Path = options.checkout.resolve()
    sys.path.insert(0, str(root))
    logging.disable(logging.INFO)
    try:
        counted = count(root)
    except MovedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for title, files in counted.items():
        by_package = [
            f"{package} {sum(file.startswith(f'{package}/') for file in files)}"
            for package in PACKAGES
        ]
        print(f"{title}: {len(files)} files ({', '.join(by_package)})")
        if not options.no_list:
            print("".join(f"  {file}\n" for file in files))
    if options.json:
        text = json.dumps(counted, indent=1) + "\n"
        options.json.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
