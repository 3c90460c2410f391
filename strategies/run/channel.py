"""Sessions: rounds that cost what they carry, in a real deployment.

A round of Flower's messages takes about 5 s, whatever it carries, because every message
starts a process at the site. Here one message of Flower opens a session with a site,
whose process stays and asks for all further messages, over the front through which
SuperNodes reach the SuperLink (:mod:`tp_flower.protocol.session_messages`).

A site answers a round once, so a message may be sent again at any time: to a new
session of a site that has fallen silent, or by Flower to one that cannot open any.
"""

import hashlib
import os
import select
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from logging import INFO, WARNING
from pathlib import Path
from secrets import token_bytes, token_hex
from socket import MSG_PEEK, SHUT_RDWR, socket
from socketserver import BaseServer, ThreadingMixIn, UnixStreamServer
from threading import BoundedSemaphore, Condition, Thread
from typing import Any, Final, cast

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from tp_flower.errors import MessageError, ReplyError, SettingsError, SiteError
from tp_flower.events import log_event
from tp_flower.protocol import session_messages as wire
from tp_flower.protocol.codec import decode_reply, encode
from tp_flower.protocol.messages import Action, Failure
from tp_flower.protocol.packet import content_bytes, content_of, pack, unpack
from tp_flower.settings.declare import AUTO
from tp_flower.settings.run import FLOWER, SESSION

SESSIONS: Final = "TP_FLOWER_SESSIONS"
"""Environment variable: folder of the sockets to which the front passes requests."""

SILENT_SECONDS: Final = 10.0  # a site that computes gives signs more often
IDLE_SECONDS: Final = 10.0  # without a message in work sessions end, for others
OPENING_SECONDS: Final = 60.0  # after which it is sent again, if needed
LOOK_SECONDS: Final = 1.0  # how often Flower is asked why sessions have ended
CLOSING_SECONDS: Final = 2.0
BODY_SECONDS: Final = 30.0  # after which a client that sends nothing is cut off
MOST_THREADS: Final = 500
# connections of a site at a time; an honest one has two, and lost ones
MOST_SITE_REQUESTS: Final = 16
BLOCK_BYTES: Final = 1 << 16
ADDRESS: Final = "X-Real-IP"
_PREFIX: Final = "session-"


@dataclass
class Line:
    """The session with one site.

    Attributes:
        key: of the latest opening; nobody else is heard.
        address: from which its holder first asked; None if it has not.
        number: of the message in work, ``frame``; b"" if its reply has come.
        sent: the message in work, as it was last pushed.
        opening: Flower's id of the message that opens the session; "" if none is out.
        since: when the site began to ask; 0.0 if the session is not open.
        heard: when it gave a sign of life.
        poll: the request that waits for a message.
        requests: that are in work.
        upload: the connection whose reply is being read; a later one replaces it.
        uses_flower: whether the site could not open a session in this run.
    """

    node: int
    key: bytes = b""
    address: str | None = None
    number: int = 0
    frame: bytes = b""
    sent: Message | None = None
    opening: str = ""
    opened: float = 0.0
    since: float = 0.0
    heard: float = 0.0
    poll: object = None
    requests: int = 0
    upload: socket | None = None
    uses_flower: bool = False

    def close(self) -> None:
        """Note that the site has left."""
        self.since = 0.0
        self.opening = ""


@dataclass(frozen=True, eq=False)
class _Poll:
    """A request that waits for a message until it ``ends``."""

    connection: socket
    ends: float

    @property
    def is_there(self) -> bool:
        """Whether nobody has closed the connection: a site that waits says nothing."""
        readable = select.poll()
        readable.register(self.connection, select.POLLIN)
        try:
            return not readable.poll(0) or bool(self.connection.recv(1, MSG_PEEK))
        except OSError:
            return False


