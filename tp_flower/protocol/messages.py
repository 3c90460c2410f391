"""The exchanges between the server and a site, and the envelopes of their messages.

An exchange that is not declared as an :class:`Action` can be neither sent nor read.
Those here are of every run; those of a method are declared in its room.
"""

from typing import Annotated, ClassVar, Final, Self

import msgspec

from tp_flower.errors import ErrorKind
from tp_flower.protocol import cutoff_messages as cutoffs
from tp_flower.protocol import inference_messages as inference
from tp_flower.protocol import inspection_messages as inspection
from tp_flower.protocol import rank_messages as ranks
from tp_flower.protocol import session_messages as session
from tp_flower.protocol import setup_messages as setup
from tp_flower.protocol import training_messages as training
from tp_flower.protocol.fields import Body, Count, Reply, Request, between


class Action(str):
    """An exchange: the Flower message type of a request, the request and its reply."""

    request: type[Request]
    reply: type[Reply]

    SESSION: ClassVar["Action"]
    DESCRIBE: ClassVar["Action"]
    SEAL: ClassVar["Action"]
    CUTOFFS: ClassVar["Action"]
    PARTIALS: ClassVar["Action"]
    EXTRACT: ClassVar["Action"]
    STATISTICS: ClassVar["Action"]
    FIT: ClassVar["Action"]
    RANK: ClassVar["Action"]
    NEXT: ClassVar["Action"]
    PREPARE: ClassVar["Action"]
    CONSENSUS: ClassVar["Action"]
    DIVIDE: ClassVar["Action"]
    BINS: ClassVar["Action"]
    SCORE: ClassVar["Action"]
    INSPECT: ClassVar["Action"]
    FINISH: ClassVar["Action"]

    def __new__(cls, name: str, request: type[Request], reply: type[Reply]) -> Self:
        """Return the action of a name, ``query.<phase>`` or ``train.<phase>``."""
        action = super().__new__(cls, name)
        action.request = request
        action.reply = reply
        return action

    def __reduce__(self) -> tuple[object, ...]:
        """Return how a copy is made, which is this very action.

        Flower's simulation sends the ClientApp, which knows actions, to processes.
        """
        return action_of, (self.request,)

    @property
    def phase(self) -> str:
        """The name without its category."""
        return self.partition(".")[2]

    @property
    def messages(self) -> tuple[type[Request], type[Reply]]:
        """The request and the reply."""
        return self.request, self.reply


ACTIONS: Final[dict[type[Request], Action]] = {}
"""The action of each request, of all that are declared."""


def declare_action(name: str, request: type[Request], reply: type[Reply]) -> Action:
    """Register and return an action; ValueError if its name or request has another."""
    action = Action(name, request, reply)
    if name in ACTIONS.values() or request in ACTIONS:
        raise ValueError(f"message {name!r} is registered: choose another name")
    return ACTIONS.setdefault(request, action)


def action_of(request: type[Request]) -> Action:
    """Return the action that a request is declared with; KeyError for none."""
    return ACTIONS[request]


def action_named(name: str) -> Action:
    """Return the action of a Flower message type; KeyError if none is declared."""
    return {str(action): action for action in ACTIONS.values()}[name]


Action.SESSION = declare_action(
    "query.session", session.SessionRequest, session.SessionReply
)
Action.DESCRIBE = declare_action(
    "query.describe", setup.DescribeRequest, setup.DescribeReply
)
Action.SEAL = declare_action("query.seal", setup.SealRequest, setup.SealReply)
Action.CUTOFFS = declare_action(
    "query.cutoffs", cutoffs.CutoffsRequest, cutoffs.CutoffsReply
)
Action.PARTIALS = declare_action(
    "query.partials", cutoffs.PartialsRequest, cutoffs.PartialsReply
)
Action.EXTRACT = declare_action(
    "query.extract", setup.ExtractRequest, setup.ExtractReply
)
Action.STATISTICS = declare_action(
    "query.statistics", setup.StatisticsRequest, setup.StatisticsReply
)
Action.FIT = declare_action("query.fit", setup.FitRequest, setup.FitReply)
Action.RANK = declare_action("query.rank", ranks.RankRequest, ranks.RankReply)
Action.NEXT = declare_action("train.next", training.NextRequest, training.NextReply)
Action.PREPARE = declare_action(
    "train.prepare", training.PrepareRequest, training.PrepareReply
)
Action.CONSENSUS = declare_action(
    "train.consensus", training.ConsensusRequest, training.ConsensusReply
)
Action.DIVIDE = declare_action(
    "query.divide", inference.DivideRequest, inference.DivideReply
)
Action.BINS = declare_action("train.bins", training.BinsRequest, training.BinsReply)
Action.SCORE = declare_action(
    "query.score", inference.ScoreRequest, inference.ScoreReply
)
Action.INSPECT = declare_action(
    "query.inspect", inspection.InspectRequest, inspection.InspectReply
)
Action.FINISH = declare_action(
    "query.finish", inference.FinishRequest, inference.FinishReply
)


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
