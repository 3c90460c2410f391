"""Losses of numbers that outliers move little: Huber's, and that of quantiles.

    huber     1/2 r^2 while |r| <= d, d |r| - 1/2 d^2 beyond it;  r = h - y
    quantile  max(q (y - h), (q - 1) (y - h))

(Huber 1964, "Robust estimation of a location parameter"; Koenker and Bassett 1978,
"Regression quantiles"). d is in the label's unit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final, Self

import numpy as np

from tp_flower.arrays import FloatArray, mean
from tp_flower.objectives.metrics import number_metrics
from tp_flower.objectives.objective import rising_root
from tp_flower.objectives.response import IDENTITY, NumberResponse
from tp_flower.objectives.squared import NumberObjective

LEAST_SHARE: Final = 1e-9  # of rows with a small residual, where there is none


@dataclass(frozen=True)
class QuantileResponse(NumberResponse):
    """A quantile, whose model is measured by its pinball loss."""

    headline: ClassVar[str] = "pinball"


class Huber(NumberObjective):
    """1/2 r^2 of small residuals r = h - y, and d |r| - 1/2 d^2 beyond d.

    >>> from tp_flower.objectives import Target
    >>> objective = Huber(Target.of(np.array([0.0, 0.0])))
    >>> objective.gradient(np.array([[0.5], [-8.0]])).tolist()
    [[0.5], [-1.0]]
    """

    name = "huber"
    max_curvature = 1.0
    parameter = 1.0
    parameter_range = (0.0, float("inf"))

    def base_scores(self) -> FloatArray:
        """Return the best constant, where the residuals' cut sum is 0."""

        def slope(base: FloatArray) -> tuple[FloatArray, FloatArray]:
            scores = np.broadcast_to(base, (len(self), 1))
            share = mean(self.hessian(scores), self.weights)
            return mean(self.gradient(scores), self.weights), share + LEAST_SHARE

        y = self.target.columns
        return rising_root(slope, y.min(axis=0), y.max(axis=0), np.median(y, axis=0))

    def row_values(self, scores: FloatArray) -> FloatArray:
        """Return 1/2 c^2 + d (|r| - c), c the residual's part up to d."""
        size = np.abs(scores[:, 0] - self.target.numbers)
        inner = np.minimum(size, self.parameter)
        values: FloatArray = 0.5 * inner * inner + self.parameter * (size - inner)
        return values

    def gradient(self, scores: FloatArray) -> FloatArray:
        """Return the residual, cut to [-d, d]."""
        residuals = scores - self.target.columns
        return np.clip(residuals, -self.parameter, self.parameter)

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return 1 of residuals up to d, else 0."""
        is_inner = np.abs(scores - self.target.columns) <= self.parameter
        return is_inner.astype(np.float64)

    def tree_hessian(self, scores: FloatArray) -> FloatArray:
        """Return 1, as LightGBM's: a leaf of outliers alone takes no endless step."""
        return np.ones_like(scores)

    def curvature(self, base: FloatArray) -> float:
        """Return the share of rows within d of a constant; 1 without labels."""
        if not (self.target.has_label and len(self)):
            return 1.0
        scores = np.broadcast_to(base, (len(self), 1))
        share = float(mean(self.hessian(scores)[:, 0], self.weights))
        return max(share, 1.0 / len(self))

    def prox_block(
        self, centre: FloatArray, rho: float, _start: FloatArray
    ) -> FloatArray:
        """Return v, moved by r / (1 + rho) towards the label, by d / rho at most."""
        steps = (centre - self.target.columns) / (1.0 + rho)
        return centre - np.clip(steps, -self.parameter / rho, self.parameter / rho)

    def gradient_scale(self, reach: float) -> float:
        """Return the largest derivative: d, or less if all labels are near."""
        return min(self.parameter, self.deviation * reach)

    def measure(self, scores: FloatArray, _value: float) -> dict[str, float]:
        """Return RMSE, R2 and MAE: what outliers weigh is seen by comparing them."""
        labels = self.target.numbers
        residuals = scores[:, 0] - labels
        half_mse = 0.5 * float(mean(residuals**2, self.weights))
        return {
            **number_metrics(half_mse, labels, None, self.weights),
            "mae": float(mean(np.abs(residuals), self.weights)),
        }


