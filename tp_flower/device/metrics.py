"""Metrics on a device: what is counted there; what follows from it is numpy's code.

The area under the ROC curve sorts all scores once per class, which at millions of rows
is the longest part of the server's epoch on a CPU.
"""

import torch
from torch import Tensor

from tp_flower.device.losses import DeviceLoss
from tp_flower.learning.corrected import CorrectedClassLoss, CorrectedSquaredLoss
from tp_flower.learning.losses import Loss
from tp_flower.learning.metrics import class_metrics, error_metrics


def evaluate(
    loss: Loss,
    own: DeviceLoss,
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
) -> dict[str, float]:
    """Return what :func:`tp_flower.learning.metrics.evaluate` does.

    Args:
        loss: the loss that was trained.
        own: the same on the device.
        scores: h, (N, d_c).
        labels: y, (N,).
        weights: w, (N,), > 0; None: all alike.
    """
    value = float(_mean(own.row_values(scores, labels), weights))
    if loss.name == "squared":
        extra = loss.noise.variance if isinstance(loss, CorrectedSquaredLoss) else 0.0
        distance = (labels - _mean(labels, weights)).square()
        variance = float(_mean(distance, weights))
        return {"loss": value, **error_metrics(value, variance, extra)}
    if scores.shape[1] == 1:
        predicted = (scores[:, 0] > 0.0).double()
        pairs = [(scores[:, 0], labels > 0.5)]
    else:
        predicted = scores.argmax(dim=1).double()
        rates = scores.softmax(dim=1)
        pairs = [(rates[:, k], labels == k) for k in range(scores.shape[1])]
    areas = [
        (_auc(own_scores, positive, weights), float(_mean(positive.double(), weights)))
        for own_scores, positive in pairs
    ]
    accuracy = float(_mean((predicted == labels).double(), weights))
    noise = loss.noise if isinstance(loss, CorrectedClassLoss) else None
    return {"loss": value, "log_loss": value, **class_metrics(accuracy, areas, noise)}


def _mean(values: Tensor, weights: Tensor | None) -> Tensor:
    return values.mean() if weights is None else weights @ values / weights.sum()


def _auc(scores: Tensor, positive: Tensor, weights: Tensor | None) -> float:
    """Return the area under the ROC curve; ties count one half."""
    high, (low, order) = scores[positive], scores[~positive].sort()
    if not len(high) or not len(low):
        return float("nan")
    own = torch.ones_like(high) if weights is None else weights[positive]
    # what weighs below the k-th lowest score
    total = torch.arange(len(low) + 1, dtype=high.dtype, device=high.device)
    if weights is not None:
        total[1:] = weights[~positive][order].cumsum(dim=0)
    # sorted queries are near each other in memory
    high, order = high.sort()
    below = total[torch.searchsorted(low, high)]
    not_above = total[torch.searchsorted(low, high, side="right")]
    area = own[order] @ (below + not_above)
    return float(area / (2.0 * own.sum() * total[-1]))
