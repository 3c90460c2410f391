"""One message to a site: it is answered once, whatever becomes of the process.

Lock the run; look up the committed round; repeat its reply, or refuse, or act; commit
in one transaction what the site keeps, what it has paid, and the reply; forget what
nobody needs any more; reply.

    killed before    has happened               the same message again
    acting           nothing that anybody sees  acts again
    committing       nothing that anybody sees  acts again
    forgetting       all                        gets the reply, and forgets
    replying         all                        gets the reply
"""

import time
from collections.abc import Callable
from logging import INFO, WARNING
from typing import Any

from flwr.app import RecordDict
from flwr.common.logger import log

from client_apps.data.run_store import CommittedRound
from client_apps.rounds.request import Request, is_answered
from client_apps.rounds.site import Site
from tp_flower.errors import (
    BehindError,
    DivergedError,
    LostStateError,
    MessageError,
    RangeError,
    SiteError,
)
from tp_flower.events import line
from tp_flower.protocol import (
    EXCHANGES,
    Action,
    Packet,
    ReplyEnvelope,
    add_envelope,
    decode,
    encode,
    open_parcel,
    pack,
    parcel_of,
)

Answer = Callable[[Site, Any], Any]
"""A handler: from the site and a request to the reply."""


def answer_once(site: Site, request: Request, answer: Answer) -> RecordDict:
    """Return the reply to a request; every action but a description happens once.

    Args:
        site: in the request's run.
        request: that arrived.
        answer: does what is asked for; it may be called again after a crash.

    Raises:
        BehindError: the site lacks what the request builds on.
        TPFlowerError: whatever the action raises; then nothing has changed.
        OSError: likewise.
    """
    with site.store.locked():
        last = site.store.last()
        if request.action is Action.DESCRIBE:
            return _described(site, request, answer, last)
        try:
            if is_answered(request, last):
                log(INFO, line("repeated", run=site.run, round=request.number))
                reply = open_parcel(site.store.reply())
                is_over = last is not None and last.is_over
            else:
                reply = _answered(site, request, answer, last)
                is_over = site.round.is_over
        except LostStateError as error:
            if last is None:
                raise
            # what was there when the round before was committed is not there any more
            lost = line("behind", run=site.run, round=request.number, reason=str(error))
            log(WARNING, lost)
            site.store.forget_committed()
            raise BehindError(str(error), None) from error
        site.store.sweep()
        if is_over:
            site.settle()
        return reply


def _described(
    site: Site, request: Request, answer: Answer, last: CommittedRound | None
) -> RecordDict:
    started = time.perf_counter()
    site.store.touch()
    with site.transaction():
        packet = _carry_out(site, request, answer)
    at = None if last is None else last.number
    return pack(_with_envelope(packet, request, started, at))


def _answered(
    site: Site, request: Request, answer: Answer, last: CommittedRound | None
) -> RecordDict:
    started = time.perf_counter()
    with site.transaction():
        site.begin(request.number, request.digest, last)
        packet = _carry_out(site, request, answer)
        content = pack(_with_envelope(packet, request, started))
        site.pay()
        if last is not None or site.store.names() or not site.round.is_over:
            # of a run that the site does not know nothing is to be kept either
            site.commit(parcel_of(content))
    return content


def _carry_out(site: Site, request: Request, answer: Answer) -> Packet:
    """Return the packet of the reply to a request, both checked against the contract.

    Raises:
        SiteError: the request is not what its type declares.
    """
    try:
        message = decode(EXCHANGES[request.action].request, request.packet)
        reply = answer(site, message)
    except MessageError as error:
        if error.part is not None:
            site.current_part = error.part
        raise SiteError(f"malformed request: {error}") from None
    try:
        return encode(reply)
    except MessageError as error:
        site.current_part = error.part
        kind = DivergedError if isinstance(error, RangeError) else SiteError
        raise kind(f"the site has nothing that may be sent: {error}") from None


def _with_envelope(
    packet: Packet, request: Request, started: float, at: int | None = None
) -> Packet:
    seconds = time.perf_counter() - started
    envelope = ReplyEnvelope(round=request.number, seconds=seconds, at=at)
    return add_envelope(packet, envelope)
