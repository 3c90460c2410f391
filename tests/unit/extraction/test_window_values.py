"""The values of windows at a site are DuckDB's, row by row, whatever ties are in time.

Where ties leave open what comes first, the row's number decides in the query that both
run; without it, the site's values depend on the contents of the rows alone.
"""

from collections import Counter
from types import SimpleNamespace

import duckdb
import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st

from tests.support.examples.laws import law
from tests.support.joined import engine_rows, joined_rows, result_names, run
from tests.support.reference.joins import engine_of
from tp_flower.errors import MappingError
from tp_flower.extraction import select_plan
from tp_flower.query import BoundQuery, Query
from tp_flower.sources.shards import ShardSource, load_tables, register_frames, release

SCHEMA = {
    "id": "BIGINT",
    "k": "BIGINT",
    "place": "VARCHAR",
    "moment": "TIMESTAMP",
    "x": "DOUBLE",
    "y": "DOUBLE",
}
START = pd.Timestamp("2024-02-27 18:00")
NUMBERS = st.none() | st.integers(-3, 3)
ROWS = st.lists(
    st.tuples(
        st.none() | st.integers(0, 2),
        st.sampled_from(["a", "b", None]),
        st.none() | st.integers(0, 12),
        NUMBERS,
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=14,
)
PARTITIONS = st.sampled_from(
    ["", "PARTITION BY k", "PARTITION BY place, k", "PARTITION BY k % 2, upper(place)"]
)
TIMES = st.sampled_from(["moment", "CAST(moment AS DATE)", "date_trunc('day', moment)"])
NULLS = st.sampled_from(["", " NULLS FIRST", " NULLS LAST"])
OVER_FRAMES = st.sampled_from(
    [
        *("AVG(x)", "SUM(x)", "MIN(x)", "MAX(x)", "COUNT(*)", "COUNT(x)", "MEDIAN(x)"),
        *("COUNT(DISTINCT x)", "AVG(x) FILTER (WHERE y > 1)", "BOOL_OR(x > 1)"),
        *("QUANTILE_CONT(x, 0.25)", "MAX(place)"),
    ]
)
BOUNDS = ["UNBOUNDED PRECEDING", "3 PRECEDING", "1 PRECEDING", "CURRENT ROW"]
DAYS = [
    "UNBOUNDED PRECEDING",
    "INTERVAL 2 DAY PRECEDING",
    "INTERVAL '1 day 6 hours' PRECEDING",
    "INTERVAL 1 HOUR PRECEDING",
    "CURRENT ROW",
]
VALUES = ["FIRST_VALUE(x)", "LAST_VALUE(x)", "NTH_VALUE(x, 2)", "LAST_VALUE(place)"]
LOOKS_BACK = ["LAG(x)", "LAG(x, 2)", "LAG(place, 1, 'none')", "ROW_NUMBER()"]


@st.composite
def frames_of(draw, kind: str, bounds: list[str]) -> str:
    """A frame that ends where it starts or later, or one bound for both."""
    start = draw(st.integers(0, len(bounds) - 1))
    end = draw(st.integers(max(start, 1), len(bounds) - 1))
    if draw(st.booleans()) and start < len(bounds) - 1:
        return f"{kind} {bounds[start]}"
    return f"{kind} BETWEEN {bounds[start]} AND {bounds[end]}"


@st.composite
def windows(draw) -> str:
    """A window whose value DuckDB defines: with ties by id where they matter."""
    partition = draw(PARTITIONS)
    order = f"ORDER BY {draw(TIMES)}{draw(NULLS)}"
    kind = draw(st.sampled_from(["rows", "range", "default", "values", "back", "rank"]))
    if kind == "rows":
        call = draw(OVER_FRAMES)
        order += f", id {draw(frames_of('ROWS', BOUNDS))}"
    elif kind == "range":
        call = draw(OVER_FRAMES)
        order += f" {draw(frames_of('RANGE', DAYS))}"
    elif kind == "default":
        call = draw(OVER_FRAMES)
    elif kind == "values":
        call = draw(st.sampled_from(VALUES))
        order += f", id {draw(frames_of('ROWS', BOUNDS))}"
    elif kind == "back":
        call = draw(st.sampled_from(LOOKS_BACK))
        order += ", id"
    else:
        call = draw(st.sampled_from(["RANK()", "DENSE_RANK()"]))
    return f"{call} OVER ({partition} {order})"


@st.composite
def queries(draw) -> str:
    """A query over windows: computed with, filtered before, after, and by QUALIFY."""
    over = draw(st.lists(windows(), min_size=1, max_size=3))
    items = ", ".join(f"{window} AS w{n}" for n, window in enumerate(over))
    where = draw(st.sampled_from(["", " WHERE x > 0", " WHERE moment IS NOT NULL"]))
    qualify = draw(
        st.sampled_from(["", "", f" QUALIFY w0 IS NOT NULL OR {over[-1]} IS NULL"])
    )
    outer = draw(st.sampled_from(["", "", " WHERE r.w0 IS NOT NULL AND r.y > 0"]))
    names = ", ".join(f"r.w{n}" for n in range(len(over)))
    return (
        f"SELECT r.y AS label, r.id, {names} FROM "
        f"(SELECT *, {items} FROM t{where}{qualify}) r{outer}"
    )


def table(rows) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["k", "place", "moment", "x", "y"])
    hours = frame["moment"].astype("Float64") * 9
    frame["moment"] = START + pd.to_timedelta(hours.astype(float), unit="h")
    frame["id"] = np.arange(len(frame))
    types = {"k": "Int64", "x": "Float64", "y": "Float64", "place": "string"}
    return frame.astype(types)


