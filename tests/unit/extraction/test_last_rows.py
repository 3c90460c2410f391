"""The last rows by ASOF JOIN are those that the sub-query itself sorts for."""

import datetime
from collections import Counter
from itertools import chain

import duckdb
import numpy as np
import pytest

from tp_flower.extraction.last_rows import last_rows_sql
from tp_flower.query.cutoffs import CutoffGrid, Cutoffs
from tp_flower.query.fragment import Feature, SubQuery

COLUMNS = ["k", "t", "u", "x", "kind"]
TYPES = {'"k"': "INTEGER", '"kind"': "VARCHAR"}
GRID = CutoffGrid("36 hour", "2020-01-01", "2020-01-06", "DATE")
# C stands for the cutoff
JOINED = [
    ['"t" < C'],
    ['C >= "t"', "\"kind\" = 'a'"],
    ["\"t\" <= C - INTERVAL '8' HOUR"],
    ["\"t\" BETWEEN C - INTERVAL '2' DAY AND C"],
    ['"t" < C', "\"t\" >= C - INTERVAL '1' DAY"],
]
SORTED = [
    ['"t" < C', '"u" < C'],
    ['"t" < C', "NOT \"t\" < C - INTERVAL '1' DAY"],
    ['"t" < C', "\"t\" <= C - INTERVAL '1' DAY"],
    ['"t" > C'],
    ['"t" < C + INTERVAL \'1\' DAY * "x"'],
]
OUTPUTS = [
    {"x": '"x"', "kind": '"kind"', "at": '"t"'},
    {"ago": 'epoch(C) - epoch("t")', "x": '"x"'},
    {"z": '"x" * (epoch(C) - 1577923200)', "x": '"x"'},
    {"nine": "9", "u": '"u"'},
]


def last_of(filters, outputs=OUTPUTS[0], by='"t"', keys=('"k"',), grid=None):
    subquery = SubQuery(
        tuple(Feature(name, sql) for name, sql in outputs.items()),
        filters=tuple(filters),
        groups=tuple(keys),
        cutoffs=Cutoffs("" if grid else "o", grid),
        last=(by,),
    )
    named = subquery.map(lambda piece: piece.sql.replace("C", '"(cutoff)"'))
    return named.check(COLUMNS, "w")


def insert(engine, table, rows):
    """Insert rows by one statement, as DuckDB plans each."""
    marks = f"({', '.join('?' for _ in rows[0])})"
    values = ", ".join([marks] * len(rows))
    engine.execute(f"INSERT INTO {table} VALUES {values}", list(chain(*rows)))


def engine_with(subquery, seed, types=("TIMESTAMP", "TIMESTAMP"), rows=24, pairs=12):
    """Random rows, with ties and NULLs, and pairs of a key and a cutoff."""
    rng = np.random.default_rng(seed)

    def times(count):
        hours = rng.integers(0, 12, count) * 8
        first = datetime.datetime(2020, 1, 1)
        found = [first + datetime.timedelta(hours=int(each)) for each in hours]
        return [None if rng.random() < 0.1 else each for each in found]

    def numbers(count):
        return [None if each == 3 else int(each) for each in rng.integers(0, 4, count)]

    engine = duckdb.connect()
    engine.execute(
        f"CREATE TABLE rows (k INTEGER, t {types[0]}, u {types[0]}, x DOUBLE, "
        "kind VARCHAR)"
    )
    made = [numbers(rows), times(rows), times(rows), numbers(rows)]
    values = zip(*made, rng.choice(["a", "b"], rows).tolist(), strict=True)
    insert(engine, "rows", list(values))
    names = [f'"{name}"' for name in subquery.pair_names]
    kinds = [*(TYPES[key] for key in subquery.groups), types[1]]
    columns = ", ".join(map(" ".join, zip(names, kinds, strict=True)))
    engine.execute(f"CREATE TABLE drawn ({columns})")
    keys = {'"k"': numbers, '"kind"': lambda n: rng.choice(["a", "b"], n).tolist()}
    of_keys = [keys[key](pairs) for key in subquery.groups]
    insert(engine, "drawn", list(zip(*of_keys, times(pairs), strict=True)))
    engine.execute("CREATE TABLE cutoffs AS SELECT DISTINCT * FROM drawn")
    return engine


def rows_of(engine, subquery, sql):
    """The rows by pair; on a grid, those of a key that is NULL have no match."""
    keys = [f'"{name}" IS NOT NULL' for name in subquery.pair_names]
    return Counter(
        engine.execute(f"SELECT * FROM ({sql}) WHERE {' AND '.join(keys)}").fetchall()
    )


@pytest.mark.cases(
    "filters0-None",
    "filters1-grid1",
    "filters2-None",
    "filters3-grid1",
    "filters4-None",
)
@pytest.mark.parametrize("grid", [None, GRID])
@pytest.mark.parametrize("filters", JOINED)
def test_they_are_those_of_the_sub_query(filters, grid):
    cases = [
        (outputs, keys)
        for outputs in OUTPUTS
        for keys in (['"k"'], [], ['"k"', '"kind"'])
    ]
    rows = 0
    for seed, (outputs, keys) in enumerate(cases):
        subquery = last_of(filters, outputs, keys=keys, grid=grid)
        types = ("TIMESTAMP", "DATE" if grid or seed % 2 else "TIMESTAMP_S")
        engine = engine_with(subquery, seed, types)
        joined = last_rows_sql(engine, subquery, "rows")
        assert "ASOF JOIN" in joined
        found = rows_of(engine, subquery, joined)
        assert found == rows_of(engine, subquery, subquery.to_sql("rows"))
        rows += found.total()
    assert rows > len(cases)


@pytest.mark.parametrize("filters", SORTED)
def test_others_are_sorted(filters):
    subquery = last_of(filters)
    engine = engine_with(subquery, 0)
    assert last_rows_sql(engine, subquery, "rows") is None


@pytest.mark.parametrize(
    ("types", "how"),
    [
        # compared as times of microseconds, of which several are one
        (("TIMESTAMP_NS", "TIMESTAMP"), {}),
        (("VARCHAR", "DATE"), {}),
        (("TIMESTAMP", "TIMESTAMP"), {"by": '"x"'}),
    ],
)
def test_what_an_asof_join_may_answer_otherwise_is_sorted(types, how):
    subquery = last_of(['"t" < C'], **how)
    engine = engine_with(subquery, 0, types)
    assert last_rows_sql(engine, subquery, "rows") is None
