"""LATERAL sub-queries, ASOF joins and values: rows of a table up to a cutoff.

What sites run, joined, is DuckDB's answer to the very SQL.
"""

import datetime
import functools
from collections import Counter

import duckdb
import pandas as pd
import pytest
from hypothesis import example
from hypothesis import strategies as st

from tests.support.examples.laws import law
from tests.support.files import case_table
from tests.support.joined import engine_rows, joined_rows, result_names
from tp_flower.errors import MappingError, QueryError
from tp_flower.query import Fragment, Query
from tp_flower.query.cutoffs import CutoffGrid
from tp_flower.query.lateral_tables import correlation_of
from tp_flower.query.reads import reads
from tp_flower.query.scope import TableSchema
from tp_flower.sources.shards import load_tables, register_frames, release

CASES = case_table(__file__)
FIRST = datetime.datetime(2020, 1, 1)
HOURS = st.none() | st.integers(0, 12).map(
    lambda i: FIRST + datetime.timedelta(hours=8 * i)
)
KEYS = st.none() | st.integers(0, 2)
NUMBERS = st.none() | st.integers(-2, 2)
ORDERS = st.lists(st.tuples(KEYS, HOURS, NUMBERS), min_size=1, max_size=5)
EVENTS = st.lists(
    st.tuples(KEYS, HOURS, NUMBERS, st.sampled_from("ab")), min_size=1, max_size=8
)
GRID = "36 hours from 2020-01-01 to 2020-01-06"
UPPER = ["p.t < o.day", "p.t <= o.day", "o.day > p.t", "p.t <= o.day - INTERVAL 8 HOUR"]
LOWER = ["", "p.t >= o.day - INTERVAL 1 DAY", "p.t > o.day - INTERVAL 2 DAY"]
OWN = ["", "p.kind = 'a'", "p.x IS NOT NULL", "kind <> 'b'"]
COLUMNS = [
    "COUNT(*) AS n",
    "SUM(p.x) AS total",
    "AVG(x) AS mean",
    "EPOCH(MAX(p.t)) AS latest",
    "MIN(EPOCH(o.day) - EPOCH(p.t)) AS ago",
    "EPOCH(o.day) - EPOCH(MAX(p.t)) AS since",
    "COUNT(*) FILTER (WHERE p.kind = 'a' AND p.t < o.day - INTERVAL 1 DAY) AS old",
]


@st.composite
def windows(draw):
    """The WHERE of a sub-query, with or without a key, in any order."""
    parts = [draw(st.sampled_from(UPPER)), draw(st.sampled_from(LOWER))]
    parts += [draw(st.sampled_from(OWN)), draw(st.sampled_from(["", "p.k = o.k"]))]
    return " AND ".join(filter(None, draw(st.permutations(parts))))


@functools.cache
def shared_engine():
    engine = duckdb.connect()
    engine.execute("SET TimeZone = 'UTC'")
    return engine


def tables_of(orders, events, types):
    kinds = {
        "k": "INTEGER",
        "t": types[1],
        "day": types[0],
        "x": "DOUBLE",
        "y": "DOUBLE",
    }
    frames = {
        "orders": pd.DataFrame(orders, columns=["k", "day", "y"]),
        "events": pd.DataFrame(events, columns=["k", "t", "x", "kind"]),
    }
    engine = shared_engine()
    for name, frame in frames.items():
        engine.register(f"raw_{name}", frame.astype(object))
        columns = ", ".join(
            f"CAST({column} AS {kinds.get(column, 'VARCHAR')}) AS {column}"
            for column in frame
        )
        engine.execute(
            f"CREATE OR REPLACE TABLE {name} AS SELECT {columns} FROM raw_{name}"
        )
    return engine


def answers(sql, engine, grid="", *, sealed=False):
    """What sites run, joined; and the query that they bound."""
    schemas = {
        name: {c: kind for c, kind, *_ in engine.execute(f"DESCRIBE {name}").fetchall()}
        for name in ("orders", "events")
    }
    query = Query.from_sql(sql).on_grid(grid).sealing_cutoffs(is_set=sealed)
    bound = query.bind(schemas)
    for fragment in bound.fragments:
        assert fragment.check(schemas[fragment.name]) == fragment
        assert Fragment.from_json(fragment.to_json()) == fragment
    frames = {name: engine.sql(f"FROM {name}").to_arrow_table() for name in schemas}
    token = register_frames(frames, site="here")
    try:
        sources = {source.table: [source] for source in load_tables(f"memory:{token}")}
        return joined_rows(bound, sources), bound
    except MappingError as error:
        if "the join has no rows" not in str(error):
            raise
        return Counter(), bound
    finally:
        release(token)


