"""The console: each number in a form that is short and not wrong."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.report_page.page import result_view
from tests.support.examples.reports import small_report
from tests.support.files import case_table
from tests.support.page_reading import console_text
from tp_flower.reports.console import (
    epoch_line,
    format_bytes,
    format_seconds,
    format_value,
    value_format,
)
from tp_flower.reports.records import RoundReport, report_dict

CASES = case_table(__file__)
FORMS = {"bytes": format_bytes, "seconds": format_seconds, "value": format_value}


def lines_of(**changes: object) -> list[str]:
    report = replace(small_report(), **changes)  # type: ignore[arg-type]
    text = console_text(result_view(report_dict(report)))
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize("kind", FORMS)
def test_numbers_are_short(kind):
    for number, text in CASES["numbers"][kind]:
        assert FORMS[kind](number) == text
    assert format_value(None) == "-"


@CASES.each("columns", "column")
def test_a_column_has_one_format(column):
    show = value_format(column["numbers"])
    assert [show(number) for number in column["numbers"]] == column["texts"]


@given(st.integers(1000, 10**14))
def test_bytes_keep_three_digits(number):
    units = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    value, unit = format_bytes(number).split()
    # half a unit of the third digit is at most 0.5 % of the number
    assert float(value) * units[unit] == pytest.approx(number, rel=0.0051)
    assert len(value.replace(".", "")) == 3


def test_the_line_of_an_epoch_adds_up_its_rounds():
    metrics = {
        "train": {"loss": 0.25},
        "test": {"loss": 0.5, "auc": 0.75},
        "residuals": {"primal": 0.01, "dual": 0.002},
    }
    rounds = [
        RoundReport(3, 2, "statistics", bytes_up={"f": 1000, "p": 500}),
        RoundReport(4, 2, "admm", **metrics, bytes_down={"f": 2000}),
    ]
    # two epochs took 3 s, so the ten left take 15 s
    assert epoch_line(rounds, epochs=12, seconds=3.0) == (
        "epoch  2/12  |  train loss 0.2500  |  test loss 0.5000 auc 0.7500  |  "
        "residuals 1.0e-02 2.0e-03  |  1.50 kB up, 2.00 kB down  |  at most 15.0 s left"
    )
    # metrics of held-out rows stand beside the name of the split
    metrics["validation"] = {"loss": 0.625}
    line = epoch_line([RoundReport(4, 2, "admm", **metrics)], 2, 3.0, "held-out f.day")
    assert "train loss 0.2500  |  test loss 0.5000 auc 0.7500 (held-out f.day)" in line
    assert "  |  validation loss 0.6250 (held-out f.day)  |  " in line
    # that of the last epoch has no time left
    line = epoch_line([RoundReport(1, 2, "sgd", test={"rmse": 41.5})], 2, 9.0)
    assert line == "epoch 2/2  |  test rmse 41.5000  |  0 B up, 0 B down"


def test_the_summary_shows_tables_result_and_cost():
    lines = lines_of()
    for expected in CASES["summary"]["lines"]:
        assert expected in lines


def test_the_summary_takes_markup_as_text():
    lines = lines_of(warnings=["tau of [bold]x[/bold] is 150"])
    assert "Warning: tau of [bold]x[/bold] is 150." in lines
