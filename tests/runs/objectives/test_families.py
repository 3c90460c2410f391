"""Runs by the families of counts, costs and quantiles, against the joined table.

The orders of some customers, in two shards, have labels of each family; the model is
compared with the optimum on the join that scipy or scikit-learn finds.
"""

import re

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize
from sklearn.linear_model import QuantileRegressor

from tests.support import federated, predicted
from tests.support.reference.families import lightgbm_objective
from tp_flower.errors import SettingsError
from tp_flower.objectives import Target, make_objective

SQL = """SELECT o.label, o.day, o.size, c.region, c.age
FROM orders o JOIN customers c ON o.customer = c.id"""
EXACT = {
    "task": "regression",
    "test_fraction": 0.0,
    "validation_fraction": 0.0,
    "effects": "none",
    "l2": 0.0,
    "device": "cpu",
}
TREES = (
    *("squared", "logistic", "softmax", "poisson", "gamma", "tweedie(1.6)"),
    "huber(0.4)",
)
CLASSES = {"logistic": ("a", "b"), "softmax": ("a", "b", "c")}
BY_CG = ("poisson", "gamma", "tweedie(1.6)", "negative-binomial(0.7)", "huber(0.4)")


def joined(rows: int = 800) -> pd.DataFrame:
    """The joined rows of 40 customers, with the logarithm of the mean label."""
    rng = np.random.default_rng(5)
    customer = rng.integers(0, 40, rows)
    table = pd.DataFrame(
        {
            "customer": customer,
            "day": rng.choice(["mon", "sat"], rows),
            "size": rng.normal(size=rows),
            "region": rng.choice(["n", "s", "w"], 40)[customer],
            "age": rng.normal(40.0, 9.0, 40)[customer],
        }
    )
    table["score"] = (
        1.0
        + 0.8 * (table["region"] == "s")
        - 0.6 * (table["day"] == "sat")
        + 0.3 * table["size"]
        - 0.03 * (table["age"] - 40.0)
    )
    return table


def with_labels(loss: str) -> pd.DataFrame:
    table = joined()
    rng = np.random.default_rng(6)
    mean = np.exp(table["score"].to_numpy())
    rows = len(table)
    if loss == "poisson":
        labels = rng.poisson(mean)
    elif loss.startswith("negative"):
        labels = rng.negative_binomial(1 / 0.7, 1 / (1 + 0.7 * mean))
    elif loss.startswith(("huber", "quantile")):
        labels = table["score"] + rng.standard_t(2, rows)
    elif loss == "squared":
        labels = table["score"] + rng.normal(size=rows)
    elif loss in CLASSES:
        cuts = np.linspace(0.4, 1.7, len(CLASSES[loss]) - 1)
        labels = np.digitize(table["score"] + rng.logistic(size=rows) / 2.0, cuts)
    else:
        labels = rng.gamma(2.0, mean / 2.0)
        if loss.startswith("tweedie"):
            labels = np.where(rng.random(rows) < 0.4, 0.0, labels)
    return table.assign(label=np.asarray(labels, float))


def frames(table: pd.DataFrame) -> federated.Frames:
    customers = table.groupby("customer", as_index=False).first()
    orders = table[["label", "customer", "day", "size"]]
    return {
        "orders": orders,
        "customers": customers.rename(columns={"customer": "id"})[
            ["id", "region", "age"]
        ],
    }


def design(table: pd.DataFrame) -> np.ndarray:
    dummies = pd.get_dummies(table[["day", "region"]], drop_first=True)
    numbers = table[["size", "age"]].to_numpy()
    numbers = (numbers - numbers.mean(axis=0)) / numbers.std(axis=0)
    return np.column_stack([np.ones(len(table)), dummies.to_numpy(float), numbers])


def optimum(loss: str, table: pd.DataFrame, weights=None) -> tuple[np.ndarray, float]:
    """The best scores on the joined table, and their mean loss."""
    columns = design(table)
    labels = table["label"].to_numpy()
    bound = make_objective(loss, Target.of(labels), weights)
    mass = np.ones(len(labels)) if weights is None else weights

    def value(theta):
        scores = (columns @ theta)[:, None]
        slopes = mass[:, None] * bound.gradient(scores)
        return bound.value(scores), columns.T @ slopes[:, 0] / mass.sum()

    start = np.zeros(columns.shape[1])
    best = minimize(value, start, jac=True, options={"gtol": 1e-9})
    return columns @ best.x, best.fun


def train(tables, sql, strategy, state, **settings):
    sites = predicted.on(federated.whole, tables)
    grid = federated.WatchedGrid(sites, state=state)
    run = federated.train(grid, sql, strategy, **{**EXACT, **settings})
    return run, predicted.Model(sql, state, predicted.make_manifest(run)), sites


@pytest.mark.parametrize("loss", BY_CG)
def test_conjugate_gradients_reach_the_optimum_on_the_join(loss, tmp_path):
    table = with_labels(loss)
    scores, least = optimum(loss, table)
    how = {"loss": loss, "tolerance": 1e-6, "num_epochs": 60}
    run, model, sites = train(frames(table), SQL, "cg", tmp_path, **how)
    assert run.report.final_train["loss"] == pytest.approx(least, rel=1e-7)
    assert model.manifest.loss == loss
    rows = model.table(sites).to_pandas()
    rows = rows.sort_values("row") if "row" in rows else rows
    expected = scores if loss.startswith("huber") else np.exp(scores)
    np.testing.assert_allclose(rows["prediction"], expected, rtol=2e-4, atol=2e-4)
    again = model.evaluate(sites, loss="auto")
    for name, value in run.report.final_train.items():
        assert again[name] == pytest.approx(value, rel=1e-5), name


