"""A TCP proxy on loopback that adds a round-trip time, and resets connections."""

import asyncio
import random
import time
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

from scripts.deploy.deployment import free_port

CHUNK_BYTES = 1 << 16


class SlowLink:
    """Passes connections on to ``target``, a port of this machine, until closed.

    ``port`` is its own. Each chunk arrives after half of ``seconds``; ``resets`` is the
    probability that a connection, or a chunk, ends in a reset.
    """

    def __init__(self, target: int, seconds: float, resets: float) -> None:
        self.port = free_port()
        self._target, self._delay, self._resets = target, seconds / 2, resets
        self._random, self._over = random.Random(0), asyncio.Event()
        self._starts: Future[asyncio.AbstractEventLoop] = Future()
        Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._loop = self._starts.result()

    def close(self) -> None:
        """Pass nothing on any more."""
        self._loop.call_soon_threadsafe(self._over.set)

    async def _serve(self) -> None:
        await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        self._starts.set_result(asyncio.get_running_loop())
        await self._over.wait()

    def _is_reset(self, writer: asyncio.StreamWriter) -> bool:
        if self._random.random() >= self._resets:
            return False
        writer.transport.abort()
        return True

    async def _connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._is_reset(writer):
            return
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        ways = self._pass(reader, there[1]), self._pass(there[0], writer)
        # the streams of Python 3.11 make noise about handlers that are cancelled
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        chunks = asyncio.Queue[tuple[float, bytes]]()

        async def send() -> None:
            data = b"more"
            while data:
                due, data = await chunks.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if data and self._is_reset(writer):
                    return
                writer.write(data)
            writer.close()

        task, data = asyncio.create_task(send()), b"more"
        while data:
            data = b""
            with suppress(OSError):
                data = await reader.read(CHUNK_BYTES)
            chunks.put_nowait((time.monotonic() + self._delay, data))
        await task
