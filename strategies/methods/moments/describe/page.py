"""The sections of a report's page, and of the console, about described rows."""

from collections.abc import Callable
from functools import partial
from typing import Final

from strategies.methods.moments.errors_page import number_column
from tp_flower.methods.moments.describe.settings import KAPLAN_MEIER
from tp_flower.reports import blocks
from tp_flower.reports.console import format_count, format_value

HIDDEN: Final = "*"
NOTHING: Final = "-"
MOST_POINTS: Final = 24


def description(moments: blocks.Record) -> blocks.Blocks:
    """Yield the table, or the curves, of a run that describes its joined rows."""
    notes = " ".join(moments.texts("notes"))
    if moments.text("describe") == KAPLAN_MEIER:
        yield from _curves(moments, notes)
    else:
        yield _table(moments, notes)


def _table(moments: blocks.Record, notes: str) -> blocks.Table:
    """Return the table: a row for each number, category and count of missing values."""
    groups = moments.records("groups")
    has_hidden = moments.amount("min-cell") > 1
    empty = HIDDEN if has_hidden else NOTHING
    sizes = [_size(group, empty) for group in groups]
    rows = [blocks.Record({"variable": "joined rows", "cells": sizes})]
    for variable in moments.records("variables"):
        rows += _variable(variable, empty)
    columns = [
        blocks.text_column("", "variable"),
        *(
            blocks.Column(group.text("name"), partial(_cell, index))
            for index, group in enumerate(groups)
        ),
    ]
    if moments.text("group-by"):
        columns.append(blocks.Column("p", lambda row: row.text("p")))
    title = "Joined rows"
    if group := moments.text("group-by"):
        title = f"Joined rows by {group}"
    how = (
        "Mean (standard deviation) of a number, rows (share of those with a value) of "
        "a category, events per time with the interval of 95 %; p of Pearson's "
        "chi-squared test, or of the F test of equal means."
    )
    if has_hidden:
        how += f" {HIDDEN} is hidden."
    return blocks.tabulate(title, rows, columns, f"{how} {notes}".strip())


def _cell(index: int, row: blocks.Record) -> str:
    cells = row.texts("cells")
    return cells[index] if index < len(cells) else ""


def _size(group: blocks.Record, empty: str) -> str:
    return empty if group.number("rows") is None else group.count("rows")


def _variable(variable: blocks.Record, empty: str) -> list[blocks.Record]:
    """Return the rows of a variable."""
    name = variable.text("variable")
    if variable.text("kind") == "rate":
        name = "events per time"
    show = _SHOWN.get(variable.text("kind"), _mean)
    p = variable.number("p")
    rows = []
    for row in variable.records("rows"):
        category = row.text("category")
        title = f"{name} = {category}" if category else name
        if category.startswith("["):
            title = f"{name}{category}"
        cells = [show(cell, empty) for cell in row.records("cells")]
        rows.append({"variable": title, "cells": cells})
    if rows and p is not None:
        rows[0]["p"] = f"{p:.3g}"
    missing = [row.records("cells") for row in variable.records("rows")][:1]
    has_missing = any(cell.get("missing") != 0 for cells in missing for cell in cells)
    if has_missing and "rate" not in variable.text("kind"):
        cells = [_missing(cell, empty) for cell in missing[0]]
        rows.append({"variable": f"{name} missing", "cells": cells})
    return [blocks.Record(row) for row in rows]


def _missing(cell: blocks.Record, empty: str) -> str:
    number = cell.number("missing")
    return empty if number is None else format_count(round(number))


def _mean(cell: blocks.Record, empty: str) -> str:
    mean = cell.number("mean")
    if mean is None:
        return NOTHING if cell.get("count") == 0 else empty
    deviation = cell.number("deviation")
    if deviation is None:
        return f"{mean:.4g}"
    return f"{mean:.4g} ({deviation:.4g})"


def _share(cell: blocks.Record, empty: str) -> str:
    share = cell.number("share")
    if share is None:
        return empty
    return f"{cell.count('count')} ({share:.1%})"


def _rate(cell: blocks.Record, empty: str) -> str:
    values = [cell.number(name) for name in ("rate", "low", "high")]
    if any(value is None for value in values):
        return empty
    rate, low, high = (f"{value:.3g}" for value in values if value is not None)
    return f"{rate} ({low}, {high})"


_SHOWN: Final[dict[str, Callable[[blocks.Record, str], str]]] = {
    "number": _mean,
    "category": _share,
    "rate": _rate,
}


def _curves(moments: blocks.Record, notes: str) -> blocks.Blocks:
    """Yield survival by group and time, and the test of the groups."""
    curves = moments.records("curves")
    points = [
        blocks.Record({**point.content, "group": curve.text("group")})
        for curve in curves
        for point in curve.records("points")[:MOST_POINTS]
    ]
    columns = [
        blocks.text_column("group", "group"),
        blocks.Column("time", lambda point: f"{point.amount('time'):g}"),
        blocks.count_column("at risk", "at-risk"),
        blocks.count_column("events", "events"),
        *(
            number_column(name, name, format_value)
            for name in ("survival", "error", "low", "high")
        ),
    ]
    note = (
        "Kaplan-Meier, a time as the next one of the grid; Greenwood's intervals of "
        f"95 %, on the scale of the logarithm. {notes}"
    )
    yield blocks.tabulate("Survival", points, columns, note.strip())
    test = moments.at("log-rank")
    counted = [
        blocks.Record({**curve.content, **group.content})
        for curve, group in zip(curves, test.records("groups"), strict=False)
    ]
    title = "Groups"
    if (p := test.number("p")) is not None:
        statistic = format_value(test.amount("statistic"))
        freedom = ", ".join(map(str, test.items("freedom")))
        title = f"Log-rank test: chi-squared {statistic}, {freedom} df, p = {p:.3g}"
    yield blocks.tabulate(
        title,
        counted,
        [
            blocks.text_column("group", "group"),
            blocks.count_column("rows", "rows"),
            blocks.count_column("events", "observed"),
            number_column("expected", "expected", format_value),
        ],
    )
