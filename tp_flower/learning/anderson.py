"""Anderson acceleration of ADMM, at the server alone.

ADMM is a fixed-point map of the point x = (duals, h_1 .. h_M); one epoch evaluates
g = map(x) and f = g - x. The next point is (Walker and Ni 2011, type II)

    x' = g - dG gamma,   gamma = argmin || f - dF gamma ||

where the columns of dG and dF are the changes of g and f over the last epochs. An exact
theta-update depends on its target only, so the sites need not know: the extrapolated
point reaches them through the targets. The scores h = b + sum_i h_i of the joined rows
follow from it.

Notation:
    x, g, f  points; a point is a list of arrays: duals, h_1 .. h_M
    dG, dF   ``reached``, ``moved``, of each array  (memory, n, d_c)
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray
from tp_flower.joins.mapping import TableMapping
from tp_flower.joins.row_weights import RowWeights
from tp_flower.threads import blocks_of, in_threads

Float32Array = npt.NDArray[np.float32]
Weight = FloatArray | None

SETBACK = 10.0
"""A step that moves so many times further than the best one: the past misleads."""

RIDGE = 1e-10
"""Relative to the trace of the normal equations, whose rounding it must exceed."""

BLOCK_VALUES = 8192
"""Of each array at a time: all their changes stay in a core's cache."""
LEAST_VALUES = 1 << 18
"""Values that a thread has at least."""


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
    def free(self) -> list[FloatArray]:
        """The arrays that h follows from, and the duals: duals, h_1 .. h_M."""
        return [self.duals, *self.local_scores.values()]


@dataclass(frozen=True)
class _Sums:
    """Inner products over an array's values, in the norm's weights.

    Attributes:
        products: <dF_k, dF_new> and <dF_k, f> of every change that is kept, (used, 2).
        size: ||f||^2.
    """

    products: FloatArray
    size: float


