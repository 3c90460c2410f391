"""Anderson acceleration of ADMM, at the server alone.

ADMM is a fixed-point map of the point x = (duals, h_1 .. h_M); one epoch evaluates
g = map(x) and f = g - x. The next point is (Walker and Ni 2011, type II)

    x' = g - dG gamma,   gamma = argmin || f - dF gamma ||

where the columns of dG and dF are the changes of g and f over the last epochs. An exact
theta-update depends on its target only, so the sites need not know: the extrapolated
point reaches them through the targets. The scores h = b + sum_i h_i of the joined rows
are linear in the point and are carried along, which spares a gather.

Notation:
    x, g, f  points; a point is a list of arrays: h, duals, h_1 .. h_M
    dG, dF   ``reached_changes``, ``moved_changes``  (memory, L)
    L        values of a point in all
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tp_flower.joins.mapping import TableMapping
from tp_flower.learning.losses import FloatArray

SETBACK = 10.0
"""A step that moves so many times further than the best one: the past misleads."""

RIDGE = 1e-10
"""Relative to the trace of the normal equations, whose rounding it must exceed."""


@dataclass(frozen=True)
class Point:
    """Where ADMM stands between two epochs.

    Attributes:
        scores: h, (N, d_c).
        duals: lambda, (N, d_c).
        local_scores: h_i by table, (n_i, d_c).
    """

    scores: FloatArray
    duals: FloatArray
    local_scores: dict[str, FloatArray]

    @property
    def arrays(self) -> list[FloatArray]:
        """The arrays of the point, those that follow from others first."""
        return [self.scores, self.duals, *self.local_scores.values()]


class AndersonMixer:
    """Mix the last epochs of ADMM.

    Changes are kept in float64: gamma magnifies the rounding of float32 to 1e-5 of the
    parameters, and a sharded table would no longer train like an unsplit one. In the
    norm of f, duals count as they are and local scores h_i with the weight
    sqrt(c G_i) rho, as in the augmented Lagrangian; h follows from them and has none.

    Args:
        mapping: the training rows' mapping.
        memory: epochs to look back on; 0 switches mixing off.
        corrections: c.
    """

    def __init__(self, mapping: TableMapping, memory: int, corrections: int) -> None:
        self._mapping, self._memory, self._corrections = mapping, memory, corrections
        self._reached_changes: FloatArray = np.zeros((0, 0))
        self._moved: FloatArray = np.zeros(0)
        self._turn = 0
        self.restart()

    def restart(self) -> None:
        """Forget the past, as a change of rho requires."""
        self._count = 0
        self._best = np.inf
        self._reached: list[FloatArray] = []

    @property
    def remembered(self) -> int:
        """Changes that the next mix looks back on, at most ``memory``."""
        return min(self._count, self._memory)

    def mix(self, rho: float, before: Point, after: Point) -> Point:
        """Return the next point from one step of the map.

        Args:
            rho: penalty of the epoch; the past must be forgotten when it changes.
            before: x, where the epoch started.
            after: g, where it ended; its arrays are kept and must not change.
        """
        if not self._memory:
            return after
        if not self._reached:
            self._prepare(rho, after)
        # two buffers by turns: the last step is still needed
        moved = self._moved_buffers[self._turn]
        self._turn = 1 - self._turn
        self._measure(before, after, moved)
        size = float(moved @ moved) ** 0.5
        if size > SETBACK * self._best:
            self.restart()
        earlier, self._reached = self._reached, after.arrays
        self._best = min(self._best, size)
        if earlier:
            self._remember(earlier, moved)
        self._moved = moved
        return self._extrapolated(after) if self._count else after

    def _prepare(self, rho: float, like: Point) -> None:
        """Set the weights, and make all memory once: fresh pages cost time."""
        self._weights: list[FloatArray] = [np.ones(1)]
        for table, scores in like.local_scores.items():
            count = self._mapping.tables[table].multiplicity
            weight = rho * np.sqrt(self._corrections * count)
            self._weights.append(np.repeat(weight, scores.shape[1]))
        if len(self._reached_changes):
            return
        ends = np.cumsum([0, *(array.size for array in like.arrays)]).tolist()
        self._spans = [slice(*pair) for pair in pairwise(ends)]
        length, free = ends[-1], like.scores.size
        self._reached_changes = np.zeros((self._memory, length))
        self._moved_changes = np.zeros((self._memory, length - free))
        self._moved_buffers = np.zeros((2, length - free))
        self._products = np.zeros((self._memory, self._memory))
        # h follows from the rest and has no part in the norm
        self._moved_spans = [
            slice(span.start - free, span.stop - free) for span in self._spans[1:]
        ]

    def _measure(self, before: Point, after: Point, moved: FloatArray) -> None:
        """Write f = g - x in the norm's weights to ``moved``."""
        arrays = zip(after.arrays[1:], before.arrays[1:], strict=True)
        for span, weight, (new, old) in zip(
            self._moved_spans, self._weights, arrays, strict=True
        ):
            own = moved[span]
            np.subtract(new.ravel(), old.ravel(), out=own)
            own *= weight

    def _remember(self, earlier: list[FloatArray], moved: FloatArray) -> None:
        """Keep the changes of g and f since the epoch before."""
        slot = self._count % self._memory
        self._count += 1
        np.subtract(moved, self._moved, out=self._moved_changes[slot])
        for span, new, old in zip(self._spans, self._reached, earlier, strict=True):
            own = self._reached_changes[slot, span]
            np.subtract(new.ravel(), old.ravel(), out=own)
        used = self.remembered
        products = self._moved_changes[:used] @ self._moved_changes[slot]
        self._products[slot, :used] = self._products[:used, slot] = products

    def _extrapolated(self, after: Point) -> Point:
        """Return g - dG gamma."""
        used = self.remembered
        products = self._products[:used, :used]
        against = self._moved_changes[:used] @ self._moved
        ridge = RIDGE * np.trace(products) + np.finfo(np.float64).tiny
        gamma = np.linalg.solve(products + ridge * np.eye(used), against)
        scores, duals, *local = [
            array - (gamma @ self._reached_changes[:used, span]).reshape(array.shape)
            for array, span in zip(after.arrays, self._spans, strict=True)
        ]
        tables = zip(after.local_scores, local, strict=True)
        return Point(scores, duals, dict(tables))
