"""Queries: their shape, how columns are bound, and every refusal."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.files import case_table
from tp_flower.errors import QueryError
from tp_flower.query import Query, Unlabelled

CASES = case_table(__file__)
SCHEMAS = {
    "orders": {"id": "BIGINT", "customer": "BIGINT", "item": "BIGINT", "qty": "INT"},
    "customers": {"customer": "BIGINT", "age": "INT", "region": "VARCHAR"},
}
UNION = CASES["union"]
PHRASES = """
SELECT x AS label, y FROM t; (SELECT x, COUNT(*) AS n FROM u GROUP BY x) v;
LEFT JOIN u ON t.x = u.x; JOIN u USING (x); UNION ALL SELECT * FROM u
"""
PIECES = st.sampled_from([*CASES["tokens"].split(), *PHRASES.split(";")])
PEOPLE = {
    "orders": {"id": "BIGINT", "customer": "BIGINT", "day": "DATE", "qty": "DOUBLE"},
    "people": {"id": "BIGINT", "age": "DOUBLE", "label": "VARCHAR"},
}
FROM = "FROM orders o JOIN people c ON o.customer = c.id WHERE o.day > '2020-01-01'"
FIRST = Unlabelled(keeps=("weight",))


def bind(sql: str):
    return Query.from_sql(sql).bind(SCHEMAS)


def test_a_union_has_a_fragment_per_select():
    assert Query.from_sql(UNION).names == ("orders", "customers")
    bound = bind(UNION)
    assert bound.tables == ("o", "c")
    assert [f.name for f in bound.fragments] == ["orders", "customers", "orders"]
    assert bound.fragments_of("c") == bound.fragments[1:]
    assert bound.fragments_of("o") == bound.fragments[:1]
    assert bound.outer == {"c"}
    with pytest.raises(KeyError, match="planes"):
        bound.fragments_of("planes")


def test_types_of_columns_that_are_not_used_do_not_matter():
    sql = CASES["groups"]
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
    # one key of two joins is one entry
    tables = "orders b ON a.item = b.item JOIN orders c ON a.item = c.item"
    bound = bind(f"SELECT a.qty AS label, a.id FROM orders a JOIN {tables}")
    assert bound.fragments_of("a")[0].keys == (('"item"',),)
    assert [(join.left_key, join.right) for join in bound.joins] == [(0, "b"), (0, "c")]


def test_on_sees_only_the_tables_before_it():
    # `region` is also a column of the third table, which ON cannot see yet.
    bound = bind(
        "SELECT o.qty AS label, o.id FROM orders o "
        "JOIN customers c ON o.customer = c.customer AND region = 'US' "
        "JOIN customers d ON o.customer = d.customer"
    )
    assert bound.fragments_of("c")[0].filters == ("\"region\" = 'US'",)


def test_comments_and_layout_do_not_matter():
    text = "SELECT qty AS label, id -- the label\nFROM /* all */ orders;"
    assert Query.from_sql(text) == Query.from_sql("select qty label, id from orders")


def test_refused_texts():
    """Other queries that are refused are in the folder tests/support/sql."""
    for sql, message in (
        ("SELECT qty AS label,\nid FROM orders WHERE (", "line 2, column"),
        ("SELECT " + "(" * 3000 + "x", "nested too deeply"),
    ):
        with pytest.raises(QueryError, match=message):
            Query.from_sql(sql)


@settings(max_examples=300)
@given(st.lists(PIECES, max_size=10).map(" ".join))
def test_anything_is_refused_or_has_one_form(text):
    try:
        query = Query.from_sql(f"SELECT x AS label, y FROM t {text}")
    except QueryError:
        return
    again = Query.from_sql(query.to_sql())
    assert again == query
    assert again.to_sql() == query.to_sql()
    with contextlib.suppress(QueryError):
        query.bind({name: {"x": "INT", "y": "INT"} for name in query.names})


def unlabelled(select, tail=FROM):
    return Query.from_sql(f"SELECT {select} {tail}", needs_label=False)


def bound(select, label_table="o", row_key=(), tail=FROM):
    return unlabelled(select, tail).bind(PEOPLE, Unlabelled(label_table, row_key))


def labelled(select):
    expected = Query.from_sql(f"SELECT {select} {FROM}").bind(PEOPLE)
    fragments = tuple(replace(fragment, label=None) for fragment in expected.fragments)
    return replace(expected, fragments=fragments)


@pytest.mark.parametrize("label", ["", "o.qty AS label, ", "c.gone AS label, "])
@pytest.mark.parametrize("weight", ["", ", o.qty AS weight", ", c.gone AS weight"])
def test_prediction_leaves_label_and_weight_out_and_training_the_label(label, weight):
    select = f"o.id, {label}c.age{weight}"
    assert bound(select) == labelled("o.id, o.qty AS label, c.age")
    if "gone" not in weight:
        expected = labelled(f"o.id, o.day AS label, c.age{weight}")
        assert unlabelled(select).bind(PEOPLE, FIRST) == expected


@CASES.each("stars", "select", "table", "names")
def test_stars_hide_the_columns_of_a_label(select, table, names):
    """Also one that the star brings; training reads what prediction reads."""
    for each in (bound(select), unlabelled(select).bind(PEOPLE, FIRST)):
        features = each.fragments_of(table)[0].features
        assert [feature.name for feature in features] == names


def test_row_key_is_the_last_keys_of_the_label_table():
    """Over the table itself, where a sub-query has other names."""
    plain = bound("o.id, c.age")
    named = bound("o.id, c.age", "o", ("o.DAY", "qty"))
    orders, *rest = named.fragments
    assert orders.keys == (*plain.fragments[0].keys, ('"day"',), ('"qty"',))
    assert tuple(rest) == plain.fragments[1:]
    assert named.joins == plain.joins
    tail = "FROM (SELECT id + 1 AS n, customer FROM orders) o JOIN people c "
    actual = bound("o.n, c.age", "o", ("n",), tail + "ON o.customer = c.id")
    assert actual.fragments[0].keys[-1] == ('"id" + 1',)


@pytest.mark.parametrize(
    ("select", "label_table", "row_key", "tail", "match"),
    [
        ("o.id, c.age", "x", (), FROM, "table 'x' are to be .* with model-name"),
        ("o.id, c.age", "o", ("c.age",), FROM, "is a column of table 'c'"),
        ("o.id, c.age", "o", ("o.ide",), FROM, r"row-key o.ide: .* no column 'ide'"),
        ("o.id, c.age", "o", ("id",), FROM, "row-key id: column 'id' is ambiguous"),
        ("o.qty AS label", "o", (), FROM, "no features"),
        (
            "o.id, c.age",
            "o",
            (),
            "FROM people c LEFT JOIN orders o ON o.customer = c.id",
            "the query LEFT JOINs it",
        ),
    ],
)
def test_refusals(select, label_table, row_key, tail, match):
    with pytest.raises(QueryError, match=match):
        bound(select, label_table, row_key, tail)
