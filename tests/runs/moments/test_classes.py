"""Errors of models of several classes are those of Newton's steps on the built join."""

import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from strategies.methods.moments.information import InformationRound
from tests.support.examples.claims import FEATURES, fit, sharded, sites, sql
from tests.support.examples.claims import tables as claims_tables
from tests.support.federated import write_site
from tests.support.reference.joins import engine_of
from tests.support.reference.linear_models import ClassFit, fit_classes
from tp_flower.errors import QueryError, SiteError

RTOL = 1e-4
COLUMNS = ["km", "age", "density", "rain"]
KINDS = ["a", "b", "c", "d"]
JOBS = ["baker", "cook", "nurse", "smith"]
SMALL = """SELECT c.kind AS label, c.km, p.age FROM claims c
JOIN people p ON c.pid = p.pid"""
OF_STATSMODELS = tomllib.loads(
    Path(__file__).with_name("classes.toml").read_text("utf-8")
)
"""What MNLogit has printed of the same join; the file says how."""


def tables() -> dict[str, pd.DataFrame]:
    """Claims of four kinds, of which the last two are rarer."""
    frames = claims_tables()
    claims = frames["claims"]
    age = frames["people"]["age"].reindex(claims["pid"]).fillna(45.0).to_numpy()
    km = claims["km"].to_numpy()
    scores = np.column_stack(
        [0.5 * km, 0.05 * (age - 45.0), -0.4 * km - 0.3, 0.2 * km - 0.5]
    )
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    draws = np.random.default_rng(4).random((len(claims), 1))
    claims["kind"] = np.array(KINDS)[(chances.cumsum(axis=1) < draws).sum(axis=1)]
    return frames


def joined(query: str, frames: dict) -> tuple[np.ndarray, np.ndarray, pd.DataFrame]:
    """The standardised features of the join, the classes' numbers, and its rows."""
    with engine_of(frames) as engine:
        rows = engine.execute(query).fetchdf()
    label = rows["label"].map(KINDS.index).to_numpy(np.int64)
    raw = rows[[name for name in COLUMNS if name in rows]]
    scaled = ((raw - raw.mean()) / raw.std(ddof=0)).fillna(0.0)
    return scaled.to_numpy(np.float64), label, rows


@pytest.fixture(scope="module")
def with_jobs():
    """A model with a category of all columns, and the fit of treatment coding."""
    query, frames = sql("c.kind", (*FEATURES, "p.job")), tables()
    encoders = f"p.job=categories({', '.join(JOBS)})"
    model = fit(query, sites(**frames), encoders=encoders)
    features, label, rows = joined(query, frames)
    coded = [(rows["job"] == job).to_numpy(np.float64) for job in JOBS[1:]]
    return model, fit_classes(np.column_stack([features, *coded]), label)


def check(model, expected: ClassFit) -> None:
    """Compare coefficients and errors, class by class."""
    found = model.coefficients.set_index(["output", "column"])
    columns = [name for name in COLUMNS if name in found.loc["b"].index]
    for number, kind in enumerate(KINDS[1:]):
        of_class = found.loc[kind].loc[columns]
        errors = expected.errors[number, : len(columns)]
        by_row = of_class["standard_error"].to_numpy(np.float64)
        np.testing.assert_allclose(by_row, errors, rtol=RTOL)
        values = expected.coefficients[number, : len(columns)]
        off = (of_class["coefficient"].to_numpy(np.float64) - values) / errors
        assert np.abs(off).max() < 1e-4


def test_the_slow_computation_is_that_of_statsmodels():
    features, label, _ = joined(sql("c.kind"), tables())
    found = fit_classes(features, label)
    np.testing.assert_allclose(found.errors, OF_STATSMODELS["errors"], rtol=1e-6)
    values = OF_STATSMODELS["coefficients"]
    np.testing.assert_allclose(found.coefficients, values, rtol=1e-6, atol=1e-9)


@pytest.mark.cases("sharded")
@pytest.mark.parametrize("how", ["whole", "sharded", "weighted"])
def test_errors_are_those_of_the_join(how):
    query, frames = sql("c.kind"), tables()
    if how == "weighted":
        query = query.replace(" FROM", ', c.times AS "weight" FROM', 1)
        unscaled = "; ".join(f"{name}=none missing=zero" for name in FEATURES)
        model = fit(query, sites(**frames), encoders=unscaled, num_epochs=200)
        _, label, rows = joined(query, frames)
        features = rows[COLUMNS].fillna(0.0).to_numpy(np.float64)
        weights = rows["weight"].to_numpy()
        check(model, fit_classes(features, label, weights=weights))
        return
    l2 = 0.05 if how == "sharded" else 0.0
    where = sharded(frames) if how == "sharded" else sites(**frames)
    model = fit(query, where, l2=l2)
    features, label, _ = joined(query, frames)
    check(model, fit_classes(features, label, l2=l2))
    assert ("conditional on l2" in model.report["inference"]["note"]) == bool(l2)


def test_categories_differ_from_a_reference_as_by_treatment_coding(with_jobs):
    model, expected = with_jobs
    check(model, expected)
    inference = model.report["inference"]
    assert inference["reference"] == "a"
    assert inference["parameters"] == expected.coefficients.size == 24
    assert inference["undetermined"] == [f"p.job={job}" for job in JOBS]
    found = pd.DataFrame(inference["contrasts"]).set_index(["output", "column"])
    for number, kind in enumerate(KINDS[1:]):
        others = found.loc[kind].loc[[f"p.job={job}" for job in JOBS[1:]]]
        errors = others["standard-error"].to_numpy(np.float64)
        np.testing.assert_allclose(errors, expected.errors[number, 4:7], rtol=RTOL)


