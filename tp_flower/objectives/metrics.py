"""Metrics of scores against labels, by the names that the report uses.

Where the labels have noise of a known size, the metrics are estimates of those against
the true labels: of the mean loss, the accuracy and the mean squared error without bias,
of the others without bias in the limit of many rows. They hold for rows whose noise the
scores do not depend on: held-out ones. An estimate that the noise has driven far out of
the range of what it estimates is NaN: so few rows tell nothing.
"""

from collections.abc import Sequence

import numpy as np

from tp_flower.arrays import BoolArray, FloatArray, blocks, mean, run_in_threads
from tp_flower.objectives.noise import ClassNoise, NumberNoise
from tp_flower.objectives.objective import Objective

Weights = FloatArray | None  # w, (N,), > 0, of the rows in every mean; None: all alike
LEAST_ROWS = 1 << 16  # with fewer, one class is computed after the other
SLACK = 0.05  # how far beyond its range an estimate counts as the end
NAN = float("nan")


def number_metrics(
    half_mse: float,
    labels: FloatArray,
    noise: NumberNoise | None,
    weights: Weights,
) -> dict[str, float]:
    """Return RMSE and R2 against the true labels, from the mean of 1/2 (h - y)^2."""
    noise_variance = noise.variance if noise else 0.0
    variance = (
        float(mean((labels - mean(labels, weights)) ** 2, weights)) - noise_variance
    )
    if noise_variance and not (variance > 0.0 and half_mse > -SLACK * variance):
        return {"rmse": NAN, "r2": NAN}
    half_mse = max(half_mse, 0.0)
    r2 = 1.0 - 2.0 * half_mse / variance if variance else 0.0
    return {"rmse": float(np.sqrt(2.0 * half_mse)), "r2": r2}


def class_metrics(
    objective: Objective,
    scores: FloatArray,
    rates: FloatArray,
    classes: Sequence[int],
) -> dict[str, float]:
    """Return the accuracy, and the mean AUC of some classes against all others.

    The ``rates`` (N, classes) rise with the probabilities of these classes.
    """
    labels = objective.target.stored[:, 0]
    weights = objective.weights
    noise = None
    if isinstance(objective.noise, ClassNoise):
        noise = objective.noise

    def areas_of(span: slice) -> list[float]:
        areas = []
        for column in range(span.start, span.stop):
            positive = labels == classes[column]
            area = auc(rates[:, column], positive, weights)
            areas.append(_true_area(area, float(mean(positive, weights)), noise))
        return areas

    least = 1 if len(rates) >= LEAST_ROWS else len(classes)
    areas = [
        area for part in run_in_threads(areas_of, len(classes), least) for area in part
    ]
    is_right = np.empty(len(labels), np.bool_)
    for block in blocks(len(labels)):
        is_right[block] = objective.response.predict(scores[block]) == labels[block]
    accuracy = float(mean(is_right, weights))
    if noise is not None:
        accuracy = _share(noise.rate_of(accuracy))
    area = NAN
    if not np.all(np.isnan(areas)):
        area = float(np.nanmean(areas))
    return {"auc": area, "accuracy": accuracy}


def _share(estimate: float) -> float:
    if -SLACK <= estimate <= 1.0 + SLACK:
        return min(max(estimate, 0.0), 1.0)
    return NAN


def _true_area(area: float, noisy_rate: float, noise: ClassNoise | None) -> float:
    """Return the area for true labels; the noisy labels have ``noisy_rate``.

    Noisy positives are a mixture of true positives and negatives, and so are noisy
    negatives. With the true rate r and the noisy one r~ = q + (p - q) r the two differ
    by (p - q) r (1 - r) / (r~ (1 - r~)) of what pure ones would, and so does the area
    from one half (Menon et al. 2015, "Learning from corrupted binary labels", with the
    shares that a symmetric change of classes gives).
    """
    if noise is None or np.isnan(area):
        return area
    true_rate = noise.rate_of(noisy_rate)
    if not 0.0 < true_rate < 1.0:
        return NAN
    share = (
        noise.contrast
        * true_rate
        * (1.0 - true_rate)
        / (noisy_rate * (1.0 - noisy_rate))
    )
    return _share(float(0.5 + (area - 0.5) / share))


def _pairs_in_order(low: FloatArray, high: FloatArray) -> float:
    """Return how many pairs of sorted scores are in order; a tie is half of one."""
    below = np.searchsorted(low, high, side="left")
    ties = high[low[np.minimum(below, len(low) - 1)] == high]
    # few rows tie, if any
    equal = np.searchsorted(low, ties, side="right").sum(dtype=np.float64)
    equal -= np.searchsorted(low, ties, side="left").sum(dtype=np.float64)
    return float(below.sum(dtype=np.float64) + 0.5 * equal)


def auc(scores: FloatArray, positive: BoolArray, weights: Weights = None) -> float:
    """Return the area under the ROC curve: P(score of a positive > of a negative).

    Ties count one half, a pair by the product of its rows' weights if given. NaN when
    one class is missing.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True]))
    0.875
    """
    high = scores[positive]
    low = scores[~positive]
    if not len(high) or not len(low):
        return NAN
    if weights is None:
        # both are copies
        high.sort()
        low.sort()
        pairs = sum(_pairs_in_order(low, high[block]) for block in blocks(len(high)))
        return pairs / (len(high) * len(low))
    order = np.argsort(low)
    low = low[order]
    high_weights = weights[positive]
    # the weight of the k lowest scores
    total = np.append(0.0, np.cumsum(weights[~positive][order]))
    sums = total[np.searchsorted(low, high, side="left")]
    sums += total[np.searchsorted(low, high, side="right")]
    return float(high_weights @ sums / (2.0 * high_weights.sum() * total[-1]))
