"""What a scorer has done since it started, in the text format of Prometheus.

Reference:
    https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from threading import Lock
from typing import Final

from tp_flower.reports.records import RoundReport

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "tp_flower_scorer"
BUCKETS: Final = (
    *(0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2),
    *(0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
"""Upper ends of the buckets of the histogram, in seconds."""


class Metrics:
    """Counters of requests and rounds; safe for threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._requests: Counter[int] = Counter()
        self._buckets = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0
        self._predictions = 0
        self._rounds = 0
        self._bytes = 0

    def count_request(
        self, status: HTTPStatus, seconds: float, predictions: int
    ) -> None:
        """Count a request for predictions, which took so long."""
        with self._lock:
            self._requests[status] += 1
            self._buckets[bisect_left(BUCKETS, seconds)] += 1
            self._seconds += seconds
            self._predictions += predictions

    def count_round(self, report: RoundReport) -> None:
        """Count a round with the sites, those of the set-up included."""
        sent = (*report.bytes_up.values(), *report.bytes_down.values())
        with self._lock:
            self._rounds += 1
            self._bytes += sum(sent) + report.overhead_bytes

    def text(self, *, is_up: bool) -> str:
        """Return all metrics; ``is_up`` says whether requests are answered."""
        with self._lock:
            return "\n".join([*self._lines(is_up=is_up), ""])

    def _lines(self, *, is_up: bool) -> Iterator[str]:
        name = f"{PREFIX}_requests_total"
        yield from _head(name, "counter", "Requests for predictions, by HTTP status.")
        for status, count in sorted(self._requests.items()):
            yield f'{name}{{status="{status:d}"}} {count}'
        errors = sum(n for status, n in self._requests.items() if status >= 400)
        totals = {
            "errors": ("Requests that were answered with an error.", errors),
            "predictions": ("Joined rows that were predicted.", self._predictions),
            "rounds": ("Rounds of messages with the sites.", self._rounds),
            "bytes": ("Bytes of these messages, both ways.", self._bytes),
        }
        for what, (help_text, value) in totals.items():
            yield from _head(f"{PREFIX}_{what}_total", "counter", help_text)
            yield f"{PREFIX}_{what}_total {value}"
        name = f"{PREFIX}_request_seconds"
        yield from _head(name, "histogram", "Seconds to answer a request.")
        count = 0
        for end, in_bucket in zip((*BUCKETS, "+Inf"), self._buckets, strict=True):
            count += in_bucket
            yield f'{name}_bucket{{le="{end}"}} {count}'
        yield f"{name}_sum {self._seconds!r}"
        yield f"{name}_count {count}"
        yield from _head(f"{PREFIX}_up", "gauge", "Whether requests are answered.")
        yield f"{PREFIX}_up {int(is_up)}"


def _head(name: str, kind: str, help_text: str) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
