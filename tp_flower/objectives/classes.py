"""Classes: their response, and the soft labels that correct for noise.

A class that stays with probability p, and else is each other one with probability q,
stands for the soft label

    t = onehot(y~) + c (k onehot(y~) - 1),    c = q / (p - q)

whose mean over the noise is onehot(y), and whose entries sum to one. A loss of classes
is linear in the one-hot label, so that with t in its place it is unbiased.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from tp_flower.arrays import FloatArray, class_counts, effective_rows, mean
from tp_flower.objectives.comparison import (
    RankedRows,
    calibration,
    confusion,
    shares_by_tenth,
    threshold_curve,
)
from tp_flower.objectives.noise import ClassNoise
from tp_flower.objectives.objective import Objective
from tp_flower.objectives.response import Response
from tp_flower.objectives.target import Target

PROBABILITY: Final = "probability"


@dataclass(frozen=True, kw_only=True)
class ClassResponse(Response):
    """A class: the likeliest by the ``probabilities`` (N, k) of the scores."""

    headline: ClassVar[str] = "log_loss"
    ratio: ClassVar[str] = "odds ratio"
    probabilities: Callable[[FloatArray], FloatArray]

    def predict(self, scores: FloatArray) -> FloatArray:
        """Return the indices of the likeliest classes: of equals, the first one."""
        best = scores[:, 0] > 0.0 if self.outputs == 1 else scores.argmax(axis=1)
        return best.astype(np.float64)

    def comparable(self, scores: FloatArray) -> FloatArray:
        """Return the scores of two classes, else the indices of the likeliest."""
        return scores[:, 0].copy() if self.outputs == 1 else self.predict(scores)

    def details(self, scores: FloatArray) -> Mapping[str, FloatArray]:
        """Return the probability of every class."""
        columns = self.probabilities(scores).T
        names = (f"{PROBABILITY}.{name}" for name in self.classes)
        return dict(zip(names, columns, strict=True))

    def compare(
        self, predicted: FloatArray, actual: FloatArray, weights: FloatArray | None
    ) -> dict[str, object]:
        """Return how many rows of each class are predicted as each, as `confusion`.

        Of two classes also the mean probability and the share of the second, by tenth
        of the rows, as `deciles`; the `calibration` of the scores, and the `brier`
        score, the mean square of probability less label; and what is found above some
        thresholds, as `curve`.
        """
        if self.outputs > 1:
            return {"confusion": confusion(self.classes, predicted, actual)}
        scores = predicted[:, None]
        probabilities = self.probabilities(scores)[:, -1]
        brier = float(mean((probabilities - actual) ** 2, weights))
        ranked = RankedRows.of(probabilities, actual, weights)
        return {
            "confusion": confusion(self.classes, self.predict(scores), actual),
            "deciles": shares_by_tenth(ranked),
            "calibration": {"brier": brier, **calibration(predicted, actual, weights)},
            "curve": threshold_curve(ranked),
        }


def true_rates(
    target: Target, noise: ClassNoise, weights: FloatArray | None
) -> FloatArray:
    """Return the unbiased rates of classes, (k,), whose sum is about one.

    A rate below its own standard error is noise, and is raised to that error.
    """
    rows = len(target)
    counts = class_counts(target.numbers, noise.classes, weights)
    effective = rows if weights is None else effective_rows(weights)
    error = np.sqrt(noise.flip * (1.0 - noise.flip) / effective) / noise.contrast
    floor = min(max(error, 0.5 / rows), 1.0 / noise.classes)
    rates: FloatArray = np.maximum(noise.rate_of(counts / rows), floor)
    return rates


class ClassObjective(Objective):
    """A loss of classes, which corrects for noise that changes some of them."""

    noise_kind = ClassNoise

    @property
    def correction(self) -> float:
        """How far soft labels extend beyond [0, 1], c; 0 without noise."""
        if not isinstance(self.noise, ClassNoise):
            return 0.0
        return self.noise.correction

    def gradient_scale(self, _reach: float) -> float:
        """Return how far soft labels reach: (1 - q) / (p - q) under noise, else 1."""
        noise = self.target.noise
        if not isinstance(noise, ClassNoise):
            return 1.0
        return (1.0 - noise.flip) / noise.contrast