def test_a_dispersion_that_was_taken_for_granted_is_compared_with_the_likeliest():
    table = with_labels("negative-binomial(0.7)")
    sites = predicted.on(federated.whole, frames(table))

    def trained(loss):
        return federated.train(sites, SQL, "cg", **{**EXACT, "loss": loss}).report

    report = trained("negative-binomial")
    likeliest = report.outcomes["dispersion"]["likeliest"]
    assert 0.5 < likeliest < 0.9
    (warning,) = report.warnings
    assert "a dispersion of 1 was taken for granted; the likeliest at this" in warning
    advised = re.search(r'set loss = "(.*)"', warning)[1]
    assert advised == f"negative-binomial({likeliest:.4g})"
    assert not trained(advised).warnings


def test_rates_with_exposures_as_weights_are_counts_with_an_offset(tmp_path):
    table = with_labels("poisson")
    exposure = np.random.default_rng(8).uniform(0.2, 3.0, len(table))
    counts = np.random.default_rng(9).poisson(exposure * np.exp(table["score"]))
    columns = design(table)

    def value(theta):
        scores = columns @ theta
        rates = exposure * np.exp(scores)
        return np.sum(rates - counts * scores), columns.T @ (rates - counts)

    start = np.zeros(columns.shape[1])
    best = minimize(value, start, jac=True, options={"gtol": 1e-7})
    tables = frames(table)
    tables["orders"] = tables["orders"].assign(count=counts, exposure=exposure)
    sql = SQL.replace("o.label", "o.count / o.exposure AS label, o.exposure AS weight")
    how = {"loss": "poisson", "tolerance": 1e-6, "num_epochs": 60}
    _, model, sites = train(tables, sql, "cg", tmp_path, **how)
    rows = model.table(sites).to_pandas()
    rows = rows.sort_values("row") if "row" in rows else rows
    np.testing.assert_allclose(rows["score"], columns @ best.x, rtol=1e-3, atol=1e-3)


def test_admm_reaches_the_best_quantile(tmp_path):
    loss = "quantile(0.8)"
    table = with_labels(loss)
    columns = design(table)[:, 1:]
    best = QuantileRegressor(quantile=0.8, alpha=0.0).fit(columns, table["label"])
    target = Target.of(table["label"].to_numpy())
    least = make_objective(loss, target).value(best.predict(columns)[:, None])
    how = {"loss": loss, "num_epochs": 200}
    run, _, _ = train(frames(table), SQL, "admm", tmp_path, **how)
    assert run.report.final_train["pinball"] == pytest.approx(least, rel=1e-3)
    assert run.report.final_train["pinball"] >= least * (1 - 1e-9)
    assert run.report.final_train["coverage"] == pytest.approx(0.8, abs=0.01)


@pytest.mark.cases("poisson", "softmax")
@pytest.mark.parametrize("loss", TREES)
def test_trees_are_as_good_as_those_on_the_join(loss, tmp_path):
    """The loss of 160 new rows, beside that of 40 of LightGBM's rounds."""
    lightgbm = pytest.importorskip("lightgbm")
    table, classes = with_labels(loss), CLASSES.get(loss, ())
    frame = table.drop(columns=["label", "customer", "score"])
    frame = frame.astype({"day": "category", "region": "category"})
    how = {**lightgbm_objective(loss), "num_leaves": 7, "verbose": -1, "num_threads": 1}
    data = lightgbm.Dataset(frame[:640], table["label"][:640])
    booster = lightgbm.train({**how, "learning_rate": 0.1}, data, num_boost_round=40)
    target = Target.of(table["label"][640:].to_numpy(), classes)
    objective = make_objective(loss, target)

    named = table
    if classes:
        named = table.assign(label=np.array(classes)[table["label"].astype(int)])
    sites = predicted.on(federated.whole, frames(named[:640]))
    grid = federated.WatchedGrid(sites, state=tmp_path)
    how = {"loss": loss, "num_epochs": 100, "device": "cpu", "test_fraction": 0.0}
    how["task"] = "classification" if classes else "regression"
    run = federated.train(grid, SQL, "boost", **how)
    model = predicted.Model(SQL, tmp_path, predicted.make_manifest(run))
    new = frames(named)
    new["orders"] = new["orders"][640:].reset_index(drop=True)
    rows = model.table(predicted.on(federated.whole, new)).to_pandas()
    rows = rows.sort_values("row") if "row" in rows else rows
    ours = rows.filter(regex="^score").to_numpy(np.float64)
    theirs = booster.predict(frame[640:], raw_score=True).reshape(ours.shape)
    assert objective.value(ours) <= 1.01 * objective.value(theirs)
    constant = np.tile(objective.base_score, (len(theirs), 1))
    assert objective.value(theirs) < objective.value(constant)


def test_trees_of_a_quantile_are_refused():
    """It has no curvature, by which leaves are measured; time is of test_survival."""
    sites = predicted.on(federated.whole, frames(with_labels("quantile(0.8)")))
    match = r"'boost' does not train by 'quantile\(0.8\)'; admm, sgd, gd do"
    with pytest.raises(SettingsError, match=match):
        federated.train(sites, SQL, "boost", task="regression", loss="quantile(0.8)")
