"""The flights of New York by carrier: 16 sites with the same columns.

Every carrier holds its own departures, each with the weather at the airport, the plane
and the destination (:mod:`tp_flower.sources.flights` has the four tables). They differ
in size, from 29 rows to 54,000, and in what makes their flights late.
"""

from contextlib import closing
from pathlib import Path
from typing import Final

import duckdb

from tp_flower.duckdb_engine import quote_text
from tp_flower.errors import SourceError
from tp_flower.sources.flights import flights_tables

CARRIERS_SQL: Final = """
SELECT late AS label, month, hour, weekday, distance, origin, lat, lon,
    temp, dewp, humid, wind_speed, precip, pressure, visib, plane_year, seats
FROM departures
"""

_DEPARTURES: Final = """
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


def make_carriers(folder: Path) -> list[str]:
    """Write a Parquet file per carrier, and return the carriers' names.

    Args:
        folder: of the files; it must be there.

    Raises:
        SourceError: the flights are not there, or the files cannot be written.
    """
    files = {
        name: str([str(path) for path in own.values()])
        for name, own in flights_tables().items()
    }
    try:
        with closing(duckdb.connect()) as connection:
            query = _DEPARTURES.format(**files)
            connection.execute(f"CREATE TABLE departures AS {query}")
            listed = connection.execute(
                "SELECT DISTINCT carrier FROM departures ORDER BY carrier"
            )
            carriers = [str(carrier) for (carrier,) in listed.fetchall()]
            for carrier in carriers:
                own = f"FROM departures WHERE carrier = {quote_text(carrier)}"
                place = quote_text(str(folder / f"{carrier}.parquet"))
                connection.execute(
                    f"COPY (SELECT * EXCLUDE carrier {own}) TO {place} (FORMAT parquet)"
                )
    except duckdb.Error as error:
        raise SourceError(f"cannot write the carriers to {folder}: {error}") from error
    return carriers
