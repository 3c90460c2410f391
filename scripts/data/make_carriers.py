"""Write the flights by carrier: 16 sites with the same columns, and how to train there.

    python scripts/data/make_carriers.py OUTPUT

Every carrier is a site with its own departures from New York in 2013, each with the
weather at the airport, the plane and the destination; models of the sites' own say what
will be late. Sites differ in size, from 29 rows to 54,000, and in what makes their
flights late (:mod:`tp_flower.sources.flights` has the four tables).
"""

import argparse
import sys

import duckdb

from scripts.data.run_files import (
    RUN_FILE,
    print_commands,
    script,
    write_run,
    write_tables,
)
from tp_flower.sources.flights import flights_tables

QUESTION = "Will a flight be more than 15 minutes late? A model for every carrier."
SETTINGS: dict[str, str | float] = {
    "strategy": "personalised",
    "graph-penalty": 0.0003,
}
SQL = """
SELECT late AS label, month, hour, weekday, distance, origin, lat, lon,
    temp, dewp, humid, wind_speed, precip, pressure, visib, plane_year, seats
FROM departures
"""
DEPARTURES = """
SELECT f.carrier, f.arr_delay > 15 AS late, f.month, f.hour,
    dayofweek(make_date(f.year, f.month, f.day)) AS weekday,
    f.distance, f.origin, a.lat, a.lon,
    w.temp, w.dewp, w.humid, w.wind_speed, w.precip, w.pressure, w.visib,
    p.year AS plane_year, p.seats
FROM read_parquet({flights}) AS f
LEFT JOIN read_parquet({weather}) AS w
    ON f.origin = w.origin AND f.time_hour = w.time_hour
LEFT JOIN read_parquet({planes}) AS p ON f.tailnum = p.tailnum
LEFT JOIN read_parquet({airports}) AS a ON f.dest = a.faa
WHERE f.arr_delay IS NOT NULL
ORDER BY f.carrier, f.time_hour, f.flight
"""


def write(options: argparse.Namespace) -> None:
    """Write the files to OUTPUT."""
    files = {
        table: str([str(path) for path in shards.values()])
        for table, shards in flights_tables().items()
    }
    shards = []
    with duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE departures AS {DEPARTURES.format_map(files)}")
        carriers = connection.sql("SELECT DISTINCT carrier FROM departures ORDER BY 1")
        for (carrier,) in carriers.fetchall():
            rows = connection.table("departures").filter(f"carrier = '{carrier}'")
            file = f"{carrier}.parquet"
            rows.select("* EXCLUDE carrier").write_parquet(str(options.output / file))
            shards.append((file, carrier))
    write_tables(options.output, {"departures": shards})
    run = write_run(options.output / RUN_FILE, QUESTION, SQL, SETTINGS)
    print_commands("The flights by carrier", options.output, [run])


main = script(__doc__, write)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
