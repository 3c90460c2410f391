"""Gradients of which no row decides more than a clip: DP-SGD on the rows of one table.

    sum_k  min(1, C / ||g_k||) g_k  +  N(0, (sigma C)^2 I),    g_k = Y_k^T dh_k / dtheta

Terms that depend on no data (penalties) are added afterwards, neither clipped nor
noised.

Guarantee:
    unit          one row of the table, whatever number of joined rows it is in: its
                  joined rows reach g_k summed in Y_k, and are clipped together
    neighbours    the row contributes, or nothing does in its place (zero-out)
    sensitivity   C, in Euclidean norm: a Gaussian mechanism of multiplier sigma per use
    not covered   Y itself, which is the server's; what its size tells of other tables

| edge case                       | result                                           |
|---------------------------------|--------------------------------------------------|
| no rows                         | noise around zero                                |
| a gradient of zero              | stays zero                                       |
| a gradient that is not finite   | counts as zero: it would tell of its row         |
| C = inf, sigma = 0              | the plain sum, bit by bit                        |

Reference:
    Abadi et al. 2016, Algorithm 1.

Notation:
    x_k  ``features``  (k, d)        Y_k  ``messages``  (k, d_c)
    C    ``clip``                    sigma  ``noise_multiplier``
"""

import math

import numpy as np

from tp_flower.arrays import blocks
from tp_flower.learning.models.local_model import (
    FeatureArray,
    FloatArray,
    LinearModel,
    LocalModel,
    moment,
)
from tp_flower.noise import NoiseSource


def check_per_row(model: LocalModel, features: int) -> None:
    """Refuse a model whose rows have no gradients of their own, before training.

    Raises:
        SettingsError: names the layer, if it is one.
    """
    if isinstance(model, LinearModel):
        return
    from tp_flower.privacy.torch_gradients import (
        check_norms_are_whole,
        check_rows_are_apart,
    )

    check_rows_are_apart(model, features)
    check_norms_are_whole(model, features)


def check_scores(model: LocalModel, features: int) -> None:
    """Refuse a model whose score of one row tells of others, before training.

    Raises:
        SettingsError: it does.
    """
    if isinstance(model, LinearModel):
        return
    from tp_flower.privacy.torch_gradients import check_scores_are_apart

    check_scores_are_apart(model, features)


def clipped_sum(
    model: LocalModel, features: FeatureArray, messages: FloatArray, clip: float
) -> FloatArray:
    """Return the sum of the rows' gradients, each clipped to norm ``clip``, (p,).

    Args:
        model: f; its parameters are only read.
        features: rows of the table, (k, d).
        messages: Y, (k, d_c).
        clip: C, > 0; inf for none.

    Raises:
        SettingsError: the model has a layer without gradients row by row.

    >>> model = LinearModel(features=2, outputs=1, intercept=False)
    >>> rows = np.array([[3, 4], [0.3, 0.4]], dtype=np.float32)
    >>> clipped_sum(model, rows, np.ones((2, 1)), clip=1.0).round(6).tolist()
    [0.9, 1.2]
    """
    if math.isinf(clip):
        return model.pullback(features, messages)
    if isinstance(model, LinearModel):
        return _clipped_linear_sum(model, features, messages, clip)
    # torch and opacus take seconds to import: linear models do without
    from tp_flower.privacy.torch_gradients import clipped_torch_sum

    return clipped_torch_sum(model, features, messages, clip)


def private_sum(
    model: LocalModel,
    features: FeatureArray,
    messages: FloatArray,
    *,
    clip: float,
    noise_multiplier: float,
    noise: NoiseSource,
) -> FloatArray:
    """Return ``clipped_sum`` with Gaussian noise of deviation sigma C, (p,).

    Raises:
        ValueError: noise without a clip: it would have no scale.
        SettingsError: as ``clipped_sum``.
    """
    total = clipped_sum(model, features, messages, clip)
    if not noise_multiplier:
        return total
    if math.isinf(clip):
        raise ValueError(
            f"noise_multiplier is {noise_multiplier}, but clip is infinite: "
            "noise needs a finite clip"
        )
    return noise.with_gaussian(total, noise_multiplier * clip)


def _clipped_linear_sum(
    model: LinearModel, features: FeatureArray, messages: FloatArray, clip: float
) -> FloatArray:
    """One product with re-weighted messages: ||g_k|| = ||[x_k, 1]|| ||Y_k||."""
    weighted = np.empty_like(messages, dtype=np.float64)
    for block in blocks(len(features)):
        rows = features[block].astype(np.float64)
        squares = np.einsum("ij,ij->i", rows, rows) + float(model.intercept)
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(squares) * np.linalg.norm(messages[block], axis=1)
        weights = clip_weights(norms, clip)[:, None]
        # not a product: zero times infinity is none of them
        weighted[block] = np.where(weights > 0, messages[block], 0.0) * weights
    return moment(features, weighted, intercept=model.intercept).ravel()


def clip_weights(norms: FloatArray, clip: float) -> FloatArray:
    """Return min(1, clip / norm) for norms (k,); 0 where the norm is not finite.

    >>> clip_weights(np.array([0.0, 2.0, 8.0, np.inf, np.nan]), 4.0).tolist()
    [1.0, 1.0, 0.5, 0.0, 0.0]
    """
    is_finite = np.isfinite(norms)
    bounded = np.maximum(np.where(is_finite, norms, clip), clip)
    return np.where(is_finite, clip / bounded, 0.0)
