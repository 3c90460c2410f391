"""Metrics of scores against labels, by the names that the report uses.

Where the labels have noise of a known size, the metrics are estimates of those against
the true labels: of the mean loss, the accuracy and the mean squared error without bias,
of the others without bias in the limit of many rows. They hold for rows whose noise the
scores do not depend on: held-out ones. An estimate that the noise has driven far out of
the range of what it estimates is NaN: so few rows tell nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tp_flower.arrays import BoolArray, FloatArray, in_threads, mean
from tp_flower.learning import label_noise
from tp_flower.losses import KMeansLoss, Loss, SquaredLoss, softmax

MOST_CLASSES, OTHERS = 15, "(other)"  # of a confusion matrix; the rarest are one
TENTHS, LEAST_GROUP = 10, 10  # groups of rows, and how many rows a mean is of at least
# p, (N,): numbers, or the index of a class; None without any
Predictions = FloatArray | None
Weights = FloatArray | None  # w, (N,), > 0, of the rows in every mean; None: all alike
LEAST_ROWS = 1 << 16  # with fewer, one class is computed after the other
SLACK = 0.05  # how far beyond its range an estimate counts as the end
NAN = float("nan")


def evaluate(
    loss: Loss, scores: FloatArray, labels: FloatArray, weights: Weights = None
) -> dict[str, float]:
    """Return the loss and its metrics: RMSE, MAE and R2, or AUC, accuracy and log loss.

    Of a clustering, which has no labels, it is the distance to the nearest centre.
    Noisy labels have no MAE: its estimate would need the distribution of the errors.
    """
    value = loss.value(scores, labels, weights)
    if isinstance(loss, KMeansLoss):
        return {"loss": value, "rms_distance": float(np.sqrt(max(value, 0.0)))}
    if loss.is_regression:
        noise_of = (
            loss.noise if isinstance(loss, label_noise.CorrectedSquaredLoss) else None
        )
        half_mse = value
        if type(loss) not in (SquaredLoss, label_noise.CorrectedSquaredLoss):
            half_mse = SquaredLoss().value(scores, labels, weights)
        metrics = _regression_metrics(half_mse, labels, noise_of, weights)
        if noise_of is None:
            metrics["mae"] = float(mean(np.abs(scores[:, 0] - labels), weights))
        return {"loss": value, **metrics}
    noise = loss.noise if isinstance(loss, label_noise.CorrectedClassLoss) else None
    metrics = _class_metrics(scores, labels, noise, weights)
    return {"loss": value, "log_loss": value, **metrics}


def _regression_metrics(
    half_mse: float,
    labels: FloatArray,
    noise: label_noise.NumberNoise | None,
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


def _class_metrics(
    scores: FloatArray,
    labels: FloatArray,
    noise: label_noise.ClassNoise | None,
    weights: Weights,
) -> dict[str, float]:
    """Return the accuracy, and the mean AUC of the classes against all others."""
    rates, classes = scores, [1]
    if scores.shape[1] > 1:
        rates, classes = softmax(scores), list(range(scores.shape[1]))

    def areas_of(span: slice) -> list[float]:
        areas = []
        for column in range(span.start, span.stop):
            positive = labels == classes[column]
            area = auc(rates[:, column], positive, weights)
            areas.append(_true_area(area, float(mean(positive, weights)), noise))
        return areas

    least = 1 if len(rates) >= LEAST_ROWS else len(classes)
    areas = [
        area for part in in_threads(areas_of, len(classes), least) for area in part
    ]
    accuracy = float(mean(predict(scores) == labels, weights))
    if noise is not None:
        accuracy = _share(noise.rate_of(accuracy))
    area = float(np.nanmean(areas)) if not np.all(np.isnan(areas)) else NAN
    return {"auc": area, "accuracy": accuracy}


def predict(scores: FloatArray, *, is_regression: bool = False) -> FloatArray:
    """Return the numbers, or the likeliest classes, (N,), of scores (N, d_c).

    The result is a new array.
    """
    if is_regression:
        return scores[:, 0].copy()
    best = scores[:, 0] > 0.0 if scores.shape[1] == 1 else scores.argmax(axis=1)
    return best.astype(np.float64)


def constant_metrics(
    loss: Loss, base: FloatArray, labels: FloatArray, weights: Weights = None
) -> dict[str, float]:
    """Return the metrics of a constant score b (d_c,); {} without labels."""
    if isinstance(loss, KMeansLoss) or not len(labels):
        return {}
    return evaluate(
        loss, np.broadcast_to(base, (len(labels), len(base))), labels, weights
    )


def no_better(
    model: Mapping[str, float], constant: Mapping[str, float], rows: str
) -> str:
    """Return a warning if a model's metrics are no better than a constant's, or "".

    >>> no_better({"rmse": 2.0}, {"rmse": 1.5}, "new rows")
    'on new rows the model is no better than a constant: rmse 2 against 1.5'
    """
    name = "rmse" if "rmse" in model else "log_loss"
    value, limit = model.get(name, -np.inf), constant.get(name, np.inf)
    comparison = (
        f"the model is no better than a constant: {name} {value:.4g} against "
        f"{limit:.4g}"
    )
    return f"on {rows} {comparison}" if value >= limit else ""


def compare(
    classes: Sequence[str],
    predicted: Predictions,
    labels: FloatArray,
    weights: Weights = None,
) -> dict[str, object]:
    """Return the report's entry: `confusion` of classes, else `deciles`.

    Without rows it is {}.
    """
    if predicted is None or not len(labels):
        return {}
    if classes:
        return {"confusion": confusion(classes, predicted, labels)}
    return {"deciles": means_by_tenth(predicted, labels, weights)}


def confusion(
    classes: Sequence[str], predicted: FloatArray, labels: FloatArray
) -> dict[str, dict[str, int]]:
    """Return, by class, how many of its rows are predicted as each class.

    Rows count alike, whatever their weights.
    """
    counts = np.bincount(labels.astype(np.intp), minlength=len(classes))
    frequent = set(np.argsort(-counts, kind="stable")[:MOST_CLASSES].tolist())
    names = [name if k in frequent else OTHERS for k, name in enumerate(classes)]
    listed = sorted(dict.fromkeys(names), key=OTHERS.__eq__)
    table = {name: dict.fromkeys(listed, 0) for name in listed}
    pairs, rows = np.unique(len(classes) * labels + predicted, return_counts=True)
    for pair, count in zip(pairs.astype(int).tolist(), rows.tolist(), strict=True):
        actual, guess = divmod(pair, len(classes))
        table[names[actual]][names[guess]] += count
    return table


def means_by_tenth(
    predicted: FloatArray, labels: FloatArray, weights: Weights = None
) -> list[dict[str, float]]:
    """Return the mean prediction and label of each tenth of the rows, by prediction.

    A group has at least ``LEAST_GROUP`` rows, so that no mean is a row's; of as few
    rows there are fewer groups, or none.
    """
    weights = np.ones(len(labels)) if weights is None else weights
    groups = min(TENTHS, len(labels) // LEAST_GROUP)
    return [
        {
            "rows": len(rows),
            "predicted": float(mean(predicted[rows], weights[rows])),
            "actual": float(mean(labels[rows], weights[rows])),
        }
        for rows in (
            np.array_split(np.argsort(predicted, kind="stable"), groups)
            if groups
            else ()
        )
    ]


def _share(estimate: float) -> float:
    return min(max(estimate, 0.0), 1.0) if -SLACK <= estimate <= 1.0 + SLACK else NAN


def _true_area(area: float, seen: float, noise: label_noise.ClassNoise | None) -> float:
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
        return NAN
    share = noise.contrast * rate * (1.0 - rate) / (seen * (1.0 - seen))
    return _share(float(0.5 + (area - 0.5) / share))


def auc(scores: FloatArray, positive: BoolArray, weights: Weights = None) -> float:
    """Return the area under the ROC curve: P(score of a positive > of a negative).

    Ties count one half, a pair by the product of its rows' weights if given. NaN when
    one class is missing.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True]))
    0.875
    """
    high, low = scores[positive], scores[~positive]
    if not len(high) or not len(low):
        return NAN
    if weights is None:
        high, low = np.sort(high), np.sort(low)
        below = np.searchsorted(low, high, side="left")
        ties = high[low[np.minimum(below, len(low) - 1)] == high]
        # few rows tie, if any
        equal = np.searchsorted(low, ties, side="right").sum(dtype=np.float64)
        equal -= np.searchsorted(low, ties, side="left").sum(dtype=np.float64)
        return float(
            (below.sum(dtype=np.float64) + 0.5 * equal) / (len(high) * len(low))
        )
    order = np.argsort(low)
    low, of_high = low[order], weights[positive]
    # the weight of the k lowest scores
    total = np.append(0.0, np.cumsum(weights[~positive][order]))
    sums = total[np.searchsorted(low, high, side="left")]
    sums += total[np.searchsorted(low, high, side="right")]
    return float(of_high @ sums / (2.0 * of_high.sum() * total[-1]))


@dataclass(frozen=True)
class Contribution:
    """The mean of h_i, (d_c,), and its share of the tables' variances."""

    mean_score: FloatArray
    share: float


