"""Put the built-in flights federation where data usually are: databases and files.

    python scripts/data/load_flights.py DIR --planes postgresql://user@host/db --weather
    mysql://user@host/db

writes planes to one database and the three airports' weather to another (an existing
table of these names is replaced), and to DIR the flights as Parquet files, the airports
as CSV and ``tables.toml``, which names all of them. It has no password and no URI: they
are read from the environment variables PLANES_URI and WEATHER_URI when sites use it::

    export PLANES_URI=... WEATHER_URI=...
    tp-flower train --set tables=DIR/tables.toml --set sql=...
"""

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from sqlalchemy import String, create_engine

from scripts.data.run_files import write_run, write_tables
from tp_flower.sources.databases.session import parse_url
from tp_flower.sources.flights import FLIGHTS_SQL, flights_tables

TEXT_CHARACTERS = 64


def main() -> None:
    """Parse the arguments, load the tables, say what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for the files and tables.toml")
    parser.add_argument("--planes", required=True, metavar="URI")
    parser.add_argument("--weather", required=True, metavar="URI")
    options = parser.parse_args()
    path = load_flights(options.folder, options.planes, options.weather)
    print(f"wrote {path}; it expects PLANES_URI and WEATHER_URI in the environment")


def load_flights(folder: Path, planes_uri: str, weather_uri: str) -> Path:
    """Load the tables and return the path of the tables file."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    databases = {
        "planes": (planes_uri, "${PLANES_URI}", "tailnum"),
        "weather": (weather_uri, "${WEATHER_URI}", "time_hour"),
    }
    entries: dict[str, list[tuple[str | Mapping[str, str], str]]] = {}
    for table, shards in flights_tables().items():
        places = entries[table] = []
        for site, file in shards.items():
            if table in databases:
                uri, variable, key = databases[table]
                name = f"{table}_{site.lower()}" if len(shards) > 1 else table
                load_table(uri, name, file, key)
                places.append(({"uri": variable, "table": name}, site))
            elif table == "airports":
                pd.read_parquet(file).to_csv(folder / "airports.csv", index=False)
                places.append(("airports.csv", site))
            else:
                shutil.copy(file, folder)
                places.append((file.name, site))
    write_run(folder / "flights.toml", "Will a flight be late?", FLIGHTS_SQL, {})
    return write_tables(folder, entries)


def load_table(uri: str, table: str, file: Path, key: str) -> None:
    """Replace a table of a database, with a primary key, by a Parquet file's rows."""
    rows = pd.read_parquet(file, dtype_backend="numpy_nullable")
    # a primary key of MariaDB has a length
    texts = dict.fromkeys(rows.select_dtypes("string"), String(TEXT_CHARACTERS))
    engine = create_engine(parse_url(uri, {}, Path.cwd(), "the database").url)
    with engine.begin() as connection:
        rows.to_sql(table, connection, if_exists="replace", index=False, dtype=texts)
        connection.exec_driver_sql(f"ALTER TABLE {table} ADD PRIMARY KEY ({key})")
    engine.dispose()


if __name__ == "__main__":
    main()
