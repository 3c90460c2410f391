"""The objective: a loss of scores that is bound to a target and its weights.

    f(h) = sum_j w_j loss(h_j; y_j) / sum_j w_j

A *family* is a subclass: it has the formulas of one row in a file of its own, and one
line in the registry. The target's columns are its label, however many it needs; nobody
else reads them. Formulas are separable: each row's depends on that row alone, so that
an objective of some rows (:meth:`Objective.select`) has the same values there, and sums
over disjoint rows add up. One that is not ``is_separable`` is computed on all rows at
once, and the objective of some of them is another one, of these rows alone.

Notation:
    h  ``scores``  (N, d_c): summed predictions of all tables on each row
    y  ``target``  (N, k)
    w  ``weights``  (N,), > 0, mean 1; None where all rows weigh alike
    z  ``(N, d_c)``: ADMM's auxiliary variable
    v  ``centre``  (N, d_c): h + duals / rho

All rows are handled at once, in blocks that stay in the processor's cache. The z-update
of the paper (Eq. 7) is ``prox`` at ``v = h + duals / rho``; its section 8 asks for the
closed or Newton forms used here in place of 100 gradient steps.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar, Final, Self, TypeVar

import numpy as np

from tp_flower.arrays import (
    BLOCK_ROWS,
    AnyArray,
    FloatArray,
    IntArray,
    blocks,
    chosen_rows,
    dot,
)
from tp_flower.objectives.noise import LabelNoise
from tp_flower.objectives.response import Response
from tp_flower.objectives.target import LABEL, Rows, Target

TARGET: Final = "target"
WEIGHTS: Final = "weights"
PROX_TOLERANCE = 1e-9
MAX_PROX_STEPS = 200
ROOT_STEP = 1e-13  # relative: the last one of Newton's, which are quadratic


@dataclass(frozen=True, eq=False)
class RowClusters:
    """Rows in clusters, whose weighted sums are squared and added up.

    A row is in as many as it is a member of.

    Attributes:
        rows: of the members, (r,), positions.
        numbers: of their clusters, (r,).
        slopes: e, what each counts, (r,).
        count: of the clusters, G.
    """

    rows: IntArray
    numbers: IntArray
    slopes: FloatArray
    count: int

    @classmethod
    def together(
        cls, members: Sequence[tuple[IntArray, IntArray, FloatArray]], count: int
    ) -> Self:
        """Return those of some lists of members: rows, numbers and slopes."""
        rows, numbers, slopes = map(np.concatenate, zip(*members, strict=True))
        return cls(rows, numbers, slopes, count)


@dataclass(frozen=True, eq=False)
class RowInformation:
    """The information about coefficients, as sums over rows of their features x.

        sum_j W_j x_j x_j' + sum_c s_c (sum_j a_jc x_j) (sum_j a_jc x_j)'
            - sum_g (sum_m in g e_m x_m) (sum_m in g e_m x_m)'

    That of k scores, which tell classes by their differences, has a sum of the first
    kind for each two scores a < b, in its four blocks: (e_a - e_b) (e_a - e_b)' times
    sum_j W_jab x_j x_j'.

    Attributes:
        weights: W, (N,); of k scores (N, k (k - 1) / 2), in the order of combinations.
        beside: a, (N, c), 0 where W is; None for none.
        scales: s, (c,).
        fewest: rows that what is beside is a mean of.
        clusters: g, and e; None for none.
    """

    weights: FloatArray
    beside: FloatArray | None = None
    scales: FloatArray | None = None
    fewest: float = math.inf
    clusters: RowClusters | None = None


@dataclass(frozen=True, eq=False)
class Objective(ABC):
    """A loss of scores (N, d_c), bound to a target and weights of N rows.

    It is convex where it is trained by; one that only evaluates has no gradient,
    curvature and proximal step.

    Attributes:
        name: of the settings, the manifest and the report.
        class_counts: how many classes a label may have for it; 0 if it is a number.
        takes_label: whether there is a label; a clustering has none.
        label_names: the columns that a label needs for it, by their meaning.
        is_separable: whether a row's loss depends on that row alone.
        has_constant_hessian: whether the Hessian is the same at all scores: then it
            need not be sent, and gradients tell sums of scores.
        has_curvature: whether second derivatives tell how long steps may be.
        has_likelihood: whether it is the deviance of a family of distributions, whose
            information standard errors are made of.
        dispersion_is_known: whether that family has no scale of its own to estimate.
        max_curvature: a bound on the Hessian's largest eigenvalue; infinity for none.
        is_of_residuals: whether it depends on h - y alone: what is added to a score may
            be taken from the label.
        noise_kind: the noise on labels that it corrects for; None for none.
        parameter: of a family that has one, such as the power of ``tweedie(1.5)``.
        parameter_range: the open interval that it lies in; empty without a parameter.
        noise: the noise that it is corrected for, so that it is unbiased for the true
            labels.
    """

    name: ClassVar[str]
    class_counts: ClassVar[range]
    takes_label: ClassVar[bool] = True
    label_names: ClassVar[tuple[str, ...]] = (LABEL,)
    is_separable: ClassVar[bool] = True
    has_constant_hessian: ClassVar[bool] = False
    has_curvature: ClassVar[bool] = True
    has_likelihood: ClassVar[bool] = False
    dispersion_is_known: ClassVar[bool] = False
    max_curvature: ClassVar[float] = math.inf
    is_of_residuals: ClassVar[bool] = False
    noise_kind: ClassVar[type | None] = None
    parameter: ClassVar[float] = math.nan
    parameter_range: ClassVar[tuple[float, ...]] = ()

    target: Target
    weights: FloatArray | None = None
    noise: LabelNoise | None = None

    @classmethod
    def of_parameter(cls, value: float) -> type[Self]:
        """Return the family at another value of its parameter, named with it."""
        return _with_parameter(cls, value)

    @classmethod
    def refusal(cls, target: Target) -> str:
        """Return why it takes some labels neither to train nor to judge, or ""."""
        del target
        return ""

    def refusal_to_train(self) -> str:
        """Return why nothing is learned from its rows, N > 0, or ""."""
        values = self.target.stored[:, 0]
        only = float(values.min())
        if only < values.max():
            return ""
        classes = self.target.classes
        name = classes[int(only)] if classes else f"{only:g}"
        return (
            f"the label is constant in the {len(self)} joined training rows "
            f"({'one class' if classes else 'one value'}: {name})"
        )

    @classmethod
    @abstractmethod
    def make_response(cls, classes: tuple[str, ...], kind: str) -> Response:
        """Return the meaning of scores, of labels with some classes of a kind."""

    @abstractmethod
    def row_values(self, scores: FloatArray) -> FloatArray:
        """Return the loss of every row, (N,)."""

    @abstractmethod
    def base_scores(self) -> FloatArray:
        """Return the best constant score b, (d_c,)."""

    @abstractmethod
    def measure(self, scores: FloatArray, value: float) -> dict[str, float]:
        """Return metrics besides the loss, whose ``value`` is known."""

    def fit_response(self, scores: FloatArray) -> Response:
        """Return the meaning of scores, with what those of a trained model add to it.

        They are those of its rows, (N, d_c).
        """
        del scores
        return self.response

    def fitted_metrics(
        self, scores: FloatArray, response: Response
    ) -> dict[str, float]:
        """Return metrics by what the training rows have added to the response."""
        del scores, response
        return {}

    def gradient(self, scores: FloatArray) -> FloatArray:
        """Return d loss / d scores of every row (Eq. 4), without weights, (N, d_c)."""
        raise NotImplementedError

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return the Hessian's diagonal in every row, without weights, (N, d_c)."""
        raise NotImplementedError

    def tree_hessian(self, scores: FloatArray) -> FloatArray:
        """Return the curvature by which leaves are measured, (N, d_c).

        It is LightGBM's, where that is more careful than the Hessian.
        """
        return self.hessian(scores)

    def information(self, scores: FloatArray) -> FloatArray:
        """Return the expected second derivative of every row, (N,), without weights.

        It is Fisher's information of the row about its only score, in units of the
        dispersion (McCullagh and Nelder 1989, section 2.5): the Hessian, where that is
        the same for all labels.
        """
        return self.hessian(scores)[:, 0]

    def information_by_rows(self, scores: FloatArray) -> "RowInformation":
        """Return what the rows know of their scores, each with its weight."""
        return RowInformation(self.weigh(self.information(scores)))

    def squared_residuals(self, scores: FloatArray) -> FloatArray:
        """Return Pearson's (y - mu)^2 / V(mu) of every row, (N,), without weights.

        Their sum by the degrees of freedom estimates the dispersion.
        """
        slope = self.gradient(scores)[:, 0]
        # with a gradient (mu - y) m / V, and an information m^2 / V
        squares: FloatArray = slope * slope / self.information(scores)
        return squares

    def curvature(self, base: FloatArray) -> float:
        """Return the mean diagonal of the Hessian at a constant score."""
        raise NotImplementedError

    def prox_block(
        self, centre: FloatArray, rho: float, start: FloatArray
    ) -> FloatArray:
        """Return :meth:`prox` of rows that all fit into the cache."""
        raise NotImplementedError

    def prox_gradient(
        self, z: FloatArray, centre: FloatArray, rho: float
    ) -> FloatArray:
        """Return rho (v - z) at z = prox(v), which is the gradient there, (N, d_c).

        It is computed as that, without the sum's rounding, where there is only one.
        """
        del centre, rho
        return self.gradient(z)

    def gradient_scale(self, reach: float) -> float:
        """Return the size of the gradient's entries, at which noise is measured.

        ``reach`` is how far they may go, in deviations of a label that is a number.
        """
        del reach
        return 1.0

    def score_unit(self, columns: int) -> float:
        """Return the size of scores that masks have room for, by public numbers.

        ``columns`` are the encoded columns of all tables.
        """
        del columns
        return 1.0

    @property
    def output_scale(self) -> float:
        """The deviation of scores that fit: the unit of a network's output."""
        return 1.0

    def __len__(self) -> int:
        """Return N."""
        return len(self.target)

    def __getstate__(self) -> dict[str, object]:
        """Return the state of the objective of no rows, which :meth:`on` binds to some.

        A kernel that is computed elsewhere takes no rows along.
        """
        return vars(self.select(slice(0, 0)))

    @property
    def takes_numbers(self) -> bool:
        """Whether its labels are numbers, not classes."""
        return 0 in self.class_counts

    @cached_property
    def response(self) -> Response:
        """The meaning of scores."""
        return self.make_response(self.target.classes, self.target.kind)

    @property
    def outputs(self) -> int:
        """The number of scores of a row, d_c."""
        return self.response.outputs

    @cached_property
    def base_score(self) -> FloatArray:
        """The best constant score b, (d_c,); 0 if the labels stay at their site."""
        if self.takes_label and not self.target.has_label:
            return np.zeros(self.outputs)
        return self.base_scores()

    def select(self, rows: Rows) -> Self:
        """Return the objective of some rows."""
        chosen = {name: chosen_rows(v, rows) for name, v in self.vectors.items()}
        return self.on(chosen)

    def on(self, vectors: Mapping[str, AnyArray]) -> Self:
        """Return the objective of other rows, say a block, by their named vectors."""
        target = self.target.with_columns(vectors[TARGET])
        return type(self)(target, vectors.get(WEIGHTS), self.noise)

    @property
    def vectors(self) -> dict[str, AnyArray]:
        """The vectors over its rows, by name, from which :meth:`on` binds it anew."""
        weights = {} if self.weights is None else {WEIGHTS: self.weights}
        return {TARGET: self.target.stored, **weights}

    def weighted(self, weights: FloatArray | None) -> Self:
        """Return the objective of the same rows with other weights."""
        return type(self)(self.target, weights, self.noise)

    def comparable(self, scores: FloatArray) -> FloatArray:
        """Return the rows' predictions as they are compared with labels, a new (N,)."""
        return self.response.comparable(scores)

    def weigh(self, values: FloatArray) -> FloatArray:
        """Return values (N, ...) of the rows, each times its weight."""
        if self.weights is None:
            return values
        return self.weights.reshape(-1, *[1] * (values.ndim - 1)) * values

    @cached_property
    def mass(self) -> float:
        """The sum of the weights, by which a mean divides: N if all are 1."""
        if self.weights is None:
            return len(self)
        return float(self.weights.sum())

    def total(self, scores: FloatArray) -> float:
        """Return sum_j w_j loss_j, a partial sum of what ``value`` is the mean of."""
        values = self.row_values(scores)
        if self.weights is None:
            return float(values.sum())
        return dot(self.weights, values)

    def value(self, scores: FloatArray) -> float:
        """Return the mean loss over the rows, weighted."""
        if not self.is_separable:
            return self.total(scores) / self.mass
        parts = (self.select(b).total(scores[b]) for b in blocks(len(self)))
        return sum(parts) / self.mass

    def slope(self, scores: FloatArray, direction: FloatArray) -> float:
        """Return sum_j w_j <grad loss_j, d_j> along a direction d (N, d_c).

        It is a partial sum: over disjoint rows it adds up to how N f rises.
        """
        return dot(self.weigh(self.gradient(scores)), direction)

    def prox(
        self, centre: FloatArray, rho: float, start: FloatArray | None = None
    ) -> FloatArray:
        """Return argmin_z loss(z; y) + rho/2 ||z - v||^2 for every row (Eq. 7).

        Newton starts at ``start``, or v, and ends with |gradient| <= 1e-8 in every
        coordinate of z, (N, d_c). Weights do not change it.
        """
        start = centre if start is None else start
        if len(self) <= BLOCK_ROWS:
            return self.prox_block(centre, rho, start)
        out = np.empty_like(centre)
        for block in blocks(len(self)):
            out[block] = self.select(block).prox_block(centre[block], rho, start[block])
        return out

    def metrics(
        self, scores: FloatArray, value: float | None = None
    ) -> dict[str, float]:
        """Return the mean loss, a ``value`` if it is computed, and other metrics."""
        value = self.value(scores) if value is None else value
        return {"loss": value, **self.measure(scores, value)}

    def constant_metrics(self, base: FloatArray) -> dict[str, float]:
        """Return the metrics of a constant score b (d_c,); {} without labels."""
        if not (self.takes_label and self.target.has_label and len(self)):
            return {}
        return self.metrics(np.broadcast_to(base, (len(self), len(base))))


