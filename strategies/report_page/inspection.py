"""What matters to a saved model, on the page: importances, shares, groups of rows."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from strategies.report_page import convergence
from strategies.report_page.plots import (
    Axis,
    Interval,
    Series,
    bar_figure,
    interval_figure,
    line_figure,
    linear_axis,
)
from tp_flower.reports import blocks, console
from tp_flower.reports.blocks import NOTES, Blocks, Record
from tp_flower.reports.inspection import GROUPS, IMPORTANCES

MOST_ITEMS: Final = 30
MOST_METRICS: Final = 2
MOST_CURVES: Final = 8
Show = Callable[[float | None], str]
_HEADS: Final = {
    "bias": "prediction − label",
    "actual": "share",
    "predicted": "mean probability",
    "chosen": "predicted",
    "recall": "of these found",
    "false_alarms": "false alarms",
}


def sections(report: Record) -> Blocks:
    """Yield importances and shares of tables and features, and metrics by group."""
    importances = report.at(IMPORTANCES)
    items = importances.records("items")
    titles = blocks.table_titles(report, {item.text("table"): 0 for item in items})
    measured = {name for item in items for name in item.at("falls").content}
    measured -= {"accuracy"}  # few rows change their class
    metrics = [name for name in convergence.METRIC_NAMES if name in measured]
    metrics = metrics[:MOST_METRICS]
    yield _table(items, titles, metrics, report)
    features = [item for item in items if item.text("feature")]
    if metrics:
        yield _importances(features, titles, metrics[0], report)
    yield _shares(features, titles)
    with_curves = [item for item in features if item.records("curve")]
    note = NOTES["dependence"]
    for item in sorted(with_curves, key=partial(_order, metrics))[:MOST_CURVES]:
        yield _curve(_name({}, item), item, note)
        note = ""
    yield _groups(report)


def _table(
    items: Sequence[Record],
    titles: Mapping[str, str],
    metrics: Sequence[str],
    report: Record,
) -> blocks.Table:
    """Return the importances and shares of all tables and features."""
    columns = [blocks.Column("", partial(_name, titles), is_text=True)]
    for metric in metrics:
        numbers = [item.at("falls").items(metric) for item in items]
        show = console.value_format(number for pair in numbers for number in pair)
        cell = partial(_fall, metric, show)
        name = convergence.metric_name(metric, report)
        columns.append(blocks.Column(f"{name}, worse by", cell))
    show = console.value_format(item.number("share") for item in items)
    columns.append(blocks.Column("moves the score by", partial(_share, show)))
    repeats = blocks.count_text(report.at(IMPORTANCES).amount("repeats"), "time")
    note = f"{NOTES['importances'].format(repeats)} {NOTES['moves']}"
    return blocks.tabulate("Importances", items, columns, note)


def _fall(metric: str, show: Show, item: Record) -> str:
    numbers = item.at("falls").items(metric)
    return " ± ".join(map(show, numbers)) or "-"


def _share(show: Show, item: Record) -> str:
    return show(item.number("share"))


def _importances(
    items: Sequence[Record], titles: Mapping[str, str], metric: str, report: Record
) -> blocks.Block | None:
    """Return by how much a metric is worse with features permuted, as a plot."""
    intervals = []
    for item in items:
        numbers = item.at("falls").items(metric)
        if numbers and None not in numbers:
            mean, deviation = numbers
            ends = (mean - deviation, mean + deviation)
            intervals.append(Interval(_name(titles, item), mean, *ends))
    largest = sorted(intervals, key=lambda each: -each.value)[:MOST_ITEMS]
    name = convergence.metric_name(metric, report)
    return interval_figure(
        f"How much worse the {name} is with a feature's values permuted", largest
    )


def _shares(items: Sequence[Record], titles: Mapping[str, str]) -> blocks.Block | None:
    """Return how far features move the scores, as bars."""
    bars = [
        (_name(titles, item), [share])
        for item in items
        if (share := item.number("share")) is not None
    ]
    largest = sorted(bars, key=lambda bar: -bar[1][0])[:MOST_ITEMS]
    return bar_figure(
        "How far each feature moves the score, on average",
        largest,
        console.value_format(bar[1][0] for bar in largest),
    )


def _order(metrics: Sequence[str], item: Record) -> float:
    """Return by what features are sorted whose curves are shown: the largest first."""
    falls = item.at("falls").items(metrics[0]) if metrics else []
    return -(falls[0] or 0.0) if falls else 0.0


def _curve(name: str, item: Record, note: str) -> blocks.Block | None:
    """Return the mean score by values of a feature: a line, or bars of categories."""
    title = f"Mean score by {name}"
    points = item.records("curve")
    scores = [point.number("score") for point in points]
    show = console.value_format(scores)
    numbers = [
        (value, score)
        for point in points
        if (value := point.number("value")) is not None
        and (score := point.number("score")) is not None
    ]
    if len(numbers) == len(points):
        across = Axis(name, linear_axis, console.value_format(x for x, _ in numbers))
        up = Axis("mean score", linear_axis, show)
        return line_figure(title, across, up, [Series("all rows", numbers)], note)
    bars = [
        (point.text("value"), [score])
        for point in points
        if (score := point.number("score")) is not None
    ]
    return bar_figure(title, bars, show, ("mean score",), note)


def _name(titles: Mapping[str, str], item: Record) -> str:
    table = item.text("table")
    feature = item.text("feature")
    name = f"{table}.{feature}" if feature else titles.get(table, table)
    site = item.text("site")
    return f"{name} at {site}" if site else name


def _groups(report: Record) -> blocks.Table:
    """Return the metrics of the groups of rows, and of all rows."""
    entries = report.at(GROUPS)
    groups = entries.records("items")
    names = [
        name
        for name in (*convergence.METRIC_NAMES, *_HEADS)
        if any(name in group.numbers() for group in groups)
    ]
    if "log_loss" in names:
        names.remove("loss")
    if "actual" in names:
        # the bias is the difference of two columns
        names.remove("bias")
    columns = [
        blocks.text_column(entries.text("by"), "group"),
        blocks.count_column("rows", "rows"),
    ]
    if any(group.text("site") for group in groups):
        columns.insert(1, blocks.text_column("site", "site"))
    for name in names:
        show = console.value_format(group.number(name) for group in groups)
        head = _HEADS.get(name) or convergence.metric_name(name, report)
        columns.append(blocks.Column(head, partial(_cell, name, show)))
    note = f"{NOTES['groups']} {NOTES['group-shares']}" if "actual" in names else ""
    title = f"Metrics by {entries.text('by')}"
    return blocks.tabulate(title, groups, columns, note or NOTES["groups"])


def _cell(name: str, show: Show, group: Record) -> str:
    return show(group.number(name))
