"""The Flower ClientApp: one thin action per message type.

Errors raised on purpose are logged here, for the site's owner, and sent to the server
together with the participant that was being worked on, which the server turns into a
site and a table. The server gets only the type and place of any other exception,
because its text may quote data.

In deployment every message starts a process. Handlers are imported when a message needs
them, so that a round of training loads no library that reads tables or parses queries.
"""

import traceback
from collections.abc import Mapping
from logging import DEBUG, ERROR, INFO
from pathlib import Path
from typing import Final

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from client_apps.methods import registry
from client_apps.rounds import transaction
from client_apps.rounds.site import Site
from client_apps.rounds.transaction import (
    IncomingRequest,
    MessageLog,
    answer_once,
    record_refusal,
)
from tp_flower.errors import BehindError, SiteError, TPFlowerError, kind_of
from tp_flower.methods.method import import_reference
from tp_flower.protocol.codec import add_envelope, decode, encode
from tp_flower.protocol.messages import Action, Failure, ReplyEnvelope
from tp_flower.protocol.packet import pack, unpack
from tp_flower.protocol.session_messages import SessionRequest

ANSWERS: Final[Mapping[Action, str]] = {
    Action.SESSION: "client_apps.rounds.session:hold_session",
    Action.DESCRIBE: "client_apps.handlers.setup:describe",
    Action.SEAL: "client_apps.privacy.keys:seal",
    Action.CUTOFFS: "client_apps.handlers.cutoffs:seal_cutoffs",
    Action.PARTIALS: "client_apps.handlers.partials:seal_answers",
    Action.EXTRACT: "client_apps.handlers.setup:extract_rows",
    Action.STATISTICS: "client_apps.handlers.encoding:statistics",
    Action.FIT: "client_apps.handlers.encoding:fit_shards",
    Action.RANK: "client_apps.handlers.ranks:rank",
    Action.NEXT: "client_apps.training.next_fit:next_fit",
    Action.PREPARE: "client_apps.training.prepare:prepare",
    Action.DIVIDE: "client_apps.handlers.inference:divide",
    Action.BINS: "client_apps.training.bins:bins",
    Action.SCORE: "client_apps.handlers.inference:score",
    Action.INSPECT: "client_apps.handlers.inspection:inspect",
    Action.FINISH: "client_apps.training.finish:finish",
}
"""By action that is no method's, the module and the function that answers it."""


def places() -> dict[Action, str]:
    """Return where each action is answered, those of the methods included.

    An action of several methods is listed with the first of them.
    """
    answered = dict(ANSWERS)
    for action, handler in registry.places():
        answered.setdefault(action, handler)
    return answered


def handler_of(action: Action) -> registry.Handler:
    """Import and return the handler of an action."""
    if action not in ANSWERS:
        return registry.handler_of(action)
    handler: registry.Handler = import_reference(ANSWERS[action])
    return handler


def make_app() -> ClientApp:
    """Return the ClientApp that answers every message of a site and its methods."""
    client_app = ClientApp()
    for action in places():
        _add(client_app, action)
    return client_app


def _add(client_app: ClientApp, action: Action) -> None:
    """Register the handler of an action with the ClientApp."""
    category, _, name = action.partition(".")
    decorate = {"query": client_app.query, "train": client_app.train}[category]

    @decorate(name)
    def act(message: Message, context: Context) -> Message:
        return Message(_reply(message.content, context, action), reply_to=message)


def _reply(content: RecordDict, context: Context, action: Action) -> RecordDict:
    """Return the reply to a message: an answer or a failure."""
    request = None
    site = None
    message_log = MessageLog(action, content)
    try:
        if action is Action.SESSION:
            return _hold_session(content, context)
        request = IncomingRequest.read(action, content)
        site = Site(context, request.run)
        reply = answer_once(site, request, handler_of(action))
        level = DEBUG if site.is_simulated else INFO
        message_log.write(level, "answered", request, site, reply)
        return reply
    except Exception as error:  # noqa: BLE001 - see the module docstring
        reason = str(error) if isinstance(error, TPFlowerError) else _place(error)
        message_log.write(
            ERROR, "refused", request, site, kind=str(kind_of(error)), reason=reason
        )
        if request is not None and site is not None:
            error = record_refusal(site, request, error, reason)
        return _error_reply(request, site, error)


def _hold_session(content: RecordDict, context: Context) -> RecordDict:
    """Answer the messages of a session; return the reply to the one that opened it."""
    opening = decode(SessionRequest, unpack(content))
    actions = {
        str(action): action for action in places() if action is not Action.SESSION
    }

    def answer(name: str, message: RecordDict) -> RecordDict:
        if name not in actions:
            raise SiteError(f"a session has no message {name!r}")
        return _reply(message, context, actions[name])

    reply = handler_of(Action.SESSION)(
        opening, context.node_config, context.node_id, answer
    )
    return pack(add_envelope(encode(reply), ReplyEnvelope()))


def _error_reply(
    request: transaction.IncomingRequest | None, site: Site | None, error: Exception
) -> RecordDict:
    """Return the reply that reports an error, without text of unexpected ones."""
    if isinstance(error, TPFlowerError):
        text = str(error) if site is None else site.redact_places(str(error))
    else:
        log(ERROR, "".join(traceback.format_exception(error)))
        text = f"{_place(error)}; its text is in the site's log"
    failure = Failure(
        error=text,
        kind=kind_of(error),
        part=None if site is None else site.changes.part,
    )
    envelope = ReplyEnvelope(
        round=None if request is None else request.number,
        at=error.at if isinstance(error, BehindError) else None,
    )
    return pack(add_envelope(encode(failure), envelope))


def _place(error: Exception) -> str:
    """Return the type and place of an exception, without its text."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"


app = make_app()