class _History:
    """What is remembered of one array of the point.

    Args:
        like: the array, (n, d_c).
        memory: changes to keep.
    """

    def __init__(self, like: FloatArray, memory: int) -> None:
        self._reached: Float32Array = np.zeros((memory, *like.shape), np.float32)
        self._moved: Float32Array = np.zeros((memory, *like.shape), np.float32)
        self._step: Float32Array = np.zeros(like.shape, np.float32)
        self._size = max(BLOCK_VALUES // like.shape[1], 1)
        self._least_rows = max(LEAST_VALUES // like.shape[1], 1)

    def reach(self, slot: int, after: FloatArray, earlier: FloatArray) -> None:
        """Keep the change of g since the epoch before."""

        def keep(span: slice) -> None:
            np.subtract(after[span], earlier[span], out=self._reached[slot, span])

        in_threads(keep, len(after), self._least_rows)

    def move(
        self, slot: int, used: int, ends: tuple[FloatArray, FloatArray], weight: Weight
    ) -> _Sums:
        """Keep f = g - x, and its change since the epoch before.

        Args:
            slot: of the change.
            used: changes that are kept, the new one among them; 0 at the first step.
            ends: x and g, (n, d_c).
            weight: of every row in the norm, (n, 1); None for 1.
        """
        before, after = ends

        def add_up(span: slice) -> _Sums:
            products, size = np.zeros((used, 2)), 0.0
            for block in blocks_of(span, self._size):
                step = after[block] - before[block]
                if weight is not None:
                    step *= weight[block]
                rounded = step.astype(np.float32)
                if used:
                    change = self._moved[slot, block]
                    np.subtract(rounded, self._step[block], out=change)
                    wide = self._moved[:used, block].reshape(used, -1)
                    pair = np.stack([change.ravel(), rounded.ravel()], axis=1)
                    products += wide.astype(np.float64) @ pair.astype(np.float64)
                self._step[block] = rounded
                size += float(np.vdot(step, step))
            return _Sums(products, size)

        parts = in_threads(add_up, len(after), self._least_rows)
        products = np.sum([part.products for part in parts], axis=0)
        return _Sums(products, sum(part.size for part in parts))

    def extrapolated(self, after: FloatArray, gamma: FloatArray) -> FloatArray:
        """Return g - dG gamma, (n, d_c)."""
        out = np.empty_like(after)
        used = len(gamma)

        def extrapolate(span: slice) -> None:
            for block in blocks_of(span, self._size):
                wide = self._reached[:used, block].reshape(used, -1)
                back = gamma @ wide.astype(np.float64)
                np.subtract(after[block], back.reshape(out[block].shape), out[block])

        in_threads(extrapolate, len(after), self._least_rows)
        return out


class AndersonMixer:
    """Mix the last epochs of ADMM.

    Changes are kept in float32, which halves the largest thing that the server has, and
    all their sums are in float64: gamma is then the best for the changes as they are
    kept, and does not depend on the order of the rows. In the norm of f, duals count as
    they are and local scores h_i with the weight sqrt(c G_i) rho, as in the augmented
    Lagrangian; h follows from them and has none. Of weighted rows duals have the weight
    sqrt(w), and G^w is in the place of G.

    Args:
        mapping: the training rows' mapping.
        memory: epochs to look back on; 0 switches mixing off.
        corrections: c.
        weights: w and G^w of the joined rows; None: all alike.
    """

    def __init__(
        self,
        mapping: TableMapping,
        memory: int,
        corrections: int,
        weights: RowWeights | None = None,
    ) -> None:
        self._mapping, self._memory, self._corrections = mapping, memory, corrections
        self._row_weights = weights
        self._histories: list[_History] = []
        self._products: FloatArray = np.zeros((memory, memory))
        self.restart()

    def restart(self) -> None:
        """Forget the past, as a change of rho requires."""
        self._count = 0
        self._best = np.inf
        self._reached: list[FloatArray] = []
        self._weights: list[Weight] = []

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
        if not self._histories:
            self._histories = [_History(a, self._memory) for a in after.free]
        if not self._weights:
            self._weights = self._weights_of(rho, after)
        earlier = self._reached
        sums = self._measure(before, after, has_earlier=bool(earlier))
        size = sums.size**0.5
        if size > SETBACK * self._best:
            self.restart()
            self._weights, earlier = self._weights_of(rho, after), []
        self._best = min(self._best, size)
        self._reached = after.free
        if not earlier:
            return after
        self._remember(earlier, sums.products[:, 0])
        return self._extrapolated(after, sums.products[:, 1])

    def _weights_of(self, rho: float, point: Point) -> list[Weight]:
        """Return the weights of the rows of duals and local scores in the norm."""
        own = self._row_weights
        weights: list[Weight] = [None if own is None else np.sqrt(own.rows)[:, None]]
        for table in point.local_scores:
            rows = self._mapping.tables[table]
            count = rows.multiplicity if own is None else own.masses[table]
            weights.append(rho * np.sqrt(self._corrections * count)[:, None])
        return weights

    def _measure(self, before: Point, after: Point, *, has_earlier: bool) -> _Sums:
        slot = self._count % self._memory
        used = min(self._count + 1, self._memory) if has_earlier else 0
        ends = zip(before.free, after.free, strict=True)
        own = zip(self._histories, ends, self._weights, strict=True)
        parts = [history.move(slot, used, pair, w) for history, pair, w in own]
        products = np.sum([part.products for part in parts], axis=0)
        return _Sums(products, sum(part.size for part in parts))

    def _remember(self, earlier: list[FloatArray], products: FloatArray) -> None:
        """Keep the changes of g and the products of those of f."""
        slot = self._count % self._memory
        self._count += 1
        for history, new, old in zip(
            self._histories, self._reached, earlier, strict=True
        ):
            history.reach(slot, new, old)
        used = self.remembered
        self._products[slot, :used] = self._products[:used, slot] = products

    def _extrapolated(self, after: Point, against: FloatArray) -> Point:
        """Return g - dG gamma."""
        used = self.remembered
        products = self._products[:used, :used]
        ridge = RIDGE * np.trace(products) + np.finfo(np.float64).tiny
        gamma = np.linalg.solve(products + ridge * np.eye(used), against)
        duals, *local = [
            history.extrapolated(array, gamma)
            for history, array in zip(self._histories, after.free, strict=True)
        ]
        scores = after.scores.copy()
        for (table, reached), mixed in zip(
            after.local_scores.items(), local, strict=True
        ):
            self._mapping.tables[table].add_expanded(mixed - reached, scores)
        tables = zip(after.local_scores, local, strict=True)
        return Point(scores, duals, dict(tables))
