"""Heads of a test's folder: they are registered, and no shared file knows of them.

*Product* multiplies two numbers, each summed over the tables; *Every* multiplies one
number of every table, which sums do not tell:

    h = b + s_1 (1 + s_2)            h = b + prod_i (1 + f_i) - 1

Their gradients and the descent are those of torch on the joined table.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import check_grad

from strategies.disclosures import disclosures
from strategies.inference.manifest import decode_manifest, encode_manifest
from strategies.methods.sgd.strategy import Sgd
from strategies.training.join_method import JoinMethod
from tests.support import federated, predicted
from tests.support.predicted import Model, make_manifest
from tp_flower.errors import ModelError, SettingsError
from tp_flower.heads import HEADS, Head
from tp_flower.settings import PrivacySettings

SQL = """SELECT o.amount AS label, o.day, c.region
FROM orders o JOIN customers c ON o.customer = c.id"""
CLEAR = PrivacySettings(scores="clear")
MOMENTUM = 0.9
RATE = 0.1
L2 = 0.01
EPOCHS = 12
HOW = {
    "task": "regression",
    "test_fraction": 0.0,
    "validation_fraction": 0.0,
    "learning_rate": RATE,
    "l2": L2,
    "num_epochs": EPOCHS,
    "tolerance": 0.0,
    "device": "cpu",
}


@dataclass(frozen=True)
class Product(Head):
    name = "product"
    discloses = "of two numbers"

    @property
    def width(self):
        return 2 * self.outputs

    def combine(self, base, vectors):
        first, second = np.split(vectors, 2, axis=1)
        return base + first * (1.0 + second)

    def pullback(self, derivative, vectors):
        first, second = np.split(vectors, 2, axis=1)
        return np.hstack([derivative * (1.0 + second), derivative * first])


@dataclass(frozen=True)
class Every(Head):
    name = "every"
    needs_tables = True

    @property
    def width(self):
        return self.outputs

    def combine(self, base, vectors):
        return base + (1.0 + vectors).prod(axis=1) - 1.0

    def pullback(self, derivative, vectors):
        others = [np.delete(vectors, i, axis=1) for i in range(vectors.shape[1])]
        factors = [(1.0 + each).prod(axis=1) for each in others]
        return derivative[:, None] * np.stack(factors, axis=1)


def product_of(base, of_tables):
    """The scores of the tables' vectors on the joined rows, in torch."""
    first, second = sum(of_tables).T
    return base + first * (1.0 + second)


def every_of(base, of_tables):
    return base + torch.stack([1.0 + each[:, 0] for each in of_tables]).prod(0) - 1.0


