"""Descriptive statistics of joined rows as data frames, from a run's report."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tp_flower.reports.moments import METHOD

if TYPE_CHECKING:
    import pandas as pd

ROWS: Final = "joined rows"


def table_frame(report: Mapping[str, Any]) -> "pd.DataFrame":
    """Return the table of a run with ``describe = "table-one"``.

    A row for each variable, category and group. ``attrs`` has the ``notes``.
    """
    import pandas as pd

    entry = report[METHOD]
    groups = [group["name"] for group in entry["groups"]]
    rows: list[dict[str, Any]] = [
        {
            "variable": ROWS,
            "category": "",
            "group": group["name"],
            "count": group["rows"],
        }
        for group in entry["groups"]
    ]
    for variable in entry["variables"]:
        test = {name: variable[name] for name in ("test", "statistic", "p")}
        rows += [
            {
                "variable": variable["variable"],
                "category": row["category"],
                "group": group,
                **cell,
                **test,
            }
            for row in variable["rows"]
            for group, cell in zip(groups, row["cells"], strict=True)
        ]
    names = ("variable", "category", "group", "count", "share", "mean", "deviation")
    rates = ("events", "time", "rate")
    has_rates = any("rate" in row for row in rows)
    columns = [*names, "missing", *rates[: len(rates) * has_rates], "low", "high"]
    frame = pd.DataFrame(rows, columns=[*columns, "test", "statistic", "p"])
    numbers = [name for name in columns if name not in names[:3]]
    frame[numbers] = frame[numbers].astype(float)
    frame.attrs["notes"] = list(entry["notes"])
    return frame


def curve_frame(report: Mapping[str, Any]) -> "pd.DataFrame":
    """Return the curves of a run with ``describe = "kaplan-meier"``.

    A row for each group and time. ``attrs`` has ``groups``, with their rows and events;
    ``log_rank``, the test; and the ``notes``.
    """
    import pandas as pd

    entry = report[METHOD]
    columns = ["time", "at-risk", "events", "survival", "error", "low", "high"]
    rows = [
        {"group": curve["group"], **point}
        for curve in entry["curves"]
        for point in curve["points"]
    ]
    frame = pd.DataFrame(rows, columns=["group", *columns])
    frame[columns] = frame[columns].astype(float)
    frame.columns = frame.columns.str.replace("-", "_")
    frame.attrs["groups"] = [
        {name: curve[name] for name in ("group", "rows", "events")}
        for curve in entry["curves"]
    ]
    frame.attrs["log_rank"] = dict(entry["log-rank"])
    frame.attrs["notes"] = list(entry["notes"])
    return frame
