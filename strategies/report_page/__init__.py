"""report.html: one page that shows a run, made from report.json alone."""

from strategies.report_page.page import (
    PAGE_FILE,
    ReportError,
    explanation_view,
    read_report,
    render,
    result_view,
    write_page,
)

__all__ = [
    "PAGE_FILE",
    "ReportError",
    "explanation_view",
    "read_report",
    "render",
    "result_view",
    "write_page",
]
