"""Suite ``windows``: both sides answer the same, a row for each pair."""

from collections import Counter
from contextlib import closing

import duckdb
import pytest

from scripts.bench.suites.windows import (
    FORMS,
    WAYS,
    Case,
    answer_of_duckdb,
    bind,
    derived_table,
    sites,
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_both_sides_have_the_same_answers(form, way):
    case = Case(form, keys=20, events=400, rows=60)
    with sites(case) as sources:
        shard = derived_table(bind(case, way), way, sources)
    names = [info.name for info in shard.features]
    columns = [shard.column(name).values for name in names]
    found = Counter(tuple(map(plain, row)) for row in zip(*columns, strict=True))
    with closing(duckdb.connect()) as engine:
        for table, rows in case.frames().items():
            engine.register(table, rows)
        answer = engine.sql(answer_of_duckdb(case, way)).fetchall()
    expected = Counter(tuple(map(plain, row[2:])) for row in answer)
    if form == "window":
        # and the answer about no rows, the last one
        expected[0.0, None, None] += 1
    assert found == expected


def plain(value):
    """A number as it compares: of twelve digits, NULL where it is NaN."""
    return None if value is None or value != value else float(f"{value:.12g}")
