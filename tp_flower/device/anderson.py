"""Anderson mixing of ADMM on a device: what is remembered never leaves it.

The method, its norm and its constants are those of :mod:`tp_flower.learning.anderson`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tp_flower.device.torch_device import to_host
from tp_flower.learning.anderson import RIDGE, SETBACK

Point = list[Tensor]
"""h, duals, h_1 .. h_M."""


class DeviceMixer:
    """Mix the last epochs of ADMM.

    Args:
        weights: of h_1 .. h_M in the norm, over rho: sqrt(c G_i), each (n_i, 1).
        memory: epochs to look back on; 0 switches mixing off.
        of_duals: the duals' own, sqrt(w), (N, 1), where rows are weighted, else None.
    """

    def __init__(
        self, weights: Sequence[Tensor], memory: int, of_duals: Tensor | None = None
    ) -> None:
        self._weights, self._memory, self._of_duals = weights, memory, of_duals
        self._changes: tuple[Tensor, Tensor] | None = None
        self.restart()

    def restart(self) -> None:
        """Forget the past, as a change of rho requires."""
        self._count = 0
        self._best = np.inf
        self._last: tuple[Tensor, Tensor] | None = None

    def mix(self, rho: float, before: Point, after: Point) -> Point:
        """Return the next point from one step of the map.

        Args:
            rho: penalty of the epoch; the past must be forgotten when it changes.
            before: x, where the epoch started.
            after: g, where it ended.
        """
        if not self._memory:
            return after
        moved = self._moved(rho, before, after)
        reached = torch.cat([array.ravel() for array in after])
        size = float(torch.linalg.vector_norm(moved))
        if size > SETBACK * self._best:
            self.restart()
        self._best = min(self._best, size)
        changes, last = self._memories(reached, moved), self._last
        self._last = reached, moved
        if last is None:
            return after
        slot = self._count % self._memory
        self._count += 1
        for kept, new, old in zip(changes, self._last, last, strict=True):
            torch.sub(new, old, out=kept[slot])
        used = min(self._count, self._memory)
        gamma = _gamma(changes[1][:used], moved)
        mixed = reached - gamma @ changes[0][:used]
        parts = torch.split(mixed, [array.numel() for array in after])
        return [p.reshape(a.shape) for p, a in zip(parts, after, strict=True)]

    def _moved(self, rho: float, before: Point, after: Point) -> Tensor:
        """Return f = g - x in the norm's weights; h has no part in it."""
        steps = [new - old for new, old in zip(after[1:], before[1:], strict=True)]
        weighted = [
            step * (rho * weight)
            for step, weight in zip(steps[1:], self._weights, strict=True)
        ]
        duals = steps[0] if self._of_duals is None else steps[0] * self._of_duals
        return torch.cat([step.ravel() for step in (duals, *weighted)])

    def _memories(self, reached: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """Return dG and dF, (memory, L), made at the first step."""
        if self._changes is None:
            self._changes = (
                reached.new_zeros((self._memory, len(reached))),
                moved.new_zeros((self._memory, len(moved))),
            )
        return self._changes


def _gamma(changes: Tensor, moved: Tensor) -> Tensor:
    """Return argmin || f - dF gamma ||, (k,), from the normal equations."""
    products = to_host(changes @ changes.T)
    against = to_host(changes @ moved)
    ridge = RIDGE * np.trace(products) + np.finfo(np.float64).tiny
    gamma = np.linalg.solve(products + ridge * np.eye(len(products)), against)
    return torch.as_tensor(gamma, device=moved.device)
