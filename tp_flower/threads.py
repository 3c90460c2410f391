"""Work on the rows of large arrays in several threads.

numpy lets go of the interpreter's lock while it computes, so that threads share the
work as far as the arrays are large. Every thread has one contiguous span of the rows:
what is computed does not depend on which thread is faster.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np

Result = TypeVar("Result")

THREADS: Final = "OMP_NUM_THREADS"
"""Environment variable that bounds the threads, here as in BLAS; Ray sets it to the
cores of a client."""


def thread_count() -> int:
    """Return how many threads may compute at once."""
    given = os.environ.get(THREADS, "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_threads(
    work: Callable[[slice], Result], rows: int, least_rows: int
) -> list[Result]:
    """Return what ``work`` makes of contiguous spans of rows, in their order.

    Args:
        work: called once per span; must not change what another call reads.
        rows: how many there are; of none there is one empty span.
        least_rows: a thread has at least so many: with fewer it costs more than it
            saves.

    >>> in_threads(lambda span: span.stop - span.start, 10, least_rows=100)
    [10]
    """
    parts = min(thread_count(), rows // max(least_rows, 1))
    if parts <= 1:
        return [work(slice(0, rows))]
    edges = np.linspace(0, rows, parts + 1).astype(np.int64).tolist()
    with ThreadPoolExecutor(parts) as pool:
        return list(pool.map(work, [slice(*pair) for pair in pairwise(edges)]))


def blocks_of(span: slice, size: int) -> Iterator[slice]:
    """Yield the slices that cover a span of rows in blocks.

    >>> [(b.start, b.stop) for b in blocks_of(slice(3, 8), 2)]
    [(3, 5), (5, 7), (7, 8)]
    """
    for start in range(span.start, span.stop, size):
        yield slice(start, min(start + size, span.stop))
