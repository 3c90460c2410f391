"""The table mapping: which row of each table every joined row comes from.

The joined table is never built. A linear map and its adjoint relate a table to the
joined rows: ``<expand(x), y> == <x, segment_sum(y)>``. A joined row of a LEFT JOIN may
lack a row of the table: its ``row_of`` is -1, it expands to zero, and it is in no sum.

Notation:
    p_i(j)   ``row_of[j]``  (N,), of the smallest signed type that counts the table's
             rows: row of the table behind joined row j, or -1
    G_ij     ``multiplicity[j]``  (n_i,): joined rows that row j of the table is in
    seg_i    ``segment_sum(v)``  (n_i, d_c): v summed over the joined rows of a row
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray, blocks, chosen_rows, empty_like, is_mapped
from tp_flower.errors import MappingError

RowNumbers = npt.NDArray[np.signedinteger[Any]]
"""The rows of a table, or -1: a byte each where it has few."""

Number = TypeVar("Number", np.float64, np.uint32)
"""Scores, or masked words of them, whose sums are modulo 2^32."""

Entry = TypeVar("Entry", bound=np.generic)

NO_ROW = -1


def number_type(rows: int) -> np.dtype[np.signedinteger[Any]]:
    """Return the smallest type of the numbers of a table's rows, -1, and their count.

    >>> [number_type(rows).itemsize for rows in (127, 128, 10**5, 10**10)]
    [1, 2, 4, 8]
    """
    kinds = (np.int8, np.int16, np.int32)
    smallest = next((k for k in kinds if rows <= np.iinfo(k).max), np.int64)
    return np.dtype(smallest)


def index_type(rows: int) -> type[np.int32 | np.int64]:
    """Return the type of positions in so many rows, and of counts of them."""
    return np.int32 if rows <= np.iinfo(np.int32).max else np.int64


def take_rows(values: npt.NDArray[Entry], rows: RowNumbers) -> npt.NDArray[Entry]:
    """Return values (n, ...) at rows (N,), of which -1 is the last, (N, ...)."""
    taken = empty_like(rows, (len(rows), *values.shape[1:]), values.dtype)
    # in blocks, for which numpy makes no long numbers of all rows
    for block in blocks(len(rows)):
        values.take(rows[block], axis=0, mode="wrap", out=taken[block])
    return taken


@dataclass(frozen=True)
class TableRows:
    """The positions ``row_of`` (N,) of a table's n_i ``rows`` in the joined rows."""

    row_of: RowNumbers
    rows: int

    def __post_init__(self) -> None:
        """Keep the positions in the smallest type."""
        compact = self.row_of.astype(number_type(self.rows), copy=False)
        object.__setattr__(self, "row_of", compact)

    @cached_property
    def has_missing(self) -> bool:
        """Whether some joined row has no row of the table."""
        return bool(self.row_of.min(initial=0) < 0)

    @cached_property
    def multiplicity(self) -> RowNumbers:
        """G_i, (n_i,): joined rows that each row of the table appears in."""
        counts = np.zeros(self.rows + 1, index_type(len(self.row_of)))
        # of the counts' own type numpy adds without a conversion, 25 times as fast
        one = counts.dtype.type(1)
        for block in blocks(len(self.row_of)):
            # -1 is the additional last one
            np.add.at(counts, self.row_of[block], one)
        return counts[: self.rows]

    @cached_property
    def is_joined(self) -> npt.NDArray[np.bool_]:
        """Whether each row of the table is in some joined row, (n_i,)."""
        return self.any_of(np.ones(len(self.row_of), np.bool_))

    @property
    def inverse_multiplicity(self) -> FloatArray:
        """1 / G_i, (n_i,); 1 where G_i = 0."""
        return 1.0 / np.maximum(self.multiplicity, 1)

    @cached_property
    def is_injective(self) -> bool:
        """Whether every row of the table appears in at most one joined row."""
        return bool((self.multiplicity <= 1).all())

    @property
    def is_absent(self) -> npt.NDArray[np.bool_]:
        """The joined rows that have no row of the table, (N,)."""
        return self.row_of < 0

    @property
    def is_last(self) -> npt.NDArray[np.bool_]:
        """The joined rows that have the table's last row, (N,)."""
        is_last: npt.NDArray[np.bool_] = self.row_of == self.rows - 1
        return is_last

    def expand(
        self, values: npt.NDArray[Entry], absent: float = 0
    ) -> npt.NDArray[Entry]:
        """Return values (n_i, ...) of the table's rows on the joined rows, (N, ...).

        A joined row without a row of the table has the value ``absent``.
        """
        return take_rows(self.pad(values, absent), self.row_of)

    def any_of(self, marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which rows (n_i,) have some marked joined row, of a mask (N,)."""
        is_behind = np.zeros(self.rows + 1, np.bool_)
        is_behind[self.row_of[marked]] = True
        return is_behind[: self.rows]

    def extremes(
        self, values: FloatArray | npt.NDArray[np.integer]
    ) -> tuple[FloatArray, FloatArray]:
        """Return the least and the largest of values (N,) over each row's joined rows.

        A row without joined rows has inf as its least value, and -inf as its largest.
        """
        low = np.full(self.rows + 1, np.inf)
        high = np.full(self.rows + 1, -np.inf)
        for block in blocks(len(self.row_of)):
            # as above, of one type
            numbers = values[block].astype(np.float64, copy=False)
            np.minimum.at(low, self.row_of[block], numbers)
            np.maximum.at(high, self.row_of[block], numbers)
        return low[: self.rows], high[: self.rows]

    def by_row(self, is_chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return the joined rows of chosen rows (n_i,), one row's after the other's."""
        joined = np.flatnonzero(self.expand(is_chosen))
        order = np.argsort(self.row_of[joined], kind="stable")
        return joined[order]

    def permuted(
        self, rng: np.random.Generator, *, keeps_absent: bool = False
    ) -> "TableRows":
        """Return the rows with their places in the joined rows exchanged at random.

        A joined row without a row takes part in it, or keeps none (``keeps_absent``).
        """
        if not keeps_absent:
            return TableRows(rng.permutation(self.row_of), self.rows)
        row_of = self.row_of.copy()
        row_of[~self.is_absent] = rng.permutation(row_of[~self.is_absent])
        return TableRows(row_of, self.rows)

    def renumber(self, numbers: RowNumbers, rows: int) -> "TableRows":
        """Return the rows under new ``numbers`` (n_i,), of so many ``rows``."""
        compact = numbers.astype(number_type(rows), copy=False)
        return TableRows(self.expand(compact, absent=NO_ROW), rows)

    def behind(self, keys: "TableRows") -> "TableRows":
        """Return the key of each joined row, from the ``keys`` (n_i,) of the rows."""
        return self.renumber(keys.row_of, keys.rows)

    def add_expanded(
        self, values: npt.NDArray[Number], total: npt.NDArray[Number]
    ) -> None:
        """Add ``expand(values)`` to ``total`` (N, ...)."""
        values = self.pad(values)
        for block in blocks(len(self.row_of)):
            total[block] += values.take(self.row_of[block], axis=0)

    def pad(self, values: npt.NDArray[Entry], absent: float = 0) -> npt.NDArray[Entry]:
        """Return values (n_i, ...), with a last one if a joined row has no row.

        ``row_of`` is -1 there, which is the last one, ``absent``.
        """
        if not self.has_missing:
            return values
        last = np.full((1, *values.shape[1:]), absent, values.dtype)
        return np.concatenate([values, last])

    def segment_sum(self, values: FloatArray) -> FloatArray:
        """Return sums (n_i, d_c) of values (N, d_c) over each row's joined rows."""
        # the additional last row, -1, collects what belongs to no row
        out = np.zeros((self.rows + 1, values.shape[1]))
        if self.is_injective:
            for block in blocks(len(self.row_of)):
                out[self.row_of[block]] = values[block]
            return out[: self.rows]
        sums = out.T.copy()
        # in blocks, for which numpy copies neither numbers nor values of all rows
        for block in blocks(len(self.row_of)):
            rows = self.row_of[block].astype(np.intp)
            for total, column in zip(sums, values[block].T, strict=True):
                np.add.at(total, rows, np.ascontiguousarray(column, np.float64))
        return np.ascontiguousarray(sums.T[: self.rows])


@dataclass(frozen=True)
class TableMapping:
    """The mapping of every table of the query; all share the same N joined rows."""

    tables: Mapping[str, TableRows]

    def __post_init__(self) -> None:
        """Check that all tables have the same number of joined rows."""
        lengths = {table: len(rows.row_of) for table, rows in self.tables.items()}
        if len(set(lengths.values())) != 1:
            raise MappingError(f"tables differ in their joined rows: {lengths}")

    @property
    def joined_rows(self) -> int:
        """N, the number of rows of the joined table."""
        return len(next(iter(self.tables.values())).row_of)

    @property
    def is_mapped(self) -> bool:
        """Whether what is kept of the joined rows is mapped from files."""
        return any(is_mapped(rows.row_of) for rows in self.tables.values())

    def select(self, joined: npt.NDArray[np.bool_ | np.integer]) -> "TableMapping":
        """Return the mapping of some joined rows, by a mask (N,) or positions."""
        return TableMapping(
            {
                table: TableRows(chosen_rows(rows.row_of, joined), rows.rows)
                for table, rows in self.tables.items()
            }
        )

    def expand(
        self, local: Mapping[str, npt.NDArray[Number]], *, by_table: bool = False
    ) -> npt.NDArray[Number]:
        """Return the sums (N, c) of all tables' values (n_i, c) on the joined rows.

        With ``by_table``, return the values of each table instead, (N, M, c).
        """
        first = next(iter(local.values()))
        columns: tuple[int, ...] = first.shape[1:]
        if by_table:
            columns = len(local), *columns
        total = np.zeros((self.joined_rows, *columns), first.dtype)
        for position, (name, table) in enumerate(self.tables.items()):
            table_total = total[:, position] if by_table else total
            table.add_expanded(local[name], table_total)
        return total

    def beside(
        self, local: Mapping[str, npt.NDArray[Entry]], absent: float
    ) -> npt.NDArray[Entry]:
        """Return the columns (n_i, c_i) of tables beside each other, (N, c).

        They are ``absent`` where a joined row has no row of the table.
        """
        expanded = [
            self.tables[n].expand(numbers, absent) for n, numbers in local.items()
        ]
        return np.concatenate(expanded, axis=1)

    def stand_in(
        self, values: Mapping[str, FloatArray], *, by_table: bool = False
    ) -> FloatArray:
        """Return values (c,) of tables, where a joined row lacks a row of them.

        They have the shape of :meth:`expand`, to which they are added.
        """
        tables = (len(self.tables),) if by_table else ()
        columns = len(next(iter(values.values())))
        total = np.zeros((self.joined_rows, *tables, columns))
        for position, (name, table) in enumerate(self.tables.items()):
            if name in values:
                table_total = total[:, position] if by_table else total
                table_total[table.is_absent] += values[name]
        return total


@dataclass(frozen=True)
class RowWeights:
    """The weights of the joined training rows.

    ``rows`` are w, (N,), > 0, mean 1; ``multiplicity`` is G^w_i by table, (n_i,),
    rounded to float32 as it is sent to the sites; 0 for rows in no training row.
    """

    rows: FloatArray
    multiplicity: Mapping[str, FloatArray]

    @classmethod
    def of(cls, weights: FloatArray, mapping: TableMapping) -> "RowWeights":
        """Return weights (N,) of the mapping's joined rows, scaled to mean 1."""
        scaled = weights / weights.mean()
        multiplicity = {
            name: rows.segment_sum(scaled[:, None])[:, 0]
            .astype(np.float32)
            .astype(np.float64)
            for name, rows in mapping.tables.items()
        }
        return cls(scaled, multiplicity)

    @cached_property
    def inverse_multiplicity(self) -> dict[str, FloatArray]:
        """1 / G^w_i by table, (n_i,); 1 where G^w_i = 0."""
        return {
            name: 1.0 / np.where(weights > 0.0, weights, 1.0)
            for name, weights in self.multiplicity.items()
        }


def score_steps(sums: FloatArray, inverse: FloatArray, kappa: float) -> FloatArray:
    """Return target_i - h_i = -seg_i(w v) / (kappa G_i), (n_i, d_c); 0 where G_i = 0.

    ``inverse`` is 1 / G_i, (n_i,), or of weighted rows 1 / G^w_i.
    """
    steps = sums * inverse[:, None]
    steps *= -1.0 / kappa
    return steps
