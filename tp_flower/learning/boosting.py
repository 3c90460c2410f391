"""Boosting over joins: the server's half of a round.

The server takes the derivatives of the loss at the current scores h, the sites grow
trees, and the server takes a step along what these add to the scores:

    G_i = seg_i(w g),  H_i = seg_i(w diag h'')      for every row of table i
    d_i = expand(u_i)                               u_i: what the trees of T_i add
    a   = argmin_{a >= 0} f(h + sum_i a_i d_i),     h += sum_i min(SHRINK a_i, 1) d_i

Each table's trees answer the whole gradient, so that together they overshoot: the steps
correct for it. Of masked scores only the sum d of all d_i is known, and there is one
step for all tables. See :mod:`tp_flower.learning.models.trees`.

Notation:
    h, d_i  (N, d_c)    G_i, H_i, u_i  (n_i, d_c)    a  ``lengths``  (M,)
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from tp_flower.arrays import BLOCK_ROWS, FloatArray, blocks_of, in_threads
from tp_flower.learning.conjugate_gradients import LEAST_ROWS
from tp_flower.losses import Loss

SHRINK: Final = 0.7  # of the steps of least loss, which the training rows flatter
LONGEST: Final = 1.0  # longer steps overfit, where little is left to learn
LEAST_HESSIAN: Final = 1e-12  # A row that is certain still has a curvature


class Boosting:
    """The joint scores of all tables' trees, between two exchanges with the sites.

    Attributes:
        scores: h, (N, d_c), of joined rows with ``labels`` (N,) and ``weights`` (N,) of
            mean 1, None for equal ones; ``start`` at first, (N, d_c) or (d_c,).
    """

    def __init__(
        self,
        loss: Loss,
        labels: FloatArray,
        weights: FloatArray | None,
        start: FloatArray,
    ) -> None:
        self._loss, self._labels, self._weights = loss, labels, weights
        self.scores = np.array(np.broadcast_to(start, (len(labels), start.shape[-1])))

    def derivatives(self) -> tuple[FloatArray, FloatArray]:
        """Return w g and w diag h'', (N, d_c) each."""
        gradient, hessian = np.empty_like(self.scores), np.empty_like(self.scores)

        def fill(span: slice) -> None:
            for block in blocks_of(span, BLOCK_ROWS):
                scores = self.scores[block]
                gradient[block] = self._loss.gradient(scores, self._labels[block])
                hessian[block] = self._loss.hessian(scores)
                if self._weights is not None:
                    gradient[block] *= self._weights[block, None]
                    hessian[block] *= self._weights[block, None]

        in_threads(fill, len(self.scores), LEAST_ROWS)
        return gradient, np.maximum(hessian, LEAST_HESSIAN, out=hessian)

    def lengths(self, directions: Sequence[FloatArray]) -> FloatArray:
        """Return how far to step along each of some directions, (N, d_c)."""
        from scipy.optimize import minimize

        def loss_and_slopes(lengths: FloatArray) -> tuple[float, FloatArray]:
            scores = moved(self.scores, lengths, directions)
            gradient = self._loss.gradient(scores, self._labels)
            if self._weights is not None:
                gradient *= self._weights[:, None]
            slopes = [np.vdot(gradient, direction) for direction in directions]
            value = self._loss.value(scores, self._labels, self._weights)
            return value, np.array(slopes) / len(scores)

        count = len(directions)
        bounds = [(0.0, None)] * count
        best: FloatArray = minimize(
            loss_and_slopes, np.ones(count), jac=True, method="L-BFGS-B", bounds=bounds
        ).x
        return np.minimum(SHRINK * best, LONGEST)


def moved(
    scores: FloatArray, lengths: FloatArray, directions: Sequence[FloatArray]
) -> FloatArray:
    """Return scores after a step along each of some directions, (N, d_c)."""
    after = scores.copy()
    for length, direction in zip(lengths, directions, strict=True):
        after += length * direction
    return after
