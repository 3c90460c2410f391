"""Tables in real databases, for tests: created, filled, and named as sources."""

from collections.abc import Mapping, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from tests.support.servers import uri
from tp_flower.sources.databases.session import parse_url
from tp_flower.sources.shards import ShardSource
from tp_flower.sources.tables_file import DatabaseShard

KINDS = ("postgresql", "mariadb", "sqlite")
Rows = Sequence[Sequence[Any]]


def url_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> sa.URL:
    """The address of a kind of database; its server is started where it has one."""
    if kind == "sqlite":
        return sa.make_url(f"sqlite:///{folder}/shards.db")
    url: sa.URL = request.getfixturevalue(kind)
    return url


def source_of(
    url: sa.URL, table: str, site: str = "here", **settings: Any
) -> ShardSource:
    """A table of a database as a shard; ``settings`` are of the shard or its place."""
    of_shard = {k: settings.pop(k) for k in ("types", "min_count") if k in settings}
    if "sql" not in settings:
        settings["table"] = (table,)
    shard = DatabaseShard(parse_url(uri(url), {}, Path("/"), "a test"), **settings)
    return ShardSource(table, site, 0, database=shard, **of_shard)


def run(url: sa.URL, *statements: str) -> None:
    """Run statements, each in a transaction of its own."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    for statement in statements:
        with engine.begin() as connection:
            connection.exec_driver_sql(statement)


def new_name(table: str = "t") -> str:
    """A name that no table of the servers has."""
    return f"{table}_{uuid4().hex[:16]}"


def fill(url: sa.URL, table: str, columns: Mapping[str, str], rows: Rows) -> str:
    """Create a table under a new name; return the name."""
    name = new_name(table)
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    quote = engine.dialect.identifier_preparer.quote
    dialect = engine.dialect.name
    listed = ", ".join(f"{quote(column)} {kind}" for column, kind in columns.items())
    if dialect == "mysql":
        listed = listed.replace("TIMESTAMP", "DATETIME(6)")
    places = ", ".join(["?" if dialect == "sqlite" else "%s"] * len(columns))
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE TABLE {quote(name)} ({listed})")
        values = [tuple(_value(v, dialect) for v in row) for row in rows]
        if values:
            connection.exec_driver_sql(
                f"INSERT INTO {quote(name)} VALUES ({places})", values
            )
    return name


def _value(value: Any, dialect: str) -> Any:
    if dialect == "sqlite" and isinstance(value, date):
        return str(value)
    is_decimal = dialect == "sqlite" and isinstance(value, Decimal)
    return float(value) if is_decimal else value
