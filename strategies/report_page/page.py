"""The page of a run: a pure function of reports, written beside `report.json`."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from strategies.report_page.convergence import convergence
from strategies.report_page.costs import costs
from strategies.report_page.model import model
from strategies.report_page.plots import STYLES
from strategies.report_page.privacy import privacy
from strategies.report_page.reading import Record
from strategies.report_page.result import head_of, result
from strategies.report_page.settings import settings
from strategies.report_page.style import STYLE
from strategies.report_page.tables import tables
from strategies.report_page.template import TEMPLATE
from tp_flower.errors import TPFlowerError
from tp_flower.reports.records import REPORT_FILE, write_whole

PAGE_FILE = "report.html"
MOST_BYTES = 1 << 28


class ReportError(TPFlowerError):
    """A report cannot be read."""


def render(report: Mapping[str, Any]) -> str:
    """Return the page of a `report.json` of any mode: one HTML file, no scripts."""
    record = Record(report)
    contents = {
        "Result": result(record),
        "Query and tables": tables(record),
        "Convergence": convergence(record),
        "Time and bytes": costs(record),
        "Model": model(record),
        "Privacy": privacy(record),
        "Settings": settings(record),
    }
    sections = {title: list(filter(None, blocks)) for title, blocks in contents.items()}
    return _template().render(
        head=head_of(record),
        sections={title: blocks for title, blocks in sections.items() if blocks},
        style=STYLE,
        styles=STYLES,
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE)


def write_page(folder: Path) -> Path:
    """Write `report.html` beside a folder's `report.json`, and return its path."""
    return write_whole(folder / PAGE_FILE, render(read_report(folder)))


def read_report(folder: Path) -> dict[str, Any]:
    """Return the report in a folder.

    Raises:
        ReportError: there is none, or it is no report.
    """
    file = folder / REPORT_FILE
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ReportError(f"{file} is larger than {MOST_BYTES} bytes: no report")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict) or "status" not in content:
        raise ReportError(f"{file} is no report of a run")
    return content
