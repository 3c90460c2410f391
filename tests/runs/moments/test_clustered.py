"""Clustered errors are by the sums of the scores of each cluster in the built join."""

import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from strategies.methods.moments.information import InformationRound
from tests.support.examples.claims import (
    FEATURES,
    LABELS,
    fit,
    sharded,
    sites,
    sql,
    tables,
)
from tests.support.federated import write_site
from tests.support.reference.joins import engine_of
from tests.support.reference.linear_models import fit_linear
from tp_flower.errors import QueryError, SiteError

RTOL = 3e-4
"""Slopes of 400 rows in clusters of up to a dozen have 12 bits."""
COLUMNS = ["km", "age", "density", "rain", "(intercept)"]
OF_R = tomllib.loads(Path(__file__).with_name("clustered.toml").read_text("utf-8"))
"""What clustered.R has printed, which says of what."""
OF_STATSMODELS = {
    "squared": [0.0454375052298, 0.0515341608129, 0.0690999583377, 0.0590097206019],
    "logistic": [0.116944888293, 0.0860886113419, 0.114512397129, 0.117181999883],
    "poisson": [0.0490672460856, 0.0602477183103, 0.0591557878357, 0.0576268729924],
}
"""Errors of statsmodels 0.15, GLM(label, design, family).fit(cov_type="cluster",
cov_kwds={"groups": clusters}, use_t=True), without the intercept's, whose p are those
of R to 9 digits; of gamma its bread is another, by the observed information."""
HELD_OUT = {"test_split": "time(c.km)", "test_fraction": 0.25}
UNSCALED = {"encoders": "; ".join(f"{name}=none missing=zero" for name in FEATURES)}
CLUSTERED = {"standard_errors": "clustered", "cluster": "p"}


def joined(query: str, frames: dict, key: str = "c.pid") -> tuple:
    """Standardised features, the label, the rest of the columns, and the clusters."""
    keyed = query.replace(" FROM claims", f", {key} AS key FROM claims")
    with engine_of(frames) as engine:
        rows = engine.execute(keyed).fetchdf()
    clusters = pd.factorize(rows.pop("key"))[0]
    # a row without a key is alone
    clusters = np.where(clusters < 0, 1000 + np.arange(len(rows)), clusters)
    label = rows.pop("label").to_numpy(np.float64)
    return scaled(rows), label, rows, clusters


def scaled(rows: pd.DataFrame) -> np.ndarray:
    raw = rows[COLUMNS[:-1]]
    return ((raw - raw.mean()) / raw.std(ddof=0)).fillna(0.0).to_numpy(np.float64)


def errors_of(model) -> np.ndarray:
    found = model.coefficients.set_index("column").loc[COLUMNS]
    return found["standard_error"].to_numpy(np.float64)


