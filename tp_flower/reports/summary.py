"""A trained linear model as a text, as statisticians print one.

Its head, the coefficients with their statistics, and of a model with standard errors
(:mod:`strategies.methods.moments.errors`) the tests of its features and how the
categories of each differ.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from tp_flower.reports.coefficients import coefficients_of

if TYPE_CHECKING:
    import pandas as pd

INTERCEPT: Final = "(intercept)"
NAMES: Final = ("table", "column", "output")
RATIOS: Final = ("z", "t", "p", "statistic")
"""Numbers of four digits; others have five."""
HEADS: Final[Mapping[str, str]] = {
    "standard_error": "std error",
    "standard-error": "std error",
    "low": "2.5 %",
    "high": "97.5 %",
}
INFLATION: Final = "GVIF^(1/2 columns)"
LARGEST_EXPONENT: Final = 700.0  # of a double
LEAST_WIDTH: Final = 72
GAP: Final = "   "
NO_COEFFICIENTS: Final = "Not shown of {}: coefficients = true in a table's policy."


@dataclass(frozen=True)
class NumberTable:
    """Rows of texts, each with a name in front.

    Attributes:
        heads: of the columns of numbers.
    """

    title: str
    heads: Sequence[str]
    names: Sequence[str]
    rows: Sequence[Sequence[str]]

    def lines(self) -> list[str]:
        """Return the lines, the title first and then the heads."""
        width = max(len(name) for name in (self.title, *self.names))
        columns = [
            _align(head, texts)
            for head, texts in zip(
                self.heads, zip(*self.rows, strict=True), strict=True
            )
        ]
        rows = zip(*columns, strict=True)
        names = (self.title, *self.names)
        return [
            GAP.join((name.ljust(width), *row)).rstrip()
            for name, row in zip(names, rows, strict=True)
        ]


def summary(report: Mapping[str, Any]) -> str:
    """Return the text about a training that shows coefficients.

    Args:
        report: the content of `report.json`.

    Raises:
        ModelError: there are no coefficients; which setting or policy hides them.
    """
    inference = _inference(report)
    parts = [_coefficients(coefficients_of(report), inference)]
    if inference:
        parts += _tests(inference), _contrasts(inference)
    tables = [table.lines() for table in parts if table.rows]
    head = _side_by_side(list(_figures(report)))
    lengths = [len(line) for table in (head, *tables) for line in table]
    width = max(LEAST_WIDTH, *lengths)
    lines = [report["model"].center(width).rstrip(), "=" * width, *head]
    for heads, *rows in tables:
        lines += ["=" * width, heads, "-" * width, *rows]
    lines.append("=" * width)
    for note in _notes(report):
        lines += textwrap.wrap(note, width)
    return "\n".join(lines)


def _inference(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the report's entry about errors by the information; {} without errors."""
    inference: Mapping[str, Any] = report.get("inference") or {}
    return inference if "parameters" in inference else {}


