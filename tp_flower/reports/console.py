"""The console of a run: numbers for people, and a line per epoch."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from tp_flower.reports.records import Metrics, RoundReport, sum_by_table

TESTED = (
    *("loss", "auc", "accuracy", "rmse", "r2", "deviance", "d2", "pinball"),
    *("concordance", "rms_distance"),
)
"""Test metrics that the line of an epoch shows."""
UNKNOWN = "not known"
"""In place of a metric that noise hides."""


def format_count(number: int) -> str:
    """Return a count with a thousands separator.

    >>> format_count(1234567)
    '1,234,567'
    """
    return f"{number:,}"


def format_bytes(number: float) -> str:
    """Return an amount of data in decimal units, with at least three digits.

    >>> format_bytes(999), format_bytes(1500), format_bytes(2.5e9)
    ('999 B', '1.50 kB', '2.50 GB')
    """
    if number < 1000:
        return f"{number:.0f} B"
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        # 999.5 would be printed as 1000
        if number < 999.5:
            return f"{_three_digits(number)} {unit}"
    return f"{_three_digits(number / 1000)} TB"


def format_seconds(seconds: float) -> str:
    """Return a time span in the most readable unit.

    >>> format_seconds(0.0042), format_seconds(12.34), format_seconds(125)
    ('4.20 ms', '12.3 s', '2 min 5 s')
    >>> format_seconds(7260)
    '2 h 1 min'
    """
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1000)} ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_value(value: float | None) -> str:
    """Return a metric with enough digits to tell runs apart.

    >>> format_value(0.73219), format_value(41.23456), format_value(1e-7)
    ('0.7322', '41.2346', '1.00e-07')
    """
    return value_format([value])(value)


def value_format(values: Iterable[float | None]) -> Callable[[float | None], str]:
    """Return one format for numbers that are compared, by the largest of them.

    >>> [value_format([41.23456, 0.7])(x) for x in (41.23456, 0.7, None)]
    ['41.2346', '0.7000', '-']
    >>> value_format([5250.1])(2.0), value_format([0.0089])(0.00021)
    ('2.00', '0.00021')
    >>> value_format([1e-7])(0.0)
    '0.00e+00'
    """
    sizes = [abs(x) for x in values if x is not None and math.isfinite(x)]
    exponent = math.floor(math.log10(max(sizes, default=0.0) or 1.0))
    decimals = max(min(5 - exponent, 4), 2 - exponent, 0)
    form = "{:.2e}"
    if decimals <= 7 and exponent < 9:
        form = f"{{:z,.{decimals}f}}"

    def format_one(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return "-"
        return form.format(value)

    return format_one


def _three_digits(number: float) -> str:
    if number < 9.995:
        return f"{number:.2f}"
    return f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def name_table(alias: str, name: str) -> str:
    """Return a table's alias, with the name of its table if that is different.

    >>> name_table("f", "flights"), name_table("f", "f"), name_table("f", "")
    ('f (flights)', 'f', 'f')
    """
    return alias if name in {"", alias} else f"{alias} ({name})"


def text_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Collection[int] = (0,),
    title: str | None = None,
) -> Table:
    """Return a table; the columns in ``words`` hold words, the others numbers."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=any(head)
    )
    for column, text in enumerate(head):
        table.add_column(
            text, justify="left" if column in words else "right", overflow="fold"
        )
    for row in rows:
        # names come from queries: markup in them is plain text
        table.add_row(*map(Text, row))
    return table


def epoch_line(
    rounds: Sequence[RoundReport], epochs: int, seconds: float, split: str = ""
) -> str:
    """Return the console line of an epoch, ``seconds`` after the first one's start.

    Metrics of held-out rows stand beside the name of their ``split``.
    """
    last = rounds[-1]
    up = sum(sum_by_table(item.bytes_up for item in rounds).values())
    down = sum(sum_by_table(item.bytes_down for item in rounds).values())
    parts = [
        f"epoch {last.epoch:>{len(str(epochs))}}/{epochs}",
        *_metrics_parts("train", last.train, ("loss",)),
        *_metrics_parts("test", last.test, TESTED, split),
        *_metrics_parts("validation", last.validation, ("loss",), split),
    ]
    if last.residuals:
        values = " ".join(f"{value:.1e}" for value in last.residuals.values())
        parts.append(f"residual{'s' * (len(last.residuals) > 1)} {values}")
    parts.append(f"{format_bytes(up)} up, {format_bytes(down)} down")
    remaining_seconds = seconds / max(last.epoch, 1) * (epochs - last.epoch)
    if remaining_seconds > 0:
        parts.append(f"at most {format_seconds(remaining_seconds)} left")
    return "  |  ".join(parts)


def _metric_value(value: float) -> str:
    return format_value(value) if math.isfinite(value) else UNKNOWN


def _metrics_parts(
    name: str, metrics: Metrics, keys: Sequence[str], split: str = ""
) -> list[str]:
    values = [f"{key} {_metric_value(metrics[key])}" for key in keys if key in metrics]
    suffix = f" ({split})" if split else ""
    if not values:
        return []
    return [f"{name} {' '.join(values)}{suffix}"]
