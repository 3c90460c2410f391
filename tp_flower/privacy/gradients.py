"""Gradients with clipped contributions per row: DP-SGD on the rows of one table.

    sum_k  min(1, C / ||g_k||) g_k  +  N(0, (sigma C)^2 I),    g_k = Y_k^T dh_k / dtheta

Terms independent of data (penalties) are added later, neither clipped nor noised.

With units of privacy (``units.py``) the sum over a unit's rows is clipped in place of
g_k; of a torch model each of a unit's m rows is clipped to the m-th part of C.

Guarantee:
    unit          one row of the table, regardless of its number of joined rows: they
                  enter g_k summed in Y_k, and are clipped together; or one unit
    neighbours    the unit contributes, or zeros replace its contribution (zero-out)
    sensitivity   C, in Euclidean norm: a Gaussian mechanism of multiplier sigma per use
    not covered   Y itself, which the server makes; what its size says of other tables

| edge case                       | result                                           |
|---------------------------------|--------------------------------------------------|
| no rows                         | noise around zero                                |
| a gradient of zero              | stays zero                                       |
| a gradient that is not finite,  | counts as zero, with a unit its unit: it would   |
| as of a feature that is NaN     | tell of its row                                  |
| C = inf, sigma = 0              | the plain sum, bit by bit                        |

Reference:
    Abadi et al. 2016, Algorithm 1.

Notation:
    x_k  ``features``  (k, d)        Y_k  ``messages``  (k, d_c)
    C    ``clip``                    sigma  ``noise_multiplier``
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tp_flower.arrays import FloatArray, IndexArray, blocks
from tp_flower.features.sparse import EncodedRows, SparseRows
from tp_flower.learning.models import local_model
from tp_flower.privacy.mechanisms import ClippedNoise, Gaussian
from tp_flower.privacy.units import Units
from tp_flower.randomness import NoiseSource

NOISE_DAMPING: Final = 20.0  # rate / (1 + this nu): flat from 10 to 30 on flights

ADAM_MEAN = 0.9
ADAM_SQUARE = 0.999
ADAM_TINY = 1e-8
LINEAR_RATE: Final = 0.01
TORCH_RATE: Final = 0.03
"""Chosen by experiments on flights, linear and MLP, at epsilon 1 and 8."""


def check_per_row(model: local_model.LocalModel, features: int) -> None:
    """Raise SettingsError if a row's gradient depends on other rows; name the layer."""
    if isinstance(model, local_model.LinearModel):
        return
    from tp_flower.privacy.torch_gradients import (
        check_norms_are_whole,
        check_rows_are_apart,
    )

    check_rows_are_apart(model, features)
    check_norms_are_whole(model, features)


def check_scores(model: local_model.LocalModel, features: int) -> None:
    """Raise SettingsError if a row's score depends on other rows."""
    if isinstance(model, local_model.LinearModel):
        return
    from tp_flower.privacy.torch_gradients import check_scores_are_apart

    check_scores_are_apart(model, features)


def clipped_sum(
    model: local_model.LocalModel,
    features: EncodedRows,
    messages: FloatArray,
    clip: float,
    units: Units | None = None,
) -> FloatArray:
    """Return the sum of the rows' gradients, each clipped to norm ``clip``, (p,).

    With units, the sum over each unit's rows is clipped instead. ``clip`` is C > 0, inf
    for no clipping; the model's parameters are only read.

    >>> model = local_model.LinearModel(features=2, outputs=1, intercept=False)
    >>> rows = np.array([[3, 4], [0.3, 0.4]], dtype=np.float32)
    >>> clipped_sum(model, rows, np.ones((2, 1)), clip=1.0).round(6).tolist()
    [0.9, 1.2]
    """
    if math.isinf(clip):
        return model.pullback(features, messages)
    if isinstance(model, local_model.LinearModel):
        return _clipped_linear_sum(model, features, messages, clip, units)
    # torch and opacus take seconds to import, which linear models avoid
    from tp_flower.privacy.torch_gradients import clipped_torch_sum

    clips = clip if units is None else clip / units.totals(np.ones(len(messages)))
    return clipped_torch_sum(model, features, messages, clips)


def private_sum(
    model: local_model.LocalModel,
    features: EncodedRows,
    messages: FloatArray,
    clipped_noise: ClippedNoise,
    noise: NoiseSource,
    units: Units | None = None,
) -> FloatArray:
    """Return ``clipped_sum`` with Gaussian noise of deviation sigma C, (p,)."""
    total = clipped_sum(model, features, messages, clipped_noise.clip, units)
    return noise.with_gaussian(total, clipped_noise.deviation)


def _clipped_linear_sum(
    model: local_model.LinearModel,
    features: EncodedRows,
    messages: FloatArray,
    clip: float,
    units: Units | None,
) -> FloatArray:
    """Return the sum of the clipped gradients of a linear model."""
    has_one = model.intercept
    if units is None:
        with np.errstate(over="ignore", invalid="ignore"):
            # ||g_k|| = ||[x_k, 1]|| ||Y_k||
            lengths = np.sqrt(squared_lengths(features, intercept=has_one))
            norms = lengths * np.linalg.norm(messages, axis=1)
    else:
        norms = units.gradient_norms(features, messages, intercept=has_one)
    weights = clip_weights(norms, clip)
    if not (counts := weights > 0).all():
        # left out: zero times a number that is not finite is NaN
        features = local_model.host_features(
            local_model.rows_of(features, np.flatnonzero(counts))
        )
        messages = messages[counts]
        weights = weights[counts]
    return local_model.moment(
        features, weights[:, None] * messages, intercept=has_one
    ).ravel()


