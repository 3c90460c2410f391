"""The SQL pairs of the folder ``sql``, and the small tables that they are about.

A pair is a query with its plan or its error. The tables' types are those that DuckDB,
PostgreSQL, MariaDB and SQLite all read. What differs: in CSV an empty text is NULL
(customers, nicknames) and '01' a number unless typed; SQLite stores dates, timestamps,
decimals and booleans as texts or numbers; MariaDB's BOOLEAN is 0 or 1, and its default
collation takes 'bo' and 'Bo' for equal.
"""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pytest

from tp_flower.sources.shards import ShardSource

FOLDER = Path(__file__).parent / "sql"
SCRIPT = (FOLDER / "tables.sql").read_text(encoding="utf-8")
FILES = [
    tomllib.loads(path.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.glob("*.toml"))
]
PAIRS: list[dict[str, Any]] = [
    {**pair, "sql": " ".join(pair["sql"].split())}
    for file in FILES
    for pair in file.get("pair", [])
] + [
    {"name": sql, "sql": sql, "error": error}
    for file in FILES
    for sql, error in file.get("refused", [])
]
ACCEPTED = [pair for pair in PAIRS if "plan" in pair]
PORTABLE = {"VARCHAR": "VARCHAR(40)", "DOUBLE": "DOUBLE PRECISION"}
"""Names that every engine reads for DuckDB's types."""


def by_name(pairs: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("pair", pairs, ids=[pair["name"] for pair in pairs])


class SqlTable(NamedTuple):
    """A table: its portable SQL types and DuckDB's, by column, and its rows."""

    columns: dict[str, str]
    schema: dict[str, str]
    rows: list[tuple[Any, ...]]


def read_tables(script: str) -> dict[str, SqlTable]:
    tables = {}
    with duckdb.connect() as connection:
        connection.execute(script)
        names = "SELECT table_name FROM duckdb_tables() ORDER BY table_oid"
        for (name,) in connection.execute(names).fetchall():
            columns = connection.execute(f"DESCRIBE {name}").fetchall()
            schema = {column: kind for column, kind, *_ in columns}
            portable = {c: PORTABLE.get(kind, kind) for c, kind in schema.items()}
            rows = connection.execute(f"FROM {name}").fetchall()
            tables[name] = SqlTable(portable, schema, rows)
    return tables


TABLES = read_tables(SCRIPT)
SCHEMAS = {name: table.schema for name, table in TABLES.items()}


def parquet_sources(folder: Path, shards: int = 1) -> dict[str, list[ShardSource]]:
    """Write every table as Parquet files; row k goes to shard k modulo ``shards``."""
    sources: dict[str, list[ShardSource]] = {}
    with duckdb.connect() as connection:
        connection.execute(SCRIPT)
        for name in TABLES:
            sources[name] = []
            for index in range(shards):
                path = folder / f"{name}-{index}-of-{shards}.parquet"
                connection.execute(
                    f"COPY (SELECT * FROM {name} WHERE rowid % {shards} = {index} "
                    f"ORDER BY rowid) TO '{path}' (FORMAT parquet)"
                )
                sources[name].append(ShardSource(name, "site", index, path=str(path)))
    return sources
