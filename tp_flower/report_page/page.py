"""The page of a run: a pure function of reports, written beside `report.json`."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from tp_flower.errors import TPFlowerError
from tp_flower.report import REPORT_FILE, write_whole
from tp_flower.report_page.convergence import convergence
from tp_flower.report_page.costs import costs
from tp_flower.report_page.model import model
from tp_flower.report_page.plots import STYLES
from tp_flower.report_page.privacy import privacy
from tp_flower.report_page.reading import Record
from tp_flower.report_page.result import head_of, result
from tp_flower.report_page.settings import settings
from tp_flower.report_page.style import STYLE
from tp_flower.report_page.tables import tables
from tp_flower.report_page.template import TEMPLATE

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
