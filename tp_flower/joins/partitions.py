"""What a worker of the server holds: partitions of joined rows, and their vectors.

A worker is a process beside the server's, perhaps on another machine. Of the joined
rows that :class:`~tp_flower.joins.spread_rows.SpreadRows` spreads over the workers it
has consecutive ones: their row numbers, and vectors that nobody else has. It computes
as the server does without workers, by :class:`~tp_flower.joins.rows.JoinedRows`, and
returns partial results and sums over the rows of tables.

Notation:
    N_p  joined rows of a partition     n_i  rows of table i that the partition knows
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.joins.rows import Combine, JoinedRows, Kernel, Vectors

Sums = dict[str, FloatArray]
"""By table, sums (n_i, c) over the joined rows of each row."""


@dataclass(frozen=True)
class PartialRun:
    """What a kernel has returned for the rows of a partition.

    Attributes:
        results: the partial result of each part, (k,), in the order of the parts.
        reads: the vectors that it has read.
        writes: the vectors that it has made, with their bytes.
    """

    results: list[FloatArray]
    reads: frozenset[str]
    writes: dict[str, int]


class Partitions:
    """The partitions of a worker, by the key of the rows that each is a part of."""

    def __init__(self) -> None:
        self._rows: dict[int, JoinedRows] = {}

    def ping(self) -> None:
        """Return, if the worker is there."""

    def place(
        self,
        key: int,
        tables: Mapping[str, tuple[AnyArray, int]],
        vectors: Vectors,
        is_single: bool,
    ) -> None:
        """Take a partition.

        ``tables`` have the row behind each joined row, (N_p,), and how many there are.
        """
        # what arrives lies in memory that is shared with other processes
        mapping = TableMapping(
            {name: TableRows(np.array(of), rows) for name, (of, rows) in tables.items()}
        )
        copies = {name: np.array(values) for name, values in vectors.items()}
        self._rows[key] = JoinedRows(mapping, copies, is_single=is_single)

    def drop(self, key: int) -> None:
        """Forget a partition."""
        self._rows.pop(key, None)

    def fill(self, key: int, name: str, values: FloatArray) -> int:
        """Store a vector by its values (N_p, ...), or those of every row, (c,).

        Return its bytes.
        """
        rows = self._rows[key]
        rows.fill(name, values)
        return rows.vectors[name].nbytes

    def run(
        self,
        key: int,
        how: tuple[Combine, bool, int],
        kernel: Kernel,
        *local: Mapping[str, AnyArray],
    ) -> PartialRun:
        """Call a kernel for all joined rows, and keep the vectors that it returns.

        Args:
            key: of the partition.
            how: partial results are combined within a part; whether the kernel gets the
                values of each table; and the joined rows of a part.
            kernel: see :mod:`tp_flower.joins.rows`.
            local: values (n_i, c) of some tables, and of others.
        """
        combine, by_table, part_rows = how
        rows = self._rows[key]
        watched = _Watched(kernel)
        values = {name: each for some in local for name, each in some.items()}
        results = rows.run_parts(
            watched, values, combine, by_table=by_table, part_rows=part_rows
        )
        writes = {name: rows.vectors[name].nbytes for name in watched.writes}
        return PartialRun(results, frozenset(watched.reads), writes)

    def sums(self, key: int, name: str, tables: Iterable[str]) -> Sums:
        """Return by table the sums (n_i, c) of a vector over each row's rows."""
        return self._rows[key].sums(name, tables)

    def add(self, left: Sums, right: Sums) -> Sums:
        """Return the sums over the joined rows of two partitions."""
        return {name: left[name] + right[name] for name in left}

    def entries(
        self, key: int, name: str, rows: npt.NDArray[np.integer] | None = None
    ) -> AnyArray:
        """Return a vector as it is stored, (N_p, ..), or its entries at some rows."""
        values = self._rows[key].vectors[name]
        return values if rows is None else values[rows]


class _Watched:
    """A kernel of which it is noted which vectors it reads and makes."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.reads: set[str] = set()
        self.writes: set[str] = set()

    def __call__(
        self, vectors: Vectors, expanded: AnyArray
    ) -> tuple[Vectors, Iterable[float]]:
        values, partial = self._kernel(_Noted(vectors, self.reads), expanded)
        self.writes.update(values)
        return values, partial


class _Noted(Mapping[str, AnyArray]):
    """Vectors whose names are noted when they are read."""

    def __init__(self, vectors: Vectors, reads: set[str]) -> None:
        self._vectors = vectors
        self._reads = reads

    def __getitem__(self, name: str) -> AnyArray:
        self._reads.add(name)
        return self._vectors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)
