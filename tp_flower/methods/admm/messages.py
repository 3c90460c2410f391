"""Messages of training by ADMM, after ``prepare``; ``consensus`` is of no method."""

from typing import Annotated, Final

from tp_flower.arrays import AnyArray
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import PartBody, Reply, Request
from tp_flower.protocol.messages import declare_action
from tp_flower.protocol.training_messages import (
    SCORES_DISCLOSED,
    STEPS_DISCLOSED,
    LocalFit,
    ScoreSteps,
    share_disclosure,
)


class AdmmStep(ScoreSteps, frozen=True):
    """How far the trained rows' scores are from their target Y (paper, Eq. 15)."""


class AdmmRequest(Request, frozen=True, kw_only=True):
    """One epoch of ADMM: fit the model to the target, and ``evaluate`` it.

    Attributes:
        is_best: whether the model before it is the best so far, to be saved.
        scores_number: of the scores that answer it, in the run: it names their masks.
    """

    fit: LocalFit
    evaluate: bool
    scores_number: f.Count
    is_best: bool = False
    parts: dict[int, AdmmStep]

    discloses = STEPS_DISCLOSED
    schedule = (
        *("fit", "evaluate", "scores_number", "is_best"),
        "deviation",
    )


class AdmmUpdate(PartBody, frozen=True):
    """Scores of a model, or the share of what its table's shards sum first.

    That is the moments, features times the steps of the scores, or theta + u (Eq. 20),
    the proposal of a consensus.
    """

    scores: Annotated[AnyArray, f.score_words("scored", "outputs")] | None = None
    share: Annotated[AnyArray, f.shares("summed")] | None = None


class AdmmReply(Reply, frozen=True):
    """The update of every participant."""

    parts: dict[int, AdmmUpdate]

    discloses = (
        share_disclosure("terms", "{terms}", "moments", "parameters", "model"),
        SCORES_DISCLOSED._replace(kinds=("scores", "model"), when=""),
    )


TRAIN_ADMM: Final = declare_action("train.admm", AdmmRequest, AdmmReply)
