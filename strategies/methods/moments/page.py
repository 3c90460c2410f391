"""What a report and its page say of a run by second moments, besides its metrics.

Entry ``moments`` of `report.json`::

    path      [{l1, l2, nonzero, train, validation, test}]   the losses of least squares
              under a path of penalties, without the penalty, the strongest first, and
              the number of features with a coefficient
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tp_flower.methods.moments.penalties import Fit
from tp_flower.reports import blocks, console
from tp_flower.splits import TEST, TRAIN, VALIDATION

MOST_ROWS: Final = 16
PASSES: Final = {TRAIN: "train", VALIDATION: "validation", TEST: "test"}


def path_entry(path: Iterable[Fit]) -> list[dict[str, float]]:
    """Return the losses of every fit of a path."""
    return [
        {
            **fit.penalty._asdict(),
            "nonzero": fit.nonzero,
            **{PASSES[number]: loss for number, loss in fit.losses.items()},
        }
        for fit in path
    ]


def sections(report: blocks.Record) -> blocks.Blocks:
    """Yield the path of penalties."""
    moments = report.at("moments")
    yield _path(moments.records("path"))


def thin(records: Sequence[blocks.Record], most: int) -> list[blocks.Record]:
    """Return evenly spaced records, the first and the last among them."""
    stride = max(len(records) - 1, 1) / (most - 1)
    if stride <= 1.0:
        return list(records)
    return [records[round(n * stride)] for n in range(most)]


def _path(fits: Sequence[blocks.Record]) -> blocks.Table:
    """Return the losses along a path of penalties."""
    names = [
        name for name in PASSES.values() if any(name in fit.content for fit in fits)
    ]
    show = console.value_format(fit.number(name) for fit in fits for name in names)
    has_l1 = any(fit.amount("l1") for fit in fits)
    penalties = ("l1", "l2") if has_l1 else ("l2",)
    columns = [
        *(_number(name, name, "{:.3g}".format) for name in penalties),
        blocks.count_column("coefficients", "nonzero"),
        *(_number(f"loss, {name}", name, show) for name in names),
    ]
    note = "Least squares under each penalty; the loss is half the mean square."
    return blocks.tabulate("Penalties", thin(fits, MOST_ROWS), columns, note)


def _number(head: str, key: str, show: Callable[[float], str]) -> blocks.Column:
    """Return the column of a number; "-" where there is none."""

    def cell(item: blocks.Record) -> str:
        number = item.number(key)
        return "-" if number is None else show(number)

    return blocks.Column(head, cell)
