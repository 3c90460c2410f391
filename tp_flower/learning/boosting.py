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
from tp_flower.objectives import Objective

SHRINK: Final = 0.7  # of the steps of least loss, which the training rows flatter
LONGEST: Final = 1.0  # longer steps overfit, where little is left to learn
LEAST_HESSIAN: Final = 1e-12  # A row that is certain still has a curvature


class Boosting:
    """The joint scores of all tables' trees, between two exchanges with the sites.

    Attributes:
        scores: h, (N, d_c), of the objective's joined rows; ``start`` at first,
            (N, d_c) or (d_c,).
    """

    def __init__(self, objective: Objective, start: FloatArray) -> None:
        self._objective = objective
        shape = len(objective), start.shape[-1]
        self.scores = np.array(np.broadcast_to(start, shape))

    def derivatives(self) -> tuple[FloatArray, FloatArray]:
        """Return w g and w diag h'', (N, d_c) each."""
        gradient, hessian = np.empty_like(self.scores), np.empty_like(self.scores)

        def fill(span: slice) -> None:
            for block in blocks_of(span, BLOCK_ROWS):
                part, scores = self._objective.select(block), self.scores[block]
                gradient[block] = part.weigh(part.gradient(scores))
                hessian[block] = part.weigh(part.hessian(scores))

        in_threads(fill, len(self.scores), LEAST_ROWS)
        return gradient, np.maximum(hessian, LEAST_HESSIAN, out=hessian)

    def lengths(self, directions: Sequence[FloatArray]) -> FloatArray:
        """Return how far to step along each of some directions, (N, d_c)."""
        from scipy.optimize import minimize

        def loss_and_slopes(lengths: FloatArray) -> tuple[float, FloatArray]:
            scores = moved(self.scores, lengths, directions)
            gradient = self._objective.weigh(self._objective.gradient(scores))
            slopes = [np.vdot(gradient, direction) for direction in directions]
            return self._objective.value(scores), np.array(slopes) / len(scores)

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
