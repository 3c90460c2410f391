"""Vectors over joined rows, and computations on them part by part.

Nobody outside this room indexes by joined row. A method writes a *kernel*: a function
of the vectors of some joined rows, and of the tables' local values expanded to them. It
returns the vectors that it makes of them, and a partial result; :meth:`JoinedRows.run`
calls it for all joined rows, stores the vectors, and combines the partial results:

    kernel(vectors {name: (B, ..)}, expanded (B, c)) -> {name: (B, ..)}, partial (k,)
    expanded = sum_i local_i[p_i(j)]

Rows are computed in parts whose edges depend on their number alone, and partial results
are combined in the order of the parts, so that any number of threads gives the same
bits. Where the derivatives of a row depend on others, a kernel is called once, with all
rows: they are one part. How vectors are stored, and where a part is computed, is known
here alone: of many rows, floating-point numbers in half of the bytes. A kernel reads
and returns float64, and partial results and sums are float64, whatever is stored.

Notation:
    N    ``rows``            n_i  ``sizes[table]``
    B    ``BLOCK_ROWS``, the joined rows of a call of a kernel, or fewer; or N
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import (
    BLOCK_ROWS,
    AnyArray,
    FloatArray,
    blocks,
    blocks_of,
    chosen_rows,
    empty,
    run_in_threads,
)
from tp_flower.joins.mapping import TableMapping

PART_ROWS: Final = 4 * BLOCK_ROWS
"""Joined rows of a part, which one thread computes: a millisecond of work or more."""
SINGLE_ROWS = 1 << 20
"""Joined rows from which on vectors may be stored in single precision. Its rounding of
a score, 2^-25 of it, is an eighth of that of the messages that scores arrive in."""
LEAST_TOLERANCE: Final = 1.3e-6
"""Of a gradient's norm: single precision hides smaller ones."""

