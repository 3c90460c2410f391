"""The section of a report's page about a search, and its view on a console."""

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Group, RenderableType

from strategies.report_page.plots import Interval, interval_figure
from tp_flower.errors import TPFlowerError
from tp_flower.reports import blocks
from tp_flower.reports.blocks import Blocks, Record, tabulate
from tp_flower.reports.console import text_table, value_format

MOST_ROWS: Final = 40
SEARCH: Final = "search"
_NOTE: Final = (
    "Means over the {} folds ({}), of the rows held out; +- is the standard deviation "
    "of the loss among folds. The model is trained by the first row's settings."
)
_RANGE: Final = "The mean loss of each candidate, and its range over the folds"


def sections(report: Record) -> Blocks:
    """Yield the candidates of a search, the best first, and a plot of their losses."""
    section = report.at(SEARCH)
    if not section:
        return
    yield candidates(section)
    yield interval_figure(_RANGE, _intervals(section))
    yield costs(section)


def candidates(section: Record) -> blocks.Table:
    """Return the table of the candidates, the best first."""
    ranked = _ranked(section)
    columns = [_setting(name) for name in _keys(ranked, "settings")]
    columns = columns or [
        blocks.Column("settings", lambda _: "as they are", is_text=True)
    ]
    rows = [each.content for each in ranked]
    columns += [_number("loss", rows, "loss"), _number("+-", rows, "deviation")]
    of_metrics = [each.at("metrics").content for each in ranked]
    for name in _keys(ranked, "metrics"):
        columns.append(_number(name, of_metrics, "metrics", name))
    columns.append(_number("epochs", rows, "epochs"))
    note = _NOTE.format(section.count("folds"), section.text("split"))
    if len(ranked) > MOST_ROWS:
        note += f" The best {MOST_ROWS} of {len(ranked)}; report.json has all."
    return tabulate("Search", ranked[:MOST_ROWS], columns, note)


def costs(section: Record) -> blocks.Table:
    """Return the table of what the set-up and the fits of each fold have cost."""
    fits = section.records("fits")
    shared = section.at("set-up")
    folds = sorted({round(each.amount("fold")) for each in fits})
    rows = [("set-up, once", *_cost_cells([shared]))]
    rows += [
        (
            f"fold {fold + 1}",
            *_cost_cells([e for e in fits if round(e.amount("fold")) == fold]),
        )
        for fold in folds
    ]
    head = ("", "rounds", "MB", "seconds")
    return blocks.Table("What the search took", head, rows)


def _cost_cells(records: list[Record]) -> tuple[str, ...]:
    rounds, size, seconds = (
        sum(each.amount(key) for each in records)
        for key in ("rounds", "bytes", "seconds")
    )
    return f"{rounds:.0f}", f"{size / 1e6:.3g}", f"{seconds:.3g}"


def search_view(report: Mapping[str, object]) -> RenderableType:
    """Return the candidates of a search for the console."""
    table = candidates(Record(report).at(SEARCH))
    return Group(
        table.title, text_table(table.head, table.rows, words=table.words), table.note
    )


def search_plot(report: Mapping[str, object]) -> str:
    """Return the plot of a search's losses as SVG."""
    figure = interval_figure(_RANGE, _intervals(Record(report).at(SEARCH)))
    if figure is None:
        raise TPFlowerError("no candidate of the search has a finite loss")
    return str(figure.svg)


def _ranked(section: Record) -> list[Record]:
    """Return the candidates, the lowest loss first, those that diverged last."""
    listed = section.records("candidates")
    infinite = float("inf")
    return sorted(
        listed, key=lambda e: infinite if e.number("loss") is None else e.amount("loss")
    )


def _intervals(section: Record) -> list[Interval]:
    """Return the mean loss of the best candidates, with the least and the largest."""
    fits = section.records("fits")
    numbered = list(enumerate(section.records("candidates")))
    intervals = []
    for number, each in numbered:
        losses = [
            loss
            for fit in fits
            if fit.number("candidate") == number
            and (loss := fit.number("loss")) is not None
        ]
        mean = each.number("loss")
        if mean is None or not losses:
            continue
        settings = each.at("settings").content.items()
        name = ", ".join(f"{key} = {value}" for key, value in settings)
        intervals.append(Interval(name or "settings", mean, min(losses), max(losses)))
    return sorted(intervals, key=lambda each: each.value)[:MOST_ROWS]


def _keys(records: list[Record], part: str) -> list[str]:
    """Return the keys that a part of any record has."""
    return list(dict.fromkeys(key for each in records for key in each.at(part).content))


def _setting(name: str) -> blocks.Column:
    """Return the column of a setting; "-" where a candidate leaves it as it is."""
    return blocks.Column(
        name, lambda each: str(each.at("settings").content.get(name, "-")), is_text=True
    )


def _number(head: str, rows: list[Any], *path: str) -> blocks.Column:
    """Return the column of a number, by its path in a candidate's record."""
    show = value_format([Record(row).number(path[-1]) for row in rows])

    def cell(each: Record) -> str:
        for key in path[:-1]:
            each = each.at(key)
        return show(each.number(path[-1]))

    return blocks.Column(head, cell)
