"""The sites' updates, as they arrive: gradients, plain or encoded."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from strategies.personalised.setup import PersonalProblem
from strategies.run.exchange import Part, Replies
from strategies.run.reply_checks import array_of, refuse
from tp_flower.arrays import FloatArray
from tp_flower.errors import ReplyError
from tp_flower.personalised.taut_string import penalty_of_round
from tp_flower.personalised.update_codec import decode_update
from tp_flower.protocol import LARGEST, AnyArray, TrackUpdates, UpdateCode
from tp_flower.settings import Settings


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
