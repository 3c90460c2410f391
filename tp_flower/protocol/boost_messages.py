"""The message of training by boosting, after ``prepare``."""

from typing import Annotated

from tp_flower.arrays import AnyArray
from tp_flower.methods import Growth
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Discloses, PartBody, Reply, Request
from tp_flower.protocol.training_messages import SCORES_DISCLOSED


class BoostStep(PartBody, frozen=True, kw_only=True):
    """The loss's first two derivatives, summed over each trained row's joined rows.

    ``hessian`` is absent where it is the row's multiplicity, as of a squared loss.
    """

    gradient: Annotated[AnyArray, f.float32("trained", "outputs")]
    hessian: Annotated[AnyArray, f.float32("trained", "outputs")] | None = None


class BoostRequest(Request, frozen=True, kw_only=True):
    """One round of boosting: add the last trees times a length, then grow more.

    Attributes:
        lengths: by table, none before the first trees.
        parts: a participant that is not in them grows no more.
        is_best: whether the model after the step is the best so far, to be saved.
        scores_number: of the scores that answer it, in the run: it names their masks.
    """

    growth: Growth
    lengths: dict[str, f.NonNegative] = {}
    is_best: bool = False
    scores_number: f.Count
    parts: dict[int, BoostStep]

    discloses = (
        Discloses(
            "the loss's first two derivatives, summed per {row}, which tell the label "
            "of a row in one joined row",
            fields=("gradient", "hessian"),
            covered_by="messages",
        ),
    )
    schedule = ("growth", "lengths", "is_best", "scores_number")


class BoostUpdate(PartBody, frozen=True):
    """The values of a participant's new trees, which add to its rows' scores."""

    scores: Annotated[AnyArray, f.score_words("scored", "outputs")]


class BoostReply(Reply, frozen=True):
    """The values of every participant's new trees."""

    parts: dict[int, BoostUpdate]

    discloses = (SCORES_DISCLOSED._replace(carries="{scored}, of new trees alone", when=""),)
