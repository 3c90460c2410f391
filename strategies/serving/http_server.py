"""The HTTP interface of a scorer: predictions, health and metrics.

It is the standard library's server, as that of sessions is: it parses HTTP/1.1, needs
no further package, and a request takes milliseconds of a thread that waits for sites.
Whoever has the token reads predictions, so it travels over TLS, or does not leave the
machine. docs/how-to/serve.md describes the requests.
"""

import hmac
import io
import ipaddress
import os
import socket
import ssl
import time
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar, Final, cast

import msgspec

from strategies.serving.connections import LimitedConnections
from strategies.serving.metrics import Metrics
from strategies.serving.request_queue import (
    DownError,
    KeyValue,
    MalformedError,
    Predictions,
    RequestQueue,
    ServingError,
    TooLargeError,
)
from strategies.serving.serve import MOST_KEYS
from tp_flower.errors import SettingsError
from tp_flower.reports.prometheus import CONTENT_TYPE

TOKEN_VARIABLE: Final = "TP_FLOWER_TOKEN"
LISTEN: Final = "127.0.0.1:8700"
LEAST_CHARACTERS: Final = 32
"""Of a token."""
HEAD_BYTES: Final = 1 << 14
"""Of a request's first line and headers."""
MOST_BYTES: Final = 1 << 20
"""Of a request's body."""
MOST_DISCARDED: Final = 1 << 26
"""Bytes of a body that is too large, before the connection is closed."""
BLOCK_BYTES: Final = 1 << 16
MOST_THREADS: Final = 256
IDLE_SECONDS: Final = 60.0
"""From an answer to the head of the next request."""
ANSWER_SECONDS: Final = 60.0
"""To wait for the predictions."""
REQUEST_SECONDS: Final = 120.0
"""From the token to the end of the answer, however slow the client."""
JSON: Final = "application/json"
_AUTHORIZATION: Final = "Bearer "


class AuthorizationError(ServingError):
    """A request has no token, or another one."""

    status = HTTPStatus.UNAUTHORIZED


class NoSuchPathError(ServingError):
    """A request is for something that the scorer has not."""

    status = HTTPStatus.NOT_FOUND


class PredictBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request for predictions."""

    keys: list[dict[str, KeyValue]] = []
    rows: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True)
class Address:
    """Where a scorer listens, and for whom.

    Attributes:
        certificate: PEM file of the certificate, its chain and its key.
    """

    host: str
    port: int
    token: str = field(repr=False)
    certificate: Path | None = None

    @classmethod
    def read(
        cls, listen: str, token_file: Path | None, certificate: Path | None
    ) -> "Address":
        """Return the address of the options of a command; "" is ``LISTEN``.

        Raises:
            SettingsError: an option is refused, or no token is there.
        """
        host, _, port = (listen or LISTEN).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not (port.isdecimal() and int(port) < 1 << 16):
            raise SettingsError(
                f"--listen {listen!r} is not HOST:PORT, such as 127.0.0.1:8700"
            )
        if certificate is None and not _is_loopback(host):
            raise SettingsError(
                f"--listen {listen}: the token and the predictions would leave this "
                "machine as plain text; name the PEM file of a certificate and its key "
                "by --certificate, or listen on 127.0.0.1"
            )
        return cls(host, int(port), read_token(token_file), certificate)

    @property
    def scheme(self) -> str:
        """The beginning of the scorer's address."""
        return "http" if self.certificate is None else "https"

    @property
    def context(self) -> ssl.SSLContext | None:
        """The terms of TLS; None for plain HTTP.

        Raises:
            SettingsError: the certificate cannot be read.
        """
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # it costs us more than the client
        try:
            context.load_cert_chain(self.certificate)
        except OSError as error:  # and what ssl raises
            raise SettingsError(
                f"--certificate {self.certificate} is no PEM file of a certificate and "
                f"its key: {error.strerror or error}"
            ) from None
        return context


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(file: Path | None) -> str:
    """Return the token of a file, or of the environment.

    Raises:
        SettingsError: there is none, it is short, or others may read the file.
    """
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        source = f"the variable {TOKEN_VARIABLE}"
    else:
        source = f"--token-file {file}"
        try:
            if file.stat().st_mode & 0o077:
                raise SettingsError(f"{source}: others may read it: chmod 600 {file}")
            token = file.read_bytes().decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{source} cannot be read: {error}") from None
    if len(token) < LEAST_CHARACTERS:
        raise SettingsError(
            f"{source} has no token of {LEAST_CHARACTERS} characters or more: write "
            "one there, of `openssl rand -hex 32` for instance"
        )
    return token


