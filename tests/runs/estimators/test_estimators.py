"""Estimators over a join are those of scikit-learn on the joined table.

DuckDB makes the joined table, its rows in the order of X.
"""

import copy
import re

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.inspection import permutation_importance
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import (
    GridSearchCV,
    KFold,
    StratifiedKFold,
    TimeSeriesSplit,
    cross_val_score,
    cross_validate,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.multiclass import unique_labels

from tests.support.files import case_table
from tests.support.reference.joins import engine_of
from tp_flower import errors
from tp_flower.estimators import (
    SurvivalRegressor,
    TablePuppetClassifier,
    TablePuppetRegressor,
)

CASES = case_table(__file__)
ROWS = 60
FEATURES = ["discount", "income", "population"]
FROM = (
    "FROM orders AS o JOIN customers AS c ON o.customer = c.id "
    "JOIN regions AS r ON r.region = c.region"
)
SQL = f"SELECT o.paid AS label, o.discount, c.income, r.population {FROM}"
UNLABELLED = SQL.replace("o.paid AS label, ", "")
EXACT = {"tolerance": 1e-9, "num_epochs": 50}
STANDARD = "; ".join(f"{name}=standard" for name in ("o.discount", "c.income"))
SCALED = {"encoders": f"{STANDARD}; r.population=standard", **EXACT}
# scores are the same function of coefficients wherever training ends
RAW = {"encoders": SCALED["encoders"].replace("standard", "none"), "num_epochs": 5}
# a user's home, to which no estimator writes
pytestmark = pytest.mark.usefixtures("home")


def tables():
    """Orders in the order of their days; every customer and region has a row."""
    rng = np.random.default_rng(0)
    customers = pd.DataFrame({"id": range(12), "income": rng.normal(4, 1, 12)})
    customers["region"] = customers["id"] % 3
    regions = pd.DataFrame({"region": range(3), "population": [1.0, 5.0, 2.5]})
    orders = pd.DataFrame({"customer": rng.integers(0, 12, ROWS)})
    orders["discount"] = rng.normal(size=ROWS)
    orders["paid"] = orders["discount"] + rng.normal(size=ROWS)
    orders["paid"] += 2 * customers["income"].to_numpy()[orders["customer"]]
    return orders, customers, regions


ORDERS, CUSTOMERS, REGIONS = tables()
SITES = {"bank": {"customers": CUSTOMERS}, "bureau": {"regions": REGIONS}}
LARGE = ORDERS["paid"] > ORDERS["paid"].median()


def joined(orders=ORDERS, customers=CUSTOMERS, sql=SQL):
    """The joined table, in the order of the orders."""
    numbered = orders.assign(position_=range(len(orders)))
    frames = {"orders": numbered, "customers": customers, "regions": REGIONS}
    with engine_of(frames) as engine:
        return engine.execute(f"{sql} ORDER BY o.position_").df()


JOINED = joined()


@pytest.fixture(scope="module")
def regressor():
    return TablePuppetRegressor(SQL, SITES, l2=0.1, **RAW).fit(ORDERS)


def test_cross_validation_of_a_regression_is_that_of_ridge_on_the_join():
    folds = KFold(2, shuffle=True, random_state=0)
    scoring = ["r2", "neg_mean_absolute_error"]
    model = TablePuppetRegressor(UNLABELLED, SITES, l2=0.1, **SCALED)
    ours = cross_validate(model, ORDERS, ORDERS["paid"], cv=folds, scoring=scoring)
    # our loss is a mean over the training rows, of which every fold has as many
    ridge = make_pipeline(StandardScaler(), Ridge(alpha=0.1 * ROWS / 2))
    joined_rows = JOINED[FEATURES], JOINED["label"]
    theirs = cross_validate(ridge, *joined_rows, cv=folds, scoring=scoring)
    for name in scoring:
        np.testing.assert_allclose(
            ours[f"test_{name}"], theirs[f"test_{name}"], atol=1e-6
        )


def test_a_search_over_settings_is_that_of_logistic_regression_on_the_join():
    penalties = np.array([1e-3, 1.0])
    folds = StratifiedKFold(2)
    ours = GridSearchCV(
        TablePuppetClassifier(UNLABELLED, SITES, **SCALED),
        {"l2": penalties},
        cv=folds,
        scoring="neg_log_loss",
    ).fit(ORDERS, LARGE)
    model = make_pipeline(
        StandardScaler(), LogisticRegression(solver="newton-cholesky")
    )
    strengths = 1 / (penalties * ROWS / 2)
    theirs = GridSearchCV(
        model, {"logisticregression__C": strengths}, cv=folds, scoring="neg_log_loss"
    ).fit(JOINED[FEATURES], LARGE)
    for score in ("mean_test_score", "std_test_score"):
        np.testing.assert_allclose(
            ours.cv_results_[score], theirs.cv_results_[score], atol=1e-5
        )
    assert ours.best_index_ == theirs.best_index_
    assert ours.classes_.tolist() == [False, True]
    assert ours.score(ORDERS, LARGE) < 0  # of the model on all rows


def test_a_split_in_time_trains_on_the_first_rows_alone():
    folds = TimeSeriesSplit(2, test_size=15)
    # without y the label is a column of X, and the score is the model's own
    model = TablePuppetRegressor(SQL, SITES, l2=0.0, **SCALED)
    ours = cross_val_score(model, ORDERS, cv=folds)
    theirs = cross_val_score(
        LinearRegression(), JOINED[FEATURES], JOINED["label"], cv=folds
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_predictions_are_in_the_order_of_x(regressor):
    # of numbers as they are, the score is that of the query's columns
    slopes = regressor.coef_.droplevel("table")[FEATURES].to_numpy()
    expected = regressor.intercept_ + JOINED[FEATURES].to_numpy() @ slopes
    rows = ORDERS.drop(columns="paid")
    np.testing.assert_allclose(regressor.predict(rows), expected, atol=1e-5)
    order = np.random.default_rng(1).permutation(ROWS)
    for shuffled, numbers in (
        (rows.iloc[order], expected[order]),
        (rows.iloc[::-1], expected[::-1]),
        (pd.concat([rows.head(2), rows.head(2)]), np.tile(expected[:2], 2)),
    ):
        np.testing.assert_allclose(regressor.predict(shuffled), numbers, atol=1e-5)


def test_the_score_is_of_the_joined_rows_however_many_a_row_has(regressor):
    # customer 0 is there twice, and 1 is not
    customers = pd.concat([CUSTOMERS.drop(index=1), CUSTOMERS.head(1)])
    sites = {**SITES, "bank": {"customers": customers}}
    model = clone(regressor).set_params(sites=sites).fit(ORDERS)
    rows = joined(customers=customers)
    slopes = model.coef_.droplevel("table")[FEATURES].to_numpy()
    scores = model.intercept_ + rows[FEATURES].to_numpy() @ slopes
    score = r2_score(rows["label"], scores)
    assert model.score(ORDERS) == pytest.approx(score, abs=1e-5)
    # y replaces the label, however SQL spells its column
    other = ORDERS.rename(columns={"paid": "Paid"}).assign(Paid=0.0)
    of_target = model.score(other, ORDERS["paid"])
    assert of_target == pytest.approx(score, abs=1e-5)
    # one prediction a row is refused, and the message's advice works
    missing = (ORDERS["customer"] == 1).sum()
    says = f"{missing} of the 60 rows .* have no joined row.*: write LEFT JOIN"
    with pytest.raises(errors.MappingError, match=says):
        model.predict(ORDERS)
    kept = ORDERS[ORDERS["customer"] != 1]
    with pytest.raises(errors.MappingError, match="several joined rows"):
        model.predict(kept)
    query = SQL.replace(
        "customers AS c",
        "(SELECT id, region, AVG(income) AS income FROM customers GROUP BY id, region) "
        "AS c",
    ).replace("JOIN", "LEFT JOIN")
    mended = clone(model).set_params(query=query).fit(ORDERS)
    assert len(mended.predict(ORDERS)) == ROWS
    every = mended.model_.predict().frame
    np.testing.assert_array_equal(mended.predict(ORDERS), every["prediction"])


def test_rows_that_where_leaves_out_have_no_prediction(regressor):
    query = f"{SQL} WHERE o.discount > 0"
    model = clone(regressor).set_params(query=query).fit(ORDERS)
    few = ORDERS[ORDERS["discount"] > 0]
    says = f"WHERE leaves out {ROWS - len(few)} of the 60 rows of X"
    with pytest.raises(errors.MappingError, match=says):
        model.predict(ORDERS)
    assert len(model.predict(few)) == len(few)


def test_probabilities_are_in_the_order_of_the_classes():
    declared = ["small", "medium", "large"]
    sizes = np.array(declared)[pd.qcut(ORDERS["paid"], 3, labels=False)]
    noise = {"labels": "randomised-response", "label_epsilon": 9.0}
    noise["label_classes"] = ", ".join(declared)
    settings = {f"privacy_{name}": value for name, value in noise.items()}
    model = TablePuppetClassifier(UNLABELLED, SITES, **RAW, **settings)
    model.fit(ORDERS, sizes)
    assert model.classes_.tolist() == unique_labels(sizes).tolist() == sorted(declared)
    slopes = model.coef_.droplevel("table").loc[FEATURES, model.classes_]
    scores = JOINED[FEATURES].to_numpy() @ slopes.to_numpy() + model.intercept_
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(ORDERS), shares, atol=1e-5)
    np.testing.assert_array_equal(
        model.predict(ORDERS), model.classes_[shares.argmax(axis=1)]
    )


def test_a_clone_trains_the_same_model_at_the_same_sites(regressor):
    copied = clone(regressor)
    assert copied.get_params() == regressor.get_params()
    assert copied.sites is SITES
    with pytest.raises(NotFittedError):
        copied.predict(ORDERS)
    pd.testing.assert_series_equal(copied.fit(ORDERS).coef_, regressor.coef_)
    assert copied.set_params(l2=10.0).get_params()["l2"] == 10.0
    assert regressor.get_params()["l2"] == 0.1


def test_a_copy_predicts_after_the_original_is_gone(regressor):
    original = clone(regressor).fit(ORDERS)
    again = copy.deepcopy(original)
    folder = original.model_.folder
    expected = original.predict(ORDERS)
    del original
    assert not folder.exists()
    np.testing.assert_array_equal(again.predict(ORDERS), expected)
    assert again.model_.report == copy.copy(again.model_).report


def test_a_column_that_is_not_read_has_no_importance(regressor):
    rows = ORDERS.assign(note=range(ROWS))
    importances = permutation_importance(
        regressor, rows, None, n_repeats=1, random_state=0
    )
    by_column = dict(zip(rows.columns, importances.importances_mean, strict=True))
    assert by_column["note"] == 0.0
    # a key is worth what is joined by it
    assert by_column["customer"] > by_column["discount"] > 0.0


def test_importances_are_the_gains_of_boosted_trees():
    pytest.importorskip("lightgbm")
    model = TablePuppetRegressor(
        SQL, SITES, strategy="boost", num_epochs=2, min_rows_per_leaf=5
    ).fit(ORDERS)
    gains = model.model_.coefficients.set_index(["table", "column"])["gain"]
    shares = model.feature_importances_
    assert shares.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(shares * gains.sum(), gains)
    assert not hasattr(model, "coef_")


def test_hazards_follow_the_rows_of_x():
    rng = np.random.default_rng(0)
    stays = ORDERS.assign(days=rng.permutation(ROWS) + 1, died=rng.random(ROWS) < 0.7)
    query = SQL.replace("o.paid AS label", "o.days AS time, o.died AS event")
    model = SurvivalRegressor(query, SITES, **RAW).fit(stays)
    rows = stays.drop(columns=["days", "died"])
    hazards = model.predict(rows)
    slopes = model.coef_.droplevel("table")[FEATURES].to_numpy()
    expected = JOINED[FEATURES].to_numpy() @ slopes
    np.testing.assert_allclose(hazards - hazards[0], expected - expected[0], atol=1e-5)
    # of the pairs in which one row has its event first, the share where it risked more
    days, died = stays["days"].to_numpy(), stays["died"].to_numpy()
    pairs = (days[:, None] < days) & died[:, None]
    concordance = (hazards[:, None] > hazards)[pairs].mean()
    assert model.score(stays) == pytest.approx(concordance, abs=1e-9)
    # proportional hazards: the cumulative hazards of two rows have one ratio always
    survival = model.predict_survival(rows.iloc[::-1], [20, 40])
    assert survival.columns.tolist() == [20.0, 40.0]
    cumulative = -np.log(survival.to_numpy()[::-1])
    ratios = np.exp(hazards - hazards[0])[:, None]
    np.testing.assert_allclose(cumulative / cumulative[0], np.tile(ratios, 2))


ESTIMATORS = {
    each.__name__: each
    for each in (TablePuppetRegressor, TablePuppetClassifier, SurvivalRegressor)
}


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda case: case["says"][:40])
def test_what_cannot_be_one_table_s_rows_is_refused(case):
    frames = {"customers": CUSTOMERS, "regions": REGIONS, "orders": ORDERS}
    estimator = ESTIMATORS[case.get("estimator", "TablePuppetRegressor")]

    def fit(changes):
        names = changes.get("tables", ["customers", "regions"])
        sites = {name: {name: frames[name]} for name in names}
        settings = changes.get("settings", {})
        model = estimator(changes.get("query", SQL), sites, num_epochs=1, **settings)
        return model.fit(ORDERS, ORDERS["paid"] if changes.get("y") else None)

    error = getattr(errors, case["error"])
    with pytest.raises(error, match=re.escape(case["says"])):
        fit(case)
    if "mended" in case:
        fit({**case, **case["mended"]})


@pytest.mark.parametrize("sites", ["tables.toml", {"bank": "bank.toml"}])
def test_sites_are_a_dictionary(sites):
    model = TablePuppetRegressor(SQL, sites)
    assert repr(model).startswith("TablePuppetRegressor(query='SELECT")
    with pytest.raises(errors.SettingsError, match="dictionary of"):
        model.fit(ORDERS)


def test_notebooks_show_parameters_then_the_model(regressor):
    assert "'bank': ['customers']" in repr(regressor)
    assert regressor._repr_html_() == regressor.model_._repr_html_()
    assert "TablePuppetRegressor" in clone(regressor)._repr_html_()
