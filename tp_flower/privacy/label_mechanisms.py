"""Mechanisms that put noise on labels: distributions, and how often a class changes.

Two mechanisms are for k classes, and one is for numbers. Each is epsilon-differentially
private for a single label (local privacy): whatever else is known, no released label is
more than e^epsilon times as likely under one true value as under another.

*Randomised response* keeps the class with probability p = e^eps / (e^eps + k - 1) and
otherwise draws another one uniformly. No mechanism of the same epsilon keeps it more
often (Kairouz et al. 2014, "Extremal mechanisms for local differential privacy").

*Laplace and argmax* (TablePuppet, Eq. 25): Laplace noise of deviation lambda, scale b =
lambda / sqrt 2, is added to the one-hot vector, and its largest entry is the class. Two
one-hot vectors are 2 apart, so that eps = 2 / b = 2 sqrt 2 / lambda. Only the argmax
leaves: this, too, is a randomised response, with the smaller epsilon ln(p / q).

*Laplace on a clipped number*: eps = (high - low) / b.

Notation
    k   ``classes``, at least 2
    p   ``keep``: probability that a class stays unchanged
    q   ``flip`` = (1 - p) / (k - 1): that it becomes one particular other class
    b   ``scale`` of Laplace noise, whose deviation is sqrt(2) b
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray, blocks
from tp_flower.errors import SettingsError
from tp_flower.objectives import (
    LARGEST_LABEL,
    MAX_CLASSES,
    ClassNoise,
    LabelNoise,
    NumberNoise,
)
from tp_flower.protocol.fields import LAPLACE, RANDOMISED_RESPONSE
from tp_flower.randomness import NoiseSource

CodeArray = npt.NDArray[np.intp]

MIN_EPSILON: Final = 1e-3  # below it no number of rows could recover labels
MAX_EPSILON: Final = 100.0  # above it no class ever changes
NOISE_VALUES: Final = 1 << 20  # numbers drawn at a time


@dataclass(frozen=True)
class LabelPlan:
    """The mechanism for a run's private labels; ``LabelTerms`` has it in messages.

    The list of classes is itself information about the data: the query's author names
    them in numerical order; none for booleans, and in regression. ``limits`` are the
    (low, high) that numbers are clipped to; empty for classes.
    """

    mechanism: str
    epsilon: float
    classes: tuple[str, ...] = ()
    limits: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.mechanism not in (LAPLACE, RANDOMISED_RESPONSE):
            raise SettingsError(f"{self.mechanism!r} is not a mechanism for labels")
        if not MIN_EPSILON <= self.epsilon <= MAX_EPSILON:
            raise SettingsError(
                f"epsilon of a label must be from {MIN_EPSILON:g} to {MAX_EPSILON:g}, "
                f"not {self.epsilon!r}"
            )
        distinct = len(set(self.classes))
        if self.classes and not 2 <= distinct == len(self.classes) <= MAX_CLASSES:
            raise SettingsError(
                f"private labels need from 2 to {MAX_CLASSES} different "
                f"classes, not {len(self.classes)} ({distinct} different)"
            )
        if self.limits:
            self._check_limits()

    @property
    def kind(self) -> str:
        """The type of the labels that leave."""
        if self.limits:
            return "number"
        return "text" if self.classes else "boolean"

    @property
    def class_count(self) -> int:
        """k; 0 in regression."""
        if self.limits:
            return 0
        return len(self.classes) or 2

    @property
    def scale(self) -> float:
        """The Laplace noise's scale b."""
        width = 2.0
        if self.limits:
            width = self.limits[1] - self.limits[0]
        return width / self.epsilon

    @property
    def noise(self) -> LabelNoise:
        """The noise that the mechanism puts on a label."""
        if self.limits:
            return NumberNoise(self.scale)
        keep = laplace_keep if self.mechanism == LAPLACE else response_keep
        return ClassNoise(self.class_count, keep(self.class_count, self.epsilon))

    def draw_classes(self, codes: CodeArray, source: NoiseSource) -> CodeArray:
        """Return noisy classes for codes (n,), from 0 to k - 1."""
        draw = noisy_argmax if self.mechanism == LAPLACE else randomised_response
        return draw(codes, self.class_count, self.epsilon, source)

    def draw_numbers(self, values: FloatArray, source: NoiseSource) -> FloatArray:
        """Return numbers (n,), clipped to the limits, with noise."""
        low, high = self.limits
        return source.with_laplace(np.clip(values, low, high), self.scale)

    def _check_limits(self) -> None:
        """Refuse limits that are no range, or that noise on numbers cannot use."""
        is_range = len(self.limits) == 2 and self.limits[0] < self.limits[1]
        if not is_range or max(map(abs, self.limits)) > LARGEST_LABEL:
            raise SettingsError(f"{list(self.limits)} is not a range of labels")
        if self.classes:
            raise SettingsError("a label has classes or a range, not both")
        if self.mechanism != LAPLACE:
            raise SettingsError(f"{self.mechanism} is for classes: use {LAPLACE}")


