"""The sections of a report's page about what second moments tell."""

from collections.abc import Sequence
from typing import Final

from strategies.methods.moments.describe.page import description
from strategies.methods.moments.errors_page import (
    coefficients,
    inflation,
    number_column,
)
from strategies.methods.moments.section import PASSES
from tp_flower.reports import blocks, console

MOST_ROWS: Final = 16
MOST_LOADINGS: Final = 4


def sections(report: blocks.Record) -> blocks.Blocks:
    """Yield what the moments tell of coefficients, tables, features and columns.

    The console prints of a training what is not folded, and all on request.
    """
    moments = report.at("moments")
    if moments.text("describe"):
        yield from description(moments)
        return
    if moments:
        yield from coefficients(report, moments.text("errors"))
    yield _noise(report)
    yield _tables(report)
    yield _path(moments.records("path"))
    yield inflation(moments)
    yield _correlations(moments)
    yield _components(moments)


def thin(records: Sequence[blocks.Record], most: int) -> list[blocks.Record]:
    """Return evenly spaced records, the first and the last among them."""
    stride = max(len(records) - 1, 1) / (most - 1)
    if stride <= 1.0:
        return list(records)
    return [records[round(n * stride)] for n in range(most)]


def _path(fits: Sequence[blocks.Record]) -> blocks.Table:
    """Return the losses along a path of penalties."""
    names = [
        name for name in PASSES.values() if any(name in fit.content for fit in fits)
    ]
    show = console.value_format(fit.number(name) for fit in fits for name in names)
    has_l1 = any(fit.amount("l1") for fit in fits)
    penalties = ("l1", "l2") if has_l1 else ("l2",)
    columns = [
        *(number_column(name, name, "{:.3g}".format) for name in penalties),
        blocks.count_column("coefficients", "nonzero"),
        *(number_column(f"loss, {name}", name, show) for name in names),
    ]
    title = "Least squares by penalty (the loss is half the mean square)"
    return blocks.tabulate(title, thin(fits, MOST_ROWS), columns, is_folded=True)


def _noise(report: blocks.Record) -> blocks.Table | None:
    """Return the metrics, with the intervals that noise gives them."""
    noise = report.at("moments").at("noise")
    rows = [
        blocks.Record(
            {
                "metric": f"{name}, {part}",
                "value": report.at("final").at(part).number(name),
                "low": low,
                "high": high,
            }
        )
        for part in noise.content
        for name, (low, high) in noise.at(part).content.items()
    ]
    if not rows:
        return None
    columns = [
        blocks.text_column("metric", "metric"),
        *(
            number_column(name, name, "{:.4g}".format)
            for name in ("value", "low", "high")
        ),
    ]
    note = (
        f"Noise on {report.at('chosen').text('noise')}. The ends are those of 95 % of "
        "the values that the metric takes if the noise is drawn once more."
    )
    return blocks.tabulate("Noise on the metrics", rows, columns, note)


def _tables(report: blocks.Record) -> blocks.Table:
    """Return the R2 of each table alone, and of all but it."""
    tables = report.at("moments").records("tables")
    titles = blocks.table_titles(report, [item.text("table") for item in tables])
    rows = [
        blocks.Record(
            {"table": titles[item.text("table")]}
            | {f"alone, {n}": r2 for n, r2 in item.at("alone").numbers().items()}
            | {f"without it, {n}": r2 for n, r2 in item.at("without").numbers().items()}
        )
        for item in tables
    ]
    names = [name for row in rows[:1] for name in row.numbers()]
    columns = [
        blocks.text_column("table", "table"),
        *(number_column(name, name, "{:.4f}".format) for name in names),
    ]
    note = (
        "By least squares with the run's l2, on one table's columns or all others'. A "
        "table without which R2 stays the same could be left out."
    )
    return blocks.tabulate("R2 of the tables", rows, columns, note)


def _correlations(moments: blocks.Record) -> blocks.Table:
    """Return the strongest correlations between columns of different features."""
    columns = [
        blocks.text_column("", "first"),
        blocks.text_column("", "second"),
        number_column("correlation", "correlation", "{:.4f}".format),
    ]
    title = "Strongest correlations of columns"
    pairs = moments.records("correlations")[:MOST_ROWS]
    return blocks.tabulate(title, pairs, columns, is_folded=True)


def _components(moments: blocks.Record) -> blocks.Table:
    """Return the shares of the first principal components, and what they load on."""
    columns = [
        number_column("share of variance", "share", "{:.1%}".format),
        blocks.Column("largest loadings", _largest_loadings, is_text=True),
    ]
    title = "Principal components of the standardised columns"
    components = moments.records("components")
    return blocks.tabulate(title, components, columns, is_folded=True)


def _largest_loadings(component: blocks.Record) -> str:
    loadings = component.at("loadings").numbers().items()
    largest = sorted(loadings, key=lambda item: -abs(item[1]))[:MOST_LOADINGS]
    return ", ".join(f"{name} {loading:.2f}" for name, loading in largest)
