"""A run whose sites are processes, so that the memory of each can be measured.

In simulation all sites and the server share a process; in deployment each has its own,
as here. A process first takes part in a run on a few rows, which loads all that runs
load: what it has then is its baseline.
"""

import multiprocessing
import tempfile
from collections.abc import Mapping
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

from flwr.app import Message

from client_apps.app import app
from scripts.bench.harness import train
from scripts.bench.processes import peak_memory
from scripts.data.make_store import STORE_SQL, make_store
from strategies.run.grid import InProcessGrid
from tp_flower.settings import Settings

CLEAR_REFS = Path("/proc/self/clear_refs")
PEAK = "peak"


class ProcessGrid(InProcessGrid):
    """A grid that passes every message on to its site's process."""

    def __init__(self, sites: Mapping[str, Path], state: Path) -> None:
        super().__init__(app, sites)
        spawning = multiprocessing.get_context("spawn")
        self._pipes: dict[int, Connection] = {}
        self._processes = []
        for node, (name, tables) in zip(self.contexts, sites.items(), strict=True):
            here, there = spawning.Pipe()
            arguments = (there, node, name, tables, state)
            process = spawning.Process(target=answer, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes[node] = here

    def peaks(self) -> list[int]:
        """Return the peak bytes of each site's process since the last call."""
        for pipe in self._pipes.values():
            pipe.send(PEAK)
        return [pipe.recv() for pipe in self._pipes.values()]

    def close(self) -> None:
        """End the processes."""
        super().close()
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join()

    def _deliver(self, message: Message) -> Message:
        self._last = message
        pipe = self._pipes[message.metadata.dst_node_id]
        pipe.send(message)
        reply: Message = pipe.recv()
        return reply


class _SiteGrid(InProcessGrid):
    def __init__(self, node: int, name: str, tables: Path, state: Path) -> None:
        super().__init__(app, {name: tables}, state=state)
        self.contexts = {node: next(iter(self.contexts.values()))}
        self.contexts[node].node_id = node

    def answer(self, message: Message) -> Message:
        """Return the site's reply."""
        return self._deliver(message)


def answer(pipe: Connection, node: int, name: str, tables: Path, state: Path) -> None:
    """Answer the messages of one site until there is a None in place of one."""
    warm_up()
    with closing(_SiteGrid(node, name, tables, state)) as grid:
        while (message := pipe.recv()) is not None:
            if message == PEAK:
                pipe.send(peak_memory())
                forget_peak()
            else:
                pipe.send(grid.answer(message))


def warm_up() -> None:
    """Train on a few rows in this process."""
    shards = make_store(200, 10, 20)
    sites = {name: {name: frames} for name, frames in shards.items()}
    settings = Settings.from_run_config({"task": "regression", "num-epochs": 2})
    with tempfile.TemporaryDirectory() as folder:
        train(STORE_SQL, settings, sites, state=Path(folder))


def forget_peak() -> None:
    """Let the peak start from what the process has now."""
    CLEAR_REFS.write_text("5")
