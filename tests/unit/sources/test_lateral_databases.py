"""LATERAL sub-queries over a table in a database answer as over a file."""

from datetime import datetime, timedelta
from itertools import product

import duckdb
import pytest

from tests.support.database_tables import KINDS, fill, source_of, url_of
from tests.support.joined import engine_rows, joined_rows, result_names
from tests.support.tables.sources import file_source
from tp_flower.query import Query

FIRST = datetime(2020, 1, 1)
COLUMNS = {
    "id": "INTEGER",
    "k": "INTEGER",
    "t": "TIMESTAMP",
    "x": "INTEGER",
    "kind": "VARCHAR(9)",
}
# at some times several, at 36 hours and its multiples among them
EVENTS = [
    (n, n % 4, FIRST + timedelta(hours=12 * (n // 3)), n % 5, "ab"[n % 2])
    for n in range(40)
]
NULLS = [(40, None, FIRST, 1, "a"), (41, 1, None, 2, "a"), (42, 1, FIRST, None, None)]
ORDERS = """SELECT CAST(i % 5 AS INTEGER) AS k,
chr(CAST(97 + i % 2 AS INTEGER)) AS kind,
TIMESTAMP '2020-01-02 12:00:00' + INTERVAL 36 HOUR * (i % 4) AS day,
CAST(i AS DOUBLE) AS y FROM range(12) r(i)"""
AGGREGATES = """SELECT COUNT(*) AS n, SUM(p.x) AS s,
EPOCH(o.day) - EPOCH(MAX(p.t)) AS ago FROM events p
WHERE p.k = o.k AND p.t < o.day AND p.t >= o.day - INTERVAL 3 DAY
AND p.kind = 'a' HAVING COUNT(*) > 0"""
LAST = """SELECT p.x AS n, p.kind AS s, EPOCH(p.t) AS ago FROM events p
WHERE p.kind = o.kind AND p.k = o.k AND p.t <= o.day AND p.x > 0
ORDER BY p.t DESC, p.x DESC, p.kind DESC LIMIT 1"""
SELECT = "SELECT o.y AS label, w.n, w.s, w.ago FROM orders o LEFT JOIN LATERAL ({}) w"
HOW = [("", False), ("36 hours from 2020-01-01 to 2020-01-08", False), ("", True)]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_before_a_cutoff_are_those_of_duckdb(kind, request, tmp_path):
    url = url_of(kind, request, tmp_path)
    rows = [*EVENTS, *NULLS]
    types = {"types": {"t": "TIMESTAMP"}} if kind == "sqlite" else {}
    events = source_of(url, fill(url, "events", COLUMNS, rows), chunk_rows=7, **types)
    path = tmp_path / "orders.parquet"
    with duckdb.connect() as engine:
        engine.execute(f"CREATE TABLE orders AS {ORDERS}")
        engine.execute(f"COPY orders TO '{path}'")
        listed = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
        engine.execute(f"CREATE TABLE events ({listed})")
        engine.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", rows)
        schemas = {
            name: {c: of for c, of, *_ in engine.execute(f"DESCRIBE {name}").fetchall()}
            for name in ("orders", "events")
        }
        sources = {"orders": [file_source(path, "orders")], "events": [events]}
        for form, (grid, is_sealed) in product((AGGREGATES, LAST), HOW):
            sql = f"{SELECT.format(form)} ON TRUE"
            query = Query.from_sql(sql).on_grid(grid).sealing_cutoffs(is_set=is_sealed)
            bound = query.bind(schemas)
            found = joined_rows(bound, sources)
            assert found == engine_rows(engine, sql, result_names(bound))
