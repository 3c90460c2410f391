"""Centres as a local model, and the loss of a clustering."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_flower.learning.losses import KMeansLoss
from tp_flower.learning.metrics import evaluate
from tp_flower.learning.models.local_model import CentresModel, ModelSpec, build_model

few = settings(max_examples=25, deadline=None)


def model_of(centres: np.ndarray) -> CentresModel:
    spec = ModelSpec("centres", outputs=len(centres))
    model = build_model(spec, centres.shape[1])
    assert isinstance(model, CentresModel)
    model.parameters = centres.ravel()
    return model


@few
@given(
    rows=st.sampled_from([0, 1, 9, 16385]),
    width=st.integers(0, 4),
    clusters=st.integers(1, 5),
)
def test_scores_are_the_squared_distances(rows, width, clusters):
    rng = np.random.default_rng(rows + width)
    features = rng.normal(size=(rows, width)).astype(np.float32)
    centres = rng.normal(size=(clusters, width))
    wide = features.astype(np.float64)
    expected = ((wide[:, None] - centres) ** 2).sum(axis=2)
    np.testing.assert_allclose(model_of(centres).scores(features), expected, atol=1e-12)


def test_distances_are_never_below_zero():
    far = np.full((3, 2), 12345.678, np.float32)
    assert (model_of(far[:1].astype(np.float64)).scores(far) >= 0.0).all()


def test_pullback_is_the_derivative_of_the_scores():
    rng = np.random.default_rng(2)
    features = rng.normal(size=(7, 3)).astype(np.float32)
    messages = rng.normal(size=(7, 2))
    model = model_of(rng.normal(size=(2, 3)))
    start, actual = model.parameters.copy(), model.pullback(features, messages)
    for place in range(len(start)):
        ends = []
        for step in (1e-6, -1e-6):
            model.parameters = start + step * (np.arange(len(start)) == place)
            ends.append(float((messages * model.scores(features)).sum()))
        assert actual[place] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)
    assert not model.penalised.any()


@few
@given(rho=st.floats(0.01, 100.0), seed=st.integers(0, 99))
def test_the_proximal_step_of_the_loss_is_its_minimum(rho, seed):
    rng = np.random.default_rng(seed)
    loss, labels = KMeansLoss(3), np.zeros(5)
    centre = rng.gamma(1.0, size=(5, 3))

    def value(z):
        return loss.row_values(z, labels) + rho / 2 * ((z - centre) ** 2).sum(axis=1)

    actual = value(loss.prox(centre, labels, rho))
    for spread in (0.01, 0.1, 1.0, 1.0 / rho):
        trials = centre + spread * rng.normal(size=(200, 5, 3))
        assert (actual <= value(trials[0]) + 1e-12).all()
        assert all((actual <= value(trial) + 1e-12).all() for trial in trials)


def test_metrics_are_the_weighted_mean_distance_and_its_root():
    scores, weights = np.array([[4.0, 9.0], [25.0, 1.0]]), np.array([3.0, 1.0])
    actual = evaluate(KMeansLoss(2), scores, np.zeros(2), weights)
    assert actual == {"loss": 3.25, "rms_distance": pytest.approx(3.25**0.5)}
    assert KMeansLoss(2).base_score(np.zeros(2)).tolist() == [0.0, 0.0]
    gradient = KMeansLoss(2).gradient(scores, np.zeros(2))
    assert gradient.tolist() == [[1.0, 0.0], [0.0, 1.0]]
