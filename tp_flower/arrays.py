"""Arrays of numbers: blocks of rows, and means and counts with weights.

Without weights, means and counts are numpy's own, to the bit.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK_ROWS = 16384

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


def blocks(rows: int, size: int = BLOCK_ROWS) -> Iterator[slice]:
    """Yield the slices that cover ``rows`` rows in blocks.

    >>> [(b.start, b.stop) for b in blocks(5, 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
