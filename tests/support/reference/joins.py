"""The joined table, materialised: DuckDB runs the whole query on whole tables."""

from collections.abc import Mapping, Sequence

import duckdb
import pandas as pd

Shards = Mapping[str, Sequence[pd.DataFrame]]


def joined_positions(
    shards: Shards, aliases: Mapping[str, str], source: str, order: Sequence[str] = ()
) -> list[tuple[int, ...]]:
    """Return, per joined row, the position of its row in every table of the query.

    It is -1 where a LEFT JOIN found no row.

    Args:
        shards: per table name its shards; the table is their union, in this order.
        aliases: table name by alias, in the order of the positions.
        source: the query from FROM on.
        order: aliases by whose positions the rows are sorted; all of them if empty.
    """
    sorting = ", ".join(f"{alias}.position_" for alias in order or aliases)
    columns = ", ".join(f"coalesce({alias}.position_, -1)" for alias in aliases)
    return _query(shards, f"SELECT {columns} {source} ORDER BY {sorting}")


def weighted_positions(
    shards: Shards, aliases: Mapping[str, str], source: str, weight: str
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Return the positions of every joined row, and what ``weight`` makes of it."""
    sorting = ", ".join(f"{alias}.position_" for alias in aliases)
    columns = ", ".join(f"coalesce({alias}.position_, -1)" for alias in aliases)
    rows = _query(shards, f"SELECT {columns}, {weight} {source} ORDER BY {sorting}")
    return [row[:-1] for row in rows], [float(row[-1]) for row in rows]


def _query(shards: Shards, sql: str) -> list:
    with duckdb.connect() as connection:
        for name, frames in shards.items():
            connection.register(f"{name}_frame", union(frames))
            connection.execute(f"CREATE TABLE {name} AS SELECT * FROM {name}_frame")
        return connection.execute(sql).fetchall()


def union(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the union of shards, with the position of every row in it."""
    whole = pd.concat(frames, ignore_index=True)
    return whole.assign(position_=range(len(whole)))


def expand(row_of: Sequence[int], values: Sequence[Sequence[float]]) -> list:
    """Return the values of a table's rows on the joined rows, row by row.

    Zero where a joined row has no row of the table (-1).
    """
    zero = [0.0] * len(values[0])
    return [list(values[row]) if row >= 0 else zero for row in row_of]


def segment_sum(
    row_of: Sequence[int], rows: int, values: Sequence[Sequence[float]]
) -> list:
    """Return the sums of joined rows' values over each row of a table, row by row."""
    sums = [[0.0] * len(values[0]) for _ in range(rows)]
    for row, value in zip(row_of, values, strict=True):
        if row < 0:
            continue
        for k, number in enumerate(value):
            sums[row][k] += number
    return sums
