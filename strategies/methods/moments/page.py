"""What a report and its page say of a run by second moments, besides its metrics.

Entry ``moments`` of `report.json`::

    path      [{l1, l2, nonzero, train, validation, test}]   the losses of least squares
              under a path of penalties, without the penalty, the strongest first, and
              the number of features with a coefficient
    errors    what the standard errors of the coefficients are, or why there are none
    undetermined  [table.feature]   those without an error, as they are combinations
              of others
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from strategies.setup.problem import PreparedRun
from tp_flower.methods.moments.inference import STATISTICS, Inference
from tp_flower.methods.moments.penalties import Fit
from tp_flower.reports import blocks, console
from tp_flower.splits import TEST, TRAIN, VALIDATION

MOST_ROWS: Final = 16
SHOWN: Final = {"t": "{:.2f}".format, "p": "{:.3g}".format}
ERRORS: Final = (
    "Standard errors for independent joined rows, with {:,.0f} degrees of freedom."
)
CONDITIONAL: Final = (
    "They are conditional on l2: the spread of the penalised estimate around its own "
    "mean, which l2 has drawn towards 0."
)
REPEATED: Final = (
    "But up to {} joined rows have the label of one row: they are not independent, and "
    "the errors are too small."
)
NO_ERRORS: Final = {
    "classes": "No standard errors: a discriminant is no least-squares estimate.",
    "lasso": "No standard errors: a lasso chooses its columns by the same labels.",
    "rows": "No standard errors: the rows leave no degree of freedom.",
}
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


def errors_note(
    problem: PreparedRun, fit: Fit, inference: Inference | None, repeats: int
) -> str:
    """Return what is said of the standard errors of a fit.

    Args:
        problem: for whether there are classes.
        fit: under the penalty that was chosen.
        inference: None where it has no errors.
        repeats: joined rows, at most, that have one row of the label's table.
    """
    if problem.classes:
        return NO_ERRORS["classes"]
    if inference is None:
        return NO_ERRORS["lasso"]
    if inference.freedom <= 0.0:
        return NO_ERRORS["rows"]
    notes = [ERRORS.format(inference.freedom)]
    if fit.penalty.l2:
        notes.append(CONDITIONAL)
    if repeats > 1:
        notes.append(REPEATED.format(repeats))
    return " ".join(notes)


def sections(report: blocks.Record) -> blocks.Blocks:
    """Yield the path of penalties."""
    moments = report.at("moments")
    yield _path(moments.records("path"))
    yield _coefficients(report)


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


def _coefficients(report: blocks.Record) -> blocks.Block | None:
    """Return the coefficients of largest t with their errors, or why there are none."""
    note = report.at("moments").text("errors")
    tables = report.at("coefficients")
    entries = [
        blocks.Record({**entry.content, "feature": f"{table}.{entry.text('feature')}"})
        for table in tables.content
        for entry in tables.records(table)
        if entry.number("standard-error") is not None
    ]
    largest = sorted(entries, key=lambda entry: -abs(entry.number("t") or 0.0))
    if undetermined := report.at("moments").texts("undetermined"):
        listed = ", ".join(undetermined[:MOST_ROWS])
        note += f" None, as they are combinations of others: {listed}."
    if not entries:
        return blocks.Prose(note) if note else None
    values = ("value", *STATISTICS)
    show = console.value_format(
        entry.number(name) for entry in entries for name in ("value", "standard-error")
    )
    columns = [
        blocks.text_column("column", "feature"),
        *(_number(name, name, SHOWN.get(name, show)) for name in values),
    ]
    title = "Coefficients and their standard errors"
    return blocks.tabulate(title, largest[:MOST_ROWS], columns, note)


def _number(head: str, key: str, show: Callable[[float], str]) -> blocks.Column:
    """Return the column of a number; "-" where there is none."""

    def cell(item: blocks.Record) -> str:
        number = item.number(key)
        return "-" if number is None else show(number)

    return blocks.Column(head, cell)
