"""Kaplan-Meier curves and the log-rank test over a join are R's on the joined rows."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tp_flower
from tests.support.federated import pieces, write_site
from tp_flower.errors import QueryError, SettingsError, SiteError
from tp_flower.methods.moments.describe.curves import shown_points

R = tomllib.loads(Path(__file__).with_name("curves.toml").read_text("utf-8"))
SQL = """SELECT s.time AS time, s.event AS event, s.clinic AS code,
CASE WHEN s.clinic > 0 THEN 'far' ELSE 'near' END AS place FROM stays s
JOIN clinics c ON s.clinic = c.id"""
GROUPS = "c.id=categories(0, 1, 2)"
FRAME = ("at_risk", "events", "survival", "error", "low", "high")


def stays() -> pd.DataFrame:
    """The rows of curves.R."""
    i = np.arange(1, 121)
    return pd.DataFrame(
        {"time": 1 + i * 37 % 25, "event": i * i * 7 % 10 < 6, "clinic": i % 3}
    )


def sites(*cuts: int) -> dict[str, dict[str, object]]:
    clinics = pd.DataFrame({"id": [0, 1, 2, 0]})
    return {"hospital": {"stays": pieces(stays(), *cuts)}, "law": {"clinics": clinics}}


@pytest.mark.parametrize(("name", "width"), [("exact", 1), ("grid", 5)])
def test_curves_are_those_of_survfit_on_the_join(name, width):
    times = np.arange(width, 26, width)
    frame = tp_flower.kaplan_meier(
        SQL, sites(70), by="c.id", times=times.tolist(), encoders=GROUPS, min_cell=1
    )
    expected = R[name]
    assert frame["group"].tolist() == np.repeat(["0", "1", "2"], len(times)).tolist()
    for column in FRAME:
        np.testing.assert_allclose(
            frame[column], expected[column], atol=1e-12, err_msg=column
        )
    test = frame.attrs["log_rank"]
    statistic, p = expected["log_rank"]
    assert test["statistic"] == pytest.approx(statistic, abs=1e-9)
    assert test["freedom"] == [2]
    assert test["p"] == pytest.approx(p, abs=1e-9)
    for column in ("observed", "expected"):
        found = [group[column] for group in test["groups"]]
        np.testing.assert_allclose(found, expected[column], atol=1e-9)


def test_one_curve_without_groups_and_rows_without_a_time():
    rows = pd.DataFrame({"days": [1.0, 2.0, 2.0, 9.0, None], "died": [1, 1, 0, 1, 1]})
    frame = tp_flower.kaplan_meier(
        "SELECT s.days AS time, s.died AS event FROM stays s",
        {"hospital": {"stays": rows}},
        times=[1, 2, 3],
        min_cell=1,
    )
    assert frame["survival"].round(6).tolist() == [0.75, 0.5, 0.5]
    assert frame["at_risk"].tolist() == [4, 3, 1]
    assert frame.attrs["log_rank"]["p"] is None
    (note,) = frame.attrs["notes"]
    assert note == "1 joined rows without a time or an event are left out."


def test_few_events_are_not_told_apart():
    shown = tp_flower.kaplan_meier(
        SQL, sites(), by="c.id", times=range(1, 26), encoders=GROUPS, min_cell=10
    )
    assert len(shown) < 75
    assert (shown["events"] >= 10).all()
    assert "Shown are times with 10 events" in shown.attrs["notes"][0]
    # what is shown is of all times
    whole = np.reshape(R["exact"]["survival"], (3, 25))
    places = shown["group"].astype(int), shown["time"].astype(int) - 1
    np.testing.assert_allclose(shown["survival"], whole[places])


def test_groups_may_be_an_expression_of_the_query():
    frame = tp_flower.kaplan_meier(
        SQL,
        sites(),
        by="place",
        times=[25],
        encoders="s.place=categories(near, far); s.code=none",
        min_cell=1,
    )
    assert frame.attrs["groups"] == [
        {"group": "near", "rows": 80, "events": 48},
        {"group": "far", "rows": 80, "events": 48},
    ]


def test_numbers_at_risk_differ_by_many_or_not_at_all():
    at_risk = np.array([100, 97, 80, 40, 12])
    deaths = np.array([2, 10, 30, 15, 5])
    points = shown_points(100, at_risk, deaths, 10)
    assert [(point.place, point.events, point.at_risk) for point in points] == [
        (1, 12, None),
        (2, 30, 80),
        (3, 15, 40),
    ]


@pytest.mark.parametrize(
    ("query", "rows", "problem"),
    [
        (SQL.replace("AS event", "AS died"), {}, "needs when a row has its event"),
        (SQL.replace("s.clinic AS code", "s.clinic AS strata"), {}, "write group-by"),
        (
            SQL.replace("s.clinic AS code", "s.clinic AS weight"),
            {},
            "leave 'AS weight'",
        ),
        (SQL.replace("s.event", "c.id"), {}, "the event c.id belongs to table c"),
        (SQL, {"time": -1}, "a time below 0, or an event that is neither"),
        (SQL, {"event": 2}, "a time below 0, or an event that is neither"),
    ],
)
def test_refused_times(query, rows, problem):
    frames = sites()
    table = stays().astype({"event": int})
    for name, value in rows.items():
        table.loc[3, name] = value
    frames["hospital"]["stays"] = table
    with pytest.raises(QueryError, match=re.escape(problem)):
        tp_flower.kaplan_meier(
            query, frames, by="c.id", times=[5], encoders=GROUPS, min_cell=1
        )


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"times": []}, "needs curve-times"),
        ({"times": [5, 3]}, "ascending times above 0"),
        ({"times": [5], "test_fraction": 0.2}, "set test-fraction = 0"),
        ({"times": [5], "row_weight": "entity"}, "leave row-weight 'joined'"),
        ({"times": [5], "privacy_features": "statistics"}, "has no noise"),
    ],
)
def test_refused_settings(how, problem):
    with pytest.raises(SettingsError, match=problem):
        tp_flower.kaplan_meier(SQL, sites(), **how)


def test_a_policy_refuses_intervals_of_few_events(tmp_path):
    rules = 'min-count = 10\nreleases = { moments = "clear" }'
    clinics = pd.DataFrame({"id": [0, 1, 2, 0]})
    files = {
        "hospital": write_site(
            tmp_path / "hospital", {"stays": stays()}, {"stays": rules}
        ),
        "law": write_site(tmp_path / "law", {"clinics": clinics}),
    }
    how = {"by": "c.id", "encoders": GROUPS, "home": tmp_path / "home"}
    match = (
        "column 'interval', which is the same in all but fewer rows; take curve-times"
    )
    with pytest.raises(SiteError, match=match):
        tp_flower.kaplan_meier(SQL, files, times=[1, 2, 3, 20], **how)
    frame = tp_flower.kaplan_meier(SQL, files, times=[6, 12, 18], **how)
    assert frame["events"].min() >= 10
