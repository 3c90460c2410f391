"""One message to a site: it is answered exactly once, even if the process crashes.

Lock the run; look up the committed round; repeat its reply, refuse, or carry out the
request; commit the new state, the payments and the reply in one transaction; delete
what is no longer needed; count the commit in the file beside the database; reply.

    killed before    has happened               the same message again
    acting           nothing that anybody sees  acts again
    committing       nothing that anybody sees  acts again
    counting         all                        gets the reply, once that is counted
    forgetting       all                        gets the reply, and forgets
    replying         all                        gets the reply

A refusal changes nothing, but for one that depends on the rows (``OfRowsError``): after
it the site answers only the same request again and the end of the run, or the next fit
of a search.

An older request is refused, because the site's state has moved on. The server says
which round it believes the site has answered last: a site that has answered fewer says
so, and is sent the rounds that it lacks.

The ledger has a line for each query of a table, answered or refused: ``flower-run`` is
Flower's number of the run, by which the SuperLink's operator finds its account: Flower
tells an app no more. ``app`` is the SHA-256 of the app's bundle, ``query`` the text of
the fragment, ``digest`` the text's, ``proposal`` the whole run's and ``policy`` the
rules'; ``document`` is a run that its owner has not approved.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from logging import ERROR, INFO, WARNING
from operator import itemgetter
from typing import Any, Final, Self

from flwr.app import RecordDict

from client_apps.data.ledger import ANSWER, REFUSE, Line
from client_apps.data.run_store import CommittedRound, Entry
from client_apps.rounds.site import REQUEST, Site
from tp_flower import errors
from tp_flower.events import Value, is_printed, log_event
from tp_flower.node_config import app_sha256, site_id
from tp_flower.protocol.codec import add_envelope, decode, encode, read_envelope
from tp_flower.protocol.fields import Reply, Request
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.protocol.messages import NO_RUN, Action, ReplyEnvelope, RequestEnvelope
from tp_flower.protocol.packet import (
    Packet,
    message_bytes,
    open_parcel,
    pack,
    parcel_of,
    unpack,
)
from tp_flower.protocol.training_messages import NextRequest

# made once: json.dumps makes an encoder per call
_JSON: Final = json.JSONEncoder(sort_keys=True)

Answer = Callable[[Site, Any], Any]
"""A handler: takes the site and a request, returns the reply; rerun after a crash."""

MOST_CHARACTERS: Final = 20_000  # of a text in the line of a refusal
_LEDGER_ERRORS: Final = (
    errors.PolicyError,
    errors.BudgetError,
    errors.KeyRefusalError,
    errors.ProposalError,
    errors.MaskError,
)
"""Refusals that an owner finds in the ledger, whatever the message."""
STOPPED: Final = "stopped"
"""Entry: the digest of the request that was refused for the rows."""


@dataclass(frozen=True)
class IncomingRequest:
    """A message from the server; ``after`` is the last round whose reply it has."""

    action: Action
    run: str
    number: int
    after: int | None
    packet: Packet

    @classmethod
    def read(cls, action: Action, content: RecordDict) -> Self:
        """Return the request that a message carries, after checking its envelope."""
        packet = unpack(content)
        try:
            envelope = read_envelope(RequestEnvelope, packet)
        except errors.MessageError as error:
            raise errors.SiteError(f"malformed request: {error}") from None
        run = envelope.run
        number = envelope.round
        after = envelope.after
        if run == NO_RUN:
            raise errors.SiteError(
                f"malformed request: 'run' is {run!r}, which is not a run"
            )
        if action is Action.DESCRIBE and number:
            raise errors.SiteError(f"malformed request: 'round' of {action} must be 0")
        if after is not None and after >= number and action is not Action.DESCRIBE:
            raise errors.SiteError(
                f"malformed request: 'after' is {after}, but must be below 'round', "
                f"{number}"
            )
        return cls(action, run, number, after, packet)

    @cached_property
    def digest(self) -> str:
        """Equal for equal requests in every process, whatever ``after`` is."""
        header = {k: value for k, value in self.packet.header.items() if k != "after"}
        arrays = sorted(self.packet.arrays.items(), key=itemgetter(0))
        layout = [[*key, array.dtype.str, array.shape] for key, array in arrays]
        # processors have instructions for SHA-256
        digest = hashlib.sha256(_JSON.encode([self.action, header, layout]).encode())
        for _, array in arrays:
            digest.update(array.data if array.size else b"")
        return digest.hexdigest()


def answer_once(site: Site, request: IncomingRequest, answer: Answer) -> RecordDict:
    """Return the reply to a request; all but descriptions are carried out once.

    If this raises, nothing has changed, but that the run may be ``STOPPED``.
    """
    try:
        message = decode(request.action.request, request.packet)
        with site.store.locked():
            site.confirm()
            reply = _answer_or_repeat(site, request, message, answer)
            site.confirm()
            return reply
    except errors.MessageError as error:
        if error.part is not None:
            site.changes.part = error.part
        raise errors.SiteError(f"malformed request: {error}") from None


def _answer_or_repeat(
    site: Site, request: IncomingRequest, message: Request, answer: Answer
) -> RecordDict:
    """Return the reply to a request, whose round is committed at most once."""
    last = site.store.last()
    if request.action is Action.DESCRIBE:
        site.store.touch()
        return _carry_out(site, request, message, answer, last)
    try:
        if _is_answered(request, message, last):
            log_event(INFO, "repeated", run=site.run, round=request.number)
            reply = open_parcel(site.store.reply())
            is_over = last is not None and last.is_over
        else:
            _check_not_stopped(site, request, message)
            reply = _carry_out(site, request, message, answer, last)
            is_over = site.round.is_over
    except errors.OfRowsError:
        with site.store.together(site.features.make_room):
            site.store.save(STOPPED, Entry({}, {REQUEST: request.digest}))
        raise
    except errors.LostStateError as error:
        if last is None:
            raise
        # data that the committed round relied on have disappeared
        reason = str(error)
        log_event(WARNING, "behind", run=site.run, round=request.number, reason=reason)
        site.store.forget_committed()
        raise errors.BehindError(reason, None) from error
    site.store.sweep()
    if is_over:
        site.settle()
    return reply


def _is_answered(
    request: IncomingRequest, message: Request, last: CommittedRound | None
) -> bool:
    """Return whether the committed round has the reply to a request.

    Raises for an older request, for another request with the same number, and for one
    that builds on rounds that the site lacks.
    """
    if last is not None and request.number <= last.number:
        if request.number == last.number and request.digest == last.digest:
            return True
        raise errors.SiteError(
            f"round {request.number} is refused: the site has answered round "
            f"{last.number} of this run"
            + (" to another request" if request.number == last.number else "")
        )
    if isinstance(message, FinishRequest) and not message.keep_models:
        # it needs nothing from earlier rounds
        return False
    if last is not None and last.is_over:
        raise errors.SiteError("the run is over at this site: start another one")
    last_number = None if last is None else last.number
    if request.after is not None and (
        last_number is None or last_number < request.after
    ):
        rounds = "no round"
        if last_number is not None:
            rounds = f"the rounds up to {last_number}"
        raise errors.BehindError(
            f"the site has {rounds} of this run, but not round {request.after}, which "
            "the request builds on (was it restarted, or its state restored?)",
            last_number,
        )
    return False


def _check_not_stopped(site: Site, request: IncomingRequest, message: Request) -> None:
    """Refuse all but the end of a run, or a fit, that a refusal has told of the rows.

    The fits of a search are counted: there are not more refusals than the owners of
    tables have agreed to fits.
    """
    goes_on = isinstance(message, FinishRequest | NextRequest)
    if goes_on or not site.store.has(STOPPED):
        return
    if site.store.load(STOPPED).meta[REQUEST] != request.digest:
        raise errors.StoppedError(
            "the site has refused a request of this run because of its rows, and "
            "answers nothing but that request again and the end of the run: many such "
            "refusals would tell the rows"
        )


def _carry_out(
    site: Site,
    request: IncomingRequest,
    message: Request,
    answer: Answer,
    last: CommittedRound | None,
) -> RecordDict:
    """Carry out a request; a round is committed with its reply."""
    started = time.perf_counter()
    is_round = request.action is not Action.DESCRIBE
    last_number = None if is_round or last is None else last.number
    with site.store.together(site.features.make_room):
        if is_round:
            site.begin(request.number, request.digest, last)
        packet = _encode(site, answer(site, message))
        seconds = time.perf_counter() - started
        if not site.is_simulated:
            # how long it takes to the microsecond tells of the rows
            per_second = 1.0 if site.has_rules else 10.0
            seconds = math.ceil(per_second * seconds) / per_second
        envelope = ReplyEnvelope(
            round=request.number,
            seconds=seconds,
            at=last_number,
            ledger_end=site.ledger_end,
        )
        content = pack(add_envelope(packet, envelope))
        if site.queries:
            part_bytes = packet.payload_bytes()
            common = {**_common(site, request), "ident": request.digest}
            queries = site.queries.items()
            lines = [
                {**common, **query, "bytes": part_bytes.get(part, 0)}
                for part, query in queries
            ]
            site.ledger.record(site.store.run, ANSWER, lines, site.quotas)
        if is_round:
            site.pay()
            # nothing is to be kept of a run that the site does not know
            if last is not None or site.store.names() or not site.round.is_over:
                site.commit(parcel_of(content))
    return content


def record_refusal(
    site: Site, request: IncomingRequest, error: Exception, reason: str
) -> Exception:
    """Record a refused query or what a policy refuses; return the error that may leave.

    An error may tell of rows that were read. So if its line cannot be written, or is
    beyond the quota, this is the error that leaves, and says nothing of the other.
    """
    queries = list(site.queries.values())
    if not queries:
        if not isinstance(error, _LEDGER_ERRORS):
            return error
        # the table is that of the part in the run's earlier lines
        queries = [{"part": site.changes.part}]
    common = {**_common(site, request), "reason": reason[:MOST_CHARACTERS]}
    lines = [
        {**common, **query, "query": query.get("query", "")[:MOST_CHARACTERS]}
        for query in queries
    ]
    try:
        with site.store.together(site.features.make_room):
            site.ledger.record(site.store.run, REFUSE, lines, site.quotas)
        site.confirm()
    except errors.TPFlowerError as failure:
        log_event(ERROR, "unrecorded", run=site.run, reason=str(failure))
        if not any("source" in query for query in queries):
            return error
        site.changes.part = None
        for query in queries:
            query.pop("source", None)
        return record_refusal(site, request, failure, str(failure))
    return error


def _common(site: Site, request: IncomingRequest) -> Line:
    """Return the fields of every line about a request."""
    return {
        "action": str(request.action),
        "round": request.number,
        "flower-run": site.context.run_id,
        "app": app_sha256(site.context.node_config),
    }


def _encode(site: Site, reply: Reply) -> Packet:
    """Return an encoded reply; SiteError if a value of it cannot be sent."""
    try:
        return encode(reply)
    except errors.MessageError as error:
        site.changes.part = error.part
        kind: type[errors.SiteError] = errors.SiteError
        if isinstance(error, errors.RangeError):
            kind = errors.DivergedError
        raise kind(f"the site's reply cannot be sent: {error}") from None


class MessageLog:
    """The log line of one message, answered or refused, in the site's log.

    A real site logs it at level INFO, as a record of all requests for its owner; a
    simulation, where a process answers hundreds per minute, at DEBUG. FLWR_LOG_LEVEL
    selects what is printed. It contains no rows, and only the first digits of the run's
    name, which grants the right to continue it.
    """

    def __init__(self, action: Action, content: RecordDict) -> None:
        self._action = action
        self._content = content
        self._started = time.perf_counter()

    def write(
        self,
        level: int,
        event: str,
        request: IncomingRequest | None,
        site: Site | None,
        reply: RecordDict | None = None,
        **values: Value,
    ) -> None:
        """Log the reply or the error that leaves; request and site if already read."""
        if not is_printed(level):
            return
        fields: dict[str, Value] = {}
        if request is not None:
            fields |= {"run": request.run, "round": request.number}
        if site is not None:
            fields["site"] = site_id(site.context.node_config, site.context.node_id)
        fields |= {
            "action": str(self._action),
            "seconds": time.perf_counter() - self._started,
        }
        fields["bytes_in"] = message_bytes(self._content)
        if reply is not None:
            fields["bytes_out"] = message_bytes(reply)
        log_event(level, event, **fields, **values)
