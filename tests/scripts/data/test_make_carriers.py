"""The flights by carrier are all flights, each at its carrier."""

import subprocess
import sys
import tomllib

import duckdb

from tests.support.paths import ROOT
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.flights import flights_tables
from tp_flower.sources.shards import column_types, load_tables


def test_every_carrier_has_its_flights_and_the_same_columns(tmp_path):
    command = [
        sys.executable,
        ROOT / "scripts" / "data" / "make_carriers.py",
        str(tmp_path),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert f"flwr run . --stream -c {tmp_path / 'my-run.toml'}" in done.stdout
    flights = [str(path) for path in flights_tables()["flights"].values()]
    counted = duckdb.sql(
        f"SELECT carrier, count(*), sum((arr_delay > 15)::INT) "
        f"FROM read_parquet({flights}) WHERE arr_delay IS NOT NULL GROUP BY carrier"
    )
    expected = {carrier: (rows, late) for carrier, rows, late in counted.fetchall()}
    sources = load_tables(str(tmp_path / "tables.toml"))
    found, columns = {}, []
    with duckdb.connect() as connection:
        for source in sources:
            own = f"FROM read_parquet('{source.path}')"
            select = f"SELECT count(*), sum(late::INT) {own}"
            found[source.site] = connection.execute(select).fetchone()
            columns.append(column_types(connection, own))
    assert len(found) == 16
    assert found == expected
    assert all(own == columns[0] for own in columns)
    run = tomllib.loads((tmp_path / "my-run.toml").read_text())
    settings = Settings.from_run_config(run)
    assert settings.strategy == "personalised"
    Query.from_sql(settings.sql).bind({"departures": columns[0]})
