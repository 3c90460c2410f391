"""The local model of a clustering: squared distances to the centres' own coordinates.

A centre of joined rows is one point per table, side by side, so that the squared
distance of a joined row to it is the sum of the tables' squared distances:

    h_ijk = ||t_ij - c_ik||^2,    ||x_j - c_k||^2 = sum_i h_ijk

Scores that add up over the tables are all that training and prediction need.

Notation:
    T_i  ``features`` (n, d)     C_i  ``centres`` (k, d), one per output
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import blocks
from tp_flower.learning.models.encoded_rows import Features, FloatArray, on_host
from tp_flower.learning.models.local_model import LocalModel

CENTRES = "centres"
"""What a model specification calls it."""


class CentresModel(LocalModel):
    """h_k = ||t - c_k||^2: float64 parameters, centre after centre.

    Args:
        features: d.
        outputs: k, the number of centres.

    >>> model = CentresModel(features=2, outputs=2)
    >>> model.parameters[:] = [0.0, 0.0, 3.0, 4.0]
    >>> model.scores(np.zeros((1, 2), dtype=np.float32)).tolist()
    [[0.0, 25.0]]
    """

    def __init__(self, features: int, outputs: int) -> None:
        self.features, self.outputs = features, outputs
        self.parameters = np.zeros(outputs * features)
        self.penalised = np.zeros(outputs * features, np.bool_)

    @property
    def centres(self) -> FloatArray:
        """The parameters as a matrix (k, d)."""
        return self.parameters.reshape(self.outputs, self.features)

    def scores(self, features: Features) -> FloatArray:
        """Return ||t_j - c_k||^2, (n, k)."""
        return squared_distances(on_host(features), self.centres)

    def pullback(self, features: Features, messages: FloatArray) -> FloatArray:
        """Return sum_j Y_jk dh_jk/dc_k = 2 (c_k sum_j Y_jk - sum_j Y_jk t_j), flat."""
        rows = on_host(features)
        total = np.zeros_like(self.centres)
        for block in blocks(len(rows)):
            total += messages[block].T @ np.asarray(rows[block], np.float64)
        pulled: FloatArray = self.centres * messages.sum(axis=0)[:, None] - total
        return 2.0 * pulled.ravel()


def squared_distances(
    rows: npt.NDArray[np.floating[Any]], centres: FloatArray
) -> FloatArray:
    """Return ||t_j - c_k||^2 of rows (n, d) and centres (k, d), (n, k), float64, >= 0.

    >>> squared_distances(np.array([[1.0], [3.0]]), np.array([[0.0], [4.0]])).tolist()
    [[1.0, 9.0], [9.0, 1.0]]
    """
    norms = (centres**2).sum(axis=1)
    out = np.empty((len(rows), len(centres)))
    for block in blocks(len(rows)):
        own = np.asarray(rows[block], np.float64)
        np.matmul(own, -2.0 * centres.T, out=out[block])
        out[block] += (own**2).sum(axis=1)[:, None] + norms
    return np.maximum(out, 0.0, out=out)