def read_body(body: bytes) -> list[dict[str, KeyValue]]:
    """Return the keys that a request names.

    Raises:
        MalformedError: the body is not as described; the text names the field.
        TooLargeError: it has too many keys.

    >>> read_body(b'{"keys": [{"id": 7}]}')
    [{'id': 7}]
    """
    try:
        message = msgspec.json.decode(body, type=PredictBody)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"the body is malformed: {error}") from None
    if message.rows is not msgspec.UNSET:
        raise MalformedError(
            "rows: a scorer predicts rows that the sites hold: add these to the label "
            "table at its site, let --refresh read them, and name them in keys"
        )
    if not message.keys:
        raise MalformedError("keys: expected a list of one key or more")
    if len(message.keys) > MOST_KEYS:
        raise TooLargeError(
            f"keys: there are {len(message.keys)}, and {MOST_KEYS} are predicted at a "
            "time: send fewer"
        )
    return message.keys


class ScorerServer(LimitedConnections, HTTPServer):
    """The server, with a thread for each connection."""

    most_threads = MOST_THREADS

    def __init__(
        self, address: Address, requests: RequestQueue, metrics: Metrics, model: str
    ) -> None:
        """Listen at an address.

        Raises:
            SettingsError: the address cannot be listened at.
        """
        self.requests = requests
        self.metrics = metrics
        self.model = model
        self._digest = sha256(address.token.encode()).digest()
        context = address.context
        if ":" in address.host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__(
                metrics.count_cut, (address.host, address.port), _Connection
            )
        except OSError as error:
            raise SettingsError(
                f"--listen {address.host}:{address.port}: {error.strerror}"
            ) from None
        if context is not None:
            # hands are shaken in the connection's thread: nobody can hold up the others
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    def knows(self, authorization: str) -> bool:
        """Return whether a header has the token; how long it takes tells nothing."""
        token = authorization.removeprefix(_AUTHORIZATION)
        digest = sha256(token.encode(errors="surrogateescape")).digest()
        is_bearer = authorization.startswith(_AUTHORIZATION)
        return hmac.compare_digest(digest, self._digest) and is_bearer


