"""The obvious check of push-down: fragments run apart, then joined, are the query.

The original SQL runs in DuckDB. Against it, each fragment runs alone on its table,
and the rows are joined by a nested loop over the bound query's keys.
"""

import itertools

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_flower.query import BoundQuery, Fragment, Query

TABLES = {
    # orders 1 and 2 buy the same item; order 4 has no customer, order 5 no match
    "orders": """(VALUES
        (1, 10, 100, 2, DATE '2024-01-01'), (2, 11, 100, 7, DATE '2024-01-02'),
        (3, 10, 101, 1, DATE '2024-01-02'), (4, NULL, 101, 9, NULL),
        (5, 12, 102, NULL, DATE '2024-01-01')) v(id, customer, item, qty, day)""",
    "customers": """(VALUES
        (10, 30, 'US'), (11, NULL, 'UK'), (NULL, 50, 'US'), (13, 70, NULL))
        v(customer, age, region)""",
    # several parts per item: many-to-many with orders
    "items": """(VALUES
        (100, 'bolt', 0.5), (100, 'nut', 0.25), (101, 'bolt', 0.5), (NULL, 'x', 1.0),
        (103, 'gear', 9.0)) v(item, part, price)""",
    "parts": "(VALUES ('bolt', 3), ('nut', NULL), (NULL, 1)) v(Part, weight)",
    "weather": """(VALUES
        (DATE '2024-01-01', 'US', 3.5), (DATE '2024-01-02', 'US', -1.0),
        (DATE '2024-01-02', 'UK', NULL), (NULL, 'US', 0.0)) v(day, region, temp)""",
}
QUERIES = """
SELECT qty AS label, id, item FROM orders;
SELECT qty > 5 AS label, id, day FROM orders WHERE qty IS NOT NULL AND id <> 3;
SELECT qty AS label, id FROM orders WHERE id = 1 OR item = 101 AND qty > 3;
SELECT qty AS label, id FROM orders WHERE (id = 1 OR item = 101) AND qty > 3;
SELECT qty AS label, id FROM orders WHERE NOT (id = 1 OR item = 101);
SELECT qty AS label, extract(dow FROM day) AS dow, day + INTERVAL 1 DAY AS d FROM
  orders;
SELECT qty AS label, CASE WHEN id > 2 THEN 'late' ELSE 'early' END AS c FROM orders;
SELECT o.qty AS label, c.age FROM orders o JOIN customers c ON o.customer = c.customer;
SELECT o.qty AS label, c.age FROM orders o JOIN customers c ON c.customer = o.customer;
SELECT o.qty AS label, age FROM orders o INNER JOIN customers c USING (customer);
SELECT qty AS label, customer, age FROM orders JOIN customers USING (customer);
SELECT o.qty AS label, c.age FROM orders o, customers c WHERE o.customer = c.customer;
SELECT o.qty AS label, c.age FROM orders o, customers c WHERE c.customer = o.customer
  AND (age > 20 OR age IS NULL);
SELECT o.qty AS label, c.age FROM orders o JOIN customers c ON (o.customer =
  c.customer AND (c.region = 'US'));
SELECT o.qty AS label, i.price FROM orders o JOIN items i ON o.item = i.item;
SELECT o.qty AS label, i.price, i.part FROM orders o JOIN items i USING (item) WHERE
  i.part IN ('bolt', 'nut');
SELECT o.qty AS label, i.price FROM orders o JOIN items i ON o.item + 1 = i.item + 1;
SELECT o.qty AS label, i.price FROM orders o JOIN items i ON o.item - 1 = i.item;
SELECT i.price AS label, o.id, c.age FROM items i JOIN orders o ON o.item = i.item
  JOIN customers c ON c.customer = o.customer;
SELECT o.qty AS label, p.weight, i.price FROM orders o JOIN items i ON o.item = i.item
  JOIN parts p ON i.part = p.part;
SELECT o.qty AS label, p.weight FROM orders o JOIN items i USING (item) JOIN parts p
  ON upper(i.part) = upper(p.part);
SELECT o.qty AS label, w.temp, c.age FROM orders o JOIN customers c ON o.customer =
  c.customer JOIN weather w ON w.day = o.day AND w.region = c.region;
SELECT o.qty AS label, w.temp FROM orders o JOIN weather w ON o.day = w.day AND
  w.region = 'US';
SELECT w.temp AS label, v.temp AS other FROM weather w JOIN weather v ON w.day = v.day
  AND w.region = v.region;
SELECT a.qty AS label, b.id AS other FROM orders a JOIN orders b ON a.customer =
  b.customer WHERE a.id <> 1;
SELECT a.qty AS label, b.id AS x, c.id AS y FROM orders a JOIN orders b ON a.item =
  b.item JOIN orders c ON a.item = c.item AND b.day = c.day;
SELECT o.qty AS label, i.price, c.age FROM orders o, items i JOIN customers c ON
  c.region = 'US' WHERE o.item = i.item AND c.customer = o.customer;
SELECT "O".QTY AS Label, c.AGE FROM Orders AS o JOIN "CUSTOMERS" c ON O.Customer =
  C.cuStomer;
SELECT o.qty AS label, c.age FROM orders o JOIN customers c ON o.customer = c.customer
  AND o.customer = c.age - 20;
SELECT qty AS label, age, temp FROM orders JOIN customers USING (customer) JOIN
  weather USING (day, region)
""".strip().split(";\n")


@pytest.fixture(scope="module")
def database():
    with duckdb.connect() as connection:
        for name, values in TABLES.items():
            connection.execute(f"CREATE TABLE {name} AS SELECT * FROM {values}")
        yield connection


