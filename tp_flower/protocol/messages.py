"""Every request that the server may send and every reply that a site may give.

The declarations stand beside each other by family; a message that is not in
``EXCHANGES`` can be neither sent nor read.
"""

from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

import msgspec

from tp_flower.errors import ErrorKind
from tp_flower.protocol import coreset_messages as coreset
from tp_flower.protocol import inference_messages as inference
from tp_flower.protocol import personalised_messages as personal
from tp_flower.protocol import setup_messages as setup
from tp_flower.protocol import training_messages as training
from tp_flower.protocol.fields import Body, Count, Reply, Request, between
from tp_flower.protocol.packet import Action


class Exchange(NamedTuple):
    """The two messages of an action."""

    request: type[Request]
    reply: type[Reply]


EXCHANGES: Final[Mapping[Action, Exchange]] = {
    Action.DESCRIBE: Exchange(setup.DescribeRequest, setup.DescribeReply),
    Action.SEAL: Exchange(setup.SealRequest, setup.SealReply),
    Action.EXTRACT: Exchange(setup.ExtractRequest, setup.ExtractReply),
    Action.STATISTICS: Exchange(setup.StatisticsRequest, setup.StatisticsReply),
    Action.CHECK: Exchange(setup.CheckRequest, setup.CheckReply),
    Action.MEASURE: Exchange(coreset.MeasureRequest, coreset.MeasureReply),
    Action.DRAW: Exchange(coreset.DrawRequest, coreset.DrawReply),
    Action.WEIGH: Exchange(coreset.WeighRequest, coreset.WeighReply),
    Action.PREPARE: Exchange(training.PrepareRequest, training.PrepareReply),
    Action.ADMM: Exchange(training.AdmmRequest, training.AdmmReply),
    Action.CONSENSUS: Exchange(training.ConsensusRequest, training.ConsensusReply),
    Action.SGD: Exchange(training.SgdRequest, training.SgdReply),
    Action.STEP: Exchange(training.StepRequest, training.StepReply),
    Action.ROWS: Exchange(coreset.RowsRequest, coreset.RowsReply),
    Action.PERSONALISE: Exchange(
        personal.PersonaliseRequest, personal.PersonaliseReply
    ),
    Action.SUMMARISE: Exchange(personal.SummariseRequest, personal.SummariseReply),
    Action.PERSONAL: Exchange(personal.PersonalRequest, personal.PersonalReply),
    Action.SCORE: Exchange(inference.ScoreRequest, inference.ScoreReply),
    Action.DELIVER: Exchange(inference.DeliverRequest, inference.DeliverReply),
    Action.FINISH: Exchange(inference.FinishRequest, inference.FinishReply),
}

ACTIONS: Final[Mapping[type[Request], Action]] = {
    exchange.request: action for action, exchange in EXCHANGES.items()
}
"""The Flower message type that carries a request."""


RUN_DIGITS: Final = 32
NO_RUN: Final = "0" * RUN_DIGITS
"""Names none."""


class RequestEnvelope(Body, frozen=True, kw_only=True):
    """The run and the round that a request belongs to.

    Attributes:
        run: its name; whoever knows it can go on with the run.
        after: last round that the site has answered, as far as the server knows.
    """

    run: Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{RUN_DIGITS}}}\Z")]
    round: Count
    after: Count | None = None


class ReplyEnvelope(Body, frozen=True, kw_only=True):
    """The round that a reply answers.

    Attributes:
        round: None where the request could not be read.
        seconds: that the site has computed; None of a failure.
        at: of ``describe``, and of a site that lacks rounds: the last round that it has
            answered; None for none.
    """

    round: Count | None = None
    seconds: Annotated[float, between(0, 1e9)] | None = None
    at: Count | None = None


class Failure(Reply, frozen=True, kw_only=True):
    """In place of a reply: what went wrong, of one participant or (None) of all."""

    error: str
    kind: ErrorKind
    part: Count | None = None

    schedule = ("error", "kind", "part")


ENVELOPE: Final = frozenset(
    {*RequestEnvelope.__struct_fields__, *ReplyEnvelope.__struct_fields__}
)
"""Fields of a header that are not the message's own."""
