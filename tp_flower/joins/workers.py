"""The workers of a server: processes that each hold a part of the joined rows.

They are called by number, do what they are called for in that order, and may die. A
worker that has died is replaced by a new process, of another *generation*, which holds
nothing: whoever had a partition there makes it again.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Any, Final, TypeVar

from tp_flower.errors import WorkerError

MOST_LOSSES: Final = 3
"""Losses of a worker within one call, after which the run ends."""
Result = TypeVar("Result")


class WorkerLostError(Exception):
    """A worker has died, and is to be replaced."""


class Workers(ABC):
    """Processes with :class:`~tp_flower.joins.partitions.Partitions`, by number.

    Attributes:
        generations: of each, which process it is: 0 for the first.
        is_closed: whether they have ended.
    """

    def __init__(self, workers: int, on_loss: Callable[[int], None]) -> None:
        """Begin without processes; ``on_loss`` is told the number of a dead one."""
        self.generations = [0] * workers
        self.is_closed = False
        self._on_loss = on_loss
        self._keys = count()
        self._lost: set[int] = set()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.generations)

    @abstractmethod
    def put(self, value: object) -> Any:
        """Store a value once for all workers; return what calls are given for it."""

    @abstractmethod
    def call(self, number: int, method: str, *args: object) -> Any:
        """Begin a call of a worker; return what stands for its result.

        It may be an argument of other calls. Nothing is raised before it is fetched.
        """

    @abstractmethod
    def fetch(self, future: Any) -> Any:
        """Return the result of a call.

        Raises:
            WorkerLostError: a worker has died before.
        """

    @abstractmethod
    def start(self, number: int) -> None:
        """Start the process of a worker, or another one in place of a dead one."""

    @abstractmethod
    def stop(self) -> None:
        """End all processes."""

    def new_key(self) -> int:
        """Return a key for the partitions of some joined rows."""
        return next(self._keys)

    def generation(self, number: int) -> int:
        """Return which process a worker is; one that has died is replaced before."""
        if number in self._lost:
            self._on_loss(number)
            self._lost.remove(number)
            self.generations[number] += 1
            self.start(number)
        return self.generations[number]

    def lose(self, number: int) -> None:
        """Let a worker be replaced before its next call."""
        self._lost.add(number)

    def get(self, future: Any) -> Any:
        """Return the result of a call.

        Raises:
            WorkerLostError: a worker has died before; it is known now which.
        """
        try:
            return self.fetch(future)
        except WorkerLostError:
            self._find_lost()
            raise

    def _find_lost(self) -> None:
        for number in range(len(self)):
            try:
                self.fetch(self.call(number, "ping"))
            except WorkerLostError:
                self.lose(number)

    def drop(self, key: int) -> None:
        """Let all workers forget the partitions of a key."""
        if not self.is_closed:
            for number in range(len(self)):
                self.call(number, "drop", key)

    def close(self) -> None:
        """End the workers."""
        self.is_closed = True
        self.stop()


def until_done(work: Callable[[], Result]) -> Result:
    """Return the result of work that is done again where a worker dies meanwhile.

    Raises:
        WorkerError: it died every time.
    """
    losses: list[WorkerLostError] = []
    while len(losses) < MOST_LOSSES:
        try:
            return work()
        except WorkerLostError as error:
            losses.append(error)
    raise WorkerError(
        f"a worker of the server has died {MOST_LOSSES} times over one step, the last "
        f"time because: {losses[-1]}. If its memory is too small, more server-workers "
        "on more machines each hold less"
    )
