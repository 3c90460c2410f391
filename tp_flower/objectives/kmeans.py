"""The distance to the nearest of several centres, by which a clustering is measured.

    loss(h) = min_k h_k

of squared distances h (N, k). It takes no labels, and nothing is trained by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from tp_flower.arrays import FloatArray
from tp_flower.objectives.objective import Objective
from tp_flower.objectives.response import NEAREST, Response

KMEANS: Final = "kmeans"
DISTANCE: Final = "distance"


@dataclass(frozen=True)
class ClusterResponse(Response):
    """A cluster: the nearest of some centres, by squared distances as scores."""

    headline: ClassVar[str] = "rms_distance"

    def predict(self, scores: FloatArray) -> FloatArray:
        """Return the indices of the nearest centres."""
        nearest: FloatArray = scores.argmin(axis=1).astype(np.float64)
        return nearest

    def details(self, scores: FloatArray) -> Mapping[str, FloatArray]:
        """Return the distance to the nearest centre."""
        # noise on the scores can make one negative
        return {DISTANCE: np.sqrt(np.maximum(scores.min(axis=1), 0.0))}

    def compare(self, *_: FloatArray | None) -> dict[str, object]:
        """Return {}: there are no labels."""
        return {}


class KMeans(Objective):
    """min_k h_k of squared distances h (N, k); it takes no labels.

    >>> from tp_flower.objectives import Target
    >>> two = KMeans(Target.without_label(1, ("0", "1")))
    >>> two.row_values(np.array([[4.0, 1.0]])).tolist()
    [1.0]
    """

    name = KMEANS
    class_counts = range(1, 1 << 31)
    takes_label = False

    @classmethod
    def make_response(cls, classes: tuple[str, ...], _kind: str) -> ClusterResponse:
        """Return the number of the nearest centre, which a file has as a text."""
        return ClusterResponse(cls.name, len(classes), classes, "text", link=NEAREST)

    def base_scores(self) -> FloatArray:
        """Return zeros: distances have no offset."""
        return np.zeros(self.outputs)

    def row_values(self, scores: FloatArray) -> FloatArray:
        """Return min_k h_k."""
        least: FloatArray = scores.min(axis=1)
        return least

    def measure(self, _scores: FloatArray, value: float) -> dict[str, float]:
        """Return the root of the mean squared distance."""
        return {"rms_distance": float(np.sqrt(max(value, 0.0)))}

    def score_unit(self, columns: int) -> float:
        """Return the squared length of a row of standardised columns."""
        return float(max(columns, 1))
