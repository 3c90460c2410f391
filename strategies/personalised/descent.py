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

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from strategies.personalised.setup import PersonalProblem
from strategies.run.exchange import Part, Replies
from strategies.run.replies import array_of, refuse
from tp_flower.arrays import AnyArray, BoolArray, FloatArray
from tp_flower.errors import ReplyError
from tp_flower.learning.solvers import Iterate
from tp_flower.personalised.graph import SimilarityGraph
from tp_flower.personalised.update_codec import decode_update
from tp_flower.personalised.z_step import penalty_of_round
from tp_flower.protocol import LARGEST, SiteMetrics, TrackUpdates, UpdateCode
from tp_flower.settings import Settings

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


@dataclass(frozen=True)
class UpdateSchedule:
    """How updates are encoded in a run.

    gamma falls to 0 (`penalty_of_round`): so the last updates are as good as gradients,
    and what the training comes to is not moved.

    Attributes:
        penalty: gamma of the first round; 0 for updates as they are.
        clusters: values of an update's code book; 0 for none.
        epochs: of the run, at whose end gamma is 0.
    """

    penalty: float
    clusters: int
    epochs: int

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return what the settings ask for."""
        return cls(settings.update_penalty, settings.update_clusters, settings.epochs)

    def of_epoch(self, epoch: int) -> UpdateCode | None:
        """Return how updates are shortened in an epoch, from 1; None: they are not."""
        if not self.penalty:
            return None
        gamma = penalty_of_round(self.penalty, epoch - 1, self.epochs)
        return UpdateCode(gamma=gamma, clusters=self.clusters)


def read_updates(
    problem: PersonalProblem, replies: Replies, *, has_common: bool
) -> tuple[FloatArray, FloatArray, int]:
    """Return what the sites sent.

    Args:
        problem: that is trained.
        replies: of the round.
        has_common: whether one model for all is trained besides.

    Returns:
        The updates (N, p) of the sites' own models, those of the one model for all, and
        the bytes of the former; zeros of sites that have not answered.

    Raises:
        ReplyError: an update is not of the model.
    """
    shape = (len(problem.parts), len(problem.start))
    own, common = np.zeros(shape), np.zeros(shape)
    own_bytes = 0
    for k, part in enumerate(problem.parts):
        if part.node in replies.stale:
            continue
        body = replies.body(part, TrackUpdates)
        if body.code is not None:
            own[k] = _decoded(part, body.code, shape[1])
            own_bytes += body.code.nbytes
        else:
            update = array_of(replies, part, "update", shape[1:])
            own[k], own_bytes = update, own_bytes + update.nbytes
        if has_common:
            common[k] = array_of(replies, part, "common_update", shape[1:])
    return own, common, own_bytes


def _decoded(part: Part, code: AnyArray, size: int) -> FloatArray:
    try:
        values = decode_update(code, size)
    except ReplyError as error:
        raise refuse(part, f"an update that cannot be used: {error}") from None
    if np.abs(values).max(initial=0.0) > LARGEST:
        raise refuse(part, "an update that is absurdly large")
    return values


PENALTY: Final = "penalty"
_NAMES: Final = frozenset(
    {"loss", "log_loss", "auc", "accuracy", "rmse", "r2", PENALTY}
)
Metrics = dict[str, dict[str, float]]
"""By "train" and "test", values by name."""


def read_metrics(
    replies: Replies, parts: Sequence[Part], name: str
) -> list[Metrics | None]:
    """Return what every site reports under a name; None of one that reports nothing.

    Args:
        replies: of the round.
        parts: of the sites.
        name: of the field with the metrics.

    Raises:
        ReplyError: a site reports something else than metrics.
    """
    return [_read(replies, part, name) for part in parts]


def _read(replies: Replies, part: Part, name: str) -> Metrics | None:
    if part.node in replies.stale and part.number not in replies.parts:
        return None
    metrics = getattr(replies.parts.get(part.number), name, None)
    if not isinstance(metrics, SiteMetrics):
        raise refuse(part, "no metrics")
    if not {*metrics.train, *metrics.test} <= _NAMES:
        raise refuse(part, "metrics of unknown names")
    return {"train": metrics.train, "test": metrics.test}


def mean_metrics(found: Iterable[Metrics | None], kind: str) -> dict[str, float]:
    """Return the mean over the sites of every metric, without the penalty.

    >>> found = [{"train": {"loss": 1.0}}, None, {"train": {"loss": 2.0}}]
    >>> mean_metrics(found, "train")
    {'loss': 1.5}
    """
    values: dict[str, list[float]] = {}
    for own in found:
        for name, value in (own or {}).get(kind, {}).items():
            values.setdefault(name, []).append(value)
    return {
        name: float(np.mean(own)) for name, own in values.items() if name != PENALTY
    }


def mean_objective(found: Sequence[Metrics | None]) -> float:
    """Return (1/N) sum_n f_n, the sites' penalties included."""
    objectives = [
        own["train"].get("loss", 0.0) + own["train"].get(PENALTY, 0.0)
        for own in found
        if own is not None
    ]
    return float(np.mean(objectives)) if objectives else math.nan


def by_site(
    sites: Sequence[str], found: Sequence[Metrics | None]
) -> Mapping[str, Metrics]:
    """Return the metrics by site, without the penalty."""
    return {
        site: {
            kind: {n: v for n, v in values.items() if n != PENALTY}
            for kind, values in own.items()
        }
        for site, own in zip(sites, found, strict=True)
        if own is not None
    }
