"""What every message says besides its content: its run, its round, how it went."""

from typing import Annotated, Any, Final

import msgspec

from tp_flower.protocol.fields import Body, Count

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
