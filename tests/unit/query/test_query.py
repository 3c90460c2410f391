"""Queries: their shape, how columns are bound, and every refusal."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_flower.errors import QueryError
from tp_flower.query import Feature, Fragment, Join, Query

SCHEMAS = {
    "orders": {"id": "BIGINT", "customer": "BIGINT", "item": "BIGINT", "qty": "INT"},
    "customers": {"customer": "BIGINT", "age": "INT", "region": "VARCHAR"},
    "items": {"Item": "BIGINT", "part": "VARCHAR", "price": "DOUBLE"},
}
STORE = """
SELECT o.qty AS label, o.id, c.age, price * 2 AS price2, c.region
FROM orders o
JOIN customers AS c ON o.customer = c.customer AND c.age >= 18
JOIN items i ON i.item = o.item
WHERE o.qty IS NOT NULL AND (c.region = 'US' OR c.region = 'UK')
"""


def bind(sql: str):
    return Query.from_sql(sql).bind(SCHEMAS)


def test_store_query_is_cut_into_fragments_and_joins():
    bound = bind(STORE)
    assert bound.fragment("o").label == '"qty"'
    customers = Fragment(
        table="c",
        name="customers",
        features=(Feature("age", '"age"'), Feature("region", '"region"')),
        keys=(('"customer"',),),
        filters=('"age" >= 18', "(\"region\" = 'US' OR \"region\" = 'UK')"),
    )
    assert bound.fragment("c") == customers
    assert bound.joins == (
        Join("o", "c", 0, 0, "o.customer = c.customer"),
        Join("o", "i", 1, 0, "i.item = o.item"),
    )
    assert bound.label_table == "o"
    assert bound.tables == ("o", "c", "i")


UNION = """
SELECT o.qty AS label, c.age FROM orders o LEFT JOIN
(SELECT customer, age FROM customers UNION ALL SELECT id, qty FROM orders) c
USING (customer)
"""


def test_a_union_has_a_fragment_per_select():
    assert Query.from_sql(UNION).names == ("orders", "customers")
    bound = bind(UNION)
    assert bound.tables == ("o", "c")
    assert [f.name for f in bound.fragments] == ["orders", "customers", "orders"]
    assert bound.fragments_of("c") == bound.fragments[1:]
    assert bound.fragments_of("o") == (bound.fragment("o"),)
    assert bound.outer == {"c"}
    for table in ("c", "planes"):
        with pytest.raises(KeyError, match=table):
            bound.fragment(table)


def test_types_of_columns_that_are_not_used_do_not_matter():
    sql = """
    SELECT t.y AS label, u.n FROM t
    LEFT JOIN (SELECT x, 1 AS one, COUNT(*) AS n FROM u GROUP BY x) u ON u.x = t.x
    LEFT JOIN (SELECT 2 AS two FROM u) v ON v.two = t.x WHERE u.n > 1
    """
    schemas = {
        "t": {"x": "INTEGER", "y": "DOUBLE", "odd": "COLOUR"},
        "u": {"x": "INTEGER", "odd": "COLOUR"},
    }
    assert Query.from_sql(sql).bind(schemas).outer == {"v"}


def test_conditions_in_any_order_or_direction_give_the_same_keys():
    text = "SELECT o.qty AS label, p.id FROM orders o, orders p WHERE "
    one = bind(text + "o.item = p.item AND o.customer = p.customer")
    two = bind(text + "p.customer = o.customer AND p.item = o.item AND o.item = p.item")
    assert one.fragments == two.fragments


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        # one key of two joins is one entry
        ("orders b ON a.item = b.item JOIN orders c ON a.item = c.item", "a0b a0c"),
        # in the order of the right tables
        (
            "orders b USING (qty), orders c WHERE b.id = c.id AND c.id = a.id",
            "a0b a1c b1c",
        ),
        # a column that USING has merged before
        ("customers c USING (customer) JOIN orders p USING (customer)", "a0c a0p"),
    ],
)
def test_joins_and_the_places_of_their_left_keys(tables, expected):
    bound = bind(f"SELECT a.qty AS label, a.id FROM orders a JOIN {tables}")
    joins = [f"{join.left}{join.left_key}{join.right}" for join in bound.joins]
    assert " ".join(joins) == expected


@pytest.mark.parametrize(
    ("items", "names"),
    [
        ("o.ID, c.age AS Age", ["id", "Age"]),
        ("o.item, o.id + 1, c.age", ["item", "id + 1", "age"]),
        ("o.customer, c.customer", ["o.customer", "c.customer"]),
        ("o.id AS v, c.age AS V, c.region", ["o.v", "c.V", "region"]),
        ("(o.id), -c.age", ["id", "-age"]),
    ],
)
def test_feature_names(items, names):
    bound = bind(
        f"SELECT qty AS label, {items} FROM orders o JOIN customers c USING (customer)"
    )
    assert [f.name for part in bound.fragments for f in part.features] == names


def test_on_sees_only_the_tables_before_it():
    # `region` is also a column of the third table, which ON cannot see yet.
    bound = bind(
        "SELECT o.qty AS label, o.id FROM orders o "
        "JOIN customers c ON o.customer = c.customer AND region = 'US' "
        "JOIN customers d ON o.customer = d.customer"
    )
    assert bound.fragment("c").filters == ("\"region\" = 'US'",)


def test_another_dialect_is_translated():
    query = Query.from_sql("SELECT `qty` AS label, `id` FROM `orders`", dialect="mysql")
    assert query.to_sql() == 'SELECT "qty" AS label, "id" FROM "orders"'


def test_comments_and_layout_do_not_matter():
    text = "SELECT qty AS label, id -- the label\nFROM /* all */ orders;"
    assert Query.from_sql(text) == Query.from_sql("select qty label, id from orders")


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("", "expected one SELECT statement, got 0"),
        ("SELECT qty AS label,\nid FROM orders WHERE (", "parse: line 2, column"),
        ("SELECT " + "(" * 3000 + "x", "nested too deeply"),
    ],
)
def test_refused_texts(sql, message):
    """Refused queries are in the folder tests/support/sql."""
    with pytest.raises(QueryError, match=message):
        Query.from_sql(sql)


@pytest.mark.parametrize(
    ("dialect", "message"),
    [
        ("duckdbb", "Unknown dialect 'duckdbb'"),
        ("oracle", "outer join marks are not supported"),
    ],
)
def test_refused_dialects(dialect, message):
    sql = "SELECT a.x AS label, b.x FROM a, b WHERE a.k = b.k (+)"
    with pytest.raises(QueryError, match=message):
        Query.from_sql(sql, dialect=dialect)


TOKENS = """
SELECT SELECT FROM FROM ( ) ( ) , , t u x y label AS AS JOIN LEFT JOIN ON USING ( x )
WHERE GROUP BY ALL HAVING UNION ALL DISTINCT * . * EXCLUDE COUNT(*) SUM( = = 1 AND OR
LATERAL VALUES PIVOT WITH INTERVAL CASE WHEN END ; -- " ' ROLLUP LIMIT [ ] { } NATURAL
"""
PHRASES = [
    "SELECT x AS label, y FROM t",
    "(SELECT x, COUNT(*) AS n FROM u GROUP BY x) v",
    "LEFT JOIN u ON t.x = u.x",
    "JOIN u USING (x)",
    "UNION ALL SELECT * FROM u",
]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*TOKENS.split(), *PHRASES]), max_size=10).map(" ".join)
)
def test_anything_is_refused_or_has_one_form(text):
    try:
        query = Query.from_sql(f"SELECT x AS label, y FROM t {text}")
    except QueryError:
        return
    again = Query.from_sql(query.to_sql())
    assert again == query
    assert again.to_sql() == query.to_sql()
    schemas = {name: {"x": "INT", "y": "INT"} for name in query.names}
    with contextlib.suppress(QueryError):
        query.bind(schemas)
