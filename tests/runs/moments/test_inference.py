"""Standard errors are those of ordinary least squares on the join, in closed form."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tests.support.examples.orders import (
    FEATURES,
    fit,
    joined,
    rows_of,
    sites,
    sql,
    tables,
)
from tests.support.federated import write_site
from tp_flower import api

STATISTICS = ["standard_error", "t", "p", "low", "high"]


def closed_form(features: np.ndarray, label: np.ndarray, l2: float = 0.0):
    """Estimates (d + 1,) and standard errors, the intercept last, by its design."""
    design = np.column_stack([features, np.ones(len(label))])
    rows, width = design.shape
    penalty = np.diag(np.append(np.full(width - 1, l2 * rows), 0.0))
    inverse = np.linalg.inv(design.T @ design + penalty)
    estimates = inverse @ design.T @ label
    square = np.sum((label - design @ estimates) ** 2)
    freedom = rows - np.linalg.matrix_rank(design)
    covariance = square / freedom * inverse @ design.T @ design @ inverse
    return estimates, np.sqrt(np.diag(covariance)), freedom


def of_features(model: api.FittedModel) -> pd.DataFrame:
    """The coefficients in the order of the query, the intercept last."""
    frame = model.coefficients.set_index(["table", "column"])
    names = [tuple(name.split(".")) for name in (*FEATURES, "o.(intercept)")]
    return frame.loc[names]


@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_errors_are_those_of_the_join(l2):
    found = of_features(fit(l2=l2))
    features, label = joined()
    estimates, errors, freedom = closed_form(features, label.to_numpy(), l2)
    np.testing.assert_allclose(found["standard_error"], errors, rtol=1e-6)
    t = estimates / errors
    np.testing.assert_allclose(found["t"][:-1], t[:-1], rtol=1e-6, atol=1e-6)
    p = 2 * stats.t.sf(np.abs(t), freedom)
    np.testing.assert_allclose(found["p"][:-1], p[:-1], rtol=1e-4, atol=1e-12)
    # the report's intercept is beyond the mean label, a hypothesis for nobody
    assert found[["t", "p"]].iloc[-1].isna().all()
    reach = stats.t.ppf(0.975, freedom) * errors
    for side, bound in (("low", -reach), ("high", reach)):
        expected = found["coefficient"] + bound
        np.testing.assert_allclose(found[side], expected, rtol=1e-6)


def test_an_intercept_of_columns_that_have_a_mean():
    query = sql(features="o.day + 3 AS day, u.age / 10 AS age")
    how = {"strategy": "moments", "l2": 0.0, "test_fraction": 0.0}
    model = api.fit(query, sites(), encoders="o.day=none; u.age=none", **how)
    rows = rows_of(query, tables())
    label = rows.pop("label").to_numpy()
    estimates, errors, _ = closed_form(rows.to_numpy(), label)
    found = model.coefficients.set_index("column").loc[["day", "age", "(intercept)"]]
    np.testing.assert_allclose(found["standard_error"], errors, rtol=1e-5)
    np.testing.assert_allclose(found["coefficient"][:-1], estimates[:-1], rtol=1e-5)


def test_collinear_columns_have_no_error_and_are_named():
    frames = tables()
    frames["users"]["months"] = 12.0 * frames["users"]["age"]
    everywhere = {f"at {name}": {name: frame} for name, frame in frames.items()}
    query = sql(features="o.day, u.age, u.months, i.price")
    how = {"strategy": "moments", "test_fraction": 0.0}
    model = api.fit(query, everywhere, l2=0.0, **how)
    assert model.report["moments"]["undetermined"] == ["u.age", "u.months"]
    found = model.coefficients.set_index("column")
    assert found.loc[["age", "months"], STATISTICS].isna().all(axis=None)
    rows = rows_of(query, frames)
    label = rows.pop("label").to_numpy()
    unique = rows.drop(columns="months")
    scaled = (unique - unique.mean()) / unique.std(ddof=0)
    _, errors, _ = closed_form(scaled.to_numpy(), label)
    np.testing.assert_allclose(
        found.loc[["day", "price"], "standard_error"], errors[[0, 2]], rtol=1e-6
    )
    # a ridge determines all
    assert "u.months" in model.text()
    ridge = api.fit(query, everywhere, l2=0.1, **how)
    assert ridge.report["moments"]["undetermined"] == []
    assert ridge.coefficients["standard_error"].notna().all()


@pytest.mark.parametrize(
    ("label", "l1", "reason"),
    [
        ("o.qty", 0.1, "a lasso chooses its columns by the same labels"),
        ("o.kind", 0.0, "a discriminant is no least-squares estimate"),
    ],
)
def test_there_are_none_and_why(label, l1, reason):
    model = fit(label, l1=l1)
    assert reason in model.report["moments"]["errors"]
    assert reason in model.text()
    assert not set(STATISTICS) & set(model.coefficients)


def test_no_row_is_left_for_the_errors():
    frames = {"t": pd.DataFrame({"x": [0.0, 1.0, 3.0], "z": [1.0, 0.0, 5.0]})}
    frames["t"]["y"] = [1.0, 2.0, 5.0]
    query = "SELECT y AS label, x, z FROM t"
    model = api.fit(query, {"here": frames}, strategy="moments", test_fraction=0.0)
    assert "no degree of freedom" in model.report["moments"]["errors"]
    assert model.coefficients[STATISTICS].isna().all(axis=None)
    assert model.report["moments"]["undetermined"] == []


def test_what_the_errors_are_is_said():
    said = {l2: fit(l2=l2).report["moments"]["errors"] for l2 in (0.0, 0.1)}
    assert ["conditional on l2" in said[l2] for l2 in said] == [False, True]
    # items have several rows a key, each of which repeats the order's label
    features, _ = joined()
    assert f"{len(features) - len(FEATURES) - 1:,} degrees of freedom" in said[0.0]
    assert "joined rows have the label of one row" in said[0.0]
    alone = api.fit(
        "SELECT o.qty AS label, o.day FROM orders o", sites(), strategy="moments"
    )
    assert "of one row" not in alone.report["moments"]["errors"]


def test_errors_are_shown_where_coefficients_are(tmp_path):
    rules = {"users": "coefficients = true\n"}
    allowed = 'releases = { moments = "clear" }'
    files = {
        name: write_site(
            tmp_path / name, {name: frame}, {name: rules.get(name, "") + allowed}
        )
        for name, frame in tables().items()
    }
    how = {"strategy": "moments", "test_fraction": 0.0}
    model = api.fit(sql(), files, **how)
    assert set(model.coefficients["table"]) == {"u"}
    assert model.coefficients["standard_error"].notna().all()
    assert set(model.report["coefficients"]) == {"u"}


def test_weights_leave_no_errors():
    report = fit(row_weight="entity(i)").report
    assert report["moments"]["errors"].startswith("No standard errors: what a weight")
    assert not any("t" in entry for entry in report["coefficients"]["o"])
