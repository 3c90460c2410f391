"""What a user sees of a run with a saved model."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tp_flower.console import (
    format_bytes,
    format_count,
    format_seconds,
    format_value,
    privacy_table,
)
from tp_flower.prediction_report import ModelRunReport
from tp_flower.run_modes import EVALUATE, SERVER


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
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("model")
    table.add_column(str(report.manifest.model), justify="right")
    label_table = report.manifest.label_table
    table.add_row("joined rows", format_count(report.joined_rows))
    table.add_row(Text(f"rows of {label_table}"), format_count(report.label_rows))
    table.add_row("with a mean in place of scores", format_count(report.partial_rows))
    for alias, sites in report.missing.items():
        table.add_row(Text(f"missing of {alias}"), Text(", ".join(sites)))
    for name, value in report.metrics.items():
        table.add_row(name.replace("_", " "), format_value(value))
    table.add_section()
    table.add_row("rounds", format_count(len(report.history)))
    table.add_row("bytes up", format_bytes(report.bytes_up))
    table.add_row("bytes down", format_bytes(report.bytes_down))
    table.add_row("time", format_seconds(report.seconds))
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
