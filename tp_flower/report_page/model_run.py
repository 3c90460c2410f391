"""What a run with a saved model adds to a page: its rows, files and missing sites."""

from tp_flower.console import format_count
from tp_flower.report_page.blocks import Block, Prose, Section, Table
from tp_flower.report_page.reading import (
    Report,
    mapping,
    number,
    numbers,
    records,
    text,
    texts,
)

_ROWS = {
    "joined": "joined rows",
    "label-table": "rows of the label table that they come from",
    "partial": "joined rows in which a mean stands for a table's score",
}
WORDS = frozenset({0, 1})


def model_run(report: Report) -> Section:
    """Return what was scored, where the predictions are, and who was missing."""
    blocks = [_rows(report), _files(report), _missing(report)]
    title = "Scored with a saved model"
    return Section("scored", title, [own for own in blocks if own])


def model_name(report: Report) -> str:
    """Return the model that a run has made or used, as name@version.

    >>> model_name({"model": {"name": "a", "version": "20261121-093000-1a2b"}})
    'a@20261121-093000-1a2b'
    >>> model_name({"model": "b@20261121-093000-1a2b"}), model_name({})
    ('b@20261121-093000-1a2b', '')
    """
    found = mapping(report.get("model"))
    parts = [text(found.get("name")), text(found.get("version"))]
    return "@".join(filter(None, parts)) or text(report.get("model"))


def _rows(report: Report) -> Block | None:
    counts = dict(numbers(report.get("rows")))
    rows = [
        (words, format_count(int(counts[key])))
        for key, words in _ROWS.items()
        if key in counts
    ]
    return Table("Rows", ("", "rows"), rows) if rows else None


def _files(report: Report) -> Block | None:
    found = mapping(report.get("predictions"))
    files = [
        (
            text(own.get("site")),
            text(own.get("file")),
            format_count(int(number(own.get("rows")) or 0)),
        )
        for own in records(found.get("files"))
    ]
    if files:
        head = ("site", "file below its state folder", "rows")
        return Table("Predictions at the label table's sites", head, files, WORDS)
    if not text(found.get("file")):
        return None
    columns = ", ".join(texts(found.get("columns")))
    return Prose(f"The predictions are in {text(found.get('file'))}, with {columns}.")


def _missing(report: Report) -> Block | None:
    rows = [
        (text(own.get("table")), ", ".join(texts(own.get("sites"))))
        for own in records(report.get("missing"))
    ]
    title = "Sites of the model that were not there"
    return Table(title, ("table", "sites"), rows, WORDS) if rows else None
