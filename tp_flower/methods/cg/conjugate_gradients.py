"""Preconditioned conjugate gradients over joins: the server's half of an epoch.

    minimise f(theta) = (1/N) sum_j w_j loss(h_j; y_j) + beta sum_i R(theta_i)
    with h = b + sum_i expand(T_i theta_i)

Each table preconditions with its own block of the Hessian at the base score; the server
searches along the joint direction (Polak and Ribiere, with restarts: Nocedal and
Wright, Numerical Optimization, 2006, section 5.2):

    g_i = T_i^T seg_i(w r) / N + beta theta_i  at the sites; r = grad loss(h)
    v_i = -B_i^-1 g_i                          B_i = kappa T_i^T G_i T_i / N + m beta
    v   = sum_i expand(T_i v_i)                from the sites' scores
    c   = max(0, <g - g_before, v> / <g_before, v_before>)
    p_i = v_i + c p_i,    d = v + c d          at the sites, and at the server
    a   = argmin f(theta + a p),  h += a d,  theta_i += a p_i

With a squared loss these are the steps of linear conjugate gradients. The m tables may
each explain what the others do: m beta in place of beta damps what hardly shows in the
scores, and takes 2 % fewer epochs to 0.1 % on 33 schemas. The server needs sums over
the tables alone: of the scores, and of four numbers (:class:`Products`). It could
compute <g, v> from r and the scores of v, but near the optimum g is much smaller than
r, and the rounding of the scores would hide it. For the same reason the slope of f
along p starts from the sites' numbers, and the server adds how it changes.

The server's h is not exactly that of the models: the scores of every v arrive rounded.
Their errors add up to the *drift*; the descent ends at the optimum for scores that are
off by it, where f may be kappa drift^2 / 2 above its minimum, and no further step
lowers it reliably. If a step changes v by so much that it is lost in the rounding, no
step is taken: its size is known now, and the next scores of the same v arrive in a unit
that fits.

Notation:
    h, d, v  (N, d_c)     theta_i, p_i, v_i  (d [+ 1], d_c)     kappa  ``curvature``
    a  ``length``         c  ``conjugacy``                      beta  ``l2``
    m  tables
    u  ``rounding``, the root mean square error of a joined row's score of v
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tp_flower.arrays import FLOAT32, AnyArray, FloatArray, dot
from tp_flower.joins.rows import JoinedRows, Vectors
from tp_flower.objectives import Objective

# of the slope's start: the search ends by interpolation below it
SMALL_RISE: Final = 1e-4
LONGEST: Final = 2.0**20  # length of a step along which the objective never rises
TRUSTED: Final = 5  # points of a search, before interpolation must halve the slope
NARROWEST: Final = 1e-9  # of its length, what is left to search
HEADROOM: Final = 64.0
"""Times the mean size of v that its unit is: what is sent has some room, and most of
its digits."""
READABLE: Final = 1e-2  # kappa u^2 over the slope: above it, the rounding hides v
LEAST_PRODUCT: Final = 2.0**-16
"""Unit of the products over f, at least: <g, v> may be 2 m f at most, and has room for
2^20 / m units; in the smallest ones it is read to 1e-17 f."""
LEAST_OBJECTIVE: Final = 1e-12
"""f over the slope, at least, where the gradient is measured against it."""
TOLERANCE: Final = 3e-3
"""Gradient norm that ends training, after four epochs in a row or once it is five times
smaller: on 89 schemas with rare categories, few rows or nearly collinear tables, in
which the gradient of what is left shows late, f was within 0.1 % of its minimum by
then; after one epoch, 0.4 %."""
REST: Final = 1e-7  # gradient norm that ends training in any case: it is all rounding


@dataclass(frozen=True)
class Products:
    """Sums over all tables: <g, v>, <g_before, v>, beta <v, v> and beta <p, v>.

    The last two are of the penalised parameters alone; p is the last step's direction.
    """

    gradient: float
    before: float
    descent: float
    direction: float


class Descent:
    """The joint descent of all tables, between two exchanges with the sites.

    Attributes:
        rows: the joined rows, with the vectors ``scores``, h, ``direction``, d of the
            last step, and ``derivatives``, w r: (N, d_c) each.
        length: a of the last step; 0 before the first.
        conjugacy: c of the last step.
        curvature: kappa, of the loss at the base score.
        slope: -<g, v> where the last step began: twice the decrease of f that a model
            of independent tables foresees.
        penalty: beta sum_i R(theta_i).
        drift: by how much h may be off, root mean square.
        total: the weighted sum of the rows' losses at h; None before the first step.
    """

    def __init__(
        self,
        rows: JoinedRows,
        objective: Objective,
        base: FloatArray,
        rounding: float = 0.0,
    ) -> None:
        """Start at the base score, where :func:`start_line` has put the rows.

        ``rounding`` is that of scores of the size of the labels.
        """
        self.rows = rows
        self._objective = objective
        self.curvature = float(objective.curvature(base))
        self.length = self.conjugacy = self.slope = self.penalty = 0.0
        self.total: float | None = None
        self.drift = rounding
        # beta <p, p>, <g, p> where the last step ended, the squared error of d
        self._p_p = self._rest = self._error = 0.0

    @property
    def noise(self) -> float:
        """The slope that the drift may feign.

        It is twice how far f may stay above its minimum.
        """
        return self.curvature * self.drift**2

    @property
    def size(self) -> float:
        """About how large the scores of v will be; infinity before the first step.

        The last ones' mean square, of any table, was at most slope over curvature.
        """
        if self.slope:
            return math.sqrt(max(self.slope, self.noise) / self.curvature)
        return math.inf

    def product_unit(self, loss: float) -> float:
        """Return a unit for the next products, after the first step."""
        return max(self.slope, self.noise, LEAST_PRODUCT * (loss + self.penalty))

    def gradient_norm(self, loss: float) -> float:
        """Return sqrt(<g, B^-1 g> / f) where the last step began; ``loss`` is f's part.

        Half of its square is about how far f was above its minimum, relative to it;
        more, where tables nearly determine each other.
        """
        return self._relative(self.slope, loss)

    def noise_norm(self, loss: float) -> float:
        """Return the gradient norm below which no step surely lowers f."""
        return self._relative(self.noise, loss)

    def _relative(self, slope: float, loss: float) -> float:
        # a loss that is corrected for noisy labels may be 0 or negative
        least = max(LEAST_OBJECTIVE * max(self.slope, self.noise), np.finfo(float).tiny)
        return math.sqrt(max(slope, 0.0) / max(loss + self.penalty, least))

    def derivatives(self) -> dict[str, FloatArray]:
        """Store w r; return seg_i(w r) by table, (n_i, d_c)."""

        def derive(vectors: Vectors, _: FloatArray) -> tuple[Vectors, Sequence[float]]:
            part = self._objective.on(vectors)
            return {"derivatives": part.weigh(part.gradient(vectors["scores"]))}, ()

        _, sums = self.rows.run(derive, sums_of="derivatives")
        return sums

    def step(
        self,
        local: Mapping[str, AnyArray],
        combine: Callable[[AnyArray], FloatArray],
        products: Products,
        rounding: float = 0.0,
    ) -> None:
        """Take a step, given the scores of v and the products of the parameters.

        ``combine`` makes v, (B, d_c), of the sums of the tables' ``local`` scores.
        ``rounding`` is that of the messages; the length is 0 where it hides v.
        """
        slope = -products.gradient
        rounding = math.hypot(
            rounding, FLOAT32 * math.sqrt(max(slope, 0.0) / self.curvature)
        )
        is_readable = self.curvature * rounding**2 <= READABLE * slope
        conjugacy = 0.0
        if is_readable and self.slope > 0.0:
            conjugacy = max(0.0, (slope + products.before) / self.slope)
        if conjugacy * self._rest >= slope:
            # no descent
            conjugacy = 0.0
        self.slope = slope
        self.conjugacy = conjugacy
        start_slope = self._turn(conjugacy, combine, local)
        self._p_p = (
            products.descent
            + 2.0 * conjugacy * products.direction
            + conjugacy**2 * self._p_p
        )
        self._error = rounding**2 + conjugacy**2 * self._error
        self._rest = conjugacy * self._rest - slope
        self.length = 0.0
        if is_readable and self._rest < 0.0:
            self._advance(start_slope)

    def _turn(
        self,
        conjugacy: float,
        combine: Callable[[AnyArray], FloatArray],
        local: Mapping[str, AnyArray],
    ) -> float:
        """Store the direction d = v + c d; return <w r, d> / N."""

        def turn(
            vectors: Vectors, expanded: AnyArray
        ) -> tuple[Vectors, Sequence[float]]:
            direction = conjugacy * vectors["direction"]
            direction += combine(expanded)
            slope = dot(vectors["derivatives"], direction)
            return {"direction": direction}, [slope]

        (total,), _ = self.rows.run(turn, local)
        return float(total) / self.rows.rows

    def _advance(self, start_slope: float) -> None:
        """Step along the direction, on which f falls."""
        # beta <theta, p>
        pull = self._rest - start_slope
        self.length, self._rest = self._search(self._rest, pull)
        self.total = self._move()
        penalty = self.penalty + self.length * pull + self.length**2 / 2.0 * self._p_p
        self.penalty = max(penalty, 0.0)
        self.drift = math.hypot(self.drift, self.length * math.sqrt(self._error))

    def _search(self, rise: float, pull: float) -> tuple[float, float]:
        """Return the length of least f along the direction, and how f rises there.

        At the start f has the ``rise`` < 0, of which the ``pull`` is the penalty's.
        """

        def rise_at(length: float) -> float:
            return pull + self._along(length) + length * self._p_p

        return find_least(rise_at, rise)

    def _move(self) -> float:
        """Store the scores h + a d; return the weighted sum of the rows' losses."""

        def move(vectors: Vectors, _: FloatArray) -> tuple[Vectors, Sequence[float]]:
            scores = vectors["scores"] + self.length * vectors["direction"]
            return {"scores": scores}, [self._objective.on(vectors).total(scores)]

        (total,), _ = self.rows.run(move)
        return float(total)

    def _along(self, length: float) -> float:
        """Return <w grad loss(h + length d), d> / N."""

        def slope(vectors: Vectors, _: FloatArray) -> tuple[Vectors, Sequence[float]]:
            part = self._objective.on(vectors)
            direction = vectors["direction"]
            scores = vectors["scores"] + length * direction
            return {}, [part.slope(scores, direction)]

        (total,), _ = self.rows.run(slope)
        return float(total) / self.rows.rows