TYPES = st.tuples(*[st.sampled_from(["DATE", "TIMESTAMP", "TIMESTAMPTZ"])] * 2)
DRAWN = {"orders": ORDERS, "events": EVENTS, "types": TYPES}
ASKED = st.lists(st.sampled_from(COLUMNS), min_size=1, unique=True)


AT_NOON = [(0, FIRST + datetime.timedelta(hours=12), 1)]
TIED = [(0, FIRST, x, kind) for x in (1, 2) for kind in "ab"]


def looking_back(columns, where):
    """The names of a sub-query's columns, and the query before and after these."""
    names = [column.split(" AS ")[1] for column in columns]
    head = "SELECT o.y AS label, EPOCH(o.day) AS day, "
    tail = (
        " FROM orders o LEFT JOIN LATERAL "
        f"(SELECT {', '.join(columns)} FROM events p WHERE {where}) w ON TRUE"
    )
    return names, head, tail


@law(15, 50, **DRAWN, where=windows(), columns=ASKED)
def test_aggregates_before_a_cutoff_are_those_of_duckdb(
    orders, events, types, where, columns
):
    engine = tables_of(orders, events, types)
    names, head, tail = looking_back(columns, where)
    sql = head + ", ".join(f"w.{n}" for n in names) + tail
    found, bound = answers(sql, engine)
    assert found == engine_rows(engine, sql, result_names(bound))


@law(15, 50, **DRAWN, where=windows(), column=st.sampled_from(COLUMNS[:4]))
def test_a_value_of_the_select_list_is_that_of_duckdb(
    orders, events, types, where, column
):
    engine = tables_of(orders, events, types)
    value = column.split(" AS ")[0]
    head = "SELECT o.y AS label, EPOCH(o.day) AS day, "
    part = f"(SELECT {value} FROM events p WHERE {where})"
    sql = f"{head} 1 + {part} AS v FROM orders o"
    found, bound = answers(sql, engine)
    assert found == engine_rows(engine, sql, result_names(bound))


@law(15, 50, **DRAWN, where=windows(), kind=st.sampled_from(["JOIN", "LEFT JOIN"]))
@example(AT_NOON, TIED, ("TIMESTAMP", "TIMESTAMP"), "p.t < o.day", "JOIN")
@example(AT_NOON, TIED[::-1], ("TIMESTAMP", "TIMESTAMP"), "p.t < o.day", "JOIN")
def test_the_last_row_is_that_of_duckdb(orders, events, types, where, kind):
    """Of rows at one time the last is that of the greatest values, in DESC order."""
    engine = tables_of(orders, events, types)
    sql = (
        "SELECT o.y AS label, EPOCH(o.day) AS day, w.x, w.kind, w.at FROM orders o "
        f"{kind} LATERAL (SELECT x, kind, EPOCH(t) AS at FROM events p WHERE {where} "
        "ORDER BY p.t DESC LIMIT 1) w ON TRUE"
    )
    found, bound = answers(sql, engine)
    ordered = sql.replace("p.t DESC", "p.t DESC, p.x DESC, p.kind DESC")
    assert found == engine_rows(engine, ordered, result_names(bound))


@pytest.mark.parametrize("kind", ["JOIN", "LEFT JOIN", "CROSS JOIN"])
@pytest.mark.parametrize("cutoff", [" AND p.t < o.day", ""])
def test_having_leaves_out_rows_of_an_inner_join(kind, cutoff):
    rows = [(n % 2, FIRST + datetime.timedelta(days=n), n, "a") for n in range(9)]
    engine = tables_of([(n % 3, rows[n][1], n) for n in range(9)], rows, ["DATE"] * 2)
    sql = (
        f"SELECT o.y AS label, w.n FROM orders o {kind} LATERAL (SELECT COUNT(*) AS n "
        f"FROM events p WHERE p.k = o.k{cutoff} HAVING COUNT(*) >= 2) w"
    )
    sql += " ON TRUE" if kind != "CROSS JOIN" else ""
    found, bound = answers(sql, engine)
    assert found == engine_rows(engine, sql, result_names(bound))


