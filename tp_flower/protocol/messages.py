"""Every request that the server may send and every reply that a site may give.

The declarations stand beside each other by family; a message that is not in
``EXCHANGES`` can be neither sent nor read.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from tp_flower.protocol.admm_messages import (
    AdmmReply,
    AdmmRequest,
    ConsensusReply,
    ConsensusRequest,
)
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
from tp_flower.protocol.fields import Reply, Request
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
)
from tp_flower.protocol.sgd_messages import (
    SgdReply,
    SgdRequest,
    StepReply,
    StepRequest,
)
from tp_flower.protocol.statistics_messages import (
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
