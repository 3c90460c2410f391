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
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from scripts.joined.centralized import join_tables, read_sources
from scripts.joined.models import Problem
from tp_flower.errors import TPFlowerError
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
    parser.add_argument("output_dir", type=Path, help="folder with a run's report.json")
    try:
        report = read_report(parser.parse_args(arguments).output_dir)
        settings = Settings.from_run_config(report["settings"])
        started = time.perf_counter()
        query, sources = Query.from_sql(report["query"]), read_sources(settings.tables)
        problem = Problem.of(join_tables(query, settings, sources), settings)
        check_rows(report, problem)
        optimum = problem.test_metrics(problem.optimum())
        seconds = time.perf_counter() - started
        text, is_equal = judge(report, settings, optimum)
    except (CompareError, TPFlowerError, duckdb.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    name = "ridge" if problem.loss.name == "squared" else problem.loss.name
    print_comparison(report, f"{name} regression, joined", optimum, seconds)
    print(text)
    return 0 if is_equal else 1


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
    if report["chosen"].get("row-weight"):
        raise CompareError(
            "the run's joined rows have weights (row-weight or AS weight); on the "
            "joined table every row would count once: there is nothing to compare"
        )
    return report


def check_rows(report: Mapping[str, Any], problem: Problem) -> None:
    """Check that the run joined the rows that DuckDB joins, and held out some."""
    joined = {"train": len(problem.train_labels), "test": len(problem.test_labels)}
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
    run, margin = report["final"]["test"], MARGINS[settings.family]
    if "auc" in optimum:
        difference = abs(run["auc"] - optimum["auc"])
        text = f"AUC difference {difference:.5f}, allowed {margin:g}"
    else:
        difference = abs(run["rmse"] / optimum["rmse"] - 1.0)
        text = f"RMSE difference {difference:.3%}, allowed {margin:.1%}"
    if any(settings.model_of(table["table"]) != "linear" for table in report["tables"]):
        return f"{text} for linear models; these are not: no verdict", True
    is_equal = difference <= margin
    word = "equal to" if is_equal else "NOT EQUAL to"
    return f"{text}: {word} training on the joined table", is_equal


def print_comparison(
    report: Mapping[str, Any], title: str, optimum: Mapping[str, float], seconds: float
) -> None:
    """Print the run and the optimum side by side."""
    # the joined rows are the same for both, as was checked
    counts = {part: format_count(n) for part, n in report["joined-rows"].items()}
    final = report["final"]["test"]
    rows = {
        **{f"joined rows, {part}": [count, count] for part, count in counts.items()},
        "rounds": [format_count(report["rounds"]), ""],
        "bytes up": [format_bytes(report["bytes_up"]), ""],
        "bytes down": [format_bytes(report["bytes_down"]), ""],
        "time": [format_seconds(report["seconds"]), format_seconds(seconds)],
        **{
            label: [format_value(final.get(key)), format_value(optimum[key])]
            for key, label in METRICS.items()
            if key in optimum
        },
    }
    ours = f"tp_flower {str(report['settings']['strategy']).upper()}"
    table = pd.DataFrame.from_dict(rows, orient="index", columns=[ours, title])
    print(table.to_string(), end="\n\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
