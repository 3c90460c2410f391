"""An objective beside an offset: a known number that is added to each row's score.

    f(h) = sum_j w_j loss(h_j + o_j; y_j) / sum_j w_j

as R's ``offset``, say the logarithm of an exposure (McCullagh and Nelder 1989,
"Generalized Linear Models", section 6.2). Scores h are those of a model: without the
offset wherever they are kept, added up or stepped from; it is added here, where a
family's formulas are computed, and where scores become predictions.

A loss of residuals has loss(h + o; y) = loss(h; y - o): its family takes the label less
the offset, so that the unit of its scores is what the model has to explain.

Notation:
    o  ``offset``  (N,)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import ClassVar, Final, Self

import numpy as np

from tp_flower.arrays import FloatArray, mean
from tp_flower.objectives.objective import (
    TARGET,
    WEIGHTS,
    Objective,
    RowInformation,
    rising_root,
)
from tp_flower.objectives.response import Response

OFFSET: Final = "offset"
EXPLAINED: Final = "d2"  # the share of a constant's loss that is explained
LEAST_DERIVATIVE: Final = np.finfo(float).tiny


def with_offset(objective: Objective, offset: FloatArray) -> Objective:
    """Return an objective of the same rows whose scores have an offset (N,) added.

    >>> from tp_flower.objectives import Target
    >>> from tp_flower.objectives.log_link import Poisson
    >>> from tp_flower.objectives.target import Target
    >>> counts = Poisson(Target.of([2.0, 2.0]))
    >>> float(with_offset(counts, np.log([1.0, 3.0])).base_score[0].round(9)) + 0.0
    0.0

    Raises:
        ValueError: its rows have no label, or more than one score.
    """
    if not objective.takes_label or objective.outputs > 1:
        raise ValueError(f"{objective.name!r} has no score that an offset is added to")
    kind = _beside_offset(type(objective))
    return kind(objective.target, objective.weights, objective.noise, offset=offset)


@dataclass(frozen=True, eq=False)
class OffsetObjective(Objective):
    """A family's objective of scores h + o; :func:`with_offset` makes its subclasses.

    Each is a subclass of its family as well, for the family's name and properties; all
    formulas are those of ``without``.
    """

    family: ClassVar[type[Objective]]

    offset: FloatArray = field(kw_only=True)

    @cached_property
    def without(self) -> Objective:
        """The family's objective, of scores to which the offset is added."""
        target = self.target.with_columns(self.columns_without)
        return self.family(target, self.weights, self.noise)

    @property
    def columns_without(self) -> FloatArray:
        """The columns of the family's target."""
        if self.is_of_residuals and self.target.has_label:
            return self.target.columns - self.offset[:, None]
        return self.target.columns

    @property
    def _added(self) -> FloatArray:
        """The numbers that are added to the family's scores, (N, 1)."""
        offset = self.offset[:, None]
        return np.zeros_like(offset) if self.is_of_residuals else offset

    def _constant(self, base: FloatArray) -> FloatArray:
        """Return scores (N, d_c) that are the same in all rows."""
        return np.broadcast_to(base, (len(self), len(base)))

    @property
    def vectors(self) -> dict[str, FloatArray]:
        """The vectors over its rows, by name, the offset among them."""
        return {**super().vectors, OFFSET: self.offset}

    def on(self, vectors: Mapping[str, FloatArray]) -> Self:
        """Return the objective of other rows, by their named vectors."""
        target = self.target.with_columns(vectors[TARGET])
        weights = vectors.get(WEIGHTS)
        part = type(self)(target, weights, self.noise, offset=vectors[OFFSET])
        # the family may keep what it knows of all rows
        inner_vectors = {**vectors, TARGET: part.columns_without}
        vars(part)["without"] = self.without.on(inner_vectors)
        return part

    def weighted(self, weights: FloatArray | None) -> Self:
        """Return the objective of the same rows with other weights."""
        return type(self)(self.target, weights, self.noise, offset=self.offset)

    def comparable(self, scores: FloatArray) -> FloatArray:
        """Return the rows' predictions, of scores with the offset."""
        return self.response.comparable(scores + self.offset[:, None])

    def fit_response(self, scores: FloatArray) -> Response:
        """Return the family's, of scores with the offset."""
        return self.without.fit_response(scores + self._added)

    def fitted_metrics(
        self, scores: FloatArray, response: Response
    ) -> dict[str, float]:
        """Return the family's, of scores with the offset."""
        return self.without.fitted_metrics(scores + self._added, response)

    def refusal_to_train(self) -> str:
        """Return why nothing is learned from what the offset leaves, or ""."""
        return self.without.refusal_to_train()

    def row_values(self, scores: FloatArray) -> FloatArray:
        """Return the loss of every row, (N,)."""
        return self.without.row_values(scores + self._added)

    def gradient(self, scores: FloatArray) -> FloatArray:
        """Return d loss / d scores of every row, (N, 1)."""
        return self.without.gradient(scores + self._added)

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return the second derivative in every row, (N, 1)."""
        return self.without.hessian(scores + self._added)

    def tree_hessian(self, scores: FloatArray) -> FloatArray:
        """Return the curvature by which leaves are measured, (N, 1)."""
        return self.without.tree_hessian(scores + self._added)

    def information(self, scores: FloatArray) -> FloatArray:
        """Return the expected second derivative of every row, (N,)."""
        return self.without.information(scores + self._added)

    def information_by_rows(self, scores: FloatArray) -> RowInformation:
        """Return what the rows know of their scores."""
        return self.without.information_by_rows(scores + self._added)

    def base_scores(self) -> FloatArray:
        """Return the best constant beside the offset, (1,).

        Of a family that adds the offset it is the root of the mean gradient, which is
        between that of no offset less the largest and less the least: there all rows'
        means are below, and above, the one of no offset.
        """
        constant = self.without.base_scores()
        if self.is_of_residuals:
            return constant

        def slope(base: FloatArray) -> tuple[FloatArray, FloatArray]:
            scores = self._constant(base)
            curvature = mean(self.hessian(scores), self.weights)
            rise = mean(self.gradient(scores), self.weights)
            return rise, curvature + LEAST_DERIVATIVE

        low = constant - self.offset.max()
        high = constant - self.offset.min()
        return rising_root(slope, low, high, constant - mean(self.offset, self.weights))

    def curvature(self, base: FloatArray) -> float:
        """Return the mean second derivative at a constant beside the offset."""
        if self.is_of_residuals:
            return self.without.curvature(base)
        return float(mean(self.hessian(self._constant(base))[:, 0], self.weights))

    def prox_block(
        self, centre: FloatArray, rho: float, start: FloatArray
    ) -> FloatArray:
        """Return the family's proximal step at v + o, less o."""
        added = self._added
        return self.without.prox_block(centre + added, rho, start + added) - added

    def prox_gradient(
        self, z: FloatArray, centre: FloatArray, rho: float
    ) -> FloatArray:
        """Return the gradient at z = prox(v)."""
        added = self._added
        return self.without.prox_gradient(z + added, centre + added, rho)

    def gradient_scale(self, reach: float) -> float:
        """Return the family's; of means, the gradient's size at the best constant."""
        if not self.takes_numbers or self.is_of_residuals:
            return self.without.gradient_scale(reach)
        gradient = self.gradient(self._constant(self.base_score))
        return float(np.sqrt(np.mean(gradient**2))) * reach or reach

    def score_unit(self, columns: int) -> float:
        """Return the family's size of scores that masks have room for."""
        return self.without.score_unit(columns)

    @property
    def output_scale(self) -> float:
        """The family's deviation of scores that fit."""
        return self.without.output_scale

    @cached_property
    def _constant_loss(self) -> float:
        """The mean loss of these rows' best constant beside the offset."""
        return self.value(self._constant(self.base_scores()))

    def measure(self, scores: FloatArray, value: float) -> dict[str, float]:
        """Return the family's metrics; what is explained, of what the offset leaves."""
        metrics = self.without.measure(scores + self._added, value)
        if EXPLAINED in metrics and not self.is_of_residuals:
            constant = self._constant_loss
            metrics[EXPLAINED] = 1.0 - value / constant if constant else 0.0
        return metrics


@cache
def _beside_offset(family: type[Objective]) -> type[OffsetObjective]:
    """Return a family's class of objectives beside an offset."""
    return type(family.__name__, (OffsetObjective, family), {"family": family})
