"""What each table adds to the predictions, and the coefficients that sites show."""

from collections.abc import Mapping
from typing import Any

from tp_flower.console import format_value
from tp_flower.report_page.bar_plot import Bar, Measure, bar_figure
from tp_flower.report_page.blocks import Block, Section
from tp_flower.report_page.costs import table_names, title_of
from tp_flower.report_page.reading import Report, mapping, number, records, text

MOST_BARS = 20


def contributions(report: Report) -> Section:
    """Return the shares of the score's variance and the coefficients."""
    blocks = [_shares(report), *_coefficients(report)]
    title = "What the tables contribute"
    return Section("contributions", title, [own for own in blocks if own])


def _shares(report: Report) -> Block | None:
    found = mapping(report.get("contributions"))
    shares = {
        str(table): share
        for table, own in found.items()
        if (share := number(mapping(own).get("share"))) is not None
    }
    bars = [
        Bar(title_of(report, name), (shares[name],))
        for name in table_names(report, list(shares))
    ]
    return bar_figure(
        "Share of the scores' variance, by table",
        Measure("per cent", ("share",), _per_cent, 0.01),
        bars,
        "How much of what tells joined rows apart comes from each table: the "
        "covariance of its scores with the sum of all, over the variance of the sum. "
        "A table below zero works against the others.",
    )


def _coefficients(report: Report) -> list[Block | None]:
    found = mapping(report.get("coefficients"))
    return [
        _table_coefficients(title_of(report, name), records(found[name]))
        for name in table_names(report, [str(own) for own in found])
    ]


def _table_coefficients(table: str, entries: list[Mapping[str, Any]]) -> Block | None:
    named = [
        (_feature(entry), value)
        for entry in entries
        if (value := number(entry.get("value"))) is not None
    ]
    largest = sorted(named, key=lambda pair: -abs(pair[1]))
    shown = largest[:MOST_BARS]
    note = f"The {len(shown)} largest of {len(named)}. " if shown != largest else ""
    return bar_figure(
        f"Coefficients of {table}",
        Measure(
            "change of the score per unit of the feature",
            ("value",),
            format_value,
        ),
        [Bar(name, (value,)) for name, value in shown],
        f"{note}Of encoded features; of a standardised number, per deviation. Its "
        "sites allow them to be shown.",
    )


def _feature(entry: Mapping[str, Any]) -> str:
    output = entry.get("output")
    suffix = "" if output in (None, "", "score") else f", output {output}"
    return f"{text(entry.get('feature')) or '?'}{suffix}"


def _per_cent(share: float) -> str:
    """Return a share in per cent.

    >>> _per_cent(0.123), _per_cent(0.0004)
    ('12.3 %', '0.04 %')
    """
    return (
        f"{100 * share:.1f} %"
        if abs(share) >= 0.001 or not share
        else f"{100 * share:.2g} %"
    )
