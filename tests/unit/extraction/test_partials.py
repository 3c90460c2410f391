"""What shards have of each pair becomes the answer over all of their rows."""

import math

import duckdb
import numpy as np
import pytest

from tp_flower.errors import QueryError
from tp_flower.extraction.partials import partial_plan
from tp_flower.query.cutoffs import CutoffGrid, Cutoffs
from tp_flower.query.fragment import Feature, SubQuery

GRID = CutoffGrid("36 hour", "2020-01-01", "2020-01-06", "TIMESTAMP")
ALL = {
    "n": "COUNT(*)",
    "lately": 'COUNT("x") FILTER (WHERE "t" > "(cutoff)" - INTERVAL \'1\' DAY)',
    "total": 'SUM("x")',
    "whole": 'COALESCE(SUM("n"), -1) + COUNT("n")',
    "mean": 'AVG("x") FILTER (WHERE "kind" = \'a\')',
    "least": 'MIN("x")',
    "word": 'MAX("kind")',
    "since": 'EPOCH("(cutoff)") - EPOCH(MAX("t"))',
    "any": 'BOOL_OR("x" > 1)',
    "every": 'BOOL_AND("x" > 0)',
    "spread": 'STDDEV("x")',
    "wide": 'VAR_POP("x") FILTER (WHERE "n" > 0)',
    "sample": 'VAR_SAMP("x") / NULLIF(STDDEV_POP("x"), 0)',
}
LAST = {"x": '"x"', "kind": '"kind"', "ago": 'EPOCH("(cutoff)") - EPOCH("t")'}


def look_back(outputs, keys=('"k"',), grid=None, **more):
    subquery = SubQuery(
        tuple(Feature(name, sql) for name, sql in outputs.items()),
        filters=('"t" < "(cutoff)"', '"t" >= "(cutoff)" - INTERVAL \'3\' DAY'),
        groups=keys,
        cutoffs=Cutoffs("" if grid else "o", grid),
        **more,
    )
    return subquery.check(["k", "t", "x", "n", "kind"], "w")


def engine_with(seed, shards=3, rows=40, offset=0.0):
    """Rows in shards, by chance: those of one key are in several."""
    engine = duckdb.connect()
    engine.execute(f"SELECT setseed({seed / 10})")
    engine.execute(
        "CREATE TABLE rows AS SELECT CAST(random() * 4 AS INTEGER) AS k, "
        "TIMESTAMP '2020-01-01' + CAST(random() * 14 AS INTEGER) * INTERVAL 8 HOUR "
        f"AS t, IF(random() < 0.2, NULL, {offset} + random() * 3) AS x, "
        "CAST(random() * 5 AS INTEGER) - 2 AS n, IF(random() < 0.5, 'a', 'b') AS kind, "
        f"CAST(floor(random() * {shards}) AS INTEGER) AS shard FROM range({rows})"
    )
    engine.execute(
        'CREATE TABLE cutoffs AS SELECT DISTINCT k AS "(key 0)", t + INTERVAL 1 HOUR '
        'AS "(cutoff)" FROM rows'
    )
    return engine


def values(engine, sql, names):
    listed = ", ".join(f'"{name}"' for name in names)
    return engine.execute(f"SELECT {listed} FROM ({sql}) ORDER BY ALL").fetchall()


def merged(subquery, shards=3):
    plan = partial_plan(subquery, "w")
    own = (
        plan.subquery.to_sql(f"(SELECT * FROM rows WHERE shard = {shard})")
        for shard in range(shards)
    )
    return plan.merged_sql(f"({' UNION ALL '.join(own)})")


def check(engine, subquery):
    found, expected = (
        values(engine, sql, subquery.names)
        for sql in (merged(subquery), subquery.to_sql("rows"))
    )
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        for value, wanted in zip(one, other, strict=True):
            if isinstance(wanted, float) and not math.isnan(wanted):
                assert value == pytest.approx(wanted, rel=1e-12, abs=1e-12)
            else:
                assert value == wanted or (value != value and wanted != wanted)


@pytest.mark.parametrize("grid", [None, GRID], ids=["pairs", "grid"])
@pytest.mark.parametrize(
    ("outputs", "more"),
    [
        (ALL, {}),
        ({"n": "COUNT(*)", "total": 'SUM("x")'}, {"having": ("COUNT(*) >= 3",)}),
        ({"n": "COUNT(*)"}, {"having": ('STDDEV("x") > 0.5', 'COUNT("x") < 9')}),
    ],
)
def test_aggregates_of_shards_are_those_of_all_rows(outputs, more, grid):
    for seed in range(3):
        with engine_with(seed) as engine:
            check(engine, look_back(outputs, grid=grid, **more))


@pytest.mark.parametrize("grid", [None, GRID], ids=["pairs", "grid"])
def test_the_last_row_of_shards_is_that_of_all_rows(grid):
    for seed in range(3):
        with engine_with(seed) as engine:
            check(engine, look_back(LAST, grid=grid, last=('"t"',)))


def test_without_a_key_the_answers_are_those_of_each_cutoff():
    with engine_with(1) as engine:
        check(engine, look_back(ALL, keys=(), grid=GRID))


def test_a_variance_far_from_zero_does_not_cancel():
    """By sums of squares it would be lost: the values are 1e9 times as large."""
    with engine_with(2, offset=1e9) as engine:
        subquery = look_back({"wide": 'VAR_POP("x")'}, grid=GRID)
        found, expected = (
            np.array(values(engine, sql, ["wide"]), float)
            for sql in (merged(subquery), subquery.to_sql("rows"))
        )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert np.nanmax(expected) < 3


@pytest.mark.parametrize(
    "sql",
    ['COUNT(DISTINCT "kind")', 'MEDIAN("x")', '1 + MEDIAN("n")'],
)
def test_what_needs_the_values_of_all_rows_is_refused_by_name(sql):
    function = sql.removeprefix("1 + ").split("(")[0]
    with pytest.raises(QueryError, match=rf"sub-query 'w': {function}\(.* write COUNT"):
        partial_plan(look_back({"y": sql}), "w")
