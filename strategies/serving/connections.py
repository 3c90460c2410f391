"""Connections to a scorer: how long each may last, and which makes room for another.

A connection holds a thread. Whoever has no token could hold all of them by bytes that
come one at a time, each within any limit on a single read. So a connection has a time
at which it is cut, whatever it does until then, and if all threads are taken, the
address with the most connections without a token loses its oldest one.
"""

import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

from strategies.run.channel import BoundedThreads

HEAD_SECONDS: Final = 10.0
"""From the beginning of a connection until the token is read, TLS included."""
ROOM_SECONDS: Final = 1.0
"""To wait for the thread of a connection that was cut."""


@dataclass
class _Limit:
    """When a connection is cut, on the clock of ``time.monotonic``."""

    address: str
    end: float
    has_token: bool = False


class LimitedConnections(BoundedThreads):
    """A server that cuts connections which take too long, or stand in others' way.

    Attributes:
        on_cut: called for each connection that is cut.
    """

    def __init__(self, on_cut: Callable[[], None], *arguments: Any) -> None:
        self.on_cut = on_cut
        self._limits: dict[socket.socket, _Limit] = {}
        self._lock = Lock()
        super().__init__(*arguments)

    def trust(self, connection: socket.socket, seconds: float) -> None:
        """Give a connection that has shown the token so many seconds from now."""
        with self._lock:
            if limit := self._limits.get(connection):
                limit.end = time.monotonic() + seconds
                limit.has_token = True

    def process_request_thread(self, *connection: Any) -> None:
        """Answer the requests of a connection, as long as it may last."""
        request, (address, *_) = connection
        with self._lock:
            self._limits[request] = _Limit(address, time.monotonic() + HEAD_SECONDS)
        super().process_request_thread(*connection)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; its number may be another one's from here on."""
        with self._lock:
            self._limits.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut what has lasted too long: every half a second, and at each connection."""
        now = time.monotonic()
        with self._lock:
            for connection in [c for c, lim in self._limits.items() if lim.end <= now]:
                self._cut(connection)

    def make_room(self) -> bool:
        """Cut a connection that has not shown the token; return whether one was.

        Of the addresses it is one of those with the most such connections: who has
        few is not cut for who has many.
        """
        with self._lock:
            limits = {c: lim for c, lim in self._limits.items() if not lim.has_token}
            if not limits:
                return False
            counts = Counter(limit.address for limit in limits.values())
            self._cut(
                min(limits, key=lambda c: (-counts[limits[c].address], limits[c].end))
            )
        return self._free.acquire(timeout=ROOM_SECONDS)

    def _cut(self, connection: socket.socket) -> None:
        """End the reads and writes of a connection's thread, which then closes it."""
        del self._limits[connection]
        self.on_cut()
        with suppress(OSError):  # the client may be faster
            # that of TLS would take the connection's state from under its thread
            socket.socket.shutdown(connection, socket.SHUT_RDWR)
