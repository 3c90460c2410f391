"""The console of a run: numbers for people, a line per epoch, the summary."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tp_flower.reports.records import (
    COMPLETED,
    Metrics,
    RoundReport,
    RunReport,
    sum_by_table,
)

TESTED = ("loss", "auc", "accuracy", "rmse", "r2", "rms_distance")
"""Metrics of tested rows that the line of an epoch shows."""

OWN_MODELS: Final = {
    "personal": "own model",
    "global": "one model for all",
    "local": "model of the site alone",
}
"""The models that a personalised run compares, by their names in the report."""


def format_count(number: int) -> str:
    """Return a count with thousands set apart.

    >>> format_count(1234567)
    '1,234,567'
    """
    return f"{number:,}"


def format_bytes(number: float) -> str:
    """Return an amount of data in decimal units, three digits at least.

    >>> format_bytes(999), format_bytes(1500), format_bytes(2.5e9)
    ('999 B', '1.50 kB', '2.50 GB')
    """
    if number < 1000:
        return f"{number:.0f} B"
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        # 999.5 would be printed as 1000
        if number < 999.5:
            return f"{_three_digits(number)} {unit}"
    return f"{_three_digits(number / 1000)} TB"


def format_seconds(seconds: float) -> str:
    """Return a time span in the unit that reads best.

    >>> format_seconds(0.0042), format_seconds(12.34), format_seconds(125)
    ('4.20 ms', '12.3 s', '2 min 5 s')
    >>> format_seconds(7260)
    '2 h 1 min'
    """
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1000)} ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_value(value: float | None) -> str:
    """Return a metric with the digits that tell runs apart.

    >>> format_value(0.73219), format_value(41.23456), format_value(1e-7)
    ('0.7322', '41.2346', '1.00e-07')
    >>> format_value(None), format_value(float("nan"))
    ('-', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4f}"


def _three_digits(number: float) -> str:
    """Format a number from 0 up to 1000 with three digits."""
    decimals = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{decimals}f}"


def name_table(alias: str, name: str) -> str:
    """Return a table's alias with the name of its table, where that is another.

    >>> name_table("f", "flights"), name_table("f", "f"), name_table("f", "")
    ('f (flights)', 'f', 'f')
    """
    return alias if name in {"", alias} else f"{alias} ({name})"


def new_table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return an empty table; a text column without a heading is not wrapped."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in texts:
        table.add_column(heading, no_wrap=not heading)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def add_costs(
    table: Table, counts: Mapping[str, int], up: int, down: int, seconds: float
) -> None:
    """Close a table with counts, the bytes of both ways and the time."""
    table.add_section()
    for name, count in counts.items():
        table.add_row(name, format_count(count))
    table.add_row("bytes up", format_bytes(up))
    table.add_row("bytes down", format_bytes(down))
    table.add_row("time", format_seconds(seconds))


def epoch_line(rounds: Sequence[RoundReport], epochs: int, seconds: float) -> str:
    """Return the console line of an epoch, ``seconds`` after the first one's start."""
    last = rounds[-1]
    up = sum(sum_by_table(item.bytes_up for item in rounds).values())
    down = sum(sum_by_table(item.bytes_down for item in rounds).values())
    parts = [
        f"epoch {last.epoch:>{len(str(epochs))}}/{epochs}",
        *_metrics_parts("train", last.train, ("loss",)),
        *_metrics_parts("test", last.test, TESTED),
    ]
    if last.primal_residual is not None and last.dual_residual is not None:
        primal, dual = last.primal_residual, last.dual_residual
        parts.append(f"residuals {primal:.1e} {dual:.1e}")
    parts.append(f"{format_bytes(up)} up, {format_bytes(down)} down")
    left = seconds / max(last.epoch, 1) * (epochs - last.epoch)
    if left > 0:
        parts.append(f"{format_seconds(left)} left")
    return "  |  ".join(parts)


def _metrics_parts(name: str, metrics: Metrics, keys: Sequence[str]) -> list[str]:
    values = [f"{key} {format_value(metrics[key])}" for key in keys if key in metrics]
    return [f"{name} {' '.join(values)}"] if values else []


def summary(report: RunReport) -> RenderableType:
    """Return the tables that close a run: the join, the result and its cost."""
    privacy = privacy_table(
        report.privacy,
        "Privacy of a row against the server: epsilon of what is covered "
        "(report.json lists all)",
    )
    return Group(
        _tables_table(report),
        _result_table(report),
        *_personal_metrics(report),
        *_warnings(report),
        privacy,
    )


def _personal_metrics(report: RunReport) -> list[Table]:
    """Return the metrics of personalised models beside others, if there are any."""
    means = report.personal.get("means")
    if not isinstance(means, Mapping):
        return []
    models = [OWN_MODELS[str(name)] for name in means]
    table = new_table("Test metrics, means of the sites", ("",), models)
    for metric in next(iter(means.values()))["test"]:
        values = [metrics["test"].get(metric) for metrics in means.values()]
        table.add_row(metric.replace("_", " "), *map(format_value, values))
    return [table]


def _warnings(report: RunReport) -> list[Text]:
    """Return the warnings about a coreset."""
    coreset = report.chosen.get("coreset")
    if not isinstance(coreset, Mapping):
        return []
    capped = [f"a total was lowered: {text}" for text in coreset.get("capped", [])]
    return [
        Text(f"Coreset: {text}") for text in (*capped, *coreset.get("warnings", []))
    ]


def _tables_table(report: RunReport) -> Table:
    numbers = ("rows", "features", "shards", "joined rows per row")
    table = new_table("Tables", ("table",), numbers)
    for item in report.tables:
        counts = (item.rows, item.features, item.shards)
        spread = item.multiplicity
        table.add_row(
            # names come from the query: markup in them is text
            Text(name_table(item.table, item.name)),
            *map(format_count, counts),
            f"{spread['min']:,} .. {spread['mean']:.2f} .. {spread['max']:,}",
        )
    return table


def _result_table(report: RunReport) -> Table:
    table = new_table("Result", ("",), ("train", "test"))
    rows = (report.joined_rows_train, report.joined_rows_test)
    table.add_row("joined rows", *map(format_count, rows))
    coreset = report.chosen.get("coreset")
    if isinstance(coreset, Mapping):
        table.add_row("drawn from", format_count(int(coreset["joined-rows"])), "")
    for name in dict.fromkeys([*report.final_train, *report.final_test]):
        pair = (report.final_train.get(name), report.final_test.get(name))
        table.add_row(name.replace("_", " "), *map(format_value, pair))
    counts = {"epochs": report.epochs, "rounds": report.rounds}
    add_costs(table, counts, report.bytes_up, report.bytes_down, report.seconds)
    if report.status != COMPLETED:
        table.add_row("status", Text(report.status), "")
    return table


def privacy_table(privacy: Mapping[str, object], title: str) -> Table:
    """Return the epsilon of each site's rows, and the releases it does not cover."""
    table = new_table(title, ("table at site",), ("epsilon", "delta"))
    table.add_column("not covered")
    totals = privacy.get("totals", [])
    listed = totals if isinstance(totals, list) else []
    # nodes have another order in every run
    for total in sorted(listed, key=lambda total: (total["table"], total["site"])):
        covered = total["epsilon"]
        table.add_row(
            Text(f"{total['table']} at {total['site']}"),
            format_value(covered) if covered else "none",
            f"{total['delta']:g}",
            Text(", ".join(total["uncovered"])),
        )
    return table
