"""The table mapping: which row of each table every joined row comes from.

The joined table is never built. The server knows hashed join keys and row positions
only, joins those with DuckDB, and keeps ``row_of`` (paper: p_i) and ``multiplicity``
(paper: G_i). Both directions of the mapping are linear maps and each other's adjoint:
``<expand(x), y> == <x, segment_sum(y)>``.

Notation:
    p_i(j)   ``row_of[i][j]``  (N,) int32: row of table i behind joined row j
    G_ij     ``multiplicity(i)[j]``  (n_i,): joined rows that row j of table i is in
    seg_i    ``segment_sum(i, v)``  (n_i, d_c): v summed over the joined rows of a row
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import duckdb
import numpy as np
import numpy.typing as npt
import pandas as pd

from tp_flower.errors import MappingError
from tp_flower.extracted import KeyColumn
from tp_flower.losses import blocks
from tp_flower.query import Join

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]

MAX_RUNS = 64


@dataclass(frozen=True)
class TableRows:
    """How the rows of a table of the mapping lie in the joined rows.

    Attributes:
        row_of: (N,) int32, row of the table behind each joined row.
        rows: number of rows of the table, n_i.
    """

    row_of: IntArray
    rows: int

    @cached_property
    def multiplicity(self) -> npt.NDArray[np.int64]:
        """G_i, (n_i,): joined rows that each row of the table appears in."""
        return np.bincount(self.row_of, minlength=self.rows)

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
        breaks = np.flatnonzero(np.diff(self.row_of) != 1) + 1
        if len(breaks) >= MAX_RUNS or not self.is_injective:
            return ()
        starts = [0, *breaks.tolist()]
        stops = [*breaks.tolist(), len(self.row_of)]
        return tuple(
            (
                slice(start, stop),
                slice(first := int(self.row_of[start]), first + stop - start),
            )
            for start, stop in zip(starts, stops, strict=True)
            if stop > start
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
        for block in blocks(len(self.row_of)):
            total[block] += values.take(self.row_of[block], axis=0)

    def segment_sum(self, values: FloatArray) -> FloatArray:
        """Return sums (n_i, d_c) of values (N, d_c) over each row's joined rows."""
        if self.is_injective:
            out = np.zeros((self.rows, values.shape[1]))
            if not self.runs:
                out[self.row_of] = values
            for joined, own in self.runs:
                out[own] = values[joined]
            return out
        columns = [
            np.bincount(self.row_of, column, self.rows)
            for column in np.ascontiguousarray(values.T)
        ]
        return np.stack(columns, axis=1)


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

    def select(self, joined: npt.NDArray[np.bool_]) -> "TableMapping":
        """Return the mapping of the joined rows where ``joined`` (N,) is true."""
        return TableMapping(
            {
                table: TableRows(rows.row_of[joined], rows.rows)
                for table, rows in self.tables.items()
            }
        )

    def sum_scores(
        self, base: FloatArray, local_scores: Mapping[str, FloatArray]
    ) -> FloatArray:
        """Return h = b + sum_i expand_i(local_scores_i), (N, d_c)."""
        total = np.empty((self.joined_rows, len(base)))
        total[:] = base
        for table, values in local_scores.items():
            self.tables[table].add_expanded(values, total)
        return total


def build_mapping(
    joins: Sequence[Join],
    keys: Mapping[tuple[str, int], Sequence[KeyColumn]],
    rows: Mapping[str, int],
    label_table: str,
) -> tuple[TableMapping, tuple[tuple[str, int], ...]]:
    """Join the hashed keys and return the mapping, ordered by the label table's rows.

    Args:
        joins: equi-joins of the query; their key numbers index the tables' keys.
        keys: per (table, key number) the keys of the table's shards, in shard order.
        rows: rows of every table, n_i, in the order of the query.
        label_table: the table whose row order the joined rows follow.

    Returns:
        The mapping, and (table, rows left after joining it) in the order of joining.

    Raises:
        MappingError: if the two sides of a join hash different types, or if the join
            has no rows; the message then says how many rows every step leaves.
    """
    with duckdb.connect() as connection:
        _register_keys(connection, joins, keys, rows)
        steps = _join_steps(joins, list(rows))
        counts = _rows_per_step(connection, steps)
        if not counts[-1][1]:
            listed = ", ".join(f"{table}: {count}" for table, count in counts)
            raise MappingError(
                f"the join has no rows; rows left after each step: {listed}"
            )
        columns = ", ".join(f'"{table}".row AS "{table}"' for table in rows)
        order = [label_table, *(table for table in rows if table != label_table)]
        sorting = ", ".join(f'"{table}".row' for table in order)
        joined = connection.execute(
            f"SELECT {columns} FROM {_join_sql(steps)} ORDER BY {sorting}"
        ).fetchnumpy()
    mapping = TableMapping(
        {
            table: TableRows(joined[table].astype(np.int32, copy=False), count)
            for table, count in rows.items()
        }
    )
    return mapping, counts


