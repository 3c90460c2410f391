"""Standard errors of hazard ratios over a snowflake, beside those of R's coxph."""

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from strategies.methods.moments.clusters import ClusteredSlopes
from strategies.methods.moments.information import InformationRound
from tests.support.federated import pieces, site_per_table
from tp_flower import api
from tp_flower.errors import TPFlowerError
from tp_flower.objectives.logistic import Logistic
from tp_flower.objectives.objective import RowClusters

OF_R = tomllib.loads(Path(__file__).with_name("survival_errors.toml").read_text())
"""What survival_errors.R has printed, of rows by the same formulas."""
RTOL = 6e-5
"""Slopes and columns over pairs of rows have 6 to 10 bits."""
COLUMNS = ["hours", "age", "crp"]
FEATURES = ["s.hours", "p.age", "l.crp"]
SQL = """SELECT s.days AS time, s.died AS event{more}, s.hours, p.age, l.crp
FROM surgeries s JOIN patients p ON s.person = p.id LEFT JOIN lab l ON l.person = p.id
"""
PLAIN = SQL.format(more="")
ALL = SQL.format(
    more=", s.begun AS entry, s.clinic AS strata, s.weight AS weight",
)
ENCODERS = "s.hours=none; p.age=none; l.crp=none missing=zero"


def tables(rows: int = 1200) -> dict[str, pd.DataFrame]:
    i = np.arange(rows)
    person = i * 7 % 300
    hazard = np.exp(0.2 * np.sin(i) + 0.3 * np.cos(person))
    days = 1 + np.floor(400 * np.abs(np.sin(1.7 * i * i + i)) / hazard)
    surgeries = pd.DataFrame(
        {
            "person": person,
            "hours": 2 + np.sin(i),
            "days": days,
            "died": (i * i * 7 + i) % 10 < 6,
            "begun": np.floor(days * (i * 13 % 11) / 11 * 0.6),
            "clinic": i % 2,
            "weight": 1 + i % 4 / 2,
        }
    )
    k = np.arange(300)
    patients = pd.DataFrame({"id": k, "age": 60 + 12 * np.cos(k)})
    lab = pd.DataFrame({"person": k, "crp": 3 + 2 * np.sin(2.3 * k)})
    lab = lab[k % 10 != 3]
    return {"surgeries": surgeries, "patients": patients, "lab": lab}


def sites(*cuts: int) -> dict[str, dict[str, pd.DataFrame]]:
    """A site for each table, and for each shard of the surgeries."""
    frames = tables()
    where = {name: {name: frames[name]} for name in ("patients", "lab")}
    for number, piece in enumerate(pieces(frames["surgeries"], *cuts)):
        where[f"clinic {number}"] = {"surgeries": piece}
    return where


def fit(sql: str, where: object, **how: object) -> api.FittedModel:
    settings = {"strategy": "cg", "l2": 0.0, "test_fraction": 0.0, **how}
    settings.setdefault("standard_errors", "model")
    return api.fit(sql, where, **{"encoders": ENCODERS, **settings})


@pytest.mark.parametrize(
    ("sql", "name", "cuts"), [(PLAIN, "plain", ()), (ALL, "all", (300, 800))]
)
def test_errors_are_those_of_r(sql, name, cuts):
    model = fit(sql, sites(*cuts))
    found = model.coefficients.set_index("column").loc[COLUMNS]
    of_r = {key: np.array(values) for key, values in OF_R[name].items()}
    ours = found["standard_error"].to_numpy(np.float64)
    np.testing.assert_allclose(ours, of_r["errors"], rtol=RTOL)
    distance = found["coefficient"].to_numpy(np.float64) - of_r["coefficients"]
    assert np.abs(distance / of_r["errors"]).max() < 1e-3
    ratios = of_r["coefficients"] / of_r["errors"]
    np.testing.assert_allclose(found["z"].to_numpy(np.float64), ratios, rtol=1e-3)
    inference = model.report["inference"]
    assert inference["ratio"] == "hazard ratio"
    assert inference["intercept"] == {}
    np.testing.assert_allclose(
        model.inflation.set_index("feature").loc[FEATURES, "factor"],
        of_r["inflation"],
        rtol=RTOL,
    )
    assert not model.report["warnings"]
    assert "hazard ratio (95 %)" in model.text()


