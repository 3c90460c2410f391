"""Compare a run with training on the joined table.

    python scripts/compare_centralized.py OUTPUT_DIR

Reads the run's report.json, joins the same files with DuckDB, encodes the result in the
same way and fits a linear model to it: ridge or logistic regression, to its optimum.

Exit status: 0 the run reached it, 1 it did not (or cannot be compared).
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
from rich import box
from rich.console import Console
from rich.table import Table

from scripts.joined.centralized import JoinedTable, join_tables, read_sources
from scripts.joined.optima import LinearFit, fit_linear
from tp_flower.errors import TPFlowerError
from tp_flower.learning.metrics import evaluate
from tp_flower.query import Query
from tp_flower.reports.console import (
    format_bytes,
    format_count,
    format_seconds,
    format_value,
)
from tp_flower.reports.records import COMPLETED, REPORT_FILE
from tp_flower.settings import Settings

CONSOLE_WIDTH = 100

# how much worse or better than the optimum the run may be: ADMM's epochs end close to
# the optimum, SGD's step size keeps it at a distance
AUC_MARGINS = {"admm": 0.002, "sgd": 0.01}
RMSE_MARGINS = {"admm": 0.002, "sgd": 0.01}

SHOWN = {
    "auc": "test AUC",
    "log_loss": "test log loss",
    "rmse": "test RMSE",
    "r2": "test R2",
}


class CompareError(Exception):
    """The report cannot be read, or there is nothing to compare."""


@dataclass(frozen=True)
class Verdict:
    """Whether the run is as good as the optimum.

    Attributes:
        text: the comparison in one line.
        is_equal: whether the difference is within the margin.
    """

    text: str
    is_equal: bool


def main(arguments: Sequence[str]) -> int:
    """Print the comparison; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output_dir", type=Path, help="folder with a run's report.json")
    console = Console(width=CONSOLE_WIDTH, highlight=False)
    try:
        report = read_report(parser.parse_args(arguments).output_dir)
        settings = Settings.from_run_config(report["settings"])
        started = time.perf_counter()
        joined = join_tables(
            Query.from_sql(report["query"]), settings, read_sources(settings.tables)
        )
        fitted = fit_linear(joined.loss, *joined.part(test=False), settings.l2)
        seconds = time.perf_counter() - started
        check_rows(report, joined)
        verdict = judge(report, settings, test_metrics(joined, fitted))
    except (CompareError, TPFlowerError, duckdb.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console.print(comparison_table(report, joined, fitted, seconds))
    console.print(verdict.text, soft_wrap=True, markup=False)
    return 0 if verdict.is_equal else 1


def read_report(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's report.json.

    Raises:
        CompareError: it is missing, no report, or of a run that cannot be compared.
    """
    path = folder / REPORT_FILE
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise CompareError(message) from error
    except ValueError as error:
        message = f"{path} is no report: {error}"
        raise CompareError(message) from error
    if report.get("status") != COMPLETED:
        message = f"the run of {path} did not complete: {report.get('status')}"
        raise CompareError(message)
    if report["settings"]["mode"] != "train":
        message = (
            f"{path} is of mode = {report['settings']['mode']!r}: nothing was trained"
        )
        raise CompareError(message)
    weights = report["chosen"].get("row-weight")
    if weights:
        message = (
            "the run's joined rows have weights (row-weight or AS weight); on the "
            "joined table every row would count once: there is nothing to compare"
        )
        raise CompareError(message)
    return report


def check_rows(report: Mapping[str, Any], joined: JoinedTable) -> None:
    """Check that the run joined the rows that DuckDB joins.

    Raises:
        CompareError: it did not; or the files have changed since.
    """
    held_out = int(joined.is_test.sum())
    found = {"train": len(joined.is_test) - held_out, "test": held_out}
    own = dict(report["joined-rows"])
    if coreset := report["chosen"].get("coreset"):
        # it trained on a sample of them
        own["train"] = coreset["joined-rows"]
    if own != found:
        message = f"the run joined {own} rows, DuckDB {found}"
        raise CompareError(message)


def test_metrics(joined: JoinedTable, fitted: LinearFit) -> dict[str, float]:
    """Return the metrics of the optimum on the held-out rows.

    Raises:
        CompareError: no joined row was held out.
    """
    features, labels = joined.part(test=True)
    if not len(labels):
        message = "no joined row was held out: set test-fraction higher"
        raise CompareError(message)
    return evaluate(joined.loss, fitted.scores(features), labels)


def judge(
    report: Mapping[str, Any], settings: Settings, optimum: Mapping[str, float]
) -> Verdict:
    """Return whether the run's test AUC or RMSE is the optimum's, within the margin."""
    run = report["final"]["test"]
    if "auc" in optimum:
        difference = abs(run["auc"] - optimum["auc"])
        margin = AUC_MARGINS[settings.family]
        text = f"AUC difference {difference:.5f}, allowed {margin:g}"
    else:
        difference = abs(run["rmse"] / optimum["rmse"] - 1.0)
        margin = RMSE_MARGINS[settings.family]
        text = f"RMSE difference {difference:.3%}, allowed {margin:.1%}"
    if any(settings.model_of(table["table"]) != "linear" for table in report["tables"]):
        return Verdict(f"{text} for linear models; these are not: no verdict", True)
    is_equal = difference <= margin
    word = "equal to" if is_equal else "NOT EQUAL to"
    return Verdict(f"{text}: {word} training on the joined table", is_equal)


def comparison_table(
    report: Mapping[str, Any], joined: JoinedTable, fitted: LinearFit, seconds: float
) -> Table:
    """Return the run and the optimum side by side."""
    own = report["final"]["test"]
    optimum = test_metrics(joined, fitted)
    name = "ridge" if joined.loss.name == "squared" else joined.loss.name
    method = str(report["settings"]["strategy"]).upper()
    table = Table(
        title="The run and training on the joined table",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("")
    table.add_column(f"(a) tp_flower {method}", justify="right")
    table.add_column(f"(b) {name} regression, joined", justify="right")
    for part, rows in report["joined-rows"].items():
        # the same for both, as was checked
        table.add_row(f"joined rows, {part}", *[format_count(rows)] * 2)
    table.add_row("rounds", format_count(report["rounds"]), "")
    table.add_row("bytes up", format_bytes(report["bytes_up"]), "")
    table.add_row("bytes down", format_bytes(report["bytes_down"]), "")
    table.add_row("time", *map(format_seconds, (report["seconds"], seconds)))
    table.add_section()
    for key, label in SHOWN.items():
        if key in optimum:
            table.add_row(label, *map(format_value, (own.get(key), optimum[key])))
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
