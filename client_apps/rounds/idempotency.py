"""What is to happen once in a run, however often it is done: payments, and noise.

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
from collections.abc import Callable
from typing import Final

from tp_flower.randomness import NoiseSource

NO_HISTORY: Final = ""
_IDENT_DIGITS: Final = 32


class Once:
    """What a round pays and draws.

    Args:
        key: returns the site's key of the run; called if there is something to draw or
            to pay.
        history: up to this round.

    Attributes:
        noise: of the round.

    >>> first, again = (Once(lambda: b"key", "a") for _ in range(2))
    >>> first.ident == again.ident, first.ident == Once(lambda: b"key", "b").ident
    (True, False)
    >>> bool(first.noise.uniform(1) == again.noise.uniform(1))
    True
    """

    def __init__(self, key: Callable[[], bytes], history: str) -> None:
        self._key, self._history = key, history
        self.noise = NoiseSource(lambda: self._derived(b"noise"))

    @property
    def ident(self) -> str:
        """Names the round's payments."""
        return self._derived(b"payment").hex()[:_IDENT_DIGITS]

    def _derived(self, what: bytes) -> bytes:
        text = what + b" " + self._history.encode()
        return hmac.digest(self._key(), text, hashlib.sha256)


def later(history: str, *facts: object) -> str:
    """Return a history with something more in it.

    Args:
        history: so far.
        facts: plain JSON types.
    """
    return hashlib.sha256(json.dumps([history, *facts]).encode()).hexdigest()
