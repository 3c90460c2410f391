"""A round of a run at a site in progress: what it changes, pays and draws.

A request may be carried out again: because the process was killed before it was
answered, or because the site has lost its state and is sent all rounds anew. Then noise
must not be drawn a second time, as two draws tell more than one, and not be paid for a
second time either. So both follow from a key of the run that the site keeps to itself
and from the run's *history*: the rounds up to this one, with the digests of their
requests, and the rows that were read. The same history has the same noise, and one
payment; any other one has other noise, and is paid for.
"""

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Final

from client_apps.data.run_store import CommittedRound
from client_apps.operator.participant import State
from tp_flower.arrays import AnyArray
from tp_flower.privacy.plan import MODEL
from tp_flower.protocol import ArrayKey
from tp_flower.randomness import NoiseSource

NO_HISTORY: Final = ""
_ID_DIGITS: Final = 32


class RoundKeys:
    """The noise of a round, and the name of its payments.

    Args:
        key: returns the site's key of the run; called if there is something to draw or
            to pay.
        history: up to this round.

    Attributes:
        noise: of the round.

    >>> first, again = (RoundKeys(lambda: b"key", "a") for _ in range(2))
    >>> other = RoundKeys(lambda: b"key", "b")
    >>> first.payment == again.payment, first.payment == other.payment
    (True, False)
    >>> bool(first.noise.uniform(1) == again.noise.uniform(1))
    True
    """

    def __init__(self, key: Callable[[], bytes], history: str) -> None:
        self._key, self._history = key, history
        self.noise = NoiseSource(lambda: self._derived(b"noise"))

    @property
    def payment(self) -> str:
        """Names the round's payments."""
        return self._derived(b"payment").hex()[:_ID_DIGITS]

    def _derived(self, purpose: bytes) -> bytes:
        text = purpose + b" " + self._history.encode()
        return hmac.digest(self._key(), text, hashlib.sha256)


class Round:
    """A round in progress; nothing of it is kept before it is committed.

    Args:
        last: the committed round; None before the first.
        key: returns the site's key of the run.
        number: of the round.
        digest: of its request.

    Attributes:
        number: as given.
        digest: as given.
        arrays: the state by (part, name), as it is now.
        keys: of what the round pays and draws.
        obsolete: the names of entries that are forgotten with the commit.
        is_over: whether all of the run is.
    """

    def __init__(
        self,
        last: CommittedRound | None,
        key: Callable[[], bytes],
        number: int,
        digest: str,
    ) -> None:
        self.number, self.digest = number, digest
        before = NO_HISTORY if last is None else last.history
        self._history = later(before, number, digest)
        self.arrays: dict[ArrayKey, AnyArray] = {} if last is None else {**last.arrays}
        self.keys = RoundKeys(key, self._history)
        self.obsolete: list[str] = []
        self.is_over = False

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
        self.obsolete += entries

    def end_run(self) -> None:
        """Forget all of the run once the round is committed."""
        self.arrays.clear()
        self.is_over = True

    def committed(self) -> CommittedRound:
        """Return what is to be kept of the round."""
        return CommittedRound(
            self.number, self.digest, self._history, self.arrays, self.is_over
        )


def later(history: str, *facts: object) -> str:
    """Return a history with something more in it.

    Args:
        history: so far.
        facts: plain JSON types.
    """
    return hashlib.sha256(json.dumps([history, *facts]).encode()).hexdigest()
