"""The softmax loss of several classes.

    loss(h; t) = log sum_k exp(h_k) - sum_k t_k h_k

with t the one-hot label, or the soft label of a noisy class (:mod:`.classes`).

Notation:
    p  probabilities of the classes, (N, k); in the steps (k, N): with the classes first
       in memory, every operation runs along the rows
    c  v + t / rho, so that the proximal step solves p + rho (z - c) = 0
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import AnyFloat, BoolArray, FloatArray, blocks, class_counts
from tp_flower.objectives.classes import ClassObjective, ClassResponse, true_rates
from tp_flower.objectives.metrics import class_metrics
from tp_flower.objectives.noise import ClassNoise
from tp_flower.objectives.objective import (
    MAX_PROX_STEPS,
    PROX_TOLERANCE,
    RowInformation,
)
from tp_flower.objectives.response import CLASSES
from tp_flower.objectives.target import MAX_CLASSES

ROUGH_STEPS = 2  # newton steps in float32, at less than half of the time
NEAR_STEPS = 12  # of whole blocks; other rows are solved for one number each
SMALL_RANGE = 2.5e-4  # of the last step: leaves |gradient| <= 7.9e-9
WHOLE_STEP = 1.0  # newton steps of at most this range are taken whole
SOFTMAX_ROWS = 4096  # rows whose few arrays of k classes stay in a core's cache


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


class SoftLabels(NamedTuple):
    """Soft labels t (n, k): ``peak`` + ``rest`` for the class of a row, else ``rest``.

    ``codes`` (n,) are the classes.
    """

    codes: npt.NDArray[np.intp]
    peak: float = 1.0
    rest: float = 0.0

    def select(self, rows: slice | BoolArray) -> "SoftLabels":
        """Return the labels of some rows."""
        return self._replace(codes=self.codes[rows])

    def add_to(self, out: FloatArray, times: float = 1.0) -> None:
        """Add ``times`` t to ``out`` (n, k)."""
        out[np.arange(len(self.codes)), self.codes] += times * self.peak
        if self.rest:
            out += times * self.rest

    def dot(self, scores: FloatArray) -> FloatArray:
        """Return sum_k t_k h_k of every row, (n,)."""
        values: FloatArray = scores[np.arange(len(self.codes)), self.codes]
        if not self.rest:
            return values
        values *= self.peak
        values += self.rest * scores.sum(axis=1)
        return values


class Softmax(ClassObjective):
    """log sum_k exp(h_k) - sum_k t_k h_k, for several classes."""

    name = "softmax"
    class_counts = range(2, MAX_CLASSES + 1)
    has_likelihood = True
    dispersion_is_known = True
    max_curvature = 0.5  # the largest eigenvalue that diag(p) - p p^T can have

    @classmethod
    def make_response(cls, classes: tuple[str, ...], kind: str) -> ClassResponse:
        """Return the class of the largest score."""
        return ClassResponse(
            *(cls.name, len(classes), classes, kind),
            link=CLASSES,
            probabilities=softmax,
        )

    @property
    def labels(self) -> SoftLabels:
        """The soft labels t."""
        c = self.correction
        return SoftLabels(self.target.codes, 1.0 + c * self.outputs, -c)

    def base_scores(self) -> FloatArray:
        """Return the log class frequencies."""
        if isinstance(self.noise, ClassNoise):
            rates = true_rates(self.target, self.noise, self.weights)
            scores: FloatArray = np.log(rates / rates.sum())
            return scores
        counts = class_counts(self.target.numbers, self.outputs, self.weights)
        return np.log(np.maximum(counts, 0.5) / len(self))

    def row_values(self, scores: FloatArray) -> FloatArray:
        """Return log sum exp(h) - sum t h, which may be negative with noise."""
        out, top = _shifted_exp(scores)
        values: FloatArray = np.log(out.sum(axis=0))
        values += top
        values -= self.labels.dot(scores)
        return values

    def gradient(self, scores: FloatArray) -> FloatArray:
        """Return softmax(h) - t."""
        out = softmax(scores)
        self.labels.add_to(out, -1.0)
        return out

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return p_k (1 - p_k)."""
        rates = softmax(scores)
        return rates * (1.0 - rates)

    def information_by_rows(self, scores: FloatArray) -> RowInformation:
        """Return p_a p_b of each two classes.

        diag(p) - p p^T is the sum over a < b of p_a p_b (e_a - e_b) (e_a - e_b)^T.
        """
        rates = softmax(scores)
        first, second = np.triu_indices(self.outputs, 1)
        return RowInformation(self.weigh(rates[:, first] * rates[:, second]))

    def curvature(self, base: FloatArray) -> float:
        """Return the mean of p_k (1 - p_k)."""
        rates = softmax(base[None, :])[0]
        return float((rates * (1.0 - rates)).mean())

    def measure(self, scores: FloatArray, value: float) -> dict[str, float]:
        """Return the log loss, the mean AUC of the classes and the accuracy."""
        rates = softmax(scores)
        classes = list(range(self.outputs))
        return {"log_loss": value, **class_metrics(self, scores, rates, classes)}

    def prox_block(
        self, centre: FloatArray, rho: float, start: FloatArray
    ) -> FloatArray:
        """Run Newton on whole blocks, then solve for the rows that it left open."""
        soft = self.labels
        z, is_open = softmax_prox(soft, centre, float(rho), start)
        if is_open.any():
            z[is_open] = _far_softmax_prox(soft.select(is_open), centre[is_open], rho)
        return z


def softmax_prox(
    soft: SoftLabels, centre: FloatArray, rho: float, start: FloatArray
) -> tuple[FloatArray, BoolArray]:
    """Return argmin_z log sum exp(z) - sum t z + rho/2 ||z - v||^2 for every row.

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
    is_open = np.zeros(len(centre), np.bool_)
    for block in blocks(len(centre), SOFTMAX_ROWS):
        c = np.array(centre[block].T, order="C")
        soft.select(block).add_to(c.T, 1.0 / rho)
        # z = c - p / rho, and p is from 0 to 1
        near = np.clip(start[block].T, c - 1.0 / rho, c)
        rough = near.astype(np.float32)
        rough_c = c.astype(np.float32)
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


def _far_softmax_prox(soft: SoftLabels, centre: FloatArray, rho: float) -> FloatArray:
    """Return the same z, however far it is; Newton on near rows is faster.

    With t = log sum exp(z) and w = p / rho the condition is w + log w = c - t - log rho
    for each class: w is Wright's omega function of the right side. Then t is the root
    of sum w = 1 / rho, whose left side is convex and falls: Newton ascends to it from
    the t at which one class alone adds up to 1 / rho. |gradient| <= |rho sum w - 1|.
    """
    # few runs have such rows, and scipy takes a sixth of a second to import
    from scipy.special import wrightomega

    z = centre
    c = centre.copy()
    soft.add_to(c, 1.0 / rho)
    t = c.max(axis=1) - 1.0 / rho
    for _ in range(MAX_PROX_STEPS):
        w = wrightomega(c - np.log(rho) - t[:, None])
        z = c - w
        excess = w.sum(axis=1) - 1.0 / rho
        if np.abs(rho * excess).max() <= PROX_TOLERANCE:
            break
        t += excess / (w / (1.0 + w)).sum(axis=1)
    return z