def _figures(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the head."""
    inference = _inference(report)
    yield "Loss", report["chosen"]["loss"]
    yield "Strategy", report["settings"]["strategy"]
    yield "Joined rows", f"{report['joined-rows']['train']:,}"
    if events := report["chosen"].get("events"):
        yield "Rows with an event", f"{events['train']:,}"
    if inference:
        yield "Standard errors", inference["kind"]
        yield "Parameters", str(inference["parameters"])
        yield "Dispersion", _number(inference["dispersion"])
        if inference["tail-freedom"] is not None:
            yield "Degrees of freedom", _number(inference["tail-freedom"], 0)
    for name, value in report["final"]["train"].items():
        yield f"Training {name.replace('_', ' ')}", _number(value)


def _coefficients(frame: "pd.DataFrame", inference: Mapping[str, Any]) -> NumberTable:
    """Return the coefficients.

    With errors the intercepts are those of the whole scores, if these are known, in
    place of one for each table.
    """
    entries = frame.to_dict("records")
    if inference:
        entries = [entry for entry in entries if entry["column"] != INTERCEPT]
        whole = [inference["intercept"], *inference["intercepts"]]
        entries = [_intercept(each) for each in whole if each] + entries
    keys = [key for key in frame.columns if key not in NAMES]
    names = [_name(entry) for entry in entries]
    return _number_table("", names, entries, keys, inference.get("ratio", ""))


def _intercept(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the intercept of a whole score as the others' entries are."""
    values = {name.replace("-", "_"): value for name, value in whole.items()}
    return {"column": INTERCEPT, "coefficient": values.pop("value"), **values}


def _name(entry: Mapping[str, Any]) -> str:
    """Return the name of a coefficient, or of a difference of two.

    >>> _name({"table": "p", "column": "age"}), _name({"column": "x", "output": "B"})
    ('p.age', 'x [B]')
    """
    table = f"{entry['table']}." if "table" in entry else ""
    output = f" [{entry['output']}]" if "output" in entry else ""
    return f"{table}{entry['column']}{output}"


def _tests(inference: Mapping[str, Any]) -> NumberTable:
    """Return Wald's tests of the features, with their variance inflation."""
    scaled = {each["feature"]: each["scaled"] for each in inference["inflation"]}
    tests = [
        {**test, INFLATION: scaled.get(test["feature"])} for test in inference["tests"]
    ]
    kind = "chi-squared" if inference["tail-freedom"] is None else "F"
    names = [test["feature"] for test in tests]
    keys = ["columns", "statistic", "p", INFLATION]
    table = _number_table("Wald's test of", names, tests, keys)
    heads = [kind if head == "statistic" else head for head in table.heads]
    return NumberTable(table.title, heads, table.names, table.rows)


def _contrasts(inference: Mapping[str, Any]) -> NumberTable:
    """Return how categories differ from the first of their feature."""
    contrasts = [
        {**each, "column": f"{each['column']} - {each['reference']}"}
        for each in inference["contrasts"]
    ]
    names = [_name(each) for each in contrasts]
    no_numbers = (*NAMES, "reference")
    keys = [key for key in (contrasts or [{}])[0] if key not in no_numbers]
    return _number_table("Difference", names, contrasts, keys, inference["ratio"])


def _number_table(
    title: str,
    names: Sequence[str],
    entries: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
    ratio: str = "",
) -> NumberTable:
    """Return some numbers of each entry, as a ``ratio`` the value's exponential."""
    rows = [[_cell(entry.get(key), key) for key in keys] for entry in entries]
    heads = [HEADS.get(key, key) for key in keys]
    if ratio:
        heads.append(ratio)
        for row, entry in zip(rows, entries, strict=True):
            row.append(_exponential(entry))
    return NumberTable(title, heads, names, rows)


def _exponential(entry: Mapping[str, Any]) -> str:
    value = entry.get("coefficient", entry.get("value"))
    if value is None or entry.get("column") == INTERCEPT:
        return "-"
    return _number(math.exp(min(value, LARGEST_EXPONENT)))


def _cell(value: Any, key: str) -> str:
    if key == "columns":
        return str(value)
    return _number(value, 4 if key in RATIOS else 5)


def _number(value: float | None, digits: int = 5) -> str:
    """Return a number with so many digits that matter, 0 for a whole number.

    >>> _number(0.61671319), _number(1.82e-30, 4), _number(372.0, 0), _number(None)
    ('0.61671', '1.820e-30', '372', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    if not digits:
        return f"{value:,.0f}"
    text = f"{value:#.{digits}g}"
    # 12345. has a point for nothing
    return text.removesuffix(".")


def _align(head: str, texts: Sequence[str]) -> list[str]:
    """Return texts with their decimal points below each other, below their head.

    >>> _align("p", ["0.25", "12.0", "-"])
    ['    p', ' 0.25', '12.0 ', ' -   ']
    """
    parts = [text.partition(".") for text in texts]
    before = max(len(whole) for whole, _, _ in parts)
    after = max(len(point + digits) for _, point, digits in parts)
    aligned = [
        f"{whole:>{before}}{point + digits:<{after}}" for whole, point, digits in parts
    ]
    width = max(len(head), before + after)
    return [head.rjust(width), *(text.rjust(width) for text in aligned)]


def _side_by_side(figures: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines of names and values, in two columns."""
    half = math.ceil(len(figures) / 2)
    columns = []
    for part in (figures[:half], figures[half:]):
        name_width = max((len(name) for name, _ in part), default=0) + 1
        width = max((len(value) for _, value in part), default=0)
        columns.append(
            [f"{name + ':':<{name_width}} {value:>{width}}" for name, value in part]
        )
    pairs = zip_longest(*columns, fillvalue="")
    return [GAP.join(pair).rstrip() for pair in pairs]


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is said of the coefficients and their errors."""
    inference = report.get("inference") or {}
    if note := inference.get("note") or (report.get("moments") or {}).get("errors"):
        yield note
    hidden = [
        table["table"]
        for table in report["tables"]
        if table["table"] not in report["coefficients"]
    ]
    if hidden and not _inference(report):
        yield NO_COEFFICIENTS.format(", ".join(hidden))
    if inference.get("undetermined"):
        names = ", ".join(inference["undetermined"])
        yield f"No error of combinations of others: {names}."
