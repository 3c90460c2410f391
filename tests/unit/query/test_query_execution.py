"""The obvious check of push-down on random queries: fragments joined are the query.

The original SQL runs in DuckDB. Against it, each fragment runs alone on its table, and
the rows are joined by a nested loop over the bound query's keys. Named queries, run
through extraction and mapping, are in :mod:`tests.unit.query.test_sql_pairs`.
"""

import itertools
import re

import duckdb
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_flower.errors import QueryError
from tp_flower.query import BoundQuery, Query
from tp_flower.query.fragment import Fragment

CONDITIONS = ["{0}.x = {1}.x", "{1}.y = {0}.x", "{0}.y = {1}.y", "{0}.x + 1 = {1}.y"]
FILTERS = [
    "{0}.x > 0",
    "({0}.x = 1 OR {0}.y IS NULL)",
    "NOT {0}.y = 2",
    "{0}.x < 2",
    "{0}.y IS NOT NULL",
    "COALESCE({0}.x, 1) = 1",
]
TABLES = [
    "t",
    "u",
    "(SELECT x, COUNT(*) AS y FROM t GROUP BY x)",
    "(SELECT y AS x, MAX(x) - 1 AS y FROM u WHERE x > 0 GROUP BY 1 HAVING MAX(x) < 2)",
    "(SELECT x, SUM(y) AS y FROM u GROUP BY ALL HAVING y < 3)",
    "(SELECT DISTINCT y, x FROM t)",
    "(SELECT x + 1 AS x, CASE WHEN y = 1 THEN x ELSE y END AS y FROM u)",
    "(SELECT 1 AS x, y FROM t WHERE x = 1 OR y = 1)",
    "(SELECT * FROM t UNION ALL SELECT y, x + 1 FROM u WHERE y < 2)",
]
# The only reasons for which a query made below is refused.
REFUSALS = re.compile(
    r"also keeps rows without a match|compares a\d and a\d|is not NULL there"
    r"|which that join does not compare|has no equality condition"
    r"|is not connected to"
)
SCHEMAS = {name: {"x": "INTEGER", "y": "INTEGER"} for name in "tu"}


def run_fragment(connection, fragment: Fragment) -> list[tuple[dict, list[tuple]]]:
    """Per row of the table: its named values, and its keys."""
    names = [feature.name for feature in fragment.features]
    pieces = [feature.sql for feature in fragment.features]
    if fragment.label is not None:
        names, pieces = [*names, "label"], [*pieces, fragment.label]
    keys = [part for key in fragment.keys for part in key]
    where = " AND ".join(fragment.filters) or "true"
    relation = fragment.name
    if fragment.subquery is not None:
        relation = f"({fragment.subquery.to_sql(fragment.name)})"
    sql = f"SELECT {', '.join([*pieces, *keys, '1'])} FROM {relation} WHERE {where}"
    rows = []
    for row in connection.execute(sql).fetchall():
        parts = iter(row[len(pieces) :])
        values = dict(zip([n.lower() for n in names], row, strict=False))
        rows.append(
            (values, [tuple(itertools.islice(parts, len(k))) for k in fragment.keys])
        )
    return rows


def naive_join(connection, bound: BoundQuery) -> list[dict]:
    """Add one table after the other, trying every row; LEFT JOINed tables come last."""
    order = sorted(bound.tables, key=lambda table: table in bound.outer)
    joined: list[dict] = [{}]
    for table in order:
        fragments = bound.fragments_of(table)
        rows = [row for f in fragments for row in run_fragment(connection, f)]
        nothing = (dict.fromkeys(map(str.lower, value_names(fragments[0]))), None)
        longer = []
        for before in joined:
            matches = [row for row in rows if fits(bound, before, table, row)]
            if not matches and table in bound.outer:
                matches = [nothing]
            longer += [{**before, table: row} for row in matches]
        joined = longer
    return [
        {k: v for row in rows.values() for k, v in row[0].items()} for rows in joined
    ]


