"""The coreset that a run was trained on: what was drawn, by which tables."""

from collections.abc import Mapping
from typing import Any, Final

from tp_flower.console import format_count, format_value
from tp_flower.report_page.blocks import Block, Prose, Section, Table
from tp_flower.report_page.costs import table_names, title_of
from tp_flower.report_page.reading import Report, amount, mapping, number, text, texts

_MEASURED: Final = {
    "gamma": "gamma (Assumption 4.1): 1 where the tables' columns are orthogonal",
    "tau": "tau (Assumption 5.1): 1 where one table tells all rows apart",
    "tau-median": "tau of the pair of rows in the middle",
}

_UNKNOWN: Final = "gamma and tau (Assumptions 4.1, 5.1), as the rows stay at the sites"


def coreset(report: Report) -> Section:
    """Return what was drawn; nothing of a run on all joined rows."""
    found = mapping(mapping(report.get("chosen")).get("coreset"))
    if not found:
        return Section("coreset", "Coreset", [])
    notes = [Prose(f"Warning: {words}.") for words in texts(found.get("warnings"))]
    notes += [
        Prose(f"A total was lowered to what it can be: {words}.")
        for words in texts(found.get("capped"))
    ]
    blocks: list[Block] = [_rows(found), *_shares(report, found), *notes]
    return Section("coreset", "Coreset", blocks)


def _rows(found: Mapping[str, Any]) -> Block:
    drawn = {"importance": "by importance", "uniform": "uniformly"}
    kind, largest = text(found.get("kind")), found.get("largest-weight")
    measured = [
        (words, format_value(value))
        for name, words in _MEASURED.items()
        if (value := number(found.get(name))) is not None
    ]
    if not measured and kind == "importance":
        measured = [(_UNKNOWN, "not measured")]
    rows = [
        ("joined rows to draw from", _count(found, "joined-rows")),
        (f"drawn {drawn.get(kind, kind)}", _count(found, "size")),
        ("distinct", _count(found, "distinct-rows")),
        ("as sure as so many of equal weight", _count(found, "effective-rows")),
        ("largest weight over the mean", format_value(amount(largest))),
        *measured,
    ]
    return Table("What was trained on", ("", "rows"), rows)


def _shares(report: Report, found: Mapping[str, Any]) -> list[Block]:
    shares, totals = mapping(found.get("shares")), mapping(found.get("totals"))
    if not shares:
        return []
    rows = [
        (
            title_of(report, name),
            format_value(amount(totals.get(name))),
            f"{amount(shares[name]):.1%}",
        )
        for name in table_names(report, [str(own) for own in shares])
    ]
    uniform = amount(found.get("uniform-share"))
    tables = float(len(shares))
    rows.append(("drawn uniformly", format_value(tables), f"{uniform:.1%}"))
    note = "A table's share of the draws is that of its sensitivities in all of them."
    head = ("table", "sum of sensitivities", "share of draws")
    return [Table("Who draws", head, rows, note=note)]


def _count(found: Mapping[str, Any], name: str) -> str:
    return format_count(round(amount(found.get(name))))
