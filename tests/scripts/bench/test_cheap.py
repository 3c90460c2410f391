"""Suite ``cheap``: its cases are the joins that they say, and both ways learn them."""

import duckdb
import pytest

from scripts.bench.suites import cheap
from scripts.bench.suites.cheap import Case, join_and_fit, train_in_place

SMALL = {
    "two tables": Case(4_000, 200),
    "one to one": Case(4_000, 4_000),
    "five tables": Case(4_000, 100, tables=5),
    "many to many": Case(400, 20, copies=10),
}


@pytest.mark.parametrize("name", SMALL)
def test_both_ways_learn_the_same(name, monkeypatch):
    monkeypatch.setattr(cheap, "CASES", SMALL)
    case = SMALL[name]
    with duckdb.connect() as connection:
        for table, rows in case.frames().items():
            connection.register(table, rows)
        joined = connection.execute(case.sql).df()
    assert len(joined) == case.joined_rows
    assert len(joined.columns) == 1 + cheap.COLUMNS
    ours = train_in_place(name, "cg")
    theirs = join_and_fit(name, "linear")
    # of different rows held out
    assert ours["auc"] == pytest.approx(theirs["auc"], abs=0.06)
    assert ours["auc"] > 0.6
