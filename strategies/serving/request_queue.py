"""Requests for predictions that wait for the scorer, and what becomes of them.

Threads of the HTTP server put requests in and wait for the answers; the thread of the
rounds takes all that wait at a time, so that they share a round.
"""

import math
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from threading import Condition
from typing import ClassVar, Final, TypeAlias

from tp_flower.errors import NEXT_QUERY, SiteError, TPFlowerError

KeyValue: TypeAlias = str | int | float | bool
RowKey: TypeAlias = Mapping[str, KeyValue]
"""The columns of the row key, by name, of a row of the label table."""
Prediction: TypeAlias = Mapping[str, object]
Predictions: TypeAlias = Sequence[Sequence[Prediction]]
"""By requested key the predictions of its joined rows."""

OPENING: Final = "the scorer is opening its session with the sites"
MOST_WAITING: Final = 256
_FREE_AT: Final = re.compile(rf"\(queries-per-day\) refuses: .*?{NEXT_QUERY}(\S+Z)")
LONGEST_WAIT: Final = 3600.0  # a condition cannot wait for ever


class ServingError(TPFlowerError):
    """A request is not answered by predictions.

    Attributes:
        status: HTTP's.
        retry_seconds: after which it may be answered; None if it will not be.
    """

    status: ClassVar[HTTPStatus]
    retry_seconds: int | None = None


class MalformedError(ServingError):
    """A request is malformed; the text names the field."""

    status = HTTPStatus.BAD_REQUEST


class UnknownKeyError(ServingError):
    """No row of the label table has a requested key."""

    status = HTTPStatus.NOT_FOUND


class TooLargeError(ServingError):
    """A request is of more rows, or bytes, than are answered at a time."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class RefusedError(ServingError):
    """A site refuses a request, by its policy, its quota or its budget."""

    status = HTTPStatus.FORBIDDEN

    @classmethod
    def of(cls, error: SiteError) -> "RefusedError":
        """Return the error of a request that sites refuse.

        >>> RefusedError.of(SiteError("site 'b': too few rows")).status
        <HTTPStatus.FORBIDDEN: 403>
        """
        if times := _FREE_AT.findall(str(error)):
            return QuotaUsedUpError(str(error), max(map(datetime.fromisoformat, times)))
        return cls(str(error))


class QuotaUsedUpError(RefusedError):
    """Tables have no queries left for the day, until some time."""

    status = HTTPStatus.TOO_MANY_REQUESTS

    def __init__(self, reason: str, until: datetime) -> None:
        super().__init__(reason)
        self.retry_seconds = max(
            1, math.ceil((until - datetime.now(UTC)).total_seconds())
        )


class DownError(ServingError):
    """There is no session with the sites at present; the text names who is missing."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    retry_seconds = 1


@dataclass(frozen=True, eq=False)
class RowRequest:
    """The keys of one request, and its answer to come; others may have its keys."""

    keys: Sequence[RowKey]
    answer: "Future[Predictions]" = field(default_factory=Future)

    def fail(self, error: ServingError) -> None:
        """Answer with an error, unless the request is answered."""
        if not self.answer.done():
            self.answer.set_exception(error)


class RequestQueue:
    """The requests that wait; safe for threads.

    Without a session every request fails at once, with the reason.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting: deque[RowRequest] = deque()
        self._taken: Sequence[RowRequest] = ()
        self._reason = OPENING
        self._is_closed = False

    @property
    def reason(self) -> str:
        """Why no request is answered at present; "" if they are."""
        return self._reason

    @property
    def is_closed(self) -> bool:
        """Whether the scorer is to end."""
        return self._is_closed

    def submit(self, keys: Sequence[RowKey]) -> RowRequest:
        """Add a request.

        Raises:
            DownError: there is no session, or too many requests wait.
        """
        request = RowRequest(keys)
        with self._changed:
            if self._reason:
                raise DownError(self._reason)
            if len(self._waiting) >= MOST_WAITING:
                raise DownError(f"{MOST_WAITING} requests wait already: try again")
            self._waiting.append(request)
            self._changed.notify_all()
        return request

    def withdraw(self, request: RowRequest) -> bool:
        """Take a request back; return whether it still waited, and no site hears it."""
        with self._changed:
            if request not in self._waiting:
                return False
            self._waiting.remove(request)
            return True

    def take(self, until: float, most_keys: int) -> Sequence[RowRequest]:
        """Wait for requests, and return the first ones: of all that wait, if few.

        Args:
            until: when to stop waiting, on the clock of ``time.monotonic``.
            most_keys: of them together, unless the first has more by itself.

        Returns:
            None of them if that time has come, or the queue is closed.
        """
        with self._changed:
            while not (self._waiting or self._is_closed):
                left = until - time.monotonic()
                if left <= 0.0:
                    break
                self._changed.wait(min(left, LONGEST_WAIT))
            if self._is_closed or time.monotonic() >= until:
                return ()
            taken = [self._waiting.popleft()]
            keys = len(taken[0].keys)
            while self._waiting and keys + len(self._waiting[0].keys) <= most_keys:
                taken.append(self._waiting.popleft())
                keys += len(taken[-1].keys)
            self._taken = taken
            return taken

    def open(self) -> None:
        """Note that a session is open."""
        with self._changed:
            self._reason = ""

    def fail(self, reason: str) -> None:
        """Note that there is no session, and fail all requests that have no answer."""
        with self._changed:
            self._reason = reason
            failed = [*self._taken, *self._waiting]
            self._waiting.clear()
            self._taken = ()
        for request in failed:
            request.fail(DownError(reason))

    def close(self) -> None:
        """Let the scorer end after the requests in work."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait_closed(self, seconds: float) -> bool:
        """Wait until the queue is closed; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closed, seconds)