def test_tests_and_inflation_of_features_are_over_all_classes(with_jobs):
    model, expected = with_jobs
    width = expected.coefficients.shape[1]
    of_features = np.delete(np.arange(3 * width), width * np.arange(1, 4) - 1)
    scale = np.sqrt(np.diag(expected.covariance))
    correlations = expected.covariance / np.outer(scale, scale)
    every = np.linalg.det(correlations[np.ix_(of_features, of_features)])
    tests = {each["feature"]: each for each in model.report["inference"]["tests"]}
    inflation = model.inflation.set_index("feature")
    of_feature = {name: [place] for place, name in enumerate(FEATURES)}
    for name, columns in {**of_feature, "p.job": [4, 5, 6]}.items():
        places = (width * np.arange(3)[:, None] + columns).ravel()
        values = expected.coefficients.ravel()[places]
        block = expected.covariance[np.ix_(places, places)]
        assert tests[name]["columns"] == inflation["columns"][name] == len(places)
        square = values @ np.linalg.solve(block, values)
        assert tests[name]["statistic"] == pytest.approx(square, rel=1e-3)
        # a ratio of determinants of the estimates' correlations (Fox and Monette)
        others = np.setdiff1d(of_features, places)
        ratio = np.linalg.det(correlations[np.ix_(places, places)])
        ratio *= np.linalg.det(correlations[np.ix_(others, others)]) / every
        assert inflation["factor"][name] == pytest.approx(ratio, rel=1e-3)


def test_texts_name_the_classes(with_jobs):
    model, _ = with_jobs
    text = model.summary()
    for words in ("c.km [b]", "p.job=cook - p.job=baker [d]", "class 'a'"):
        assert words in text
    page = (model.folder / "report.html").read_text()
    assert "c.km [b]" in page
    assert "odds ratio (95 %)" in page


def test_intercepts_are_those_of_whole_scores():
    frames = tables()
    model = fit(SMALL, sites(**frames))
    features, label, _ = joined(SMALL, frames)
    expected = fit_classes(features, label)
    check(model, expected)
    entries = model.report["inference"]["intercepts"]
    for number, entry in enumerate(entries):
        assert entry["output"] == KINDS[number + 1]
        error = expected.errors[number, -1]
        assert entry["standard-error"] == pytest.approx(error, rel=RTOL)
        off = entry["value"] - expected.coefficients[number, -1]
        assert abs(off) < 1e-4 * error
    assert "(intercept) [d]" in model.summary()
    constant = fit(SMALL.replace(", p.age", ""), sites(**frames))
    assert model.likelihood_ratio(constant).columns == 3


@pytest.mark.cases
@pytest.mark.parametrize("loss", ["softmax"])
def test_of_two_classes_it_has_the_errors_of_a_logistic_regression(loss):
    query = SMALL.replace("c.kind", "c.is_large")
    one = fit(query, loss="logistic").coefficients.set_index("column")
    two = fit(query, loss=loss).coefficients.set_index("column")
    features = ["km", "age"]
    for name in ("coefficient", "standard_error"):
        np.testing.assert_allclose(two[name][features], one[name][features], RTOL)


def test_rare_classes_that_are_merged_have_weightings_of_each_two(monkeypatch):
    frames = tables()
    frames["claims"]["many"] = np.array(list("abcdefghi"))[np.arange(400) % 9]
    many = SMALL.replace("c.kind", "c.many")
    for kind, how in (("robust", {}), ("clustered", {"cluster": "p"})):
        refused = f"there are none that are '{kind}': write 'model', or"
        with pytest.raises(QueryError, match=refused):
            fit(many, sites(**frames), standard_errors=kind, **how)
    with pytest.raises(QueryError, match=r"of 9 classes .* for 8 at most: merge rare"):
        fit(many, sites(**frames))
    seen = {}
    ask = InformationRound._request

    def kept(self, *arguments):
        request = ask(self, *arguments)
        tables_of = {part.number: part.table for part in self.joined.parts}
        seen.update({tables_of[n]: body for n, body in request.parts.items()})
        return request

    monkeypatch.setattr(InformationRound, "_request", kept)
    merged = "CASE WHEN c.many > 'b' THEN 'other' ELSE c.many END"
    model = fit(SMALL.replace("c.kind", merged), sites(**frames))
    assert model.report["inference"]["parameters"] == 6
    assert len(seen["c"].weights) == 3
    assert seen["p"].weights is None
    assert [len(counts) for counts in seen["p"].incoming.values()] == [3]


@pytest.mark.cases("7-softmax")
@pytest.mark.parametrize(
    ("people", "loss"),
    [(8, "softmax"), (7, "softmax"), (6, "logistic"), (5, "logistic")],
)
def test_a_policy_refuses_weightings_that_tell_few_rows(tmp_path, people, loss):
    """Of km, age and ones; of robust errors two weightings, of three classes three."""
    rules = """most-unmatched = 1\nmin-rows = 2
    releases = { scores = "masked", covariance = "clear" }"""
    frames = tables()
    claims = frames["claims"].assign(pid=np.arange(400) % people)
    claims["kind"] = claims["kind"].replace("d", "c")
    shown = {"claims": claims, "people": frames["people"].head(people)}
    files = {
        name: write_site(tmp_path / name, {name: frame}, {name: rules})
        for name, frame in shown.items()
    }
    query, kind, weightings = SMALL, "model", 3
    if loss == "logistic":
        query, kind, weightings = SMALL.replace("kind", "is_large"), "robust", 2
    if people in (5, 7):
        refused = f"3 columns in {weightings} weightings may tell"
        with pytest.raises(SiteError, match=refused):
            fit(query, files, loss=loss, standard_errors=kind)
    else:
        model = fit(query, files, loss=loss, standard_errors=kind)
        assert "parameters" in model.report["inference"]
