"""A site's end of a session: it asks the server for messages and answers them.

The address of the front and its certificate authority come from the node config alone,
never from a message. What a message may do, and that it is done once, is decided where
Flower's own messages are answered, too.
"""

import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from logging import INFO
from threading import Event, Thread
from typing import Final
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from flwr.app import RecordDict

from tp_flower.errors import SettingsError, SiteError
from tp_flower.events import log_event
from tp_flower.node_config import SESSION_CA, SESSION_FRONT, NodeConfig
from tp_flower.protocol import session_messages as wire
from tp_flower.protocol.packet import content_bytes, content_of

LOST_SECONDS: Final = 10.0  # without an answer of the server, a session is lost
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0
SPARE_SECONDS: Final = 15.0  # for an answer, beyond those that a poll is held
GRACE_SECONDS: Final = 30.0  # beyond its limit, the site itself ends a session

_ADDRESS: Final = re.compile(
    r"https://[^/?#@]+|http://(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?"
)
_FAILURES: Final = (OSError, HTTPException, ValueError)

Answer = Callable[[str, RecordDict], RecordDict]  # returns the reply to a message


class _SessionEndedError(Exception):
    """The text is the reason in the reply that ends the session."""


def hold_session(
    request: wire.SessionRequest, config: NodeConfig, node: int, answer: Answer
) -> wire.SessionReply:
    """Answer messages until the session ends; SiteError if this site offers none."""
    line = _Line(_front(config), config.get(SESSION_CA), request, node)
    ends = time.monotonic() + request.limit + GRACE_SECONDS
    number = 0
    reply = b""
    rounds = 0
    ended = "over"
    try:
        while time.monotonic() < ends:
            status, current, body = line.ask(number, reply)
            reply = b""
            if status == wire.NOTHING:
                continue
            action, content = wire.read_message(body)
            with line.computing(current):
                reply = content_bytes(answer(action, content_of(content)))
            number = current + 1
            rounds = rounds + 1
    except _SessionEndedError as error:
        ended = str(error)
    finally:
        line.close()
    log_event(INFO, "session", ended=ended, rounds=rounds)
    return wire.SessionReply(ended=ended, rounds=rounds)


class _Line:
    """The connection to the front, made anew whenever it fails."""

    def __init__(
        self,
        front: SplitResult,
        authority: object,
        request: wire.SessionRequest,
        node: int,
    ) -> None:
        self._front = front
        self._node = node
        try:
            file = None if authority is None else str(authority)
            self._tls = ssl.create_default_context(cafile=file)
        except OSError as error:
            raise SettingsError(f"node config {SESSION_CA}: {error}") from None
        self._channel = request.channel
        self._key = bytes.fromhex(request.key)
        self._connection = self._connect(wire.LONGEST_WAIT)
        self._wait = wire.LONGEST_WAIT

    def ask(self, number: int, reply: bytes) -> wire.Response:
        """Return the server's answer, asking again as long as it may be there."""
        path = wire.path_of(self._channel, self._node, number)
        pause = FIRST_PAUSE
        failed = 0.0
        while True:
            try:
                response = self._post(self._connection, path, reply, self._wait)
            except _FAILURES:
                self._connection.close()
                now = time.monotonic()
                failed = failed or now
                if now - failed > LOST_SECONDS:
                    raise _SessionEndedError("lost") from None
                # a proxy on the way may cut polls that are held for long
                self._wait = max(1, self._wait // 4)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if response[0] == wire.GONE:
                raise _SessionEndedError("over")
            self._wait = min(self._wait + 1, wire.LONGEST_WAIT)
            return response

    @contextmanager
    def computing(self, number: int) -> Iterator[None]:
        """Tell the server that the site computes, until the block ends."""
        path = wire.path_of(self._channel, self._node, number) + wire.WORKING
        is_over = Event()

        def ping() -> None:
            while not is_over.wait(wire.PING_SECONDS):
                # if it fails: the reply itself is sent until it arrives
                with (
                    suppress(*_FAILURES, _SessionEndedError),
                    closing(self._connect(wire.PING_SECONDS)) as connection,
                ):
                    self._post(connection, path, b"", 0)

        Thread(target=ping, daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def _post(
        self, connection: HTTPConnection, path: str, body: bytes, wait: int
    ) -> wire.Response:
        """Return the answer to a request; ValueError if it is not the server's."""
        digest = wire.digest_of(body)
        headers = {
            "Prefer": f"wait={wait}",
            wire.DIGEST: digest,
            wire.SIGNATURE: wire.sign_request(self._key, path, len(body), digest),
        }
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        if response.status == wire.FORBIDDEN:
            raise _SessionEndedError("refused")
        digest = response.getheader(wire.DIGEST, "")
        number = int(response.getheader(wire.NUMBER, "0"))
        expected = wire.sign_answer(self._key, path, response.status, number, digest)
        if not wire.is_signed(expected, response.getheader(wire.SIGNATURE)):
            raise ValueError("the answer is not the server's")
        if (response.length or 0) > wire.MOST_BYTES:
            raise ValueError("the answer is too large")
        body = response.read()
        if wire.digest_of(body) != digest:
            raise ValueError("the answer has another body")
        return response.status, number, body

    def _connect(self, seconds: float) -> HTTPConnection:
        """Return a connection, through a proxy where the environment names one."""
        host = str(self._front.hostname)
        port = self._front.port
        scheme = self._front.scheme
        timeout = seconds + SPARE_SECONDS
        proxy = ""
        if not proxy_bypass(host):
            proxy = getproxies().get(scheme, "")
        through = urlsplit(proxy)
        address = (through.hostname or host, through.port if proxy else port)
        if scheme == "http":
            return HTTPConnection(*address, timeout=timeout)
        connection = HTTPSConnection(*address, timeout=timeout, context=self._tls)
        if proxy:
            connection.set_tunnel(host, port)
        return connection

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()


def _front(config: NodeConfig) -> SplitResult:
    """Return the front's address; SiteError if the node config has none."""
    text = str(config.get(SESSION_FRONT) or "")
    if not text:
        raise SiteError(
            f"this SuperNode has no {SESSION_FRONT} in its node config, which "
            "supernode.sh sets: it cannot open a session"
        )
    if not _ADDRESS.fullmatch(text):
        raise SettingsError(
            f"node config {SESSION_FRONT} is {text!r}; allowed: an address such as "
            "https://superlink.example.org:8443; http only to this machine, 127.0.0.1"
        )
    return urlsplit(text)
