"""Every request that the server may send and every reply that a site may give.

The declarations are in one module per family; a message that is not in :class:`Action`
can be neither sent nor read.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, Self

import msgspec

from tp_flower.errors import ErrorKind
from tp_flower.methods.boost import messages as boosting
from tp_flower.methods.cg import messages as descent
from tp_flower.methods.coreset import messages as coreset
from tp_flower.methods.personalised import messages as personal
from tp_flower.protocol import inference_messages as inference
from tp_flower.protocol import rank_messages as ranks
from tp_flower.protocol import session_messages as session
from tp_flower.protocol import setup_messages as setup
from tp_flower.protocol import training_messages as training
from tp_flower.protocol.fields import Body, Count, Reply, Request, between


class Action(StrEnum):
    """An exchange: the Flower message type of a request, the request and its reply."""

    request: type[Request]
    reply: type[Reply]

    def __new__(cls, name: str, request: type[Request], reply: type[Reply]) -> Self:
        """Return the member of a name, with its messages."""
        action = str.__new__(cls, name)
        action._value_ = name
        action.request, action.reply = request, reply
        return action

    SESSION = "query.session", session.SessionRequest, session.SessionReply
    DESCRIBE = "query.describe", setup.DescribeRequest, setup.DescribeReply
    SEAL = "query.seal", setup.SealRequest, setup.SealReply
    EXTRACT = "query.extract", setup.ExtractRequest, setup.ExtractReply
    STATISTICS = "query.statistics", setup.StatisticsRequest, setup.StatisticsReply
    FIT = "query.fit", setup.FitRequest, setup.FitReply
    RANK = "query.rank", ranks.RankRequest, ranks.RankReply
    MEASURE = "train.measure", coreset.MeasureRequest, coreset.MeasureReply
    DRAW = "train.draw", coreset.DrawRequest, coreset.DrawReply
    WEIGH = "train.weigh", coreset.WeighRequest, coreset.WeighReply
    PREPARE = "train.prepare", training.PrepareRequest, training.PrepareReply
    ADMM = "train.admm", training.AdmmRequest, training.AdmmReply
    CONSENSUS = "train.consensus", training.ConsensusRequest, training.ConsensusReply
    DESCENT = "train.descent", descent.DescentRequest, descent.DescentReply
    DIRECTION = "train.direction", descent.DirectionRequest, descent.DirectionReply
    BOOST = "train.boost", boosting.BoostRequest, boosting.BoostReply
    BAG = "train.bag", boosting.BagRequest, boosting.BagReply
    SGD = "train.sgd", training.SgdRequest, training.SgdReply
    STEP = "train.step", training.StepRequest, training.StepReply
    ROWS = "train.rows", coreset.RowsRequest, coreset.RowsReply
    PERSONALISE = (
        "train.personalise",
        personal.PersonaliseRequest,
        personal.PersonaliseReply,
    )
    SUMMARISE = "train.summarise", personal.SummariseRequest, personal.SummariseReply
    PERSONAL = "train.personal", personal.PersonalRequest, personal.PersonalReply
    SCORE = "query.score", inference.ScoreRequest, inference.ScoreReply
    FINISH = "query.finish", inference.FinishRequest, inference.FinishReply

    @property
    def messages(self) -> tuple[type[Request], type[Reply]]:
        """The request and the reply."""
        return self.request, self.reply


ACTIONS: Final[Mapping[type[Request], Action]] = {
    action.request: action for action in Action
}
"""The Flower message type that carries a request."""


RUN_DIGITS: Final = 32
NO_RUN: Final = "0" * RUN_DIGITS  # the name of no run


class RequestEnvelope(Body, frozen=True, kw_only=True):
    """The run and the round that a request belongs to.

    Attributes:
        run: its name; whoever knows it can continue the run.
        after: last round that the site has answered, as far as the server knows.
    """

    run: Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{RUN_DIGITS}}}\Z")]
    round: Count
    after: Count | None = None


class ReplyEnvelope(Body, frozen=True, kw_only=True):
    """The round that a reply answers.

    Attributes:
        round: None if the request could not be read.
        seconds: computing time of the site; None for a failure.
        at: for ``describe``, and for a site that lacks rounds: the last round that it
            has answered; None for none.
        ledger_end: checksum of the last line of the site's ledger before this request;
            who keeps it can ask the site's owner for the line. None for simulated
            sites.
    """

    round: Count | None = None
    seconds: Annotated[float, between(0, 1e9)] | None = None
    at: Count | None = None
    ledger_end: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")] | None = None


class Failure(Reply, frozen=True, kw_only=True):
    """In place of a reply: what went wrong, for one participant or (None) for all."""

    error: str
    kind: ErrorKind
    part: Count | None = None

    schedule = ("error", "kind", "part")


ENVELOPE: Final = frozenset(
    {*RequestEnvelope.__struct_encode_fields__, *ReplyEnvelope.__struct_encode_fields__}
)
"""Fields of a header that do not belong to the message itself."""
