"""The page of a run, written beside `report.json`; its blocks on a console as well."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from strategies.report_page import overview
from strategies.report_page.convergence import convergence
from strategies.report_page.costs import costs, privacy, privacy_totals
from strategies.report_page.model import model
from tp_flower.errors import TPFlowerError
from tp_flower.protocol.fields import Document
from tp_flower.reports.blocks import Block, Code, Prose, Record, Table, render_page
from tp_flower.reports.console import text_table
from tp_flower.reports.records import REPORT_FILE, write_whole

PAGE_FILE = "report.html"
MOST_BYTES = 1 << 28


class ReportError(TPFlowerError):
    """A report cannot be read."""


def render(report: Mapping[str, object]) -> str:
    """Return the page of a `report.json` of any mode: one HTML file, no scripts."""
    record = Record(report)
    contents = {
        "Result": overview.result(record),
        "Query and tables": overview.tables(record),
        "Convergence": convergence(record),
        "Time and bytes": costs(record),
        "Model": model(record),
        "Privacy": privacy(record),
        "Settings": overview.settings(record),
    }
    footer = "Made of report.json, which has every figure of this page."
    return render_page(overview.head_of(record), contents, footer)


def write_page(folder: Path) -> Path:
    """Write `report.html` beside a folder's `report.json`, and return its path."""
    return write_whole(folder / PAGE_FILE, render(read_report(folder)))


def read_report(folder: Path) -> Document:
    """Return the report in a folder."""
    file = folder / REPORT_FILE
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ReportError(f"{file} is larger than {MOST_BYTES} bytes: not a report")
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict) or "status" not in content:
        raise ReportError(f"{file} is not the report of a run")
    return content


INDENT = 2


def explanation_view(content: Mapping[str, object], is_full: bool = False) -> RenderableType:  # noqa: ARG001
    """Return everything that `explain` prints, from the content of its report."""
    report = Record(content)
    blocks = (*overview.tables(report), *costs(report), *privacy(report))
    return _group((*blocks, *overview.warnings(report)))


def result_view(content: Mapping[str, object]) -> RenderableType:
    """Return the summary of a run of any other mode, from the content of its report."""
    report = Record(content)
    model_of = report.at("model")
    names = filter(None, (model_of.text("name"), model_of.text("version")))
    title = f"Result of {'@'.join(names) or report.at('settings').text('strategy')}"
    blocks = (
        Table(title, ("", "", ""), list(overview.facts(report)), frozenset({0, 2})),
        *overview.result(report),
        overview.list_tables(report.records("tables")),
        overview.label_rows(report),
        *model(report),
        privacy_totals(report.at("privacy")),
    )
    return _group(blocks)


def _group(blocks: Iterable[Block | None]) -> RenderableType:
    return Group(*(part for block in blocks if block for part in _view(block)))


def _view(block: Block) -> Iterable[RenderableType]:
    """Yield a block; figures are for the page alone."""
    if isinstance(block, Prose):
        yield Text(f"{block.text}\n")
    elif isinstance(block, Code):
        yield Text(f"\n{block.title}", style="italic")
        for line in block.lines:
            yield Padding(Text(line), (0, 0, 0, INDENT))
        yield Text()
    elif isinstance(block, Table):
        yield Text(f"\n{block.title}", style="italic")
        yield text_table(block.head, block.rows, words=block.words)
        if block.note:
            yield Padding(Text(block.note), (0, 0, 1, INDENT))
