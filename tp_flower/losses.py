"""Losses over joined rows: value, gradient and proximal step.

Notation:
    h  ``scores``  (N, d_c): summed predictions of all tables on each joined row
    y  ``labels``  (N,): float64; the class index for classification
    z  ``(N, d_c)``: ADMM's auxiliary variable
    v  ``centre``  (N, d_c): h + duals / rho
    p  probabilities of the classes, (N, k); in the softmax's steps (k, N): with the
       classes first in memory, every operation runs along the rows
    c  v + onehot(y) / rho, so that softmax's proximal step solves p + rho (z - c) = 0

All rows are handled at once, in blocks that stay in the processor's cache. The z-update
of the paper (Eq. 7) is ``prox`` at ``v = h + duals / rho``; its section 8 asks for the
closed or Newton forms used here in place of 100 gradient steps.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import BoolArray, FloatArray, blocks, class_counts, mean

AnyFloat = npt.NDArray[np.floating[Any]]

ROUGH_STEPS = 2  # newton steps in float32, at less than half of the time
PROX_TOLERANCE = 1e-9
SMALL_STEP = 2e-4  # in z/2: leaves |gradient| <= 0.0481 (2 * 2e-4)^2 < 8e-9
MAX_PROX_STEPS = 200
NEAR_STEPS = 12  # of whole blocks; other rows are solved for one number each
SMALL_RANGE = 2.5e-4  # of softmax's last step: leaves |gradient| <= 7.9e-9
WHOLE_STEP = 1.0  # newton steps of at most this range are taken whole
SOFTMAX_ROWS = 4096  # rows whose few arrays of k classes stay in a core's cache
MAX_CLASSES = 1000
LARGEST_LABEL = 1e18  # sites compute with float32, the server with squares of residuals


@dataclass(frozen=True)
class Loss(ABC):
    """A loss of scores (N, d_c) against labels (N,); convex, where it is trained by.

    One that only evaluates has no gradient, curvature and proximal step.
    """

    class_counts: ClassVar[range]  # of its labels; 0 if they are numbers

    outputs: int = 1

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the settings and the report."""

    @property
    def is_regression(self) -> bool:
        """The labels are numbers, not classes."""
        return 0 in self.class_counts

    @abstractmethod
    def base_score(
        self, labels: FloatArray, weights: FloatArray | None = None
    ) -> FloatArray:
        """Return the best constant score b, (d_c,), of labels (N,) and weights."""

    @abstractmethod
    def row_values(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return the loss of every row, (N,)."""

    def gradient(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return d loss / d scores (Eq. 4), (N, d_c)."""
        raise NotImplementedError

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return the diagonal of the Hessian of every row, (N, d_c)."""
        raise NotImplementedError

    def curvature(self, base: FloatArray) -> float:
        """Return the mean diagonal of the Hessian at a constant score."""
        raise NotImplementedError

    @property
    def max_curvature(self) -> float:
        """An upper bound of the Hessian's largest eigenvalue."""
        raise NotImplementedError

    def _prox_block(
        self, centre: FloatArray, labels: FloatArray, rho: float, start: FloatArray
    ) -> FloatArray:
        raise NotImplementedError

    def value(
        self, scores: FloatArray, labels: FloatArray, weights: FloatArray | None = None
    ) -> float:
        """Return the mean loss over the rows, weighted by ``weights`` (N,) if given."""
        total = 0.0
        for block in blocks(len(labels)):
            values = self.row_values(scores[block], labels[block])
            total += float(values.sum() if weights is None else weights[block] @ values)
        return total / (len(labels) if weights is None else float(weights.sum()))

    def prox(
        self,
        centre: FloatArray,
        labels: FloatArray,
        rho: float,
        start: FloatArray | None = None,
    ) -> FloatArray:
        """Return argmin_z loss(z; y) + rho/2 ||z - v||^2 for every row (Eq. 7).

        Newton starts at ``start``, or v, and ends with |gradient| <= 1e-8 in every
        coordinate of z, (N, d_c).
        """
        start = centre if start is None else start
        out = np.empty_like(centre)
        for block in blocks(len(labels)):
            out[block] = self._prox_block(
                centre[block], labels[block], rho, start[block]
            )
        return out


@dataclass(frozen=True)
class SquaredLoss(Loss):
    """1/2 (h - y)^2, for regression.

    >>> SquaredLoss().prox(np.array([[0.0]]), np.array([3.0]), rho=2.0)
    array([[1.]])
    """

    name = "squared"
    class_counts = range(1)
    max_curvature = 1.0

    def base_score(
        self, labels: FloatArray, weights: FloatArray | None = None
    ) -> FloatArray:
        """Return the mean label."""
        return np.array([mean(labels, weights)])

    def row_values(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return 1/2 (h - y)^2."""
        residual = scores[:, 0] - labels
        return 0.5 * residual * residual

    def gradient(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return h - y."""
        return scores - labels[:, None]

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return 1."""
        return np.ones_like(scores)

    def curvature(self, _base: FloatArray) -> float:
        """Return 1."""
        return 1.0

    def _prox_block(
        self, centre: FloatArray, labels: FloatArray, rho: float, _start: FloatArray
    ) -> FloatArray:
        return (labels[:, None] + rho * centre) / (1.0 + rho)


def sigmoid(scores: FloatArray) -> FloatArray:
    """Return 1 / (1 + exp(-h)) without overflow, as (1 + tanh(h/2)) / 2.

    >>> sigmoid(np.array([0.0, -1000.0])).tolist()
    [0.5, 0.0]
    """
    out = np.tanh(0.5 * scores)
    out += 1.0
    out *= 0.5
    return out


@dataclass(frozen=True)
class LogisticLoss(Loss):
    """log(1 + exp(h)) - y h with y in {0, 1}, for two classes."""

    name = "logistic"
    class_counts = range(2, 3)
    max_curvature = 0.25

    def base_score(
        self, labels: FloatArray, weights: FloatArray | None = None
    ) -> FloatArray:
        """Return the log-odds of the labels."""
        rate = mean(labels, weights)
        return np.array([np.log(rate / (1.0 - rate))])

    def row_values(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return log(1 + exp(h)) - y h."""
        score = scores[:, 0]
        return (
            np.log1p(np.exp(-np.abs(score))) + np.maximum(score, 0.0) - labels * score
        )

    def gradient(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return sigmoid(h) - y."""
        return sigmoid(scores) - labels[:, None]

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return p (1 - p)."""
        rates = sigmoid(scores)
        return rates * (1.0 - rates)

    def curvature(self, base: FloatArray) -> float:
        """Return p (1 - p)."""
        rate = float(sigmoid(base)[0])
        return rate * (1.0 - rate)

    def _prox_block(
        self, centre: FloatArray, labels: FloatArray, rho: float, start: FloatArray
    ) -> FloatArray:
        """Run Newton from the left, where it approaches the root monotonically.

        With u = z/2 and k = 2 (y + rho v) - 1 the gradient is zero where
        4 rho u + tanh(u) = k. That is odd: solve it for w = |u| and |k|. On w >= 0 the
        left side is concave, so a step from anywhere lands left of the root, and steps
        from there do not pass it; undamped Newton in z diverges for small rho. After a
        step |gradient| <= max|s''| / 2 * (step in z)^2, so that a small one needs no
        further check. The first steps are in float32, at a third of the time.
        """
        k = rho * centre[:, 0]
        k += labels
        k *= 2.0
        k -= 1.0
        size = np.abs(k)
        # tanh < 1 bounds the root from below
        low = np.maximum((size - 1.0) / (4.0 * rho), 0.0)
        w = np.maximum(np.copysign(0.5, k) * start[:, 0], low)
        rough, near, least = (a.astype(np.float32) for a in (w, size, low))
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


def softmax(scores: FloatArray) -> FloatArray:
    """Return exp(h) / sum exp(h) along the last axis, (N, k)."""
    out, _ = _shifted_exp(scores)
    out /= out.sum(axis=0)
    return out.T


def _shifted_exp(scores: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return exp(h - max h), (k, N), and the maxima, (N,)."""
    out = np.array(scores.T, order="C")
    top: FloatArray = out.max(axis=0)
    out -= top
    np.exp(out, out=out)
    return out, top


def softmax_prox(
    centre: FloatArray, labels: FloatArray, rho: float, start: FloatArray
) -> tuple[FloatArray, BoolArray]:
    """Return argmin_z log sum exp(z) - z_y + rho/2 ||z - v||^2 for every row.

    With H = diag(p) - p p^T + rho I Newton's step is s = H^-1 gradient, by
    Sherman-Morrison. Along s the objective's third derivative is at most
    r = max s - min s times its second, so that a step of length
    min(1, log(1 + r) / r) lowers it (Sun and Tran-Dinh 2019, generalised
    self-concordance of order 2; a whole step does so while (e^r - r - 1) / r^2 < 1,
    that is r < 1.79). After a whole step |gradient| <= r^2 / 8: no further pass has to
    look. Return also which rows, (n,), need more than ``NEAR_STEPS``: they start far
    from where they end.
    """
    z = np.empty_like(centre)
    is_open = np.zeros(len(labels), np.bool_)
    for block in blocks(len(labels), SOFTMAX_ROWS):
        c = np.array(centre[block].T, order="C")
        c[labels[block].astype(np.intp), np.arange(c.shape[1])] += 1.0 / rho
        # z = c - p / rho, and p is from 0 to 1
        near = np.clip(start[block].T, c - 1.0 / rho, c)
        rough, rough_c = near.astype(np.float32), c.astype(np.float32)
        for _ in range(ROUGH_STEPS):
            _softmax_step(rough, rough_c, rho)
        fine = rough.astype(np.float64)
        for _ in range(NEAR_STEPS):
            is_open[block] = _softmax_step(fine, c, rho) > SMALL_RANGE
            if not is_open[block].any():
                break
        z[block] = fine.T
    return z, is_open


def _softmax_step(z: AnyFloat, c: AnyFloat, rho: float) -> AnyFloat:
    """Take a damped Newton step of p + rho (z - c) = 0 in place, z and c (k, n).

    Return the range of every row's whole step, (n,).
    """
    p = z - z.max(axis=0)
    np.exp(p, out=p)
    p /= p.sum(axis=0)
    step: AnyFloat = z - c
    step *= rho
    step += p
    shifted = p + rho
    step /= shifted
    q = p / shifted
    p *= step
    # 1 - sum p^2 / (p + rho) = rho sum q without cancellation, since sum p = 1
    scale = p.sum(axis=0)
    scale /= rho * q.sum(axis=0)
    q *= scale
    step += q
    ranges: AnyFloat = step.max(axis=0)
    ranges -= step.min(axis=0)
    is_far = ranges > WHOLE_STEP
    if is_far.any():
        step[:, is_far] *= np.log1p(ranges[is_far]) / ranges[is_far]
    z -= step
    return ranges


def _far_softmax_prox(centre: FloatArray, labels: FloatArray, rho: float) -> FloatArray:
    """Return the same z, however far it is; Newton on near rows is faster.

    With t = log sum exp(z) and w = p / rho the condition is w + log w = c - t - log rho
    for each class: w is Wright's omega function of the right side. Then t is the root
    of sum w = 1 / rho, whose left side is convex and falls: Newton ascends to it from
    the t at which one class alone adds up to 1 / rho. |gradient| <= |rho sum w - 1|.
    """
    # few runs have such rows, and scipy takes a sixth of a second to import
    from scipy.special import wrightomega

    z, c = centre, centre.copy()
    c[np.arange(len(labels)), labels.astype(np.intp)] += 1.0 / rho
    t = c.max(axis=1) - 1.0 / rho
    for _ in range(MAX_PROX_STEPS):
        w = wrightomega(c - np.log(rho) - t[:, None])
        z = c - w
        excess = w.sum(axis=1) - 1.0 / rho
        if np.abs(rho * excess).max() <= PROX_TOLERANCE:
            break
        t += excess / (w / (1.0 + w)).sum(axis=1)
    return z


@dataclass(frozen=True)
class SoftmaxLoss(Loss):
    """log sum_k exp(h_k) - h_y with y in 0 .. outputs - 1, for several classes."""

    name = "softmax"
    class_counts = range(2, MAX_CLASSES + 1)
    max_curvature = 0.5  # the largest eigenvalue that diag(p) - p p^T can have

    def base_score(
        self, labels: FloatArray, weights: FloatArray | None = None
    ) -> FloatArray:
        """Return the log class frequencies."""
        return np.log(
            np.maximum(class_counts(labels, self.outputs, weights), 0.5) / len(labels)
        )

    def row_values(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return log sum exp(h) - h_y."""
        out, top = _shifted_exp(scores)
        values: FloatArray = np.log(out.sum(axis=0))
        values += top
        values -= scores[np.arange(len(labels)), labels.astype(np.intp)]
        return values

    def gradient(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return softmax(h) - onehot(y)."""
        out = softmax(scores)
        out[np.arange(len(labels)), labels.astype(np.intp)] -= 1.0
        return out

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return p_k (1 - p_k)."""
        rates = softmax(scores)
        return rates * (1.0 - rates)

    def curvature(self, base: FloatArray) -> float:
        """Return the mean of p_k (1 - p_k)."""
        rates = softmax(base[None, :])[0]
        return float((rates * (1.0 - rates)).mean())

    def _prox_block(
        self, centre: FloatArray, labels: FloatArray, rho: float, start: FloatArray
    ) -> FloatArray:
        """Run Newton on whole blocks, then solve for the rows that it left open."""
        z, is_open = softmax_prox(centre, labels, float(rho), start)
        if is_open.any():
            z[is_open] = _far_softmax_prox(centre[is_open], labels[is_open], rho)
        return z


KMEANS = "kmeans"


@dataclass(frozen=True)
class KMeansLoss(Loss):
    """min_k h_k of squared distances h (N, k); it takes no labels.

    >>> KMeansLoss(2).row_values(np.array([[4.0, 1.0]]), np.zeros(1)).tolist()
    [1.0]
    """

    name = KMEANS
    class_counts = range(1, 1 << 31)

    def base_score(
        self, _labels: FloatArray, _weights: FloatArray | None = None
    ) -> FloatArray:
        """Return zeros: distances have no offset."""
        return np.zeros(self.outputs)

    def row_values(self, scores: FloatArray, _labels: FloatArray) -> FloatArray:
        """Return min_k h_k."""
        least: FloatArray = scores.min(axis=1)
        return least


_OF_LABELS: Final[tuple[type[Loss], ...]] = (SquaredLoss, LogisticLoss, SoftmaxLoss)
LOSSES: Final = {loss().name: loss for loss in _OF_LABELS}
"""The losses of the settings; "auto" is the first that the label's classes fit."""


def make_loss(name: str, classes: int) -> Loss:
    """Return the loss of labels with some classes, 0 for numbers, or raise ValueError.

    >>> [make_loss("softmax", 3).outputs, make_loss("logistic", 2).outputs]
    [3, 1]
    """
    loss = (LOSSES | {KMEANS: KMeansLoss}).get(name)
    if loss is None or classes not in loss.class_counts:
        raise ValueError(f"loss {name!r} with {classes} classes")
    # one that takes more than two classes has a score for each
    return loss(classes if loss.class_counts[-1] > 2 else 1)
