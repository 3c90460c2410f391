"""The joined table as the matrices that centralised training takes."""

from dataclasses import dataclass
from typing import Any, Self

from scripts.joined.centralized import JoinedTable
from scripts.joined.optima import FloatArray
from tp_flower.learning.losses import Loss
from tp_flower.settings import Settings

Matrix = Any
"""Dense float32, or a sparse matrix of scipy, which has no types."""


@dataclass(frozen=True, eq=False)
class Problem:
    """The encoded joined table, split.

    Attributes:
        train: X of the training rows.
        train_labels: y of them.
        test: X of the held-out rows.
        test_labels: y of them.
        loss: of the task.
        l2: weight of the penalty 1/2 ||W||^2; the intercept is free.
    """

    train: Matrix
    train_labels: FloatArray
    test: Matrix
    test_labels: FloatArray
    loss: Loss
    l2: float

    @classmethod
    def of(cls, joined: JoinedTable, settings: Settings) -> Self:
        """Split a joined table as it says."""
        return cls(
            *joined.part(test=False), *joined.part(test=True), joined.loss, settings.l2
        )

    def value(self, scores: FloatArray, weights: FloatArray) -> float:
        """Return the objective at scores of the training rows."""
        penalty = 0.5 * self.l2 * float((weights**2).sum())
        return self.loss.value(scores, self.train_labels) + penalty