class Quantile(NumberObjective):
    """max(q (y - h), (q - 1) (y - h)): the score below which a share q of labels is.

    >>> from tp_flower.objectives import Target
    >>> upper = Quantile.of_parameter(0.9)(Target.of(np.array([0.0, 0.0])))
    >>> upper.gradient(np.array([[0.5], [-8.0]])).round(1).tolist()
    [[0.1], [-0.9]]
    """

    name = "quantile"
    has_curvature = False
    parameter = 0.5
    parameter_range = (0.0, 1.0)

    @classmethod
    def make_response(cls, classes: tuple[str, ...], kind: str) -> QuantileResponse:
        """Return the score as it is."""
        return QuantileResponse(cls.name, 1, classes, kind, link=IDENTITY)

    def base_scores(self) -> FloatArray:
        """Return the quantile of the labels: the least that reaches the share q."""
        order = np.argsort(self.target.numbers, kind="stable")
        weights = np.ones(len(self)) if self.weights is None else self.weights[order]
        reached = np.cumsum(weights) >= self.parameter * weights.sum()
        return self.target.numbers[order[[int(np.argmax(reached))]]]

    def row_values(self, scores: FloatArray) -> FloatArray:
        """Return q (y - h) of labels above the score, (1 - q) (h - y) below it."""
        q = self.parameter
        residuals = self.target.numbers - scores[:, 0]
        return np.maximum(q * residuals, (q - 1.0) * residuals)

    def gradient(self, scores: FloatArray) -> FloatArray:
        """Return 1 - q above the label, -q below, and 0 at it."""
        residuals = scores - self.target.columns
        above = (residuals > 0.0) * (1.0 - self.parameter)
        values: FloatArray = above - (residuals < 0.0) * self.parameter
        return values

    @cached_property
    def width(self) -> float:
        """The deviation of the labels, also of those from which some were selected."""
        return self.deviation

    def on(self, vectors: Mapping[str, FloatArray]) -> Self:
        """Return the objective of other rows, as wide."""
        part = super().on(vectors)
        vars(part)["width"] = self.width
        return part

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return that of a parabola as wide as the labels: the loss itself has none."""
        return np.full_like(scores, 1.0 / self.width)

    def curvature(self, _base: FloatArray) -> float:
        """Return that of the same parabola."""
        return 1.0 / self.width

    def prox_block(
        self, centre: FloatArray, rho: float, _start: FloatArray
    ) -> FloatArray:
        """Return v moved towards the label, by q / rho or (1 - q) / rho at most."""
        residuals = self.target.columns - centre
        lowest = (self.parameter - 1.0) / rho
        highest = self.parameter / rho
        return centre + np.clip(residuals, lowest, highest)

    def prox_gradient(
        self, z: FloatArray, centre: FloatArray, rho: float
    ) -> FloatArray:
        """Return rho (v - z): at the label itself it may be any from -q to 1 - q."""
        return rho * (centre - z)

    def measure(self, scores: FloatArray, value: float) -> dict[str, float]:
        """Return the pinball loss, the share of labels up to the score, and the MAE."""
        y = self.target.numbers
        predicted = scores[:, 0]
        constant = self.value(np.broadcast_to(self.base_scores(), (len(self), 1)))
        return {
            "pinball": value,
            "d2": 1.0 - value / constant if constant else 0.0,
            "coverage": float(mean((y <= predicted).astype(float), self.weights)),
            "mae": float(mean(np.abs(predicted - y), self.weights)),
        }