def find_least(rise_at: Callable[[float], float], rise: float) -> tuple[float, float]:
    """Return where a convex function of a length is least, and how it rises there.

    Args:
        rise_at: its derivative; each call passes over all joined rows.
        rise: that at 0, below 0.

    Source: inverse interpolation safeguarded by bisection, as Brent's.
    """
    points = [(0.0, rise)]
    low = 0.0
    high = math.inf
    length = 1.0
    while low < length < high and length <= LONGEST:
        value = rise_at(length)
        points.append((length, value))
        is_fast = abs(value) < 0.5 * abs(points[-2][1])
        if value < 0.0:
            low = length
        else:
            high = length
        root = _root_of(points[-3:])
        if abs(value) <= SMALL_RISE * abs(rise):
            return points[-1] if math.isnan(root) else (root, 0.0)
        if math.isinf(high):
            length *= 2.0
        elif high - low <= NARROWEST * high:
            # the derivative jumps
            break
        elif low < root < high and (is_fast or len(points) < TRUSTED):
            length = root
        else:
            length = 0.5 * (low + high)
    return points[-1]


def _root_of(points: Sequence[tuple[float, float]]) -> float:
    """Return where a function is 0 by inverse interpolation (Lagrange).

    Its error is as the product of the points' errors. It is NaN where two points have
    one value.
    """
    arguments, values = map(np.array, zip(*points, strict=True))
    if len(set(values)) < len(values):
        return math.nan
    ratios = values / (values - values[:, None] + np.eye(len(values)))
    np.fill_diagonal(ratios, 1.0)
    return float(arguments @ ratios.prod(axis=1))


def start_line(rows: JoinedRows, base: FloatArray) -> None:
    """Store scores b, and no direction."""
    rows.fill("scores", base)
    rows.fill("direction", np.zeros_like(base))


def follow_line(
    rows: JoinedRows,
    conjugacy: float,
    combine: Callable[[AnyArray], FloatArray],
    local: Mapping[str, AnyArray],
) -> None:
    """Store the direction d = v + c d of held-out rows."""

    def turn(vectors: Vectors, expanded: AnyArray) -> tuple[Vectors, Sequence[float]]:
        direction = conjugacy * vectors["direction"]
        direction += combine(expanded)
        return {"direction": direction}, ()

    rows.run(turn, local)


def move_along(rows: JoinedRows, length: float) -> None:
    """Store the scores h + a d of held-out rows."""

    def move(vectors: Vectors, _: FloatArray) -> tuple[Vectors, Sequence[float]]:
        return {"scores": vectors["scores"] + length * vectors["direction"]}, ()

    rows.run(move)
