"""Sessions: rounds as HTTPS long polls, through the front of the SuperLink.

One Flower message opens a site's session and brings its key. From then on the site asks
for messages, and the server answers none that it has not been asked for::

    POST /v1/tp/<channel>/<node>/<number>     body: the reply to message <number> - 1
        200   body: a message, whose number is in Tp-Number
        204   none within the seconds of `Prefer: wait=`: ask again, without the body
        410   the session is over
        429   too many requests of the site at a time: ask again later
    POST /v1/tp/<channel>/<node>/<number>/working     204: the site still computes

A site that has no message yet asks for number 0. A message is held until its reply has
come, and may be sent any number of times: sites answer a round once. Both sides sign
(HMAC-SHA256, the session's key) the head of what they send, which has the digest of the
body: a head is checked before any byte of the body is read.
"""

import hashlib
import hmac
import json
import re
from typing import Annotated, Final

import msgspec

from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Reply, Request

CHANNEL_DIGITS: Final = 32
MOST_BYTES: Final = 1 << 30
"""Of a body; nginx.conf has the same limit."""

OK = 200
NOTHING = 204
FORBIDDEN = 403
GONE = 410
TOO_MANY = 429
Response = tuple[int, int, bytes]  # status, number of the message, and body
NUMBER: Final = "Tp-Number"
DIGEST: Final = "Tp-Digest"
SIGNATURE: Final = "Tp-Signature"
WORKING: Final = "/working"

PATH: Final = re.compile(
    rf"/v1/tp/([0-9a-f]{{{CHANNEL_DIGITS}}})/([0-9a-f]{{1,16}})/([0-9]{{1,9}})"
    rf"({WORKING})?"
)

PING_SECONDS: Final = 3.0
"""How often a site that computes says so."""

LONGEST_WAIT: Final = 25  # seconds of a held poll; proxies cut longer ones


class SessionRequest(Request, frozen=True, kw_only=True):
    """Open a session.

    The address and its certificate authority are not told: they are in the node config.

    Attributes:
        channel: in the path of its requests.
        key: 32 random bytes, for this session of this site alone.
        limit: seconds after which the site serves other runs, if any are waiting.
    """

    channel: Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{CHANNEL_DIGITS}}}\Z")]
    key: f.Digest
    limit: Annotated[float, f.between(1, 86_400)]

    schedule = ("channel", "key", "limit")


class SessionReply(Reply, frozen=True, kw_only=True):
    """The end of a session: over, refused by the server, or without a connection."""

    ended: Annotated[str, f.one_of("over", "refused", "lost")]
    rounds: f.Count

    schedule = ("ended", "rounds")


def path_of(channel: str, node: int, number: int) -> str:
    """Return the path at which a site asks for a message."""
    return f"/v1/tp/{channel}/{node:x}/{number}"


def digest_of(body: bytes) -> str:
    """Return the SHA-256 of a body, in hexadecimal."""
    return hashlib.sha256(body).hexdigest()


def sign_request(key: bytes, path: str, length: int, digest: str) -> str:
    """Return the signature of a site's request."""
    return _sign(key, "request", path, length, digest)


def sign_answer(key: bytes, path: str, status: int, number: int, digest: str) -> str:
    """Return the signature of the server's answer to the request at a path."""
    return _sign(key, "answer", path, status, number, digest)


def is_signed(expected: str, signature: str | None) -> bool:
    """Whether a signature is the expected one, compared in constant time."""
    return hmac.compare_digest(expected.encode(), (signature or "").encode())


def _sign(key: bytes, *head: str | int) -> str:
    return hmac.digest(key, json.dumps(head).encode(), hashlib.sha256).hex()


def write_message(action: str, content: bytes) -> bytes:
    """Return a message as the body of an answer."""
    return msgspec.msgpack.encode((action, content))


def read_message(body: bytes) -> tuple[str, bytes]:
    """Return the type and the content of a message."""
    return msgspec.msgpack.decode(body, type=tuple[str, bytes])
