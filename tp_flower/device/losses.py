"""The losses of :mod:`tp_flower.learning.losses` on torch tensors of float64.

Formulas, tolerances and notation are those of the numpy losses, and tests compare the
two. What differs is the order of the work: all rows take each Newton step at once, in
large blocks that bound the memory of what lies between.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tp_flower.learning.corrected import CorrectedClassLoss, CorrectedSquaredLoss
from tp_flower.learning.losses import (
    MAX_PROX_STEPS,
    PROX_TOLERANCE,
    SMALL_STEP,
    Loss,
    blocks,
)
from tp_flower.learning.softmax import (
    NEAR_STEPS,
    ROUGH_STEPS,
    SMALL_RANGE,
    WHOLE_STEP,
)
from tp_flower.privacy.labels import ClassNoise

PROX_ROWS = 1 << 20
HALVINGS = 60


class DeviceLoss(ABC):
    """A convex loss of scores (N, d_c) against labels (N,)."""

    @abstractmethod
    def row_values(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of every row, (N,)."""

    @abstractmethod
    def gradient(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return d loss / d scores, (N, d_c)."""

    @abstractmethod
    def prox_block(
        self, centre: Tensor, labels: Tensor, rho: float, start: Tensor
    ) -> Tensor:
        """Return the proximal step of some rows."""

    def prox(self, centre: Tensor, labels: Tensor, rho: float, start: Tensor) -> Tensor:
        """Return argmin_z loss(z; y) + rho/2 ||z - v||^2 for every row (Eq. 7)."""
        out = torch.empty_like(centre)
        for rows in blocks(len(labels), PROX_ROWS):
            out[rows] = self.prox_block(centre[rows], labels[rows], rho, start[rows])
        return out


def on_device(loss: Loss) -> DeviceLoss:
    """Return the loss on tensors.

    Raises:
        TypeError: there is none of this kind.
    """
    if isinstance(loss, CorrectedClassLoss):
        return _CorrectedClasses(on_device(loss.plain), loss.noise)
    if isinstance(loss, CorrectedSquaredLoss):
        return _CorrectedSquares(on_device(loss.plain), loss.noise.variance)
    kinds: dict[str, Callable[[], DeviceLoss]] = {
        "squared": _Squared,
        "logistic": _Logistic,
        "softmax": _Softmax,
    }
    if loss.name not in kinds:
        raise TypeError(f"the loss {loss.name!r} is not known on a device")
    return kinds[loss.name]()


class _Squared(DeviceLoss):
    def row_values(self, scores: Tensor, labels: Tensor) -> Tensor:
        return 0.5 * (scores[:, 0] - labels).square()

    def gradient(self, scores: Tensor, labels: Tensor) -> Tensor:
        return scores - labels[:, None]

    def prox_block(
        self,
        centre: Tensor,
        labels: Tensor,
        rho: float,
        start: Tensor,  # noqa: ARG002
    ) -> Tensor:
        return (labels[:, None] + rho * centre) / (1.0 + rho)


class _Logistic(DeviceLoss):
    def row_values(self, scores: Tensor, labels: Tensor) -> Tensor:
        score = scores[:, 0]
        return (-score.abs()).exp().log1p() + score.clamp(min=0.0) - labels * score

    def gradient(self, scores: Tensor, labels: Tensor) -> Tensor:
        return 0.5 * (1.0 + (0.5 * scores).tanh()) - labels[:, None]

    def prox_block(
        self, centre: Tensor, labels: Tensor, rho: float, start: Tensor
    ) -> Tensor:
        """Run Newton from the left on w = |z| / 2, as ``LogisticLoss`` does."""
        k = 2.0 * (rho * centre[:, 0] + labels) - 1.0
        size = k.abs()
        low = ((size - 1.0) / (4.0 * rho)).clamp(min=0.0)
        half = torch.full_like(k, 0.5)
        w = torch.maximum(half.copysign(k) * start[:, 0], low)
        for _ in range(MAX_PROX_STEPS):
            slope = w.tanh()
            step = (4.0 * rho * w + slope - size) / (1.0 + 4.0 * rho - slope.square())
            w = torch.maximum(w - step, low)
            if float(step.abs().max()) <= SMALL_STEP:
                break
        return (2.0 * w).copysign(k)[:, None]


class _Softmax(DeviceLoss):
    def row_values(self, scores: Tensor, labels: Tensor) -> Tensor:
        own = scores.gather(1, labels.long()[:, None])[:, 0]
        return torch.logsumexp(scores, dim=1) - own

    def gradient(self, scores: Tensor, labels: Tensor) -> Tensor:
        out = scores.softmax(dim=1)
        own = labels.long()[:, None]
        return out.scatter_add_(1, own, torch.full_like(scores[:, :1], -1.0))

    def prox_block(
        self, centre: Tensor, labels: Tensor, rho: float, start: Tensor
    ) -> Tensor:
        """Run damped Newton on all rows, then on those that are still on their way.

        The steps, and when they end, are those of :mod:`tp_flower.learning.softmax`.
        """
        # c = v + onehot(y) / rho takes the place of v and of the label
        own = labels.long()[:, None]
        c = centre.scatter_add(1, own, torch.full_like(centre[:, :1], 1.0 / rho))
        # z = c - p / rho, and p is from 0 to 1
        z = start.clamp(c - 1.0 / rho, c)
        is_open = torch.ones_like(labels, dtype=torch.bool)
        for _ in range(ROUGH_STEPS + NEAR_STEPS):
            step = _newton_step(z, c, rho)
            ranges = step.amax(dim=1) - step.amin(dim=1)
            length = torch.where(ranges > WHOLE_STEP, ranges.log1p() / ranges, 1.0)
            z -= length[:, None] * step
            is_open = ranges > SMALL_RANGE
            if not is_open.any():
                return z
        z[is_open] = self._far_prox(z[is_open], c[is_open], rho)
        return z

    def _far_prox(self, start: Tensor, c: Tensor, rho: float) -> Tensor:
        """Run Newton with backtracking on the rows that have not converged yet."""
        z = start.clone()
        active = torch.arange(len(z), device=z.device)
        for _ in range(MAX_PROX_STEPS):
            own, goal = z[active], c[active]
            gradient = own.softmax(dim=1) + rho * (own - goal)
            is_open = gradient.abs().amax(dim=1) > PROX_TOLERANCE
            active, own, goal = active[is_open], own[is_open], goal[is_open]
            if not len(active):
                break
            step = _newton_step(own, goal, rho)
            slope = (gradient[is_open] * step).sum(dim=1)
            z[active] = own - _lengths(own, goal, rho, step, slope) * step
        return z


def _newton_step(z: Tensor, c: Tensor, rho: float) -> Tensor:
    """Return H^-1 (p + rho (z - c)), by Sherman-Morrison."""
    p = z.softmax(dim=1)
    step = (rho * (z - c) + p) / (p + rho)
    q = p / (p + rho)
    # 1 - sum p^2/(p + rho) = rho sum q without cancellation, since sum p = 1
    scale = (p * step).sum(dim=1) / (rho * q.sum(dim=1))
    return step + q * scale[:, None]


def _lengths(z: Tensor, c: Tensor, rho: float, step: Tensor, slope: Tensor) -> Tensor:
    """Return how far to go along every row's step, (k, 1), by halving."""

    def value(at: Tensor) -> Tensor:
        return at.logsumexp(dim=1) + 0.5 * rho * (at - c).square().sum(dim=1)

    before = value(z)
    # rounding in the objective must not refuse the last, tiny steps
    slack = 1e-12 * (1.0 + before.abs())
    length = torch.ones_like(slope)
    for _ in range(HALVINGS):
        after = value(z - length[:, None] * step)
        is_refused = after > before - 1e-4 * length * slope + slack
        if not is_refused.any():
            break
        length = torch.where(is_refused, 0.5 * length, length)
    return length[:, None]


@dataclass(frozen=True)
class _CorrectedSquares(DeviceLoss):
    plain: DeviceLoss
    noise_variance: float

    def row_values(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.plain.row_values(scores, labels) - 0.5 * self.noise_variance

    def gradient(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.plain.gradient(scores, labels)

    def prox_block(
        self, centre: Tensor, labels: Tensor, rho: float, start: Tensor
    ) -> Tensor:
        return self.plain.prox_block(centre, labels, rho, start)


@dataclass(frozen=True)
class _CorrectedClasses(DeviceLoss):
    plain: DeviceLoss
    noise: ClassNoise

    def row_values(self, scores: Tensor, labels: Tensor) -> Tensor:
        beyond = (self._beyond(scores, labels) * scores).sum(dim=1)
        return self.plain.row_values(scores, labels) - beyond

    def gradient(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.plain.gradient(scores, labels) - self._beyond(scores, labels)

    def prox_block(
        self, centre: Tensor, labels: Tensor, rho: float, start: Tensor
    ) -> Tensor:
        moved = centre + self._beyond(centre, labels) / rho
        return self.plain.prox_block(moved, labels, rho, start)

    def _beyond(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return t - onehot(y~), (N, d_c)."""
        c, k = self.noise.correction, self.noise.classes
        if scores.shape[1] == 1:
            return (c * (2.0 * labels - 1.0))[:, None]
        out = torch.full_like(scores, -c)
        return out.scatter_(1, labels.long()[:, None], (k - 1) * c)
