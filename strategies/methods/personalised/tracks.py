"""One track of a personalised training at the server: a step on all sites' parameters.

    minimise  (1/N) sum_n f_n(u_n) + lambda sum_{(i, j) in E} ||z_i - z_j||_2

over u_n = (x, z_n): the coordinates in ``personal`` are each site's own, z_n, all
others are shared, x. The server takes a proximal gradient step in the copies u_n: with
v_n = y_n - s g_n the shared coordinates become the mean of the copies, and

    Z = argmin  lambda sum ||z_i - z_j||_2 + (1 / (2 N s)) sum_n ||z_n - v_n||^2

which is the paper's Z-step (Algorithm 4) with eta = N s; its x-step is the mean of the
copies with eta = s. One step size s = 1 / max_n L_n fits both, which is why the step is
taken in copies. Every site has equal weight, regardless of its number of rows.

Limits: with lambda = 0, or without edges, the sites are independent; without personal
coordinates there is one model (FedAvg with one local step).

Notation:
    u, y  ``point``, ``ahead``    (N, p)      s  ``step``
    g     ``updates``             (N, p)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from strategies.methods.personalised.setup import PersonalisedProblem
from strategies.run.exchange import Replies
from strategies.run.replies import array_of
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.learning.solvers import Iterate

EdgeStep = Callable[[FloatArray, float], FloatArray]
"""(points (N, p_z), weight) -> argmin weight * penalty(Z) + 1/2 ||Z - points||^2."""


@dataclass(frozen=True)
class Track:
    """A track in training: the iterate of all sites' parameters, (N, p).

    ``personal``, (p,), marks the coordinates that each site has for itself; ``change``
    is the relative change by the last step, infinite before the first.
    """

    personal: BoolArray
    iterate: Iterate
    edge_step: EdgeStep | None = None
    change: float = np.inf

    @classmethod
    def start(
        cls, personal: BoolArray, points: FloatArray, edge_step: EdgeStep | None = None
    ) -> Self:
        """Return a track at its start (N, p), where shared coordinates must agree."""
        start = points.copy()
        start[:, ~personal] = points[:, ~personal].mean(axis=0)
        return cls(personal, Iterate.at(round_as_sent(start)), edge_step)

    def advance(
        self, updates: FloatArray, step: float, *, is_accelerated: bool
    ) -> Self:
        """Return the track after a step of size s against updates g, (N, p).

        An accelerated step has momentum.
        """
        point = self._prox(self.iterate.ahead - step * updates, step)
        change = self.iterate.change_to(point)
        iterate = self.iterate.advance(point, is_accelerated=is_accelerated)
        iterate = Iterate(iterate.point, round_as_sent(iterate.ahead), iterate.momentum)
        return replace(self, iterate=iterate, change=change)

    def _prox(self, points: FloatArray, step: float) -> FloatArray:
        """Return the point that copies v (N, p) give."""
        out = points.copy()
        shared = ~self.personal
        out[:, shared] = points[:, shared].mean(axis=0)
        if self.edge_step is not None and self.personal.any():
            out[:, self.personal] = self.edge_step(
                points[:, self.personal], len(points) * step
            )
        return out


def round_as_sent(points: FloatArray) -> FloatArray:
    """Return numbers rounded as they travel, so that both ends have the same ones."""
    return points.astype(np.float32).astype(np.float64)


def read_updates(
    problem: PersonalisedProblem, replies: Replies, *, has_common: bool
) -> tuple[FloatArray, FloatArray]:
    """Return the sites' updates (N, p) of their own models, and of the common model.

    The latter are zeros if no common model is trained.
    """
    size = len(problem.start)
    personal, common = np.zeros((2, len(problem.parts), size))
    for k, part in enumerate(problem.parts):
        personal[k] = array_of(replies, part, "update", (size,))
        if has_common:
            common[k] = array_of(replies, part, "common_update", (size,))
    return personal, common
