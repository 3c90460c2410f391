"""The table mapping: which row of each table every joined row comes from.

The joined table is never built. The server knows hashed join keys and row positions
only; it joins those and keeps, per table, :class:`TableRows`. Tables are joined one
after the other, and before a step builds anything it counts what it would make: a join
that multiplies rows is stopped by its fan-out.

The joined rows are in the order of the label table's rows, then of those of the other
tables in the order of joining.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tp_flower.errors import MappingError
from tp_flower.extraction.extracted import KeyColumn
from tp_flower.joins.join_step import JoinStep, describe_step, join_table, match_table
from tp_flower.joins.key_codes import join_codes
from tp_flower.joins.table_rows import FloatArray, TableRows
from tp_flower.query import Join
from tp_flower.settings import MAX_JOINED_ROWS

__all__ = [
    "JoinStep",
    "TableMapping",
    "TableRows",
    "build_mapping",
    "split_rows",
]


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

    def select(self, joined: npt.NDArray[np.bool_ | np.integer]) -> "TableMapping":
        """Return the mapping of the joined rows where ``joined`` (N,) is true.

        Or of those that are listed, in this order.
        """
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
    outer: Collection[str] = (),
    max_joined_rows: int = MAX_JOINED_ROWS,
) -> tuple[TableMapping, tuple[JoinStep, ...]]:
    """Join the hashed keys and return the mapping.

    Joining starts at the label table and goes on with the first table in the order of
    the query that is joined to those before; a LEFT JOINed table waits for all tables
    before it. Any number of predicates may tie a table to the others. NULL keys, and
    keys of rows that a LEFT JOIN did not find, match nothing.

    Args:
        joins: equi-joins of the query; their key numbers index the tables' keys.
        keys: per (table, key number) the keys of the table's shards, in shard order.
        rows: rows of every table, n_i, in the order of the query.
        label_table: the table whose row order the joined rows follow; not in ``outer``.
        outer: the tables that are LEFT JOINed.
        max_joined_rows: no step may leave more.

    Returns:
        The mapping, and one record per table in the order of joining.

    Raises:
        MappingError: if the two sides of a join hash different types, if a step would
            make more than ``max_joined_rows`` rows (before it makes them), or if the
            join has no rows; the message then says how many every step leaves.
    """
    order = _join_order(joins, list(rows), label_table, outer)
    codes = {
        number: join_codes(
            join, keys[join.left, join.left_key], keys[join.right, join.right_key]
        )
        for number, join in enumerate(joins)
    }
    joined = {label_table: np.arange(rows[label_table], dtype=np.int32)}
    steps = [JoinStep(label_table, rows[label_table])]
    for table, numbers in order[1:]:
        match = match_table(table, [(joins[n], codes[n]) for n in numbers], joined)
        on = " AND ".join(joins[number].text for number in numbers)
        steps.append(describe_step(table, on, match, is_outer=table in outer))
        if steps[-1].rows > max_joined_rows:
            raise _too_many(steps, max_joined_rows)
        joined = join_table(steps[-1], match, joined)
    if not steps[-1].rows:
        listed = ", ".join(f"{step.table}: {step.rows}" for step in steps)
        raise MappingError(f"the join has no rows; rows left after each step: {listed}")
    tables = {table: TableRows(joined[table], count) for table, count in rows.items()}
    return TableMapping(tables), tuple(steps)


def split_rows(
    rows: int, test_fraction: float, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Return (rows,) bool: which rows of the label table are held out for testing."""
    held_out = np.zeros(rows, dtype=np.bool_)
    held_out[rng.permutation(rows)[: round(rows * test_fraction)]] = True
    return held_out


def _too_many(steps: Sequence[JoinStep], most: int) -> MappingError:
    *before, last = steps
    listed = "; ".join(map(str, before))
    return MappingError(
        f"the join multiplies rows: {last}; max-joined-rows allows {most}. "
        f"Before it: {listed}. "
        f"Aggregate {last.table} in a sub-query (GROUP BY its join key), add a "
        "predicate to its ON, or raise max-joined-rows"
    )


def _join_order(
    joins: Sequence[Join],
    tables: Sequence[str],
    first: str,
    outer: Collection[str],
) -> list[tuple[str, list[int]]]:
    """Return (table, its predicates), every table after one that it is joined to."""
    order: list[tuple[str, list[int]]] = [(first, [])]
    done, waiting = {first}, [table for table in tables if table != first]
    while waiting:
        for table in waiting:
            if table in outer and not done.issuperset(tables[: tables.index(table)]):
                continue
            predicates = [
                number
                for number, join in enumerate(joins)
                if table in (join.left, join.right)
                and {join.left, join.right} <= done | {table}
            ]
            if predicates:
                break
        else:
            raise MappingError(f"tables {waiting} are not joined to {sorted(done)}")
        order.append((table, predicates))
        done.add(table)
        waiting.remove(table)
    return order