@pytest.mark.parametrize("by", ["p.x DESC, p.t", "p.x + 1 DESC, EPOCH(p.t)"])
def test_the_last_row_is_by_columns_whatever_the_items_are_called(by):
    rows = [
        (1, FIRST + datetime.timedelta(days=n), n % 3, "ab"[n % 2]) for n in range(9)
    ]
    engine = tables_of([(1, rows[n][1], n) for n in range(9)], rows, ["DATE", "DATE"])
    sql = (
        "SELECT o.y AS label, w.t, w.kind FROM orders o LEFT JOIN LATERAL "
        "(SELECT -p.x AS t, EPOCH(p.t) AS x, -EPOCH(p.t) AS kind FROM events p "
        f"WHERE p.k = o.k AND p.t < o.day ORDER BY {by} DESC LIMIT 1) w ON TRUE"
    )
    found, bound = answers(sql, engine)
    assert found == engine_rows(engine, sql, result_names(bound))
    # an engine takes a bare name for the item's
    with pytest.raises(QueryError, match=r"write p\.t for the column"):
        answers(
            sql.replace("p.t DESC", "t DESC").replace("(p.t) DESC", "(t) DESC"), engine
        )


def test_cutoffs_of_different_types_are_refused():
    engine = tables_of([(1, FIRST, 1)], [(1, FIRST, 1, "a")], ["DATE", "DATE"])
    parts = "(SELECT k, day, y FROM orders UNION ALL SELECT k, {}, y FROM orders) o"
    sql = COUNT.replace("orders o", parts)
    sql = sql.format("CAST(day AS TIMESTAMP)")
    with pytest.raises(QueryError, match="CAST them to one type in each SELECT"):
        answers(sql, engine)
    answers(sql.replace("k, day", "k, CAST(day AS TIMESTAMP) AS day"), engine)


@law(
    15,
    50,
    **DRAWN,
    side=st.sampled_from(["", "LEFT "]),
    sign=st.sampled_from(["<", "<="]),
)
def test_an_asof_join_is_that_of_duckdb(orders, events, types, side, sign):
    # DuckDB chooses among rows of one time
    unique = {(k, str(t)[:10]): row for row in events for k, t, *_ in [row]}
    engine = tables_of(orders, list(unique.values()), types)
    sql = (
        "SELECT o.y AS label, EPOCH(o.day) AS day, p.x, p.kind FROM orders o ASOF "
        f"{side}JOIN events p ON p.k = o.k AND p.t {sign} o.day"
    )
    found, bound = answers(sql, engine)
    assert found == engine_rows(engine, sql, result_names(bound))


@law(15, 50, **DRAWN, where=windows(), columns=ASKED)
def test_with_a_grid_the_cutoff_is_its_last_point(
    orders, events, types, where, columns
):
    engine = tables_of(orders, events, types)
    names = [column.split(" AS ")[1] for column in columns]
    lateral = "LEFT JOIN LATERAL (SELECT {} FROM events p WHERE {}) w ON TRUE"
    head = "SELECT o.y AS label, EPOCH(o.day) AS day, "
    sql = f"{head} {', '.join(f'w.{n}' for n in names)} FROM orders o "
    found, bound = answers(
        sql + lateral.format(", ".join(columns), where), engine, GRID
    )
    # every cutoff at the start of its 36 hours
    at = "DATE" if types[0] == "DATE" else "TIMESTAMP"
    start = (
        f"CAST(TIME_BUCKET(INTERVAL 36 HOUR, CAST(day AS TIMESTAMP), "
        f"TIMESTAMP '2020-01-01') AS {at})"
    )
    rows = f"(SELECT *, day AS own_day, {start} AS point FROM orders)"
    moved = lateral.format(", ".join(columns), where).replace("o.day", "o.point")
    values = ", ".join(f"w.{n}" for n in names)
    expected = f"{head} {values} FROM {rows} o {moved}"
    assert found == engine_rows(engine, expected, result_names(bound))