class SessionGrid:
    """Flower's grid, with sessions for the messages of a run.

    ``folder`` takes the socket, ``seconds`` is after how long a session lets others use
    the site. With ``must_open`` a site that cannot open one is a SiteError. With
    ``stays`` a session without work goes on, and one that lets others use the site is
    opened again at once: whoever waits for the site has its turn before.
    """

    def __init__(
        self,
        grid: Grid,
        folder: Path,
        seconds: float,
        *,
        must_open: bool = False,
        stays: bool = False,
    ) -> None:
        self._grid = grid
        self._seconds = seconds
        self._must_open = must_open
        self._stays = stays
        self.channel = token_hex(wire.CHANNEL_DIGITS // 2)
        self.lines: dict[int, Line] = {}
        self.refused: Counter[str] = Counter()
        self._lock = Condition()
        self._replies = dict[str, Message]()
        self._looked = 0.0
        self._active = time.monotonic()
        self._is_closed = False
        self._server = _Server(folder / f"{self.channel}.sock", self)
        Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of Flower's grid."""
        return getattr(self._grid, name)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Give messages to the sites' sessions, which are opened; return their ids."""
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to messages, each of them once."""
        requested = list(message_ids)
        with self._lock:
            self._tend()
            replies = [self._replies[i] for i in requested if i in self._replies]
            # nobody waits for the others any more
            self._replies.clear()
        by_flower = [i for i in requested if not i.startswith(_PREFIX)]
        return [*replies, *(self._grid.pull_messages(by_flower) if by_flower else ())]

    def wait(self, seconds: float) -> None:
        """Wait for a reply in a session, at most so long."""
        with self._lock:
            self._lock.wait_for(lambda: self._replies, seconds)

    def silent_nodes(self) -> list[int]:
        """Return the nodes with a session that have given no sign of life for long."""
        with self._lock:
            return [
                line.node
                for line in self.lines.values()
                if line.since and _is_quiet(line, SILENT_SECONDS)
            ]

    def close(self) -> None:
        """End the sessions: the sites are free for others."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
            lines = self.lines.values()
            self._lock.wait_for(
                lambda: not any(line.since for line in lines), CLOSING_SECONDS
            )
        self._server.shutdown()
        self._server.server_close()
        Path(str(self._server.server_address)).unlink(missing_ok=True)

    def _push(self, message: Message) -> str:
        """Send a message by session or by Flower; return its id or ""."""
        node = message.metadata.dst_node_id
        frame = wire.write_message(
            message.metadata.message_type, content_bytes(message.content)
        )
        with self._lock:
            line = self.lines.setdefault(node, Line(node))
            if not line.uses_flower:
                if frame != line.frame:
                    line.number = line.number + 1
                    line.frame = frame
                is_out = line.opening and _age(line.opened) < OPENING_SECONDS
                if not (line.since or is_out or self._open(line)):
                    return ""
                identifier = f"{_PREFIX}{token_hex(8)}"
                message.metadata.__dict__["_message_id"] = identifier
                line.sent = message
                self._active = time.monotonic()
                self._lock.notify_all()
                return identifier
        return next(iter(self._grid.push_messages([message])), "") or ""

    def _open(self, line: Line) -> bool:
        """Send the message that opens a session; return whether its node is known."""
        line.close()
        line.key = token_bytes(32)
        line.address = None
        line.opened = time.monotonic()
        request = wire.SessionRequest(
            channel=self.channel, key=line.key.hex(), limit=self._seconds
        )
        content = pack(encode(request))
        kind = str(Action.SESSION)
        message = Message(content, line.node, kind, group_id=SESSION)
        line.opening = next(iter(self._grid.push_messages([message])), "") or ""
        return bool(line.opening)

    def _tend(self) -> None:
        """Open silent lines anew, and read why others have ended."""
        for line in self.lines.values():
            if line.since and line.frame and _is_quiet(line, SILENT_SECONDS):
                log_event(WARNING, "silent-session", node=str(line.node))
                self._open(line)
        # a site that has ended its session says why by Flower
        by_id = {
            line.opening: line
            for line in self.lines.values()
            if line.opening and line.frame and _is_quiet(line, LOOK_SECONDS)
        }
        if by_id and _age(self._looked) > LOOK_SECONDS:
            self._looked = time.monotonic()
            for reply in self._grid.pull_messages(list(by_id)):
                self._end(by_id[reply.metadata.reply_to_message_id], reply)

    def _end(self, line: Line, reply: Message) -> None:
        """Handle the end of a session: open another, or go on by Flower."""
        was_open = line.address is not None
        line.close()
        if line.sent is None or not line.frame:
            return
        if reply.has_error():
            # whoever waits for the reply decides whether to go on
            error = Error(reply.error.code, reply.error.reason)
        elif was_open:
            self._open(line)
            return
        else:
            reason = "it does not reach the front, or is refused there"
            try:
                ended = decode_reply(Action.SESSION.reply, unpack(reply.content))
                reason = ended.error if isinstance(ended, Failure) else reason
            except (MessageError, ReplyError) as problem:
                reason = str(problem)
            if self._must_open:
                raise SiteError(
                    f'channel = "session", but node {line.node} cannot open one: '
                    f"{reason}"
                )
            log_event(WARNING, "no-session", node=str(line.node), reason=reason)
            # the message is sent again, by Flower, as all others of the run
            line.uses_flower = True
            line.frame = b""
            error = Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, reason)
        self._deliver(line, Message(error, reply_to=line.sent))

    def _deliver(self, line: Line, reply: Message) -> None:
        reply.metadata.__dict__["_src_node_id"] = line.node
        self._replies[reply.metadata.reply_to_message_id] = reply
        self._active = time.monotonic()
        self._lock.notify_all()

    def refuse(self, reason: str, values: Mapping[str, str]) -> None:
        """Count a refused request; log the first, second, fourth, eighth, ..."""
        self.refused[reason] += 1
        count = self.refused[reason]
        if count & (count - 1) == 0:
            log_event(WARNING, "refused", reason=reason, **values, count=count)

    def admit(self, line: Line, key: bytes, address: str, number: int) -> bool:
        """Whether the holder of a key is at the address that opened the session."""
        with self._lock:
            if line.key != key or line.address not in (None, address):
                return False
            line.heard = time.monotonic()
            if line.address is None:
                line.address = address
                log_event(INFO, "session", node=str(line.node), address=address)
            if number == 0:
                line.since = line.since or line.heard
            return True

    @contextmanager
    def count_request(self, line: Line) -> Iterator[bool]:
        """Count a site's request in the block; yield False if the site has too many."""
        with self._lock:
            line.requests += 1
            is_admitted = line.requests <= MOST_SITE_REQUESTS
        try:
            yield is_admitted
        finally:
            with self._lock:
                line.requests -= 1

    @contextmanager
    def track_upload(
        self, line: Line, number: int, connection: socket
    ) -> Iterator[bool]:
        """Cut off the reply of a site that is still being read, for a later one.

        Yield whether the reply to the message before ``number`` is awaited, and is to
        be kept.
        """
        with self._lock:
            is_awaited = self._awaits(line, number)
            if is_awaited:
                if line.upload is not None:
                    with suppress(OSError):
                        line.upload.shutdown(SHUT_RDWR)
                line.upload = connection
        try:
            yield is_awaited
        finally:
            with self._lock:
                if line.upload is connection:
                    line.upload = None

    @staticmethod
    def _awaits(line: Line, number: int) -> bool:
        return bool(line.frame and line.sent) and number == line.number + 1

    def answer(
        self, line: Line, key: bytes, number: int, body: bytes, poll: _Poll
    ) -> wire.Response:
        """Take the reply to the message before ``number``, and wait for the next."""
        with self._lock:
            if body and line.sent and self._awaits(line, number):
                line.frame = b""
                try:
                    content = content_of(body)
                except ValueError:
                    # refused by whoever reads the replies, by the name of the site
                    content = RecordDict()
                self._deliver(line, Message(content, reply_to=line.sent))
            # an earlier request of the site is one whose answer it no longer awaits
            line.poll = poll
            self._lock.notify_all()
            while (response := self._response(line, key, poll)) is None:
                self._lock.wait(min(poll.ends - time.monotonic(), 1.0))
            if line.poll is poll:
                line.poll = None
                if poll.is_there:
                    line.heard = time.monotonic()
            return response

    def _response(self, line: Line, key: bytes, poll: _Poll) -> wire.Response | None:
        """Return the answer to a request, None while there is none."""
        is_over = line.key != key or not line.since
        if not is_over and (self._is_closed or self._can_pause(line)):
            line.close()
            if self._stays and not self._is_closed:
                self._open(line)
            self._lock.notify_all()
            is_over = True
        if is_over:
            return wire.GONE, 0, b""
        if line.frame:
            return wire.OK, line.number, line.frame
        is_awaited = line.poll is poll and time.monotonic() < poll.ends
        if is_awaited and poll.is_there:
            return None
        return wire.NOTHING, 0, b""

    def _can_pause(self, line: Line) -> bool:
        """Whether the site is free, and has been in use for long or nothing runs."""
        has_work = any(other.frame for other in self.lines.values())
        is_idle = not (has_work or self._stays) and _age(self._active) > IDLE_SECONDS
        return not line.frame and (is_idle or _age(line.since) > self._seconds)


