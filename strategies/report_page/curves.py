"""How predictions compare with labels, as curves: calibration, thresholds."""

from collections.abc import Callable
from functools import partial
from typing import Final

from strategies.report_page.plots import (
    Axis,
    Series,
    axis_from_zero,
    line_figure,
    linear_axis,
)
from tp_flower.reports import blocks, console
from tp_flower.reports.blocks import NOTES, Block, Blocks, Record

ROWS: Final = "rows not trained on"
EVALUATED: Final = "rows of the query"
COLUMNS: Final = ("share", "recall", "false_alarms", "precision")


def _rows_of(report: Record) -> str:
    """Return which rows the curves are of: an evaluation has metrics of all rows."""
    return EVALUATED if report.at("metrics") else ROWS


def tenths(report: Record) -> Block | None:
    """Return the mean label against the mean prediction, by tenths.

    Of two classes, the share of the second against its probability.
    """
    groups = [item.numbers() for item in report.records("deciles")]
    groups = [group for group in groups if group.keys() >= {"predicted", "actual"}]
    groups.sort(key=lambda group: (group["predicted"], group["actual"]))
    points = [(group["predicted"], group["actual"]) for group in groups]
    intervals = [
        (group["low"], group["high"])
        for group in groups
        if group.keys() >= {"low", "high"}
    ]
    show = console.value_format(value for point in points for value in point)
    title, across, up = "Label against prediction", "mean prediction", "mean label"
    notes = [NOTES["tenths"]]
    same = "prediction = label"
    if len(intervals) < len(groups):
        intervals = []
    if intervals:
        notes.append(NOTES["intervals"])
    if classes := list(report.at("confusion").content):
        name = classes[-1]
        title, across, up = "Calibration", f"probability of {name}", f"share of {name}"
        same = "probability = share"
    figures = report.at("calibration").numbers()
    for note, needed in (("calibration", {"slope", "intercept"}), ("brier", {"brier"})):
        if figures.keys() >= needed:
            notes.append(NOTES[note].format(**figures))
    x = Axis(across, linear_axis, show)
    y = Axis(up, linear_axis, show)
    equal = [(predicted, predicted) for predicted, _ in points]
    lines = [
        Series(_rows_of(report), points, intervals=intervals),
        Series(same, equal),
    ]
    return line_figure(title, x, y, lines, " ".join(notes))


def thresholds(report: Record) -> Blocks:
    """Yield what is found above each threshold of the probability of a class."""
    points = [item.numbers() for item in report.records("curve")]
    points = [point for point in points if point.keys() >= {*COLUMNS}]
    points.sort(key=lambda point: point["share"])
    classes = list(report.at("confusion").content)
    if not points or not classes:
        return
    name = classes[-1]
    rate = points[-1]["precision"]
    rows = _rows_of(report)
    share = _axis("share of the rows taken")
    recall_axis = _axis(f"{name} found")
    diagonal = [(0.0, 0.0), (1.0, 1.0)]

    def line(across: str, up: str, start: bool) -> Series:
        line_points = [(point[across], point[up]) for point in points]
        return Series(rows, [(0.0, 0.0), *line_points] if start else line_points)

    yield line_figure(
        "ROC curve",
        _axis("false alarms"),
        recall_axis,
        [line("false_alarms", "recall", True), Series("at random", diagonal)],
        NOTES["roc"].format(name),
    )
    recall = line("recall", "precision", False)
    level = [(position, rate) for position in (recall.points[0][0], 1.0)]
    yield line_figure(
        "Precision and recall",
        _axis(f"{name} found (recall)"),
        _axis("precision"),
        [recall, Series("at random", level)],
        NOTES["precision"].format(name),
    )
    yield line_figure(
        "Cumulative gains",
        share,
        recall_axis,
        [line("share", "recall", True), Series("at random", diagonal)],
        NOTES["gains"].format(name),
    )
    lifts = [(point["share"], point["precision"] / rate) for point in points if rate]
    yield line_figure(
        "Lift",
        share,
        Axis("times as many as at random", axis_from_zero, "{:.2f}".format),
        [Series(rows, lifts), Series("at random", [(at, 1.0) for at, _ in lifts])],
        NOTES["lift"].format(name),
    )
    heads = {"probability": f"probability of {name}", "share": "share of the rows"}
    heads |= {"recall": f"{name} found", "false_alarms": "false alarms"}
    columns = [blocks.count_column("rows taken", "rows")]
    for key in ("probability", *COLUMNS):
        show = console.value_format(point.get(key) for point in points)
        columns.append(blocks.Column(heads.get(key, key), partial(_cell, key, show)))
    yield blocks.tabulate(
        "All thresholds", map(Record, points), columns, is_folded=True
    )


def _cell(key: str, show: Callable[[float | None], str], point: Record) -> str:
    return show(point.number(key))


def _axis(title: str) -> Axis:
    """Return an axis of shares, from 0 to 1."""
    return Axis(title, axis_from_zero, "{:.3f}".format)
