"""A model's summary, and its file of coefficients, have the numbers of the report."""

import re

import numpy as np
import pandas as pd
import pytest

from tests.support.examples.claims import FEATURES, fit, sql
from tp_flower import api, load
from tp_flower.reports.summary import summary

RULE = re.compile("^[=-]+$", re.MULTILINE)


@pytest.fixture(scope="module")
def model() -> api.FittedModel:
    jobs = "p.job=categories(baker, cook, nurse, smith)"
    return fit(sql("c.claims", (*FEATURES, "p.job")), loss="poisson", encoders=jobs)


def read(block: str) -> dict[str, list[float]]:
    """The numbers behind each name of a block; NaN where there is none."""
    lines = (re.split(r" {2,}", line.rstrip()) for line in block.strip().splitlines())
    return {
        name: [float("nan" if text == "-" else text) for text in texts]
        for name, *texts in lines
    }


def check(block: str, expected: dict[str, list[float | None]]) -> None:
    found = read(block)
    assert list(found) == list(expected)
    for name, numbers in expected.items():
        # four digits or five
        wanted = np.array(numbers, np.float64)
        np.testing.assert_allclose(found[name], wanted, rtol=5.1e-4, err_msg=name)


def test_a_summary_has_the_numbers_of_the_report(model):
    _, head, heads, coefficients, _, tests, _, contrasts, notes = RULE.split(
        model.summary()
    )
    inference = model.report["inference"]
    intercept = inference["intercept"]
    frame = model.coefficients.set_index("column")
    frame = frame.drop(index="(intercept)").drop(columns="table")
    names = ["c.km", "p.age", *inference["undetermined"], "r.density", "z.rain"]
    rows = dict(zip(names, frame.to_numpy(np.float64).tolist(), strict=True))
    expected = {name: [*row, np.exp(row[0])] for name, row in rows.items()}
    ends = [intercept[name] for name in ("low", "high")]
    whole = [intercept["value"], intercept["standard-error"], None, None, *ends, None]
    check(coefficients, {"(intercept)": whole} | expected)
    assert heads.split() == [
        *("coefficient", "std", "error", "z", "p", "2.5", "%", "97.5", "%"),
        *("ratio", "of", "means"),
    ]
    inflation = {each["feature"]: each["scaled"] for each in inference["inflation"]}
    check(
        tests,
        {
            each["feature"]: [
                *(each[name] for name in ("columns", "statistic", "p")),
                inflation[each["feature"]],
            ]
            for each in inference["tests"]
        },
    )
    check(
        contrasts,
        {
            f"{each['column']} - p.job=baker": [
                *(each[n] for n in ("value", "standard-error", "z", "p")),
                *(each["low"], each["high"], np.exp(each["value"])),
            ]
            for each in inference["contrasts"]
        },
    )
    figures = " ".join(head.split())
    assert "Loss: poisson" in figures
    assert "Joined rows: 380" in figures
    assert f"Training deviance: {model.metrics['train']['deviance']:.4f}" in figures
    assert "by the information of the loss (poisson)" in notes


def test_decimal_points_are_below_each_other(model):
    block = RULE.split(model.summary())[3].splitlines()
    points = {re.search(r"  -?\d*(\.)", line).start(1) for line in block if line}
    assert len(points) == 1


def test_tables_that_are_hidden_are_said(model):
    shown = {
        name: entries
        for name, entries in model.report["coefficients"].items()
        if name != "r"
    }
    without_errors = {**model.report, "coefficients": shown, "inference": {}}
    text = summary(without_errors)
    assert "r.density" not in text
    assert "Not shown of r: coefficients = true in a table's policy." in text
    # the intercept of a table, as there is none of all
    assert "c.(intercept)" in text


def test_the_file_of_coefficients_is_the_data_frame(model, tmp_path):
    pd.testing.assert_frame_equal(
        pd.read_csv(model.folder / "coefficients.csv"), model.coefficients
    )
    saved = load(model.save(tmp_path / "model"))
    pd.testing.assert_frame_equal(
        pd.read_csv(saved.folder / "coefficients.csv"), model.coefficients
    )
    assert saved.summary() == model.summary()
