"""Trend of the loss: whether a training has converged, and how long SGD's steps are.

A loss that falls ever more slowly, as c / epochs, has as far to go as its fall per
epoch times the epochs so far; one that falls geometrically has less to go.

SGD's steps are halved when it stalls: their noise keeps it up then. After a batch whose
loss explodes they are an eighth, and that batch's step has no momentum.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tp_flower.arrays import FloatArray
from tp_flower.objectives import Objective

SETTLED: Final = 1e-3
"""Remaining fall over the loss at convergence: ADMM is at most 0.12 % above the minimum
then (33 schemas), but 0.6 % where tables are nearly collinear."""
NEAR: Final = 5e-2  # below it, the optimum of a convex loss is near
# of the highest of some dozen deviates above the lowest, in deviations
SPREAD: Final = 4.0
LEAST_EPOCHS: Final = 3  # that the recent fall is taken over, or a fifth of the epochs
CONVERGED: Final = "converged"
GOES_ON: Final = re.compile(r"[:;] num-epochs = \d+ goes on$")
NOT_CONVERGED: Final = "not converged"
DIVERGED: Final = "diverged"


def remaining_fall(losses: Sequence[float], rounding: float = 0.0) -> float:
    """Return about how far the loss still has to fall, relative to it.

    Scores have errors of ``rounding``, root mean square: a loss of 1/2 r^2 may waver by
    r times that and settles no further.

    >>> remaining_fall([1.0] * 9), remaining_fall([1.0])
    (0.0, inf)
    >>> remaining_fall([2e-6, 2.1e-6] * 9, rounding=1e-4)
    0.0
    """
    recent = max(len(losses) // 5, LEAST_EPOCHS)
    window = losses[-1 - recent :]
    if len(losses) <= recent:
        return float("inf")
    # one that rises again has not settled either
    noise = SPREAD * rounding * (math.sqrt(2.0 * abs(window[-1])) + rounding)
    span = max(max(window) - min(window) - noise, 0.0) / (abs(window[-1]) or 1.0)
    return span / recent * len(losses)


def trend_verdict(
    losses: Sequence[float], *, is_convex: bool, rounding: float = 0.0
) -> str:
    """Return the verdict on a training by its losses, one per epoch."""
    remaining = remaining_fall(losses, rounding)
    epochs = len(losses)
    if remaining < SETTLED:
        if is_convex:
            caution = ""
        else:
            caution = "; as models are not linear, another seed may end lower"
        return f"converged: the loss has settled{caution}"
    further = f"num-epochs = {2 * epochs} goes on"
    if epochs <= LEAST_EPOCHS:
        return f"not judged after {epochs} epochs: {further}"
    state = NOT_CONVERGED
    if is_convex and remaining < NEAR:
        state = "nearly converged"
    verb = "wavering"
    if losses[-1] <= min(losses[-1 - LEAST_EPOCHS :]):
        verb = "falling"
    return (
        f"{state}: the loss is {verb} by {remaining / epochs * 100:.2g}% per epoch; "
        f"{further}"
    )


# an epoch that lowers the loss by a smaller share halves the steps
PLATEAU: Final = 1e-3
LEAST_FACTOR: Final = 1 / 64  # steps this small end the training: their noise is gone
EXPLOSION: Final = 25.0  # times the loss of a constant score: even a batch of one row
BACK_OFF: Final = 8.0


@dataclass
class StepControl:
    """The step size relative to the first one, and the losses that decide it.

    ``baseline`` is a constant score's loss, ``losses`` are the epochs', the means over
    batches before their own steps; ``peak`` is the highest since they began to explode.
    """

    baseline: float
    can_halve: bool = True
    factor: float = 1.0
    losses: list[float] = field(default_factory=list)
    peak: float = 0.0
    _batches: list[tuple[float, int]] = field(default_factory=list)

    def after_batch(
        self,
        batch: Objective,
        scores: FloatArray,
        base: FloatArray,
    ) -> None:
        """Take the scores (B, d_c) of a batch; back off if their loss explodes."""
        constant = np.broadcast_to(base, scores.shape)
        loss, least = (batch.value(h) for h in (scores, constant))
        self._batches.append((loss, len(batch)))
        if loss <= EXPLOSION * max(abs(least), abs(self.baseline)):
            self.peak = 0.0
        elif not loss <= self.peak:
            self.factor = self.factor / BACK_OFF
            self.peak = loss

    def after_epoch(self) -> None:
        """End an epoch; halve the steps if it has not lowered the loss."""
        losses, rows = zip(*self._batches, strict=True)
        self.losses.append(float(np.average(losses, weights=rows)))
        self._batches.clear()
        *_, previous, loss = (float("inf"), *self.losses)
        if self.can_halve and not previous - loss >= PLATEAU * abs(loss):
            self.factor /= 2.0

    @property
    def is_over(self) -> bool:
        """Whether the loss has settled, or steps are so small that noise is gone."""
        return self.factor < LEAST_FACTOR or remaining_fall(self.losses) < SETTLED


def falling_rate(rate: float, epoch: int) -> float:
    """Return the step size of an epoch, from 1, where gradients stay noisy.

    >>> [falling_rate(0.5, epoch) for epoch in (1, 2, 5)]
    [0.5, 0.25, 0.1]
    """
    return rate / epoch
