"""Matrices of numbers kept in one file, block of rows by block of rows.

A shard may be larger than memory: its rows are appended as they are read, and read
back with plain reads. Nothing is memory-mapped, because the pages of a map that has
been read count as memory of the process.

Notation
    k   columns
    B   rows of a block, ``BlockReader.block_rows``
    A file holds blocks (k, B), the last one (k, what is left), without anything else.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import numpy as np

from tp_flower.arrays import AnyArray, IndexArray

Rows = slice | IndexArray
"""Rows from start to stop, or their positions."""

BLOCK_VALUES: Final = 1 << 20
LEAST_ROWS: Final = 256
MOST_ROWS: Final = 1 << 14


class Files(Protocol):
    """Where the files of one shard are: a folder, or this process."""

    def append(self, name: str, data: AnyArray) -> None:
        """Write the bytes of a C-contiguous array at the end of a file."""

    def read(self, name: str, dtype: Any, offset: int, count: int) -> AnyArray:
        """Return ``count`` numbers of a file, from byte ``offset`` on."""

    def close(self) -> None:
        """Let go of the files that are written."""


class FolderFiles:
    """Files in a folder.

    Args:
        folder: exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, BinaryIO] = {}

    def append(self, name: str, data: AnyArray) -> None:
        """Write the bytes of a C-contiguous array at the end of a file."""
        if name not in self._open:
            self._open[name] = (self.folder / name).open("ab")
        self._open[name].write(data.data.cast("B") if data.size else b"")

    def read(self, name: str, dtype: Any, offset: int, count: int) -> AnyArray:
        """Return ``count`` numbers of a file, from byte ``offset`` on.

        Raises:
            OSError: the file cannot be read, or is shorter.
        """
        found = np.fromfile(self.folder / name, dtype, count, offset=offset)
        if len(found) != count:
            raise OSError(f"{self.folder / name} is cut short")
        return found

    def close(self) -> None:
        """Let go of the files that are written."""
        for file in self._open.values():
            file.close()
        self._open.clear()


class MemoryFiles:
    """Files that are byte strings of this process."""

    def __init__(self) -> None:
        self._bytes: dict[str, bytearray] = {}

    def append(self, name: str, data: AnyArray) -> None:
        """Write the bytes of a C-contiguous array at the end of a file."""
        self._bytes.setdefault(name, bytearray()).extend(data.tobytes())

    def read(self, name: str, dtype: Any, offset: int, count: int) -> AnyArray:
        """Return ``count`` numbers of a file, from byte ``offset`` on."""
        if not count:
            return np.zeros(0, dtype)
        found: AnyArray = np.frombuffer(self._bytes[name], dtype, count, offset)
        found.flags.writeable = False
        return found

    def close(self) -> None:
        """Nothing to let go of."""


class BlockWriter:
    """Append rows of k columns to a file.

    Args:
        files: where the file is.
        name: the file.
        width: k.
        dtype: of the numbers.
    """

    def __init__(self, files: Files, name: str, width: int, dtype: Any) -> None:
        self.rows = 0
        self.block_rows = rows_of_block(width)
        self._write: Callable[[AnyArray], None] = lambda data: files.append(name, data)
        self._block = np.empty((width, self.block_rows if width else 0), dtype)

    def append(self, columns: Sequence[AnyArray], rows: int) -> None:
        """Append rows; each of the k columns has as many."""
        done = 0
        while done < rows:
            used = self.rows % self.block_rows
            step = min(self.block_rows - used, rows - done)
            for target, column in zip(self._block, columns, strict=True):
                target[used : used + step] = column[done : done + step]
            done += step
            self.rows += step
            if used + step == self.block_rows:
                self._write(self._block)

    def finish(self) -> None:
        """Write the last block."""
        left = self.rows % self.block_rows
        if left:
            self._write(np.ascontiguousarray(self._block[:, :left]))


def rows_of_block(width: int) -> int:
    """Return B for k columns: about 8 MB of numbers."""
    fitting = BLOCK_VALUES // max(width, 1)
    return min(max(fitting, LEAST_ROWS), MOST_ROWS)


class BlockReader:
    """Read what a :class:`BlockWriter` wrote.

    Args:
        files: where the file is.
        name: the file.
        shape: (k, rows).
        block_rows: B.
        dtype: of the numbers.
    """

    def __init__(
        self,
        files: Files,
        name: str,
        shape: tuple[int, int],
        block_rows: int,
        dtype: Any,
    ) -> None:
        self.width, self.rows = shape
        self.block_rows = block_rows
        self._files, self._name, self._dtype = files, name, np.dtype(dtype)
        self._last: tuple[int, AnyArray] = (-1, np.zeros((0, 0)))

    def column(self, number: int) -> AnyArray:
        """Return one whole column, (rows,)."""
        found = np.empty(self.rows, self._dtype)
        for start in range(0, self.rows, self.block_rows):
            stop = min(start + self.block_rows, self.rows)
            first = start * self.width + number * (stop - start)
            found[start:stop] = self._read(first, stop - start)
        return found

    def take(self, rows: Rows) -> AnyArray:
        """Return some rows, (k, as many).

        Each run of rows in one block reads that block: positions should be sorted, or
        be a few sorted runs.
        """
        if isinstance(rows, slice):
            rows = np.arange(rows.start, rows.stop)
        found = np.empty((self.width, len(rows)), self._dtype)
        blocks = rows // self.block_rows
        cuts = np.flatnonzero(np.diff(blocks)) + 1
        edges = [0, *cuts.tolist(), len(rows)]
        for start, stop in pairwise(edges):
            if stop > start:
                number = int(blocks[start])
                inside = rows[start:stop] - number * self.block_rows
                self._copy(number, inside, found[:, start:stop])
        return found

    def _copy(self, number: int, inside: IndexArray, target: AnyArray) -> None:
        block = self._block(number)
        first, last = int(inside[0]), int(inside[-1])
        if last - first + 1 == len(inside) and bool((np.diff(inside) == 1).all()):
            target[...] = block[:, first : last + 1]
        else:
            np.take(block, inside, axis=1, out=target)

    def _block(self, number: int) -> AnyArray:
        if self._last[0] != number:
            start = number * self.block_rows
            rows = min(self.block_rows, self.rows - start)
            data = self._read(start * self.width, rows * self.width)
            self._last = (number, data.reshape(self.width, rows))
        return self._last[1]

    def _read(self, first: int, count: int) -> AnyArray:
        size = self._dtype.itemsize
        return self._files.read(self._name, self._dtype, first * size, count)