def value_names(fragment: Fragment) -> list[str]:
    return [feature.name for feature in fragment.features]


def fits(bound: BoundQuery, before: dict, table: str, row: tuple) -> bool:
    """Whether a row has equal keys, none of them NULL, with the tables before it."""
    rows = {**before, table: row}
    for join in bound.joins:
        if table in (join.left, join.right) and {join.left, join.right} <= rows.keys():
            left, right = rows[join.left][1], rows[join.right][1]
            if left is None or right is None:
                return False
            one, other = left[join.left_key], right[join.right_key]
            if one != other or None in one:
                return False
    return True


def run_original(connection, sql: str) -> list[dict]:
    cursor = connection.execute(sql)
    names = [column[0].lower() for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def multiset(rows: list[dict]) -> list[str]:
    return sorted(repr(sorted(row.items())) for row in rows)


@st.composite
def queries(draw) -> str:
    """A random tree of two to four aliases, joined in any way."""
    number = draw(st.integers(2, 4))
    tables = [draw(st.sampled_from(TABLES)) for _ in range(number)]
    where, sources = [], f"{tables[0]} AS a0"
    for right in range(1, number):
        left = draw(st.integers(0, right - 1))
        kinds = draw(st.lists(st.sampled_from(CONDITIONS), min_size=1, max_size=2))
        texts = [kind.format(f"a{left}", f"a{right}") for kind in kinds]
        join = draw(st.sampled_from(["JOIN", "LEFT JOIN", "LEFT JOIN", "CROSS JOIN"]))
        if join == "CROSS JOIN":
            where += texts
            sources += f" CROSS JOIN {tables[right]} AS a{right}"
            continue
        own = draw(st.lists(st.sampled_from(FILTERS), max_size=2))
        texts += [f.format(f"a{draw(st.integers(0, right))}") for f in own]
        sources += f" {join} {tables[right]} AS a{right} ON {' AND '.join(texts)}"
    filters = draw(st.lists(st.sampled_from(FILTERS), max_size=2))
    where += [f.format(f"a{draw(st.integers(0, number - 1))}") for f in filters]
    items = ", ".join(f"a{i}.x AS x{i}, a{i}.y * 2 AS y{i}" for i in range(number))
    clause = f" WHERE {' AND '.join(where)}" if where else ""
    return f"SELECT a0.y AS label, {items} FROM {sources}{clause}"


def bind_or_none(query: Query) -> BoundQuery | None:
    """The bound query; None if it is refused for one of the known reasons."""
    try:
        return query.bind(SCHEMAS)
    except QueryError as error:
        if REFUSALS.search(str(error)):
            return None
        raise


ROWS = st.lists(
    st.tuples(*[st.one_of(st.none(), st.integers(0, 2))] * 2), min_size=1, max_size=4
)


@settings(max_examples=100, deadline=None)
@given(sql=queries(), t=ROWS, u=ROWS)
def test_push_down_on_random_queries_and_rows(sql, t, u):
    # A comma has the tables after it in reach of ON only in the outer scope,
    # so DuckDB runs the query with CROSS JOIN and tp_flower reads commas.
    ours = Query.from_sql(sql.replace(" CROSS JOIN", ","))
    assert Query.from_sql(ours.to_sql()) == ours
    bound = bind_or_none(ours)
    if bound is None:
        return
    for fragment in bound.fragments:
        assert fragment.check(SCHEMAS[fragment.name]) == fragment
        assert Fragment.from_json(fragment.to_json()) == fragment
    with duckdb.connect() as connection:
        for name, rows in (("t", t), ("u", u)):
            connection.execute(f"CREATE TABLE {name}(x INT, y INT)")
            connection.executemany(f"INSERT INTO {name} VALUES (?, ?)", rows)
        expected = multiset(run_original(connection, sql))
        assert multiset(naive_join(connection, bound)) == expected
