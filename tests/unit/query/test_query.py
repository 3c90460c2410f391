"""Queries: their shape, how columns are bound, and every refusal."""

import contextlib
import re

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
            "orders b USING (qty), orders c WHERE b.id = c.id AND a.id = c.id",
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
    assert query.to_sql() == 'SELECT "qty" AS label, "id" FROM orders'


def test_comments_and_layout_do_not_matter():
    text = "SELECT qty AS label, id -- the label\nFROM /* all */ orders;"
    assert Query.from_sql(text) == Query.from_sql("select qty label, id from orders")


# More refusals are in tests/support/sql/refused.toml.
ITEMS = "SELECT id, qty AS label"


SHAPE_REFUSALS = [
    ("", "expected one SELECT statement, got 0"),
    ("SELECT qty AS label id FROM orders", "does not parse: line 1, column 22"),
    ("SELECT qty AS label,\nid FROM orders WHERE (", "does not parse: line 2, column"),
    ("SELECT 'qty AS label FROM orders", "does not parse: Error tokenizing"),
    ("SELECT id, qty AS label FROM orders; SELECT 1", "expected one SELECT .* got 2"),
    ("DROP TABLE orders", "expected a SELECT statement, got: DROP TABLE orders"),
    ("SELECT 1 AS label, 2", "has no FROM"),
    ("SELECT id AS label, qty AS label FROM orders", "2 labels, expected one: id, qty"),
    ("SELECT qty AS label FROM orders", "has no features"),
    ("SELECT FROM orders", "the SELECT list is empty"),
    ("SELECT COLUMNS('i.*'), qty AS label FROM orders", r"name the columns instead"),
    ("SELECT id, max(qty) AS label FROM orders", r"aggregate .*: MAX\(qty\)"),
    ("SELECT id, rank() OVER () AS label FROM orders", "window functions"),
    ("SELECT id, (SELECT 1) AS label FROM orders", "sub-queries are not supported"),
    (f"{ITEMS} FROM orders WHERE id IN (SELECT id FROM t)", "WHERE: .* id IN .* sub-q"),
    (f"{ITEMS} FROM read_csv('x')", "only plain tables"),
    (f"{ITEMS} FROM orders TABLESAMPLE 10%", "only plain tables"),
    (f"{ITEMS} FROM orders AS o(id, qty)", "only plain tables"),
    (f"{ITEMS} FROM main.orders", "the bare name of the table"),
    (f"{ITEMS} FROM a EXCEPT SELECT 1, 2", "EXCEPT is not supported"),
    (f"({ITEMS} FROM orders)", "expected a SELECT statement"),
    (f"{ITEMS} FROM orders HAVING id > 1", "HAVING is not supported"),
    (f"{ITEMS} FROM orders QUALIFY id", "QUALIFY is not supported"),
    (f"{ITEMS} FROM orders LIMIT 3", "LIMIT is not supported"),
    (f"{ITEMS} FROM orders OFFSET 3", "OFFSET is not supported"),
    (f"{ITEMS} INTO x FROM orders", "INTO is not supported"),
    (f"{ITEMS} FROM a JOIN b", "join of b has no equality condition"),
    (f"{ITEMS} FROM a JOIN b ON WHERE a.x = b.x", "join of b has no equality cond"),
    (f"{ITEMS} FROM a, b JOIN c WHERE a.x = b.x", "join of c has no equality cond"),
    (f"{ITEMS} FROM a /*,*/ JOIN b", "join of b has no equality condition"),
    (f"{ITEMS} FROM a JOIN b JOIN c ON b.x = c.x ON a.x = b.x", "one join after the"),
    (f"{ITEMS} FROM a POSITIONAL JOIN b", "POSITIONAL JOIN of b is not supported: on"),
    (f"{ITEMS} FROM a ASOF JOIN b ON a.x = b.x", "ASOF JOIN of b is not supported: on"),
    ("SELECT a.x AS label, b.x FROM t a, t A", "two tables are called 'A'"),
    ("SELECT x AS label, y FROM t JOIN t USING (x)", "two tables are called 't'"),
    ("SELECT random() AS label, id FROM orders", "function 'random' is not among"),
    ("SELECT qty AS label, $1 FROM orders", "parameters are not supported"),
    ("SELECT " + "(" * 3000 + "x", "nested too deeply"),
]


