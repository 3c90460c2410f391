"""Boosting over joins: the server's half of a round.

The server takes the derivatives of the loss at the current scores h, the sites grow
trees, and the server takes a step along what these add to the scores:

    G_i = seg_i(w g),  H_i = seg_i(w diag h'')      for every row of table i
    d_i = expand(u_i)                               u_i: what the trees of T_i add
    a   = argmin_{a >= 0} f(h + sum_i a_i d_i),     h += sum_i min(SHRINK a_i, 1) d_i

Each table's trees answer the whole gradient, so that together they overshoot: the steps
correct for it. Of masked scores only the sum d of all d_i is known, and there is one
step for all tables. See :mod:`tp_flower.methods.boost.trees`.

Notation:
    h, d_i  (N, d_c)    G_i, H_i, u_i  (n_i, d_c)    a  ``lengths``  (M,)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from tp_flower.arrays import AnyArray, FloatArray, dot
from tp_flower.joins.rows import JoinedRows, Vectors
from tp_flower.objectives import Objective

SHRINK: Final = 0.7  # of the steps of least loss, which the training rows flatter
LONGEST: Final = 1.0  # longer steps overfit, where little is left to learn
LEAST_HESSIAN: Final = 1e-12  # A row that is certain still has a curvature


class Boosting:
    """The joint scores of all tables' trees, between two exchanges with the sites.

    Attributes:
        rows: the joined rows, with the vectors ``scores``, h, ``gradient``, w g, and
            ``hessian``, w h'': (N, d_c) each.
    """

    def __init__(self, rows: JoinedRows, objective: Objective) -> None:
        self.rows = rows
        self._objective = objective

    def derivatives(
        self, tables: Iterable[str]
    ) -> dict[str, tuple[FloatArray, FloatArray | None]]:
        """Return G_i and H_i of some tables, (n_i, d_c) each.

        There is no H_i where the Hessian is constant: the sites know it.
        """
        is_constant = self._objective.has_constant_hessian

        def derive(vectors: Vectors, _: FloatArray) -> tuple[Vectors, Sequence[float]]:
            part = self._objective.on(vectors)
            scores = vectors["scores"]
            derivatives = {"gradient": part.weigh(part.gradient(scores))}
            if not is_constant:
                hessian = part.weigh(part.tree_hessian(scores))
                derivatives["hessian"] = np.maximum(hessian, LEAST_HESSIAN)
            return derivatives, ()

        self.rows.run(derive)
        gradients = self.rows.sums("gradient", tables)
        hessians = {} if is_constant else self.rows.sums("hessian", tables)
        return {name: (each, hessians.get(name)) for name, each in gradients.items()}

    def lengths(self, names: Sequence[str]) -> FloatArray:
        """Return how far to step along some directions, vectors (N, d_c)."""
        from scipy.optimize import minimize

        objective = self._objective
        mass = self._objective.mass

        def loss_and_slopes(lengths: FloatArray) -> tuple[float, FloatArray]:
            def measure(
                vectors: Vectors, _: FloatArray
            ) -> tuple[Vectors, Sequence[float]]:
                part = objective.on(vectors)
                directions = [vectors[n] for n in names]
                scores = move_scores(vectors["scores"], lengths, directions)
                gradient = part.weigh(part.gradient(scores))
                slopes = (dot(gradient, direction) for direction in directions)
                return {}, [part.total(scores), *slopes]

            (total, *slopes), _ = self.rows.run(measure)
            return float(total) / mass, np.array(slopes) / self.rows.rows

        count = len(names)
        bounds = [(0.0, None)] * count
        best: FloatArray = minimize(
            loss_and_slopes, np.ones(count), jac=True, method="L-BFGS-B", bounds=bounds
        ).x
        return np.minimum(SHRINK * best, LONGEST)


def add_direction(
    rows: JoinedRows,
    name: str,
    combine: Callable[[AnyArray], FloatArray],
    local: Mapping[str, AnyArray],
) -> bool:
    """Store a direction, the sum of tables' ``local`` values; return if it is not 0."""

    def expand(_: Vectors, expanded: AnyArray) -> tuple[Vectors, Sequence[float]]:
        direction = combine(expanded)
        return {name: direction}, [float(direction.any())]

    (is_any,), _ = rows.run(expand, local, combine="or")
    return bool(is_any)


def step_along(
    rows: JoinedRows, lengths: FloatArray, names: Sequence[str], result: str = "scores"
) -> None:
    """Store, as ``result``, the scores after a step along each of some directions."""

    def step(vectors: Vectors, _: FloatArray) -> tuple[Vectors, Sequence[float]]:
        directions = [vectors[name] for name in names]
        return {result: move_scores(vectors["scores"], lengths, directions)}, ()

    rows.run(step)


def move_scores(
    scores: FloatArray, lengths: FloatArray, directions: Sequence[FloatArray]
) -> FloatArray:
    """Return scores after a step along each of some directions, (N, d_c)."""
    after = scores.copy()
    for length, direction in zip(lengths, directions, strict=True):
        after += length * direction
    return after