@law(10, 20, **DRAWN, where=windows(), columns=ASKED)
def test_sealed_cutoffs_are_answered_as_at_one_site(
    orders, events, types, where, columns
):
    engine = tables_of(orders, events, types)
    names, head, tail = looking_back(columns, where)
    sql = head + ", ".join(f"w.{n}" for n in names) + tail
    found, bound = answers(sql, engine, sealed=True)
    assert bound.fragments[1].subquery.cutoffs.sealed
    assert found == engine_rows(engine, sql, result_names(bound))


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("keys", ["k kind", "kind k"])
def test_several_keys_are_compared_in_any_order(keys, sealed):
    """The names of the other table's columns sort in one order only."""
    rows = [
        (n % 2, FIRST + datetime.timedelta(days=n), n, "ab"[n % 3 > 0])
        for n in range(9)
    ]
    engine = tables_of(
        [(n % 3, rows[n][1], n % 4) for n in range(9)], rows, ["DATE"] * 2
    )
    pairs = {
        "k": "p.k = o.k",
        "kind": "p.kind = CASE WHEN o.y > 1 THEN 'b' ELSE 'a' END",
    }
    where = " AND ".join(pairs[name] for name in keys.split())
    sql = (
        "SELECT o.y AS label, EPOCH(o.day) AS day, w.n FROM orders o LEFT JOIN LATERAL "
        f"(SELECT COUNT(*) AS n FROM events p WHERE {where} AND p.t < o.day HAVING "
        "COUNT(*) > 0) w ON TRUE"
    )
    found, bound = answers(sql, engine, sealed=sealed)
    assert found == engine_rows(engine, sql, result_names(bound))


def test_on_the_points_of_a_grid_sealed_cutoffs_see_what_the_grid_does():
    """But for empty windows, which the grid has not."""
    hours = [36 * n for n in range(4)]
    orders = [
        (n % 3, FIRST + datetime.timedelta(hours=h), n) for n, h in enumerate(hours)
    ]
    rows = [(n % 2, FIRST + datetime.timedelta(hours=9 * n), n, "a") for n in range(9)]
    engine = tables_of(orders, rows, ["TIMESTAMP"] * 2)
    sql = COUNT.replace(") w ON", " HAVING COUNT(*) > 0) w ON")
    found, _ = answers(sql, engine, sealed=True)
    assert found == answers(sql, engine, GRID)[0]
    assert found == answers(sql, engine)[0]


KEY_KINDS = {
    "uuid": "CAST('00000000-0000-0000-0000-00000000000' || {}.k AS UUID)",
    "boolean": "({}.k > 1)",
    "date": "CAST(DATE '2020-01-01' + CAST({}.k AS INTEGER) AS DATE)",
    "hugeint": "CAST(9007199254740993 AS HUGEINT) + CAST({}.k AS HUGEINT)",
    "decimal": "CAST({}.k AS DECIMAL(38, 9)) / 8",
    "text": "CAST({}.k AS VARCHAR)",
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [*((kind, " AND p.kind = o.kind") for kind in KEY_KINDS), ("uuid", "")],
)
def test_keys_of_every_kind_beside_others(kind, more):
    """Another key comes before it in the order of their names."""
    rows = [
        (n % 4, FIRST + datetime.timedelta(days=n), n, "ab"[n % 2]) for n in range(19)
    ]
    engine = tables_of([(n, rows[3 * n][1], n) for n in range(6)], rows, ["DATE"] * 2)
    for table in ("orders", "events"):
        engine.execute(
            f"CREATE OR REPLACE TABLE {table} AS SELECT * EXCLUDE (kind), "
            "chr(CAST(97 + k % 2 AS INTEGER)) AS kind "
            f"FROM (SELECT *, '' AS kind FROM {table})"
        )
    where = f"{KEY_KINDS[kind].format('p')} = {KEY_KINDS[kind].format('o')}{more}"
    head = "SELECT o.y AS label, w.n, w.total FROM orders o LEFT JOIN LATERAL (SELECT"
    sql = (
        f"{head} COUNT(*) AS n, SUM(p.x) AS total FROM events p WHERE {where} "
        "AND p.t < o.day HAVING COUNT(*) > 0) w ON TRUE"
    )
    for how in ({}, {"grid": "1 day from 2020-01-01 to 2020-02-01"}, {"sealed": True}):
        found, bound = answers(sql, engine, **how)
        assert found == engine_rows(engine, sql, result_names(bound))


