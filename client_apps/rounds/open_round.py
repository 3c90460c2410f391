"""What a round changes of a run at a site, until it is committed."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Self

from client_apps.data.committed_round import Record
from client_apps.operator.participant import State
from client_apps.rounds.idempotency import NO_HISTORY, Once, later
from tp_flower.arrays import AnyArray
from tp_flower.privacy.plan import MODEL
from tp_flower.protocol import ArrayKey, Parcel


class Round:
    """A round in progress; nothing of it is kept before it is committed.

    Args:
        number: of the round.
        digest: of its request.
        history: up to the request.
        arrays: the state by (part, name).
        key: returns the site's key of the run.

    Attributes:
        arrays: as they are now.
        once: what the round pays and draws.
        is_over: whether all of the run is to be forgotten, once the round is committed.
    """

    def __init__(
        self,
        number: int,
        digest: str,
        history: str,
        arrays: Mapping[ArrayKey, AnyArray],
        key: Callable[[], bytes],
    ) -> None:
        self.number, self.digest = number, digest
        self.arrays = dict(arrays)
        self.once = Once(key, history)
        self._history = history
        self._doomed: list[str] = []
        self.is_over = False

    @classmethod
    def after(
        cls, last: Record | None, key: Callable[[], bytes], number: int, digest: str
    ) -> Self:
        """Return a round that follows another one, or is the first."""
        before = NO_HISTORY if last is None else last.history
        arrays = {} if last is None else last.arrays
        return cls(number, digest, later(before, number, digest), arrays, key)

    def change(self, states: Mapping[int, State]) -> None:
        """Change the model and the other vectors of parts, by part number."""
        for number, (model, vectors) in states.items():
            self.arrays[number, MODEL] = model.parameters
            for name, vector in vectors.items():
                self.arrays[number, name] = vector

    def learn(self, rows: str) -> None:
        """Let the history tell which rows were read.

        Args:
            rows: differs where they do.
        """
        self._history = later(self._history, rows)

    def forget(self, *entries: str) -> None:
        """Forget entries once the round is committed."""
        self._doomed += entries

    def end_run(self) -> None:
        """Forget all of the run once the round is committed."""
        self.arrays.clear()
        self.is_over = True

    def record(self, run: str, reply: Parcel, entries: Sequence[str]) -> Record:
        """Return what is to be kept of the round.

        Args:
            run: names the run at the site.
            reply: that is going to be sent.
            entries: the names of all that the site keeps of the run besides.
        """
        gone: Collection[str] = entries if self.is_over else self._doomed
        return Record(
            run=run,
            number=self.number,
            digest=self.digest,
            history=self._history,
            reply=reply,
            arrays=self.arrays,
            entries=tuple(name for name in entries if name not in gone),
            doomed=tuple(self._doomed),
            is_over=self.is_over,
        )
