"""A lasso, an elastic net, and the path of penalties: scikit-learn's on the join."""

import numpy as np
import pytest
from sklearn.linear_model import ElasticNet, Ridge

from tests.support.examples.orders import (
    FEATURES,
    coefficients,
    fit,
    joined,
    sites,
    sql,
    tables,
)
from tests.support.federated import pieces
from tp_flower import api
from tp_flower.errors import QueryError
from tp_flower.methods.moments.penalties import (
    TOLERANCE,
    Penalty,
    fit_path,
    violation,
)
from tp_flower.methods.moments.solve import JoinedMoments

STRONG = 0.3  # leaves some coefficients of the orders 0


def elastic_net(l1: float, l2: float) -> ElasticNet:
    return ElasticNet(alpha=l1 + l2, l1_ratio=l1 / (l1 + l2), tol=1e-12, max_iter=10**5)


@pytest.mark.cases("0.01-0.0", "0.3-0.2")
@pytest.mark.parametrize("l2", [0.0, 0.2])
@pytest.mark.parametrize("l1", [0.01, STRONG])
def test_a_lasso_and_an_elastic_net_are_those_on_the_join(l1, l2):
    model = fit(l1=l1, l2=l2)
    features, label = joined()
    expected = elastic_net(l1, l2).fit(features, label)
    np.testing.assert_allclose(coefficients(model), expected.coef_, atol=1e-6)
    assert np.array_equal(coefficients(model) == 0.0, expected.coef_ == 0.0)
    r2 = expected.score(features, label)
    assert model.report["final"]["train"]["r2"] == pytest.approx(r2, abs=1e-6)
    predicted = np.sort(model.predict(sites()).frame["prediction"])
    np.testing.assert_allclose(
        predicted, np.sort(expected.predict(features)), atol=1e-4
    )
    if l1 == STRONG:
        assert 0 < np.count_nonzero(expected.coef_) < len(FEATURES)


@pytest.mark.parametrize(("l1", "l2"), [(0.1, 0.0), (0.1, 0.3), (0.0, 0.5)])
def test_the_path_has_the_losses_of_every_penalty(l1, l2):
    path = fit(l1=l1, l2=l2).report["moments"]["path"]
    features, label = joined()
    strengths = [each["l1"] + each["l2"] for each in path]
    assert strengths == sorted(strengths, reverse=True)
    assert [each for each in path if (each["l1"], each["l2"]) == (l1, l2)]
    for each in path:
        if l1:
            assert each["l2"] * l1 == pytest.approx(each["l1"] * l2)
            expected = elastic_net(each["l1"], each["l2"])
        else:
            expected = Ridge(alpha=each["l2"] * len(label))
        expected.fit(features, label)
        loss = 0.5 * np.mean((expected.predict(features) - label) ** 2)
        assert each["train"] == pytest.approx(loss, abs=1e-6)
        assert each["nonzero"] == np.count_nonzero(expected.coef_)
    if l1:
        assert path[0]["nonzero"] == 0


@pytest.mark.parametrize("l1", [0.0, STRONG])
def test_validation_rows_choose_on_the_path(l1):
    report = fit(l1=l1, validation_fraction=0.3, test_fraction=0.2).report
    path = report["moments"]["path"]
    best = min(path, key=lambda each: each["validation"])
    assert report["chosen"]["l2"] == best["l2"]
    assert report["chosen"].get("l1", 0.0) == best["l1"]
    for part in ("train", "test"):
        assert report["final"][part]["loss"] == best[part]
    # a run for the penalty that was chosen ends with the same model
    asked = {"l1": best["l1"], "l2": best["l2"], "validation_fraction": 0.3}
    again = fit(**asked, test_fraction=0.2).report
    assert again["final"]["test"] == pytest.approx(report["final"]["test"])


def test_a_lasso_of_shards_is_that_of_the_table():
    frames = tables()
    north, south = pieces(frames.pop("orders"), 110)
    shards = {"north": {"orders": north}, "south": {"orders": south}, "others": frames}
    how = {"strategy": "moments", "l1": 0.1, "test_fraction": 0.0}
    found = coefficients(api.fit(sql(), shards, **how))
    np.testing.assert_allclose(found, coefficients(fit(l1=0.1, l2=1e-4)), atol=1e-6)


def moments_of(features: np.ndarray, label: np.ndarray) -> JoinedMoments:
    rows = np.column_stack([features, label, np.ones(len(label))])
    width = features.shape[1]
    return JoinedMoments(rows.T @ rows, np.arange(width), np.array([width]), width + 1)


@pytest.mark.parametrize("l2", [0.0, 0.05])
def test_every_fit_of_a_path_is_optimal(l2):
    rng = np.random.default_rng(3)
    features = rng.normal(size=(400, 60))
    # a column twice, and indicators that add up to 1
    features[:, 1] = features[:, 0]
    features[:, 2:6] = np.eye(4)[rng.integers(4, size=400)]
    label = features[:, :9] @ rng.normal(size=9) + rng.normal(size=400)
    moments = moments_of(features, label)
    path = fit_path(moments, {0: moments}, Penalty(0.05, l2))
    assert max(violation(moments, each) for each in path) < TOLERANCE


def test_no_feature_tells_of_the_label():
    features = np.zeros((6, 2))
    moments = moments_of(features, np.arange(6.0))
    (only,) = fit_path(moments, {0: moments}, Penalty(1.0, 0.0))
    assert only.nonzero == 0
    assert only.losses[0] == pytest.approx(np.var(np.arange(6.0)) / 2)


@pytest.mark.parametrize("label", ["o.qty > 2", "o.kind"])
def test_classes_take_no_lasso(label):
    with pytest.raises(QueryError, match="l1 is for labels that are numbers"):
        fit(label, l1=0.1)
    assert fit(label, l1=0.0).report["moments"]["path"]


def test_a_lasso_that_has_not_converged_says_so():
    def warnings(l2: float) -> str:
        frames = tables()
        frames["orders"]["again"] = frames["orders"]["day"] * 1.0
        frames["orders"].loc[:3, "again"] += 1e-3
        query = sql(features="o.day, o.again, u.age")
        sites = {"here": frames}
        how = {"strategy": "moments", "test_fraction": 0.0}
        return str(api.fit(query, sites, l1=1e-7, l2=l2, **how).report["warnings"])

    advice = "miss the optimum's conditions by"
    assert advice in warnings(0.0)
    assert advice not in warnings(0.01)
