"""Fragments and their sub-queries: what a site accepts from the server, or refuses."""

from dataclasses import replace

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files import case_table
from tests.support.tables.fragments import features
from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import QueryError
from tp_flower.query import Feature, Fragment, SubQuery

CASES = case_table(__file__)
COLUMNS = ("Id", "kind", "amount", "paid")
PLAIN = Fragment(
    table="p",
    name="payments",
    features=features(amount='"amount"', short='LOWER("kind")'),
    keys=(('"Id"',), ('"kind"', '"paid"')),
    label='"amount" > 15',
    filters=('("amount" > 1 OR "amount" IS NULL)',),
)
SUBQUERY = SubQuery(
    columns=features(
        id='"Id"',
        mean='AVG("amount") FILTER(WHERE "kind" = \'a\')',
        n="COUNT(*)",
    ),
    filters=('("amount" > 1 OR "amount" IS NULL)',),
    groups=('"Id"', 'YEAR("paid")'),
    having=("COUNT(*) > 1",),
)
GROUPED = Fragment(
    table="p",
    name="payments",
    features=features(mean='"mean"', more='"n" + 1'),
    keys=(('"id"',),),
    filters=('"n" < 10',),
    subquery=SUBQUERY,
)
NO_AGGREGATE = "aggregate functions are not supported"
NAMES = st.one_of(
    st.text(min_size=1, max_size=12),
    st.sampled_from(
        ['a"b', "a'b", "x -- y", "/* x", "; DROP TABLE t", "a.b", "*", "(group)"]
    ),
)


def refused(match):
    """Expect a fragment to be refused, with such a text."""
    return pytest.raises(QueryError, match=match)


@pytest.mark.parametrize("fragment", [PLAIN, GROUPED], ids=["plain", "grouped"])
def test_what_is_canonical_travels_and_passes_unchanged(fragment):
    assert Fragment.from_json(fragment.to_json()) == fragment
    assert fragment.check(COLUMNS) == fragment


def test_check_renders_again_in_the_spelling_of_the_table():
    written = features(f="AMOUNT+1 /* note */ -- end")
    loose = Fragment(
        "p", "payments", written, keys=(("ID",),), filters=("amount>1 or kind='a'",)
    )
    checked = loose.check(COLUMNS)
    assert checked.features == features(f='"amount" + 1')
    assert checked.keys == (('"Id"',),)
    assert checked.filters == ('("amount" > 1 OR "kind" = \'a\')',)
    assert checked.label is None
    loose = SubQuery(
        columns=features(ID="ID", s="sum(AMOUNT)+1 -- end"),
        filters=("kind='a' or kind='b'",),
        groups=("id /* note */",),
        having=("count(*)>1 or max(amount)<2",),
    )
    assert loose.check(COLUMNS, "t") == SubQuery(
        columns=features(ID='"Id"', s='SUM("amount") + 1'),
        filters=("(\"kind\" = 'a' OR \"kind\" = 'b')",),
        groups=('"Id"',),
        having=('(COUNT(*) > 1 OR MAX("amount") < 2)',),
    )


def test_sql_of_a_sub_query():
    assert SUBQUERY.to_sql("shard") == (
        'SELECT "Id" AS "id", AVG("amount") FILTER(WHERE "kind" = \'a\') AS "mean", '
        'COUNT(*) AS "n" FROM shard WHERE ("amount" > 1 OR "amount" IS NULL) '
        'GROUP BY "Id", YEAR("paid") HAVING COUNT(*) > 1'
    )
    columns = features(y='CONCAT("Id", (YEAR("paid")) + 1)')
    assert replace(SUBQUERY, columns=columns).check(COLUMNS, "t").columns == columns


PLACES = {
    "feature 'f'": lambda sql: {"features": features(f=sql)},
    "join key 0": lambda sql: {"keys": (('"Id"', sql),)},
    "the label": lambda sql: {"label": sql},
    "filter 1": lambda sql: {"filters": ("true", sql)},
    "column 'f' of the sub-query": lambda sql: {"columns": features(f=sql)},
    "filter 1 of the sub-query": lambda sql: {"filters": ("true", sql)},
    "group 1 of the sub-query": lambda sql: {"groups": ("kind", sql)},
    "HAVING condition 0 of the sub-query": lambda sql: {"having": (sql,)},
}


def check_changed(change, *, inside):
    """Check the plain fragment, or the sub-query of the other one, with a change."""
    if inside:
        return replace(GROUPED, subquery=replace(SUBQUERY, **change)).check(COLUMNS)
    return replace(PLAIN, **change).check(COLUMNS)


@CASES.each("hostile", "sql", "reason")
@pytest.mark.parametrize("place", PLACES)
def test_hostile_pieces_are_refused_by_name(sql, reason, place):
    with refused(f"table 'p': {place} is refused: .*({reason})"):
        check_changed(PLACES[place](sql), inside="sub-query" in place)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": ((),)}, "a join key has no expression"),
        ({"filters": ("max(amount) > 1",)}, NO_AGGREGATE),
        ({"label": "count(*)"}, NO_AGGREGATE),
    ],
)
def test_refused_fragments(change, message):
    with refused(message):
        check_changed(change, inside=False)


def test_a_fragment_over_a_sub_query_sees_its_outputs_alone():
    message = "feature 'f' is refused: no column 'amount'; columns: id, mean, n"
    with refused(message):
        replace(GROUPED, features=features(f='"amount"')).check(COLUMNS)
    with refused(NO_AGGREGATE):
        replace(GROUPED, filters=('SUM("n") > 1',)).check(COLUMNS)


@CASES.each("sub_query", "field", "pieces", "message")
def test_refused_sub_queries(field, pieces, message):
    values = [Feature("k", sql) for sql in pieces] if field == "columns" else pieces
    with refused(f"table 'p': .*{message}"):
        check_changed({field: tuple(values)}, inside=True)


@pytest.mark.parametrize("names", [("n", "N"), ("",)])
def test_refused_names(names):
    """Of features, and of the columns of a sub-query."""
    same = tuple(Feature(name, '"Id"') for name in names)
    with refused("feature names must differ and not be empty"):
        check_changed({"features": same}, inside=False)
    with refused("sub-query column names must differ and not be empty"):
        check_changed({"columns": same}, inside=True)


@pytest.mark.parametrize("data", [None, "x", {}, GROUPED.to_json() | {"subquery": {}}])
def test_malformed_json_is_refused(data):
    """Every field's type is tested with the messages that carry fragments."""
    with refused(r"malformed fragment: |expected the fields"):
        Fragment.from_json(data)


@given(names=st.lists(NAMES, min_size=1, max_size=3))
def test_any_name_is_a_name(names):
    """A name from the wire is refused, or DuckDB reads it as that name and no more."""
    subquery = SubQuery(tuple(Feature(name, '"k"') for name in names), groups=('"k"',))
    read = features(**{str(n): quote_name(name) for n, name in enumerate(names)})
    try:
        checked = Fragment("t", "t", read, subquery=subquery).check(["k"])
    except QueryError:
        return
    assert checked.subquery is not None
    relation = checked.subquery.to_sql("(SELECT 7 AS k)")
    items = ", ".join(feature.sql for feature in checked.features)
    rows = duckdb.sql(f"SELECT {items} FROM ({relation})").fetchall()
    assert rows == [(7,) * len(names)]
