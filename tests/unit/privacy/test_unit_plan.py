"""What a person with many rows has spent, against a composition of its own."""

from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    RandomizedResponseDpEvent,
)
from dp_accounting.pld import PLDAccountant

from tests.support.examples.planned import spent
from tp_flower.learning.models.local_model import LinearModel
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.gradients import clipped_sum
from tp_flower.privacy.mechanisms import PureDp, clip_rows
from tp_flower.privacy.plan import (
    BATCH_SCORES,
    GRADIENTS,
    SCORES,
    PartPlan,
    Schedule,
    plan_part,
    plan_prediction,
)
from tp_flower.privacy.statistics_update import Rows, noisy_gram, noisy_moments
from tp_flower.privacy.units import Units
from tp_flower.randomness import NoiseSource
from tp_flower.settings import PrivacySettings

DELTA = 1e-5
each_number_of_rows = pytest.mark.parametrize("rows", [1, 2, 5, 20, 66])
SGD = Schedule(epochs=6, columns=8, sends_gradients=True, batches=40, row_batches=2)


def of_person(rows: int) -> tuple[np.ndarray, np.ndarray, Units]:
    """One person's rows, as large and as much alike as can be."""
    features = np.full((rows, 3), 50.0, np.float32)
    messages = np.full((rows, 1), 1e4)
    return features, messages, Units(np.zeros(rows, int))


def composed(ratios: list[float]) -> float:
    """The epsilon of Gaussians by deviation over what a person changes."""
    accountant = PLDAccountant()
    for ratio in ratios:
        accountant.compose(GaussianDpEvent(ratio))
    return float(accountant.get_epsilon(DELTA))


def reported(plan: PartPlan, *kinds: str) -> float:
    """The epsilon of all planned uses, as the ledger adds them up."""
    kinds = kinds or tuple(use.what for use in plan.uses if use.mechanism)
    return epsilon(spent(plan, kinds), DELTA)


def planned(features: str, schedule: Schedule, **privacy: float) -> PartPlan:
    settings = PrivacySettings(features=features, epsilon=2.0, delta=DELTA, **privacy)
    return plan_part(settings, schedule, sends=(), is_linear=True)


@each_number_of_rows
def test_the_epsilon_of_statistics_is_the_persons(rows):
    made = planned("statistics", Schedule(epochs=6, columns=8, rows_per_unit=rows))
    plan = made.statistics
    quiet = replace(plan, gram_multiplier=0.0, moments_multiplier=0.0)
    features, messages, units = of_person(rows)
    own = Rows(features, np.ones(rows, int), intercept=False, units=units)
    changes = [
        np.linalg.norm(noisy_gram(quiet, own, NoiseSource())),
        np.linalg.norm(noisy_moments(quiet, own, messages, NoiseSource())),
    ]
    ratios = [plan.gram_deviation / changes[0]]
    ratios += 6 * [plan.moments_deviation / changes[1]]
    assert reported(made) == pytest.approx(composed(ratios), rel=2e-3)
    assert reported(made) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.cases("1", "66")
@each_number_of_rows
def test_the_epsilon_of_local_fits_is_the_persons(rows):
    made = planned("dp-sgd", Schedule(epochs=3, columns=8, rows_per_unit=rows))
    noisy = made.fit.clipped_noise
    features, messages, units = of_person(rows)
    model = LinearModel(3, 1, intercept=False)
    change = np.linalg.norm(clipped_sum(model, features, messages, noisy.clip, units))
    ratios = 3 * made.fit.steps * [noisy.deviation / change]
    assert reported(made) == pytest.approx(composed(ratios), rel=2e-3)
    # without units, as many rows of a person change the sum by as many clips
    alone = np.linalg.norm(clipped_sum(model, features, messages, noisy.clip))
    assert alone == pytest.approx(rows * change)


@pytest.mark.cases("1", "66")
@each_number_of_rows
def test_a_persons_rows_may_be_in_as_many_batches_as_they_are(rows):
    made = planned("dp-sgd", replace(SGD, rows_per_unit=rows))
    (use,) = [use for use in made.uses if use.what == GRADIENTS]
    # two batches a row and epoch, of 40 that there are
    in_batches = min(2 * rows, 40)
    assert use.limit == 6
    assert use.mechanism.count == in_batches
    multiplier = made.gradients.deviation / made.gradients.clip
    assert use.mechanism.noise_multiplier == pytest.approx(multiplier)
    expected = composed(6 * in_batches * [multiplier])
    assert reported(made, GRADIENTS) == pytest.approx(expected, rel=2e-3)


@pytest.mark.cases("1", "66")
@each_number_of_rows
def test_the_epsilon_of_scores_is_that_of_all_of_a_persons_scores(rows):
    clear = PrivacySettings(predictions=3.0, delta=DELTA)
    made = plan_part(clear, replace(SGD, rows_per_unit=rows), sends=(), is_linear=True)
    # every score of the person as large as the clip: in one vector their norm
    scores = clip_rows(np.full((rows, 1), 1e6), made.scores.clip)
    ratio = made.scores.deviation / np.linalg.norm(scores)
    in_batches = made.scores.deviation / np.linalg.norm(np.tile(scores, (2, 1)))
    expected = composed([ratio] * 6 + [in_batches] * 6)
    assert reported(made, SCORES, BATCH_SCORES) == pytest.approx(expected, rel=2e-3)
    once = plan_prediction(clear, 1.0, rows)
    ratio = once.scores.deviation / np.linalg.norm(scores)
    assert reported(once) == pytest.approx(composed([ratio]), rel=2e-3)
    assert reported(once) == pytest.approx(3.0, rel=1e-3)


@each_number_of_rows
@pytest.mark.parametrize("of_label", [0.1, 1.0])
def test_the_epsilon_of_labels_is_that_of_all_of_a_persons_labels(rows, of_label):
    """Randomised response on each: as many as there are, composed by dp-accounting."""
    ledger = epsilon([PureDp(of_label, rows)], DELTA)
    at_random = 2 / (1 + np.exp(of_label))
    accountant = PLDAccountant(NeighboringRelation.REPLACE_ONE)
    event = RandomizedResponseDpEvent(at_random, num_buckets=2)
    exact = float(accountant.compose(event, rows).get_epsilon(DELTA))
    assert exact * 0.999 <= ledger <= rows * of_label * (1 + 1e-9)
    if rows == 1:
        assert ledger == of_label
