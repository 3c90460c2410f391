"""Accelerated proximal gradient steps (FISTA) with adaptive restart.

Notation:
    z  ``point``        any shape: the iterate
    y  ``ahead``        where the gradient is taken, beyond z on the way that it went
    t  ``momentum``     Nesterov's sequence, >= 1

    z+ = prox(y - step * gradient(y))
    t+ = (1 + sqrt(1 + 4 t^2)) / 2
    y+ = z+ + (t - 1) / t+ * (z+ - z)

Where the way gone and the step taken point apart, <y - z+, z+ - z> > 0, the momentum
begins anew (O'Donoghue and Candes 2015, "Adaptive restart for accelerated gradient
schemes", the gradient scheme): then strongly convex problems converge linearly without
anybody knowing how strongly convex they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tp_flower.arrays import FloatArray


@dataclass(frozen=True)
class Iterate:
    """Where a descent is.

    Attributes:
        point: z.
        ahead: y, of the same shape.
        momentum: t.
    """

    point: FloatArray
    ahead: FloatArray
    momentum: float = 1.0

    @classmethod
    def at(cls, point: FloatArray) -> "Iterate":
        """Return the start of a descent."""
        return cls(point, point)

    def advanced(self, point: FloatArray, *, is_accelerated: bool = True) -> "Iterate":
        """Return the iterate after a step.

        Args:
            point: z+, what the step from ``ahead`` has led to.
            is_accelerated: without, y+ = z+.
        """
        if not is_accelerated:
            return Iterate.at(point)
        way = point - self.point
        if float(np.vdot(self.ahead - point, way)) > 0.0:
            return Iterate.at(point)
        momentum = (1.0 + math.sqrt(1.0 + 4.0 * self.momentum**2)) / 2.0
        ahead = point + (self.momentum - 1.0) / momentum * way
        return Iterate(point, ahead, momentum)

    def change_to(self, point: FloatArray) -> float:
        """Return ||y - z+|| / max(1, ||z+||): 0 exactly where z+ = y is optimal."""
        size = max(1.0, float(np.linalg.norm(point)))
        return float(np.linalg.norm(self.ahead - point)) / size


def descend(
    gradient: Callable[[FloatArray], FloatArray],
    start: FloatArray,
    step: float,
    *,
    tolerance: float,
    most_steps: int,
) -> FloatArray:
    """Return the minimiser of a smooth function, from one of its points (p,).

    Args:
        gradient: of the function, (p,) -> (p,).
        start: (p,).
        step: at most 1 over the largest curvature.
        tolerance: of the relative change by a step.
        most_steps: ends the descent whatever it has reached.

    >>> target = np.array([1.0, -2.0])
    >>> found = descend(
    ...     lambda z: [1.0, 0.1] * (z - target),
    ...     np.zeros(2),
    ...     1.0,
    ...     tolerance=1e-12,
    ...     most_steps=500,
    ... )
    >>> bool(np.allclose(found, target, atol=1e-9))
    True
    """
    iterate = Iterate.at(start)
    for _ in range(most_steps):
        point = iterate.ahead - step * gradient(iterate.ahead)
        change = iterate.change_to(point)
        iterate = iterate.advanced(point)
        if change <= tolerance:
            break
    return iterate.point
