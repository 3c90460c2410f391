"""What a scorer has done since it started, as metrics for Prometheus."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from threading import Lock
from typing import Final

from tp_flower.reports.prometheus import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    Histogram,
    Metric,
    Sample,
    metrics_text,
)
from tp_flower.reports.records import RoundReport

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
        self._cut = 0
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

    def count_cut(self) -> None:
        """Count a connection that lasted too long, or made room for another."""
        with self._lock:
            self._cut += 1

    def count_round(self, report: RoundReport) -> None:
        """Count a round with the sites, those of the set-up included."""
        sent = (*report.bytes_up.values(), *report.bytes_down.values())
        with self._lock:
            self._rounds += 1
            self._bytes += sum(sent) + report.overhead_bytes

    def text(self, *, is_up: bool) -> str:
        """Return all metrics; ``is_up`` says whether requests are answered."""
        with self._lock:
            return metrics_text(self._metrics(is_up=is_up))

    def _metrics(self, *, is_up: bool) -> Iterator[Metric]:
        by_status: list[Sample] = [
            ({"status": status}, count)
            for status, count in sorted(self._requests.items())
        ]
        yield Metric(
            f"{PREFIX}_requests_total",
            COUNTER,
            "Requests for predictions, by HTTP status.",
            by_status,
        )
        errors = sum(n for status, n in self._requests.items() if status >= 400)
        totals = {
            "errors": ("Requests that were answered with an error.", errors),
            "predictions": ("Joined rows that were predicted.", self._predictions),
            "cut_connections": (
                "Connections that lasted too long, or made room for others.",
                self._cut,
            ),
            "rounds": ("Rounds of messages with the sites.", self._rounds),
            "bytes": ("Bytes of these messages, both ways.", self._bytes),
        }
        for name, (text, value) in totals.items():
            yield Metric(f"{PREFIX}_{name}_total", COUNTER, text, [({}, value)])
        yield Histogram(
            f"{PREFIX}_request_seconds",
            HISTOGRAM,
            "Seconds to answer a request.",
            ends=BUCKETS,
            counts=self._buckets,
            total=self._seconds,
        )
        yield Metric(
            f"{PREFIX}_up", GAUGE, "Whether requests are answered.", [({}, int(is_up))]
        )
