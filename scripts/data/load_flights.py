"""Put the built-in flights federation where data usually are: databases and files.

    python scripts/data/load_flights.py DIR --planes postgresql://user@host/db --weather
    mysql://user@host/db

writes planes to one database and the three airports' weather to another (an existing
table of these names is replaced), and to DIR the flights as Parquet files, the airports
as CSV and ``tables.toml``, which names all of them. It has no password and no URI: they
are read from the environment variables PLANES_URI and WEATHER_URI when sites use it::

    export PLANES_URI=... WEATHER_URI=...
    flwr run . --stream -c 'tables="DIR/tables.toml" sql="..."'
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet
from sqlalchemy import Column, MetaData, Table, create_engine
from sqlalchemy.types import BigInteger, DateTime, Double, String, TypeEngine

from tp_flower.sources.databases.session import parse_url
from tp_flower.sources.flights import FLIGHTS_SQL, flights_tables

PLANES, WEATHER = "PLANES_URI", "WEATHER_URI"
TEXT_CHARACTERS = 64


def main() -> None:
    """Parse the arguments, load the tables, say what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for the files and tables.toml")
    parser.add_argument("--planes", required=True, metavar="URI")
    parser.add_argument("--weather", required=True, metavar="URI")
    given = parser.parse_args()
    path = load_flights(given.folder, given.planes, given.weather)
    print(f"wrote {path}; it expects {PLANES} and {WEATHER} in the environment")


def load_flights(folder: Path, planes_uri: str, weather_uri: str) -> Path:
    """Load the tables and return the path of the tables file."""
    folder.mkdir(parents=True, exist_ok=True)
    files = flights_tables()
    entries = []
    for origin, file in files["flights"].items():
        shutil.copy(file, folder / file.name)
        entries.append(
            f'[[tables.flights.shards]]\npath = "{file.name}"\nsite = "{origin}"\n'
        )
    for origin, file in files["weather"].items():
        table = f"weather_{origin.lower()}"
        load_table(weather_uri, table, file, "time_hour")
        entries.append(
            f'[[tables.weather.shards]]\nuri = "${{{WEATHER}}}"\ntable = "{table}"\n'
            f'site = "{origin}"\n'
        )
    for site, file in files["planes"].items():
        load_table(planes_uri, "planes", file, "tailnum")
        entries.append(
            f'[tables.planes]\nuri = "${{{PLANES}}}"\ntable = "planes"\n'
            f'site = "{site}"\n'
        )
    for site, file in files["airports"].items():
        pd.read_parquet(file).to_csv(folder / "airports.csv", index=False)
        entries.append(f'[tables.airports]\npath = "airports.csv"\nsite = "{site}"\n')
    path = folder / "tables.toml"
    path.write_text("\n".join(entries))
    settings = f'tables = "{path.resolve()}"\nsql = """{FLIGHTS_SQL}"""\n'
    (folder / "flights.toml").write_text(settings)
    return path


def load_table(uri: str, table: str, file: Path, key: str) -> None:
    """Replace a table of a database by the rows of a Parquet file.

    Args:
        uri: of the database.
        table: its name.
        file: what it will hold.
        key: its primary key.
    """
    rows = pyarrow.parquet.read_table(file)
    columns = [
        Column(field.name, _sql_type(field.type), primary_key=field.name == key)
        for field in rows.schema
    ]
    created = Table(table, MetaData(), *columns)
    engine = create_engine(parse_url(uri, {}, Path.cwd(), "the database").url)
    with engine.begin() as connection:
        created.drop(connection, checkfirst=True)
        created.create(connection)
        connection.execute(created.insert(), rows.to_pylist())
    engine.dispose()


def _sql_type(kind: pa.DataType) -> TypeEngine[Any]:
    if pa.types.is_timestamp(kind):
        return DateTime()
    if pa.types.is_string(kind):
        return String(TEXT_CHARACTERS)
    return BigInteger() if pa.types.is_integer(kind) else Double()


if __name__ == "__main__":
    main()