def _is_quiet(line: Line, seconds: float) -> bool:
    return line.poll is None and _age(line.heard) > seconds


def _age(moment: float) -> float:
    return time.monotonic() - moment


class BoundedThreads(ThreadingMixIn, BaseServer):
    """A server with a thread for each connection, of which it has so many at most."""

    daemon_threads = True
    request_queue_size = 128
    most_threads = MOST_THREADS

    def __init__(self, *arguments: Any) -> None:
        self._free = BoundedSemaphore(self.most_threads)
        super().__init__(*arguments)

    def process_request(self, *connection: Any) -> None:
        """Start a thread, unless there are as many as there may be."""
        if self._free.acquire(blocking=False) or self.make_room():
            super().process_request(*connection)
        else:
            self.shutdown_request(connection[0])

    def make_room(self) -> bool:
        """Take a thread from another connection; return whether one was found."""
        return False

    def process_request_thread(self, *connection: Any) -> None:
        """Answer the requests of a connection."""
        try:
            super().process_request_thread(*connection)
        finally:
            self._free.release()

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that go away, or fail to shake hands."""


class _Server(BoundedThreads, UnixStreamServer):
    """The server behind the front, on a socket of this machine."""

    def __init__(self, path: Path, grid: SessionGrid) -> None:
        self.grid = grid
        super().__init__(str(path), _Handler)


class _Handler(BaseHTTPRequestHandler):
    """The requests of one connection."""

    protocol_version = "HTTP/1.1"
    timeout = BODY_SECONDS
    wbufsize = -1
    server: _Server

    def do_POST(self) -> None:
        """Check the head, then read the body; answer with the next message."""
        grid = self.server.grid
        path = wire.PATH.fullmatch(self.path)
        if path is None or path[1] != grid.channel:
            return self._refuse("no such session")
        line = grid.lines.get(int(path[2], 16))
        key = b"" if line is None else line.key
        text = self.headers.get("Content-Length", "")
        digest = self.headers.get(wire.DIGEST, "")
        length = int(text) if text.isdecimal() and len(text) < 12 else -1
        signature = wire.sign_request(key, self.path, length, digest)
        signed = self.headers.get(wire.SIGNATURE)
        if line is None or not key or not wire.is_signed(signature, signed):
            return self._refuse("not signed with the key of the site's session")
        if not 0 <= length <= wire.MOST_BYTES:
            return self._refuse("too large")
        if not grid.admit(line, key, self._address, int(path[3])):
            return self._refuse("from another address than the session")
        with grid.count_request(line) as is_admitted:
            if not is_admitted:
                return self._refuse("too many requests of one site", wire.TOO_MANY)
            number = int(path[3])
            body = self._read_reply(line, number, digest, 0 if path[4] else length)
            if body is None:
                return self._refuse("another body than the one that was signed")
            if path[4]:
                return self._send(key, (wire.NOTHING, 0, b""))
            poll = _Poll(self.connection, time.monotonic() + self._patience)
            return self._send(key, grid.answer(line, key, number, body, poll))

    def _read_reply(
        self, line: Line, number: int, digest: str, length: int
    ) -> bytes | None:
        """Return the body; None if it is not the signed one.

        It is b"" where no reply is awaited.
        """
        if not length:
            if digest == wire.digest_of(b""):
                return b""
            return None
        body = bytearray()
        actual = hashlib.sha256()
        with self.server.grid.track_upload(line, number, self.connection) as is_awaited:
            while length and (block := self.rfile.read(min(length, BLOCK_BYTES))):
                length -= len(block)
                actual.update(block)
                if is_awaited:
                    body += block
        if not length and actual.hexdigest() == digest:
            return bytes(body)
        return None

    @property
    def _patience(self) -> int:
        """The seconds that the site waits for a message, at most (RFC 7240)."""
        seconds = self.headers.get("Prefer", "").removeprefix("wait=")
        if not seconds.isdecimal():
            return 0
        return min(int(seconds), wire.LONGEST_WAIT)

    @property
    def _address(self) -> str:
        return str(self.headers.get(ADDRESS, ""))

    def _send(self, key: bytes, response: wire.Response) -> None:
        """Answer a site, with a signature over status, number and body."""
        status, number, body = response
        digest = wire.digest_of(body)
        self.send_response(status)
        self.send_header(wire.NUMBER, str(number))
        self.send_header(wire.DIGEST, digest)
        self.send_header(
            wire.SIGNATURE, wire.sign_answer(key, self.path, status, number, digest)
        )
        if status != wire.NOTHING:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, reason: str, status: int = wire.FORBIDDEN) -> None:
        """Refuse a request; its body, if any, is not read."""
        self.server.grid.refuse(
            reason, {"path": self.path[-60:], "address": self._address}
        )
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log no requests: rounds and refusals have lines of their own."""


@contextmanager
def open_channel(
    grid: Grid, channel: str, seconds: float, *, stays: bool = False
) -> Iterator[Grid]:
    """Yield the grid of a run: one with sessions where the deployment offers them.

    A run that ``stays`` keeps them while it has no work, and takes no site without
    one. SettingsError if the run must have them (``channel = "session"``), and cannot.
    """
    folder = os.environ.get(SESSIONS, "")
    sessions = None
    problem = f"{SESSIONS} is not set (superlink.sh --sessions does)"
    if folder and channel != FLOWER:
        try:
            sessions = SessionGrid(
                grid,
                Path(folder),
                seconds,
                must_open=channel == SESSION or stays,
                stays=stays,
            )
        except OSError as error:
            problem = f"no socket in {folder}: {error}"
    if sessions is None:
        if channel == SESSION:
            raise SettingsError(f"channel = {channel!r} cannot be had: {problem}")
        if folder and channel == AUTO:
            log_event(WARNING, "no-sessions", reason=problem)
        yield grid
        return
    try:
        yield cast(Grid, sessions)
    finally:
        sessions.close()
