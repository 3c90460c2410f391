"""Measure tp_flower, and write what was found as one JSON file, plots and one page.

    python scripts/benchmark.py [--suite NAME[,NAME]] [--movielens DIR]
                                [--paper-scale DIR [--factor F]] [--vertical DIR]
                                [--datasets NAME,..] [--methods NAME,..] [--set K=V]
                                [--output DIR | --update FILE]

Suites are in scripts/bench/suites/registry.py; without --suite all run whose data are
there. --update measures the named suites again and keeps the others of an existing
file. Every finished suite is written at once: an error in one loses nothing of the
others, nor does Ctrl-C.

Exit status: 0 all figures are within their limits, 1 some are not or a suite failed,
2 the arguments are not usable, 130 interrupted.
"""

import argparse
import logging
import math
import shutil
import sys
import time
import tomllib
import traceback
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import matplotlib as mpl
from rich import box
from rich.console import Console
from rich.table import Table

from scripts.bench.datasets import DATASETS
from scripts.bench.movielens import has_movielens
from scripts.bench.report.page import write_page
from scripts.bench.results_file import (
    RESULTS_FILE,
    Results,
    new_results,
    put_failure,
    put_outcome,
    read_results,
    write_results,
)
from scripts.bench.runs import Check, Options, SkippedSuite
from scripts.bench.suites.methods import METHODS
from scripts.bench.suites.registry import SUITES
from scripts.data.prepare_vertical import SOURCES
from tp_flower.errors import SettingsError
from tp_flower.files import home_folder
from tp_flower.reports.console import format_seconds
from tp_flower.settings import Settings

MOST_COLUMNS = 110
INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Run the suites; return the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    check_settings(given, parser)
    path, results = _file(given, parser)
    # Flower tells of every run what these tables tell better
    logging.getLogger("flwr").setLevel(logging.WARNING)
    console = Console(width=console_width(), highlight=False, markup=False)
    options = Options(
        *(given.movielens, given.paper_scale, given.factor),
        *(given.datasets, given.methods, dict(given.set)),
        vertical=given.vertical,
    )
    missed: list[str] = []
    status = 0
    try:
        for name in given.suite:
            missed += run_suite(name, options, results, console)
            write_results(path, results)
    except KeyboardInterrupt:
        status = INTERRUPTED
        console.print("interrupted; what was measured before is kept")
    write_page(path.parent, results)
    console.print(f"Results: {path.parent}", soft_wrap=True)
    for figure in missed:
        console.print(f"MISSED: {figure}", soft_wrap=True)
    return status or (1 if missed else 0)


def console_width() -> int:
    """Return the columns of the terminal, up to as many as are readable."""
    return min(MOST_COLUMNS, shutil.get_terminal_size((MOST_COLUMNS, 24)).columns)


def check_settings(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse settings that one of the methods to run does not take."""
    for name in given.methods or METHODS:
        method = METHODS[name]
        own = {"strategy": method.strategy, **method.settings}
        try:
            Settings.from_run_config(own | dict(given.set))
        except SettingsError as error:
            parser.error(f"--set, for method {name}: {error}")


def _file(
    given: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[Path, Results]:
    """Return the file to write, and what it begins with.

    Its folder is made before anything is measured: without it all would be lost.
    """
    option = "--output" if given.update is None else "--update"
    try:
        if given.update is not None:
            return given.update, read_results(given.update)
        given.output.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(f"{option}: {error}")
    return given.output / RESULTS_FILE, new_results()


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
        type=movielens_folder,
        metavar="DIR",
        help="folder with u.data, u.item and u.user of MovieLens-100K",
    )
    add(
        "--paper-scale",
        type=Path,
        metavar="DIR",
        help="folder for synthetic tables of the papers' sizes, several GB",
    )
    add(
        "--vertical",
        type=vertical_folder,
        metavar="DIR",
        help="folder with YearPredictionMSD.txt or kc_house_data.csv, for coreset",
    )
    names = ", ".join(DATASETS)
    listed = partial(add, default=(), metavar="NAME,..")
    listed(
        "--datasets",
        type=partial(name_list, known=DATASETS, what="data set"),
        help=f"of suite methods: {names} (default: all)",
    )
    names = ", ".join(METHODS)
    listed(
        "--methods",
        type=partial(name_list, known=METHODS, what="method"),
        help=f"of suite methods: {names} (default: all)",
    )
    add(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a run-config key of all runs of suite methods, such as model=mlp",
    )
    add(
        "--factor",
        type=positive,
        default=1.0,
        help="share of the papers' row counts (default: 1)",
    )
    return parser


def suite_names(text: str) -> list[str]:
    """Return the suites of ``"bytes,speed"`` or ``"all"``, in the order of `SUITES`."""
    wanted = name_list(text, ["all", *SUITES], "suite")
    return [name for name in SUITES if name in wanted or "all" in wanted]


def name_list(text: str, known: Iterable[str], what: str) -> tuple[str, ...]:
    """Return the names of ``"flights,store"``, all of them known."""
    wanted = tuple(text.split(","))
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no {what} {unknown[0]!r}; there are {', '.join(known)}"
        )
    return wanted


def movielens_folder(text: str) -> Path:
    """Return a folder or archive that has the files of MovieLens."""
    folder = Path(text)
    if not has_movielens(folder):
        message = f"{text!r} is not the folder or .zip of MovieLens-100K or -1M"
        raise argparse.ArgumentTypeError(message)
    return folder


def vertical_folder(text: str) -> Path:
    """Return a folder that has an official file of the coreset paper's data."""
    folder = Path(text)
    if not any(source.found_in(folder) for source in SOURCES):
        names = ", ".join(name for source in SOURCES for name in source.files)
        raise argparse.ArgumentTypeError(f"{text!r} has none of the files {names}")
    return folder


def positive(text: str) -> float:
    """Return a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


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
