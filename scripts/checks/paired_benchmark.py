"""Measure an old and a new version of the project in turns, and compare the figures.

    python scripts/checks/paired_benchmark.py --old COMMIT [--new COMMIT] [--repeats 2]
                                       [--suites speed,bytes,...] [--output FILE]

A version is a commit, or the folder of a checkout. Both run the same suites of their
own scripts/benchmark.py, old and new by turns, so that a machine that is busy for a
while is so for both. A figure's best value counts. It is worse if it is more than 10 %
behind; counts and bytes if they have grown at all. Times of less than 5 ms, and figures
of other methods than ours, are printed only. A full run takes about six minutes per
side and repeat on two idle cores.

Exit status: 0 no figure is worse, 1 some are or a suite failed, 2 the arguments are not
usable.
"""

import argparse
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from scripts.checks.checkouts import Checkout, CheckoutError, check_out

SUITES = "speed,bytes,rounds,micro,convergence,linearity,encode"
MARGIN = 1.1
PEAK_MARGIN = 1.3
"""Of a site's peak memory at a million rows of 60 columns, in suite ``encode``."""
SHORT_MS = 5.0
RESULTS = "benchmark.json"

Figures = dict[str, float]


class Better(Enum):
    """Which of two values of a figure is better."""

    LOWER = "lower"
    HIGHER = "higher"
    NOT_MORE = "equal or fewer"
    NEITHER = ""


RULES: Sequence[tuple[str, Better]] = (
    # ours, beside the figures that it is compared with
    (r"measured and by formula/0$|over the floor$|epochs to", Better.NOT_MORE),
    (r"epochs over DuckDB|peak memory over DuckDB|overhead", Better.LOWER),
    # the ways that we compare with, sizes of the task, and what is a choice
    (r"DuckDB|scikit|joint Adam|copy-|copied|floor|formula|optimum$", Better.NEITHER),
    (r"run and joint/1$|/rows$|columns|joined-rows|learning rates", Better.NEITHER),
    (r"^rounds/.*auto|batch sizes|slope between|VFL's bytes over", Better.NEITHER),
    (r"per second|auc", Better.HIGHER),
    (r"bytes|rounds per epoch", Better.NOT_MORE),
)
"""The first pattern that is in a figure's name decides; else lower is better."""


@dataclass(frozen=True)
class Pair:
    """The best value of a figure in both versions; NaN where a version has none."""

    name: str
    old: float
    new: float

    @property
    def better(self) -> Better:
        """Which value is the better one."""
        rules = (better for pattern, better in RULES if re.search(pattern, self.name))
        return next(rules, Better.LOWER)

    @property
    def is_worse(self) -> bool:
        """Whether the new version is behind, beyond what chance explains."""
        if math.isnan(self.old) or math.isnan(self.new) or self._is_short:
            return False
        is_peak = self.name.startswith("encode/") and "peak memory" in self.name
        margin = PEAK_MARGIN if is_peak else MARGIN
        if self.better is Better.HIGHER:
            return self.new * margin < self.old
        if self.better is Better.LOWER:
            return self.new > self.old * margin
        return self.better is Better.NOT_MORE and self.new > self.old

    @property
    def _is_short(self) -> bool:
        """Whether a time is too short to be measured well."""
        longest = max(self.old, self.new)
        if self.name.endswith((", ms", "-ms")):
            return longest < SHORT_MS
        return self.name.endswith("seconds") and 1000 * longest < SHORT_MS


def flatten(results: Mapping[str, Any]) -> Figures:
    """Return the numbers of a benchmark's file by suite and name.

    A figure that is null in the file was infinite.

    >>> suite = {"checks": [{"name": "time", "measured": 2.0, "limit": 3.0}],
    ...          "facts": {"run": {"seconds": 1.5}, "sizes": [1, 2]}, "curves": {}}
    >>> flatten({"suites": {"speed": suite}})
    {'speed/time': 2.0, 'speed/run/seconds': 1.5, 'speed/sizes/0': 1.0, \
'speed/sizes/1': 2.0}
    """
    figures: Figures = {}
    for suite, content in results["suites"].items():
        checks = {check["name"]: check["measured"] for check in content["checks"]}
        ends = {
            f"{title}/{method}, last": values[-1]
            for title, methods in content["curves"].items()
            for method, values in methods.items()
            if values
        }
        for part in (checks, content["facts"], ends):
            figures |= _numbers(suite, part)
    return figures


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{path}/{key}", item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _numbers(f"{path}/{number}", item)
    elif value is None:
        yield path, math.inf
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def pair_up(old: Sequence[Figures], new: Sequence[Figures]) -> list[Pair]:
    """Return every figure of two versions, each with its best value."""
    names = dict.fromkeys(name for figures in (*old, *new) for name in figures)
    return [Pair(name, _best(name, old), _best(name, new)) for name in names]


def _best(name: str, repeats: Sequence[Figures]) -> float:
    values = [figures[name] for figures in repeats if name in figures]
    if not values:
        return math.nan
    is_higher = Pair(name, 0.0, 0.0).better is Better.HIGHER
    return max(values) if is_higher else min(values)


def main(arguments: Sequence[str]) -> int:
    """Measure and compare; return the exit status."""
    options = _parser().parse_args(arguments)
    figures: tuple[list[Figures], list[Figures]] = ([], [])
    failed: list[str] = []
    try:
        with ExitStack() as stack:
            versions = [
                stack.enter_context(check_out(name))
                for name in (options.old, options.new)
            ]
            for number in range(options.repeats):
                # who is first has the colder caches: so they take turns
                for side in (0, 1) if number % 2 == 0 else (1, 0):
                    results = _benchmark(versions[side], options.suites)
                    figures[side].append(flatten(results))
                    where = ("old", "new")[side]
                    failed += [
                        f"{where}: {suite} failed: {error}"
                        for suite, error in results["failed"].items()
                    ]
    except (CheckoutError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    pairs = pair_up(*figures)
    if options.output:
        content = {"old": figures[0], "new": figures[1]}
        text = json.dumps(content, indent=1) + "\n"
        options.output.write_text(text, encoding="utf-8")
    return print_pairs(pairs, failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--old", required=True, metavar="VERSION")
    parser.add_argument("--new", default="HEAD", metavar="VERSION")
    parser.add_argument("--suites", default=SUITES, metavar="NAME,..")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, metavar="FILE")
    return parser


def _benchmark(checkout: Checkout, suites: str) -> dict[str, Any]:
    """Return what a version's benchmark finds.

    Raises:
        RuntimeError: it wrote no results.
    """
    with tempfile.TemporaryDirectory(prefix="paired-benchmark-") as text:
        folder = Path(text)
        started = time.perf_counter()
        options = ["--suite", suites, "--output", str(folder / "results")]
        done = checkout.run("benchmark", options, folder, environment={})
        seconds = time.perf_counter() - started
        print(f"{checkout.commit[:10]}: {suites} in {seconds:.0f} s", flush=True)
        path = folder / "results" / RESULTS
        if not path.exists():
            message = f"no results of {checkout.folder}:\n{done.stdout[-2000:]}"
            raise RuntimeError(message)
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return results


def print_pairs(pairs: Sequence[Pair], failed: Sequence[str]) -> int:
    """Print all figures and those that are worse; return the exit status."""
    for pair in pairs:
        mark = "WORSE" if pair.is_worse else pair.better.value
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