def test_what_has_no_errors_says_why():
    where = sites()
    with pytest.raises(TPFlowerError, match="none that are 'robust': write 'model'"):
        fit(PLAIN, where, standard_errors="robust")
    surgeries = tables()["surgeries"]
    surgeries["clinic"] = (surgeries.index < 40).astype(int)
    small = {"surgeries": surgeries}
    model = fit(ALL, {**where, "clinic 0": small})
    assert "in a stratum fewer than 50 rows are at risk" in model.report["warnings"][0]
    # at three times four or twenty have an event, all others are censored later
    few = surgeries[:200].assign(days=np.arange(200) % 3 + 1, died=True)
    few.loc[12:, ["days", "died"]] = [900, False]
    model = fit(PLAIN, {**where, "clinic 0": {"surgeries": few}})
    assert "12 rows enter, leave or have an event" in model.report["warnings"][0]
    assert "standard_error" not in model.coefficients
    few.loc[12:59, "days"] = np.arange(12, 60) % 3 + 1
    few.loc[12:59, "died"] = True
    how = {"encoders": "s.hours=bins(12)", "l2": 0.1}
    model = fit(PLAIN, {**where, "clinic 0": {"surgeries": few}}, **how)
    assert "events have so few times" in model.report["warnings"][0]
    assert "standard_error" not in model.coefficients
    model = fit(PLAIN, {**where, "clinic 0": {"surgeries": few}}, l2=0.1)
    errors = model.coefficients.set_index("column")["standard_error"]
    assert errors[COLUMNS].notna().all()


def test_a_mean_of_few_rows_is_refused(tmp_path, monkeypatch):
    """Whose shares a server chooses: 9 rows under min-rows = 10."""
    honest = InformationRound._shares

    def chosen(*args):
        shares = honest(*args)
        shares[0, 9:] = 0.0
        return shares

    monkeypatch.setattr(InformationRound, "_shares", chosen)
    rules = """min-rows = 10
most-unmatched = 1.0
cover = 0
scores-per-rank = "any"
releases = { covariance = "clear", statistics = "moments", scores = "clear" }
"""
    frames = tables()
    every = site_per_table(tmp_path, frames, dict.fromkeys(frames, rules))
    match = r"\(min-rows\) refuses: the mean of the rows at risk would be of too few"
    with pytest.raises(TPFlowerError, match=match):
        fit(PLAIN, every)


@pytest.mark.parametrize(
    ("field", "number", "match"),
    [
        ("members", 1200, "'members' are numbers below 1200"),
        ("clusters", 10**6, "'clusters' are numbers below"),
    ],
)
def test_members_are_of_rows_and_clusters_that_there_are(
    field, number, match, monkeypatch
):
    honest = ClusteredSlopes.told

    def chosen(*args):
        fields = honest(*args)
        fields[field][0] = number
        return fields

    monkeypatch.setattr(ClusteredSlopes, "told", chosen)
    with pytest.raises(TPFlowerError, match=match):
        fit(PLAIN, sites())


def test_clusters_by_numbers_are_of_times_alone(monkeypatch):
    """Slopes that a server chooses, of classes, to whose sites nobody has agreed."""
    everywhere = RowClusters(
        np.arange(1200), np.arange(1200) // 2, np.ones(1200), count=600
    )
    honest = Logistic.information_by_rows

    def chosen(*args):
        return replace(honest(*args), clusters=everywhere)

    monkeypatch.setattr(Logistic, "information_by_rows", chosen)
    classes = "SELECT s.died AS label, s.hours, p.age FROM surgeries s "
    with pytest.raises(TPFlowerError, match="'clusters': the run was proposed with"):
        fit(f"{classes} JOIN patients p ON s.person = p.id", sites(), encoders="")


def test_shares_are_of_times_alone(monkeypatch):
    def chosen(_, told):
        return np.ones((1, told.shape[-1]))

    monkeypatch.setattr(InformationRound, "_shares", chosen)
    classes = "SELECT s.died AS label, s.hours, p.age FROM surgeries s "
    with pytest.raises(TPFlowerError, match="'shares': the run was proposed with None"):
        fit(f"{classes} JOIN patients p ON s.person = p.id", sites(), encoders="")
