"""Comparisons of a report: with a constant, and with labels."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from tp_flower.arrays import FloatArray, mean

MOST_CLASSES: Final = 15  # of a confusion matrix; the rarest are one
OTHERS: Final = "(other)"
TENTHS: Final = 10  # groups of rows
LEAST_GROUP: Final = 10  # rows of which a mean is, at least
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


def means_by_tenth(
    predicted: FloatArray, labels: FloatArray, weights: FloatArray | None = None
) -> list[dict[str, float]]:
    """Return the mean prediction and label of each tenth of the rows, by prediction.

    A group has at least ``LEAST_GROUP`` rows, so that no mean is a row's; of as few
    rows there are fewer groups, or none.
    """
    weights = np.ones(len(labels)) if weights is None else weights
    groups = min(TENTHS, len(labels) // LEAST_GROUP)
    if not groups:
        return []
    return [
        {
            "rows": len(rows),
            "predicted": float(mean(predicted[rows], weights[rows])),
            "actual": float(mean(labels[rows], weights[rows])),
        }
        for rows in np.array_split(np.argsort(predicted, kind="stable"), groups)
    ]


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
