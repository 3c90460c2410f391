"""Every request that the server may send and every reply that a site may give.

The declarations stand beside each other by family; a message that is not in
``EXCHANGES`` can be neither sent nor read.
"""

from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

import msgspec

from tp_flower.errors import ErrorKind
from tp_flower.protocol.coreset_messages import (
    DrawReply,
    DrawRequest,
    MeasureReply,
    MeasureRequest,
    RowsReply,
    RowsRequest,
    WeighReply,
    WeighRequest,
)
from tp_flower.protocol.fields import Body, Count, Reply, Request, between
from tp_flower.protocol.inference_messages import (
    DeliverReply,
    DeliverRequest,
    FinishReply,
    FinishRequest,
    ScoreReply,
    ScoreRequest,
)
from tp_flower.protocol.packet import Action
from tp_flower.protocol.personalised_messages import (
    PersonaliseReply,
    PersonaliseRequest,
    PersonalReply,
    PersonalRequest,
    SummariseReply,
    SummariseRequest,
)
from tp_flower.protocol.setup_messages import (
    CheckReply,
    CheckRequest,
    DescribeReply,
    DescribeRequest,
    ExtractReply,
    ExtractRequest,
    SealReply,
    SealRequest,
    StatisticsReply,
    StatisticsRequest,
)
from tp_flower.protocol.training_messages import (
    AdmmReply,
    AdmmRequest,
    ConsensusReply,
    ConsensusRequest,
    PrepareReply,
    PrepareRequest,
    SgdReply,
    SgdRequest,
    StepReply,
    StepRequest,
)


class Exchange(NamedTuple):
    """The two messages of an action."""

    request: type[Request]
    reply: type[Reply]


EXCHANGES: Final[Mapping[Action, Exchange]] = {
    Action.DESCRIBE: Exchange(DescribeRequest, DescribeReply),
    Action.SEAL: Exchange(SealRequest, SealReply),
    Action.EXTRACT: Exchange(ExtractRequest, ExtractReply),
    Action.STATISTICS: Exchange(StatisticsRequest, StatisticsReply),
    Action.CHECK: Exchange(CheckRequest, CheckReply),
    Action.MEASURE: Exchange(MeasureRequest, MeasureReply),
    Action.DRAW: Exchange(DrawRequest, DrawReply),
    Action.WEIGH: Exchange(WeighRequest, WeighReply),
    Action.PREPARE: Exchange(PrepareRequest, PrepareReply),
    Action.ADMM: Exchange(AdmmRequest, AdmmReply),
    Action.CONSENSUS: Exchange(ConsensusRequest, ConsensusReply),
    Action.SGD: Exchange(SgdRequest, SgdReply),
    Action.STEP: Exchange(StepRequest, StepReply),
    Action.ROWS: Exchange(RowsRequest, RowsReply),
    Action.PERSONALISE: Exchange(PersonaliseRequest, PersonaliseReply),
    Action.SUMMARISE: Exchange(SummariseRequest, SummariseReply),
    Action.PERSONAL: Exchange(PersonalRequest, PersonalReply),
    Action.SCORE: Exchange(ScoreRequest, ScoreReply),
    Action.DELIVER: Exchange(DeliverRequest, DeliverReply),
    Action.FINISH: Exchange(FinishRequest, FinishReply),
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
        after: last round that the site has answered, as far as the server knows; None
            for none.
    """

    run: Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{RUN_DIGITS}}}\Z")]
    round: Count
    after: Count | None = None


class ReplyEnvelope(Body, frozen=True, kw_only=True):
    """The round that a reply answers.

    Attributes:
        round: its number; None where the request could not be read.
        seconds: that the site has computed; None of a failure.
        at: of ``describe``, and of a site that lacks rounds: the last round that it has
            answered; None for none.
    """

    round: Count | None = None
    seconds: Annotated[float, between(0, 1e9)] | None = None
    at: Count | None = None


class Failure(Reply, frozen=True, kw_only=True):
    """In place of a reply: what went wrong.

    Attributes:
        kind: what may be done about it.
        part: number of the participant that it is about; None for all.
    """

    error: str
    kind: ErrorKind
    part: Count | None = None

    schedule = ("error", "kind", "part")


ENVELOPE: Final = frozenset(
    {*RequestEnvelope.__struct_fields__, *ReplyEnvelope.__struct_fields__}
)
"""Fields of a header that are not the message's own."""
