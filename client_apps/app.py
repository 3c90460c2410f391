"""The Flower ClientApp: one thin action per message type.

What an action raises on purpose is logged here, for those who can mend it, and travels
back with the part it was at, which the server turns into a site and a table; anything
else is logged here and travels as its type and place only, because the text of a
foreign exception may quote data.

In deployment every message starts a process. What answers it is imported when it comes,
so that a round of training waits for no library that reads tables or parses queries.
"""

import importlib
import time
import traceback
from collections.abc import Callable, Mapping
from logging import ERROR
from pathlib import Path
from typing import Final, cast

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from client_apps.site import Site
from tp_flower.errors import TPFlowerError
from tp_flower.protocol import Action, Packet, pack, unpack

Answer = Callable[[Site, Packet], Packet]

ANSWERS: Final[Mapping[Action, str]] = {
    Action.DESCRIBE: "setup:describe",
    Action.SEAL: "keys:seal",
    Action.EXTRACT: "setup:extract_rows",
    Action.STATISTICS: "setup:statistics",
    Action.CHECK: "check:check",
    Action.PREPARE: "prepare:prepare",
    Action.ADMM: "training:admm",
    Action.CONSENSUS: "training:consensus",
    Action.SGD: "training:sgd",
    Action.STEP: "training:step",
    Action.SCORE: "scoring:score",
    Action.DELIVER: "delivery:deliver",
    Action.FINISH: "finish:finish",
}
"""What answers an action: a module of this package and its function."""

app = ClientApp()


def answer_of(action: Action) -> Answer:
    """Import and return the function that answers an action."""
    module, _, name = ANSWERS[action].partition(":")
    return cast(Answer, getattr(importlib.import_module(f"client_apps.{module}"), name))


def _reply(message: Message, context: Context, action: Action) -> Message:
    started = time.perf_counter()
    site = Site(context)
    try:
        packet = answer_of(action)(site, unpack(message.content))
        packet.header["seconds"] = time.perf_counter() - started
        content = pack(packet)
    except TPFlowerError as error:
        log(ERROR, "%s failed: %s", message.metadata.message_type, error)
        content = _error(site, site.without_places(str(error)))
    except Exception as error:  # noqa: BLE001 - see the module docstring
        log(ERROR, "%s failed:\n%s", message.metadata.message_type, _trace(error))
        content = _error(site, f"{_place(error)}; its text is in the site's log")
    return Message(content, reply_to=message)


def _error(site: Site, text: str) -> RecordDict:
    header: dict[str, object] = {"error": text}
    if site.current_part is not None:
        header["part"] = site.current_part
    return pack(Packet(header))


def _place(error: Exception) -> str:
    """Say what was raised where, without its text."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def _register(action: Action) -> None:
    """Make the app answer messages of one type."""
    category, _, name = action.partition(".")
    decorate = {"query": app.query, "train": app.train}[category]

    @decorate(name)
    def act(message: Message, context: Context) -> Message:
        return _reply(message, context, action)


for _action in ANSWERS:
    _register(_action)
