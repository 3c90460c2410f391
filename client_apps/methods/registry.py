"""The methods that a site trains by: the one file of a site that names them.

The site half of a method is a *room* of ``client_apps/methods``, a module or a folder
of the method's name. A method from elsewhere is added by :func:`register`, before the
ClientApp is made.

In deployment every message starts a process. So a room is named here by text, and
imported when a message needs it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tp_flower.errors import MessageError
from tp_flower.methods.admm.messages import TRAIN_ADMM
from tp_flower.methods.boost.messages import (
    TRAIN_BAG,
    TRAIN_BOOST,
    TRAIN_PAIRS,
    TRAIN_REGIONS,
)
from tp_flower.methods.cg.messages import TRAIN_DESCENT, TRAIN_DIRECTION
from tp_flower.methods.coreset.messages import (
    TRAIN_DRAW,
    TRAIN_MEASURE,
    TRAIN_ROWS,
    TRAIN_WEIGH,
)
from tp_flower.methods.method import import_reference
from tp_flower.methods.moments.messages import (
    TRAIN_INFORMATION,
    TRAIN_MOMENTS,
    TRAIN_SOLUTION,
    TRAIN_SOLVE,
)
from tp_flower.methods.personalised.messages import (
    TRAIN_PERSONAL,
    TRAIN_PERSONALISE,
    TRAIN_SUMMARISE,
)
from tp_flower.methods.sgd.messages import TRAIN_SGD, TRAIN_STEP
from tp_flower.protocol.fields import Reply, Request
from tp_flower.protocol.messages import Action

if TYPE_CHECKING:
    from client_apps.methods.site_method import JoinMethod, SiteMethod
    from client_apps.rounds.site import Site

Handler = Callable[..., Any]
"""A function from the site and a request to the reply."""


@dataclass(frozen=True)
class Room:
    """The site half of a method: where its pieces are, each as ``module:name``.

    Attributes:
        method: the subclass of :class:`~client_apps.methods.site_method.SiteMethod`.
        answers: by message, the function that answers it in the method's runs, once
            their training has begun.
        opens: by message, the function that answers it before any training, in runs of
            all methods that have the message.
    """

    method: str
    answers: Mapping[Action, str]
    opens: Mapping[Action, str] = field(default_factory=dict)


_METHODS: Final = "client_apps.methods"
ROOMS: Final[dict[str, Room]] = {
    "admm": Room(
        method=f"{_METHODS}.admm:AdmmMethod",
        answers={
            TRAIN_ADMM: f"{_METHODS}.admm:admm",
            Action.CONSENSUS: f"{_METHODS}.admm:consensus",
        },
    ),
    "cg": Room(
        method=f"{_METHODS}.cg:CgMethod",
        answers={
            TRAIN_DESCENT: f"{_METHODS}.cg:descend",
            TRAIN_DIRECTION: f"{_METHODS}.cg:direct",
            TRAIN_INFORMATION: f"{_METHODS}.moments.information:information",
        },
    ),
    "sgd": Room(
        method=f"{_METHODS}.sgd:SgdMethod",
        answers={
            TRAIN_SGD: f"{_METHODS}.sgd:sgd",
            TRAIN_STEP: f"{_METHODS}.sgd:step",
        },
    ),
    "boost": Room(
        method=f"{_METHODS}.boost.rounds:BoostMethod",
        answers={
            TRAIN_BOOST: f"{_METHODS}.boost.rounds:boost",
            TRAIN_BAG: f"{_METHODS}.boost.rounds:bag",
            TRAIN_REGIONS: f"{_METHODS}.boost.regions:divide",
            TRAIN_PAIRS: f"{_METHODS}.boost.regions:pair",
        },
    ),
    "moments": Room(
        method=f"{_METHODS}.moments.sums:MomentsMethod",
        answers={
            TRAIN_SOLVE: f"{_METHODS}.moments.reading:solve",
            TRAIN_SOLUTION: f"{_METHODS}.moments.sums:take_solution",
        },
        opens={TRAIN_MOMENTS: f"{_METHODS}.moments.sums:moments"},
    ),
    "coreset": Room(
        method=f"{_METHODS}.coreset.sampled_rows:CoresetMethod",
        answers={
            TRAIN_ROWS: f"{_METHODS}.coreset.sampled_rows:rows",
            Action.CONSENSUS: f"{_METHODS}.coreset.sampled_rows:take_solution",
        },
        opens={
            TRAIN_MEASURE: f"{_METHODS}.coreset.drawing:measure",
            TRAIN_DRAW: f"{_METHODS}.coreset.drawing:draw",
            TRAIN_WEIGH: f"{_METHODS}.coreset.drawing:weigh",
        },
    ),
    "personal": Room(
        method=f"{_METHODS}.personalised.rounds:PersonalisedMethod",
        answers={
            TRAIN_SUMMARISE: f"{_METHODS}.personalised.setup:summarise",
            TRAIN_PERSONAL: f"{_METHODS}.personalised.rounds:personal",
        },
        opens={TRAIN_PERSONALISE: f"{_METHODS}.personalised.setup:personalise"},
    ),
}
"""By the family of methods that share it (``Method.family``)."""


def register(family: str, room: Room) -> None:
    """Add the site half of a method; ValueError if its family has one."""
    if ROOMS.setdefault(family, room) is not room:
        raise ValueError(f"family {family!r} is registered: choose another name")


def method_of(family: str) -> "SiteMethod[Any]":
    """Return the site half of a family of methods."""
    method: SiteMethod[Any] = import_reference(ROOMS[family].method)()
    return method


def join_method_of(family: str) -> "JoinMethod[Any]":
    """Return the site half of a family that trains over joins.

    Raises:
        MessageError: the family does not train over joins.
    """
    from client_apps.methods.site_method import JoinMethod

    method = method_of(family)
    if not isinstance(method, JoinMethod):
        raise MessageError(f"a run by {family!r} does not train over joins")
    return method


def places() -> Iterator[tuple[Action, str]]:
    """Yield the methods' messages, each with a function that answers it."""
    for room in ROOMS.values():
        yield from room.opens.items()
        yield from room.answers.items()


def handler_of(action: Action) -> Handler:
    """Return the function that answers a message of the methods."""
    for room in ROOMS.values():
        if action in room.opens:
            opening: Handler = import_reference(room.opens[action])
            return opening

    def answer(site: "Site", request: Request) -> Reply:
        """Answer a message of the method by which the run trains."""
        answers = ROOMS[site.family].answers
        if action not in answers:
            raise MessageError(
                f"{str(action)!r} is no message of a run by {site.family!r}"
            )
        reply: Reply = import_reference(answers[action])(site, request)
        return reply

    return answer
