"""What a run with a saved model did: the record behind its `report.json`.

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
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from strategies.inference.manifest import Manifest
from tp_flower.joins.joining import JoinStep
from tp_flower.reports.console import (
    add_costs,
    format_count,
    format_value,
    new_table,
    privacy_table,
)
from tp_flower.reports.records import (
    COMPLETED,
    SCHEMA_VERSION,
    Metrics,
    RoundReport,
    TableReport,
    plain,
    record_dict,
    sum_by_table,
    table_dict,
    totals_of,
)
from tp_flower.settings import EVALUATE, SERVER


@dataclass(frozen=True)
class Delivered:
    """Predictions that a site has written.

    Attributes:
        site: the organisation.
        file: below the site's state folder.
        rows: of the file.
    """

    site: str
    file: str
    rows: int


@dataclass(frozen=True)
class ModelRunReport:
    """A run with a saved model.

    Attributes:
        mode: "predict" or "evaluate".
        manifest: of the model.
        settings: `Settings.to_dict()`.
        query: the SQL in canonical form.
        tables: one record per table, in the order of FROM.
        join_steps: one record per table, in the order of joining.
        missing: by table, the sites that were not there.
        joined_rows: rows of the join.
        label_rows: rows of the label table that are in one.
        partial_rows: joined rows in which a mean stands for a table's score.
        predictions: where they are; None if there are none.
        metrics: of mode "evaluate".
        history: one record per round.
        privacy: what left the sites, and what it cost.
        output_dir: where `report.json` is.
        started: ISO 8601, UTC.
        seconds: wall time of the run.
    """

    mode: str
    manifest: Manifest
    settings: Mapping[str, object]
    query: str
    tables: Sequence[TableReport]
    join_steps: Sequence[JoinStep]
    missing: Mapping[str, Sequence[str]]
    joined_rows: int
    label_rows: int
    partial_rows: int
    predictions: Mapping[str, object] | None
    history: Sequence[RoundReport]
    privacy: Mapping[str, object]
    output_dir: str
    started: str
    seconds: float
    metrics: Metrics = field(default_factory=dict)

    @property
    def bytes_up(self) -> int:
        """Array bytes from the sites to the server."""
        return sum(sum_by_table(item.bytes_up for item in self.history).values())

    @property
    def bytes_down(self) -> int:
        """Array bytes from the server to the sites."""
        return sum(sum_by_table(item.bytes_down for item in self.history).values())


def model_run_dict(report: ModelRunReport) -> dict[str, object]:
    """Return the content of `report.json`: JSON types only."""
    manifest = report.manifest
    content = {
        "schema": SCHEMA_VERSION,
        "mode": report.mode,
        "status": COMPLETED,
        "started": report.started,
        "seconds": report.seconds,
        "output-dir": report.output_dir,
        "query": report.query,
        "settings": report.settings,
        "model": {
            "name": manifest.model.name,
            "version": manifest.model.version,
            "created": manifest.created,
            "loss": manifest.loss,
            "classes": manifest.classes,
        },
        "tables": [table_dict(table) for table in report.tables],
        "missing": [
            {"table": table, "sites": list(sites)}
            for table, sites in report.missing.items()
        ],
        "rows": {
            "joined": report.joined_rows,
            "label-table": report.label_rows,
            "partial": report.partial_rows,
        },
        "join-steps": [record_dict(step) for step in report.join_steps],
        "predictions": report.predictions,
        "metrics": report.metrics,
        "history": [record_dict(item) for item in report.history],
        "totals": totals_of(report.history),
        "rounds": len(report.history),
        "bytes_up": report.bytes_up,
        "bytes_down": report.bytes_down,
        "privacy": report.privacy,
    }
    return {key: plain(value) for key, value in content.items()}


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