def bind(sql: str) -> BoundQuery:
    bound = Query.from_sql(sql).bind({"t": SCHEMA})
    for fragment in bound.fragments:
        assert fragment.check(tuple(SCHEMA)) == fragment
        assert type(fragment).from_json(fragment.to_json()) == fragment
    canonical = Query.from_sql(bound.sql)
    assert canonical.to_sql() == bound.sql
    assert canonical.bind({"t": SCHEMA}) == bound
    return bound


def site_rows(bound: BoundQuery, frame: pd.DataFrame) -> Counter:
    """What the site's fragment yields, as joined rows; none without any."""
    token = register_frames({"t": frame}, site="here")
    try:
        (source,) = load_tables(f"memory:{token}")
        return joined_rows(bound, {"t": [source]})
    except MappingError as error:
        if "the join has no rows" not in str(error):
            raise
        return Counter()
    finally:
        release(token)


@law(80, 300, sql=queries(), rows=ROWS)
def test_windows_are_those_of_duckdb(sql, rows):
    frame = table(rows)
    bound = bind(sql)
    with engine_of({"t": frame}) as connection:
        expected = engine_rows(connection, sql, result_names(bound))
    assert site_rows(bound, frame) == expected


TEXT = "coalesce(strlen(CAST({0} AS VARCHAR)) || ':' || CAST({0} AS VARCHAR), 'null')"
TIED = """SELECT r.y AS label, r.id, r.x, r.n, r.before, r.mean, r.first FROM (
    SELECT *, ROW_NUMBER() OVER w AS n, LAG(x) OVER w AS before,
        AVG(x) OVER (w ROWS 2 PRECEDING) AS mean,
        FIRST_VALUE(place) OVER (w ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) AS first
    FROM t WINDOW w AS (PARTITION BY k ORDER BY moment)) r"""


@law(20, 60, rows=ROWS, seed=st.integers(0, 9))
def test_rows_that_tie_come_in_an_order_of_their_contents(rows, seed):
    """In any order of the table, each row has the same values."""
    frame = table(rows)
    shuffled = frame.sample(frac=1.0, random_state=seed).reset_index(drop=True)
    bound = bind(TIED)
    assert site_rows(bound, shuffled) == site_rows(bound, frame)


def test_ties_are_broken_by_what_windows_read_then_by_all_else():
    """As it stands in the docstring, written out."""
    digests = ", ".join(
        f"md5_number({' || '.join(map(TEXT.format, names))})"
        for names in (("k", "moment", "x"), ("id", "y"))
    )
    sql = """SELECT r.y AS label, r.id, r.n, r.before FROM (SELECT *,
        ROW_NUMBER() OVER (PARTITION BY k ORDER BY moment{0}) AS n,
        LAG(x) OVER (PARTITION BY k ORDER BY moment{0}) AS before FROM t) r"""
    rng = np.random.default_rng(5)
    columns = rng.integers(0, 3, (200, 4)).tolist()
    frame = table([(k, "a", t, x, y) for k, t, x, y in columns])
    bound = bind(sql.format(""))
    with engine_of({"t": frame}) as connection:
        written_out = sql.format(f", {digests}")
        expected = engine_rows(connection, written_out, result_names(bound))
    assert site_rows(bound, frame) == expected


def test_no_window_depends_on_threads():
    """Many rows tie, in partitions of any size."""
    (fragment,) = bind(TIED).fragments
    opened = SimpleNamespace(fragment=fragment)
    relation, _ = select_plan._relation(ShardSource("t", "here", 0), opened)
    answers = []
    for threads in (1, 8):
        with duckdb.connect(config={"threads": threads}) as connection:
            connection.execute(
                "CREATE VIEW shard AS SELECT i AS id, (i * i) % 37 AS k, "
                "'p' || i % 3 AS place, DATE '2024-01-01' + CAST(hash(i) % 5 AS INT) "
                "AS moment, i % 4 AS x, i AS y FROM range(60000) s(i)"
            )
            answers.append(connection.sql(f"FROM {relation} ORDER BY id").fetchall())
    assert answers[0] == answers[1]


def test_only_the_columns_that_the_query_uses_are_kept():
    """The rest of a star need not be there when the model predicts."""
    sql = """SELECT r.y AS label, r.before FROM (SELECT *, LAG(x) OVER (PARTITION BY k
        ORDER BY moment) AS before, RANK() OVER (ORDER BY moment) AS place_ FROM t) r"""
    (fragment,) = bind(sql).fragments
    assert fragment.subquery.names == ("y", "before")
    without = Query.from_sql(sql.replace("r.before", "r.x")).bind({"t": SCHEMA})
    assert without.fragments[0].subquery is None


@pytest.mark.parametrize("kind", ["MIN", "DESC"])
def test_the_latest_row_of_each_key(kind):
    """The usual idioms: QUALIFY, or a filter of the number outside."""
    frame = table([(k, "a", t, t - 3, 1) for k in range(3) for t in (5, 9, 2, 7)])
    number = "ROW_NUMBER() OVER (PARTITION BY k ORDER BY moment DESC)"
    sql = f"SELECT r.y AS label, r.id, r.x FROM (SELECT *, {number} AS n FROM t) r "
    sql += "WHERE r.n = 1"
    if kind == "MIN":
        sql = f"""SELECT r.y AS label, r.id, r.x FROM
            (SELECT * FROM t QUALIFY {number} = 1) r"""
    rows = site_rows(bind(sql), frame)
    assert sorted(dict(row)["id"] for row in rows) == [1, 5, 9]


def test_a_fragment_with_windows_and_no_row():
    (fragment,) = bind(TIED.replace("WINDOW", "WHERE x > 99 WINDOW")).fragments
    assert run(table([(1, "a", 1, 1, 1)]), fragment).rows == 0
