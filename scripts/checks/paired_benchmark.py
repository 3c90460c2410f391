"""Measure an old and a new version of the project in turns, and compare the figures.

    python scripts/checks/paired_benchmark.py --old COMMIT [--new COMMIT] [--repeats 2]
                                       [--suites speed,bytes,...]

A version is a commit, or the folder of a checkout. Both run the same suites of their
own scripts/benchmark.py, old and new by turns, so that a machine that is busy for a
while is so for both. A figure's best value counts. It is worse if it is more than 10 %
behind; counts and bytes if they have grown at all. Times of less than 5 ms, and figures
of other methods than ours, are printed only. A full run takes about six minutes per
side and repeat on two idle cores.

Exit status: 0 no figure is worse, 1 some are or a suite failed.
"""

import argparse
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.checks.checkouts import Checkout, check_out
from scripts.checks.same_numbers import leaves

SUITES = "speed,bytes,rounds,micro,convergence,linearity,encode"
MARGIN = 1.1
PEAK_MARGIN = 1.3
"""Of a site's peak memory at a million rows of 60 columns, in suite ``encode``."""
SHORT_MS = 5.0
LOWER, HIGHER, NOT_MORE, NEITHER = "lower", "higher", "equal or fewer", ""
RULES: Sequence[tuple[str, str]] = (
    # ours, beside the figures that it is compared with
    (r"measured and by formula/0$|over the floor$|epochs to", NOT_MORE),
    (r"epochs over DuckDB|peak memory over DuckDB|overhead", LOWER),
    # the ways that we compare with, sizes of the task, and what is a choice
    (r"DuckDB|scikit|joint Adam|copy-|copied|floor|formula|optimum$", NEITHER),
    (r"run and joint/1$|/rows$|columns|joined-rows|learning rates", NEITHER),
    (r"^rounds/.*auto|batch sizes|slope between|VFL's bytes over", NEITHER),
    (r"per second|auc", HIGHER),
    (r"bytes|rounds per epoch", NOT_MORE),
    ("", LOWER),
)
"""Which of two values is better: the first pattern in a figure's name decides."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Pair:
    """The best value of a figure in both versions; NaN where a version has none."""

    name: str
    old: float
    new: float

    @property
    def better(self) -> str:
        """Which value is the better one, of the words in `RULES`."""
        return next(word for pattern, word in RULES if re.search(pattern, self.name))

    @property
    def is_worse(self) -> bool:
        """Whether the new version is behind, beyond what chance explains."""
        unit = {"ms": 1.0, "seconds": 1000.0}.get(re.split("[^a-z]", self.name)[-1])
        if unit and unit * max(self.old, self.new) < SHORT_MS:
            return False
        is_peak = self.name.startswith("encode/") and "peak memory" in self.name
        margin = PEAK_MARGIN if is_peak else MARGIN
        return {
            HIGHER: self.new * margin < self.old,
            LOWER: self.new > self.old * margin,
            NOT_MORE: self.new > self.old,
            NEITHER: False,
        }[self.better]


def flatten(results: Mapping[str, Any]) -> Figures:
    """Return the numbers of a benchmark's file by suite and name.

    A figure that is null in the file was infinite.
    """
    figures: dict[str, Any] = {}
    for suite, content in results["suites"].items():
        checks = {check["name"]: check["measured"] for check in content["checks"]}
        figures |= leaves({suite: {**checks, **content["facts"]}})
    return {
        name: math.inf if value is None else float(value)
        for name, value in figures.items()
        if value is None or type(value) in (int, float)
    }


def pair_up(old: Sequence[Figures], new: Sequence[Figures]) -> list[Pair]:
    """Return every figure of two versions, each with its best value."""
    pairs = []
    for name in dict.fromkeys(name for figures in (*old, *new) for name in figures):
        sides = ([f[name] for f in side if name in f] for side in (old, new))
        best = max if Pair(name, 0.0, 0.0).better == HIGHER else min
        pairs.append(Pair(name, *(best(side, default=math.nan) for side in sides)))
    return pairs


def main(arguments: Sequence[str]) -> int:
    """Measure and compare; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--old", required=True, metavar="VERSION")
    parser.add_argument("--new", default="HEAD", metavar="VERSION")
    parser.add_argument("--suites", default=SUITES, metavar="NAME,..")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args(arguments)
    figures: dict[str, list[Figures]] = {"old": [], "new": []}
    failed: list[str] = []
    with ExitStack() as stack:
        versions = {
            side: stack.enter_context(check_out(getattr(options, side)))
            for side in figures
        }
        for number in range(options.repeats):
            # who is first has the colder caches: so they take turns
            for side in list(figures)[:: 1 if number % 2 == 0 else -1]:
                results = _benchmark(versions[side], options.suites)
                figures[side].append(flatten(results))
                for suite, error in results["failed"].items():
                    failed.append(f"{side}: {suite} failed: {error}")
    return print_pairs(pair_up(**figures), failed)


def _benchmark(checkout: Checkout, suites: str) -> dict[str, Any]:
    """Return the results of a version's benchmark."""
    with tempfile.TemporaryDirectory(prefix="paired-benchmark-") as text:
        folder = Path(text)
        started = time.perf_counter()
        options = ["--suite", suites, "--output", str(folder / "results")]
        _, printed = checkout.run("benchmark", options, folder)
        seconds = time.perf_counter() - started
        print(f"{checkout.commit[:10]}: {suites} in {seconds:.0f} s", flush=True)
        path = folder / "results" / "benchmark.json"
        if not path.exists():
            raise RuntimeError(f"no results of {checkout.folder}:\n{printed[-2000:]}")
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return results


def print_pairs(pairs: Sequence[Pair], failed: Sequence[str]) -> int:
    """Print all figures and those that are worse; return the exit status."""
    for pair in pairs:
        mark = "WORSE" if pair.is_worse else pair.better
        mark = "gone" if math.isnan(pair.new) else mark
        ratio = 1.0 if pair.old == pair.new else pair.new / (pair.old or math.nan)
        values = f"{pair.old:12.6g} {pair.new:12.6g} {ratio:8.3f}"
        print(f"{pair.name:80} {values}  {mark}")
    worse = [pair for pair in pairs if pair.is_worse]
    for pair in worse:
        print(f"WORSE: {pair.name}: {pair.old:.6g} before, {pair.new:.6g} now")
    for text in failed:
        print(f"FAILED: {text}")
    print(f"{len(pairs)} figures, {len(worse)} worse, {len(failed)} suites failed")
    return 1 if worse or failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
