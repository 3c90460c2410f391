"""The sections of a report's page about coefficients and their standard errors."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from strategies.report_page.plots import FARTHEST, Interval, interval_figure
from tp_flower.reports import blocks, console

MOST_ROWS: Final = 16
RATIOS: Final = ("t", "z")
ENDS: Final = ("low", "high")
UNSHRUNK: Final = "unshrunk"
SHOWN: Final = {**dict.fromkeys(RATIOS, "{:.2f}".format), "p": "{:.3g}".format}
HEADS: Final = {"standard-error": "error"}


def sections(report: blocks.Record) -> blocks.Blocks:
    """Yield what is known of a trained model's coefficients, if the run has asked."""
    inference = report.at("inference")
    if not inference:
        return
    yield from coefficients(report, inference.text("note"))
    yield _contrasts(inference)
    yield _tests(inference)
    yield inflation(inference)


def coefficients(report: blocks.Record, note: str) -> blocks.Blocks:
    """Yield the coefficients of largest t with their errors, or why there are none."""
    tables = report.at("coefficients")
    section = report.at("moments") or report.at("inference")
    has_classes = section.get("reference") is not None
    entries = [
        blocks.Record({**entry.content, "feature": _name(table, entry, has_classes)})
        for table in tables.content
        for entry in tables.records(table)
        if entry.number("standard-error") is not None or entry.number("noise")
    ]
    if undetermined := section.texts("undetermined"):
        listed = ", ".join(undetermined[:MOST_ROWS])
        note += f" None, as they are combinations of others: {listed}."
    if not entries:
        yield blocks.Prose(note) if note else None
        return
    is_noisy = any("noise" in entry.content for entry in entries)
    largest = sorted(entries, key=_significance, reverse=True)[:MOST_ROWS]
    title = "Coefficients and their standard errors"
    if is_noisy:
        title = "Coefficients and what noise does to them"
    ratio = report.at("inference").text("ratio")
    columns = _columns(largest, "column", "feature", ratio)
    yield blocks.tabulate(title, largest, columns, note)
    yield _forest(largest, ratio)


def _name(table: str, entry: blocks.Record, has_classes: bool) -> str:
    """Return the name of a coefficient, with its class where there are several."""
    output = f" [{entry.text('output')}]" if has_classes else ""
    return f"{table}.{entry.text('feature')}{output}"


def _columns(
    entries: Sequence[blocks.Record], head: str, key: str, ratio: str
) -> list[blocks.Column]:
    """Return the columns of names, values and their statistics.

    With a ``ratio``, the ends of the interval are those of the value's exponential.
    """
    is_noisy = any("noise" in entry.content for entry in entries)
    ratios = [name for name in RATIOS if any(name in e.content for e in entries)]
    statistics = ["standard-error", *ratios, "p"]
    if is_noisy:
        has_errors = any(UNSHRUNK in entry.content for entry in entries)
        statistics = ["noise", *([UNSHRUNK, *statistics] if has_errors else [])]
    if not ratio and "p" in statistics:
        statistics += ENDS
    show = console.value_format(
        entry.number(name) for entry in entries for name in ("value", statistics[0])
    )
    columns = [
        blocks.text_column(head, key),
        *(
            number_column(HEADS.get(name, name), name, SHOWN.get(name, show))
            for name in ("value", *statistics)
        ),
    ]
    if ratio:
        columns.append(blocks.Column(f"{ratio} (95 %)", _exponential))
    return columns


def _exponential(entry: blocks.Record) -> str:
    """Return a coefficient as a ratio, with its interval."""
    ends = _ends(entry)
    if ends is None:
        return "-"
    value, low, high = (math.exp(min(end, FARTHEST)) for end in ends)
    return f"{value:.4g} ({low:.4g} to {high:.4g})"


def _forest(entries: Sequence[blocks.Record], ratio: str) -> blocks.Figure | None:
    """Return the intervals of coefficients, or of what they are as ratios."""
    intervals = [
        Interval(entry.text("feature"), *ends)
        for entry in entries
        if (ends := _ends(entry)) and "(intercept)" not in entry.text("feature")
    ]
    title = "Coefficients with their 95 % intervals"
    return interval_figure(title, intervals, ratio)


def _ends(entry: blocks.Record) -> tuple[float, float, float] | None:
    numbers = [entry.number(name) for name in ("value", *ENDS)]
    value, low, high = numbers
    if (unshrunk := entry.number(UNSHRUNK)) is not None:
        value = unshrunk
    if value is None or low is None or high is None:
        return None
    return value, low, high


def _significance(entry: blocks.Record) -> float:
    """Return |t|, or how many deviations of noise a coefficient is from 0."""
    if noise := entry.number("noise"):
        return abs(entry.number("value") or 0.0) / noise
    return max(abs(entry.number(ratio) or 0.0) for ratio in RATIOS)


def _contrasts(inference: blocks.Record) -> blocks.Table:
    """Return how categories differ from the first of their feature."""
    entries = inference.records("contrasts")
    reference = blocks.text_column("against", "reference")
    ratio = inference.text("ratio")
    first, *numbers = _columns(entries, "column", "column", ratio)
    if any("output" in entry.content for entry in entries):
        numbers.insert(0, blocks.text_column("class", "output"))
    columns = [first, reference, *numbers]
    note = "Where coefficients themselves are not determined, their differences are."
    return blocks.tabulate(
        "Differences between categories", entries[:MOST_ROWS], columns, note
    )


def _tests(inference: blocks.Record) -> blocks.Table:
    """Return the tests of all columns of a feature."""
    is_known = inference.number("tail-freedom") is None
    columns = [
        blocks.text_column("feature", "feature"),
        blocks.count_column("columns", "columns"),
        number_column("chi-squared" if is_known else "F", "statistic", "{:.2f}".format),
        number_column("p", "p", "{:.3g}".format),
    ]
    tests = sorted(
        inference.records("tests"), key=lambda test: -(test.number("statistic") or 0.0)
    )
    title = "Wald's test of each feature"
    return blocks.tabulate(title, tests[:MOST_ROWS], columns, is_folded=True)


def inflation(section: blocks.Record) -> blocks.Table:
    """Return the features of largest variance inflation."""
    features = sorted(
        section.records("inflation"),
        key=lambda item: -(item.number("scaled") or math.inf),
    )
    columns = [
        blocks.text_column("feature", "feature"),
        blocks.count_column("columns", "columns"),
        number_column(
            "GVIF", "factor", console.format_value, empty="determined by others"
        ),
        number_column("GVIF^(1/2 columns)", "scaled", "{:.3f}".format),
    ]
    title = "Variance inflation (generalised, Fox and Monette 1992)"
    return blocks.tabulate(title, features[:MOST_ROWS], columns, is_folded=True)


def number_column(
    head: str, key: str, show: Callable[[float], str], empty: str = "-"
) -> blocks.Column:
    """Return the column of a number; a text where there is none."""

    def cell(item: blocks.Record) -> str:
        number = item.number(key)
        return empty if number is None else show(number)

    return blocks.Column(head, cell)