CASES = {
    "product": (Product, product_of, PrivacySettings()),
    "product-clear": (Product, product_of, CLEAR),
    "every": (Every, every_of, CLEAR),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for head in (Product, Every):
        monkeypatch.setitem(HEADS, head.name, head)


def frames() -> federated.Frames:
    rng = np.random.default_rng(5)
    region = rng.choice(["n", "s", "w"], 12)
    day = rng.choice(["mon", "sat"], 90)
    customer = np.append(np.arange(12), rng.integers(0, 12, 78))
    of_day = np.where(day == "sat", 1.5, 0.5)
    of_region = np.where(region == "s", 2.0, 1.0)
    amount = of_day * of_region[customer] + rng.normal(0.0, 0.1, 90)
    return {
        "orders": pd.DataFrame({"customer": customer, "day": day, "amount": amount}),
        "customers": pd.DataFrame({"id": np.arange(12), "region": region}),
    }


def sites() -> dict[str, dict[str, list[pd.DataFrame]]]:
    tables = frames()
    halves = federated.pieces(tables["customers"], 5)
    return federated.named_sites({"orders": [tables["orders"]], "customers": halves})


def trained(monkeypatch, head, privacy, state=None, **how) -> federated.Run:
    monkeypatch.setattr(Sgd, "head", head)
    settings = {**HOW, "privacy": privacy, **how}
    return federated.run_query(SQL, sites(), "gd", state=state, **settings)


def descent(score, features, width: int) -> tuple[list[np.ndarray], float]:
    """The parameters after gradient descent on the joined table, and the last loss."""
    orders = frames()["orders"]
    labels = torch.tensor(orders["amount"].to_numpy())
    rows = torch.tensor(orders["customer"].to_numpy())
    of_orders = torch.tensor(np.c_[features["o"], np.ones(len(orders))])
    of_customers = torch.tensor(features["c"].astype(float))[rows]
    designs = [of_orders.double(), of_customers]
    thetas = [torch.zeros(x.shape[1], width).double().requires_grad_() for x in designs]
    velocity = [torch.zeros_like(theta) for theta in thetas]

    def loss():
        vectors = [x @ theta for x, theta in zip(designs, thetas, strict=True)]
        return 0.5 * ((score(labels.mean(), vectors) - labels) ** 2).mean()

    for _ in range(EPOCHS):
        # the intercept, the last parameter of the orders, is not penalised
        penalty = (thetas[0][:-1] ** 2).sum() + (thetas[1] ** 2).sum()
        gradients = torch.autograd.grad(loss() + 0.5 * L2 * penalty, thetas)
        with torch.no_grad():
            for each, theta, gradient in zip(velocity, thetas, gradients, strict=True):
                each.mul_(MOMENTUM).add_(gradient)
                theta.sub_(RATE * each)
    return [theta.detach().numpy() for theta in thetas], loss().item()


@pytest.mark.parametrize("head", [Product, Every])
def test_the_pullback_is_the_gradient(head):
    rng = np.random.default_rng(0)
    shape = (4, 3, 2) if head.needs_tables else (4, 4)
    base = rng.normal(size=2)
    weights = rng.normal(size=(4, 2))
    made = head(outputs=2)

    def value(flat):
        return float((weights * made.combine(base, flat.reshape(shape))).sum())

    def gradient(flat):
        return made.pullback(weights, flat.reshape(shape)).ravel()

    assert check_grad(value, gradient, rng.normal(size=np.prod(shape))) < 1e-5
    assert len(made.columns(("a", "b"))) == made.width == shape[-1]


@pytest.mark.parametrize("case", CASES)
def test_it_descends_as_on_the_joined_table(monkeypatch, case):
    head, score, privacy = CASES[case]
    run = trained(monkeypatch, head, privacy)
    width = head(outputs=1).width
    expected, loss = descent(score, run.features, width)
    for name, theta in zip(("o", "c"), expected, strict=True):
        actual = run.theta[name].reshape(-1, width)
        np.testing.assert_allclose(actual, theta, atol=2e-5)
    report = run.report
    assert report.final_train["loss"] == pytest.approx(loss, rel=1e-4)
    assert {each["share"] for each in report.contributions.values()} == {None}
    releases = disclosures(run.problem.exposure)
    scores = [each.carries for each in releases if "anew in every" in each.carries]
    assert scores
    assert all(head.discloses in text for text in scores)


@pytest.mark.parametrize("case", CASES)
def test_it_predicts(monkeypatch, tmp_path, case):
    head, score, privacy = CASES[case]
    run = trained(monkeypatch, head, privacy, tmp_path)
    model = Model(SQL, tmp_path, make_manifest(run.strategy))
    assert decode_manifest(encode_manifest(model.manifest)).head == head.name
    tables = frames()
    of_orders = torch.tensor(model.local_scores("o", tables["orders"]))
    of_customers = model.local_scores("c", tables["customers"])
    rows = tables["orders"]["customer"].to_numpy()
    base = model.manifest.base_score[0]

    def scores(joined):
        return score(base, [of_orders, torch.tensor(joined)]).numpy()

    actual = model.table(sites(), privacy=privacy)
    np.testing.assert_allclose(by_row(actual), scores(of_customers[rows]), atol=1e-5)
    again = model.evaluate(sites(), privacy=privacy)
    rmse = run.report.final_train["rmse"]
    assert again["rmse"] == pytest.approx(rmse, rel=1e-4)
    # where a site is gone, the mean vector stands in, and the head multiplies it
    there = {name: each for name, each in sites().items() if name != "customers-1"}
    mean = np.array(model.manifest.table("c").mean_score)
    np.testing.assert_allclose(mean, of_customers[rows].mean(axis=0), atol=1e-5)
    stand_in = np.where((rows >= 5)[:, None], mean, of_customers[rows])
    actual = model.table(there, privacy=privacy, on_missing="mean")
    np.testing.assert_allclose(by_row(actual), scores(stand_in), atol=1e-5)


def by_row(table) -> np.ndarray:
    return np.array([score for _, score in predicted.scored(table)])


def test_what_does_not_fit_a_head_is_refused(monkeypatch, tmp_path):
    with pytest.raises(SettingsError, match=r"masked.* head 'every' needs every"):
        trained(monkeypatch, Every, PrivacySettings())
    assert trained(monkeypatch, Every, CLEAR, num_epochs=1).losses
    run = trained(monkeypatch, Product, CLEAR, tmp_path, num_epochs=1)
    content = encode_manifest(make_manifest(run.strategy))
    monkeypatch.delitem(HEADS, "product")
    with pytest.raises(ModelError, match="head 'product' is unknown here"):
        decode_manifest(content)
    monkeypatch.setattr(JoinMethod, "head", Product)

    def train(method, num_epochs):
        return federated.train(
            list(sites().values()),
            SQL,
            method,
            task="regression",
            num_epochs=num_epochs,
        )

    for method in ("admm", "cg", "boost", "coreset-ridge"):
        with pytest.raises(SettingsError, match=f"{method}.* head 'product' does not"):
            train(method, 0)
    by_gradients = train("sgd", 2)
    assert by_gradients.report.final_train["r2"] > 0.5
