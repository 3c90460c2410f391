"""Compare a run with training on the joined table.

    python scripts/compare_centralized.py OUTPUT_DIR...

Reads a run's report.json, joins the same files with DuckDB, encodes the result in the
same way and fits a linear model to it, ridge or logistic regression to its optimum; or
LightGBM's trees, if the run has boosted. Several runs are one table.

Exit status: 0 the run reached it, 1 it did not (or cannot be compared).
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from scripts.joined.centralized import join_tables, read_sources
from scripts.joined.models import TREES, Problem, grow_trees, tree_metrics
from tp_flower.errors import TPFlowerError
from tp_flower.methods.boost import BOOST
from tp_flower.query import Query
from tp_flower.reports.console import (
    format_bytes,
    format_count,
    format_seconds,
    format_value,
)
from tp_flower.reports.records import COMPLETED, REPORT_FILE
from tp_flower.settings import Settings

# how much worse or better than the optimum the run may be: CG and ADMM end close to
# the optimum, SGD's step size keeps it at a distance
MARGINS = {"cg": 0.002, "admm": 0.002, "sgd": 0.01}
BEHIND = 0.01
"""How much worse boosted trees may be than LightGBM on the joined table."""

METRICS = {
    "auc": "test AUC",
    "log_loss": "test log loss",
    "rmse": "test RMSE",
    "r2": "test R2",
}


class CompareError(Exception):
    """The report cannot be read, or there is nothing to compare."""


def main(arguments: Sequence[str]) -> int:
    """Print the comparison; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    text = "folder with a run's report.json"
    parser.add_argument("output_dirs", nargs="+", type=Path, help=text)
    rows: list[dict[str, str]] = []
    verdicts: list[tuple[str, bool]] = []
    for folder in parser.parse_args(arguments).output_dirs:
        try:
            report = read_report(folder)
            rows.append(row_of_run(report))
            compared, verdict = compare(report)
        except (CompareError, TPFlowerError, duckdb.Error) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        rows.append(compared)
        verdicts.append(verdict)
    print(pd.DataFrame(rows).fillna("").to_string(index=False), end="\n\n")
    print("\n".join(text for text, _ in verdicts))
    return 0 if all(is_equal for _, is_equal in verdicts) else 1


def compare(report: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, bool]]:
    """Fit a model to the run's joined table; return its row, and the verdict."""
    settings = Settings.from_run_config(report["settings"])
    started = time.perf_counter()
    query, sources = Query.from_sql(report["query"]), read_sources(settings.tables)
    joined = join_tables(query, settings, sources)
    problem = Problem.of(joined, settings)
    check_rows(report, problem)
    if settings.method is BOOST:
        best = tree_metrics(joined, grow_trees(joined, settings))
        title = f"LightGBM, joined, {TREES} trees"
    else:
        best = problem.test_metrics(problem.optimum())
        name = (
            "ridge" if problem.mean_loss.name == "squared" else problem.mean_loss.name
        )
        title = f"{name} regression, joined"
    row = {
        "held out": settings.split_name,
        "model": title,
        "time": format_seconds(time.perf_counter() - started),
        **_metrics(best),
    }
    return row, judge(report, settings, best)


NO_COMPARISON = {
    "row-weight": "the run's joined rows have weights (row-weight or AS weight); on "
    "the joined table every row would count once",
    "events": "the label is the time of an event, which the models of the joined table "
    "do not take",
    "offset": "the run's scores have an offset, which the models of the joined table "
    "do not take",
}
"""What a report's choices have that no model of the joined table takes, and why."""


def read_report(folder: Path) -> dict[str, Any]:
    """Return a folder's report.json; CompareError where there is nothing to compare."""
    path = folder / REPORT_FILE
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CompareError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CompareError(f"{path} is no report: {error}") from error
    status, mode = report.get("status"), report.get("settings", {}).get("mode")
    if status != COMPLETED:
        raise CompareError(f"the run of {path} did not complete: {status}")
    if mode != "train":
        raise CompareError(f"{path} is of mode = {mode!r}: nothing was trained")
    settings = Settings.from_run_config(report["settings"])
    if settings.sample < 1.0 or settings.split.table:
        raise CompareError(
            f"the run is of {settings.split_name}, which the server drew from the rows "
            "that it joined: run with sample = 1 and another test-split to compare"
        )
    for key, reason in NO_COMPARISON.items():
        if report["chosen"].get(key):
            raise CompareError(f"{reason}: there is nothing to compare")
    return report


def check_rows(report: Mapping[str, Any], problem: Problem) -> None:
    """Check that the run joined the rows that DuckDB joins, and held out some."""
    joined = {"train": len(problem.mean_loss), "test": len(problem.test_loss)}
    rows = dict(report["joined-rows"])
    if coreset := report["chosen"].get("coreset"):
        # it trained on a sample of them
        rows["train"] = coreset["joined-rows"]
    if rows != joined:
        raise CompareError(f"the run joined {rows} rows, DuckDB {joined}")
    if not joined["test"]:
        raise CompareError("no joined row was held out: set test-fraction higher")


def judge(
    report: Mapping[str, Any], settings: Settings, optimum: Mapping[str, float]
) -> tuple[str, bool]:
    """Return the comparison in words, and whether the run is as good as the optimum.

    Compared are the test AUC, or the test RMSE relative to the optimum's.
    """
    run, margin = report["final"]["test"], MARGINS.get(settings.method.family, BEHIND)
    # trees have no optimum: a run may be better
    size = abs if settings.method.family in MARGINS else float
    if "auc" in optimum:
        difference = size(optimum["auc"] - run["auc"])
        text = f"AUC difference {difference:.5f}, allowed {margin:g}"
    else:
        difference = size(run["rmse"] / optimum["rmse"] - 1.0)
        text = f"RMSE difference {difference:.3%}, allowed {margin:.1%}"
    if any(settings.model_of(table["table"]) != "linear" for table in report["tables"]):
        return f"{text} for linear models; these are not: no verdict", True
    if settings.validation_share:
        return f"{text} of what is not stopped early; this is: no verdict", True
    is_equal = difference <= margin
    word = "equal" if settings.method.family in MARGINS else "close"
    word = word if is_equal else f"NOT {word.upper()}"
    return f"{text}: {word} to training on the joined table", is_equal


def row_of_run(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's row of the table."""
    return {
        "held out": Settings.from_run_config(report["settings"]).split_name,
        "model": f"tp_flower {str(report['settings']['strategy']).upper()}",
        "rounds": format_count(report["rounds"]),
        "bytes up": format_bytes(report["bytes_up"]),
        "bytes down": format_bytes(report["bytes_down"]),
        "time": format_seconds(report["seconds"]),
        **_metrics(report["final"]["test"]),
    }


def _metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    return {
        label: format_value(metrics[key])
        for key, label in METRICS.items()
        if key in metrics
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
