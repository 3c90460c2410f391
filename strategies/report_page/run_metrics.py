"""The rounds, seconds and bytes of a run as metrics for Prometheus."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from strategies.report_page.page import read_report
from tp_flower.reports.blocks import Record
from tp_flower.reports.prometheus import GAUGE, Metric, Sample, metrics_text
from tp_flower.reports.records import COMPLETED

PREFIX: Final = "tp_flower_run"
SECONDS: Final = {
    "server-seconds": "server",
    "client-seconds": "slowest site",
    "wait-seconds": "waiting",
}
BYTES: Final = {"bytes-up": "up", "bytes-down": "down", "overhead-bytes": "overhead"}
"""By entry of a round in `report.json`, what a label calls it."""


def run_metrics(folder: Path) -> str:
    """Return the metrics of the run whose `report.json` a folder has, by phase.

    Raises:
        ReportError: there is none.
    """
    report = Record(read_report(folder))
    labels = {"run": folder.resolve().name, "mode": report.text("mode")}
    return metrics_text(_metrics(report, labels))


def _metrics(report: Record, labels: Mapping[str, str]) -> Iterator[Metric]:
    completed = int(report.text("status") == COMPLETED)
    yield Metric(
        f"{PREFIX}_completed", GAUGE, "Whether the run did.", [(labels, completed)]
    )
    seconds = report.amount("seconds")
    yield Metric(
        f"{PREFIX}_duration_seconds", GAUGE, "Of the whole run.", [(labels, seconds)]
    )
    texts = {
        "rounds": ("Rounds of messages.", {"rounds": ""}),
        "seconds": ("Seconds of the rounds, and where they were spent.", SECONDS),
        "bytes": ("Bytes of arrays, and of all that is around them.", BYTES),
    }
    for name, (text, entries) in texts.items():
        samples = list(_by_phase(report, labels, entries))
        yield Metric(f"{PREFIX}_{name}", GAUGE, text, samples)


def _by_phase(
    report: Record, labels: Mapping[str, str], entries: Mapping[str, str]
) -> Iterator[Sample]:
    """Yield the sums of some entries of a report's rounds, by phase."""
    sums: dict[tuple[str, str], float] = {}
    for item in report.records("history"):
        for entry, part in entries.items():
            tables = item.at(entry).numbers()
            value = sum(tables.values()) if tables else item.amount(entry)
            key = (item.text("phase"), part)
            sums[key] = sums.get(key, 0) + value
    for (phase, part), value in sums.items():
        yield {**labels, "phase": phase, **({"of": part} if part else {})}, value
