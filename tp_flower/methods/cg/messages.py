"""Messages of training by conjugate gradients, after ``prepare``."""

from typing import Annotated, Final

from tp_flower.arrays import AnyArray
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Body, Discloses, PartBody, Reply, Request
from tp_flower.protocol.messages import declare_action
from tp_flower.protocol.training_messages import (
    SCORES_DISCLOSED,
    STEPS_DISCLOSED,
    LineStep,
    ScoreSteps,
    share_disclosure,
    sum_disclosure,
)


class DescentTerms(Body, frozen=True, kw_only=True):
    """How to make the scores of a descent direction v.

    Attributes:
        curvature: kappa, of the loss at the base score.
        score_unit: of the scores, which shrink from epoch to epoch.
        product_unit: of the products, which sum over the ``tables`` of the query.
        scores_number: of the scores in the run: it names their masks.
    """

    curvature: f.Positive
    score_unit: f.Positive
    product_unit: f.Positive
    tables: f.Size
    scores_number: f.Count


class DescentStep(ScoreSteps, frozen=True):
    """A Newton step of the trained rows' scores, if their curvature were 1.

    ``place`` is the table's in the sum of products, for one of its shards.
    """

    place: f.Count | None = None


class DescentRequest(Request, frozen=True, kw_only=True):
    """One epoch of conjugate gradients: step along the last ``line``, then turn.

    ``is_best`` says whether the model after the step is the best so far, to be saved.
    """

    terms: DescentTerms
    line: LineStep | None = None
    is_best: bool = False
    parts: dict[int, DescentStep]

    discloses = STEPS_DISCLOSED
    schedule = ("terms", "line", "is_best", "place", "deviation")


class DirectionUpdate(PartBody, frozen=True):
    """Scores T v of a descent direction v.

    ``products`` are <g, v>, <g_before, v>, and beta times <v, v> and <p, v>, under
    pairwise masks.
    """

    scores: Annotated[AnyArray, f.score_words("scored", "outputs")] | None = None
    products: Annotated[AnyArray, f.ArraySpec("uint64", (4,))] | None = None


class DescentUpdate(DirectionUpdate, frozen=True):
    """A descent direction, or the share of the gradient that shards sum first."""

    share: Annotated[AnyArray, f.shares("summed")] | None = None


_DIRECTION = (
    SCORES_DISCLOSED._replace(carries="{scored}, of a change of the models", when=""),
    Discloses(
        "four inner products of gradients and changes of models, summed over tables",
        fields=("products",),
        covered_by="masked",
        kinds=("products",),
        policy="scores",
    ),
)


class DescentReply(Reply, frozen=True):
    """The descent direction of every participant."""

    parts: dict[int, DescentUpdate]

    discloses = (
        share_disclosure("terms", "{terms}", "moments"),
        *_DIRECTION,
    )


class SummedStep(PartBody, frozen=True):
    """The sum of the gradients of a table's shards."""

    sum: Annotated[AnyArray, f.shares("summed")]
    place: f.Count | None = None


class DirectionRequest(Request, frozen=True, kw_only=True):
    """Make the descent direction of sharded tables from their gradients' sums."""

    terms: DescentTerms
    parts: dict[int, SummedStep]

    discloses = (sum_disclosure("terms", "{terms}"),)
    schedule = ("terms", "place")


class DirectionReply(Reply, frozen=True):
    """The descent direction of every participant of the sharded tables."""

    parts: dict[int, DirectionUpdate]

    discloses = _DIRECTION


TRAIN_DESCENT: Final = declare_action("train.descent", DescentRequest, DescentReply)
TRAIN_DIRECTION: Final = declare_action(
    "train.direction", DirectionRequest, DirectionReply
)
