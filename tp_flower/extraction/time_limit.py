"""The time that a query may take at a site, by the policy of its table.

What an expression from the wire costs is bounded by the allow-list, and not by much: a
run of many expressions over a large table may hold a site's machine for hours. DuckDB
looks for an interrupt between vectors of 2,048 rows; databases have a limit of their
own for each statement (``sources/databases/session.py``).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import duckdb

from tp_flower.errors import PolicyError
from tp_flower.sources.shards import ShardSource

AGAIN_SECONDS = 0.1  # an interrupt is lost where it comes between two statements


class TimeLimit:
    """Whether a query's time is over, and its refusal."""

    def __init__(self, source: ShardSource, table: str) -> None:
        self._seconds = source.policy.query_seconds
        self._table = table
        self.is_over = False

    def check(self) -> None:
        """Raise PolicyError once the time is over."""
        if self.is_over:
            raise PolicyError(
                f"the table's policy (query-seconds = {self._seconds}) refuses: the "
                f"query of table {self._table!r} takes longer; ask for fewer or "
                "simpler expressions, or fewer rows by WHERE"
            )

    @contextmanager
    def interrupt_late(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Interrupt what runs on the connection once the time is over."""
        if self._seconds is None:
            yield
            return
        is_done = threading.Event()
        seconds = self._seconds

        def watch() -> None:
            wait = float(seconds)
            while not is_done.wait(wait):
                self.is_over = True
                connection.interrupt()
                wait = AGAIN_SECONDS

        thread = threading.Thread(target=watch, name="query-seconds", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()