@pytest.mark.parametrize("loss", OF_R)
def test_the_slow_computation_is_that_of_r(loss):
    features, label, _, clusters = joined(sql(LABELS[loss]), tables())
    found = fit_linear(features, label, loss, clusters=clusters)
    for name, of_r in OF_R[loss].items():
        ours = getattr(found, name)[[-1, 0, 1, 2, 3]]
        np.testing.assert_allclose(ours, of_r, rtol=1e-6)
    if loss in OF_STATSMODELS:
        errors = found.errors[:-1]
        np.testing.assert_allclose(errors, OF_STATSMODELS[loss], rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "more", "is_left", "how"),
    [
        ("squared", ', c.times AS "weight"', False, UNSCALED),
        ("logistic", "", True, {}),
        ("poisson", ', LN(c.times) AS "offset"', False, HELD_OUT),
    ],
)
def test_errors_are_those_of_the_join(loss, more, is_left, how):
    frames = tables()
    query = sql(LABELS[loss]).replace(" FROM", f"{more} FROM")
    if is_left:
        # some have no key, others share one that people lacks
        frames["claims"]["pid"] = frames["claims"]["pid"].astype("Int64")
        frames["claims"].loc[:6, "pid"] = pd.NA
        query = query.replace("JOIN people", "LEFT JOIN people")
    where = sharded(frames) if is_left else sites(**frames)
    model = fit(query, where, loss=loss, **CLUSTERED, **how)
    features, label, rows, clusters = joined(query, frames)
    if how == HELD_OUT:
        first = np.argsort(rows["km"].to_numpy())[
            : model.report["joined-rows"]["train"]
        ]
        assert len(first) < len(rows)
        rows, label, clusters = rows.iloc[first], label[first], clusters[first]
        features = scaled(rows)
    elif how == UNSCALED:
        features = rows[COLUMNS[:-1]].fillna(0.0).to_numpy(np.float64)
    by_row = {
        name: rows[column].to_numpy(np.float64)
        for name, column in (("weights", "weight"), ("offset", "offset"))
        if column in rows
    }
    expected = fit_linear(features, label, loss, clusters=clusters, **by_row)
    # the intercept has another row of NULL in shards
    places = slice(0, 4) if is_left else slice(0, 5)
    found = errors_of(model)
    np.testing.assert_allclose(found[places], expected.errors[places], rtol=RTOL)
    by_column = model.coefficients.set_index("column").loc[COLUMNS[:-1]]
    reach = (by_column["high"] - by_column["low"]) / 2.0
    np.testing.assert_allclose(reach, expected.reach[:-1], rtol=RTOL)
    # p of a ratio that is off by as much
    np.testing.assert_allclose(by_column["p"], expected.chances[:-1], rtol=50 * RTOL)
    count = len(np.unique(clusters))
    note = model.report["inference"]["note"]
    assert note.startswith(f"Standard errors for {count} independent clusters by p")
    # the sums of a cluster's rows are far from those of independent ones
    alone = fit_linear(features, label, loss, is_robust=True, **by_row)
    assert np.abs(expected.errors / alone.errors - 1.0).max() > 50 * RTOL


def test_rows_that_are_each_a_cluster_have_robust_errors():
    frames = tables()
    rows = len(frames["claims"])
    frames["claims"]["number"] = range(rows)
    frames["details"] = pd.DataFrame(
        {"number": range(rows), "size": np.random.default_rng(1).normal(size=rows)}
    )
    query = """SELECT c.claims AS label, c.km, d.size, p.age FROM claims c
    JOIN details d ON c.number = d.number JOIN people p ON c.pid = p.pid"""
    kinds = {
        "clustered": {"standard_errors": "clustered", "cluster": "d"},
        "robust": {"standard_errors": "robust"},
    }
    clustered, robust = (
        fit(query, sites(**frames), loss="poisson", **how).coefficients
        for how in kinds.values()
    )
    with engine_of(frames) as engine:
        clusters = len(engine.execute(query).fetchdf())
    ratio = clustered["standard_error"] / robust["standard_error"]
    # as HC1 is to HC0: each row is a cluster
    factor = clusters / (clusters - len(robust[robust["column"] != "(intercept)"]) - 1)
    np.testing.assert_allclose(ratio, np.sqrt(factor), rtol=RTOL)
    few = f"{query} WHERE p.pid < 9"
    with pytest.raises(QueryError, match=r"are of 9 clusters by 'p'.*for 10 or more"):
        fit(few, sites(**frames), loss="poisson", **CLUSTERED)
    model = fit(few, sites(**frames), loss="poisson", **kinds["clustered"])
    assert model.coefficients["standard_error"].notna().all()


