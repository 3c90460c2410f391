"""Softmax of many rows of few classes, and its proximal step.

Classes come first in memory, so that every operation runs along the rows.

Notation:
    h, z, v, p   scores, points, centres, probabilities: (n, k), or (k, n) inside
    c            v + onehot(y) / rho, so that the proximal step solves
                 p + rho (z - c) = 0
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import BoolArray, FloatArray, blocks_of

AnyFloat = npt.NDArray[np.floating[Any]]

ROUGH_STEPS = 2
"""Newton steps in float32, at less than half of the time."""
NEAR_STEPS = 12
"""Newton steps of whole blocks, before the rows that are still on their way go on."""
SMALL_RANGE = 2.5e-4
"""Of the entries of Newton's last step: it leaves |gradient| <= 7.9e-9."""
WHOLE_STEP = 1.0
"""Newton steps of at most this range are taken whole."""
BLOCK_ROWS = 4096
"""Rows whose few arrays of k classes stay in a core's cache."""


def softmax(scores: FloatArray) -> FloatArray:
    """Return exp(h) / sum exp(h) along the last axis, (N, k)."""
    out, _ = _shifted_exp(scores)
    out /= out.sum(axis=0)
    return out.T


def log_sum_exp(scores: FloatArray) -> FloatArray:
    """Return log sum exp(h) along the last axis, (N,)."""
    out, top = _shifted_exp(scores)
    total: FloatArray = np.log(out.sum(axis=0))
    total += top
    return total


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
    look.

    Args:
        centre: v, (n, k).
        labels: y, (n,).
        rho: penalty, > 0.
        start: where Newton starts, (n, k).

    Returns:
        z, (n, k), and which rows, (n,), need more than ``NEAR_STEPS``: those that start
        far from where they end.
    """
    z = np.empty_like(centre)
    is_open = np.zeros(len(labels), np.bool_)
    for block in blocks_of(slice(0, len(labels)), BLOCK_ROWS):
        c = np.array(centre[block].T, order="C")
        c[labels[block].astype(np.intp), np.arange(c.shape[1])] += 1.0 / rho
        # z = c - p / rho, and p is from 0 to 1
        near = np.clip(start[block].T, c - 1.0 / rho, c)
        rough, rough_c = near.astype(np.float32), c.astype(np.float32)
        for _ in range(ROUGH_STEPS):
            _step(rough, rough_c, rho)
        fine = rough.astype(np.float64)
        for _ in range(NEAR_STEPS):
            is_open[block] = _step(fine, c, rho) > SMALL_RANGE
            if not is_open[block].any():
                break
        z[block] = fine.T
    return z, is_open


def _step(z: AnyFloat, c: AnyFloat, rho: float) -> AnyFloat:
    """Take a damped Newton step of p + rho (z - c) = 0 in place.

    Args:
        z: (k, n).
        c: (k, n).
        rho: penalty.

    Returns:
        The range of every row's whole step, (n,).
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
