"""Means and counts over rows that may have weights.

Without weights they are numpy's own, to the bit.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def mean(values: npt.NDArray[Any], weights: FloatArray | None = None) -> Any:
    """Return the mean of values (N,), weighted by ``weights`` (N,) if given.

    >>> float(mean(np.array([1.0, 4.0]), np.array([2.0, 1.0])))
    2.0
    """
    if weights is None:
        return values.mean()
    return weights @ values / weights.sum()


def effective_rows(weights: FloatArray) -> float:
    """Return (sum w)^2 / sum w^2: so many equal rows have a mean as sure as theirs.

    >>> effective_rows(np.array([1.0, 1.0, 2.0]))
    2.6666666666666665
    """
    return float(weights.sum() ** 2 / (weights @ weights))


def class_counts(
    labels: FloatArray, classes: int, weights: FloatArray | None = None
) -> FloatArray:
    """Return how many of N labels each class has, by weight if given, (classes,)."""
    counts = np.bincount(labels.astype(np.intp), weights, minlength=classes)
    scale = 1.0 if weights is None else len(labels) / weights.sum()
    return counts * scale
