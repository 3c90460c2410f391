"""Metrics of scores against labels, by the names that the report uses.

Where the labels have known noise, the metrics are estimates of those against the true
labels: of the mean loss, the accuracy and the mean squared error without bias, of the
others without bias in the limit of many rows. They hold for rows whose noise the scores
do not depend on: held-out ones. An estimate that the noise has driven far out of the
range of what it estimates is NaN: so few rows tell nothing.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tp_flower.arrays import BoolArray, FloatArray, in_threads, mean
from tp_flower.learning.label_noise import (
    ClassNoise,
    CorrectedClassLoss,
    CorrectedSquaredLoss,
)
from tp_flower.learning.losses import KMEANS, Loss, cluster_metrics
from tp_flower.learning.softmax import softmax

Area = tuple[float, float]
"""The area under the ROC curve of a class against all others, and its labels' share."""

LEAST_ROWS = 1 << 16
"""With fewer, the areas of several classes are computed one after the other."""

SLACK = 0.05
"""How far beyond its range an estimate may be that counts as the end of the range."""


def evaluate(
    loss: Loss,
    scores: FloatArray,
    labels: FloatArray,
    weights: FloatArray | None = None,
) -> dict[str, float]:
    """Return the loss and its metrics: RMSE and R2, or AUC, accuracy and log loss.

    Of a clustering, which has no labels, it is the distance to the nearest centre.

    Args:
        loss: the loss that was trained; it decides the metrics, and knows of noise.
        scores: h, (N, d_c).
        labels: y, (N,).
        weights: w, (N,), > 0, of the rows in every mean; None: all alike.
    """
    value = loss.value(scores, labels, weights)
    if loss.name == KMEANS:
        return cluster_metrics(value)
    if loss.name == "squared":
        extra = 0.0
        if isinstance(loss, CorrectedSquaredLoss):
            extra = loss.noise.variance
        return {"loss": value, **regression_metrics(value, labels, extra, weights)}
    noise = loss.noise if isinstance(loss, CorrectedClassLoss) else None
    metrics = _class_metrics(scores, labels, noise, weights)
    return {"loss": value, "log_loss": value, **metrics}


def regression_metrics(
    half_mse: float,
    labels: FloatArray,
    noise_variance: float = 0.0,
    weights: FloatArray | None = None,
) -> dict[str, float]:
    """Return RMSE and R2.

    Args:
        half_mse: the mean of 1/2 (h - y)^2, less that of the noise.
        labels: y, (N,), with noise.
        noise_variance: of the noise.
        weights: w, (N,); None: all alike.
    """
    variance = float(_variance(labels, weights))
    return error_metrics(half_mse, variance, noise_variance)


def error_metrics(
    half_mse: float, variance: float, noise_variance: float
) -> dict[str, float]:
    """Return RMSE and R2 of labels with this variance, that of their noise included."""
    variance -= noise_variance
    if noise_variance and not (variance > 0.0 and half_mse > -SLACK * variance):
        return {"rmse": float("nan"), "r2": float("nan")}
    half_mse = max(half_mse, 0.0)
    r2 = 1.0 - 2.0 * half_mse / variance if variance else 0.0
    return {"rmse": float(np.sqrt(2.0 * half_mse)), "r2": r2}


def _variance(labels: FloatArray, weights: FloatArray | None) -> Any:
    if weights is None:
        # as numpy rounds it
        return labels.var()
    return mean((labels - mean(labels, weights)) ** 2, weights)


def _class_metrics(
    scores: FloatArray,
    labels: FloatArray,
    noise: ClassNoise | None,
    weights: FloatArray | None,
) -> dict[str, float]:
    if scores.shape[1] == 1:
        predicted = scores[:, 0] > 0.0
        areas = [_area(scores[:, 0], labels > 0.5, weights)]
    else:
        predicted = scores.argmax(axis=1)
        areas = _class_areas(softmax(scores), labels, weights)
    return class_metrics(float(mean(predicted == labels, weights)), areas, noise)


def class_metrics(
    accuracy: float, areas: Sequence[Area], noise: ClassNoise | None
) -> dict[str, float]:
    """Return the mean area of the classes that have one, and the accuracy.

    Args:
        accuracy: share of the labels that are predicted, noisy as they are.
        areas: of every class.
        noise: on the labels.
    """
    own = [_true_area(*area, noise) for area in areas]
    area = float(np.nanmean(own)) if not np.all(np.isnan(own)) else np.nan
    if noise is not None:
        accuracy = _share(noise.rate_of(accuracy))
    return {"auc": area, "accuracy": accuracy}


def _class_areas(
    rates: FloatArray, labels: FloatArray, weights: FloatArray | None
) -> list[Area]:
    """Return the area of each class against all others, (k,)."""
    classes = rates.shape[1]

    def areas_of(span: slice) -> list[Area]:
        chosen = range(span.start, span.stop)
        return [_area(rates[:, k], labels == k, weights) for k in chosen]

    least = 1 if len(rates) >= LEAST_ROWS else classes
    return [area for part in in_threads(areas_of, classes, least) for area in part]


def _area(scores: FloatArray, positive: BoolArray, weights: FloatArray | None) -> Area:
    return auc(scores, positive, weights), float(mean(positive, weights))


def _share(estimate: float) -> float:
    if not -SLACK <= estimate <= 1.0 + SLACK:
        return float("nan")
    return min(max(estimate, 0.0), 1.0)


def _true_area(area: float, seen: float, noise: ClassNoise | None) -> float:
    """Return the area for true labels; of the noisy ones ``seen`` are positive.

    Noisy positives are a mixture of true positives and negatives, and so are noisy
    negatives. With the true rate r and the noisy one r~ = q + (p - q) r the two differ
    by (p - q) r (1 - r) / (r~ (1 - r~)) of what pure ones would, and so does the area
    from one half (Menon et al. 2015, "Learning from corrupted binary labels", with the
    shares that a symmetric change of classes gives).
    """
    if noise is None or np.isnan(area):
        return area
    rate = noise.rate_of(seen)
    if not 0.0 < rate < 1.0:
        return float("nan")
    share = noise.contrast * rate * (1.0 - rate) / (seen * (1.0 - seen))
    return _share(float(0.5 + (area - 0.5) / share))


def auc(
    scores: FloatArray, positive: BoolArray, weights: FloatArray | None = None
) -> float:
    """Return the area under the ROC curve: P(score of a positive > of a negative).

    Ties count one half, a pair by the product of its rows' weights if given. NaN when
    one class is missing.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True]))
    0.875
    """
    if weights is not None:
        return _weighted_auc(scores, positive, weights)
    high = np.sort(scores[positive])
    low = np.sort(scores[~positive])
    if not len(high) or not len(low):
        return float("nan")
    below = np.searchsorted(low, high, side="left").sum(dtype=np.float64)
    not_above = np.searchsorted(low, high, side="right").sum(dtype=np.float64)
    return float((below + not_above) / (2.0 * len(high) * len(low)))


def _weighted_auc(
    scores: FloatArray, positive: BoolArray, weights: FloatArray
) -> float:
    own, low = weights[positive], scores[~positive]
    if not len(own) or not len(low):
        return float("nan")
    order = np.argsort(low)
    # what the k lowest scores weigh
    total = np.append(0.0, np.cumsum(weights[~positive][order]))
    high = scores[positive]
    below = total[np.searchsorted(low[order], high, side="left")]
    not_above = total[np.searchsorted(low[order], high, side="right")]
    return float(own @ (below + not_above) / (2.0 * own.sum() * total[-1]))
