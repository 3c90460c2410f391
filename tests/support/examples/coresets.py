"""Scores of a table of one shard, and the cost of centres, in one step each."""

from typing import Any

import numpy.typing as npt

from tp_flower.arrays import FloatArray
from tp_flower.learning.solvers import gram
from tp_flower.methods.coreset import importance
from tp_flower.methods.coreset.solvers import nearest


def regression_scores(
    rows: npt.NDArray[Any],
    multiplicity: npt.NDArray[Any],
    *,
    features: int = 0,
    penalty: float = 0.0,
) -> FloatArray:
    """Return the scores (n,) of a table of one shard, some columns penalised."""
    whole = importance.add_penalty(gram(rows, multiplicity), features, penalty)
    return importance.leverages(rows, importance.whitening(whole))


def kmeans_cost(
    points: npt.NDArray[Any],
    centres: FloatArray,
    weights: npt.NDArray[Any] | None = None,
) -> float:
    """Return cost(C), summed over the points."""
    _, distances = nearest(points, centres)
    return float(distances.sum() if weights is None else weights @ distances)
