"""Helpers for arrays: blocks of rows, and weighted means and counts.

Without weights, means and counts equal numpy's to the bit.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from tp_flower.errors import MappingError

BLOCK_ROWS = 16384
MAPPED_BYTES = 1 << 20
"""From so many on, an array is worth a file."""
DOT_NUMBERS: Final = 8192  # that BLAS adds up in one thread
MISSING: Final = -1e30  # a missing value in features, of which trees learn the side
FEWEST_BINS: Final = 2
MOST_BINS: Final = 255
NO_BIN: Final = 255
"""Of a column whose bin numbers leave, a byte each: from 0 on, and where there is none,
because a number is missing, or a row that a LEFT JOIN lacks."""
FLOAT32: Final = 2.0**-24  # relative rounding
AnyArray = npt.NDArray[Any]
AnyFloat = npt.NDArray[np.floating[Any]]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.integer[Any]]
IntArray = npt.NDArray[np.int64]


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike, *, is_mapped: bool) -> AnyArray:
    """Return an array without values, in memory, or mapped from a file without a name.

    The file lies where Python's ``tempfile`` puts it, as ``TMPDIR`` says, and is gone
    with the array. A small array is in memory.

    Raises:
        MappingError: there is no room for the file.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not is_mapped or size < MAPPED_BYTES:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile() as file:
        try:
            # without room, a later write would end the process
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise MappingError(
                f"memory: no file of {size / 1e9:.1f} GB for the joined rows in "
                f"{tempfile.gettempdir()}: {error.strerror}. Set TMPDIR to a folder "
                "with more room, or memory to more"
            ) from None
        return np.memmap(file, dtype, "r+", shape=shape)


def is_mapped(values: AnyArray) -> bool:
    """Return whether an array is mapped from a file."""
    return getattr(values, "_mmap", None) is not None


def empty_like(values: AnyArray, shape: tuple[int, ...], dtype: Any) -> AnyArray:
    """Return an array without values, mapped from a file if ``values`` are."""
    return empty(shape, dtype, is_mapped=is_mapped(values))


def chosen_rows(values: AnyArray, rows: slice | AnyArray) -> AnyArray:
    """Return values (N, ...) of a slice, at positions (k,), or where a mask (N,) is."""
    if isinstance(rows, slice) or not is_mapped(values):
        return values[rows]
    is_mask = rows.dtype == np.bool_
    count = int(np.count_nonzero(rows)) if is_mask else len(rows)
    chosen = empty_like(values, (count, *values.shape[1:]), values.dtype)
    stop = 0
    for block in blocks(len(rows)):
        part = (values[block] if is_mask else values)[rows[block]]
        start, stop = stop, stop + len(part)
        chosen[start:stop] = part
    return chosen


def mean(values: npt.NDArray[Any], weights: FloatArray | None = None) -> Any:
    """Return the mean of values (N,), weighted by ``weights`` (N,) if given.

    >>> float(mean(np.array([1.0, 4.0]), np.array([2.0, 1.0])))
    2.0
    """
    if weights is None:
        return values.mean()
    return weights @ values / weights.sum()


def dot(left: FloatArray, right: FloatArray) -> float:
    """Return the sum of products of all entries, of one shape.

    BLAS takes more threads for more numbers, which would change the last bits.

    >>> dot(np.array([[1.0, 2.0]]), np.array([[3.0, 4.0]]))
    11.0
    """
    left = left.ravel()
    right = right.ravel()
    total = 0.0
    for start in range(0, len(left), DOT_NUMBERS):
        stop = start + DOT_NUMBERS
        total += float(np.dot(left[start:stop], right[start:stop]))
    return total


def effective_rows(weights: FloatArray) -> float:
    """Return Kish's effective sample size of weighted rows, (sum w)^2 / sum w^2.

    >>> effective_rows(np.array([1.0, 1.0, 2.0]))
    2.6666666666666665
    """
    return float(weights.sum() ** 2 / (weights @ weights))


def class_counts(
    labels: FloatArray, classes: int, weights: FloatArray | None = None
) -> FloatArray:
    """Return how many of N labels each class has, by weight if given, (classes,)."""
    scale = 1.0 if weights is None else len(labels) / weights.sum()
    return np.bincount(labels.astype(np.intp), weights, minlength=classes) * scale


def count_distinct(rows: npt.NDArray[np.integer[Any]]) -> int:
    """Count the distinct numbers of rows, none of them below 0.

    It takes a hundredth of the time of ``np.unique``.
    """
    return int(np.count_nonzero(np.bincount(rows)))


def count_values(values: FloatArray, most: int) -> int:
    """Count the distinct numbers (n,), none NaN; more than ``most`` count as one more.

    >>> count_values(np.array([0.0, 1.0, 0.0]), most=2)
    2
    >>> count_values(np.arange(9.0), most=2)
    3
    """
    distinct = values[:0]
    for span in blocks(len(values)):
        distinct = np.unique(np.append(distinct, values[span]))
        if len(distinct) > most:
            return most + 1
    return len(distinct)


def blocks(rows: int, size: int = BLOCK_ROWS) -> Iterator[slice]:
    """Yield the slices that cover ``rows`` rows in blocks.

    >>> [(b.start, b.stop) for b in blocks(5, 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    return blocks_of(slice(0, rows), size)


def blocks_of(span: slice, size: int) -> Iterator[slice]:
    """Yield the slices that cover a span of rows in blocks."""
    for start in range(span.start, span.stop, size):
        yield slice(start, min(start + size, span.stop))


Result = TypeVar("Result")

THREADS: Final = "OMP_NUM_THREADS"
"""Environment variable that bounds the threads, here and in BLAS; Ray sets it to a
client's number of cores."""


def thread_count() -> int:
    """Return how many threads may compute at once."""
    limit = os.environ.get(THREADS, "")
    if limit.isdecimal() and int(limit) > 0:
        return int(limit)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_in_threads(
    work: Callable[[slice], Result], rows: int, least_rows: int
) -> list[Result]:
    """Return the results of ``work`` on contiguous spans of rows, in their order.

    ``work`` is called once per span, on one empty span if there are no rows; it must
    not change what another call reads, nor call this: it would wait for the thread that
    it is in. A thread gets at least ``least_rows``: with fewer it costs more than it
    saves.

    >>> run_in_threads(lambda span: span.stop - span.start, 10, least_rows=100)
    [10]
    """
    parts = min(thread_count(), rows // max(least_rows, 1))
    if parts <= 1:
        return [work(slice(0, rows))]
    edges = np.linspace(0, rows, parts + 1).astype(np.int64).tolist()
    first, *others = (slice(*pair) for pair in pairwise(edges))
    futures = [_pool(parts - 1).submit(work, span) for span in others]
    try:
        result = work(first)
    finally:
        wait(futures)  # none may go on when the caller does
    return [result, *(future.result() for future in futures)]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Keep the threads: to start one takes as long as much of what it is to do."""
    return ThreadPoolExecutor(threads)


os.register_at_fork(after_in_child=_pool.cache_clear)
