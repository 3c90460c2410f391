"""Metrics of scores against labels, by the names that the report uses."""

import numpy as np

from tp_flower.learning.losses import FloatArray, Loss, softmax


def evaluate(loss: Loss, scores: FloatArray, labels: FloatArray) -> dict[str, float]:
    """Return the loss and its metrics: RMSE and R2, or AUC, accuracy and log loss.

    Args:
        loss: the loss that was trained; its name decides the metrics.
        scores: h, (N, d_c).
        labels: y, (N,).
    """
    value = loss.value(scores, labels)
    if loss.name == "squared":
        return {"loss": value, **regression_metrics(value, labels)}
    return {"loss": value, "log_loss": value, **_class_metrics(scores, labels)}


def regression_metrics(half_mse: float, labels: FloatArray) -> dict[str, float]:
    """Return RMSE and R2 from the mean of 1/2 (h - y)^2."""
    variance = float(labels.var())
    r2 = 1.0 - 2.0 * half_mse / variance if variance else 0.0
    return {"rmse": float(np.sqrt(2.0 * half_mse)), "r2": r2}


def _class_metrics(scores: FloatArray, labels: FloatArray) -> dict[str, float]:
    if scores.shape[1] == 1:
        predicted = scores[:, 0] > 0.0
        area = auc(scores[:, 0], labels > 0.5)
    else:
        predicted = scores.argmax(axis=1)
        rates = softmax(scores)
        classes = range(scores.shape[1])
        areas = [auc(rates[:, k], labels == k) for k in classes]
        area = float(np.nanmean(areas)) if not np.all(np.isnan(areas)) else np.nan
    return {"auc": area, "accuracy": float((predicted == labels).mean())}


def auc(
    scores: FloatArray, positive: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> float:
    """Return the area under the ROC curve: P(score of a positive > of a negative).

    Ties count one half. NaN when one class is missing.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True]))
    0.875
    """
    high = np.sort(scores[positive])
    low = np.sort(scores[~positive])
    if not len(high) or not len(low):
        return float("nan")
    below = np.searchsorted(low, high, side="left").sum(dtype=np.float64)
    not_above = np.searchsorted(low, high, side="right").sum(dtype=np.float64)
    return float((below + not_above) / (2.0 * len(high) * len(low)))
