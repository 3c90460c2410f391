"""At how many rows sites and server work out scores, against figures by hand."""

import re

import pandas as pd
import pytest
from numpy.random import default_rng

from strategies.report_page.page import render
from strategies.training.join_method import JoinMethod
from tests.support.examples.explained import (
    SMALL,
    SMALL_SQL,
    columns,
    explain,
    printed,
)
from tests.support.federated import train
from tests.support.page_reading import Page
from tp_flower.reports.records import report_dict
from tp_flower.settings import PrivacySettings

ALL = {"test_fraction": 0.0, "task": "regression"}
CLASSES = SMALL_SQL.replace("o.qty AS", "o.qty > 2 AS")
READS = (
    "joined once, where it reads the label and the other table's scores (elsewhere the "
    "mean)"
)
TWO = (
    "SELECT o.qty AS label, o.day, i.price FROM orders o JOIN items i ON o.item = "
    "i.item"
)


def readings_of(sql=SMALL_SQL, sites=SMALL, **how):
    return explain(sql, sites, **{**ALL, **how})["privacy"]["readings"]


def test_rows_joined_once_are_those_of_which_a_site_reads_the_others():
    # orders 0 and 1 have two items each, order 2 one; customer 1 (us) has three joined
    # rows, customer 2 (uk) two
    names = ("table", "site", "others", "rows", "single", "frequent")
    assert columns(readings_of(), *names) == [
        ["o", "shop", ["i", "c"], 3, 1, 0],
        ["i", "maker", ["o", "c"], 3, 1, 0],
        ["c", "uk", ["o", "i"], 1, 0, 0],
        ["c", "us", ["o", "i"], 1, 0, 0],
    ]


def test_a_report_has_the_readings_that_explain_foretells():
    for strategy in ("cg", "admm", "boost"):
        report = train(SMALL, SMALL_SQL, strategy, **ALL).report.privacy["readings"]
        assert [vars(reading) for reading in report] == readings_of(strategy=strategy)


def test_second_derivatives_tell_rows_that_are_joined_twice():
    for sql, strategy, single in (
        (CLASSES, "cg", [1, 1, 0, 0]),
        (CLASSES, "boost", [3, 3, 1, 0]),
        (SMALL_SQL, "boost", [1, 1, 0, 0]),
    ):
        readings = readings_of(sql, strategy=strategy, task="auto")
        assert [reading["single"] for reading in readings] == single


@pytest.mark.parametrize(
    ("batch_size", "single"), [(1, [3, 3, 1, 1]), (2, [3, 3, 1, 0])]
)
def test_rows_that_are_alone_in_batches_are_single(batch_size, single):
    """Of five joined rows; customer 1 is in three of them, all others in one or two."""
    readings = readings_of(strategy="sgd", batch_size=batch_size)
    assert [reading["single"] for reading in readings] == single


def test_only_a_squared_loss_tells_averages_and_only_clear_scores_tell_all():
    clear = PrivacySettings(scores="clear")
    assert all(reading["average"] for reading in readings_of())
    assert not any(reading["average"] for reading in readings_of(CLASSES, task="auto"))
    for reading in readings_of(privacy=clear):
        assert reading["frequent"] == reading["rows"]


def test_rows_of_ten_joined_rows_are_estimated_by_the_server():
    rng = default_rng(0)
    items = [0] * 9 + [1] * 10 + [2]
    orders = pd.DataFrame({"item": items, "qty": rng.normal(size=20), "day": range(20)})
    prices = pd.DataFrame({"item": range(3), "price": [1.0, 2.0, 4.0]})
    sites = {"shop": {"orders": orders}, "maker": {"items": prices}}
    assert columns(readings_of(TWO, sites), "single", "frequent") == [[20, 0], [1, 1]]
    text = " ".join(printed(explain(TWO, sites, **ALL), is_full=False).split())
    assert READS in text
    assert "joined 10 times or more" in text


def test_nothing_is_worked_out_without_derivatives_or_another_table():
    assert not readings_of(
        "SELECT o.qty AS label, o.day FROM orders o", {"shop": SMALL["shop"]}
    )
    assert not readings_of(strategy="coreset-ridge", coreset_size=5)


def test_score_vectors_that_a_policy_leaves_are_shown(monkeypatch):
    monkeypatch.setattr(JoinMethod, "scores_left", {1: 3, 2: 5, 3: 4})
    explanation = explain(SMALL_SQL, SMALL, **ALL)
    readings = explanation["privacy"]["readings"]
    assert [reading["left"] for reading in readings] == [None, 3, 5, 4]
    screen = printed(explanation, is_full=False).splitlines()
    # of a table the fewest of its shards
    tables = [line.split() for line in screen if re.match(r" *[oic] ", line)]
    assert [line[-1] for line in tables] == ["-", "3", "4"]
    content = report_dict(train(SMALL, SMALL_SQL, "cg", **ALL).report)
    page = Page(render(content)).text
    assert "scores left" in page
    assert "What each site, and the server, work out" in page
