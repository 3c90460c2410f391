"""Answers: from the scores of joined rows to predictions.

Notation:
    N  joined rows     w  scores of a row
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from tp_flower.export.runner.rows import Array, Json

LARGEST_SCORE: Final = 300.0
"""Of an exponential: no larger one is finite in all that follows."""


def predictions(about: Json, rows: Array, scores: Array) -> dict[str, Array]:
    """Return the columns of predictions, (N,) each.

    Args:
        about: `model.json`.
        rows: (N,), ascending: the row of the label's table behind each joined row.
        scores: (N, w), with base score and offset.
    """
    is_first = np.append(True, rows[1:] != rows[:-1])[: len(rows)]
    first = np.flatnonzero(is_first)
    sizes = np.diff(np.append(first, len(rows)))
    columns = {
        "row": rows,
        "occurrence": np.arange(len(rows)) - np.repeat(first, sizes),
    }
    for output in range(scores.shape[1]):
        suffix = f".{about['classes'][output]}" if scores.shape[1] > 1 else ""
        columns[f"score{suffix}"] = scores[:, output]
    return columns | LINKS[about["link"]](about, scores)


def _identity(_about: Json, scores: Array) -> dict[str, Array]:
    return {"prediction": scores[:, 0]}


def _exponential(_about: Json, scores: Array) -> dict[str, Array]:
    return {"prediction": _power(scores[:, 0])}


def _power(scores: Array) -> Array:
    power: Array = np.exp(np.clip(scores, -LARGEST_SCORE, LARGEST_SCORE))
    return power


def _classes(about: Json, scores: Array) -> dict[str, Array]:
    """Return the likeliest class, in the label's type, and the probability of each."""
    if scores.shape[1] == 1:
        both = np.column_stack([-scores[:, 0], scores[:, 0]])
        shares = 0.5 * (np.tanh(0.5 * both) + 1.0)
        best = (scores[:, 0] > 0.0).astype(np.int64)
    else:
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares = powers / powers.sum(axis=1, keepdims=True)
        best = scores.argmax(axis=1)
    named = enumerate(about["classes"])
    columns = {"prediction": np.array(about["class-values"])[best]}
    return columns | {f"probability.{name}": shares[:, k] for k, name in named}


def _hazard(about: Json, scores: Array) -> dict[str, Array]:
    """Return the logarithm of the hazard ratio, the ratio, and survival at times."""
    logarithm = scores[:, 0]
    columns = {"prediction": logarithm, "hazard_ratio": _power(logarithm)}
    for time, hazard in about["survival"]:
        with np.errstate(over="ignore"):
            columns[f"survival.{time:g}"] = np.exp(-hazard * np.exp(logarithm))
    return columns


def _nearest(about: Json, scores: Array) -> dict[str, Array]:
    """Return the nearest centre, and the distance to it."""
    return {
        "prediction": np.array(about["class-values"])[scores.argmin(axis=1)],
        "distance": np.sqrt(np.maximum(scores.min(axis=1), 0.0)),
    }


LINKS: Final[Mapping[str, Callable[[Json, Array], dict[str, Array]]]] = {
    "identity": _identity,
    "exponential": _exponential,
    "classes": _classes,
    "hazard": _hazard,
    "nearest": _nearest,
}
"""Each returns `prediction`, and what it comes with, of scores (N, w)."""
