"""The sites' updates, as they arrive: gradients, plain or encoded."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from strategies.exchange import Part, Replies
from strategies.personal_setup import PersonalProblem
from strategies.received import LARGEST, array_of, refuse
from tp_flower.errors import ReplyError
from tp_flower.learning.losses import FloatArray
from tp_flower.personal.codec import decode_update
from tp_flower.personal.taut_string import penalty_of_round
from tp_flower.settings import Settings


@dataclass(frozen=True)
class UpdateCode:
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

    def order(self, epoch: int) -> dict[str, Any]:
        """Return what the sites are told in an epoch, from 1."""
        if not self.penalty:
            return {}
        gamma = penalty_of_round(self.penalty, epoch - 1, self.epochs)
        return {"gamma": gamma, "clusters": self.clusters}


@dataclass(frozen=True)
class Updates:
    """The updates of a round.

    Attributes:
        values: (N, p) by track; zeros of sites that have not answered.
        own_bytes: of those of the sites' own models, as they travelled.
    """

    values: Mapping[str, FloatArray]
    own_bytes: int


def read_updates(
    problem: PersonalProblem,
    replies: Replies,
    tracks: Sequence[str],
    coded: Collection[str],
) -> Updates:
    """Return what the sites sent.

    Args:
        problem: that is trained.
        replies: of the round.
        tracks: that were asked for, the sites' own models first.
        coded: those of them that are encoded.

    Raises:
        ReplyError: an update is not of the model.
    """
    shape = (len(problem.parts), len(problem.start))
    found = {name: np.zeros(shape) for name in tracks}
    own_bytes = 0
    for k, part in enumerate(problem.parts):
        if part.node in replies.stale:
            continue
        own_bytes += replies.arrays[part.number, tracks[0]].nbytes
        for name in tracks:
            if name in coded:
                found[name][k] = _decoded(replies, part, name, shape[1])
            else:
                found[name][k] = array_of(replies, part, name, shape[1:])
    return Updates(found, own_bytes)


def _decoded(replies: Replies, part: Part, name: str, size: int) -> FloatArray:
    code = array_of(replies, part, name, (None,), ("uint8",))
    try:
        values = decode_update(code, size)
    except ReplyError as error:
        raise refuse(part, f"an update that cannot be used: {error}") from None
    if np.abs(values).max(initial=0.0) > LARGEST:
        raise refuse(part, "an update that is absurdly large")
    return values