def test_clusters_by_a_column_of_the_labels_table_are_joined_values():
    frames = tables()
    claims = frames["claims"]
    claims["agent"] = np.random.default_rng(5).integers(40, size=len(claims))
    query = """SELECT c.claims AS label, c.km, p.age FROM claims c
    JOIN people p ON c.pid = p.pid"""
    how = {"loss": "poisson", "standard_errors": "clustered"}
    with pytest.raises(QueryError, match="by a column of c, join its values"):
        fit(query, sites(**frames), cluster="c.agent", **how)
    values = """JOIN (SELECT agent, COUNT(*) AS n FROM claims GROUP BY agent) k
    ON c.agent = k.agent"""
    model = fit(f"{query} {values}", sites(**frames), cluster="k", **how)
    with engine_of(frames) as engine:
        rows = engine.execute(query.replace("p.age", "p.age, c.agent")).fetchdf()
    raw = rows[["km", "age"]]
    features = ((raw - raw.mean()) / raw.std(ddof=0)).to_numpy(np.float64)
    label, agents = rows["label"].to_numpy(np.float64), rows["agent"].to_numpy()
    expected = fit_linear(features, label, "poisson", clusters=agents)
    found = model.coefficients.set_index("column").loc[["km", "age", "(intercept)"]]
    np.testing.assert_allclose(found["standard_error"], expected.errors, rtol=RTOL)
    assert "40 independent clusters by k" in model.report["inference"]["note"]


def test_a_window_of_each_row_is_no_cluster_and_its_customer_is():
    frames = tables()
    rng = np.random.default_rng(2)
    frames["claims"]["day"] = rng.integers(100, size=len(frames["claims"]))
    frames["visits"] = pd.DataFrame(
        {"pid": rng.integers(90, size=300), "day": rng.integers(100, size=300)}
    )
    query = """SELECT c.claims AS label, c.km, p.age, w.n FROM claims c
    JOIN people p ON c.pid = p.pid LEFT JOIN LATERAL (SELECT COUNT(*) AS n
    FROM visits v WHERE v.pid = c.pid AND v.day < c.day) w ON TRUE"""
    how = {"loss": "poisson", "sealed_cutoffs": True, **CLUSTERED}
    with pytest.raises(QueryError, match="'w' looks back from each row's own time"):
        fit(query, sites(**frames), **{**how, "cluster": "w"})
    value = query.replace(" AND v.day < c.day", "")
    with pytest.raises(QueryError, match="'w' has one row for all keys that it lacks"):
        fit(value, sites(**frames), **{**how, "cluster": "w"})
    model = fit(query, sites(**frames), **how)
    assert "independent clusters by p" in model.report["inference"]["note"]
    assert model.coefficients["standard_error"].notna().all()


def test_slopes_are_told_to_the_label_table_alone(monkeypatch):
    """Others are told how many rows have each of their keys, as by moments."""
    seen = []
    ask = InformationRound._request

    def kept(self, *arguments):
        request = ask(self, *arguments)
        tables_of = {part.number: part.table for part in self.joined.parts}
        seen.extend((tables_of[number], body) for number, body in request.parts.items())
        return request

    monkeypatch.setattr(InformationRound, "_request", kept)
    model = fit(sql("c.claims"), loss="poisson", **CLUSTERED)
    by_table = dict(seen)
    label = by_table.pop("c")
    assert label.slopes.dtype == np.int32
    assert (label.slopes < 0).any()
    assert len(label.slopes) == model.report["joined-rows"]["train"]
    for body in by_table.values():
        assert body.slopes is None
        assert body.weights is None
    # of each person the claims, and of each region or zone those of its people
    counted = by_table["p"].incoming["0"][1, :, 0]
    with engine_of(tables()) as engine:
        rows = engine.execute(
            "SELECT COUNT(*) AS n FROM claims JOIN people USING (pid) GROUP BY pid"
        ).fetchdf()
    assert sorted(counted[counted > 0]) == sorted(rows["n"])


@pytest.mark.parametrize(
    ("how", "more", "problem"),
    [
        ({"cluster": "z"}, "", r"cluster: 'z' is no table .* joined with: p$"),
        ({"loss": "cox"}, "", "there are none that are 'clustered'"),
    ],
)
def test_clusters_that_have_no_errors(how, more, problem):
    query = sql("c.claims", more=more)
    if "loss" in how:
        query = query.replace(
            "c.claims AS label", "c.cost AS time, c.is_large AS event"
        )
    with pytest.raises(QueryError, match=problem):
        fit(query, **{"loss": "poisson", **CLUSTERED, **how})


