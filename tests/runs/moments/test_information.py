"""Errors of generalised linear models are those of Fisher scoring on the built join."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tp_flower
from tests.support.examples.claims import (
    FEATURES,
    LABELS,
    fit,
    joined,
    sharded,
    sites,
    sql,
    tables,
)
from tests.support.federated import write_site
from tests.support.reference.joins import engine_of
from tests.support.reference.linear_models import KNOWN_DISPERSION, fit_linear
from tp_flower import api
from tp_flower.errors import ModelError, QueryError, SettingsError, SiteError

RTOL = 2e-5
NOISE = {
    "privacy_labels": "laplace",
    "privacy_label_epsilon": 1.0,
    "privacy_label_range": "0, 9",
}
OF_R = tomllib.loads(Path(__file__).with_name("information.toml").read_text("utf-8"))
"""What information.R has printed, which says of what."""
COLUMNS = ["km", "age", "density", "rain"]


def check(model: api.FittedModel, expected, loss: str) -> None:
    found = model.coefficients.set_index("column").loc[[*COLUMNS, "(intercept)"]]
    errors = found["standard_error"].to_numpy(np.float64)
    np.testing.assert_allclose(errors, expected.errors, rtol=RTOL)
    # what is left of the gradient, and of rounded weights, in parts of an error
    distance = found["coefficient"].to_numpy(np.float64) - expected.coefficients
    assert np.abs(distance / expected.errors)[:-1].max() < RTOL
    assert not any("rough" in text for text in model.report["warnings"])
    ratio = "z" if loss in KNOWN_DISPERSION else "t"
    ratios = found[ratio].to_numpy(np.float64)[:-1]
    ours = (expected.coefficients / expected.errors)[:-1]
    np.testing.assert_allclose(ratios, ours, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        found["p"].to_numpy(np.float64)[:-1], expected.chances[:-1], rtol=5e-3
    )
    reach = (found["high"] - found["low"]).to_numpy(np.float64) / 2.0
    np.testing.assert_allclose(reach, expected.reach, rtol=RTOL)
    intercept = model.report["inference"]["intercept"]
    assert intercept["value"] == pytest.approx(expected.coefficients[-1], abs=1e-5)
    assert intercept["standard-error"] == pytest.approx(expected.errors[-1], rel=RTOL)


@pytest.mark.parametrize("loss", OF_R)
def test_the_slow_computation_is_that_of_r(loss):
    features, label = joined(sql(LABELS[loss]))
    intercept_first = [-1, 0, 1, 2, 3]
    found = fit_linear(features, label, loss)
    of_r = OF_R[loss]
    for name in ("coefficients", "errors", "chances"):
        ours = getattr(found, name)[intercept_first]
        np.testing.assert_allclose(ours, of_r[name], rtol=1e-6)
    robust = fit_linear(features, label, loss, is_robust=True)
    np.testing.assert_allclose(
        robust.errors[intercept_first], of_r["robust"], rtol=1e-6
    )


@pytest.mark.parametrize("loss", OF_R)
def test_columns_beside_are_tested_as_by_r(loss):
    """By `anova(smaller, larger)`: density and rain beside km and age."""
    larger = fit(sql(LABELS[loss]), loss=loss)
    smaller = fit(sql(LABELS[loss], FEATURES[:2]), loss=loss)
    test = larger.likelihood_ratio(smaller)
    statistic, p = OF_R[loss]["columns_beside"]
    assert test.columns == 2
    # scores are rounded, and so is the loss
    assert test.statistic == pytest.approx(statistic, rel=1e-4)
    assert test.p == pytest.approx(p, rel=1e-4)


def test_models_that_cannot_be_compared():
    counts = fit(sql("c.claims"), loss="poisson")
    refused = {
        "the smaller model has 5 parameters, the larger one 5": counts,
        "the models differ in the loss": fit(
            sql("c.claims", FEATURES[:1]), loss="negative-binomial(0.7)"
        ),
        "the models differ in the loss of a constant": fit(
            sql("c.claims + 1", FEATURES[:1]), loss="poisson"
        ),
        "the models differ in training rows": fit(
            sql("c.claims", FEATURES[:1], " WHERE c.km > -1"), loss="poisson"
        ),
        "has a penalty, l2, and no likelihood: train both with": fit(
            sql("c.claims", FEATURES[:1]), loss="poisson", l2=0.1
        ),
        "train it by strategy 'cg' with standard_errors": fit(
            sql("c.claims", FEATURES[:1]), loss="poisson", standard_errors="none"
        ),
    }
    for words, smaller in refused.items():
        with pytest.raises(ModelError, match=words):
            counts.likelihood_ratio(smaller)


@pytest.mark.cases(
    "squared-model",
    "logistic-robust",
    "poisson-model",
    "negative-binomial(0.7)-robust",
    "gamma-robust",
    "tweedie(1.4)-model",
)
@pytest.mark.parametrize("kind", ["model", "robust"])
@pytest.mark.parametrize("loss", LABELS)
def test_errors_are_those_of_the_join(loss, kind):
    query = sql(LABELS[loss])
    model = fit(query, loss=loss, standard_errors=kind)
    features, label = joined(query)
    expected = fit_linear(features, label, loss, is_robust=kind == "robust")
    check(model, expected, loss)
    has_ratio = loss not in ("squared", "logistic")
    assert ("ratio of means (95 %)" in model.text()) == has_ratio
    tests = {each["feature"]: each for each in model.report["inference"]["tests"]}
    assert list(tests) == list(FEATURES)
    for name, each in tests.items():
        column = model.coefficients.set_index("column").loc[name[2:]]
        ratio = column["z" if loss in KNOWN_DISPERSION else "t"]
        assert each["columns"] == 1
        assert each["statistic"] == pytest.approx(ratio**2, rel=1e-9)
        assert each["p"] == pytest.approx(column["p"], rel=1e-6)
    # of the estimates' correlations, whatever the kind of errors
    correlated = fit_linear(features, label, loss).covariance[:-1, :-1]
    factors = np.diag(correlated) * np.diag(np.linalg.inv(correlated))
    np.testing.assert_allclose(model.inflation["factor"], factors, rtol=RTOL)


@pytest.mark.parametrize("loss", ["poisson", "gamma"])
def test_tables_in_shards(loss):
    query = sql(LABELS[loss])
    where = sharded(tables())
    features, label = joined(query)
    expected = fit_linear(features, label, loss, is_robust=True)
    check(fit(query, where, loss=loss, standard_errors="robust"), expected, loss)


def test_a_penalty_makes_them_conditional():
    query = sql("c.is_large")
    model = fit(query, loss="logistic", l2=0.05)
    features, label = joined(query)
    check(model, fit_linear(features, label, "logistic", l2=0.05), "logistic")
    assert "conditional on l2" in model.report["inference"]["note"]


@pytest.mark.cases("poisson", "squared")
@pytest.mark.parametrize("loss", ["poisson", "logistic", "squared"])
def test_an_offset_is_part_of_the_score(loss):
    query = sql(LABELS[loss])
    exposed = query.replace("FROM claims", ', LN(c.times) AS "offset" FROM claims')
    model = fit(exposed, loss=loss)
    with engine_of(tables()) as engine:
        offset = engine.execute(exposed).fetchdf()["offset"].to_numpy(np.float64)
    features, label = joined(query)
    check(model, fit_linear(features, label, loss, offset=offset), loss)


@pytest.mark.parametrize("loss", ["squared", "poisson"])
def test_weights_are_those_of_the_query(loss):
    query = sql(LABELS[loss])
    weighted = query.replace("FROM claims", ", c.times AS weight FROM claims")
    with engine_of(tables()) as engine:
        rows = engine.execute(weighted).fetchdf()
    weights = rows["weight"].to_numpy(np.float64)
    raw = rows[COLUMNS].to_numpy(np.float64)
    names = "; ".join(f"{name}=none missing=zero" for name in FEATURES)
    model = fit(weighted, loss=loss, encoders=names)
    label = rows["label"].to_numpy(np.float64)
    expected = fit_linear(np.nan_to_num(raw), label, loss, weights=weights)
    found = model.coefficients.set_index("column").loc[[*COLUMNS, "(intercept)"]]
    errors = found["standard_error"].to_numpy(np.float64)
    np.testing.assert_allclose(errors, expected.errors, rtol=1e-4)


def test_held_out_rows_have_no_part():
    query = sql("c.claims")
    how = {"test_split": "time(c.km)", "test_fraction": 0.25}
    model = fit(query, loss="poisson", **how)
    trained = model.report["joined-rows"]["train"]
    with engine_of(tables()) as engine:
        first = f"SELECT * FROM ({query}) ORDER BY km LIMIT {trained}"
        kept = engine.execute(first).fetchdf()
    label = kept.pop("label").to_numpy(np.float64)
    scaled = ((kept - kept.mean()) / kept.std(ddof=0)).fillna(0.0).to_numpy()
    check(model, fit_linear(scaled, label, "poisson"), "poisson")


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_categories_differ_from_a_reference_as_by_treatment_coding(loss):
    query = sql(LABELS[loss], ("c.km", "p.job"))
    model = fit(
        query, loss=loss, encoders="p.job=categories(baker, cook, nurse, smith)"
    )
    with engine_of(tables()) as engine:
        rows = engine.execute(query).fetchdf()
    inference = model.report["inference"]
    names = [f"job={job}" for job in ("baker", "cook", "nurse", "smith")]
    assert inference["undetermined"] == [f"p.{name}" for name in names]
    undetermined = model.coefficients.set_index("column").loc[names]
    assert undetermined["standard_error"].isna().all()
    found = pd.DataFrame(inference["contrasts"]).set_index("column")
    assert set(found["reference"]) == {"p.job=baker"}
    km = (rows["km"] - rows["km"].mean()) / rows["km"].std(ddof=0)
    coded = pd.get_dummies(rows["job"])[["cook", "nurse", "smith"]]
    design = np.column_stack([km, coded.to_numpy(np.float64)])
    expected = fit_linear(design, rows["label"].to_numpy(np.float64), loss)
    others = found.loc[[f"p.{name}" for name in names[1:]]]
    np.testing.assert_allclose(others["value"], expected.coefficients[1:4], rtol=1e-4)
    errors = expected.errors[1:4]
    np.testing.assert_allclose(others["standard-error"], errors, rtol=1e-4)
    differences = expected.coefficients[1:4]
    square = differences @ np.linalg.solve(expected.covariance[1:4, 1:4], differences)
    (test,) = [each for each in inference["tests"] if each["feature"] == "p.job"]
    assert test["columns"] == 3
    share = 1.0 if loss in KNOWN_DISPERSION else 3.0
    assert test["statistic"] == pytest.approx(square / share, rel=1e-4)


def test_levels_beside_their_slope_have_no_differences():
    """Whatever the slope takes from one level to the next, the levels may take back."""
    query = sql("c.claims", ("c.km", "c.times"))
    frames = tables()
    frames["claims"]["times"] = frames["claims"]["times"].clip(upper=3)
    how = {"loss": "poisson", "encoders": "c.times=levels(3)"}
    inference = fit(query, sites(**frames), **how).report["inference"]
    assert len(inference["undetermined"]) == 1 + 3
    assert inference["contrasts"] == []
    (test,) = [each for each in inference["tests"] if each["feature"] == "c.times"]
    assert test["columns"] == 2
    with engine_of(frames) as engine:
        rows = engine.execute(query).fetchdf()
    km = (rows["km"] - rows["km"].mean()) / rows["km"].std(ddof=0)
    coded = pd.get_dummies(rows["times"]).iloc[:, 1:]
    design = np.column_stack([km, coded.to_numpy(np.float64)])
    expected = fit_linear(design, rows["label"].to_numpy(np.float64), "poisson")
    differences = expected.coefficients[1:3]
    square = differences @ np.linalg.solve(expected.covariance[1:3, 1:3], differences)
    assert test["statistic"] == pytest.approx(square, rel=1e-4)


@pytest.mark.parametrize("loss", ["squared", "poisson"])
def test_the_inflation_of_features_is_that_of_r(loss):
    """Of an indicator of each job, where R leaves one out."""
    query = sql(LABELS[loss], (*FEATURES, "p.job"))
    names = "p.job=categories(baker, cook, nurse, smith)"
    found = fit(query, loss=loss, encoders=names).inflation.set_index("feature")
    of_r = found.loc[[*FEATURES, "p.job"]]
    np.testing.assert_allclose(of_r["factor"], OF_R[loss]["inflation"], rtol=RTOL)
    assert of_r["columns"].to_list() == [1, 1, 1, 1, 3]
    powers = 0.5 / of_r["columns"]
    np.testing.assert_allclose(of_r["scaled"], of_r["factor"] ** powers)


def test_what_others_determine_has_no_inflation():
    frames = tables()
    frames["people"]["months"] = 12.0 * frames["people"]["age"]
    query = sql("c.claims", ("c.km", "p.age", "p.months"))
    model = fit(query, sites(**frames), loss="poisson")
    factors = model.inflation.set_index("feature")["factor"]
    assert factors.isna().to_dict() == {"c.km": False, "p.age": True, "p.months": True}
    page = (model.folder / "report.html").read_text()
    assert "Variance inflation" in page
    assert "determined by others" in page


def test_models_without_errors_have_no_inflation():
    model = fit(sql("c.claims"), loss="poisson", num_epochs=1)
    with pytest.raises(ModelError, match="not come to the optimum"):
        model.inflation  # noqa: B018 - a property


def test_errors_are_shown_where_coefficients_are(tmp_path):
    allowed = (
        'most-unmatched = 1\nreleases = { scores = "masked", covariance = "clear" }'
    )
    rules = {"people": f"coefficients = true\n{allowed}"}
    files = {
        name: write_site(
            tmp_path / name, {name: frame}, {name: rules.get(name, allowed)}
        )
        for name, frame in tables().items()
    }
    model = fit(sql("c.claims"), files, loss="poisson")
    assert set(model.coefficients["table"]) == {"p"}
    assert model.coefficients["standard_error"].notna().all()
    inference = model.report["inference"]
    assert "Not shown of c, r, z, whose policies" in inference["note"]
    for name in ("tests", "inflation"):
        assert [each["feature"] for each in inference[name]] == ["p.age"]
    assert inference["intercept"] == {}


def test_a_policy_without_a_covariance_refuses_before_training(tmp_path):
    rules = 'releases = { scores = "masked", moments = "clear" }'
    files = {
        name: write_site(tmp_path / name, {name: frame}, {name: rules})
        for name, frame in tables().items()
    }
    with pytest.raises(SiteError, match=r"train\.prepare failed.*covariance = never"):
        fit(sql("c.claims"), files, loss="poisson")


def test_nothing_is_asked_for_without_the_setting():
    query = sql("c.claims")
    report = fit(query, loss="poisson", standard_errors="none").report
    assert "inference" not in report
    assert not any("train.information" in str(m) for m in report["privacy"]["messages"])


def test_explain_says_who_learns_what_and_refuses_what_training_would():
    how = {"strategy": "cg", "loss": "poisson", "standard_errors": "robust"}
    explanation = tp_flower.explain(sql("c.claims"), sites(), **how)
    messages = explanation.report["privacy"]["messages"]
    of_errors = [m for m in messages if m["message"] == "train.information"]
    assert of_errors
    assert any("weighted second moments" in m["carries"] for m in of_errors)
    with pytest.raises(QueryError, match=r"is in up to .* joined rows"):
        tp_flower.explain(sql("p.age", ("c.km",)), sites(), **how)


def test_there_are_none_before_the_optimum():
    model = fit(sql("c.claims"), loss="poisson", num_epochs=1)
    assert "not come to the optimum" in model.report["inference"]["note"]
    assert any("not come to the optimum" in text for text in model.report["warnings"])
    assert "standard_error" not in model.coefficients


def test_coefficients_that_rounding_keeps_from_the_optimum_have_none():
    # far from 0, at another site than the intercept
    frames = tables()
    frames["people"]["born"] = 1980.0 - frames["people"]["age"]
    query = sql("c.claims", ("c.km", "p.born"))
    raw = fit(query, sites(**frames), loss="poisson", encoders="p.born=none")
    assert "encoded as 'standard'" in raw.report["inference"]["note"]
    assert "standard_error" not in raw.coefficients
    scaled = fit(query, sites(**frames), loss="poisson", encoders="p.born=standard")
    assert scaled.coefficients["standard_error"].notna().all()


def test_labels_that_a_column_tells_have_none():
    frames = tables()
    frames["claims"]["is_large"] = frames["claims"]["km"] > 0.1
    model = fit(sql("c.is_large"), sites(**frames), loss="logistic")
    assert "no finite coefficients" in model.report["inference"]["note"]
    # a category of one class alone
    told = frames["claims"].index < 12
    frames["claims"]["told"] = told * 1.0
    chances = np.random.default_rng(0).random(len(told))
    frames["claims"]["is_large"] = told | (chances < 0.3)
    some = sql("c.is_large", ("c.km", "c.told"))
    ridge = fit(some, sites(**frames), loss="logistic", l2=0.1)
    assert ridge.coefficients["standard_error"].notna().all()
    model = fit(some, sites(**frames), loss="logistic")
    assert "no finite coefficients" in model.report["inference"]["note"]
    # counts that are all 0 in a group
    frames["claims"].loc[told, "claims"] = 0
    counts = sql("c.claims", ("c.km", "c.told"))
    model = fit(counts, sites(**frames), loss="poisson")
    assert "whose counts are all 0" in model.report["inference"]["note"]
    frames["claims"]["claims"] = 0
    with pytest.raises(QueryError, match=r"constant in the .* rows \(one value: 0\)"):
        fit(counts, sites(**frames), loss="poisson")


@pytest.mark.parametrize("kind", ["model", "robust"])
def test_no_more_rows_than_coefficients(kind):
    frames = tables()
    frames["claims"] = frames["claims"].iloc[:4].assign(pid=range(4))
    model = fit(sql("c.gain"), sites(**frames), loss="squared", standard_errors=kind)
    # its optimum is out of reach, as the loss vanishes there
    note = model.report["inference"]["note"]
    assert "no more joined rows than coeff" in note or "come to the optimum" in note
    assert "standard_error" not in model.coefficients


@pytest.mark.parametrize(
    ("raw", "l2"),
    [
        # by its eigenvalues the others had none, and an error of 3e-19 under a ridge
        ("1e8 * p.age", 0.0),
        ("1e8 * p.age", 0.1),
        # it has words of one or two values
        ("1000000 + p.age / 12", 0.0),
    ],
)
def test_columns_that_are_far_from_standard_have_none(raw, l2):
    query = sql("c.claims", ("c.km", f"{raw} AS age"))
    how = {"encoders": "p.age=none missing=zero", "l2": l2, "num_epochs": 40}
    model = fit(query, loss="poisson", **how)
    assert re.search("'standard': p.age.$", model.report["inference"]["note"]), (
        model.report["inference"]
    )
    assert "standard_error" not in model.coefficients


def test_weights_that_are_rounded_to_nothing_are_told():
    frames = tables()
    frames["claims"]["times"] = np.where(frames["claims"].index == 7, 1e7, 1.0)
    weighted = sql("c.gain").replace("FROM claims", ", c.times AS weight FROM claims")
    model = fit(weighted, sites(**frames), loss="squared")
    assert "errors of what varies" in model.report["inference"]["note"]
    assert any("are rough" in text for text in model.report["warnings"])


def test_repeated_labels_have_errors_once_the_others_are_aggregated():
    query = """SELECT p.age AS label, c.km FROM people p
    JOIN (SELECT pid, AVG(km) AS km FROM claims GROUP BY pid) c ON p.pid = c.pid"""
    model = fit(query)
    with engine_of(tables()) as engine:
        rows = engine.execute(query).fetchdf()
    scaled = (rows["km"] - rows["km"].mean()) / rows["km"].std(ddof=0)
    label = rows["label"].to_numpy(np.float64)
    expected = fit_linear(scaled.to_numpy()[:, None], label, "squared")
    found = model.coefficients.set_index("column").loc["km"]
    assert found["standard_error"] == pytest.approx(expected.errors[0], rel=RTOL)


def test_joined_rows_without_an_information_matrix():
    with pytest.raises(QueryError, match=r"is in up to .* joined rows.*GROUP BY"):
        fit(sql("p.age", ("c.km",)))


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"loss": "huber(1.0)"}, "needs the likelihood of a label"),
        ({"validation_fraction": 0.2}, "leave validation-fraction 0"),
        ({"effects": "p"}, "leave validation-fraction 0"),
        ({"row_weight": "entity(p)"}, "does not say how row-weight"),
        ({"strategy": "admm"}, "is for strategy 'cg' only, not 'admm'"),
        ({"strategy": "moments"}, "is for strategy 'cg' only, not 'moments'"),
        (NOISE, "would not count the noise of privacy.labels"),
    ],
)
def test_settings_that_do_not_go_together(how, problem):
    with pytest.raises(SettingsError, match=problem):
        fit(sql("c.gain"), **how)
