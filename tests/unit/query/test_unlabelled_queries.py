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


def labelled(select):
    """The query of a label, without it."""
    expected = Query.from_sql(f"SELECT {select} {FROM}").bind(SCHEMAS)
    fragments = tuple(replace(fragment, label=None) for fragment in expected.fragments)
    return replace(expected, fragments=fragments)


@pytest.mark.parametrize("label", ["", "o.qty AS label, ", "c.gone AS label, "])
@pytest.mark.parametrize("weight", ["", ", o.qty AS weight", ", c.gone AS weight"])
def test_prediction_leaves_label_and_weight_out_and_training_the_label(label, weight):
    select = f"o.id, {label}c.age{weight}"
    assert bound(select) == labelled("o.id, o.qty AS label, c.age")
    if "gone" not in weight:
        query = Query.from_sql(f"SELECT {select} {FROM}", needs_label=False)
        expected = labelled(f"o.id, o.day AS label, c.age{weight}")
        assert query.bind(SCHEMAS, FIRST) == expected


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
    """Over the table itself, where a sub-query has other names."""
    plain, named = bound("o.id, c.age"), bound("o.id, c.age", "o", ("o.DAY", "qty"))
    orders, *rest = named.fragments
    assert orders.keys == (*plain.fragments[0].keys, ('"day"',), ('"qty"',))
    assert tuple(rest) == plain.fragments[1:]
    assert named.joins == plain.joins
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
