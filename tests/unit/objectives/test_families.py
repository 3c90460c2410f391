"""Families with a link, and robust ones, against scikit-learn, LightGBM and scipy."""

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from sklearn import metrics

from strategies.setup.labels import choose_objective
from tests.support.reference import losses as slow
from tests.support.reference.families import family, lightgbm_objective
from tp_flower.errors import QueryError, TPFlowerError
from tp_flower.objectives import Target, family_named, make_objective
from tp_flower.objectives.log_link import likeliest_dispersion
from tp_flower.settings import Settings

POWERS = {"poisson": 1, "tweedie": 1.5, "gamma": 2}
TREES = (
    *("squared", "logistic", "softmax", "poisson", "gamma", "tweedie(1.7)"),
    "huber(0.8)",
)


def drawn(name: str, rows: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores (n, 1), labels (n,) and weights (n,) of mean 1."""
    rng = default_rng(3)
    weights = rng.uniform(0.5, 1.5, rows)
    labels = family(name).labels(rng, rows)
    return rng.normal(0.5, 0.7, (rows, 1)), labels, weights / weights.mean()


@pytest.mark.parametrize("name", slow.VARIANCES)
def test_half_the_deviance_is_the_integral_of_the_quasi_score(name):
    variance = slow.VARIANCES[name]
    for label, mu in ((0.5, 2.0), (7.0, 0.3), (2.0, 2.0)):
        area, _ = quad(lambda t, y=label: (y - t) / variance(t), mu, label)
        assert float(slow.half_deviance(name, label, mu)) == pytest.approx(area)
        values = family(name).on([label]).row_values(np.log([[mu]]))
        assert values[0] == pytest.approx(area, abs=1e-12)


@pytest.mark.parametrize("name", POWERS)
def test_metrics_are_those_of_scikit_learn(name):
    scores, labels, weights = drawn(name)
    found = family(name).on(labels, weights).metrics(scores)
    how = {"sample_weight": weights, "power": POWERS[name]}
    means = np.exp(scores[:, 0])
    deviance = metrics.mean_tweedie_deviance(labels, means, **how)
    assert found["deviance"] == pytest.approx(deviance)
    assert found["loss"] == pytest.approx(deviance / 2)
    assert found["d2"] == pytest.approx(metrics.d2_tweedie_score(labels, means, **how))
    mae = metrics.mean_absolute_error(labels, means, sample_weight=weights)
    assert found["mae"] == pytest.approx(mae)


def counts_beside_means(dispersion: float) -> tuple[np.ndarray, np.ndarray]:
    """Counts (300,), and the means that they are drawn with."""
    rng = default_rng(12)
    means = np.exp(0.5 + 0.6 * rng.normal(size=300))
    if not dispersion:
        return rng.binomial(10, means / 10.0), means
    size = 1.0 / dispersion
    return rng.negative_binomial(size, 1.0 / (1.0 + dispersion * means)), means


def test_the_likeliest_dispersion_is_that_of_r():
    """`1 / MASS::theta.ml(counts, means, weights = w, eps = 1e-12)` in R 4.2."""
    counts, means = counts_beside_means(0.7)
    weights = 1.0 + np.arange(300) % 3
    found = likeliest_dispersion(counts, means)
    assert found == pytest.approx(0.651753763651, rel=1e-7)
    found = likeliest_dispersion(counts, means, weights / weights.mean())
    assert found == pytest.approx(0.652370694033, rel=1e-7)


def test_counts_that_scatter_less_than_poisson_ones_have_no_dispersion():
    assert likeliest_dispersion(*counts_beside_means(0.0)) == 0.0


@pytest.mark.parametrize(("name", "power"), [("poisson", 1.0), ("tweedie", 1.5)])
def test_a_rate_with_a_weight_is_an_amount_with_an_exposure(name, power):
    """As the page on losses says: d(y, t mu) = t^(2 - p) d(y / t, mu)."""
    scores, labels, _ = drawn(name)
    exposure = default_rng(4).uniform(0.2, 3.0, len(labels))
    shifted = scores + np.log(exposure)[:, None]
    amounts = family(name).on(labels).row_values(shifted)
    rates = family(name).on(labels / exposure).row_values(scores)
    assert_allclose(amounts, exposure ** (2.0 - power) * rates)


def test_metrics_of_a_quantile_are_those_of_scikit_learn():
    scores, labels, weights = drawn("quantile")
    target = Target.of(labels)
    found = make_objective("quantile(0.8)", target, weights).metrics(scores)
    how = {"sample_weight": weights, "alpha": 0.8}
    pinball = metrics.mean_pinball_loss(labels, scores[:, 0], **how)
    assert found["pinball"] == found["loss"] == pytest.approx(pinball)
    d2 = metrics.d2_pinball_score(labels, scores[:, 0], **how)
    assert found["d2"] == pytest.approx(d2, abs=1e-3)
    assert found["coverage"] == pytest.approx(weights @ (labels <= scores[:, 0]) / 400)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_prox_and_best_constant_of_a_quantile(level):
    scores, labels, weights = drawn("quantile", rows=40)
    bound = make_objective(f"quantile({level})", Target.of(labels), weights)

    def value(constant):
        return bound.value(np.full((40, 1), constant))

    best = min(map(value, labels))
    assert value(bound.base_score[0]) == pytest.approx(best, rel=1e-12)
    for rho in (0.05, 1.0, 20.0):
        for z, centre, y in zip(bound.prox(scores, rho), scores, labels, strict=True):

            def of_row(point, centre=centre, y=y, rho=rho):
                loss = max(level * (y - point), (level - 1) * (y - point))
                return loss + rho / 2 * (point - centre[0]) ** 2

            bounds = (min(y, centre[0]) - 30, max(y, centre[0]) + 30)
            least = minimize_scalar(of_row, bounds=bounds, options={"xatol": 1e-9})
            assert of_row(z[0]) <= least.fun + 1e-9


@pytest.mark.parametrize("name", TREES)
def test_the_first_tree_is_that_of_lightgbm(name):
    lightgbm = pytest.importorskip("lightgbm")
    rng = default_rng(1)
    features = rng.normal(size=(500, 3))
    labels = rng.gamma(2.0, np.exp(features[:, 0]) / 2)
    labels = np.floor(labels) if name == "poisson" else labels
    classes = {"logistic": 2, "softmax": 3}.get(name, 0)
    if classes:
        labels = np.minimum(np.floor(labels), classes - 1.0)
    names = tuple(map(str, range(classes)))
    objective = make_objective(name, Target.of(labels, names))
    outputs = objective.outputs
    how = {"num_leaves": 7, "verbose": -1, "num_threads": 1, "deterministic": True}

    def derivatives(added, data):
        del data
        scores = objective.base_score + added.reshape(500, outputs)
        slopes, bends = objective.gradient(scores), objective.tree_hessian(scores)
        return (slopes, bends) if outputs > 1 else (slopes[:, 0], bends[:, 0])

    def grow(**params):
        # without labels of a run's own base score, LightGBM starts from its own
        data = lightgbm.Dataset(features, labels)
        if not callable(params["objective"]):
            start = np.tile(objective.base_score, (500, 1))
            data.set_init_score(start if outputs > 1 else start[:, 0])
        booster = lightgbm.train({**how, **params}, data, num_boost_round=1)
        return booster.predict(features, raw_score=True)

    expected = lightgbm_objective(name)
    ours = grow(**expected | {"objective": derivatives})
    if outputs > 1:
        # leaves are Newton's steps, of which LightGBM takes (K - 1) / K (Friedman 2001)
        ours = ours * (outputs - 1) / outputs
    assert_allclose(ours, grow(**expected), atol=1e-6)
    assert np.ptp(ours, axis=0).min() > 1e-3


@pytest.mark.parametrize(
    ("name", "label", "why"),
    [
        ("poisson", -1.0, "'poisson' is for numbers of 0 and more.*has -1"),
        ("gamma", 0.0, "'gamma' is for numbers above 0.*has 0"),
        ("gamma", -1.0, "'gamma' is for numbers above 0.*has -1"),
        ("tweedie(1.2)", -0.5, r"'tweedie\(1.2\)' is for numbers of 0 and more"),
    ],
)
def test_labels_that_a_family_cannot_have_are_refused(name, label, why):
    target = Target.of([1.0, 2.0, label])
    settings = Settings(task="regression", loss=name)
    with pytest.raises(QueryError, match=why):
        choose_objective(target, np.ones(3, bool), settings)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("tweedie(2)", "the parameter of 'tweedie' is a number above 1 and below 2"),
        ("huber(-1)", "the parameter of 'huber' is a number above 0$"),
        ("quantile(e)", "the parameter of 'quantile' is a number above 0 and below 1"),
        ("poisson(2)", "'poisson' has no parameter"),
        ("gaussian", "'gaussian' is 'squared' here"),
        ("multinomial", "'multinomial' is 'softmax' here"),
        ("cauchy", r"not one of squared, .*, tweedie\(1.5\), "),
    ],
)
def test_a_parameter_is_checked(name, why):
    with pytest.raises(ValueError, match=why):
        family_named(name)
    with pytest.raises(TPFlowerError, match="loss: "):
        Settings.from_run_config({"query": "SELECT 1", "loss": name})


def test_a_name_has_its_parameter_once():
    assert Settings(loss="tweedie(1.50)").loss == "tweedie(1.5)"
    assert family_named("tweedie(1.5)") is family_named("tweedie(1.50)")
    assert family_named("huber(0.25)").parameter == 0.25


@pytest.mark.parametrize(
    ("strategy", "loss", "able"),
    [
        ("moments", "poisson", "admm, cg, sgd, gd, boost"),
        ("cg", "quantile(0.9)", "admm, sgd, gd"),
        ("boost", "quantile(0.9)", "admm, sgd, gd"),
        ("personalised", "gamma", "admm, cg, sgd, gd, boost"),
    ],
)
def test_a_strategy_that_cannot_train_by_a_loss_names_those_that_can(
    strategy, loss, able
):
    why = f"strategy '{strategy}' does not train by .*; {able} do"
    with pytest.raises(TPFlowerError, match=why):
        Settings(task="regression", strategy=strategy, loss=loss)


def test_auto_trains_quantiles_by_admm():
    assert Settings(loss="quantile(0.9)").method_name == "admm"
    assert Settings(loss="poisson").method_name == "cg"