def columns_of(connection) -> dict[str, dict[str, str]]:
    rows = connection.execute(
        "SELECT table_name, column_name, data_type FROM information_schema.columns "
        "ORDER BY table_name, ordinal_position"
    ).fetchall()
    schemas: dict[str, dict[str, str]] = {}
    for table, column, type_ in rows:
        schemas.setdefault(table, {})[column] = type_
    return schemas


def run_fragment(connection, fragment: Fragment) -> list[tuple[dict, list[tuple]]]:
    """Per row of the table: its named values, and its keys."""
    names = [feature.name for feature in fragment.features]
    pieces = [feature.sql for feature in fragment.features]
    if fragment.label is not None:
        names, pieces = [*names, "label"], [*pieces, fragment.label]
    keys = [part for key in fragment.keys for part in key]
    where = " AND ".join(fragment.filters) or "true"
    sql = f"SELECT {', '.join([*pieces, *keys, '1'])} FROM shard WHERE {where}"
    relation = f"SELECT * FROM {fragment.name}"
    connection.execute(f"CREATE OR REPLACE TEMP VIEW shard AS {relation}")
    rows = []
    for row in connection.execute(sql).fetchall():
        parts = iter(row[len(pieces) :])
        values = dict(zip([n.lower() for n in names], row, strict=False))
        rows.append(
            (values, [tuple(itertools.islice(parts, len(k))) for k in fragment.keys])
        )
    return rows


def naive_join(connection, bound: BoundQuery) -> list[dict]:
    """Try every combination of rows and keep those whose keys are equal."""
    tables = [run_fragment(connection, fragment) for fragment in bound.fragments]
    joined = []
    for rows in itertools.product(*tables):
        keys = {table: row[1] for table, row in zip(bound.tables, rows, strict=True)}
        pairs = [
            (keys[j.left][j.left_key], keys[j.right][j.right_key]) for j in bound.joins
        ]
        if all(a == b and None not in a for a, b in pairs):
            joined.append({k: v for row in rows for k, v in row[0].items()})
    return joined


def run_original(connection, sql: str) -> list[dict]:
    cursor = connection.execute(sql)
    names = [column[0].lower() for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def multiset(rows: list[dict]) -> list[str]:
    return sorted(repr(sorted(row.items())) for row in rows)


@pytest.mark.parametrize("sql", QUERIES)
def test_fragments_joined_on_their_keys_are_the_query(database, sql):
    schemas = columns_of(database)
    bound = Query.from_sql(sql).bind(schemas)
    for fragment in bound.fragments:
        assert fragment.check(schemas[fragment.name]) == fragment
    expected = run_original(database, sql)
    assert multiset(naive_join(database, bound)) == multiset(expected)


def test_fixtures_have_rows(database):
    assert [sql for sql in QUERIES if not run_original(database, sql)] == []


@pytest.mark.parametrize("sql", QUERIES)
def test_canonical_sql_is_the_same_query(database, sql):
    query = Query.from_sql(sql)
    again = Query.from_sql(query.to_sql())
    assert again == query
    assert again.to_sql() == query.to_sql()
    expected = multiset(run_original(database, sql))
    assert multiset(run_original(database, query.to_sql())) == expected


CONDITIONS = ["{0}.x = {1}.x", "{1}.y = {0}.x", "{0}.y = {1}.y", "{0}.x + 1 = {1}.y"]
FILTERS = ["{0}.x > 0", "({0}.x = 1 OR {0}.y IS NULL)", "NOT {0}.y = 2", "{0}.x < 2"]


@st.composite
def queries(draw) -> str:
    """A random tree of two to four aliases over two tables, joined in any way."""
    number = draw(st.integers(2, 4))
    tables = [draw(st.sampled_from(["t", "u"])) for _ in range(number)]
    where, sources = [], f"{tables[0]} AS a0"
    for right in range(1, number):
        left = draw(st.integers(0, right - 1))
        kinds = draw(st.lists(st.sampled_from(CONDITIONS), min_size=1, max_size=2))
        text = " AND ".join(kind.format(f"a{left}", f"a{right}") for kind in kinds)
        if draw(st.booleans()):
            sources += f" JOIN {tables[right]} AS a{right} ON {text}"
        else:
            sources += f" CROSS JOIN {tables[right]} AS a{right}"
            where.append(text)
    filters = draw(st.lists(st.sampled_from(FILTERS), max_size=2))
    where += [f.format(f"a{draw(st.integers(0, number - 1))}") for f in filters]
    items = ", ".join(f"a{i}.x AS x{i}, a{i}.y * 2 AS y{i}" for i in range(number))
    clause = f" WHERE {' AND '.join(where)}" if where else ""
    return f"SELECT a0.y AS label, {items} FROM {sources}{clause}"


ROWS = st.lists(
    st.tuples(*[st.one_of(st.none(), st.integers(0, 2))] * 2), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(sql=queries(), t=ROWS, u=ROWS)
def test_push_down_on_random_queries_and_rows(sql, t, u):
    with duckdb.connect() as connection:
        for name, rows in (("t", t), ("u", u)):
            connection.execute(f"CREATE TABLE {name}(x INT, y INT)")
            connection.executemany(f"INSERT INTO {name} VALUES (?, ?)", rows)
        # A comma has the tables after it in reach of ON only in the outer scope,
        # so DuckDB runs the query with CROSS JOIN and tp_flower reads commas.
        ours = Query.from_sql(sql.replace(" CROSS JOIN", ","))
        bound = ours.bind({name: {"x": "INTEGER", "y": "INTEGER"} for name in "tu"})
        expected = multiset(run_original(connection, sql))
        assert multiset(naive_join(connection, bound)) == expected
        assert Query.from_sql(ours.to_sql()) == ours
