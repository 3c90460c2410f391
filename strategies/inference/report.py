"""The record of a run with a saved model, behind its `report.json` and the console.

Schema of `report.json` of mode "predict" or "evaluate" (`schema` 1)::

    schema, mode, status, started, seconds, output-dir, query, settings, join-steps,
    history, totals, rounds, bytes_up, bytes_down, privacy    as of mode "train"
    model     {name, version, created, loss, classes}
    tables    as of mode "train"; `dropped` is what the saved encoder leaves out
    missing   [{table, sites: [..]}]    sites of the model that were not there
    rows      {joined, label-table, partial}   joined rows; rows of the label table that
              they come from; joined rows in which a mean stands for a table's score
    predictions   {at: "server", file, columns: [..]}, or {at: "label-site",
              files: [{site, file, rows}]} below the sites' state folders; null if none
    metrics   {metric: value}           of mode "evaluate"
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from strategies.inference.manifest import Manifest
from tp_flower.reports.console import (
    add_costs,
    format_count,
    format_value,
    new_table,
    privacy_table,
)
from tp_flower.reports.records import (
    Metrics,
    RunRecord,
    TableReport,
    plain,
)
from tp_flower.settings.run import EVALUATE, SERVER


@dataclass(frozen=True)
class Delivered:
    """Predictions that a site has written."""

    site: str
    file: str
    rows: int


@dataclass(frozen=True, kw_only=True)
class ModelRunReport(RunRecord):
    """A run with a saved model: the fields of its `report.json`, see there."""

    mode: str
    manifest: Manifest
    tables: Sequence[TableReport]
    missing: Mapping[str, Sequence[str]]
    joined_rows: int
    label_rows: int
    partial_rows: int
    predictions: Mapping[str, Any] | None
    metrics: Metrics
    privacy: Mapping[str, object]


def model_run_dict(report: ModelRunReport) -> dict[str, object]:
    """Return the content of `report.json`: JSON types only."""
    manifest = report.manifest
    content = {
        **report.content(report.mode),
        **report.traffic(),
        "model": {
            "name": manifest.name,
            "version": manifest.model_version,
            "created": manifest.created,
            "loss": manifest.loss,
            "classes": manifest.classes,
        },
        "tables": report.tables,
        "missing": [
            {"table": table, "sites": sites} for table, sites in report.missing.items()
        ],
        "rows": {
            "joined": report.joined_rows,
            "label-table": report.label_rows,
            "partial": report.partial_rows,
        },
        "predictions": report.predictions,
        "metrics": report.metrics,
        "privacy": report.privacy,
    }
    return {key: plain(value) for key, value in content.items()}


def model_run_view(report: ModelRunReport) -> RenderableType:
    """Return the summary of a run for the console."""
    title = "Privacy of a row against the server: epsilon of what is covered"
    return Group(
        _result_table(report),
        *map(Text, _places(report.predictions)),
        privacy_table(report.privacy, title),
    )


def _result_table(report: ModelRunReport) -> Table:
    title = "Evaluation" if report.mode == EVALUATE else "Predictions"
    table = new_table(title, ("model",), (str(report.manifest.model),))
    label_table = report.manifest.label_table
    table.add_row("joined rows", format_count(report.joined_rows))
    table.add_row(Text(f"rows of {label_table}"), format_count(report.label_rows))
    table.add_row("with a mean in place of scores", format_count(report.partial_rows))
    for alias, sites in report.missing.items():
        table.add_row(Text(f"missing of {alias}"), Text(", ".join(sites)))
    for name, value in report.metrics.items():
        table.add_row(name.replace("_", " "), format_value(value))
    counts = {"rounds": len(report.history)}
    add_costs(table, counts, report.bytes_up, report.bytes_down, report.seconds)
    return table


def _places(predictions: Mapping[str, Any] | None) -> list[str]:
    """Return lines that say where the predictions are."""
    if predictions is None:
        return []
    if predictions["at"] == SERVER:
        return [f"Predictions: {predictions['file']}"]
    return [
        f"Predictions of site {file.site}: {file.file} in its state folder "
        f"({format_count(file.rows)} rows)"
        for file in predictions["files"]
    ]
