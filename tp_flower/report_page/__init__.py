"""report.html: one page that shows a run, made of report.json alone."""

from tp_flower.report_page.page import render
from tp_flower.report_page.runs import (
    PAGE_FILE,
    ReportError,
    earlier_runs,
    read_report,
    write_page,
)

__all__ = [
    "PAGE_FILE",
    "ReportError",
    "earlier_runs",
    "read_report",
    "render",
    "write_page",
]
