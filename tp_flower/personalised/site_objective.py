"""The objective of one site: the penalised mean loss of its own rows.

    f(theta) = (1/n) sum_j loss(b + h(theta; x_j), y_j) + l2/2 ||theta||^2

over its n trained rows, the penalty without biases. A site without trained rows has
f = l2/2 ||theta||^2.

Notation:
    b      ``base``         (d_c,), the same at all sites
    theta  ``parameters``   (p,)
"""

from dataclasses import dataclass

import numpy as np

from tp_flower.arrays import FloatArray
from tp_flower.learning.losses import Loss
from tp_flower.learning.metrics import evaluate
from tp_flower.learning.models.encoded_rows import Features, rows_of
from tp_flower.learning.models.local_model import LinearModel, LocalModel
from tp_flower.learning.solvers import gram

POWER_STEPS = 20
"""Products that an MLP's largest curvature is estimated by."""

CURVATURE_MARGIN = 4.0
"""An MLP's curvature is that at its start, and grows on the way."""

FINITE_STEP = 1e-3
"""Of the difference of gradients that stands for a product with the Hessian."""


@dataclass(frozen=True)
class SiteObjective:
    """What a site minimises, alone or with others.

    Attributes:
        model: with any parameters; they are set to where the objective is asked for.
        features: (n, d), the trained rows.
        labels: (n,).
        loss: of scores against labels.
        base: b, (d_c,).
        l2: of the penalty.
    """

    model: LocalModel
    features: Features
    labels: FloatArray
    loss: Loss
    base: FloatArray
    l2: float

    def scores(self, features: Features, parameters: FloatArray) -> FloatArray:
        """Return b + h(theta; x) of rows (k, d), (k, d_c)."""
        self.model.parameters = parameters
        return self.model.scores(features) + self.base

    def gradient(self, parameters: FloatArray) -> FloatArray:
        """Return the gradient of f at theta, (p,)."""
        return self._gradient(parameters, self.features, self.labels)

    def batch_gradient(
        self, parameters: FloatArray, rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> FloatArray:
        """Return the gradient with the mean over some trained rows only, (p,)."""
        features = rows_of(self.features, rows)
        return self._gradient(parameters, features, self.labels[rows])

    def _gradient(
        self, parameters: FloatArray, features: Features, labels: FloatArray
    ) -> FloatArray:
        penalty = self.l2 * np.where(self.model.penalised, parameters, 0.0)
        if not len(labels):
            return penalty
        scores = self.scores(features, parameters)
        messages = self.loss.gradient(scores, labels) / len(labels)
        return self.model.pullback(features, messages) + penalty

    def penalty(self, parameters: FloatArray) -> float:
        """Return l2/2 ||theta||^2."""
        own = parameters[self.model.penalised]
        return 0.5 * self.l2 * float(own @ own)

    def metrics(
        self, parameters: FloatArray, features: Features, labels: FloatArray
    ) -> dict[str, float]:
        """Return the metrics of rows (k, d), those that are finite; none of no row."""
        if not len(labels):
            return {}
        found = evaluate(self.loss, self.scores(features, parameters), labels)
        return {name: value for name, value in found.items() if np.isfinite(value)}

    @property
    def largest_curvature(self) -> float:
        """A bound of the Hessian's largest eigenvalue; of an MLP, an estimate."""
        if not len(self.labels):
            return self.l2
        if isinstance(self.model, LinearModel):
            ones = np.ones(len(self.labels))
            matrix = gram(self.features, ones, intercept=self.model.intercept)
            largest = float(np.linalg.eigvalsh(matrix)[-1]) if len(matrix) else 0.0
            return self.loss.max_curvature * largest / len(self.labels) + self.l2
        return CURVATURE_MARGIN * self._curvature_there() + self.l2

    def _curvature_there(self) -> float:
        """Return the norm of the Hessian at the model's parameters, by power steps."""
        centre = self.model.parameters
        at_centre = self.gradient(centre)
        vector = np.ones(len(centre)) / np.sqrt(len(centre))
        size = 0.0
        for _ in range(POWER_STEPS):
            moved = self.gradient(centre + FINITE_STEP * vector)
            product = (moved - at_centre) / FINITE_STEP
            size = float(np.linalg.norm(product))
            if not size:
                break
            vector = product / size
        self.model.parameters = centre
        return size
