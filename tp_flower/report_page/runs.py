"""Reports in folders: reading them, finding earlier ones, writing the page."""

import json
from pathlib import Path

from tp_flower.errors import TPFlowerError
from tp_flower.report import REPORT_FILE, write_whole
from tp_flower.report_page.page import render
from tp_flower.report_page.reading import Report, text

PAGE_FILE = "report.html"
MOST_EARLIER = 8
MOST_READ = 64
"""A folder of many runs is searched among its latest only."""

MOST_BYTES = 1 << 28


class ReportError(TPFlowerError):
    """A report cannot be read."""


def read_report(path: Path) -> Report:
    """Return the report in a file, or in a folder's `report.json`.

    Raises:
        ReportError: there is none, or it is no report.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ReportError(f"{file} is larger than {MOST_BYTES} bytes: no report")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict) or "status" not in content:
        raise ReportError(f"{file} is no report of a run")
    return content


def earlier_runs(folder: Path, report: Report) -> list[Report]:
    """Return the runs of the same query and mode beside a run, the newest first.

    Args:
        folder: of the run.
        report: of the run; it lists only runs that started before it.
    """
    files = [
        file
        for file in folder.resolve().parent.glob(f"*/{REPORT_FILE}")
        if file.parent != folder.resolve()
    ]
    latest = sorted(files, key=_modified, reverse=True)[:MOST_READ]
    found = []
    for file in latest:
        try:
            other = read_report(file)
        except ReportError:
            # what else lies beside the run is not its concern
            continue
        if _is_earlier(other, report):
            found.append(other)
    found.sort(key=lambda other: text(other.get("started")), reverse=True)
    return found[:MOST_EARLIER]


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _is_earlier(other: Report, report: Report) -> bool:
    is_alike = all(other.get(key) == report.get(key) for key in ("query", "mode"))
    return is_alike and text(other.get("started")) < text(report.get("started"))


def write_page(folder: Path) -> Path:
    """Write `report.html` beside a folder's `report.json`, and return its path."""
    report = read_report(folder)
    page = render(report, earlier_runs(folder, report))
    return write_whole(folder / PAGE_FILE, page)
