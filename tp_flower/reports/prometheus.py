"""Metrics in the text format of Prometheus.

A program serves them, or writes them to a file that a collector reads, such as
node_exporter's for text files.

Reference:
    https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"

Labels: TypeAlias = Mapping[str, object]
Sample: TypeAlias = tuple[Labels, float]

_ESCAPED: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True)
class Metric:
    """A metric with its samples.

    Attributes:
        help_text: what it measures, a sentence.
        samples: labels and value of each.
    """

    name: str
    kind: str
    help_text: str
    samples: Sequence[Sample] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield its description, then a line for each sample."""
        yield f"# HELP {self.name} {self.help_text}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.samples:
            yield sample_line(self.name, labels, value)


@dataclass(frozen=True)
class Histogram(Metric):
    """A metric of how often values were in buckets.

    Attributes:
        ends: upper ends of the buckets, ascending; there is one more, without an end.
        counts: of the values in each bucket.
        total: the sum of all values.
    """

    ends: Sequence[float] = ()
    counts: Sequence[int] = ()
    total: float = 0.0

    def lines(self) -> Iterator[str]:
        """Yield its description, the counts up to each end, their sum and count."""
        yield from super().lines()
        count = 0
        for end, in_bucket in zip((*self.ends, "+Inf"), self.counts, strict=True):
            count += in_bucket
            yield sample_line(f"{self.name}_bucket", {"le": end}, count)
        yield sample_line(f"{self.name}_sum", {}, self.total)
        yield sample_line(f"{self.name}_count", {}, count)


def sample_line(name: str, labels: Labels, value: float) -> str:
    r"""Return the line of one sample.

    >>> sample_line("rounds_total", {"phase": "score"}, 3)
    'rounds_total{phase="score"} 3'
    """
    pairs = ",".join(
        f'{label}="{str(text).translate(_ESCAPED)}"' for label, text in labels.items()
    )
    return f"{name}{{{pairs}}} {value!r}" if pairs else f"{name} {value!r}"


def metrics_text(metrics: Iterable[Metric]) -> str:
    """Return metrics as a text, each with its description."""
    return "".join(f"{line}\n" for metric in metrics for line in metric.lines())
