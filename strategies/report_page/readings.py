"""Score readings on the report page: see `score_readings`.

They are at how many rows sites and server work out scores of other tables.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from strategies.score_readings import FREQUENT
from tp_flower.reports import blocks
from tp_flower.reports.blocks import Record
from tp_flower.reports.console import format_count

LEFT: Final = "left"
COUNTS: Final = {"by site": "single", "by server": "frequent", "scores left": LEFT}


def readings(privacy: Record) -> blocks.Table:
    """Return the table of readings, a row for each table at a site."""
    records = privacy.records("readings")
    columns = [
        blocks.text_column("site", "site"),
        blocks.text_column("table", "table"),
        blocks.count_column("rows trained on", "rows"),
        *(blocks.count_column(head, key) for head, key in _counts(records).items()),
        blocks.text_column("whose scores", "others"),
    ]
    title = "What each site, and the server, work out of the others' scores"
    return blocks.tabulate(title, records, columns, readings_note(records))


def reading_columns(records: Sequence[Record]) -> Iterator[blocks.Column]:
    """Yield columns for a list of tables: each table's readings over all its sites."""
    for head, key in _counts(records).items():
        yield blocks.Column(head, partial(_table_count, records, key))


def _table_count(records: Sequence[Record], key: str, table: Record) -> str:
    """Return a count over the sites of a table; of score vectors the least."""
    of_table = (
        record for record in records if record.text("table") == table.text("table")
    )
    counts = [count for record in of_table if (count := record.number(key)) is not None]
    if not counts:
        return "-"
    return format_count(round(min(counts) if key == LEFT else sum(counts)))


def readings_note(records: Sequence[Record]) -> str:
    """Return an explanation of the counts; "" without any."""
    if not records:
        return ""
    others = records[0].texts("others")
    if len(others) == 1:
        other_scores = "the other table's scores"
    else:
        other_scores = "the sum of the others' scores"
    average = ""
    if records[0].get("average") is True:
        average = blocks.NOTES["average"]
    most = round(records[0].amount("most"))
    times = "once"
    if most != 1:
        times = f"{format_count(most)} times or less"
    single = blocks.NOTES["single"].format(times, other_scores, average)
    return f"{single} {blocks.NOTES['frequent'].format(FREQUENT)}"


def _counts(records: Sequence[Record]) -> dict[str, str]:
    """Return the counts that any of the records has, by head."""
    return {
        head: key
        for head, key in COUNTS.items()
        if any(record.number(key) is not None for record in records)
    }
