"""The model: the methods' sections, survival, and the tables' contributions."""

from itertools import pairwise

from strategies import registry
from strategies.report_page.plots import (
    Axis,
    Point,
    Series,
    axis_from_zero,
    bar_figure,
    line_figure,
)
from tp_flower.reports import blocks, console

MOST_BARS = 20
MOST_STRATA = 6  # whose curves can be told apart
TIME = Axis("time", axis_from_zero, "{:,.6g}".format)
SURVIVAL = Axis("probability of no event so far", axis_from_zero, "{:.3f}".format)


def model(report: blocks.Record) -> blocks.Blocks:
    """Yield the methods' sections, and the tables' contributions."""
    for page in registry.pages():
        yield from page(report)
    yield _survival(report.records("survival"))
    yield _shares(report)
    coefficients = report.at("coefficients")
    for alias, title in blocks.table_titles(report, coefficients.content).items():
        yield _coefficients(title, coefficients.records(alias))


def _survival(strata: list[blocks.Record]) -> blocks.Block | None:
    """Return the survival of a score of 0 in the first strata, as steps over time."""
    note = ""
    if len(strata) > MOST_STRATA:
        note = f"The first {MOST_STRATA} of {len(strata)} strata."
    return line_figure(
        "Survival of a score of 0",
        TIME,
        SURVIVAL,
        [
            Series(_stratum(each), points)
            for each in strata[:MOST_STRATA]
            if (points := _steps(each.items("times"), each.items("survival")))
        ],
        note,
    )


def _stratum(entry: blocks.Record) -> str:
    number = entry.number("stratum")
    return "" if number is None else f"stratum {number:g}"


def _steps(times: list[float], survival: list[float]) -> list[Point]:
    """Return the corners of a curve that falls at each time, from 1 at 0.

    >>> _steps([2.0], [0.5])
    [(0.0, 1.0), (2.0, 1.0), (2.0, 0.5)]
    """
    corners = [(0.0, 1.0), *zip(times, survival, strict=False)]
    steps = [
        ((at, before), (at, after)) for (_, before), (at, after) in pairwise(corners)
    ]
    return [corners[0], *(point for step in steps for point in step)]


def _shares(report: blocks.Record) -> blocks.Block | None:
    """Return each table's share of the scores' variance."""
    tables = report.at("contributions")
    shares = {
        alias: share
        for alias in tables.content
        if (share := tables.at(alias).number("share")) is not None
    }
    return bar_figure(
        "Share of the scores' variance, by table",
        [
            (title, [shares[alias]])
            for alias, title in blocks.table_titles(report, shares).items()
        ],
        _per_cent,
        ("share",),
        blocks.NOTES["shares"],
    )


def _per_cent(share: float) -> str:
    """Return a share in per cent.

    >>> _per_cent(0.123), _per_cent(0.0004)
    ('12.3 %', '0.04 %')
    """
    if 0 < abs(share) < 0.001:
        return f"{100 * share:.2g} %"
    return f"{100 * share:.1f} %"


def _coefficients(table: str, entries: list[blocks.Record]) -> blocks.Block | None:
    """Return the largest coefficients or gains of a table."""
    bars = [
        (_feature(entry), [value])
        for entry in entries
        if (value := entry.number("value")) is not None
    ]
    largest = sorted(bars, key=lambda bar: -abs(bar[1][0]))[:MOST_BARS]
    note = ""
    if len(largest) < len(bars):
        note = f"The {len(largest)} largest of {len(bars)}. "
    has_trees = any(entry.text("output") == "gain" for entry in entries)
    meaning = blocks.NOTES["gain" if has_trees else "coefficients"]
    return bar_figure(
        f"{'Gain by feature' if has_trees else 'Coefficients'} of {table}",
        largest,
        console.value_format(bar[1][0] for bar in largest),
        note=f"{note}{meaning} Its sites allow them to be shown.",
    )


def _feature(entry: blocks.Record) -> str:
    output = entry.get("output")
    suffix = ""
    if output not in (None, "", "score", "gain"):
        suffix = f", output {output}"
    return f"{entry.text('feature') or '?'}{suffix}"
