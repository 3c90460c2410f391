"""The joined table, materialised: DuckDB runs the whole query on whole tables."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache

import duckdb
import pandas as pd

Shards = Mapping[str, Sequence[pd.DataFrame]]


@contextmanager
def engine_of(
    frames: Mapping[str, pd.DataFrame],
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield DuckDB with data frames as its tables, which no other connection has."""
    with closing(_shared_engine().cursor()) as engine:
        for name, frame in frames.items():
            engine.register(name, frame)
        yield engine


@cache
def _shared_engine() -> duckdb.DuckDBPyConnection:
    """Return the engine of this process: to start one takes longer than most joins."""
    return duckdb.connect()


def joined_positions(
    shards: Shards, aliases: Mapping[str, str], source: str
) -> list[tuple[int, ...]]:
    """Return, per joined row, the position of its row in every table of the query.

    It is -1 where a LEFT JOIN found no row. A table is the union of its shards, in
    their order; positions are in the order of the aliases, and sort the joined rows.
    """
    return weighted_positions(shards, aliases, source, "1")[0]


def weighted_positions(
    shards: Shards, aliases: Mapping[str, str], source: str, weight: str
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Return the positions of every joined row, and what ``weight`` makes of it."""
    sorting = ", ".join(f"{alias}.position_" for alias in aliases)
    columns = ", ".join(f"coalesce({alias}.position_, -1)" for alias in aliases)
    tables = {name: union(frames) for name, frames in shards.items()}
    with engine_of(tables) as engine:
        sql = f"SELECT {columns}, {weight} {source} ORDER BY {sorting}"
        rows = engine.execute(sql).fetchall()
    return [row[:-1] for row in rows], [float(row[-1]) for row in rows]


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
