"""Which sub-queries have one answer about no rows, and what it is."""

import duckdb
import pytest

from tp_flower.extraction.empty_answers import (
    answered_key,
    empty_answer_sql,
    null_key_sql,
)
from tp_flower.query import Query
from tp_flower.query.cutoffs import CutoffGrid
from tp_flower.query.scope import TableSchema

GRID = "1 day from 2020-01-01 to 2020-01-06"
SCHEMAS = {
    "orders": {"k": "INTEGER", "day": "DATE", "y": "DOUBLE"},
    "events": {"k": "INTEGER", "t": "TIMESTAMP", "x": "DOUBLE"},
}
FORMS = {
    "lateral": "w.n FROM orders o LEFT JOIN LATERAL (SELECT {} AS n FROM events p "
    "WHERE p.k = o.k AND p.t < o.day{}) w ON TRUE",
    "value": "(SELECT {} FROM events p WHERE p.k = o.k{}) AS n FROM orders o",
}
THERE = {"orders": [(1, "shop")], "events": [(2, "bank")]}


def bind(sql, grid="", *, sealed=False, **places):
    schemas = {name: TableSchema(columns) for name, columns in SCHEMAS.items()}
    for name, schema in schemas.items():
        schema.places = frozenset(places[name])
    query = Query.from_sql(sql).on_grid(grid).sealing_cutoffs(is_set=sealed)
    return query.bind(schemas)


def lateral(column, rest="", form="lateral", **how):
    sql = f"SELECT o.y AS label, {FORMS[form].format(column, rest)}"
    return bind(sql, **THERE, **how).fragments[1]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("COUNT(*)", 0),
        ("COALESCE(SUM(p.x), 7) + COUNT(*)", 7),
        ("COUNT(*) FILTER (WHERE p.t < o.day - INTERVAL 1 DAY)", 0),
        ("EPOCH(o.day) - EPOCH(MAX(p.t))", None),
        ("MIN(EPOCH(o.day) - EPOCH(p.t))", None),
    ],
)
@pytest.mark.parametrize("how", [{"grid": GRID}, {"sealed": True}])
def test_the_answer_is_that_of_duckdb_to_no_rows(column, value, how):
    fragment = lateral(column, **how)
    assert answered_key(fragment) == 0
    with duckdb.connect() as engine:
        engine.execute("CREATE TABLE rows (k INTEGER, t TIMESTAMP, x DOUBLE)")
        engine.execute("INSERT INTO rows VALUES (1, '2020-01-01', 2)")
        engine.execute("CREATE TABLE cutoffs AS SELECT DATE '2020-01-02' \"(cutoff)\"")
        sql = empty_answer_sql(fragment.subquery, "rows")
        assert engine.execute(sql).fetchall() == [(value,)]


@pytest.mark.parametrize(
    ("column", "rest"),
    [
        # one for each cutoff
        ("COALESCE(EPOCH(MAX(p.t)), EPOCH(o.day))", ""),
        ("EPOCH(o.day) * COUNT(*)", ""),
        ("GREATEST(EPOCH(o.day), MAX(p.x))", ""),
        ("CASE WHEN MAX(p.t) IS NULL THEN EPOCH(o.day) END", ""),
        # and where SQL has none
        ("p.x", " ORDER BY p.t DESC LIMIT 1"),
        ("COUNT(*)", " HAVING COUNT(*) > 1"),
    ],
)
@pytest.mark.parametrize("how", [{"grid": GRID}, {"sealed": True}])
def test_others_have_no_answer_about_no_rows(column, rest, how):
    assert answered_key(lateral(column, rest, **how)) is None


@pytest.mark.parametrize(
    ("condition", "has_answer"),
    [
        ("p.t < o.day", True),
        ("p.t BETWEEN o.day - INTERVAL 1 DAY AND o.day", True),
        ("p.t < date_trunc('month', o.day) AND p.x > 0", True),
        # of a NULL cutoff these take rows
        ("(p.t < o.day OR p.x > 0)", False),
        ("p.t < COALESCE(o.day, p.t + INTERVAL 1 DAY)", False),
        ("(p.t < o.day) IS DISTINCT FROM TRUE", False),
    ],
)
def test_where_the_site_has_all_pairs_the_answer_is_that_of_a_null(
    condition, has_answer
):
    sql = (
        "SELECT o.y AS label, w.n FROM orders o LEFT JOIN LATERAL (SELECT COUNT(*) "
        f"AS n FROM events p WHERE p.k = o.k AND {condition}) w ON TRUE"
    )
    here = [(1, "shop")]
    fragment = bind(sql, orders=here, events=here).fragments[1]
    assert (answered_key(fragment) is not None) == has_answer
    with duckdb.connect() as engine:
        engine.execute("CREATE TABLE rows (k INTEGER, t TIMESTAMP, x DOUBLE)")
        engine.execute("INSERT INTO rows VALUES (1, '2020-01-01', 2)")
        engine.execute(
            'CREATE TABLE cutoffs AS SELECT 1 "(key 0)", CAST(NULL AS DATE) "(cutoff)"'
        )
        ((*_, count),) = engine.execute(fragment.subquery.to_sql("rows")).fetchall()
        assert (count == 0) == has_answer


def test_a_cutoff_beside_the_grid_is_none_that_is_null():
    point = CutoffGrid.parse(GRID).last_point('"day"')
    with duckdb.connect() as engine:
        engine.execute(
            "CREATE TABLE orders AS SELECT * FROM (VALUES (1, DATE '2020-01-02'), "
            "(1, '1999-01-01'), (1, NULL), (NULL, '2020-01-02')) o(k, day)"
        )
        null = null_key_sql(('"k"', point))
        rows = engine.execute(f"SELECT {null}, ({point}) IS NULL FROM orders")
        assert rows.fetchall() == [
            *((False, False), (False, True), (True, True), (True, False))
        ]


def test_answers_that_are_filtered_are_those_of_rows():
    sql = f"SELECT o.y AS label, {FORMS['lateral'].format('COUNT(*)', '')}"
    filtered = bind(f"{sql} WHERE w.n < 3", GRID, **THERE).fragments[1]
    assert filtered.filters
    assert answered_key(filtered) is None


def test_a_value_of_keys_alone_has_an_answer_and_a_sub_query_with_groups_none():
    assert answered_key(lateral("COUNT(*)", form="value")) == 0
    sql = (
        "SELECT o.y AS label, w.n FROM orders o LEFT JOIN (SELECT k, COUNT(*) AS n "
        "FROM events GROUP BY k) w ON w.k = o.k"
    )
    assert answered_key(bind(sql, **THERE).fragments[1]) is None
