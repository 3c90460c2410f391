"""Which sub-queries have one answer about no rows, and what it is."""

import duckdb
import pytest

from tp_flower.extraction.empty_answers import answered_key, empty_answer_sql
from tp_flower.query import Query
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


def test_where_the_site_has_all_pairs_each_has_its_answer():
    sql = f"SELECT o.y AS label, {FORMS['lateral'].format('COUNT(*)', '')}"
    here = [(1, "shop")]
    assert answered_key(bind(sql, orders=here, events=here).fragments[1]) is None


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