def squared_lengths(features: EncodedRows, *, intercept: bool) -> FloatArray:
    """Return ||x_k||^2, with an intercept ||[x_k, 1]||^2, (k,)."""
    if isinstance(features, SparseRows):
        return features.square_lengths() + float(intercept)
    squares = np.empty(len(features))
    for block in blocks(len(features)):
        rows = features[block].astype(np.float64)
        squares[block] = np.einsum("ij,ij->i", rows, rows)
    return squares + float(intercept)


def clip_weights(norms: FloatArray, clip: float | FloatArray) -> FloatArray:
    """Return min(1, clip / norm) for norms (k,); 0 if the norm is not finite.

    >>> clip_weights(np.array([0.0, 2.0, 8.0, np.inf, np.nan]), 4.0).tolist()
    [1.0, 1.0, 0.5, 0.0, 0.0]
    """
    is_finite = np.isfinite(norms)
    return np.where(
        is_finite, clip / np.maximum(np.where(is_finite, norms, clip), clip), 0.0
    )


@dataclass(frozen=True)
class PrivateFit:
    """The plan of one local update, made before training from public numbers.

    The defaults of ``sample_rate`` and ``steps`` were chosen by experiments on flights
    (epsilon 1 to 8, 12 epochs): at equal epsilon full passes are slightly better than
    samples of the rows, and 20 to 50 small steps better than 10 large ones; averaging
    the iterates or decreasing the rate brings nothing.

    Attributes:
        clip: C > 0, with ``noise_multiplier`` sigma >= 0 and ``sample_rate`` in (0, 1].
        learning_rate: Adam's, in units of the parameters (for linear models: of s); 0:
            ``LINEAR_RATE`` or ``TORCH_RATE``.
        output_scale: s, 1 in classification, the labels' deviation in regression.
        row_norm: r, sqrt(1 + the table's feature columns), as a column's mean square is
            about 1.
        unit_norm: how much longer than a row's a unit's gradient may be.
    """

    clip: float
    noise_multiplier: float
    sample_rate: float = 1.0
    steps: int = 20
    learning_rate: float = 0.0
    output_scale: float = 1.0
    row_norm: float = 1.0
    unit_norm: float = 1.0

    def __post_init__(self) -> None:
        _ = self.clipped_noise

    @property
    def clipped_noise(self) -> ClippedNoise:
        """The clip and the noise of a step."""
        return ClippedNoise(self.clip * self.unit_norm, self.noise_multiplier)

    def mechanism(self, updates: int) -> Gaussian:
        """Return the privacy cost per unit of ``updates`` local updates."""
        return Gaussian(self.noise_multiplier, self.steps * updates, self.sample_rate)


def fit_privately(
    model: local_model.LocalModel,
    problem: local_model.FitProblem,
    plan: PrivateFit,
    noise: NoiseSource,
    units: Units | None = None,
) -> None:
    """Fit a model in place by DP-SGD, warm-started from its current parameters.

    Without rows the penalised parameters move to the centre at once. With units, whole
    units are sampled and clipped.
    """
    all_rows = local_model.host_features(problem.features)
    rows = len(all_rows)
    if not rows:
        model.parameters = problem.settle(model.parameters)
        return
    # linear models have parameters in the labels' unit; Adam's steps are of order 1
    is_linear = isinstance(model, local_model.LinearModel)
    label_unit = plan.output_scale if is_linear else 1.0
    scale = label_unit * problem.kappa / (plan.row_norm * plan.output_scale**2)
    weights = scale * problem.weights[:, None]
    penalty = scale * problem.relative_penalty
    theta = model.parameters.copy()
    rate = plan.learning_rate or (LINEAR_RATE if is_linear else TORCH_RATE)
    sampled = plan.sample_rate * rows
    relative_noise = plan.noise_multiplier * math.sqrt(len(theta)) / sampled
    relative_noise *= plan.unit_norm
    rate = label_unit * rate / (1.0 + NOISE_DAMPING * relative_noise)
    mean = np.zeros(len(theta))
    square = np.zeros(len(theta))
    for step in range(1, plan.steps + 1):
        sample, sample_units = _sample(rows, plan.sample_rate, noise, units)
        features = all_rows[sample]
        messages = weights[sample] * (model.scores(features) - problem.target[sample])
        total = private_sum(
            model, features, messages, plan.clipped_noise, noise, sample_units
        )
        gradient = total / sampled + penalty * (theta - problem.centre)
        mean = ADAM_MEAN * mean + (1 - ADAM_MEAN) * gradient
        square = ADAM_SQUARE * square + (1 - ADAM_SQUARE) * gradient**2
        first = mean / (1 - ADAM_MEAN**step)
        second = square / (1 - ADAM_SQUARE**step)
        theta = model.parameters = theta - rate * first / (np.sqrt(second) + ADAM_TINY)


def _sample(
    rows: int, rate: float, noise: NoiseSource, units: Units | None
) -> tuple[slice | IndexArray, Units | None]:
    if rate == 1.0:
        # a slice copies nothing
        return slice(None), units
    sample = (units or Units(np.arange(rows))).sample(rate, noise)
    return sample, units and units.of(sample)