def test_few_clusters_are_told_and_fewer_than_columns_have_no_errors():
    some = sql("c.claims", more=" WHERE p.pid < 40")
    model = fit(some, loss="poisson", **CLUSTERED)
    inference = model.report["inference"]
    assert "Of fewer than 50 clusters" in inference["note"]
    assert f"t by {inference['clusters'] - 1} degrees" in inference["note"]
    assert inference["tail-freedom"] == inference["clusters"] - 1
    assert inference["freedom"] is None
    assert any("p is too small" in text for text in model.report["warnings"])
    few = sql("c.claims", more=" WHERE p.pid < 12")
    how = {"loss": "poisson", "l2": 0.1, **CLUSTERED}
    model = fit(few, encoders="p.age=bins(20)", **how)
    assert "clusters are no more than" in model.report["inference"]["note"]
    assert "standard_error" not in model.coefficients
    model = fit(few, encoders="p.age=standard", **how)
    assert model.coefficients["standard_error"].notna().all()


def test_a_site_refuses_sums_of_no_more_clusters_than_columns(tmp_path, monkeypatch):
    """An honest server does not ask for them."""
    monkeypatch.setattr(InformationRound, "_refusal", lambda _: "")
    rules = """most-unmatched = 1\nmin-rows = 2
    releases = { scores = "masked", covariance = "clear" }"""
    files = {
        name: write_site(tmp_path / name, {name: frame}, {name: rules})
        for name, frame in tables().items()
    }
    few = sql("c.claims", ("c.km", "p.age"), more=" WHERE p.pid < 12")
    how = {"loss": "poisson", "l2": 0.1, "encoders": "c.km=bins(16)", **CLUSTERED}
    with pytest.raises(SiteError, match="clusters, which are no more, tell those of"):
        fit(few, files, **how)


def of_claims(folder, least: int) -> dict:
    """Sites whose policies ask for so many rows of claims."""
    rules = """most-unmatched = 1\nmin-rows = {}
    releases = {{ scores = "masked", covariance = "clear" }}"""
    return {
        name: write_site(
            folder / name,
            {name: frame},
            {name: rules.format(least if name == "claims" else 1)},
        )
        for name, frame in tables().items()
    }


def test_a_policy_counts_clusters_as_rows(tmp_path):
    with pytest.raises(
        SiteError, match=r"\(min-rows\) refuses: the clusters of table 'c'.*88"
    ):
        fit(sql("c.claims"), of_claims(tmp_path, 88), loss="poisson", **CLUSTERED)


def test_rows_with_a_slope_of_0_make_no_cluster(tmp_path, monkeypatch):
    """A dishonest server would read the sum over pairs of the others."""
    ask = InformationRound._request

    def of_one(self, *arguments):
        request = ask(self, *arguments)
        for body in request.parts.values():
            if body.slopes is not None:
                body.slopes[1:] = 0
        return request

    monkeypatch.setattr(InformationRound, "_request", of_one)
    with pytest.raises(
        SiteError, match="the clusters of table 'c' would be of too few"
    ):
        fit(sql("c.claims"), of_claims(tmp_path, 2), loss="poisson", **CLUSTERED)


def test_slopes_that_might_wrap_around_are_refused(monkeypatch):
    ask = InformationRound._request

    def lower(self, *arguments):
        request = ask(self, *arguments)
        parts = {number: replace_slopes(body) for number, body in request.parts.items()}
        return type(request)(
            columns=request.columns,
            largest_cluster=request.largest_cluster,
            parts=parts,
        )

    def replace_slopes(body):
        if body.slopes is None:
            return body
        fields = {name: getattr(body, name) for name in body.__struct_fields__}
        return type(body)(**{**fields, "slopes": 2 * body.slopes})

    monkeypatch.setattr(InformationRound, "_request", lower)
    with pytest.raises(SiteError, match="'largest_cluster' is less than one"):
        fit(sql("c.claims"), loss="poisson", **CLUSTERED)
