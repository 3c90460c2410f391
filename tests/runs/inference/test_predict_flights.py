"""Predictions of flights that no model has seen, beside the joined table's."""

import pandas as pd
import pytest

from tests.support.predicted import check_equal, scored, train
from tests.support.reference.joins import engine_of
from tp_flower.sources.flights import FLIGHTS_SQL, flights_tables

LABEL = "f.arr_delay > 15 AS label,"
KNOWN = "WHERE f.arr_delay IS NOT NULL"
NEW_ROWS = "f.month = 2 AND f.day < 6"
SELECT, TABLES = FLIGHTS_SQL.split("FROM flights")


def tables() -> dict[str, pd.DataFrame]:
    """The whole tables, shard after shard, and of flights those to be predicted."""
    frames = {
        name: pd.concat([pd.read_parquet(path) for path in paths.values()])
        for name, paths in flights_tables().items()
    }
    with engine_of({"f": frames["flights"].reset_index(drop=True)}) as engine:
        new = engine.execute(f"SELECT * FROM f WHERE {NEW_ROWS}").df()
    return {**frames, "flights": new}


@pytest.mark.slow
def test_flights_of_another_month(tmp_path):
    sql = f"{FLIGHTS_SQL} AND f.month = 1"
    model = train(tmp_path, 2, sql, task="classification", test_fraction=0.1)
    # cancelled flights have no label, and are predicted like others
    asked = FLIGHTS_SQL.replace(LABEL, "").replace(KNOWN, f"WHERE {NEW_ROWS}")
    expected = model.reference(tables(), f"FROM flights{TABLES}".replace(KNOWN, ""))
    assert len(expected) > 3000
    check_equal(scored(model.table(2, asked)), expected)
