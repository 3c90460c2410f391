"""Comparisons of a report: with a constant, and with labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tp_flower.arrays import AnyArray, FloatArray, effective_rows, mean

MOST_CLASSES: Final = 15  # of a confusion matrix; the rarest are one
OTHERS: Final = "(other)"
TENTHS: Final = 10  # groups of rows
LEAST_GROUP: Final = 10  # rows of which a mean is, at least
STEPS_OF_TENTH: Final = 5  # of a curve, at most
CONFIDENCE: Final = 0.95
MOST_STEPS: Final = 50  # of Newton's
EXACT: Final = 1e-9
WORST_CONDITION: Final = 1e12


def no_better(
    name: str, model: Mapping[str, float], constant: Mapping[str, float], rows: str
) -> str:
    """Return a warning if a model's metric is no better than a constant's, or "".

    The metric is one that falls with a better model.

    >>> no_better("rmse", {"rmse": 2.0}, {"rmse": 1.5}, "new rows")
    'on new rows the model is no better than a constant: rmse 2 against 1.5'
    """
    value = model.get(name, -np.inf)
    limit = constant.get(name, np.inf)
    comparison = (
        f"the model is no better than a constant: {name} {value:.4g} against "
        f"{limit:.4g}"
    )
    if value >= limit:
        return f"on {rows} {comparison}"
    return ""


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


@dataclass(frozen=True)
class RankedRows:
    """Rows by rising prediction, (N,) each; rows of equal predictions are alike."""

    predicted: FloatArray
    labels: FloatArray
    weights: FloatArray

    @classmethod
    def of(
        cls,
        predicted: FloatArray,
        labels: FloatArray,
        weights: FloatArray | None = None,
    ) -> "RankedRows":
        """Put rows in order, and give those of equal predictions their means."""
        weights = np.ones(len(labels)) if weights is None else weights
        order = np.argsort(predicted)
        predicted, labels, weights = predicted[order], labels[order], weights[order]
        is_first = np.append(True, predicted[1:] > predicted[:-1])[: len(labels)]
        starts = np.flatnonzero(is_first)
        if 0 < len(starts) < len(labels):
            run = np.cumsum(is_first) - 1
            sums = np.add.reduceat(weights, starts)
            labels = (np.add.reduceat(weights * labels, starts) / sums)[run]
            weights = (sums / np.bincount(run))[run]
        return cls(predicted, labels, weights)

    def means(self, rows: slice) -> dict[str, float]:
        """Return how many some rows are, and their mean prediction and label."""
        weights = self.weights[rows]
        return {
            "rows": rows.stop - rows.start,
            "predicted": float(mean(self.predicted[rows], weights)),
            "actual": float(mean(self.labels[rows], weights)),
        }

    @property
    def tenths(self) -> list[slice]:
        """The positions of each tenth, or larger part, of the rows."""
        rows = len(self.labels)
        return _divide(slice(0, rows), min(TENTHS, rows // LEAST_GROUP))


def _divide(rows: slice, parts: int) -> list[slice]:
    """Return so many spans of some rows, of sizes that differ by one at most."""
    sizes = np.arange(parts) < (rows.stop - rows.start) % max(parts, 1)
    sizes = sizes + (rows.stop - rows.start) // max(parts, 1)
    ends = (rows.start + np.cumsum(sizes)).tolist()
    return [
        slice(end - size, end) for end, size in zip(ends, sizes.tolist(), strict=True)
    ]


def means_by_tenth(ranked: RankedRows) -> list[dict[str, float]]:
    """Return the mean prediction and label of each tenth of the rows, by prediction.

    A group has at least ``LEAST_GROUP`` rows, so that no mean is a row's; of as few
    rows there are fewer groups, or none. Rows of equal predictions count alike,
    whatever their order.
    """
    return [ranked.means(rows) for rows in ranked.tenths]


def shares_by_tenth(ranked: RankedRows) -> list[dict[str, float]]:
    """Return :func:`means_by_tenth` of labels 0 or 1, each with an interval of 95 %.

    ``low`` and ``high`` are Wilson's, of rows that are independent; weighted rows are
    as many as their effective sample size (Kish).
    """
    groups = means_by_tenth(ranked)
    sizes = np.array([effective_rows(ranked.weights[rows]) for rows in ranked.tenths])
    events = sizes * [group["actual"] for group in groups]
    ends = zip(*(end.tolist() for end in wilson_interval(events, sizes)), strict=True)
    return [
        {**group, "low": low, "high": high}
        for group, (low, high) in zip(groups, ends, strict=True)
    ]


def wilson_interval(events: AnyArray, rows: AnyArray) -> tuple[FloatArray, FloatArray]:
    """Return the interval of 95 % of probabilities: ``events`` in some rows; NaN of 0.

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical
    Inference".

    >>> low, high = wilson_interval(np.array([15.0]), np.array([40.0]))
    >>> low.round(3).tolist(), high.round(3).tolist()
    ([0.242], [0.53])
    """
    from scipy.special import ndtri

    square = ndtri(0.5 + 0.5 * CONFIDENCE) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = events * (rows - events) / rows
        centre = (events + square / 2.0) / (rows + square)
        reach = np.sqrt(square * (variance + square / 4.0)) / (rows + square)
    return np.maximum(centre - reach, 0.0), centre + reach


def threshold_curve(ranked: RankedRows) -> list[dict[str, float]]:
    """Return what is found if only the rows above a threshold are taken.

    Labels are 0 or 1. An entry for each of at most 50 thresholds, the highest first:
    ``rows`` are taken, a ``share`` of all; ``recall`` is the share of the rows of label
    1 that are among them, ``false_alarms`` that of label 0, and ``precision`` the share
    of label 1 among them. ``probability`` is the mean of the rows that are taken since
    the threshold before. Shares are by weight.

    These are the points of the ROC curve, of precision and recall, and of cumulative
    gains. They divide each tenth of :func:`shares_by_tenth`, and at least
    ``LEAST_GROUP`` rows are between two of them, so that no step is a row's label.
    Where a threshold would part rows of equal probabilities, it takes a part of all of
    them: the point is on the line between those before and after them. It is [] if one
    label is missing.
    """
    steps = [
        rows
        for tenth in ranked.tenths
        for rows in _divide(tenth, _steps_in(tenth.stop - tenth.start))
    ][::-1]
    if not steps or not ranked.labels.max() > 0.0 or not ranked.labels.min() < 1.0:
        return []
    of_one = ranked.weights * ranked.labels
    hits = np.cumsum([of_one[rows].sum() for rows in steps])
    taken = np.cumsum([ranked.weights[rows].sum() for rows in steps])
    columns = {
        "rows": np.cumsum([rows.stop - rows.start for rows in steps]),
        "probability": np.array([ranked.means(rows)["predicted"] for rows in steps]),
        "share": taken / taken[-1],
        "recall": hits / hits[-1],
        "false_alarms": (taken - hits) / (taken[-1] - hits[-1]),
        "precision": hits / taken,
    }
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


def _steps_in(rows: int) -> int:
    """Return into how many steps a tenth of so many rows is divided."""
    return min(STEPS_OF_TENTH, rows // LEAST_GROUP)


def calibration(
    scores: FloatArray, labels: FloatArray, weights: FloatArray | None = None
) -> dict[str, float]:
    """Return the slope and the intercept of a logistic regression of labels on scores.

    Labels are 0 or 1. Of probabilities that hold on other rows the slope is 1, and less
    where they are too sure; the intercept is 0 then (Cox 1958, "Two further
    applications of a model for binary regression"). It is {} where no line fits, as of
    rows of one class, or of scores that tell all labels.

    >>> calibration(np.array([0.0, 0.0, 1.0]), np.ones(3))
    {}
    """
    weights = np.ones(len(labels)) if weights is None else weights
    design = np.column_stack([scores, np.ones(len(scores))])
    line = np.array([1.0, 0.0])
    for _ in range(MOST_STEPS):
        rates = 0.5 * (1.0 + np.tanh(0.5 * (design @ line)))
        slope = design.T @ (weights * (labels - rates))
        bend = (design.T * (weights * rates * (1.0 - rates))) @ design
        if np.linalg.cond(bend) > WORST_CONDITION:
            return {}
        step = np.linalg.solve(bend, slope)
        line += step
        if np.abs(step).max() < EXACT:
            return {"slope": float(line[0]), "intercept": float(line[1])}
    return {}
