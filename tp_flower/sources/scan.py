"""What a shard looks like, and a shard opened to run a fragment on it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import duckdb

from tp_flower.query.fragment import Fragment


@dataclass(frozen=True)
class ShardSchema:
    """What a shard looks like: no values, only names, types and counts.

    Attributes:
        columns: DuckDB type by column, in the source's order.
        rows: number of rows before any filter.
        all_null: the columns without a single value; their type says nothing.
        warnings: for the owner alone, about values that decide a column's type.
    """

    columns: dict[str, str]
    rows: int
    all_null: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scan:
    """A shard opened to run a fragment on it.

    Attributes:
        connection: a locked DuckDB connection.
        fragment: what is left to run over the relation ``shard``; checked.
        columns: DuckDB type of each column of ``shard``.
        needs_sort: whether the rows come in an order that another reading may not
            repeat, so that the reader must sort them by what they hold.
        pushed: the filters that the database applies, in words.
        read: reads the next rows at every step; None where all rows are there.
    """

    connection: duckdb.DuckDBPyConnection
    fragment: Fragment
    columns: Mapping[str, str]
    needs_sort: bool = False
    pushed: tuple[str, ...] = ()
    read: Callable[[], Iterator[None]] | None = None

    def chunks(self) -> Iterator[None]:
        """Put the next rows behind the relation ``shard`` at every step.

        To be used once: a database's rows are gone when they were read. Rows are
        there in one step where the fragment has a sub-query.

        Raises:
            SourceError: the rows cannot be read.
        """
        if self.read is None:
            yield None
        else:
            yield from self.read()


def column_types(connection: duckdb.DuckDBPyConnection, select: str) -> dict[str, str]:
    """Return the DuckDB type of each column of a SELECT."""
    rows = connection.execute(f"DESCRIBE {select}").fetchall()
    return {name: kind for name, kind, *_ in rows}
