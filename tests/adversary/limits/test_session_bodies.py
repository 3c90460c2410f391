"""A site that sends what it never ends: the run's process holds no more than one reply
of it.
"""

import socket
import tempfile
import tracemalloc
from contextlib import ExitStack
from pathlib import Path

import pytest

from strategies.run import channel
from tests.support.federated import store
from tests.support.peers.session_front import sessions
from tests.support.servers import wait_until
from tp_flower.protocol import session_messages as wire

MEGABYTE = 1 << 20
LENGTH = 10 * MEGABYTE
BODIES = 8
"""Of the attack of the audit a tenth: 8 bodies of 100 MB."""


@pytest.fixture
def run():
    """A run that waits for a reply of a site, and sends it a request whenever it is
    asked.
    """
    with tempfile.TemporaryDirectory(prefix="tp-") as name:
        folder = Path(name)
        with sessions({"shop": {"orders": store()["orders"]}}, folder) as (grid, *_):
            line = grid.lines[2] = channel.Line(2, key=bytes(32), number=1, frame=b"x")
            line.sent = object()
            line.since = 1.0
            yield folder, grid, line


class Upload:
    """A signed request whose body lacks its last byte."""

    def __init__(self, folder, grid, number, length=LENGTH):
        path = wire.path_of(grid.channel, 2, number)
        body = bytes(length)
        digest = wire.digest_of(body)
        head = (
            f"POST {path} HTTP/1.1\r\nContent-Length: {length}\r\nX-Real-IP: "
            f"192.0.2.1\r\n{wire.DIGEST}: {digest}\r\n{wire.SIGNATURE}: "
            f"{wire.sign_request(bytes(32), path, length, digest)}\r\n\r\n"
        )
        self.client = socket.socket(socket.AF_UNIX)
        self.client.connect(str(next(folder.glob("*.sock"))))
        self.client.sendall(head.encode())
        self.body = body
        self.status = 0

    def send(self):
        try:
            self.client.sendall(self.body[:-1])
        except OSError:
            self.status = -1

    def answer(self):
        """Return the status that the run has answered, 0 if it has cut the connection
        off.
        """
        self.client.settimeout(30)
        try:
            return int(self.client.recv(12)[9:12] or 0)
        except OSError:
            return 0


@pytest.mark.parametrize(
    ("number", "most"), [(2, 2.5), (7, 1.5)], ids=["awaited", "not awaited"]
)
def test_unfinished_bodies_of_a_site_take_the_memory_of_one(run, number, most):
    """788 MB at the run's process, of 8 bodies of 100 MB; now of one, or of none."""
    folder, grid, line = run
    tracemalloc.start()
    with ExitStack() as stack:
        uploads = [Upload(folder, grid, number) for _ in range(BODIES)]
        for upload in uploads:
            stack.enter_context(upload.client)
        wait_until(lambda: line.requests >= 1)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for upload in uploads:
            upload.send()
        peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < most * LENGTH
    wait_until(lambda: not line.requests)
    assert line.upload is None


def test_a_later_reply_replaces_one_that_never_ends(run):
    folder, grid, line = run
    first = Upload(folder, grid, 2)
    wait_until(lambda: line.upload is not None)
    second = Upload(folder, grid, 2, length=9)
    with first.client, second.client:
        assert first.answer() in (0, wire.FORBIDDEN)
        second.client.sendall(bytes(9))
        wait_until(lambda: line.frame == b"")


def test_a_site_has_so_many_requests_in_work_and_others_go_on(run):
    folder, grid, line = run
    with ExitStack() as stack:
        uploads = [Upload(folder, grid, 7) for _ in range(channel.MOST_SITE_REQUESTS)]
        for upload in uploads:
            stack.enter_context(upload.client)
        wait_until(lambda: line.requests == channel.MOST_SITE_REQUESTS)
        one_more = Upload(folder, grid, 7)
        stack.enter_context(one_more.client)
        assert one_more.answer() == wire.TOO_MANY
        assert grid.refused["too many requests of one site"] == 1
