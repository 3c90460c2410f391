"""Fragments: what a site accepts from the server, and what it refuses."""

from dataclasses import replace

import duckdb
import pytest

from tp_flower.errors import QueryError
from tp_flower.query.fragment import Feature, Fragment

COLUMNS = ("Id", "name", "amount", "time_hour")
FRAGMENT = Fragment(
    table="o",
    name="orders",
    features=(Feature("amount", '"amount"'), Feature("short", 'LOWER("name")')),
    keys=(('"Id"',), ('"name"', '"time_hour"')),
    label='"amount" > 15',
    filters=('("amount" > 1 OR "amount" IS NULL)',),
)


def test_json_round_trip():
    assert Fragment.from_json(FRAGMENT.to_json()) == FRAGMENT


def test_check_changes_nothing_that_is_canonical():
    assert FRAGMENT.check(COLUMNS) == FRAGMENT


def test_check_renders_again_in_the_spelling_of_the_table():
    loose = Fragment(
        table="o",
        name="orders",
        features=(Feature("f", "AMOUNT+1 /* note */ -- end"),),
        keys=(("ID",),),
        filters=("amount>1 or name='a'",),
    )
    checked = loose.check(COLUMNS)
    assert checked.features == (Feature("f", '"amount" + 1'),)
    assert checked.keys == (('"Id"',),)
    assert checked.filters == ('("amount" > 1 OR "name" = \'a\')',)
    assert checked.label is None


def test_filters_keep_their_meaning_between_ands():
    filters = Fragment("t", "t", filters=("a OR b", "c")).check(["a", "b", "c"]).filters
    row = duckdb.sql(
        f"SELECT {' AND '.join(filters)} FROM (SELECT true AS a, true b, false c)"
    )
    assert row.fetchall() == [(False,)]


HOSTILE = [
    ("(SELECT amount FROM other)", "sub-queries are not supported"),
    ("amount FROM other", "not one expression"),
    ("amount; DROP TABLE orders", "not one expression"),
    ("amount) FROM orders; ATTACH 'x' AS y; --", "does not parse"),
    ("other.amount", "only columns of the table itself, without prefix: other.amount"),
    ("o.amount", "only columns of the table itself, without prefix: o.amount"),
    ("x.y.amount", "write a column as table.column"),
    ("salary", "no column 'salary'; columns: Id, name, amount, time_hour"),
    ("amuont", r"no column 'amuont' \(did you mean 'amount'\?\)"),
    ("rowid", "no column 'rowid'"),
    ("shard", "no column 'shard'"),
    ("read_text('/etc/passwd')", "function 'read_text' is not among"),
    ("glob('/*')", "is not among those supported"),
    ("max(amount)", "aggregate functions are not supported"),
    ("lag(amount) OVER ()", "window functions are not supported"),
    ("$1", "parameters are not supported"),
    ("*", r"name the columns instead of \*"),
    ("COPY orders TO 'x'", "does not parse"),
]


@pytest.mark.parametrize(("sql", "reason"), HOSTILE)
@pytest.mark.parametrize(
    ("piece", "where"),
    [
        (lambda sql: {"features": (Feature("f", sql),)}, "feature 'f'"),
        (lambda sql: {"keys": (('"Id"', sql),)}, "key 0"),
        (lambda sql: {"label": sql}, "label"),
        (lambda sql: {"filters": ("true", sql)}, "filter 1"),
    ],
    ids=["feature", "key", "label", "filter"],
)
def test_hostile_pieces_are_refused_by_name(sql, reason, piece, where):
    fragment = replace(FRAGMENT, **piece(sql))
    message = f"table 'o': {where} is refused: .*{reason}"
    with pytest.raises(QueryError, match=message):
        fragment.check(COLUMNS)


@pytest.mark.parametrize("names", [("a", "A"), ("a", "a"), ("", "a")])
def test_feature_names_must_differ(names):
    features = tuple(Feature(name, '"amount"') for name in names)
    with pytest.raises(QueryError, match="feature names must differ and not be empty"):
        replace(FRAGMENT, features=features).check(COLUMNS)


def test_a_key_without_parts_is_refused():
    with pytest.raises(QueryError, match="a join key has no expression"):
        replace(FRAGMENT, keys=((),)).check(COLUMNS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": "x"}, r"Expected `array`, got `str` - at `\$.features`"),
        ({"features": ["ab"]}, r"Expected `array`, got `str` - at `\$.features\[0\]`"),
        ({"features": [["a"]]}, r"at least length 2, got 1 - at `\$.features\[0\]`"),
        ({"features": [["a", "b", "c"]]}, "expected the fields and lengths of"),
        ({"features": [["a", 1]]}, r"got `int` - at `\$.features\[0\]\[1\]`"),
        ({"keys": ["ab"]}, r"Expected `array`, got `str` - at `\$.keys\[0\]`"),
        ({"keys": [[1]]}, r"Expected `str`, got `int` - at `\$.keys\[0\]\[0\]`"),
        ({"label": 1}, r"Expected `str \| null`, got `int` - at `\$.label`"),
        ({"filters": None}, r"Expected `array`, got `null` - at `\$.filters`"),
        ({"table": None}, r"Expected `str`, got `null` - at `\$.table`"),
        ({"sql": "DROP TABLE t"}, "expected the fields and lengths of .*; got .*'sql'"),
    ],
)
def test_malformed_json_is_refused(change, message):
    with pytest.raises(QueryError, match=message):
        Fragment.from_json({**FRAGMENT.to_json(), **change})


@pytest.mark.parametrize("data", [None, [], "x", {}])
def test_json_that_is_no_fragment_is_refused(data):
    with pytest.raises(QueryError, match=r"malformed fragment: (Expected|Object)"):
        Fragment.from_json(data)
