"""The query, its tables and how their rows are joined."""

import re

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from strategies.report_page.blocks import (
    TWO_TEXTS,
    Blocks,
    Code,
    Column,
    Table,
    tabulate,
)
from strategies.report_page.reading import Record, count_column, text_column
from tp_flower.reports.console import format_count

LABEL = "label"
FAN_OUT = ("min", "median", "mean", "max")
CLAUSE = re.compile(r" (?=(?:FROM|(?:LEFT )?JOIN|WHERE|GROUP BY|HAVING|UNION ALL) )")


def tables(report: Record) -> Blocks:
    """Yield the query, the tables and the join."""
    if query := report.text("query"):
        yield Code("The query", CLAUSE.split(query))
    tables = report.records("tables")
    yield _tables(tables)
    if steps := report.records("join-steps"):
        yield _steps(steps)
    lines = [
        (item.text("table"), line) for item in tables for line in item.texts("work")
    ]
    if lines:
        title = "What the sites of each table run"
        yield Table(title, ("table", "work"), lines, TWO_TEXTS, is_folded=True)


def _tables(tables: list[Record]) -> Table | None:
    multiplicities = [item.at("multiplicity").content for item in tables]
    names = [name for name in FAN_OUT if any(name in item for item in multiplicities)]
    dropped = [
        f"{item.text('table')}.{name}"
        for item in tables
        for name in item.texts("dropped")
    ]
    note = "joined: how many rows of the join a row of the table is in."
    constant = f"Left out, as they are constant: {', '.join(dropped)}."
    notes = [note] * bool(names) + [constant] * bool(dropped)
    columns = [
        text_column("alias", "table"),
        # `explain` lists a name per shard
        text_column("table", "name", "names"),
        Column("rows", _rows),
        count_column("features", "features"),
        Column("shards", _shards),
        text_column("sites", "sites"),
        *(_times_column(f"joined, {name}", name, "multiplicity") for name in names),
    ]
    return tabulate("Tables", tables, columns, " ".join(notes))


def _rows(table: Record) -> str:
    """Return the rows of a table; `explain` lists them by shard."""
    shards = {str(n): rows for n, rows in enumerate(table.items("rows"))}
    rows = sum(Record(shards).numbers().values()) or table.amount("rows")
    return format_count(int(rows))


def _shards(table: Record) -> str:
    return format_count(int(table.amount("shards")) or len(table.texts("sites")))


def _times_column(head: str, key: str, inside: str = "") -> Column:
    """Return the column of how often rows are joined."""
    return Column(head, lambda item: _times(item.at(inside) if inside else item, key))


def _times(item: Record, key: str) -> str:
    """Return how often rows are joined.

    >>> record = Record({"mean": 66.2413, "max": 361})
    >>> [_times(record, key) for key in ("mean", "max", "median")]
    ['66.24', '361', '-']
    """
    times = item.number(key)
    if times is None:
        return "-"
    return f"{times:,.0f}" if times == int(times) else f"{times:,.2f}"


def _steps(steps: list[Record]) -> Table | None:
    fan_outs = {"matches, min": "min", "median": "median", "max": "max"}
    columns = [
        Column("step", _step, is_text=True),
        text_column("on", "on"),
        count_column("rows before", "rows-before"),
        count_column("rows after", "rows"),
        *(_times_column(head, f"fan-out-{name}") for head, name in fan_outs.items()),
        count_column("rows without a match", "unmatched-before"),
        count_column("of the table, without", "unmatched-rows"),
    ]
    title = f"The join, step by step, from {steps[0].text('table')}"
    note = "matches: rows of the table that a row of the join so far finds."
    return tabulate(title, steps[1:], columns, note)


def _step(step: Record) -> str:
    kind = "LEFT JOIN" if step.get("is-outer") else "JOIN"
    return f"{kind} {step.text('table')}"


def label_of(query: str) -> str:
    """Return the expression that is the label, or "" if there is none.

    >>> label_of("SELECT a.x > 3 AS label, a.y FROM a"), label_of("not ( SQL")
    ('a.x > 3', '')
    """
    try:
        tree = sqlglot.parse_one(query, read="duckdb")
    except SqlglotError:
        return ""
    columns = tree.expressions if isinstance(tree, exp.Select) else []
    labels = (item.this.sql("duckdb") for item in columns if item.alias == LABEL)
    return next(map(str, labels), "")