@pytest.mark.parametrize("last", [False, True])
def test_two_forms_of_a_text_are_one_key(last):
    """As in every join: the answer is DuckDB's to texts of one form."""
    rows = [(n % 3, FIRST + datetime.timedelta(days=n), n, "a") for n in range(19)]
    engine = tables_of([(n % 3, rows[6][1], n) for n in range(6)], rows, ["DATE"] * 2)
    form = "CASE k WHEN 0 THEN chr(233) WHEN 1 THEN 'e' || chr(769) ELSE 'x' END"
    normal = {}
    for table in ("orders", "events"):
        engine.execute(f"ALTER TABLE {table} ALTER k TYPE VARCHAR USING {form}")
        normal[table] = f"(SELECT * REPLACE (nfc_normalize(k) AS k) FROM {table})"
    where = "FROM events p WHERE p.k = o.k AND p.t < o.day"
    inner = f"COUNT(*) AS n {where} HAVING COUNT(*) > 0"
    if last:
        inner = f"x AS n {where} ORDER BY p.t DESC LIMIT 1"
    sql = f"SELECT o.y AS label, w.n FROM orders o LEFT JOIN LATERAL (SELECT {inner}) w"
    one_form = sql.replace("orders o", f"{normal['orders']} o")
    one_form = one_form.replace("events p", f"{normal['events']} p")
    for how in ({}, {"grid": "1 day from 2020-01-01 to 2020-02-01"}, {"sealed": True}):
        found, bound = answers(f"{sql} ON TRUE", engine, **how)
        expected = engine_rows(engine, f"{one_form} ON TRUE", result_names(bound))
        assert found == expected


@pytest.mark.parametrize("step", ["8 hours", "1 day"])
def test_a_grid_of_hours_has_a_date_once(step):
    rows = [(1, FIRST + datetime.timedelta(hours=9 * n), n, "a") for n in range(9)]
    orders = [(1, FIRST + datetime.timedelta(days=n), n) for n in range(4)]
    engine = tables_of(orders, rows, ["DATE", "TIMESTAMP"])
    sql = COUNT.replace(") w ON", " HAVING COUNT(*) > 0) w ON")
    found, bound = answers(sql, engine, f"{step} from 2020-01-01 to 2020-01-06")
    assert found == engine_rows(engine, sql, result_names(bound))


ORDERS_TYPES = {"k": "INTEGER", "day": "DATE", "y": "DOUBLE", "name": "VARCHAR"}
SCHEMAS = {
    "orders": ORDERS_TYPES,
    "more": ORDERS_TYPES,
    "events": {"k": "INTEGER", "t": "TIMESTAMP", "x": "DOUBLE", "kind": "VARCHAR"},
}


def bind(sql, grid="", *, sealed=False, **places):
    schemas = {}
    for name, columns in SCHEMAS.items():
        schemas[name] = TableSchema(columns)
        if name in places:
            schemas[name].places = frozenset(places[name])
    query = Query.from_sql(sql).on_grid(grid).sealing_cutoffs(is_set=sealed)
    return query.bind(schemas)


@pytest.mark.parametrize(("sql", "match"), CASES["refused"])
def test_refusal(sql, match):
    with pytest.raises(QueryError, match=match):
        bind(f"SELECT o.y AS label, {sql}")


@pytest.mark.parametrize(("sql", "canonical"), CASES["canonical"])
def test_every_form_is_written_as_one(sql, canonical):
    query = Query.from_sql(f"SELECT o.y AS label, {sql}")
    assert query.to_sql() == f"SELECT o.y AS label, {canonical}"
    assert Query.from_sql(query.to_sql()) == query


COUNT = (
    "SELECT o.y AS label, w.n FROM orders o LEFT JOIN LATERAL (SELECT COUNT(*) AS n "
    "FROM events p WHERE p.k = o.k AND p.t < o.day) w ON TRUE"
)
HERE = (1, "shop")
THERE = (2, "bank")


@pytest.mark.parametrize(
    ("orders", "events", "is_grid"),
    [
        ([HERE], [HERE], False),
        ([HERE], [THERE], True),
        ([HERE, THERE], [HERE], True),
        ([HERE], [HERE, THERE], True),
        # two organisations of one node of a simulation
        ([HERE], [(1, "bank")], True),
    ],
)
def test_cutoffs_are_those_of_rows_where_one_site_has_all(orders, events, is_grid):
    bound = bind(COUNT, GRID, orders=orders, events=events)
    cutoffs = bound.fragments[1].subquery.cutoffs
    assert (cutoffs.grid is not None) == is_grid
    assert cutoffs.table == ("" if is_grid else "o")
    if is_grid:
        with pytest.raises(QueryError, match=r"cutoff-grid .* sealed-cutoffs = true"):
            bind(COUNT, orders=orders, events=events)
    sealed = bind(COUNT, sealed=True, orders=orders, events=events).fragments[1]
    assert (sealed.subquery.cutoffs.table, sealed.subquery.cutoffs.grid) == ("o", None)
    assert sealed.subquery.cutoffs.sealed == is_grid


