"""The methods that a site trains by: the one file of a site that names them.

The site half of a method is a *room* of ``client_apps/methods``, a module or a folder
of the method's name. A method from elsewhere is added by :func:`register`, before the
ClientApp is made.

In deployment every message starts a process. So a room is named here by text, and
imported when a message needs it.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tp_flower.methods import ADMM, BOOST, CG, CORESET, PERSONAL, SGD
from tp_flower.protocol.messages import Action

Handler = Callable[..., Any]
"""A function from the site and a request to the reply."""


@dataclass(frozen=True)
class Room:
    """The site half of a method: where its functions are, each as ``module:name``.

    Attributes:
        answers: by message, the function that answers it in the method's runs.
        opens: by message, the function that answers it before any training, in runs of
            all methods that have the message.
    """

    answers: Mapping[Action, str]
    opens: Mapping[Action, str] = field(default_factory=dict)


_METHODS: Final = "client_apps.methods"
ROOMS: Final[dict[str, Room]] = {
    ADMM: Room(
        answers={
            Action.ADMM: f"{_METHODS}.admm:admm",
            Action.CONSENSUS: f"{_METHODS}.admm:consensus",
        }
    ),
    CG: Room(
        answers={
            Action.DESCENT: f"{_METHODS}.cg:descend",
            Action.DIRECTION: f"{_METHODS}.cg:direct",
        }
    ),
    SGD: Room(
        answers={
            Action.SGD: f"{_METHODS}.sgd:sgd",
            Action.STEP: f"{_METHODS}.sgd:step",
        }
    ),
    BOOST: Room(
        answers={
            Action.BOOST: f"{_METHODS}.boost:boost",
            Action.BAG: f"{_METHODS}.boost:bag",
        }
    ),
    CORESET: Room(
        answers={Action.ROWS: f"{_METHODS}.coreset.sampled_rows:rows"},
        opens={
            Action.MEASURE: f"{_METHODS}.coreset.drawing:measure",
            Action.DRAW: f"{_METHODS}.coreset.drawing:draw",
            Action.WEIGH: f"{_METHODS}.coreset.drawing:weigh",
        },
    ),
    PERSONAL: Room(
        answers={
            Action.SUMMARISE: f"{_METHODS}.personalised.setup:summarise",
            Action.PERSONAL: f"{_METHODS}.personalised.rounds:personal",
        },
        opens={Action.PERSONALISE: f"{_METHODS}.personalised.setup:personalise"},
    ),
}
"""By the family of methods that share it (``Method.family``)."""


def register(family: str, room: Room) -> None:
    """Add the site half of a method; ValueError if its family has one."""
    if ROOMS.setdefault(family, room) is not room:
        raise ValueError(f"family {family!r} is registered: choose another name")


def places() -> Iterator[tuple[Action, str]]:
    """Yield the methods' messages, each with the function that answers it."""
    for room in ROOMS.values():
        yield from room.opens.items()
        yield from room.answers.items()


def imported(place: str) -> Any:
    """Import and return what is at a place, ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
