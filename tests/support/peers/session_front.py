"""Sessions in this process: sites in threads of their own, and a front that fails."""

import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from uuid import uuid4

from strategies.run.channel import SessionGrid
from tests.support.federated import LocalGrid
from tp_flower import node_config
from tp_flower.protocol import session_messages as wire


class Fault(StrEnum):
    """What the way through the front does to one request."""

    REQUEST_LOST = "the request is lost"
    ANSWER_LOST = "the answer is lost"
    TWICE = "the request arrives twice"
    REPLAYED = "the request arrives again, after the next one"
    BAD_GATEWAY = "the front answers in the server's place"
    BODY_CHANGED = "the body is another one"
    UNSIGNED = "there is no signature"
    BADLY_SIGNED = "the signature is another one"
    OTHER_RUN = "the request is for another run"
    ANSWER_CHANGED = "the body of the answer is another one"
    ANSWER_FORGED = "the front makes up a message, with the right digest"


Schedule = Callable[[int], Fault | None]
"""What happens to a request, by how many there were."""


class UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=300)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


class Front(ThreadingHTTPServer):
    """Pass requests to sockets as a schedule says; cut polls after ``longest`` s."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, schedule: Schedule = lambda _: None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.schedule = schedule
        self.longest = 60.0
        self.requests = 0
        self.faults = []
        self.is_down = False
        self.paths: list[str] = []
        self.kept: list[tuple] = []
        self.held: set[UnixConnection] = set()
        self.address = "192.0.2.1"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """Clients go away."""

    def forward(
        self, run: str, path: str, body: bytes, headers: dict
    ) -> tuple[int, list, bytes]:
        connection = UnixConnection(self.folder / f"{run}.sock")
        connection.timeout = self.longest
        headers = {**headers, "X-Real-IP": self.address}
        self.held.add(connection)
        try:
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        except OSError:
            return 502, [], b""
        finally:
            self.held.discard(connection)
            connection.close()

    def die(self) -> None:
        """Answer nothing any more, and drop what is held."""
        self.is_down = True
        for connection in tuple(self.held):
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: Front

    def do_POST(self) -> None:
        front = self.server
        path = self.path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        names = ("Content-Length", "Prefer", "Tp-Digest", "Tp-Signature")
        headers = {n: self.headers[n] for n in names if self.headers[n] is not None}
        front.requests += 1
        front.paths.append(path)
        fault = None if path.endswith("/working") else front.schedule(front.requests)
        front.faults += filter(None, [fault])
        fault = Fault.BAD_GATEWAY if front.is_down else fault
        request = self._arriving(fault, path, body, headers)
        if request is None:
            return
        status, answered, content = front.forward(*request)
        for kept in front.kept:
            threading.Thread(target=front.forward, args=kept).start()
        front.kept = [request] if fault is Fault.REPLAYED else []
        if fault is Fault.ANSWER_LOST:
            self.close_connection = True
            return
        changed = content[::-1] if fault is Fault.ANSWER_CHANGED else content
        if fault is Fault.ANSWER_FORGED and content:
            changed = wire.write_message("train.forged", wire.read_message(content)[1])
            digest = wire.digest_of(changed)
            answered = [(n, digest if n == wire.DIGEST else v) for n, v in answered]
        self._answer(status, answered, changed)

    def _arriving(self, fault, path, body, headers):
        if fault is Fault.BAD_GATEWAY:
            self._answer(502, [], b"<html>no</html>")
            return None
        if fault is Fault.REQUEST_LOST:
            self.close_connection = True
            return None
        run = path.split("/")[3]
        if fault is Fault.TWICE:
            threading.Thread(
                target=self.server.forward, args=(run, path, body, headers)
            ).start()
        if fault is Fault.UNSIGNED:
            del headers["Tp-Signature"]
        if fault is Fault.BADLY_SIGNED:
            headers["Tp-Signature"] = "0" * 64
        if fault is Fault.OTHER_RUN:
            path = path.replace(run, "0" * len(run))
        return run, path, body[::-1] if fault is Fault.BODY_CHANGED else body, headers

    def _answer(self, status: int, headers: list, body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.startswith("Tp-"):
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class ThreadedGrid(LocalGrid):
    """Every site answers its messages in a thread of its own, one after the other.

    ``asked`` has the node and the type of each message that came by Flower.
    """

    def __init__(self, sites, front: str | None, state: Path | None = None) -> None:
        super().__init__(sites, state=state)
        self._arrived = threading.Lock()
        self._queues = defaultdict(SimpleQueue)
        self.asked: list[tuple[int, str]] = []
        for node, context in self.contexts.items():
            _ = self._queues[node]
            if front is not None:
                context.node_config[node_config.SESSION_FRONT] = front
            threading.Thread(target=self._work, args=(node,), daemon=True).start()

    def push_messages(self, messages):
        identifiers = []
        for message in messages:
            identifiers.append(uuid4().hex)
            message.metadata.__dict__["_message_id"] = identifiers[-1]
            self._queues[message.metadata.dst_node_id].put(message)
        return identifiers

    def pull_messages(self, message_ids):
        with self._arrived:
            return super().pull_messages(message_ids)

    def close(self) -> None:
        for queue in self._queues.values():
            queue.put(None)
        super().close()

    def _work(self, node: int) -> None:
        while (message := self._queues[node].get()) is not None:
            self.asked.append((node, str(message.metadata.message_type)))
            reply = self._deliver(message)
            with self._arrived:
                self._replies[message.metadata.message_id] = reply


@contextmanager
def sessions(
    sites, folder: Path, schedule: Schedule = lambda _: None, **options
) -> Iterator[tuple[SessionGrid, Front, ThreadedGrid]]:
    """Yield a grid of sessions with sites, through a front."""
    state = options.pop("state", None)
    front = Front(folder, schedule)
    threading.Thread(target=front.serve_forever, args=(0.05,), daemon=True).start()
    flower = ThreadedGrid(sites, front.url, state)
    grid = SessionGrid(flower, folder, options.pop("seconds", 300.0), **options)
    try:
        yield grid, front, flower
    finally:
        grid.close()
        flower.close()
        front.shutdown()
        front.server_close()
