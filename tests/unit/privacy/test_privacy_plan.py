"""A part's plan: what all its uses cost together is the epsilon that was asked for."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.support.examples.planned import spent
from tp_flower.privacy import plan as plans
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import Gaussian
from tp_flower.settings import PrivacySettings

SHAPE = {"epochs": 6, "mean_multiplicity": 3.0, "columns": 8}
ADMM = plans.Schedule(**SHAPE)
SGD = plans.Schedule(sends_gradients=True, batches=10, row_batches=4, **SHAPE)


def plan(settings, outline, *, is_linear=True):
    made = plans.plan_part(
        settings, outline, sends=("gram", "moments"), is_linear=is_linear
    )
    assert msgspec.convert(msgspec.to_builtins(made), plans.PartPlan) == made
    return made


@pytest.mark.parametrize(
    ("features", "outline", "kinds"),
    [
        ("dp-sgd", ADMM, {plans.MODEL}),
        ("statistics", ADMM, {plans.GRAM, plans.MOMENTS}),
        ("dp-sgd", SGD, {plans.GRADIENTS}),
    ],
)
@pytest.mark.parametrize("target", [0.3, 2.0])
def test_the_uses_of_a_model_cost_its_epsilon(features, outline, kinds, target):
    made = plan(PrivacySettings(features=features, epsilon=target, delta=1e-6), outline)
    assert {use.what for use in made.uses if use.mechanism} == kinds
    assert epsilon(spent(made, kinds), 1e-6) == pytest.approx(target, rel=1e-3)
    assert made.is_private


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_sampled_steps_cost_their_epsilon_too(rate):
    settings = PrivacySettings(features="dp-sgd", sample_rate=rate, local_steps=7)
    made = plan(settings, ADMM)
    assert made.fit.sample_rate == rate
    (whole,) = spent(made, {plans.MODEL})
    assert whole == Gaussian(made.fit.noise_multiplier, 7 * 6, rate)
    assert epsilon([whole], 1e-5) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("outline", [ADMM, SGD])
@pytest.mark.parametrize("first", [False, True])
def test_the_scores_that_a_row_shows_cost_their_epsilon(outline, first):
    outline = replace(outline, has_first_scores=first)
    made = plan(PrivacySettings(predictions=3.0), outline)
    mechanisms = spent(made, {plans.SCORES, plans.BATCH_SCORES})
    assert epsilon(mechanisms, 1e-5) == pytest.approx(3.0, rel=1e-3)
    assert not made.is_private
    # one release per epoch, and of SGD one for each batch that the row is in
    in_batches = outline.row_batches * 6
    assert sum(mechanism.count for mechanism in mechanisms) == 6 + in_batches + first


def test_a_row_of_sgd_pays_for_every_batch_that_it_is_in():
    """By hand: a table of 3 rows; row 1 is in 4 of the 10 batches of each epoch."""
    assert np.bincount(np.array([0, 1, 1, 2, 1, 1])).max() == SGD.row_batches
    settings = PrivacySettings(features="dp-sgd", noise_multiplier=5.0)
    assert plan(settings, ADMM).fit.noise_multiplier == 5.0
    made = plan(settings, SGD)
    (gradients,) = [use for use in made.uses if use.what == plans.GRADIENTS]
    assert gradients.limit == 6
    assert gradients.mechanism == Gaussian(5.0, 4)
    # 24 Gaussians of multiplier 5 are one of 5 / sqrt(24)
    one = epsilon([Gaussian(5.0 / math.sqrt(24))], 1e-5)
    assert epsilon(spent(made, {plans.GRADIENTS}), 1e-5) == pytest.approx(one)


def test_no_amplification_is_claimed_against_the_server():
    made = plan(PrivacySettings(features="dp-sgd", predictions=9.0), SGD)
    assert all(use.mechanism.sample_rate == 1.0 for use in made.uses[:1])
    assert epsilon(spent(made, {plans.GRADIENTS}), 1e-5) == pytest.approx(1.0, rel=1e-2)


def test_what_nothing_covers_is_a_use_too():
    made = plan(PrivacySettings(), ADMM)
    limits = {use.what: use.limit for use in made.uses}
    assert limits == {"gram": 1, "moments": 6, "scores": 6}
    assert not any(use.mechanism for use in made.uses)
    assert (made.fit, made.gradients, made.statistics, made.scores) == (None,) * 4


def test_clips_follow_the_scale_of_labels_and_rows():
    settings = PrivacySettings(features="dp-sgd", predictions=1.0, prediction_clip=2.0)
    in_minutes = replace(SGD, label_scale=40.0, output_scale=20.0)
    one = plan(settings, SGD)
    scaled = plan(settings, in_minutes)
    assert scaled.scores.clip == 20.0 * one.scores.clip == 40.0
    assert scaled.gradients.clip == pytest.approx(40.0 * one.gradients.clip)
    torch = plan(settings, in_minutes, is_linear=False)
    assert torch.gradients.clip == pytest.approx(20.0 * scaled.gradients.clip)
    assert one.gradients.clip == pytest.approx(math.sqrt(9.0))
