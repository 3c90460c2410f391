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


def test_metrics_are_the_weighted_mean_distance_and_its_root():
    scores, weights = np.array([[4.0, 9.0], [25.0, 1.0]]), np.array([3.0, 1.0])
    actual = evaluate(KMeansLoss(2), scores, np.zeros(2), weights)
    assert actual == {"loss": 3.25, "rms_distance": pytest.approx(3.25**0.5)}
    assert KMeansLoss(2).base_score(np.zeros(2)).tolist() == [0.0, 0.0]
