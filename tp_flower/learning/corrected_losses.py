"""Losses of noisy labels that are unbiased for the losses of the true ones.

A site may change a class with known probabilities, p for staying and q for each other
one. The soft label

    t = (onehot(y~) - q) / (p - q) = onehot(y~) + c (k onehot(y~) - 1),  c = q / (p - q)

has onehot(y) as its mean over the noise, and sums to one. The losses of classes are
linear in it, log sum exp(h) - <t, h>, so that with t in place of the label the loss,
its gradient and so the minimiser of many rows are unbiased: the method of unbiased
estimators (Natarajan et al. 2013, "Learning with noisy labels") or backward correction
(Patrini et al. 2017). Curvature does not depend on the label: the corrected loss stays
convex, which for these losses backward correction is and forward correction is not.

What it costs: entries of t lie in [-c, 1 + (k - 1) c], so that gradients have that much
more variance, and on a single row the loss has no lower bound. Many rows and the
penalty bound it.

Laplace noise on a number changes neither gradient nor minimiser of the squared loss; it
adds half its variance, b^2, to the loss, which is taken off again.

Notation
    y~  ``labels``  (N,): as they came, class indices or numbers
    k   classes; d_c = k, or 1 for the logistic loss of two
    h   ``scores``  (N, d_c)
"""

from dataclasses import dataclass

import numpy as np

from tp_flower.arrays import FloatArray, class_counts, effective_rows
from tp_flower.learning.label_noise import ClassNoise, LabelNoise, NumberNoise
from tp_flower.learning.losses import LogisticLoss, Loss, SoftmaxLoss, SquaredLoss


def corrected(loss: Loss, noise: LabelNoise) -> Loss:
    """Return the loss of labels with this noise that is unbiased for the true ones.

    Raises:
        TypeError: the noise is not on labels of this loss's kind.

    >>> loss = corrected(LogisticLoss(), ClassNoise(2, 0.75))
    >>> loss.gradient(np.zeros((2, 1)), np.array([0.0, 1.0])).tolist()
    [[1.0], [-1.0]]
    """
    if isinstance(loss, SquaredLoss) and isinstance(noise, NumberNoise):
        return CorrectedSquaredLoss(plain=loss, noise=noise)
    is_of_classes = isinstance(loss, LogisticLoss | SoftmaxLoss)
    if not is_of_classes or not isinstance(noise, ClassNoise):
        raise TypeError(f"{type(noise).__name__} is no noise for {loss.name!r} labels")
    return CorrectedClassLoss(loss.outputs, plain=loss, noise=noise)


@dataclass(frozen=True, kw_only=True)
class _CorrectedLoss(Loss):
    """What of a loss the noise of its labels does not change.

    Attributes:
        plain: the loss that it is unbiased for.
    """

    plain: Loss

    @property
    def name(self) -> str:
        """The plain loss's."""
        return self.plain.name

    def curvature(self, base: FloatArray) -> float:
        """Return the plain loss's."""
        return self.plain.curvature(base)

    @property
    def max_curvature(self) -> float:
        """The plain loss's."""
        return self.plain.max_curvature


@dataclass(frozen=True, kw_only=True)
class CorrectedClassLoss(_CorrectedLoss):
    """A loss of classes at the soft labels t that noisy classes stand for.

    Attributes:
        noise: on the classes.
    """

    noise: ClassNoise

    def base_score(
        self, labels: FloatArray, weights: FloatArray | None = None
    ) -> FloatArray:
        """Return the scores of the classes' unbiased rates.

        A rate below its own standard error cannot be told from zero: it is set to that.
        """
        rows, noise = len(labels), self.noise
        counts = class_counts(labels, noise.classes, weights)
        sure = rows if weights is None else effective_rows(weights)
        error = np.sqrt(noise.flip * (1.0 - noise.flip) / sure) / noise.contrast
        floor = min(max(error, 0.5 / rows), 1.0 / noise.classes)
        rates = np.maximum(noise.rate_of(counts / rows), floor)
        scores: FloatArray = np.log(rates / rates.sum())
        return scores if self.outputs > 1 else scores[1:] - scores[:1]

    def row_values(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return the loss at the soft label, which may be negative."""
        beyond: FloatArray = (self._beyond(labels) * scores).sum(axis=1)
        return self.plain.row_values(scores, labels) - beyond

    def gradient(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return softmax(h) - t, or sigmoid(h) - t."""
        return self.plain.gradient(scores, labels) - self._beyond(labels)

    def _prox_block(
        self, centre: FloatArray, labels: FloatArray, rho: float, start: FloatArray
    ) -> FloatArray:
        """Move what is linear in z into the centre: v + (t - onehot(y~)) / rho."""
        moved = self._beyond(labels)
        moved /= rho
        moved += centre
        return self.plain._prox_block(moved, labels, rho, start)  # noqa: SLF001

    def _beyond(self, labels: FloatArray) -> FloatArray:
        """Return t - onehot(y~) = c (k onehot(y~) - 1), (N, d_c); sums to zero."""
        c, k = self.noise.correction, self.noise.classes
        if self.outputs == 1:
            signs: FloatArray = 2.0 * labels[:, None] - 1.0
            return c * signs
        out = np.full((len(labels), self.outputs), -c)
        out[np.arange(len(labels)), labels.astype(np.intp)] = (k - 1) * c
        return out


@dataclass(frozen=True, kw_only=True)
class CorrectedSquaredLoss(_CorrectedLoss):
    """1/2 (h - y~)^2 - b^2, whose mean over the noise is 1/2 (h - y)^2.

    Attributes:
        plain: the squared loss.
        noise: on the numbers.
    """

    plain: SquaredLoss
    noise: NumberNoise

    def base_score(
        self, labels: FloatArray, weights: FloatArray | None = None
    ) -> FloatArray:
        """Return the mean label."""
        return self.plain.base_score(labels, weights)

    def row_values(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return 1/2 (h - y~)^2 - b^2, which may be negative."""
        return self.plain.row_values(scores, labels) - 0.5 * self.noise.variance

    def gradient(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return h - y~."""
        return self.plain.gradient(scores, labels)

    def _prox_block(
        self, centre: FloatArray, labels: FloatArray, rho: float, start: FloatArray
    ) -> FloatArray:
        return self.plain._prox_block(centre, labels, rho, start)  # noqa: SLF001
