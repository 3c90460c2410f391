"""The logistic loss of two classes.

    loss(h; t) = log(1 + exp(h)) - t h

with t in {0, 1}, or the soft label of a noisy class (:mod:`.classes`).
"""

import numpy as np

from tp_flower.arrays import AnyFloat, FloatArray, mean
from tp_flower.objectives.classes import ClassObjective, ClassResponse, true_rates
from tp_flower.objectives.metrics import class_metrics
from tp_flower.objectives.noise import ClassNoise
from tp_flower.objectives.objective import MAX_PROX_STEPS
from tp_flower.objectives.response import CLASSES

ROUGH_STEPS = 2  # newton steps in float32, at less than half of the time
SMALL_STEP = 2e-4  # in z/2: leaves |gradient| <= 0.0481 (2 * 2e-4)^2 < 8e-9


def sigmoid(scores: FloatArray) -> FloatArray:
    """Return 1 / (1 + exp(-h)) without overflow, as (1 + tanh(h/2)) / 2.

    >>> sigmoid(np.array([0.0, -1000.0])).tolist()
    [0.5, 0.0]
    """
    out = np.tanh(0.5 * scores)
    out += 1.0
    out *= 0.5
    return out


def two_probabilities(scores: FloatArray) -> FloatArray:
    """Return the probabilities of both classes, (N, 2).

    >>> two_probabilities(np.array([[0.0]])).tolist()
    [[0.5, 0.5]]
    """
    return np.column_stack([sigmoid(-scores[:, 0]), sigmoid(scores[:, 0])])


class Logistic(ClassObjective):
    """log(1 + exp(h)) - t h, for two classes.

    >>> from tp_flower.objectives import Target
    >>> noisy = Target.of(np.array([0.0, 1.0]), ("no", "yes"))
    >>> objective = Logistic(noisy, noise=ClassNoise(2, 0.75))
    >>> objective.gradient(np.zeros((2, 1))).tolist()
    [[1.0], [-1.0]]
    """

    name = "logistic"
    class_counts = range(2, 3)
    has_likelihood = True
    dispersion_is_known = True
    max_curvature = 0.25

    @classmethod
    def make_response(cls, classes: tuple[str, ...], kind: str) -> ClassResponse:
        """Return the class on whose side of 0 the score is."""
        return ClassResponse(
            *(cls.name, 1, classes, kind),
            link=CLASSES,
            probabilities=two_probabilities,
        )

    @property
    def labels(self) -> FloatArray:
        """The soft labels t, (N, 1); 0 or 1 without noise."""
        labels = self.target.columns
        if self.noise is None:
            return labels
        return labels + self.correction * (2.0 * labels - 1.0)

    def base_scores(self) -> FloatArray:
        """Return the log-odds of the labels."""
        if isinstance(self.noise, ClassNoise):
            rates = true_rates(self.target, self.noise, self.weights)
            return np.log(rates[1:]) - np.log(rates[:1])
        rate = mean(self.target.numbers, self.weights)
        return np.array([np.log(rate / (1.0 - rate))])

    def row_values(self, scores: FloatArray) -> FloatArray:
        """Return log(1 + exp(h)) - t h, which may be negative with noise."""
        score = scores[:, 0]
        labels = self.labels[:, 0]
        values: FloatArray = np.log1p(np.exp(-np.abs(score)))
        values += np.maximum(score, 0.0)
        values -= labels * score
        return values

    def gradient(self, scores: FloatArray) -> FloatArray:
        """Return sigmoid(h) - t."""
        return sigmoid(scores) - self.labels

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return p (1 - p)."""
        rates = sigmoid(scores)
        return rates * (1.0 - rates)

    def curvature(self, base: FloatArray) -> float:
        """Return p (1 - p)."""
        rate = float(sigmoid(base)[0])
        return rate * (1.0 - rate)

    def measure(self, scores: FloatArray, value: float) -> dict[str, float]:
        """Return the log loss, the AUC and the accuracy."""
        return {"log_loss": value, **class_metrics(self, scores, scores, [1])}

    def prox_block(
        self, centre: FloatArray, rho: float, start: FloatArray
    ) -> FloatArray:
        """Run Newton from the left, where it approaches the root monotonically.

        With u = z/2 and k = 2 (t + rho v) - 1 the gradient is zero where
        4 rho u + tanh(u) = k. That is odd: solve it for w = |u| and |k|. On w >= 0 the
        left side is concave, so a step from anywhere lands left of the root, and steps
        from there do not pass it; undamped Newton in z diverges for small rho. After a
        step |gradient| <= max|s''| / 2 * (step in z)^2, so that a small one needs no
        further check. The first steps are in float32, at a third of the time.
        """
        k = rho * centre[:, 0]
        k += self.labels[:, 0]
        k *= 2.0
        k -= 1.0
        size = np.abs(k)
        # tanh < 1 bounds the root from below
        low = np.maximum((size - 1.0) / (4.0 * rho), 0.0)
        w = np.maximum(np.copysign(0.5, k) * start[:, 0], low)
        rough = w.astype(np.float32)
        near = size.astype(np.float32)
        least = low.astype(np.float32)
        for _ in range(ROUGH_STEPS):
            _logistic_step(rough, near, least, rho)
        w = np.maximum(rough, low)
        for _ in range(MAX_PROX_STEPS):
            step = _logistic_step(w, size, low, rho)
            if max(step.max(initial=0.0), -step.min(initial=0.0)) <= SMALL_STEP:
                break
        w *= 2.0
        return np.copysign(w, k)[:, None]


def _logistic_step(w: AnyFloat, size: AnyFloat, low: AnyFloat, rho: float) -> AnyFloat:
    """Take a Newton step of 4 rho w + tanh(w) = size in place; return it."""
    slope = np.tanh(w)
    step = 4.0 * rho * w
    step += slope
    step -= size
    slope *= slope
    np.subtract(1.0 + 4.0 * rho, slope, out=slope)
    step /= slope
    w -= step
    np.maximum(w, low, out=w)
    return step
