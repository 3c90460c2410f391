"""One track of a personalised training at the server: all sites' parameters, a step.

    minimise  (1/N) sum_n f_n(u_n) + lambda sum_{(i, j) in E} ||z_i - z_j||_p

over u_n = (x, z_n): the coordinates of ``personal`` are the site's own, z_n, all others
are shared, x. A proximal gradient step is taken in the copies u_n: with
v_n = y_n - s g_n the shared coordinates become the mean of the copies, and

    Z = argmin  lambda sum ||z_i - z_j||_p + (1 / (2 N s)) sum_n ||z_n - v_n||^2

which is the paper's Z-step (Algorithm 4) with eta = N s; its x-step is the mean of the
copies with eta = s. That one step size s = 1 / max_n L_n fits both is why the copies
are taken. Every site counts alike, however many rows it has.

Limits: with lambda = 0, or without edges, the sites are independent; with no personal
coordinate there is one model (FedAvg with one local step).

Notation:
    u, y  ``point``, ``ahead``    (N, p)      s  ``step``
    g     ``updates``             (N, p)
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray
from tp_flower.learning.accelerated import Iterate
from tp_flower.personalised.graph import SimilarityGraph

BoolArray = npt.NDArray[np.bool_]
EdgeStep = Callable[[FloatArray, float], FloatArray]
"""(points (N, p_z), weight) -> argmin weight * penalty(Z) + 1/2 ||Z - points||^2."""


@dataclass(frozen=True)
class Track:
    """What is trained.

    Attributes:
        name: of the track in messages.
        personal: (p,), coordinates that each site has for itself.
        edge_step: proximal step of the edges' penalty; None without any.
    """

    name: str
    personal: BoolArray
    edge_step: EdgeStep | None = None

    def prox(self, points: FloatArray, step: float, present: BoolArray) -> FloatArray:
        """Return the point that copies (N, p) lead to.

        Args:
            points: v.
            step: s.
            present: (N,), sites whose copies count for the shared coordinates.
        """
        out = points.copy()
        shared = ~self.personal
        out[:, shared] = points[np.ix_(present, shared)].mean(axis=0)
        if self.edge_step is not None and self.personal.any():
            weight = len(points) * step
            out[:, self.personal] = self.edge_step(points[:, self.personal], weight)
        return out


@dataclass(frozen=True)
class Descent:
    """A track in training.

    Attributes:
        track: what is trained.
        iterate: of all sites' parameters, (N, p).
        change: relative, by the last step; infinite before the first.
    """

    track: Track
    iterate: Iterate
    change: float = np.inf

    @classmethod
    def start(cls, track: Track, points: FloatArray) -> "Descent":
        """Return a track at its start (N, p), whose shared coordinates are alike."""
        shared = ~track.personal
        start = points.copy()
        start[:, shared] = points[:, shared].mean(axis=0)
        return cls(track, Iterate.at(as_sent(start)))

    @property
    def ahead(self) -> FloatArray:
        """Where the sites are asked for their gradients, (N, p): float32 numbers."""
        return self.iterate.ahead

    def stepped(
        self,
        updates: FloatArray,
        step: float,
        present: BoolArray,
        *,
        is_accelerated: bool,
    ) -> "Descent":
        """Return the track after a step.

        A site that has not answered keeps its z, which its neighbours go on seeing.

        Args:
            updates: g, (N, p); of absent sites anything.
            step: s.
            present: (N,), the sites that have answered.
            is_accelerated: whether there is momentum.
        """
        before, own = self.iterate.point, self.track.personal
        points = self.ahead - step * updates
        points[~present] = before[~present]
        point = self.track.prox(points, step, present)
        point[np.ix_(~present, own)] = before[np.ix_(~present, own)]
        change = self.iterate.change_to(point)
        after = self.iterate.advanced(point, is_accelerated=is_accelerated)
        ahead = after.ahead.copy()
        ahead[~present] = point[~present]
        iterate = Iterate(after.point, as_sent(ahead), after.momentum)
        return Descent(self.track, iterate, change)


def joined(descent: Descent, graph: SimilarityGraph, known: BoolArray) -> Descent:
    """Return a track in which sites that are not known yet stand by their neighbours.

    A site that comes later begins there: with the mean of the models of its neighbours
    that have answered before, or of all such sites if there is none.

    Args:
        descent: of the track.
        graph: of the sites.
        known: (N,), the sites that have answered at least once.
    """
    own, iterate = descent.track.personal, descent.iterate
    point, ahead = iterate.point.copy(), iterate.ahead.copy()
    for site in np.flatnonzero(~known).tolist():
        point[site, own] = graph.neighbours_mean(iterate.point[:, own], site, known)
        ahead[site] = as_sent(point[site])
    iterate = Iterate(point, ahead, iterate.momentum)
    return Descent(descent.track, iterate, descent.change)


def as_sent(points: FloatArray) -> FloatArray:
    """Return numbers as they travel, so that both ends have the same ones."""
    return points.astype(np.float32).astype(np.float64)
