"""The privacy plan of a participant in a run: clips, noise, and numbers of releases.

A site makes the plan itself, from the settings of the run and its own view of the
schedule. The plan says how much noise each release gets, and how often it may happen:
the settings' epsilon is spread over the planned uses, and any further use is refused.

All costs are those of a *unit*: a row, or where the table's policy names a unit of
privacy, all of its at most k rows. Their joint clip is sqrt(k) times a row's (k times
in the Gram matrix, where rows cannot cancel), as rows that are no more alike than any
others add up to that. No number of a plan depends on which rows belong to which unit.

A *use* is one release of one kind. A release about a batch of SGD has the batch's
number as its *key*. A row may be in several batches of an epoch, so the cost of using
every key once is the cost for the row in the most batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tp_flower.errors import SiteError
from tp_flower.privacy.accounting import noise_multiplier
from tp_flower.privacy.gradients import PrivateFit
from tp_flower.privacy.mechanisms import ClippedNoise, Gaussian
from tp_flower.privacy.statistics_update import GRAM_SHARE, StatisticsPlan
from tp_flower.protocol.fields import DP_SGD, NOISY_STATISTICS

if TYPE_CHECKING:
    from tp_flower.protocol.training_messages import PrivacyTerms

MODEL: Final = "model"
GRADIENTS: Final = "gradients"
CURVATURE: Final = "curvature"
PARAMETERS: Final = "parameters"
GRAM: Final = "gram"
MOMENTS: Final = "moments"
PRODUCTS: Final = "products"
SCORES: Final = "scores"
BATCH_SCORES: Final = "batch-scores"
SECOND_MOMENTS: Final = "second-moments"
WEIGHTED_MOMENTS: Final = "weighted-moments"
COEFFICIENTS: Final = "coefficients"
CATEGORIES: Final = "categories"
FACTORS: Final = "factors"
SAMPLED_ROWS: Final = "rows"
CENTRES: Final = "centres"

LEAST_TORCH_CLIP: Final = 1e-15
"""Least clip of float32 gradients: the squares of much smaller norms underflow to 0."""


@dataclass(frozen=True)
class Schedule:
    """The numbers of a run that determine how often a row's data are used.

    Attributes:
        epochs: maximum number of epochs of the run.
        sends_gradients: whether gradients of batches leave (SGD), not models (ADMM).
        row_batches: the largest number of the plan's batches that one row is in.
        has_first_scores: whether the untrained model's scores leave.
        mean_multiplicity: mean G of the table's trained rows.
        rows_per_unit: k, 1 if every row is a unit.
        columns: encodings of the table's features, and one for an intercept: about the
            mean of ||x||^2, as a standardised number or a category adds one to it.
        label_scale: size of the labels, 1 in classification.
        output_scale: the factor on a torch model's output.
    """

    epochs: int
    sends_gradients: bool = False
    batches: int = 0
    row_batches: int = 0
    has_first_scores: bool = False
    rows_per_unit: int = 1
    mean_multiplicity: float = 1.0
    columns: int = 1
    label_scale: float = 1.0
    output_scale: float = 1.0


@dataclass(frozen=True)
class Use:
    """A kind of release, and how often it may happen.

    ``limit`` applies to each key; ``mechanism`` is the cost of using every key once,
    None if nothing covers the release.
    """

    what: str
    limit: int
    mechanism: Gaussian | None = None


@dataclass(frozen=True)
class PartPlan:
    """The clips, the noise and the uses of a participant's releases.

    Attributes:
        fit: options of a model's local update in ADMM by DP-SGD.
        gradients: clip and noise for the gradient of a batch of SGD.
        statistics: bounds and noise for the exact update of a linear model.
        moments: sensitivity and noise of a table's second moments with others.
        uses: all kinds of releases from models and scores, covered or not.
        unit_norm: how much longer than a row's a unit's gradient may be.
    """

    fit: PrivateFit | None = None
    gradients: ClippedNoise | None = None
    statistics: StatisticsPlan | None = None
    scores: ClippedNoise | None = None
    moments: ClippedNoise | None = None
    uses: tuple[Use, ...] = ()
    unit_norm: float = 1.0

    @property
    def is_private(self) -> bool:
        """Whether the model is trained by a private mechanism."""
        return any((self.fit, self.gradients, self.statistics, self.moments))

    def allows(self, kind: str) -> bool:
        """Whether a kind of release is planned."""
        return any(use.what == kind for use in self.uses)


def plan_part(
    settings: "PrivacyTerms",
    schedule: Schedule,
    *,
    sends: Sequence[str],
    is_linear: bool,
) -> PartPlan:
    """Return the plan of a participant, with the noise that its epsilon requires.

    ``sends`` are the kinds of releases from the model that leave the site (others are
    only used there); they count as planned uses even if nothing covers them.
    """
    scores, score_uses = _plan_scores(settings, schedule)
    models = _plan_models(settings, schedule, is_linear=is_linear)
    single_releases = (CURVATURE, GRAM, SAMPLED_ROWS, CENTRES)
    limits = dict.fromkeys(single_releases, 1)
    uses = models.uses or tuple(
        Use(kind, limits.get(kind, schedule.epochs)) for kind in sends
    )
    return replace(models, scores=scores, uses=(*uses, *score_uses))


def plan_prediction(
    settings: "PrivacyTerms", output_scale: float, rows_per_unit: int = 1
) -> PartPlan:
    """Return the plan of a prediction, whose scores leave once.

    The clip is in units of the model's ``output_scale``.
    """
    schedule = Schedule(
        epochs=1, output_scale=output_scale, rows_per_unit=rows_per_unit
    )
    scores, uses = _plan_scores(settings, schedule)
    return PartPlan(scores=scores, uses=uses)


def _plan_models(
    settings: "PrivacyTerms", schedule: Schedule, *, is_linear: bool
) -> PartPlan:
    """Return the plan of what leaves a model, by the mechanism of the settings."""
    if settings.features == DP_SGD and schedule.sends_gradients:
        return _plan_gradients(settings, schedule, is_linear=is_linear)
    if settings.features == DP_SGD:
        rate = settings.sample_rate or PrivateFit.sample_rate
        steps = settings.local_steps or PrivateFit.steps
        fit = PrivateFit(
            clip=settings.clip,
            noise_multiplier=_multiplier(settings, steps * schedule.epochs, rate),
            sample_rate=rate,
            steps=steps,
            output_scale=schedule.label_scale,
            row_norm=_row_norm(schedule),
            unit_norm=_unit_norm(schedule),
        )
        return PartPlan(fit=fit, uses=(Use(MODEL, schedule.epochs, fit.mechanism(1)),))
    if settings.features == NOISY_STATISTICS:
        statistics = plan_statistics(settings, schedule)
        gram = Use(GRAM, 1, Gaussian(statistics.gram_multiplier))
        moments = Gaussian(statistics.moments_multiplier)
        return PartPlan(
            statistics=statistics, uses=(gram, Use(MOMENTS, schedule.epochs, moments))
        )
    return PartPlan()


def plan_statistics(settings: "PrivacyTerms", schedule: Schedule) -> StatisticsPlan:
    """Return the bounds and the noise that the settings imply for a table.

    R^2 = clip^2 * mean G * columns * k, and tau = target_clip * label_scale: in these
    units 1 is a good choice for every table. As a mean over the row's G_j joined rows,
    |q_j| is about the loss's gradient (1 in classification) at most; if joined rows
    differ, sqrt(G_j) |q_j| is of that order, too.

    ``settings.noise_multiplier``, if set, is b's, and A's follows from the share.
    """
    share = (1.0 - GRAM_SHARE) / max(schedule.epochs, 1)
    moments = settings.noise_multiplier or noise_multiplier(
        settings.epsilon, settings.delta
    ) / math.sqrt(share)
    # a LEFT JOINed table may have no row to train on
    squared_norm = (schedule.mean_multiplicity or 1.0) * max(schedule.columns, 1)
    squared_norm *= schedule.rows_per_unit
    return StatisticsPlan(
        radius=settings.clip * math.sqrt(squared_norm),
        target_bound=settings.target_clip * schedule.label_scale,
        gram_multiplier=moments * math.sqrt(share / GRAM_SHARE),
        moments_multiplier=moments,
    )


def _multiplier(
    settings: "PrivacyTerms", count: int, sample_rate: float = 1.0
) -> float:
    """Return the noise multiplier that is set, or the one that epsilon requires."""
    return settings.noise_multiplier or noise_multiplier(
        settings.epsilon,
        settings.delta,
        count=count,
        sample_rate=sample_rate,
    )


def _row_norm(schedule: Schedule) -> float:
    return math.sqrt(1.0 + schedule.columns)


def _unit_norm(schedule: Schedule) -> float:
    """Return the expected norm of a sum of k vectors of norm 1."""
    return math.sqrt(schedule.rows_per_unit)


def _plan_gradients(
    settings: "PrivacyTerms", schedule: Schedule, *, is_linear: bool
) -> PartPlan:
    """Plan DP-SGD over the server's batches.

    The server knows who is in a batch: against it every batch that a row is in counts
    as one Gaussian mechanism. The rows of a unit may all be in different batches.

    The clip is relative to the expected norm of a unit's gradient: that of a row is the
    row's norm times the loss's derivative, which is of the order of the label's scale.
    Rows with many joined rows in a batch are clipped more: room for them would cost
    more in noise. A torch model multiplies its output, and so its gradient, by a scale.
    """
    batches_per_epoch = max(
        min(schedule.rows_per_unit * schedule.row_batches, schedule.batches), 1
    )
    sigma = _multiplier(settings, batches_per_epoch * schedule.epochs)
    gradient_norm = _row_norm(schedule) * schedule.label_scale * _unit_norm(schedule)
    if not is_linear:
        gradient_norm *= schedule.output_scale
    clip = settings.clip * gradient_norm
    if not is_linear and clip < LEAST_TORCH_CLIP:
        raise SiteError(
            f"gradients would be clipped to {clip:g}; allowed: at "
            f"least {LEAST_TORCH_CLIP:g}. Multiply the label by a larger number"
        )
    return PartPlan(
        gradients=ClippedNoise(clip, sigma),
        uses=(Use(GRADIENTS, schedule.epochs, Gaussian(sigma, batches_per_epoch)),),
        unit_norm=_unit_norm(schedule),
    )


def _plan_scores(
    settings: "PrivacyTerms", schedule: Schedule
) -> tuple[ClippedNoise | None, tuple[Use, ...]]:
    """Return the clip and the noise of scores, if any, and their planned uses."""
    evaluations = schedule.epochs + int(schedule.has_first_scores)
    # every row of a unit has scores of its own
    rows_per_unit = schedule.rows_per_unit
    limits = {SCORES: (evaluations, rows_per_unit)}
    if schedule.sends_gradients:
        limits[BATCH_SCORES] = (
            schedule.epochs,
            rows_per_unit * max(schedule.row_batches, 1),
        )
    if not settings.covers_predictions:
        return None, tuple(Use(kind, limit) for kind, (limit, _) in limits.items())
    total = sum(limit * rows for limit, rows in limits.values())
    sigma = noise_multiplier(settings.predictions, settings.delta, count=total)
    uses = tuple(
        Use(kind, limit, Gaussian(sigma, rows))
        for kind, (limit, rows) in limits.items()
    )
    clip = settings.prediction_clip * schedule.output_scale
    return ClippedNoise(clip, sigma), uses
