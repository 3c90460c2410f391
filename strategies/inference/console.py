"""What a user sees of a run with a saved model."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from strategies.inference.report import ModelRunReport
from tp_flower.reports.console import (
    add_costs,
    format_count,
    format_value,
    new_table,
    privacy_table,
)
from tp_flower.settings import EVALUATE, SERVER


def model_run_view(report: ModelRunReport) -> RenderableType:
    """Return what closes a run: what was scored, where it is, what it cost."""
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
    """Return where the predictions are, in lines."""
    if predictions is None:
        return []
    if predictions["at"] == SERVER:
        return [f"Predictions: {predictions['file']}"]
    return [
        f"Predictions of site {own['site']}: {own['file']} in its state folder "
        f"({format_count(own['rows'])} rows)"
        for own in predictions["files"]
    ]