Vectors = Mapping[str, AnyArray]
Kernel = Callable[[Vectors, AnyArray], tuple[Vectors, Iterable[float]]]
Combine = Literal["add", "min", "max", "or"]
COMBINE: Final[dict[Combine, Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "or": np.logical_or,
}
NO_LOCAL: Final[Mapping[str, AnyArray]] = {}


@dataclass(frozen=True, eq=False)
class JoinedRows:
    """N joined rows, with named vectors over them.

    Attributes:
        mapping: which rows of the tables are behind each of them.
        vectors: by name, (N, ..): nobody else reads or writes them.
        is_one_part: whether kernels are called with all rows at once.
        is_single: whether new vectors are stored in single precision.
    """

    mapping: TableMapping
    vectors: dict[str, AnyArray] = field(default_factory=dict)
    is_one_part: bool = False
    is_single: bool = False

    def __reduce__(self) -> tuple[type["JoinedRows"], tuple[TableMapping]]:
        """Return what stands for them beside a kernel that is computed elsewhere.

        It has no joined rows: a kernel gets its own.
        """
        return JoinedRows, (self.mapping.select(np.zeros(0, np.intp)),)

    @property
    def rows(self) -> int:
        """The number of joined rows, N."""
        return self.mapping.joined_rows

    @property
    def sizes(self) -> dict[str, int]:
        """The number of rows of each table, n_i, in the mapping's order."""
        return {name: table.rows for name, table in self.mapping.tables.items()}

    def fill(self, name: str, values: FloatArray) -> None:
        """Store a vector by its values (N, ...), or the values (c,) of every row."""
        row_shape = values.shape if values.ndim == 1 else values.shape[1:]
        vector = self.empty_vector(row_shape, self.stored_type(values.dtype))
        vector[...] = values
        self.vectors[name] = vector

    def empty_vector(
        self, row_shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> AnyArray:
        """Return an array (N, ...) without values, where vectors are stored."""
        shape = self.rows, *row_shape
        return empty(shape, dtype, is_mapped=self.mapping.is_mapped)

    def stored_type(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the type in which values of a type are stored."""
        return np.dtype(np.float32) if self.is_single and dtype == np.float64 else dtype

    def whole(self, name: str) -> AnyArray:
        """Return a vector (N, ..), to read: of what does not add up over parts.

        An area under a curve or a quantile needs all rows at once.
        """
        view = as_read(self.vectors[name]).view()
        view.flags.writeable = False
        return view

    def take(self, name: str, rows: npt.NDArray[np.integer]) -> AnyArray:
        """Return the entries of a vector at some joined rows (k,), (k, ..)."""
        return as_read(self.vectors[name][rows])

    def select(self, mask: npt.NDArray[np.bool_]) -> "JoinedRows":
        """Return the joined rows that a mask (N,) marks, with their vectors."""
        vectors = {
            name: chosen_rows(values, mask) for name, values in self.vectors.items()
        }
        return replace(self, mapping=self.mapping.select(mask), vectors=vectors)

    def over(self, mapping: TableMapping) -> "JoinedRows":
        """Return the same joined rows over other rows of tables, with their vectors."""
        return replace(self, mapping=mapping, vectors=dict(self.vectors))

    def run(
        self,
        kernel: Kernel,
        local: Mapping[str, AnyArray] = NO_LOCAL,
        sums_of: str = "",
        combine: Combine = "add",
        *,
        by_table: bool = False,
    ) -> tuple[FloatArray, dict[str, FloatArray]]:
        """Call a kernel for all joined rows, and store the vectors that it returns.

        ``local`` are values (n_i, c) of some tables, whose sum at each joined row the
        kernel receives; without any, (B, 0). With ``by_table`` the kernel receives the
        values of each table, (B, M, c), in the mapping's order. A vector that a kernel
        returns replaces the one of its name. The kernel must not change its arguments,
        and is called for no rows if there are none.

        Returns:
            The combined partial results, (k,), and by table the sums (n_i, c) of the
            vector ``sums_of`` over the joined rows of each row; {} without a name.
        """
        partial = self.run_parts(kernel, local, combine, by_table=by_table)
        total = _combine(COMBINE[combine], partial)
        return total, self.sums(sums_of) if sums_of else {}

    def run_parts(
        self,
        kernel: Kernel,
        local: Mapping[str, AnyArray] = NO_LOCAL,
        combine: Combine = "add",
        *,
        by_table: bool = False,
        part_rows: int = 0,
    ) -> list[FloatArray]:
        """Call a kernel as :meth:`run` does; return each part's partial result, (k,).

        Parts have ``part_rows`` joined rows; 0 is ``PART_ROWS``.
        """
        expand = _Expansion(self.mapping, local, by_table=by_table)
        outputs = _Outputs(self)
        join = COMBINE[combine]
        part_rows, block_rows = part_rows or PART_ROWS, BLOCK_ROWS
        if self.is_one_part:
            part_rows = block_rows = max(self.rows, 1)
        parts = list(blocks(self.rows, part_rows)) or [slice(0, 0)]

        def compute(part: slice) -> FloatArray:
            partial: list[FloatArray] = []
            for block in blocks_of(part, block_rows) if self.rows else [part]:
                values, result = kernel(_Block(self.vectors, block), expand(block))
                outputs.write(block, values)
                partial.append(np.asarray(result, np.float64))
            return _combine(join, partial)

        def compute_all(span: slice) -> list[FloatArray]:
            return [compute(part) for part in parts[span]]

        results = run_in_threads(compute_all, len(parts), 1)
        self.vectors.update(outputs.vectors)
        return [partial for group in results for partial in group]

    def sums(
        self, name: str, tables: Iterable[str] | None = None
    ) -> dict[str, FloatArray]:
        """Return by table the sums (n_i, c) of a vector (N, c) over each row's rows."""
        values = self.vectors[name]
        mapping = self.mapping.tables
        chosen = mapping if tables is None else tables
        return {table: mapping[table].segment_sum(values) for table in chosen}


def as_read(values: AnyArray) -> AnyArray:
    """Return values as a kernel reads them: float64 where they are single."""
    return values.astype(np.float64) if values.dtype == np.float32 else values


class _Block(Mapping[str, AnyArray]):
    """The vectors of a block, of which only those that a kernel reads are converted."""

    def __init__(self, vectors: Mapping[str, AnyArray], block: slice) -> None:
        self._vectors = vectors
        self._block = block

    def __getitem__(self, name: str) -> AnyArray:
        return as_read(self._vectors[name][self._block])

    def __iter__(self) -> Iterator[str]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)


def _combine(join: Any, partial: Sequence[FloatArray]) -> FloatArray:
    """Return partial results combined one after the other."""
    total, *later = partial
    for result in later:
        total = join(total, result)
    return np.asarray(total, np.float64)


class _Expansion:
    """The sum of the tables' local values at the joined rows of a block, or each."""

    def __init__(
        self, mapping: TableMapping, local: Mapping[str, AnyArray], *, by_table: bool
    ) -> None:
        self._by_table = by_table
        self._tables = [
            (table.row_of, table.pad(local[name]))
            for name, table in mapping.tables.items()
            if name in local
        ]

    def __call__(self, block: slice) -> AnyArray:
        """Return the sums (B, c), or the values (B, M, c)."""
        if not self._tables:
            return np.empty((block.stop - block.start, 0))
        if self._by_table:
            expanded = (
                values.take(row_of[block], axis=0, mode="wrap")
                for row_of, values in self._tables
            )
            return np.stack(list(expanded), axis=1)
        (row_of, values), *others = self._tables
        total = values.take(row_of[block], axis=0, mode="wrap")
        for row_of, values in others:
            total += values.take(row_of[block], axis=0, mode="wrap")
        return total


class _Outputs:
    """The vectors that a kernel returns, written block by block."""

    def __init__(self, rows: JoinedRows) -> None:
        self.vectors: dict[str, AnyArray] = {}
        self._rows = rows
        self._lock = Lock()

    def write(self, block: slice, values: Vectors) -> None:
        """Write the values of a block; one of a new shape takes new memory."""
        for name, entries in values.items():
            self._vector(name, entries)[block] = entries

    def _vector(self, name: str, like: AnyArray) -> AnyArray:
        """Return the array (N, ...) that a kernel's results of this name go to."""
        with self._lock:
            if name not in self.vectors:
                row_shape = like.shape[1:]
                dtype = self._rows.stored_type(like.dtype)
                before = self._rows.vectors.get(name)
                is_reused = (
                    before is not None
                    and (before.shape[1:], before.dtype) == (row_shape, dtype)
                    and before.flags.writeable
                )
                # a block is read before it is written, and no other block is read
                new = before if is_reused else self._rows.empty_vector(row_shape, dtype)
                self.vectors[name] = new  # type: ignore[assignment]
            return self.vectors[name]
