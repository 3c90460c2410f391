"""Every request that the server may send and every reply that a site may give.

The declarations stand beside each other by family; a message that is not in
``EXCHANGES`` can be neither sent nor read.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec

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
from tp_flower.protocol.epoch_messages import (
    AdmmReply,
    AdmmRequest,
    ConsensusReply,
    ConsensusRequest,
    SgdReply,
    SgdRequest,
    StepReply,
    StepRequest,
)
from tp_flower.protocol.fields import Body, Count, Reply, Request
from tp_flower.protocol.inference_messages import (
    DeliverReply,
    DeliverRequest,
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
    FinishReply,
    FinishRequest,
    PrepareReply,
    PrepareRequest,
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

_ACTIONS: Final[Mapping[type[Request], Action]] = {
    exchange.request: action for action, exchange in EXCHANGES.items()
}


def action_of(request: Request) -> Action:
    """Return the Flower message type that carries a request."""
    return _ACTIONS[type(request)]


MOST_SECONDS: Final = 1e9
"""No site works on one message for longer."""

RunName = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]


class RequestEnvelope(Body, frozen=True, kw_only=True):
    """Which round of which run a request belongs to.

    Attributes:
        run: its name; whoever knows it can go on with the run.
        round: its number.
        after: last round that the site has answered, as far as the server knows; None
            for none.
    """

    run: RunName
    round: Count
    after: Count | None = None


class ReplyEnvelope(Body, frozen=True, kw_only=True):
    """Which round a reply answers.

    Attributes:
        round: its number.
        seconds: that the site has computed.
        at: of ``describe``: the last round that the site has answered; None for none.
    """

    round: Count
    seconds: Seconds
    at: Count | None = None


class Failure(Body, frozen=True, kw_only=True):
    """In place of a reply: what went wrong.

    Attributes:
        error: in words.
        kind: what may be done about it.
        round: that was asked for; None where that could not be read.
        part: number of the participant that it is about; None for all.
        at: last round that the site has answered, if it lacks some; None for none.
    """

    error: str
    kind: str
    round: Count | None = None
    part: Count | None = None
    at: Count | None = None


_NAMES: Final = frozenset(
    {*RequestEnvelope.__struct_fields__, *ReplyEnvelope.__struct_fields__}
)


def enveloped(header: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a header that are the envelope's."""
    return {name: header[name] for name in header if name in _NAMES}


def content_of(header: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a header that are the message's own."""
    return {name: header[name] for name in header if name not in _NAMES}