def split_rows(
    rows: int, test_fraction: float, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Return (rows,) bool: which rows of the label table are held out for testing."""
    held_out = np.zeros(rows, dtype=np.bool_)
    held_out[rng.permutation(rows)[: round(rows * test_fraction)]] = True
    return held_out


def _register_keys(
    connection: duckdb.DuckDBPyConnection,
    joins: Sequence[Join],
    keys: Mapping[tuple[str, int], Sequence[KeyColumn]],
    rows: Mapping[str, int],
) -> None:
    """Create a table (row, k0, k1, ...) per query table, without rows of NULL keys."""
    columns = {
        table: {"row": np.arange(count, dtype=np.int32)}
        for table, count in rows.items()
    }
    for number, join in enumerate(joins):
        left = keys[join.left, join.left_key]
        right = keys[join.right, join.right_key]
        _check_kinds(join, left, right)
        codes = _common_codes(connection, [*left, *right])
        columns[join.left][f"k{number}"] = np.concatenate(codes[: len(left)])
        columns[join.right][f"k{number}"] = np.concatenate(codes[len(left) :])
    for table, arrays in columns.items():
        connection.register("incoming", pd.DataFrame(arrays, copy=False))
        known = " AND ".join(f"{name} >= 0" for name in arrays)
        connection.execute(
            f'CREATE TABLE "{table}" AS SELECT * FROM incoming WHERE {known}'
        )
        connection.unregister("incoming")


def _check_kinds(
    join: Join, left: Sequence[KeyColumn], right: Sequence[KeyColumn]
) -> None:
    kinds = {
        side: sorted({key.kind for key in keys if len(key.hashes)})
        for side, keys in ((join.left, left), (join.right, right))
    }
    # a shard without a single value has no type to differ in
    if len({kind for kinds_of in kinds.values() for kind in kinds_of}) > 1:
        raise MappingError(
            f"the keys of the join {join.text} differ in type: "
            + ", ".join(f"{side}: {' or '.join(kind)}" for side, kind in kinds.items())
            + "; cast one side in the query"
        )


def _common_codes(
    connection: duckdb.DuckDBPyConnection, keys: Sequence[KeyColumn]
) -> list[IntArray]:
    """Return per shard the codes (n,) that equal hashes share across all the shards."""
    hashes = np.concatenate([key.hashes for key in keys])
    frame = pd.DataFrame(
        {"hi": hashes[:, 0], "lo": hashes[:, 1], "place": np.arange(len(hashes))}
    )
    connection.register("hashes", frame)
    first = connection.execute(
        "SELECT CAST(min(place) OVER (PARTITION BY hi, lo) AS INTEGER) AS code "
        "FROM hashes ORDER BY place"
    ).fetchnumpy()["code"]
    connection.unregister("hashes")
    # the extra last entry stays -1: the code of NULL
    lookup = np.append(np.asarray(first, dtype=np.int32), np.int32(-1))
    codes = []
    offset = 0
    for key in keys:
        codes.append(
            lookup.take(np.where(key.codes < 0, len(hashes), key.codes + offset))
        )
        offset += len(key.hashes)
    return codes


def _join_steps(
    joins: Sequence[Join], tables: Sequence[str]
) -> list[tuple[str, list[str]]]:
    """Return (table, its conditions), every table after one that it is joined to."""
    steps: list[tuple[str, list[str]]] = [(tables[0], [])]
    done, waiting = {tables[0]}, list(tables[1:])
    while waiting:
        for table in waiting:
            conditions = [
                f'"{join.left}".k{number} = "{join.right}".k{number}'
                for number, join in enumerate(joins)
                if table in (join.left, join.right)
                and {join.left, join.right} <= done | {table}
            ]
            if conditions:
                break
        else:
            raise MappingError(f"tables {waiting} are not joined to {sorted(done)}")
        steps.append((table, conditions))
        done.add(table)
        waiting.remove(table)
    return steps


def _join_sql(steps: Sequence[tuple[str, list[str]]]) -> str:
    (first, _), *others = steps
    return f'"{first}"' + "".join(
        f' JOIN "{table}" ON {" AND ".join(conditions)}' for table, conditions in others
    )


def _rows_per_step(
    connection: duckdb.DuckDBPyConnection, steps: Sequence[tuple[str, list[str]]]
) -> tuple[tuple[str, int], ...]:
    counts = []
    for length in range(1, len(steps) + 1):
        ((count,),) = connection.execute(
            f"SELECT count(*) FROM {_join_sql(steps[:length])}"
        ).fetchall()
        counts.append((steps[length - 1][0], int(count)))
    return tuple(counts)
