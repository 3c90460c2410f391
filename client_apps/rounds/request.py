"""Of which run and round a request is, and whether it has been answered before.

The server numbers the rounds of a run. A site answers each of them once: the last
request again gets the reply that is kept, and an older one nothing, as the site's state
has gone on since. The server says which round it takes to be the last that the site has
answered: a site that has answered less says so, and is sent what it lacks.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Final, Self

from flwr.app import RecordDict

from client_apps.data.run_store import CommittedRound
from tp_flower.errors import BehindError, MessageError, SiteError
from tp_flower.protocol import (
    NO_RUN,
    Action,
    Packet,
    RequestEnvelope,
    read_envelope,
    unpack,
)

_DIGEST_BYTES: Final = 16
# made once: json.dumps makes an encoder per call
_JSON: Final = json.JSONEncoder(sort_keys=True)


@dataclass(frozen=True)
class Request:
    """A message from the server.

    Attributes:
        action: what is asked for.
        run: the run's name.
        number: of the round.
        after: the last round that the site has answered, as far as the server knows;
            None for none.
        packet: all that it says.
    """

    action: Action
    run: str
    number: int
    after: int | None
    packet: Packet

    @classmethod
    def read(cls, action: Action, content: RecordDict) -> Self:
        """Return what a message asks for.

        Raises:
            SiteError: it does not say of which run and round it is.
            ReplyError: it is no message of ours.
        """
        packet = unpack(content)
        try:
            envelope = read_envelope(RequestEnvelope, packet)
        except MessageError as error:
            raise SiteError(f"malformed request: {error}") from None
        run, number, after = envelope.run, envelope.round, envelope.after
        if run == NO_RUN:
            raise SiteError(f"malformed request: 'run' is {run!r}, which names none")
        if action is Action.DESCRIBE and number:
            raise SiteError(f"malformed request: 'round' of {action} must be 0")
        if after is not None and after >= number and action is not Action.DESCRIBE:
            raise SiteError(
                f"malformed request: 'after' is {after}, but must be below 'round', "
                f"{number}"
            )
        return cls(action, run, number, after, packet)

    @cached_property
    def digest(self) -> str:
        """Stands for all that is asked for; what the server knows of the site is not.

        The same request has the same digest in every process.
        """
        told = {k: own for k, own in self.packet.header.items() if k != "after"}
        arrays = sorted(self.packet.arrays.items(), key=itemgetter(0))
        facts = [[*key, array.dtype.str, array.shape] for key, array in arrays]
        text = _JSON.encode([self.action, told, facts])
        digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES)
        for _, array in arrays:
            digest.update(array.data if array.size else b"")
        return digest.hexdigest()


def is_answered(request: Request, last: CommittedRound | None) -> bool:
    """Whether the committed round has a request's reply, or it is to be answered.

    Args:
        request: any but one for a description.
        last: the committed round of its run at the site.

    Raises:
        SiteError: it is older than that, or another one with the same number; or the
            run is over.
        BehindError: the site lacks what it builds on.
    """
    at = None if last is None else last.number
    if last is not None and request.number <= last.number:
        if request.number == last.number and request.digest == last.digest:
            return True
        raise SiteError(
            f"round {request.number} is refused: the site has answered round "
            f"{last.number} of this run"
            + (" to another request" if request.number == last.number else "")
        )
    if request.action is Action.FINISH and not _keeps_models(request):
        # there is nothing that it could lack
        return False
    if last is not None and last.is_over:
        raise SiteError("the run is over at this site: start another one")
    if request.after is not None and (at is None or at < request.after):
        known = "no round" if at is None else f"the rounds up to {at}"
        raise BehindError(
            f"the site has {known} of this run, and not round {request.after}, which "
            "the request builds on (was it restarted, or its state restored?)",
            at,
        )
    return False


def _keeps_models(request: Request) -> bool:
    return bool(request.packet.header.get("keep-models"))