def contributions(
    sums: Mapping[str, FloatArray], joined_rows: int
) -> dict[str, Contribution]:
    """Return each table's share of the tables' variances, from its sums (2, d_c).

        share_i = var(h_i) / sum_k var(h_k)

    over the joined training rows, weighted as they are; of several outputs variances
    are summed. What two tables tell alike counts for both. h_i are a table's scores on
    the joined rows, 0 where a LEFT JOIN has no row. The sites send sum G h_i and sum G
    h_i^2 over their rows, with the noise of private runs: nobody sees the scores of one
    table for it.

    >>> sums = {"a": np.array([[6.0], [18.0]]), "b": np.array([[6.0], [10.0]])}
    >>> shares = contributions(sums, joined_rows=4)
    >>> [(t, each.mean_score.tolist(), each.share) for t, each in shares.items()]
    [('a', [1.5], 0.9), ('b', [1.5], 0.1)]
    """
    means = {table: total / joined_rows for table, total in sums.items()}
    variances = {
        # rounding may make it negative
        table: max(float((square - mean**2).sum()), 0.0)
        for table, (mean, square) in means.items()
    }
    whole = sum(variances.values())
    return {
        table: Contribution(mean, variances[table] / whole if whole else 0.0)
        for table, (mean, _) in means.items()
    }