def rising_root(
    rise: Callable[[FloatArray], tuple[FloatArray, FloatArray]],
    low: FloatArray,
    high: FloatArray,
    start: FloatArray,
) -> FloatArray:
    """Return where functions that rise are 0, between bounds, all of one shape.

    ``rise`` returns their values and derivatives. Where a step of Newton's leaves the
    bounds, or is more than half of the one before, their middle is next (Press et al.
    2007, Numerical Recipes, section 9.4).
    """
    z = start
    last = high - low
    for _ in range(MAX_PROX_STEPS):
        value, derivative = rise(z)
        low = np.where(value <= 0.0, z, low)
        high = np.where(value >= 0.0, z, high)
        step = -value / derivative
        is_outside = (z + step < low) | (z + step > high)
        is_slow = 2.0 * np.abs(step) > last
        # the last steps are rounding, which may be on either side
        is_last = np.abs(step) <= ROOT_STEP * np.maximum(1.0, np.abs(z))
        is_halved = (is_outside | is_slow) & ~is_last
        step = np.where(is_halved, 0.5 * (low + high) - z, step)
        z = z + step
        if is_last.all():
            break
        last = np.abs(step)
    return z


_Family = TypeVar("_Family", bound=Objective)


@cache
def _with_parameter(family: type[_Family], value: float) -> type[_Family]:
    """Return a family at a value of its parameter; the same one for the same value."""
    members = {"name": f"{family.name}({value:.15g})", "parameter": value}
    return type(family.__name__, (family,), members)
