"""Measure tp_flower: convergence, bytes, speed, and MovieLens if its files are there.

    python scripts/benchmark.py [--suite convergence|bytes|speed|movielens|all]
                                [--output DIR] [--movielens DIR]

Prints every figure that has a limit, and writes benchmark.json and a PNG per curve.

Exit status: 0 all figures are within their limits, 1 some are not.
"""

import argparse
import json
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import matplotlib as mpl
from bench_bytes import measure_bytes
from bench_convergence import measure_convergence
from bench_movielens import has_movielens, measure_movielens
from bench_runs import Check, Outcome
from bench_speed import measure_speed
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from tp_flower.console import format_seconds
from tp_flower.datasets.flights import home_folder

CONSOLE_WIDTH = 110
LIBRARIES = ("duckdb", "flwr", "numpy", "scikit-learn", "torch")

SUITES: dict[str, Callable[[], Outcome]] = {
    "convergence": measure_convergence,
    "bytes": measure_bytes,
    "speed": measure_speed,
}


def main(arguments: Sequence[str]) -> int:
    """Run the suites; return the exit status."""
    options = _parse(arguments)
    # Flower tells of every run what these tables tell better
    logging.getLogger("flwr").setLevel(logging.WARNING)
    console = Console(width=CONSOLE_WIDTH, highlight=False)
    outcomes: dict[str, Outcome] = {}
    for name, measure in _chosen(options, console).items():
        console.print(f"measuring {name} ...")
        started = time.perf_counter()
        outcomes[name] = measure()
        seconds = time.perf_counter() - started
        console.print(checks_table(name, outcomes[name].checks))
        console.print(facts_table(outcomes[name].facts))
        console.print(f"{name} took {format_seconds(seconds)}\n")
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    write_results(folder, outcomes)
    console.print(f"Results: {folder}", soft_wrap=True, markup=False)
    missed = [c.name for o in outcomes.values() for c in o.checks if not c.is_met]
    for check in missed:
        console.print(f"MISSED: {check}", soft_wrap=True, markup=False)
    return 1 if missed else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    suites = [*SUITES, "movielens", "all"]
    parser.add_argument("--suite", choices=suites, default="all")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default=home_folder() / "benchmarks" / time.strftime("%Y%m%d-%H%M%S"),
        help="folder for the results (default: a new one under ~/.tp_flower)",
    )
    parser.add_argument(
        "--movielens",
        type=Path,
        metavar="DIR",
        help="folder with u.data, u.item and u.user of MovieLens-100K",
    )
    return parser.parse_args(arguments)


def _chosen(
    options: argparse.Namespace, console: Console
) -> dict[str, Callable[[], Outcome]]:
    """Return the suites to run, in order."""
    wanted = [*SUITES, "movielens"] if options.suite == "all" else [options.suite]
    chosen = {name: SUITES[name] for name in wanted if name in SUITES}
    if "movielens" not in wanted:
        return chosen
    if has_movielens(options.movielens):
        chosen["movielens"] = lambda: measure_movielens(options.movielens)
    else:
        where = options.movielens or "no folder given with --movielens"
        console.print(f"movielens is skipped: no ml-100k ({where})", markup=False)
    return chosen


def checks_table(name: str, checks: Sequence[Check]) -> Table:
    """Return the figures that have a limit."""
    table = Table(title=name, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("at most", justify="right")
    table.add_column("")
    for check in checks:
        figures = (
            _figure(value, check.unit) for value in (check.measured, check.limit)
        )
        table.add_row(check.name, *figures, "yes" if check.is_met else "NO")
    return table


def facts_table(facts: dict[str, object]) -> Table:
    """Return the other figures."""
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in facts.items():
        table.add_row(name, _text(value))
    return table


def _figure(value: float, unit: str) -> str:
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


def write_results(folder: Path, outcomes: dict[str, Outcome]) -> None:
    """Write benchmark.json and the plots."""
    content = {
        "machine": {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **{name: version(name) for name in LIBRARIES},
        },
        **{name: outcome.to_json() for name, outcome in outcomes.items()},
    }
    text = json.dumps(content, indent=2) + "\n"
    (folder / "benchmark.json").write_text(text, encoding="utf-8")
    for outcome in outcomes.values():
        for title, curves in outcome.curves.items():
            name = re.sub(r"\W+", "-", title.lower())
            plot_curves(folder / f"{name}.png", title, curves)


def plot_curves(path: Path, title: str, curves: dict[str, list[float]]) -> None:
    """Plot a value per epoch for every method; on a log scale where all are > 0."""
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for method, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=method)
    if "above" in title:
        axes.set_yscale("log")
        axes.set_ylabel("objective / optimum - 1")
    else:
        axes.set_ylabel("loss per held-out row")
    axes.grid(alpha=0.3)
    axes.set_xlabel("epoch")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    mpl.use("agg")
    sys.exit(main(sys.argv[1:]))
