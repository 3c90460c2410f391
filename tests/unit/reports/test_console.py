"""The console: each number in a form that is short and not wrong."""

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from strategies.report_page import result_view
from tests.support.examples.reports import small_report
from tp_flower.reports.console import (
    epoch_line,
    format_bytes,
    format_seconds,
    format_value,
)
from tp_flower.reports.records import RoundReport, report_dict


def lines_of(**changes: object) -> list[str]:
    """The lines of the summary of a report with these changes."""
    console = Console(file=io.StringIO(), width=100)
    report = replace(small_report(), **changes)  # type: ignore[arg-type]
    console.print(result_view(report_dict(report)))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("form", "number", "text"),
    [
        (format_bytes, 0, "0 B"),
        (format_bytes, 999, "999 B"),
        (format_bytes, 9996, "10.0 kB"),
        (format_bytes, 999_500, "1.00 MB"),
        (format_seconds, 0, "0.00 ms"),
        (format_seconds, 0.9994, "999 ms"),
        (format_seconds, 0.9996, "1.00 s"),
        (format_seconds, 59.94, "59.9 s"),
        (format_seconds, 59.96, "1 min 0 s"),
        (format_seconds, 3599.4, "59 min 59 s"),
        (format_seconds, 3599.6, "1 h 0 min"),
        (format_seconds, 7260, "2 h 1 min"),
        (format_value, 0.0, "0.0000"),
        (format_value, -0.5, "-0.5000"),
        (format_value, 0.00099, "9.90e-04"),
        (format_value, 123456.0, "1.23e+05"),
        (format_value, float("inf"), "-"),
        (format_value, None, "-"),
    ],
)
def test_numbers_are_short(form, number: float | None, text: str) -> None:
    assert form(number) == text


@given(st.integers(1000, 10**14))
def test_bytes_keep_three_digits(number: int) -> None:
    units = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    value, unit = format_bytes(number).split()
    # half a unit of the third digit is at most 0.5 % of the number
    assert float(value) * units[unit] == pytest.approx(number, rel=0.0051)
    assert len(value.replace(".", "")) == 3


def test_the_line_of_an_epoch_adds_up_its_rounds() -> None:
    metrics = {"train": {"loss": 0.25}, "test": {"loss": 0.5, "auc": 0.75}}
    residuals = {"primal_residual": 0.01, "dual_residual": 0.002}
    rounds = [
        RoundReport(3, 2, "statistics", bytes_up={"f": 1000, "p": 500}),
        RoundReport(4, 2, "admm", **metrics, bytes_down={"f": 2000}, **residuals),
    ]
    # two epochs took 3 s, so the ten left take 15 s
    assert epoch_line(rounds, epochs=12, seconds=3.0) == (
        "epoch  2/12  |  train loss 0.2500  |  test loss 0.5000 auc 0.7500  |  "
        "residuals 1.0e-02 2.0e-03  |  1.50 kB up, 2.00 kB down  |  15.0 s left"
    )
    # that of the last epoch has no time left
    line = epoch_line([RoundReport(1, 2, "sgd", test={"rmse": 41.5})], 2, 9.0)
    assert line == "epoch 2/2  |  test rmse 41.5000  |  0 B up, 0 B down"


def test_the_summary_shows_tables_result_and_cost() -> None:
    lines = lines_of()
    for expected in (
        "f flights 30 4 2 EWR, JFK 0 0.90 2",
        "p planes 5 3 1 registry 0 5.40 9",
        "joined rows 27 7 held out",
        "rounds 4 2 epochs",
        "sent 163 B 121 B up, 42 B down",
        "time 3.50 s",
        "AUC 0.6250 0.7500",
        "loss 0.3750 0.2500",
        "flights at EWR 1.2500 1e-05 scores",
    ):
        assert expected in lines


def test_the_summary_takes_markup_as_text() -> None:
    facts = {"joined-rows": 4000, "warnings": ["tau of [bold]x[/bold] is 150"]}
    lines = lines_of(chosen={"coreset": facts})
    assert "Warning: tau of [bold]x[/bold] is 150." in lines
