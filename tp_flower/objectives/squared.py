"""The squared loss of numbers, and of numbers with Laplace noise.

    loss(h; y) = 1/2 (h - y)^2,    with noise 1/2 (h - y~)^2 - b^2

whose mean over the noise, of variance 2 b^2, is 1/2 (h - y)^2.
"""

import math

import numpy as np

from tp_flower.arrays import FloatArray, mean
from tp_flower.objectives.metrics import number_metrics
from tp_flower.objectives.noise import NumberNoise
from tp_flower.objectives.objective import Objective
from tp_flower.objectives.response import IDENTITY, NumberResponse

LEAST_VARIANCE = 0.01
"""Of a label's variance, that is its own: if noise drowns the labels, a hundredth is as
good as any guess."""


class NumberObjective(Objective):
    """A loss of numbers whose scores are measured in deviations of the labels."""

    class_counts = range(1)
    is_of_residuals = True

    @classmethod
    def make_response(cls, classes: tuple[str, ...], kind: str) -> NumberResponse:
        """Return the score as it is."""
        return NumberResponse(cls.name, 1, classes, kind, link=IDENTITY)

    @property
    def deviation(self) -> float:
        """The deviation of the labels, with their noise.

        It is 1 if all are equal, or stay at their site.
        """
        if not (self.target.has_label and len(self)):
            return 1.0
        return float(self.target.numbers.std()) or 1.0

    def score_unit(self, _columns: int) -> float:
        """Return the deviation of the labels."""
        return self.deviation

    @property
    def output_scale(self) -> float:
        """The deviation of the labels."""
        return self.deviation


class Squared(NumberObjective):
    """1/2 (h - y)^2, for regression.

    >>> from tp_flower.objectives import Target
    >>> squared = Squared(Target.of(np.array([3.0])))
    >>> squared.prox(np.array([[0.0]]), rho=2.0)
    array([[1.]])
    """

    name = "squared"
    has_constant_hessian = True
    has_likelihood = True
    noise_kind = NumberNoise
    max_curvature = 1.0

    def base_scores(self) -> FloatArray:
        """Return the mean label."""
        return np.array([mean(self.target.numbers, self.weights)])

    def row_values(self, scores: FloatArray) -> FloatArray:
        """Return 1/2 (h - y)^2, less b^2 for noise: it may be negative."""
        residual = scores[:, 0] - self.target.numbers
        values: FloatArray = 0.5 * residual * residual
        if isinstance(self.noise, NumberNoise):
            values -= 0.5 * self.noise.variance
        return values

    def gradient(self, scores: FloatArray) -> FloatArray:
        """Return h - y."""
        return scores - self.target.columns

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return 1."""
        return np.ones_like(scores)

    def curvature(self, _base: FloatArray) -> float:
        """Return 1."""
        return 1.0

    def prox_block(
        self, centre: FloatArray, rho: float, _start: FloatArray
    ) -> FloatArray:
        """Return (y + rho v) / (1 + rho)."""
        return (self.target.columns + rho * centre) / (1.0 + rho)

    def measure(self, scores: FloatArray, value: float) -> dict[str, float]:
        """Return RMSE, R2 and, without noise, MAE."""
        noise = None
        if isinstance(self.noise, NumberNoise):
            noise = self.noise
        numbers = self.target.numbers
        metrics = number_metrics(value, numbers, noise, self.weights)
        if noise is None:
            distances = np.abs(scores[:, 0] - numbers)
            metrics["mae"] = float(mean(distances, self.weights))
        return metrics

    def gradient_scale(self, reach: float) -> float:
        """Return so many deviations of the labels."""
        return self.deviation * reach

    @property
    def output_scale(self) -> float:
        """The deviation of the true labels; 1 if they stay at their site."""
        if not self.target.has_label:
            return 1.0
        variance = float(self.target.numbers.var())
        noise = self.target.noise
        if isinstance(noise, NumberNoise):
            variance = max(variance - noise.variance, LEAST_VARIANCE * variance)
        return math.sqrt(variance)
