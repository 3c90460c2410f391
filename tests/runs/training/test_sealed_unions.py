"""Sealed unions give the model of unions in the clear, in the same rounds."""

import numpy as np
import pytest

from tests.support.federated import one_per_site, pieces, run, run_query, sharded, store
from tp_flower.settings import PrivacySettings

UNIONS = {name: PrivacySettings(unions=name) for name in ("sealed", "clear")}
TOLERANCE = 1e-6
METHODS = {
    "gram": ("squared", "admm", {"num_epochs": 6}),
    "gram-l2": ("logistic", "admm", {"num_epochs": 4, "l2": 0.1, "rho": 0.01}),
    "consensus": ("squared", "admm", {"lou": "consensus"}),
    "softmax": ("softmax", "admm", {"num_epochs": 3}),
    "mlp": ("squared", "admm", {"num_epochs": 3, "model": "mlp"}),
    "mixed": ("logistic", "admm", {"num_epochs": 3, "models": (("c", "mlp"),)}),
    "sgd": ("squared", "sgd", {"batch_size": 50}),
    "logistic": ("logistic", "sgd", {"batch_size": 50}),
    "sgd-mlp": ("squared", "sgd", {"batch_size": 100, "model": "mlp"}),
}


def metrics(finished):
    return [value for item in finished.history for value in item.train.values()]


def traffic(finished, way):
    return sum(sum(getattr(item, way).values()) for item in finished.history)


def assert_same(sealed, clear):
    np.testing.assert_allclose(
        metrics(sealed), metrics(clear), rtol=TOLERANCE, atol=TOLERANCE
    )
    np.testing.assert_allclose(sealed.flat, clear.flat, rtol=1e-5, atol=1e-6)
    phases = [[item.phase for item in one.history] for one in (sealed, clear)]
    assert phases[0] == phases[1]


@pytest.mark.cases("gram", "consensus", "softmax")
@pytest.mark.parametrize("method", METHODS)
def test_a_sealed_union_trains_the_same_model(method):
    loss, strategy, settings = METHODS[method]
    sites = one_per_site(sharded(store(300, 40)))
    runs = (
        run(loss, sites, strategy, privacy=privacy, **settings)
        for privacy in UNIONS.values()
    )
    assert_same(*runs)


OUTER = (
    "SELECT o.qty AS label, o.day, c.age, c.region "
    "FROM orders o LEFT JOIN customers c ON o.customer = c.id"
)
SELF = (
    "SELECT o.qty AS label, c.age, d.region FROM orders o "
    "JOIN customers c ON o.customer = c.id JOIN customers d ON o.customer = d.id"
)


@pytest.mark.cases("admm-self", "admm-left")
@pytest.mark.parametrize("sql", [OUTER, SELF], ids=["left", "self"])
@pytest.mark.parametrize("strategy", ["admm", "sgd"])
def test_left_and_self_joins(sql, strategy):
    frames = store(200, 30)
    frames["customers"] = frames["customers"].iloc[:20]
    shards = {
        "orders": pieces(frames["orders"], 50, 120),
        "customers": pieces(frames["customers"], 9),
    }
    sites = one_per_site(shards)
    runs = (
        run_query(sql, sites, strategy, privacy=privacy, num_epochs=3)
        for privacy in UNIONS.values()
    )
    assert_same(*runs)


@pytest.mark.cases("gram", "consensus")
@pytest.mark.parametrize("method", ["gram", "consensus", "sgd"])
def test_bytes_are_those_of_the_clear_within_one_percent(method):
    loss, strategy, settings = METHODS[method]
    sites = one_per_site(sharded(store(6000, 800)))
    how = {**settings, "batch_size": 3000} if strategy == "sgd" else settings
    runs = [
        run(loss, sites, strategy, privacy=privacy, **how)
        for privacy in UNIONS.values()
    ]
    for way in ("bytes_up", "bytes_down"):
        sealed, clear = (traffic(finished, way) for finished in runs)
        assert clear <= sealed <= 1.01 * clear


@pytest.mark.cases("statistics")
@pytest.mark.parametrize("features", ["dp-sgd", "statistics"])
def test_noise_is_added_before_the_seal(features):
    """With the noise of one secret, the models are the same."""
    privacy = PrivacySettings(features=features, epsilon=50.0, noise_multiplier=0.0)
    sites = one_per_site(sharded(store(300, 40)))
    for strategy in ("admm", "sgd") if features == "dp-sgd" else ("admm",):
        finished = run("squared", sites, strategy, num_epochs=2, privacy=privacy)
        releases = finished.releases
        sealed = [item for item in releases if item["scope"].startswith("sealed")]
        assert {item["what"] for item in sealed} == {
            ("dp-sgd", "admm"): {"model"},
            ("dp-sgd", "sgd"): {"gradients"},
            ("statistics", "admm"): {"gram", "moments"},
        }[features, strategy]
        assert all(item["mechanism"] for item in sealed)
