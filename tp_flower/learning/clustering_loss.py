"""The loss of a clustering: the squared distance of a row to its nearest centre.

It is a loss like the others in all but one point: it is no convex function of the
scores, so that nothing is trained by it. It measures what centres are worth.
"""

from dataclasses import dataclass

import numpy as np

from tp_flower.arrays import FloatArray
from tp_flower.learning.losses import Loss

KMEANS = "kmeans"


@dataclass(frozen=True)
class KMeansLoss(Loss):
    """min_k h_k of squared distances h (N, k); it takes no labels.

    >>> KMeansLoss(2).row_values(np.array([[4.0, 1.0]]), np.zeros(1)).tolist()
    [1.0]
    """

    name = KMEANS

    def base_score(
        self,
        labels: FloatArray,  # noqa: ARG002
        weights: FloatArray | None = None,  # noqa: ARG002
    ) -> FloatArray:
        """Return zeros: distances have no offset."""
        return np.zeros(self.outputs)

    def row_values(
        self,
        scores: FloatArray,
        labels: FloatArray,  # noqa: ARG002
    ) -> FloatArray:
        """Return min_k h_k."""
        least: FloatArray = scores.min(axis=1)
        return least

    def gradient(
        self,
        scores: FloatArray,
        labels: FloatArray,  # noqa: ARG002
    ) -> FloatArray:
        """Return 1 at the nearest centre, 0 elsewhere."""
        out = np.zeros_like(scores)
        out[np.arange(len(scores)), scores.argmin(axis=1)] = 1.0
        return out

    def curvature(self, base: FloatArray) -> float:  # noqa: ARG002
        """Return 0: it is linear wherever one centre is the nearest."""
        return 0.0

    @property
    def max_curvature(self) -> float:
        """Return 0."""
        return 0.0

    def _prox_block(
        self,
        centre: FloatArray,
        labels: FloatArray,
        rho: float,
        start: FloatArray,  # noqa: ARG002
    ) -> FloatArray:
        """Return v - e_k / rho at the nearest centre k.

        With centre k as the nearest the minimum is v_k - 1 / (2 rho), at v - e_k / rho;
        it is the least where v_k is.
        """
        return centre - self.gradient(centre, labels) / rho


def cluster_metrics(loss: float) -> dict[str, float]:
    """Return the mean squared distance to the nearest centre, and its root.

    Args:
        loss: that mean.
    """
    return {"loss": loss, "rms_distance": float(np.sqrt(max(loss, 0.0)))}
