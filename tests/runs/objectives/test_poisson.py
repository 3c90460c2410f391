"""A family of a test's folder: it is registered, and no shared file knows of it.

Counts y of orders follow a log-linear model of a column of each of two tables:

    loss(h; y) = exp(h) - y h,    the mean count is exp(h)

Both columns are texts, so that linear models (one-hot columns) and trees have the same
optimum, which scipy finds on the joined table.
"""

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import check_grad, minimize

from strategies import Explain
from tests.support import federated, predicted
from tp_flower.arrays import mean
from tp_flower.objectives import FAMILIES, NumberResponse, Objective, Target
from tp_flower.objectives.objective import MAX_PROX_STEPS

SQL = """SELECT o.parcels AS label, o.day, c.region
FROM orders o JOIN customers c ON o.customer = c.id"""
METHODS = {
    "cg": {"tolerance": 1e-6, "num_epochs": 30, "l2": 0.0},
    "admm": {"num_epochs": 120, "l2": 0.0},
    "boost": {"num_epochs": 60, "min_rows_per_leaf": 5, "tree_rate": 0.3},
}
HOW = {
    "task": "regression",
    "loss": "toy-poisson",
    "test_fraction": 0.0,
    "validation_fraction": 0.0,
}


class Poisson(Objective):
    """exp(h) - y h of counts y."""

    name = "toy-poisson"
    class_counts = range(1)
    max_curvature = float("inf")

    @classmethod
    def make_response(cls, classes, kind):
        return PoissonResponse(cls.name, 1, classes, kind, inverse_link=np.exp)

    def base_scores(self):
        return np.log([mean(self.target.numbers, self.weights)])

    def row_values(self, scores):
        return np.exp(scores[:, 0]) - self.target.numbers * scores[:, 0]

    def gradient(self, scores):
        return np.exp(scores) - self.target.columns

    def hessian(self, scores):
        return np.exp(scores)

    def curvature(self, base):
        return float(np.exp(base[0]))

    def prox_block(self, centre, rho, _start):
        # exp(z) + rho z = c is convex and rises: Newton descends to its root
        c = self.target.columns + rho * centre
        z = np.minimum(c / rho, np.log(np.maximum(c, 1.0)))
        for _ in range(MAX_PROX_STEPS):
            step = (np.exp(z) + rho * z - c) / (np.exp(z) + rho)
            z = z - step
            if np.abs(step).max(initial=0.0) < 1e-10:
                break
        return z

    def measure(self, scores, _value):
        y = self.target.numbers
        rates = np.exp(scores[:, 0])
        terms = y * (np.log(np.maximum(y, 1.0)) - scores[:, 0]) - (y - rates)
        distances = np.abs(rates - y)
        return {
            "deviance": 2.0 * float(mean(terms, self.weights)),
            "mae": float(mean(distances, self.weights)),
        }


class PoissonResponse(NumberResponse):
    """A count, whose model is measured by its deviance."""

    headline = "deviance"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(FAMILIES, Poisson.name, Poisson)


def frames() -> federated.Frames:
    rng = np.random.default_rng(5)
    region = rng.choice(["n", "s", "w"], 40)
    day = rng.choice(["mon", "sat"], 600)
    customer = rng.integers(0, 40, 600)
    scores = 0.4 + 0.9 * (region[customer] == "s") - 0.7 * (day == "sat")
    return {
        "orders": pd.DataFrame(
            {"customer": customer, "day": day, "parcels": rng.poisson(np.exp(scores))}
        ),
        "customers": pd.DataFrame({"id": np.arange(40), "region": region}),
    }


def optimum(tables: federated.Frames) -> tuple[pd.DataFrame, np.ndarray, float]:
    """The joined table, and its best scores with their mean loss."""
    orders = tables["orders"]
    customers = tables["customers"]
    joined = orders.merge(customers, left_on="customer", right_on="id", how="left")
    dummies = pd.get_dummies(joined[["day", "region"]], drop_first=True).to_numpy(float)
    design = np.column_stack([np.ones(len(joined)), dummies])
    counts = joined["parcels"].to_numpy(float)

    def value(theta):
        scores = design @ theta
        gradient = design.T @ (np.exp(scores) - counts) / len(counts)
        return float(np.mean(np.exp(scores) - counts * scores)), gradient

    best = minimize(value, np.zeros(design.shape[1]), jac=True, options={"gtol": 1e-9})
    return joined, design @ best.x, best.fun


def test_the_formulas_fit_each_other():
    rng = np.random.default_rng(0)
    objective = Poisson(Target.of(rng.poisson(2.0, 30)))
    scores = rng.normal(size=(30, 1))

    def value(flat):
        return objective.row_values(flat[:, None]).sum()

    def gradient(flat):
        return objective.gradient(flat[:, None])[:, 0]

    assert check_grad(value, gradient, scores[:, 0]) < 1e-4
    for rho in (1e-3, 1.0, 1e3):
        z = objective.prox(3.0 * scores, rho)
        stationary = objective.gradient(z) + rho * (z - 3.0 * scores)
        np.testing.assert_allclose(stationary, 0.0, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_it_trains_predicts_and_is_reported(method, tmp_path):
    tables = frames()
    joined, scores, least = optimum(tables)
    sites = predicted.on(federated.whole, tables)
    grid = federated.WatchedGrid(sites, state=tmp_path)
    run = federated.train(grid, SQL, method, **HOW, **METHODS[method], device="cpu")
    model = predicted.Model(SQL, tmp_path, predicted.make_manifest(run))
    report = run.report
    assert report.final_train["loss"] == pytest.approx(least, rel=1e-4)
    # of counts, not of logarithms
    counts = joined["parcels"].to_numpy(float)
    rates = np.exp(scores)
    mae = np.abs(rates - counts).mean()
    assert report.final_train["mae"] == pytest.approx(mae, rel=5e-3)
    assert set(report.final_train) == {"loss", "deviance", "mae"}
    baseline = report.outcomes["baseline"]["train"]
    assert baseline["deviance"] > report.final_train["deviance"]
    assert model.manifest.loss == "toy-poisson"
    table = model.table(sites)
    order = np.argsort(table["row"].to_numpy()) if "row" in table.column_names else None
    rows = table["prediction"].to_numpy()
    rows = rows if order is None else rows[order]
    np.testing.assert_allclose(rows, rates, rtol=0.05)
    np.testing.assert_allclose(rows, np.exp(table["score"].to_numpy()), rtol=1e-12)
    again = model.evaluate(sites, loss="auto")
    assert again["deviance"] == pytest.approx(report.final_train["deviance"], rel=1e-5)


def test_it_is_explained():
    sites = federated.one_per_site(federated.whole(frames()))
    how = {**HOW, "mode": "explain", "strategy": "boost"}
    explained = federated.train(sites, SQL, Explain, **how)
    assert explained.explanation["loss"] == "toy-poisson"
