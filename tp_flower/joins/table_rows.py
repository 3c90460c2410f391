"""How the rows of one table lie in the joined rows: a linear map and its adjoint.

``<expand(x), y> == <x, segment_sum(y)>``. A joined row of a LEFT JOIN may have no row
of the table: its ``row_of`` is -1, it expands to zero, and no row's sum has it.

Notation:
    p_i(j)   ``row_of[j]``  (N,) int32: row of the table behind joined row j, or -1
    G_ij     ``multiplicity[j]``  (n_i,): joined rows that row j of the table is in
    seg_i    ``segment_sum(v)``  (n_i, d_c): v summed over the joined rows of a row
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray, blocks

IntArray = npt.NDArray[np.int32]

NO_ROW = -1
MAX_RUNS = 64


@dataclass(frozen=True)
class TableRows:
    """How the rows of a table of the mapping lie in the joined rows.

    Attributes:
        row_of: (N,) int32, row of the table behind each joined row; -1 where none is.
        rows: number of rows of the table, n_i.
    """

    row_of: IntArray
    rows: int

    @cached_property
    def has_missing(self) -> bool:
        """Whether some joined row has no row of the table."""
        return bool(self.row_of.min(initial=0) < 0)

    @cached_property
    def multiplicity(self) -> npt.NDArray[np.int64]:
        """G_i, (n_i,): joined rows that each row of the table appears in."""
        return np.bincount(self._slots, minlength=self.rows + 1)[: self.rows]

    @cached_property
    def inverse_multiplicity(self) -> FloatArray:
        """1 / G_i, (n_i,); 1 where G_i = 0."""
        return 1.0 / np.maximum(self.multiplicity, 1)

    @cached_property
    def is_injective(self) -> bool:
        """Whether every row of the table appears in at most one joined row."""
        return bool((self.multiplicity <= 1).all())

    @cached_property
    def runs(self) -> tuple[tuple[slice, slice], ...]:
        """(joined rows, rows of the table) that ascend together one by one.

        Joined rows follow the label table's rows, so that an unrepeated label table is
        a few runs, which slices move faster than indices. Empty if there are many.
        """
        if not self.is_injective:
            return ()
        # constant within a run, and one more constant where there is no row
        lag = self.row_of - np.arange(len(self.row_of))
        if self.has_missing:
            lag[self.row_of < 0] = self.rows
        breaks = np.flatnonzero(np.diff(lag)) + 1
        if len(breaks) >= MAX_RUNS:
            return ()
        starts = [0, *breaks.tolist()]
        stops = [*breaks.tolist(), len(self.row_of)]
        return tuple(
            (
                slice(start, stop),
                slice(first := int(self.row_of[start]), first + stop - start),
            )
            for start, stop in zip(starts, stops, strict=True)
            if stop > start and self.row_of[start] >= 0
        )

    def expand(self, values: FloatArray) -> FloatArray:
        """Return values (n_i, ...) of the table's rows on the joined rows, (N, ...)."""
        total = np.zeros((len(self.row_of), *values.shape[1:]))
        self.add_expanded(values, total)
        return total

    def add_expanded(self, values: FloatArray, total: FloatArray) -> None:
        """Add ``expand(values)`` to ``total`` (N, ...)."""
        if self.runs:
            for joined, own in self.runs:
                total[joined] += values[own]
            return
        if self.has_missing:
            values = with_zero_row(values)
        for block in blocks(len(self.row_of)):
            total[block] += values.take(self.row_of[block], axis=0)

    def segment_sum(self, values: FloatArray) -> FloatArray:
        """Return sums (n_i, d_c) of values (N, d_c) over each row's joined rows."""
        if self.is_injective:
            # a last row takes what belongs to no row
            out = np.zeros((self.rows + 1, values.shape[1]))
            if not self.runs:
                out[self.row_of] = values
            for joined, own in self.runs:
                out[own] = values[joined]
            return out[: self.rows]
        return segment_sum(self._slots, self.rows, values)

    @cached_property
    def _slots(self) -> IntArray:
        """``row_of`` with n_i in place of -1, (N,)."""
        if not self.has_missing:
            return self.row_of
        return np.where(self.row_of < 0, self.rows, self.row_of).astype(np.int32)


def with_zero_row(values: FloatArray) -> FloatArray:
    """Return values (n, ...) and a row of zeros, which is what index -1 takes.

    >>> with_zero_row(np.array([3.0, 4.0]))[[1, -1]].tolist()
    [4.0, 0.0]
    """
    return np.concatenate([values, np.zeros((1, *values.shape[1:]))])


def segment_sum(
    slots: npt.NDArray[np.integer], rows: int, values: FloatArray
) -> FloatArray:
    """Return the sums (rows, d_c) of values (N, d_c) that share a slot (N,).

    Slot ``rows`` belongs to no row.
    """
    columns = [
        np.bincount(slots, column, rows + 1)[:rows]
        for column in np.ascontiguousarray(values.T)
    ]
    return np.stack(columns, axis=1)
