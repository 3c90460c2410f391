"""Waiting for what another process or thread does, as long as a busy machine needs."""

import time
from collections.abc import Callable

MOST_SECONDS = 300.0


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return as soon as something is so; fail if it never is."""
    end = time.monotonic() + MOST_SECONDS
    while not is_so():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)