@pytest.mark.parametrize("column", ["y", "name"])
def test_cutoffs_that_are_sealed_are_whole_numbers(column):
    sql = COUNT.replace("p.t < o.day", f"p.t::VARCHAR < o.{column}")
    with pytest.raises(
        QueryError, match=r"takes a DATE, a TIMESTAMP or a whole number"
    ) as refused:
        bind(sql, sealed=True)
    advice = 'give it a type in the tables file, types = { "name" = "DATE" }'
    assert str(refused.value).endswith(advice) == (column == "name")


@pytest.mark.parametrize(("condition", "looks_back"), CASES["bounds"])
def test_what_bounds_a_sub_query_by_its_cutoff(condition, looks_back):
    sql = COUNT.replace("p.t < o.day", f"{condition} AND p.t > o.day - INTERVAL 9 DAY")
    (_, table) = Query.from_sql(sql).statement.tables
    assert correlation_of(table).looks_back == looks_back


def test_what_a_lateral_sub_query_reads_is_said_of_its_table_alone():
    _, own = bind(COUNT).fragments
    found = {(str(read.role), read.column) for read in reads(own)}
    assert found == {("filter", "t"), ("group", "k"), ("join key", "k")}


def key_reads(key):
    fragment = Fragment("o", "orders", keys=((key,),)).check(["day", "other"])
    return {(str(r.role), r.column, r.is_plain, r.is_bare) for r in reads(fragment)}


@pytest.mark.parametrize("step", ["1 month", "36 hours", "2 years"])
def test_a_grids_last_point_is_its_column_and_a_condition_on_it(step):
    grid = CutoffGrid.parse(f"{step} from 2015-01-01 to 2020-12-31")
    whole = {("join key", "day", True, True), ("filter", "day", False, False)}
    assert key_reads(f"({grid.last_point('day')})") == whole
    point = grid.last_point('"day"')
    for other in (
        point.replace(">=", ">", 1),
        point.replace("2015-01-01", "2016-01-01", 1),
        point.replace("THEN", "AND day IS NOT NULL THEN", 1),
        f"CASE WHEN other > 3 THEN {point} END",
        f"{point} + INTERVAL 1 DAY",
        grid.last_point("day + INTERVAL 1 DAY"),
        grid.last_point("day").replace("day", "other", 1),
    ):
        assert {is_plain for _, _, is_plain, _ in key_reads(other)} == {False}


@pytest.mark.parametrize(("changes", "match"), CASES["malformed"])
def test_a_fragment_from_the_wire_is_checked(changes, match):
    fragment = bind(COUNT).fragments[1].to_json()
    fragment["subquery"] |= changes
    with pytest.raises(QueryError, match=match):
        Fragment.from_json(fragment).check(SCHEMAS["events"])


def test_a_table_with_a_column_of_a_reserved_name_is_refused():
    with pytest.raises(
        QueryError, match=r"its column '\(cutoff\)' has a cutoff's name"
    ):
        bind(COUNT).fragments[1].check([*SCHEMAS["events"], "(cutoff)"])


@pytest.mark.parametrize(("text", "match"), CASES["grids"])
def test_a_grid_is_a_step_and_two_days(text, match):
    with pytest.raises(QueryError, match=match):
        CutoffGrid.parse(text)


@pytest.mark.parametrize(
    "step", ["1 hour", "36 hours", "30 days", "2 weeks", "5 months", "2 years"]
)
def test_the_last_point_is_the_greatest_at_or_before_a_time(step):
    grid = CutoffGrid.parse(f"{step} from 2019-03-01 to 2024-01-31")
    (points,) = zip(*duckdb.execute(grid.points()).fetchall(), strict=True)
    times = [FIRST + datetime.timedelta(hours=h) for h in range(-9000, 35_064, 311)]
    for time in (*times, points[0], points[-1]):
        found = duckdb.execute(
            f"SELECT {grid.last_point('t')} FROM (SELECT ? AS t)", [time]
        )
        earlier = [point for point in points if point <= time]
        # beyond the last point there is one more step
        if time < points[-1] or time == points[-1]:
            assert found.fetchall() == [(max(earlier, default=None),)]