@pytest.mark.parametrize(("sql", "message"), SHAPE_REFUSALS)
def test_refused_shapes(sql, message):
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


ORDERS = "SELECT o.qty AS label, o.id FROM orders o"
BOTH = "FROM orders o JOIN customers c ON o.customer = c.customer"
BIND_REFUSALS = [
    ("SELECT qty AS label, id FROM pqr", "hosted tables: orders, customers, items"),
    ("SELECT o.qty AS label, o.ids FROM orders o", "table 'o' has no column 'ids'"),
    ("SELECT o.qty AS label, p.id FROM orders o", "no table is called 'p' here"),
    ("SELECT orders.qty AS label, id FROM orders o", "no table is called 'orders'"),
    (f"SELECT qty AS label, customer {BOTH}", "write o.customer or c.customer"),
    (f"SELECT o.qty AS label, o.id * c.age {BOTH}", r"feature o.id \* c.age .*\(o, c"),
    (f"SELECT o.qty > c.age AS label, id {BOTH}", r"the label o.qty > c.age .*\(o, c"),
    (f"{ORDERS} WHERE label > 3", "'label' is a name of the SELECT list"),
    (f"{ORDERS} WHERE 1 = 1", "condition 1 = 1 names no column"),
    ("SELECT qty AS label, 1 AS one FROM orders", "feature 1 names no column"),
    ("SELECT 1 AS label, qty FROM orders", "the label 1 names no column"),
    ("SELECT qty AS label, (QTY) FROM orders", r"\(QTY\)\): the label leaks"),
    (f"{ORDERS} JOIN customers c ON TRUE", "condition TRUE names no column"),
    (f"{ORDERS}, customers c, items i WHERE o.id + c.age = i.item", r"of 3 .*o, c, i"),
    (f"{ORDERS}, customers c JOIN items i ON c.age = i.item", r"'c' is not connected"),
    (f"{ORDERS} JOIN items i USING (qty)", "table 'i' has no column 'qty'"),
    (f"{ORDERS} JOIN items i USING (price)", "no table has a column 'price'"),
    (
        f"{ORDERS} JOIN customers c ON o.item = i.item, items i",
        "no table is called 'i'",
    ),
    (
        f"{ORDERS} JOIN orders p ON o.id = p.id JOIN customers c USING (customer)",
        "column 'customer' is ambiguous: write o.customer or p.customer",
    ),
    ("SELECT qty AS label, id, id FROM orders", "2 features are called 'orders.id'"),
    ("SELECT qty AS label, id AS v, item AS v FROM orders", "called 'orders.v'"),
]


@pytest.mark.parametrize(("sql", "message"), BIND_REFUSALS)
def test_refused_bindings(sql, message):
    query = Query.from_sql(sql)
    with pytest.raises(QueryError, match=message):
        query.bind(SCHEMAS)


@pytest.mark.parametrize(
    "condition",
    [
        "o.qty < c.age",
        "(o.customer = c.customer OR o.id = c.age)",
        "o.customer IS NOT DISTINCT FROM c.customer",
        "o.id + c.age = 3",
        "NOT o.customer = c.customer",
        "(o.customer = c.customer) IS TRUE",
    ],
)
@pytest.mark.parametrize("tail", ["", " AND o.customer = c.customer"])
def test_a_condition_over_two_tables_is_an_equality_of_columns(condition, tail):
    query = Query.from_sql(f"{ORDERS} JOIN customers c ON {condition}{tail}")
    match = re.escape(condition.strip("()")[:12])
    with pytest.raises(QueryError, match=rf"{match}.* needs the values of 2 .*\(o, c"):
        query.bind(SCHEMAS)


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