class _Reader(io.BufferedReader):
    """What a client sends.

    Attributes:
        left: bytes that lines may have in all.
    """

    left = HEAD_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a line, of at most ``size`` bytes."""
        most = self.left + 1
        line = super().readline(most if size is None or size < 0 else min(size, most))
        self.left -= len(line)
        if self.left < 0:
            raise LineTooLong(f"head of {HEAD_BYTES} bytes")
        return line


class _Connection(BaseHTTPRequestHandler):
    """The requests of one connection; without the token there is one, and it is small.

    How long it lasts is the server's to watch: reads and writes have no limits.
    """

    protocol_version = "HTTP/1.1"
    server_version = "tp-flower"
    sys_version = ""
    rbufsize = 0
    wbufsize = -1
    disable_nagle_algorithm = True
    server: ScorerServer
    methods: ClassVar = {"/predict": "POST", "/healthz": "GET", "/metrics": "GET"}

    def setup(self) -> None:
        """Read by lines that are limited."""
        super().setup()
        self.rfile = self._reader = _Reader(cast(io.RawIOBase, self.rfile))

    def handle_one_request(self) -> None:
        """Answer one request, then give the next one its limits."""
        self._reader.left = HEAD_BYTES
        try:
            super().handle_one_request()
        except LineTooLong:  # of its first line; that of a header is answered
            self.close_connection = True
        if not self.close_connection:
            self.server.trust(self.connection, IDLE_SECONDS)

    def parse_request(self) -> bool:
        """Read the head of a request; what it asks decides less than the token."""
        is_read = super().parse_request()
        if is_read and self._has_token:
            self.server.trust(self.connection, REQUEST_SECONDS)
        else:
            self.close_connection = True
        return is_read

    def handle_expect_100(self) -> bool:
        """Ask for the body of who has the token; others are refused without it."""
        return not self._has_token or super().handle_expect_100()

    def do_GET(self) -> None:
        """Answer with the health, which needs no token, or the metrics."""
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body would be read as the next request
        try:
            self._check_path("GET")
            if self.path == "/healthz":
                self._answer_health()
            else:
                self._check_token()
                text = self.server.metrics.text(is_up=not self.server.requests.reason)
                self._send(HTTPStatus.OK, text.encode(), CONTENT_TYPE)
        except ServingError as error:
            self._refuse(error)

    def do_POST(self) -> None:
        """Answer with predictions."""
        started = time.perf_counter()
        status = HTTPStatus.OK
        count = 0
        try:
            self._check_path("POST")
            self._check_token()
            predictions = self._predict(read_body(self._read()))
            count = sum(map(len, predictions))
            self._send_json(
                status, {"model": self.server.model, "predictions": predictions}
            )
        except ServingError as error:
            status = error.status
            self._refuse(error)
        seconds = time.perf_counter() - started
        self.server.metrics.count_request(status, seconds, count)

    def log_message(self, *_: object) -> None:
        """Print no line for a request: metrics count them."""

    def _check_path(self, method: str) -> None:
        if self.methods.get(self.path) != method:
            self._discard_body()
            listed = ", ".join(f"{verb} {path}" for path, verb in self.methods.items())
            raise NoSuchPathError(f"there are {listed}")

    def _check_token(self) -> None:
        if not self._has_token:
            self._discard_body()
            raise AuthorizationError("Authorization: expected Bearer and the token")

    def _read(self) -> bytes:
        """Return the body of the request."""
        length = self._length
        if length is None:
            self.close_connection = True
            raise MalformedError("Content-Length: expected the number of bytes")
        if length > MOST_BYTES:
            self._discard_body()
            raise TooLargeError(f"the body has {length} bytes, of {MOST_BYTES} at most")
        return self.rfile.read(length)

    @property
    def _has_token(self) -> bool:
        return self.server.knows(self.headers.get("Authorization", ""))

    @property
    def _length(self) -> int | None:
        """The length of the body; None if the request does not say it, or twice."""
        texts = self.headers.get_all("Content-Length", [])
        if len(texts) != 1 or "Transfer-Encoding" in self.headers:
            return None
        text = texts[0]
        return int(text) if text.isdecimal() and len(text) < 12 else None

    def _discard_body(self) -> None:
        """Read a body that is refused: a client that still sends reads no answer.

        It is none of the next request, either.
        """
        self.close_connection = True
        most = MOST_DISCARDED if self._has_token else MOST_BYTES
        left = min(self._length or 0, most)
        while left and (block := self.rfile.read(min(left, BLOCK_BYTES))):
            left -= len(block)

    def _predict(self, keys: list[dict[str, KeyValue]]) -> Predictions:
        """Return the predictions of the rows with some keys."""
        request = self.server.requests.submit(keys)
        try:
            return request.answer.result(ANSWER_SECONDS)
        except TimeoutError:
            is_asked = not self.server.requests.withdraw(request)
            asked = "may have counted it" if is_asked else "were not asked"
            raise DownError(
                f"no answer within {ANSWER_SECONDS:g} seconds; the sites {asked}"
            ) from None

    def _answer_health(self) -> None:
        """Say whether requests are answered; why not is for those with the token."""
        reason = self.server.requests.reason
        if not reason:
            self._send_json(HTTPStatus.OK, {"status": "ok"})
            return
        if not self._has_token:
            reason = "no session with the sites"
        raise DownError(reason)

    def _refuse(self, error: ServingError) -> None:
        body = msgspec.json.encode({"error": str(error)})
        self._send(error.status, body, JSON, error.retry_seconds)

    def _send_json(self, status: HTTPStatus, content: object) -> None:
        self._send(status, msgspec.json.encode(content), JSON)

    def _send(
        self, status: HTTPStatus, body: bytes, kind: str, retry: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if retry is not None:
            self.send_header("Retry-After", str(retry))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