def epsilon_of_noise(deviation: float, limits: Sequence[float] = ()) -> float:
    """Return the epsilon of Laplace noise of a deviation lambda (Eq. 25).

    The noise is on every entry of the one-hot vector, or on a number within limits.

    >>> round(epsilon_of_noise(0.5), 3)
    5.657
    """
    width = limits[1] - limits[0] if limits else 2.0
    return width * math.sqrt(2.0) / deviation


def response_keep(classes: int, epsilon: float) -> float:
    """Return the probability p that randomised response keeps a class.

    >>> round(response_keep(2, math.log(3.0)), 12)
    0.75
    """
    return 1.0 / (1.0 + (classes - 1) * math.exp(-epsilon))


def laplace_keep(classes: int, epsilon: float) -> float:
    """Return p of Laplace noise on the one-hot vector, and argmax.

    With F the distribution and f the density of the noise, it is the integral of f(x)
    F(1 + x)^(k - 1). With s = e^(-1/b) / 2 and 1/b = eps/2, the parts below -1 and
    above 0 are s 2^(1-k) / k and (1 - (1 - s)^k) / (2 k s); the part in between, with x
    = -b t, is the integral of e^-t (1 - s e^t)^(k - 1) / 2 from 0 to 1/b. For two
    classes that adds up to 1 - s (1 + eps / 4).

    >>> round(laplace_keep(2, 2.0), 12) == round(1.0 - 0.75 * math.exp(-1.0), 12)
    True
    """
    end = epsilon / 2.0
    s = 0.5 * math.exp(-end)
    below = s * 2.0 ** (1 - classes) / classes
    above = -math.expm1(classes * math.log1p(-s)) / (2.0 * classes * s)
    # the integrand varies over lengths of 1, where 20 nodes are exact up to rounding
    edges = np.linspace(0.0, end, math.ceil(end) + 1)
    nodes, weights = np.polynomial.legendre.leggauss(20)
    half = 0.5 * np.diff(edges)[:, None]
    t = edges[:-1, None] + half * (1.0 + nodes)
    inside = np.exp(-t + (classes - 1) * np.log1p(-0.5 * np.exp(t - end)))
    between = 0.5 * float((half * weights * inside).sum())
    return below + between + above


def randomised_response(
    codes: CodeArray, classes: int, epsilon: float, source: NoiseSource
) -> CodeArray:
    """Return classes (n,), each kept or replaced by a uniformly drawn other one."""
    is_kept = source.uniform(len(codes)) < response_keep(classes, epsilon)
    steps = 1 + (source.uniform(len(codes)) * (classes - 1)).astype(np.intp)
    # a product that rounds up to k - 1 would be no change at all
    steps = np.minimum(steps, classes - 1)
    return np.where(is_kept, codes, (codes + steps) % classes)


def noisy_argmax(
    codes: CodeArray, classes: int, epsilon: float, source: NoiseSource
) -> CodeArray:
    """Return the largest entry (n,) of each one-hot vector with Laplace noise."""
    out = np.empty_like(codes)
    one_hot = np.eye(classes)
    for block in blocks(len(codes), max(NOISE_VALUES // classes, 1)):
        out[block] = source.with_laplace(one_hot[codes[block]], 2.0 / epsilon).argmax(
            axis=1
        )
    return out
