"""The query, its tables and how their rows are joined."""

from collections.abc import Mapping
from typing import Any

from tp_flower.console import format_count
from tp_flower.report_page.bar_plot import Bar, Measure, bar_figure
from tp_flower.report_page.blocks import Block, Code, Figure, Section, Table
from tp_flower.report_page.reading import (
    Report,
    amount,
    items,
    mapping,
    number,
    records,
    text,
    texts,
)
from tp_flower.report_page.sql import sql_lines

FAN_OUT = ("min", "median", "mean", "max")


def tables(report: Report) -> Section:
    """Return the query, the tables and the join."""
    lines = sql_lines(text(report.get("query")))
    found = records(report.get("tables"))
    steps = records(report.get("join-steps"))
    blocks: list[Block | None] = [
        Code("The query", lines) if lines else None,
        _tables(found),
        _steps(steps),
        _joined(steps),
        _rows(found),
        _work(found),
    ]
    return Section("tables", "Query and tables", [own for own in blocks if own])


def _tables(found: list[Mapping[str, Any]]) -> Table | None:
    if not found:
        return None
    known = [
        name
        for name in FAN_OUT
        if any(name in mapping(own.get("multiplicity")) for own in found)
    ]
    rows = [
        (
            text(own.get("table")),
            _name(own),
            format_count(table_rows(own)),
            _count(own.get("features")),
            format_count(_shards(own)),
            ", ".join(dict.fromkeys(texts(own.get("sites")))),
            *(_fan_out(mapping(own.get("multiplicity")).get(name)) for name in known),
        )
        for own in found
    ]
    fan_out = [f"joined, {name}" for name in known]
    head = ("alias", "table", "rows", "features", "shards", "sites", *fan_out)
    note = (
        "joined: how many rows of the join a row of the table is in." if known else ""
    )
    dropped = [
        f"{text(own.get('table'))}.{name}"
        for own in found
        for name in texts(own.get("dropped"))
    ]
    if dropped:
        note += f" Left out, as they are constant: {', '.join(dropped)}."
    return Table("Tables", head, rows, words=frozenset({0, 1, 5}), note=note.strip())


def table_rows(table: Mapping[str, Any]) -> int:
    """Return the rows of a table; `explain` lists them by shard."""
    found = table.get("rows")
    return int(sum(map(amount, items(found))) if items(found) else amount(found))


def _name(table: Mapping[str, Any]) -> str:
    return text(table.get("name")) or ", ".join(texts(table.get("names")))


def _title(table: Mapping[str, Any]) -> str:
    alias, name = text(table.get("table")), _name(table)
    return alias if name in {"", alias} else f"{alias} ({name})"


def _shards(table: Mapping[str, Any]) -> int:
    return int(amount(table.get("shards"))) or len(texts(table.get("sites")))


def _count(value: object) -> str:
    found = number(value)
    return "-" if found is None else format_count(int(found))


def _fan_out(value: object) -> str:
    """Return how often a row is joined.

    >>> _fan_out(66.2413), _fan_out(361), _fan_out(None)
    ('66.24', '361', '-')
    """
    found = number(value)
    if found is None:
        return "-"
    return f"{found:,.0f}" if found == int(found) else f"{found:,.2f}"


def _steps(steps: list[Mapping[str, Any]]) -> Table | None:
    if len(steps) < 2:
        return None
    rows = [
        (
            _step_name(own),
            text(own.get("on")),
            _count(own.get("rows-before")),
            _count(own.get("rows")),
            *(
                _fan_out(own.get(f"fan-out-{name}"))
                for name in ("min", "median", "max")
            ),
            _count(own.get("unmatched-before")),
            _count(own.get("unmatched-rows")),
        )
        for own in steps[1:]
    ]
    head = (
        "step",
        "on",
        "rows before",
        "rows after",
        "matches, min",
        "median",
        "max",
        "rows without a match",
        "of the table, without",
    )
    return Table(
        f"The join, step by step, from {text(steps[0].get('table'))}",
        head,
        rows,
        words=frozenset({0, 1}),
        note="matches: rows of the table that a row of the join so far finds.",
    )


def _step_name(step: Mapping[str, Any]) -> str:
    return (
        f"{'LEFT JOIN' if step.get('is-outer') else 'JOIN'} {text(step.get('table'))}"
    )


def _joined(steps: list[Mapping[str, Any]]) -> Figure | None:
    bars = []
    for n, own in enumerate(steps):
        name = text(own.get("table"))
        bars.append(Bar(name if n == 0 else f"with {name}", (amount(own.get("rows")),)))
    return bar_figure(
        "Rows of the join, step by step",
        _row_measure(bars),
        bars if len(bars) > 1 else [],
    )


def _rows(found: list[Mapping[str, Any]]) -> Figure | None:
    bars = [Bar(_title(own), (float(table_rows(own)),)) for own in found]
    return bar_figure(
        "Rows of the tables, where they stay",
        _row_measure(bars),
        bars if len(bars) > 1 else [],
    )


def _row_measure(bars: list[Bar]) -> Measure:
    largest = max((max(bar.values) for bar in bars), default=0.0)
    unit, name = (1e6, "million rows") if largest >= 2e6 else (1.0, "rows")
    if 2e3 <= largest < 2e6:
        unit, name = 1e3, "thousand rows"
    return Measure(name, ("rows",), lambda value: format_count(round(value)), unit)


def _work(found: list[Mapping[str, Any]]) -> Table | None:
    rows = [
        (text(own.get("table")), line)
        for own in found
        for line in texts(own.get("work"))
    ]
    if not rows:
        return None
    words = frozenset({0, 1})
    title = "What the sites of each table run"
    return Table(title, ("table", "work"), rows, words, is_folded=True)
