"""Small tables that the SQL pairs are about, for any engine.

A reader can join them by hand. Every value has a reason: NULL and repeated keys, keys
without a match on either side, '01' beside '1' and 1, an accent written in two ways,
empty texts, whole and fractional numbers of different types.

Types are those that DuckDB, PostgreSQL, MariaDB and SQLite all read. What differs: in
CSV an empty text is NULL (customers, nicknames) and '01' a number unless typed; SQLite
stores dates, timestamps, decimals and booleans as texts or numbers; MariaDB's BOOLEAN
is 0 or 1, and its default collation takes 'bo' and 'Bo' for equal.
"""

from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb

from tp_flower.sources.shards import ShardSource

COMPOSED, DECOMPOSED = "Zo\u00eb", "Zoe\u0308"


@dataclass(frozen=True)
class SqlTable:
    """A table: portable SQL type by column, and its rows."""

    columns: dict[str, str]
    rows: tuple[tuple[Any, ...], ...]

    def definition(self) -> str:
        """The columns as CREATE TABLE lists them."""
        return ", ".join(f"{name} {kind}" for name, kind in self.columns.items())


def money(text: str | None) -> Decimal | None:
    return None if text is None else Decimal(text)


TABLES = {
    "customers": SqlTable(
        {
            "customer": "BIGINT",
            "name": "VARCHAR(40)",
            "region": "VARCHAR(40)",
            "age": "INTEGER",
            "is_member": "BOOLEAN",
            "joined": "DATE",
        },
        (
            (10, COMPOSED, "US", 30, True, date(2020, 5, 17)),
            (11, "Bo", "UK", None, False, date(2021, 1, 1)),
            (None, "Cy", "US", 50, True, None),
            (13, "Di", None, 70, None, date(2019, 12, 31)),
            (14, "", "", 41, False, date(2023, 2, 28)),
        ),
    ),
    # orders 1, 2 and 6 are of the same item; 4 has no customer, 5 one that is unknown
    "orders": SqlTable(
        {
            "id": "INTEGER",
            "customer": "BIGINT",
            "item": "BIGINT",
            "shop": "VARCHAR(10)",
            "qty": "INTEGER",
            "amount": "DECIMAL(8,2)",
            "ordered": "TIMESTAMP",
            "day": "DATE",
            "is_gift": "BOOLEAN",
        },
        (
            (
                1,
                10,
                100,
                "01",
                2,
                money("1.00"),
                datetime(2024, 1, 1),
                date(2024, 1, 1),
                True,
            ),
            (
                2,
                11,
                100,
                "1",
                7,
                money("3.50"),
                datetime(2024, 1, 2, 13, 30),
                date(2024, 1, 2),
                False,
            ),
            (
                3,
                10,
                101,
                "02",
                1,
                money("10.25"),
                datetime(2024, 2, 29, 23, 59, 59),
                date(2024, 1, 2),
                None,
            ),
            (4, None, 101, "02", 9, None, None, None, True),
            (
                5,
                12,
                102,
                None,
                4,
                money("0.00"),
                datetime(2023, 12, 31),
                date(2024, 1, 1),
                False,
            ),
            (
                6,
                14,
                100,
                "01",
                3,
                money("2.00"),
                datetime(2024, 1, 2),
                date(2024, 1, 2),
                False,
            ),
        ),
    ),
    # items 100 and 101 have several parts: many-to-many with orders
    "items": SqlTable(
        {
            "item": "BIGINT",
            "part": "VARCHAR(10)",
            "price": "DECIMAL(6,2)",
            "weight": "DOUBLE PRECISION",
        },
        (
            (100, "bolt", money("0.50"), 0.125),
            (100, "nut", money("0.25"), None),
            (101, "bolt", money("0.50"), 2.5),
            (None, "gear", money("1.00"), 1.0),
            (103, "gear", money("9.00"), -1.5),
        ),
    ),
    "parts": SqlTable(
        {"part": "VARCHAR(10)", "maker": "INTEGER", "grade": "INTEGER"},
        (("bolt", 1, 3), ("nut", 2, None), ("gear", None, 5), (None, 1, 1)),
    ),
    "makers": SqlTable(
        {"maker": "INTEGER", "country": "VARCHAR(10)"}, ((1, "DE"), (3, "FR"))
    ),
    "payments": SqlTable(
        {
            "customer": "BIGINT",
            "item": "BIGINT",
            "amount": "DECIMAL(8,2)",
            "paid": "DATE",
            "method": "VARCHAR(10)",
        },
        (
            (10, 100, money("5.00"), date(2024, 1, 5), "card"),
            (10, 101, money("7.50"), date(2024, 2, 5), "cash"),
            (10, 100, None, date(2024, 2, 6), "card"),
            (11, 100, money("2.25"), date(2023, 12, 31), None),
            (12, 102, money("4.00"), date(2024, 1, 1), "cash"),
            (13, 101, money("-1.00"), date(2024, 3, 1), "card"),
            (None, 100, money("8.00"), None, "cash"),
            (None, 101, money("8.00"), None, "cash"),
        ),
    ),
    "weather": SqlTable(
        {"day": "DATE", "region": "VARCHAR(10)", "temp": "DOUBLE PRECISION"},
        (
            (date(2024, 1, 1), "US", 3.5),
            (date(2024, 1, 2), "US", -1.0),
            (date(2024, 1, 2), "UK", None),
            (None, "US", 0.0),
        ),
    ),
    # '01' and '1' are two shops; `code` is the number of both
    "shops": SqlTable(
        {"shop": "VARCHAR(10)", "code": "BIGINT", "size": "DOUBLE PRECISION"},
        (("01", 1, 20.0), ("1", 1, 50.0), ("02", 2, 8.5), (None, 3, 1.0)),
    ),
    # item numbers that another system keeps as DOUBLE and as DECIMAL
    "stock": SqlTable(
        {"item": "DOUBLE PRECISION", "lot": "DECIMAL(8,2)", "left_over": "INTEGER"},
        ((100.0, money("10.00"), 5), (100.5, money("11.00"), 6), (101.0, None, 7)),
    ),
    "nicknames": SqlTable(
        {"name": "VARCHAR(40)", "length": "INTEGER"},
        ((DECOMPOSED, 3), ("Bo", 2), ("bo", 20), ("", 0)),
    ),
    "visits_2023": SqlTable(
        {"customer": "BIGINT", "visits": "INTEGER", "page": "VARCHAR(10)"},
        ((10, 3, "home"), (11, 1, None), (10, 3, "home")),
    ),
    "visits_2024": SqlTable(
        {"customer": "BIGINT", "visits": "INTEGER", "page": "VARCHAR(10)"},
        ((10, 8, "cart"), (14, 2, "home"), (None, 5, "cart")),
    ),
    "old_visits": SqlTable(
        {"client": "INTEGER", "hits": "DOUBLE PRECISION"}, ((11, 0.5), (14, 1.5))
    ),
    "scored": SqlTable(
        {"customer": "BIGINT", "label": "DOUBLE PRECISION", "points": "INTEGER"},
        ((10, 0.5, 1), (11, 1.5, 2), (13, 2.5, None)),
    ),
}


def load_duckdb(connection: duckdb.DuckDBPyConnection) -> None:
    """Create all tables."""
    for name, table in TABLES.items():
        connection.execute(f"CREATE TABLE {name} ({table.definition()})")
        places = ", ".join("?" * len(table.columns))
        connection.executemany(f"INSERT INTO {name} VALUES ({places})", table.rows)


def parquet_sources(folder: Path, shards: int = 1) -> dict[str, list[ShardSource]]:
    """Write every table as Parquet files; row k goes to shard k modulo ``shards``."""
    sources: dict[str, list[ShardSource]] = {}
    with duckdb.connect() as connection:
        load_duckdb(connection)
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


def schemas() -> dict[str, dict[str, str]]:
    """DuckDB's types of the tables."""
    with duckdb.connect() as connection:
        load_duckdb(connection)
        found = {
            name: connection.execute(f"DESCRIBE {name}").fetchall() for name in TABLES
        }
    return {name: {row[0]: row[1] for row in rows} for name, rows in found.items()}
