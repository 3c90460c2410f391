"""Workers of a server in its own process, which can be killed."""

from collections.abc import Callable
from typing import Any

from ray import cloudpickle

from tp_flower.joins.partitions import Partitions
from tp_flower.joins.rows import JoinedRows
from tp_flower.joins.workers import WorkerLostError, Workers


class WorkersHere(Workers):
    """Workers that compute when their result is fetched, or another needs it.

    Whatever is sent is copied as Ray copies it.

    Attributes:
        sent: bytes of each value that was put.
        kernels: those of functions among them.
        calls: of each worker so far.
        dies_at: by number, the call in which a worker's process dies.
    """

    def __init__(
        self, workers: int, on_loss: Callable[[int], None] = lambda _: None
    ) -> None:
        super().__init__(workers, on_loss)
        self.sent: list[int] = []
        self.kernels: list[int] = []
        self.calls = [0] * workers
        self.dies_at: dict[int, int] = {}
        self._processes: dict[int, Partitions] = {}
        for number in range(workers):
            self.start(number)

    def put(self, value: object) -> Any:
        content = cloudpickle.dumps(value)
        self.sent.append(len(content))
        if callable(value):
            self.kernels.append(len(content))
        return lambda: cloudpickle.loads(content)

    def call(self, number: int, method: str, *args: object) -> Any:
        values = [each if callable(each) else self.put(each) for each in args]
        return self._carry_out(number, method, values)

    def _carry_out(self, number: int, method: str, values: list[Any]) -> Any:
        if self.calls[number] == self.dies_at.get(number):
            self.kill(number)
        self.calls[number] += 1
        process = self._processes.get(number)

        def lost() -> Any:
            raise WorkerLostError(f"worker {number} was killed")

        if process is None:
            return lost
        try:
            result = getattr(process, method)(*(value() for value in values))
        except WorkerLostError:
            return lost
        return self.put(result)

    def fetch(self, future: Any) -> Any:
        return future()

    def start(self, number: int) -> None:
        self._processes[number] = Partitions()

    def kill(self, number: int) -> None:
        """Let the process of a worker die, with all that it holds."""
        self._processes.pop(number, None)

    def held(self) -> list[dict[int, JoinedRows]]:
        """By worker, the partitions that it has, by their key."""
        return [process._rows for process in self._processes.values()]

    def stop(self) -> None:
        self._processes.clear()
