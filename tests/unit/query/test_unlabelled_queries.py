"""A query of rows without a label binds as the labelled one does, but for the label."""

from dataclasses import replace

import pytest

from tp_flower.errors import QueryError
from tp_flower.query import Query

SCHEMAS = {
    "orders": {"id": "BIGINT", "customer": "BIGINT", "day": "DATE", "qty": "DOUBLE"},
    "people": {"id": "BIGINT", "age": "DOUBLE", "label": "VARCHAR"},
}
JOINED = "FROM orders o JOIN people c ON o.customer = c.id"
FROM = f"{JOINED} WHERE o.day > '2020-01-01'"


def bound(select, label_table="o", row_key=(), tail=FROM):
    query = Query.from_sql(f"SELECT {select} {tail}", needs_label=False)
    return query.bind_features(SCHEMAS, label_table, row_key)


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
    fragments = tuple(replace(own, label=None) for own in expected.fragments)
    assert bound(select) == replace(expected, fragments=fragments)


@pytest.mark.parametrize("label", ["", "o.qty AS label, ", "c.gone AS label, "])
@pytest.mark.parametrize("weight", ["", ", o.qty AS weight"])
def test_training_without_a_label_keeps_the_weight(label, weight):
    labelled = Query.from_sql(f"SELECT o.id, o.day AS label, c.age{weight} {FROM}")
    expected = labelled.bind(SCHEMAS)
    fragments = tuple(replace(own, label=None) for own in expected.fragments)
    query = Query.from_sql(
        f"SELECT o.id, {label}c.age{weight} {FROM}", needs_label=False
    )
    assert query.bind_unlabelled(SCHEMAS) == replace(expected, fragments=fragments)


def test_a_star_without_a_label_is_of_the_rows_that_training_reads():
    def names(select):
        query = Query.from_sql(f"SELECT {select} {FROM}", needs_label=False)
        found = query.bind_unlabelled(SCHEMAS).fragments_of("o")[0].features
        return [feature.name for feature in found]

    assert names("o.*, o.qty AS label, c.age") == ["id", "day"]
    assert names("o.*, c.age") == ["id", "day", "qty"]


def test_stars_hide_the_columns_of_a_label_that_is_there():
    def names(select):
        found = bound(select).fragments_of("o")[0].features
        return [feature.name for feature in found]

    assert names("o.*, o.qty AS label, c.age") == ["id", "day"]
    assert names("o.*, c.age") == ["id", "day", "qty"]


def test_a_star_may_bring_the_label():
    features = bound("o.id, c.*").fragments_of("c")[0].features
    assert [feature.name for feature in features] == ["age"]


def test_row_key_is_the_last_keys_of_the_label_table():
    plain, named = bound("o.id, c.age"), bound("o.id, c.age", "o", ("o.DAY", "qty"))
    own, *rest = named.fragments
    assert own.keys == (*plain.fragments[0].keys, ('"day"',), ('"qty"',))
    assert tuple(rest) == plain.fragments[1:]
    assert named.joins == plain.joins


def test_row_key_of_a_sub_query_is_over_its_table():
    tail = "FROM (SELECT id + 1 AS n, customer FROM orders) o JOIN people c "
    found = bound("o.n, c.age", "o", ("n",), tail + "ON o.customer = c.id")
    assert found.fragments[0].keys[-1] == ('"id" + 1',)


@pytest.mark.parametrize(
    ("select", "label_table", "row_key", "match"),
    [
        ("o.id, c.age", "x", (), "table 'x' are to be predicted, but the query has o"),
        ("o.id, c.age", "o", ("c.age",), "is a column of table 'c'"),
        ("o.id, c.age", "o", ("o.ide",), r"row-key o.ide: .* no column 'ide'"),
        ("o.id, c.age", "o", ("id",), "row-key id: column 'id' is ambiguous"),
        ("o.qty AS label", "o", (), "no features"),
    ],
)
def test_refusals(select, label_table, row_key, match):
    with pytest.raises(QueryError, match=match):
        bound(select, label_table, row_key)


def test_the_label_table_cannot_be_left_joined():
    tail = "FROM people c LEFT JOIN orders o ON o.customer = c.id"
    with pytest.raises(QueryError, match="the query LEFT JOINs it"):
        bound("o.id, c.age", tail=tail)
