"""The flights by carrier are all flights, each at its carrier."""

import tomllib

import duckdb

from scripts.data.make_carriers import main
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.flights import flights_tables
from tp_flower.sources.shards import describe, load_tables


def test_every_carrier_has_its_flights_and_the_same_columns(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    assert (
        f"flwr run . --stream -c {tmp_path / 'my-run.toml'}" in capsys.readouterr().out
    )
    flights = [str(path) for path in flights_tables()["flights"].values()]
    counted = duckdb.sql(
        f"SELECT carrier, count(*), sum((arr_delay > 15)::INT) "
        f"FROM read_parquet({flights}) WHERE arr_delay IS NOT NULL GROUP BY carrier"
    )
    expected = {carrier: (rows, late) for carrier, rows, late in counted.fetchall()}
    sources = load_tables(str(tmp_path / "tables.toml"))
    assert len(sources) == 16
    for source in sources:
        rows = duckdb.read_parquet(str(source.path))
        counted = rows.aggregate("count(*), sum(late::INT)").fetchall()
        assert counted == [expected.pop(source.site)]
    assert not expected
    columns = [describe(source).columns for source in sources]
    assert all(other == columns[0] for other in columns)
    run = tomllib.loads((tmp_path / "my-run.toml").read_text())
    settings = Settings.from_run_config(run)
    assert settings.strategy == "personalised"
    Query.from_sql(settings.sql).bind({"departures": columns[0]})
