"""Measure tp_flower, and write the figures as one JSON file and one page.

    python scripts/benchmark.py [--suite NAME[,NAME]] [--movielens DIR]
                                [--paper-scale DIR [--factor F]] [--repeats N]
                                [--output DIR | --update FILE]
    python scripts/benchmark.py --render [FILE]

Suites are in scripts/bench/registry.py; without --suite all run whose data are
there. --update measures the named suites again and keeps the others of an existing
file. Every finished suite is written at once: an error in one loses nothing of the
others, nor does Ctrl-C. --render measures nothing: it writes docs/results.md and the
README's table from a benchmark.json, or from the committed one.

Exit status: 0 all figures are within their limits, 1 some are not or a suite failed,
2 the arguments are not usable, 130 interrupted.
"""

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import matplotlib as mpl

from scripts.bench.harness import (
    RESULTS_FILE,
    Options,
    Results,
    SkippedSuite,
    new_results,
    put_outcome,
    read_results,
    write_results,
)
from scripts.bench.registry import SUITES
from scripts.bench.render import (
    FOLDER,
    markdown,
    measured,
    render,
    write_docs,
    write_plots,
)
from tp_flower.files import home_folder
from tp_flower.reports.console import format_seconds

PAGE_FILE = "benchmark.md"
INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Run the suites, or render results; return the exit status."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.render is not None:
        write_docs(_read(chosen.render, "--render", parser))
        return 0
    if chosen.update is None:
        path, results = chosen.output / RESULTS_FILE, new_results()
        try:
            # before anything is measured: without it all would be lost
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--output: {error}")
    else:
        path, results = chosen.update, _read(chosen.update, "--update", parser)
    # Flower tells of every run what these tables tell better
    logging.getLogger("flwr").setLevel(logging.WARNING)
    options = Options(*(getattr(chosen, item.name) for item in fields(Options)))
    missed: list[str] = []
    status = 0
    try:
        for name in chosen.suite:
            missed += run_suite(name, options, results)
            write_results(path, results)
    except KeyboardInterrupt:
        status = INTERRUPTED
        print("interrupted; what was measured before is kept")
    write_plots(path.parent, results)
    (path.parent / PAGE_FILE).write_text(render(results) + "\n", encoding="utf-8")
    print(f"Results: {path.parent}")
    for figure in missed:
        print(f"MISSED: {figure}")
    return status or (1 if missed else 0)


def _read(path: Path, option: str, parser: argparse.ArgumentParser) -> Results:
    try:
        return read_results(path)
    except (OSError, ValueError) as error:
        parser.error(f"{option}: {str(path)!r} is no {RESULTS_FILE}: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    folder = partial(parser.add_argument, metavar="DIR", type=Path)
    file = partial(parser.add_argument, metavar="FILE", type=Path)
    text = f"all, or some of: {', '.join(SUITES)}"
    parser.add_argument(
        "--suite", metavar="NAME,..", type=suite_names, default=list(SUITES), help=text
    )
    text = "folder for the results (default: a new one under ~/.tp_flower)"
    new = home_folder() / "benchmarks" / time.strftime("%Y%m%d-%H%M%S")
    folder("--output", default=new, help=text)
    file("--update", help=f"a {RESULTS_FILE}: replace its suites")
    text = "write docs/results.md and the README's table from this file"
    file("--render", nargs="?", const=FOLDER / RESULTS_FILE, help=text)
    text = "folder with u.data, u.item and u.user of MovieLens-100K"
    folder("--movielens", help=text)
    text = "folder for synthetic tables of the papers' sizes, several GB"
    folder("--paper-scale", help=text)
    text = "share of the papers' row counts (default: 1)"
    parser.add_argument("--factor", type=float, default=1.0, metavar="F", help=text)
    text = "runs per cell of suites privacy and labels (default: 1)"
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help=text)
    return parser


def suite_names(text: str) -> list[str]:
    """Return the suites of ``"bytes,speed"`` or ``"all"``, in the order of `SUITES`."""
    names = ["all", *SUITES]
    wanted = text.split(",")
    if unknown := [name for name in wanted if name not in names]:
        raise argparse.ArgumentTypeError(
            f"no suite {unknown[0]!r}; there are {', '.join(names)}"
        )
    return [name for name in SUITES if name in wanted or "all" in wanted]


def run_suite(name: str, options: Options, results: Results) -> list[str]:
    """Run a suite, enter and print its figures; return those beyond their limits."""
    print(f"measuring {name} ...", flush=True)
    started = time.perf_counter()
    try:
        outcome = SUITES[name](options)
    except SkippedSuite as reason:
        print(f"{name} is skipped: {reason}\n")
        return []
    except Exception as error:  # noqa: BLE001 - the other suites' figures are worth as much
        # figures from before stay
        results["failed"][name] = f"{type(error).__name__}: {error}"
        print(traceback.format_exc())
        return [f"{name} failed: {error}"]
    seconds = time.perf_counter() - started
    put_outcome(results, name, outcome, seconds)
    rows = [
        [each.name, *(measured(x, each.unit) for x in (each.measured, each.limit))]
        for each in outcome.checks
    ]
    print(markdown([name, "measured", "at most"], rows))
    print(f"{name} took {format_seconds(seconds)}\n", flush=True)
    return [check.name for check in outcome.checks if not check.is_met]


if __name__ == "__main__":
    mpl.use("agg")
    sys.exit(main(sys.argv[1:]))
