"""Noise on labels of a known size, for which objectives and metrics correct.

Notation
    k   ``classes``, at least 2
    p   ``keep``: probability that a class stays unchanged
    q   ``flip`` = (1 - p) / (k - 1): that it becomes one particular other class
    b   ``scale`` of Laplace noise, whose deviation is sqrt(2) b
"""

import math
from dataclasses import dataclass
from typing import TypeVar

from tp_flower.arrays import FloatArray

Rates = TypeVar("Rates", float, FloatArray)


@dataclass(frozen=True)
class ClassNoise:
    """A class stays with probability ``keep``, above 1/k; the others are alike.

    >>> noise = ClassNoise(2, 0.75)
    >>> noise.flip, noise.correction
    (0.25, 0.5)
    """

    classes: int
    keep: float

    @property
    def flip(self) -> float:
        """The probability q of one particular other class."""
        return (1.0 - self.keep) / (self.classes - 1)

    @property
    def contrast(self) -> float:
        """How strongly a noisy class indicates the true one: p - q."""
        return self.keep - self.flip

    @property
    def correction(self) -> float:
        """How far an unbiased soft label extends beyond [0, 1]: c = q / (p - q)."""
        return self.flip / self.contrast

    @property
    def epsilon(self) -> float:
        """ln(p / q), the epsilon of these probabilities."""
        if self.flip:
            return math.log(self.keep / self.flip)
        return math.inf

    def rate_of(self, noisy: Rates) -> Rates:
        """Return unbiased rates of classes from the rates of noisy ones, any shape.

        They may leave [0, 1], as unbiased estimates near its ends must.
        """
        return (noisy - self.flip) / self.contrast


@dataclass(frozen=True)
class NumberNoise:
    """Laplace noise of scale b on a number."""

    scale: float

    @property
    def variance(self) -> float:
        """2 b^2."""
        return 2.0 * self.scale * self.scale


LabelNoise = ClassNoise | NumberNoise
