"""DuckDB connections that read what they are given, and nothing else."""

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from functools import lru_cache

import duckdb

from tp_flower.sources.sql_text import quote_path, quote_text


def new_engine() -> duckdb.DuckDBPyConnection:
    """Return a DuckDB engine of its own, in UTC, not locked yet."""
    connection = duckdb.connect(
        config={
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "temp_directory": _spill_folder(),
        }
    )
    connection.execute("SET GLOBAL TimeZone = 'UTC'")
    return connection


def lock(connection: duckdb.DuckDBPyConnection, paths: Sequence[str] = ()) -> None:
    """Let the engine read these files at most, and never again be told otherwise."""
    # a reader asks for the pattern that finds the file, and then for the file
    spelled = {*map(quote_text, paths), *map(quote_path, paths)}
    allowed = ", ".join(sorted(spelled))
    connection.execute(f"SET allowed_paths = [{allowed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def shared_cursor() -> duckdb.DuckDBPyConnection:
    """Return a connection to the locked engine behind all rows in memory.

    Starting an engine takes longer than reading a small frame. Each cursor has its own
    temporary tables.
    """
    return _shared_engine().cursor()


@lru_cache(maxsize=1)
def _shared_engine() -> duckdb.DuckDBPyConnection:
    connection = new_engine()
    lock(connection)
    return connection


@lru_cache(maxsize=1)
def _spill_folder() -> str:
    """Where rows go that do not fit into memory: a folder nobody else can read."""
    folder = tempfile.mkdtemp(prefix="tp_flower-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
