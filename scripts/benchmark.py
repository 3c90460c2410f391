"""Measure tp_flower, and write what was found as one JSON file, plots and one page.

    python scripts/benchmark.py [--suite NAME[,NAME]] [--movielens DIR]
                                [--paper-scale DIR [--factor F]]
                                [--datasets NAME,..] [--methods NAME,..] [--set K=V]
                                [--output DIR | --update FILE]

Suites are in scripts/bench_suites.py; without --suite all run whose data are there.
--update measures the named suites again and keeps the others of an existing file.
Every finished suite is written at once: an error in one loses nothing of the others.

Exit status: 0 all figures are within their limits, 1 some are not or a suite failed.
"""

import argparse
import logging
import sys
import time
import tomllib
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import matplotlib as mpl
from bench_datasets import DATASETS
from bench_methods import METHODS
from bench_page import write_page
from bench_results import (
    RESULTS_FILE,
    Results,
    new_results,
    put_failure,
    put_outcome,
    read_results,
    write_results,
)
from bench_runs import Check, Options, SkippedSuite
from bench_suites import SUITES
from rich import box
from rich.console import Console
from rich.table import Table

from tp_flower.console import format_seconds
from tp_flower.datasets.flights import home_folder

CONSOLE_WIDTH = 110


def main(arguments: Sequence[str]) -> int:
    """Run the suites; return the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    path, results = _file(given, parser)
    # Flower tells of every run what these tables tell better
    logging.getLogger("flwr").setLevel(logging.WARNING)
    console = Console(width=CONSOLE_WIDTH, highlight=False, markup=False)
    options = Options(
        *(given.movielens, given.paper_scale, given.factor),
        *(given.datasets, given.methods, dict(given.set)),
    )
    missed: list[str] = []
    for name in given.suite:
        missed += run_suite(name, options, results, console)
        write_results(path, results)
    write_page(path.parent, results)
    console.print(f"Results: {path.parent}", soft_wrap=True)
    for figure in missed:
        console.print(f"MISSED: {figure}", soft_wrap=True)
    return 1 if missed else 0


def _file(
    given: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[Path, Results]:
    """Return the file to write, and what it begins with."""
    if given.update is None:
        return given.output / RESULTS_FILE, new_results()
    try:
        return given.update, read_results(given.update)
    except (OSError, ValueError) as error:
        parser.error(f"--update: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    names = ", ".join(SUITES)
    add(
        "--suite",
        type=suite_names,
        default=list(SUITES),
        metavar="NAME,..",
        help=f"all, or some of: {names}",
    )
    add(
        "--output",
        type=Path,
        metavar="DIR",
        default=home_folder() / "benchmarks" / time.strftime("%Y%m%d-%H%M%S"),
        help="folder for the results (default: a new one under ~/.tp_flower)",
    )
    add(
        "--update",
        type=Path,
        metavar="FILE",
        help=f"a {RESULTS_FILE}: replace these suites in it",
    )
    add(
        "--movielens",
        type=Path,
        metavar="DIR",
        help="folder with u.data, u.item and u.user of MovieLens-100K",
    )
    add(
        "--paper-scale",
        type=Path,
        metavar="DIR",
        help="folder for synthetic tables of the papers' sizes, several GB",
    )
    names = ", ".join(DATASETS)
    listed = partial(add, type=name_list, default=(), metavar="NAME,..")
    listed("--datasets", help=f"of suite methods: {names} (default: all)")
    names = ", ".join(METHODS)
    listed("--methods", help=f"of suite methods: {names} (default: all)")
    add(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a run-config key of all runs of suite methods, such as model=mlp",
    )
    add("--factor", type=float, default=1.0, help="share of the papers' row counts")
    return parser


def suite_names(text: str) -> list[str]:
    """Return the suites of ``"bytes,speed"`` or ``"all"``, in the order of `SUITES`."""
    wanted = text.split(",")
    unknown = [name for name in wanted if name not in {*SUITES, "all"}]
    if unknown:
        allowed = ", ".join(["all", *SUITES])
        raise argparse.ArgumentTypeError(
            f"no suite {unknown[0]!r}; there are {allowed}"
        )
    return [name for name in SUITES if name in wanted or "all" in wanted]


def name_list(text: str) -> tuple[str, ...]:
    """Return the names of ``"flights,store"``."""
    return tuple(text.split(","))


def setting(text: str) -> tuple[str, str | int | float | bool]:
    """Return key and value; what is no TOML value is a text.

    >>> setting("l2=1e-3"), setting("model=mlp")
    (('l2', 0.001), ('model', 'mlp'))
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        read = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        read = value
    return key, read


def run_suite(
    name: str, options: Options, results: Results, console: Console
) -> list[str]:
    """Run a suite and enter what it found; return the figures beyond their limits."""
    console.print(f"measuring {name} ...")
    started = time.perf_counter()
    try:
        outcome = SUITES[name](options)
    except SkippedSuite as reason:
        console.print(f"{name} is skipped: {reason}\n", soft_wrap=True)
        return []
    except Exception as error:  # noqa: BLE001 - the other suites' figures are worth as much
        put_failure(results, name, error)
        console.print(traceback.format_exc())
        return [f"{name} failed: {error}"]
    seconds = time.perf_counter() - started
    put_outcome(results, name, outcome, seconds)
    console.print(checks_table(name, outcome.checks))
    console.print(facts_table(outcome.facts))
    console.print(f"{name} took {format_seconds(seconds)}\n")
    return [check.name for check in outcome.checks if not check.is_met]


def checks_table(name: str, checks: Sequence[Check]) -> Table:
    """Return the figures that have a limit."""
    table = Table(title=name, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("at most", justify="right")
    table.add_column("")
    for check in checks:
        figures = (
            format_figure(value, check.unit) for value in (check.measured, check.limit)
        )
        table.add_row(check.name, *figures, "yes" if check.is_met else "NO")
    return table


def facts_table(facts: dict[str, object]) -> Table:
    """Return the other figures; tables of them are for the page."""
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in facts.items():
        if not _is_nested(value):
            table.add_row(name, _text(value))
    return table


def _is_nested(value: object) -> bool:
    return isinstance(value, dict) and any(
        isinstance(item, dict) for item in value.values()
    )


def format_figure(value: float, unit: str) -> str:
    """Return a figure with its unit.

    >>> format_figure(0.0123, "%"), format_figure(12.0, "s")
    ('1.230%', '12 s')
    """
    if unit == "%":
        return f"{value:.3%}"
    return f"{value:.4g} {unit}".strip()


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value)


if __name__ == "__main__":
    mpl.use("agg")
    sys.exit(main(sys.argv[1:]))
