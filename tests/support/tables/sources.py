"""Files as shards, and the tables files that name them."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from tp_flower.sources.shards import ShardSource, connect, load_tables


def file_source(path: object, table: str = "t", **settings: Any) -> ShardSource:
    """The shard that a file is; the settings are those of a shard."""
    return ShardSource(table, "here", 0, str(path), **settings)


def duckdb_file(path: Path, *statements: str) -> ShardSource:
    """Run statements on a DuckDB file, and return its table ``t``."""
    with duckdb.connect(str(path)) as connection:
        for statement in statements:
            connection.execute(statement)
    return file_source(path, relation=("t",))


def rows_of(source: ShardSource, sql: str = "FROM shard") -> list[tuple[Any, ...]]:
    """The answer to a query over the view of a shard."""
    with connect(source) as connection:
        return connection.execute(sql).fetchall()


def write_frame(frame: pd.DataFrame, path: Path, table: str = "t") -> None:
    """Write a data frame in the format that the name of the file ends with."""
    if path.suffix == ".sqlite":
        with closing(sqlite3.connect(path)) as database:
            frame.to_sql(table, database, index=False)
    elif path.suffix == ".duckdb":
        with duckdb.connect(str(path)) as database:
            database.register("frame", frame)
            database.execute(f"CREATE TABLE {table} AS FROM frame")
    elif path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False)


def tables_file(folder: Path, text: str) -> str:
    """Write a tables file; return its path, as settings have it."""
    file = folder / "tables.toml"
    file.write_text(text)
    return str(file)


def sources_of(folder: Path, text: str) -> tuple[ShardSource, ...]:
    """The shards of a tables file with this text."""
    return load_tables(tables_file(folder, text))
