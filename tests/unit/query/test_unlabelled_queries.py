"""A query of rows without a label binds as the labelled one does, but for the label."""

from dataclasses import replace

import pytest

from tp_flower.errors import QueryError
from tp_flower.query import Query, Unlabelled

SCHEMAS = {
    "orders": {"id": "BIGINT", "customer": "BIGINT", "day": "DATE", "qty": "DOUBLE"},
    "people": {"id": "BIGINT", "age": "DOUBLE", "label": "VARCHAR"},
}
JOINED = "FROM orders o JOIN people c ON o.customer = c.id"
FROM = f"{JOINED} WHERE o.day > '2020-01-01'"

FIRST = Unlabelled(keeps_weight=True)


def bound(select, label_table="o", row_key=(), tail=FROM):
    query = Query.from_sql(f"SELECT {select} {tail}", needs_label=False)
    return query.bind(SCHEMAS, Unlabelled(label_table, tuple(row_key)))


@pytest.mark.parametrize(
    "select",
    [
        "o.id, c.age",
        "o.id, o.qty AS label, c.age",
        "o.id, o.gone AS label, c.age, c.gone AS weight",
        "o.id, o.qty AS label, c.age, o.qty AS weight",
    ],
)
def test_label_and_weight_are_left_out(select):
    labelled = Query.from_sql(f"SELECT o.id, o.qty AS label, c.age {FROM}")
    expected = labelled.bind(SCHEMAS)
    fragments = tuple(replace(fragment, label=None) for fragment in expected.fragments)
    assert bound(select) == replace(expected, fragments=fragments)


@pytest.mark.parametrize("label", ["", "o.qty AS label, ", "c.gone AS label, "])
@pytest.mark.parametrize("weight", ["", ", o.qty AS weight"])
def test_training_without_a_label_keeps_the_weight(label, weight):
    labelled = Query.from_sql(f"SELECT o.id, o.day AS label, c.age{weight} {FROM}")
    expected = labelled.bind(SCHEMAS)
    fragments = tuple(replace(fragment, label=None) for fragment in expected.fragments)
    query = Query.from_sql(
        f"SELECT o.id, {label}c.age{weight} {FROM}", needs_label=False
    )
    assert query.bind(SCHEMAS, FIRST) == replace(expected, fragments=fragments)


@pytest.mark.parametrize(
    ("select", "table", "names"),
    [
        ("o.*, o.qty AS label, c.age", "o", ["id", "day"]),
        ("o.*, c.age", "o", ["id", "day", "qty"]),
        ("o.id, c.*", "c", ["age"]),
    ],
)
def test_stars_hide_the_columns_of_a_label(select, table, names):
    """Also one that the star brings; training reads what prediction reads."""
    query = Query.from_sql(f"SELECT {select} {FROM}", needs_label=False)
    for query_bound in (bound(select), query.bind(SCHEMAS, FIRST)):
        features = query_bound.fragments_of(table)[0].features
        assert [feature.name for feature in features] == names


def test_row_key_is_the_last_keys_of_the_label_table():
    plain, named = bound("o.id, c.age"), bound("o.id, c.age", "o", ("o.DAY", "qty"))
    orders, *rest = named.fragments
    assert orders.keys == (*plain.fragments[0].keys, ('"day"',), ('"qty"',))
    assert tuple(rest) == plain.fragments[1:]
    assert named.joins == plain.joins


def test_row_key_of_a_sub_query_is_over_its_table():
    tail = "FROM (SELECT id + 1 AS n, customer FROM orders) o JOIN people c "
    actual = bound("o.n, c.age", "o", ("n",), tail + "ON o.customer = c.id")
    assert actual.fragments[0].keys[-1] == ('"id" + 1',)


OUTER = "FROM people c LEFT JOIN orders o ON o.customer = c.id"


@pytest.mark.parametrize(
    ("select", "label_table", "row_key", "tail", "match"),
    [
        ("o.id, c.age", "x", (), FROM, "table 'x' are to be predicted, but the query"),
        ("o.id, c.age", "o", ("c.age",), FROM, "is a column of table 'c'"),
        ("o.id, c.age", "o", ("o.ide",), FROM, r"row-key o.ide: .* no column 'ide'"),
        ("o.id, c.age", "o", ("id",), FROM, "row-key id: column 'id' is ambiguous"),
        ("o.qty AS label", "o", (), FROM, "no features"),
        ("o.id, c.age", "o", (), OUTER, "the query LEFT JOINs it"),
    ],
)
def test_refusals(select, label_table, row_key, tail, match):
    with pytest.raises(QueryError, match=match):
        bound(select, label_table, row_key, tail)
