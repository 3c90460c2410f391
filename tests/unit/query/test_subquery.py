"""Sub-queries at the site: what is accepted from the server, and what is refused."""

from dataclasses import replace

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlglot import exp

from tests.support.sql_pairs import ACCEPTED
from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import QueryError
from tp_flower.query.expressions import (
    AGGREGATE_NODES,
    check_expression,
    parse_aggregate,
    parse_statements,
    render,
)
from tp_flower.query.fragment import Feature, Fragment, SubQuery

COLUMNS = ("Id", "kind", "amount", "paid")
SUBQUERY = SubQuery(
    columns=(
        Feature("id", '"Id"'),
        Feature("mean", 'AVG("amount") FILTER(WHERE "kind" = \'a\')'),
        Feature("n", "COUNT(*)"),
    ),
    filters=('("amount" > 1 OR "amount" IS NULL)',),
    groups=('"Id"', 'YEAR("paid")'),
    having=("COUNT(*) > 1",),
)
FRAGMENT = Fragment(
    table="p",
    name="payments",
    features=(Feature("mean", '"mean"'), Feature("more", '"n" + 1')),
    keys=(('"id"',),),
    filters=('"n" < 10',),
    subquery=SUBQUERY,
)


def test_json_round_trip():
    assert Fragment.from_json(FRAGMENT.to_json()) == FRAGMENT


def test_check_changes_nothing_that_is_canonical():
    assert FRAGMENT.check(COLUMNS) == FRAGMENT


def test_sql():
    assert SUBQUERY.to_sql("shard") == (
        'SELECT "Id" AS "id", AVG("amount") FILTER(WHERE "kind" = \'a\') AS "mean", '
        'COUNT(*) AS "n" FROM shard WHERE ("amount" > 1 OR "amount" IS NULL) '
        'GROUP BY "Id", YEAR("paid") HAVING COUNT(*) > 1'
    )


def test_check_renders_again_in_the_spelling_of_the_table():
    loose = SubQuery(
        columns=(Feature("ID", "ID"), Feature("s", "sum(AMOUNT)+1 -- end")),
        filters=("kind='a' or kind='b'",),
        groups=("id /* note */",),
        having=("count(*)>1 or max(amount)<2",),
    )
    assert loose.check(COLUMNS, "t") == SubQuery(
        columns=(Feature("ID", '"Id"'), Feature("s", 'SUM("amount") + 1')),
        filters=("(\"kind\" = 'a' OR \"kind\" = 'b')",),
        groups=('"Id"',),
        having=('(COUNT(*) > 1 OR MAX("amount") < 2)',),
    )


def test_the_fragment_sees_the_outputs_alone():
    message = "feature 'f' is refused: no column 'amount'; columns: id, mean, n"
    with pytest.raises(QueryError, match=message):
        replace(FRAGMENT, features=(Feature("f", '"amount"'),)).check(COLUMNS)


def test_a_fragment_has_no_aggregates_of_its_own():
    with pytest.raises(QueryError, match="aggregate functions are not supported"):
        replace(FRAGMENT, filters=('SUM("n") > 1',)).check(COLUMNS)


# refused wherever a piece may stand
HOSTILE = [
    ("(SELECT amount FROM other)", "sub-queries are not supported"),
    ("amount IN (SELECT 1)", "sub-queries are not supported"),
    ("amount FROM other", "not one expression"),
    ("amount FROM other GROUP BY id --", "not one expression"),
    ("amount) FROM read_csv('/etc/passwd'); --", "does not parse"),
    ("amount; ATTACH 'x' AS y", "not one expression"),
    ("amount UNION ALL SELECT 1", "not one expression"),
    ("read_text('/etc/passwd')", "function 'read_text' is not among"),
    ("read_csv('/etc/passwd')", "function 'read_csv' is not among"),
    ("getenv('HOME')", "function 'getenv' is not among"),
    ("rank() OVER ()", "window functions are not supported"),
    ("other.amount", "only columns of the table itself, without prefix"),
    ("salary", "no column 'salary'; columns: Id, kind, amount, paid"),
    ("rowid", "no column 'rowid'"),
    ("any_value(amount)", "aggregate functions are not|depends on the order"),
    ("list(amount)", "aggregate functions are not|depends on the order"),
    ("string_agg(kind, ',')", "aggregate functions are not|depends on the order"),
    ("product(amount)", "function 'product' is not among"),
    ("sum(amount ORDER BY id)", "construct Order is not among|aggregate functions"),
    ("sum(amount) OVER ()", "window functions are not supported"),
    ("*", r"name the columns instead of \*|\* stands inside COUNT alone"),
    ("amount AS x", "an alias has no place here"),
    ("COLUMNS('.*')", r"name the columns instead of \*"),
    ("amount " + "+ 1 " * 10_000, "characters, at most 20000"),
    ("(" * 3000 + "amount" + ")" * 3000, "nested too deeply"),
]
PIECES = [
    (lambda sql: {"columns": (Feature("f", sql),)}, "sub-query column 'f'"),
    (lambda sql: {"filters": ("true", sql)}, "sub-query filter 1"),
    (lambda sql: {"groups": ("kind", sql)}, "sub-query group 1"),
    (lambda sql: {"having": (sql,)}, "sub-query having 0"),
]


@pytest.mark.parametrize(("sql", "reason"), HOSTILE)
@pytest.mark.parametrize(
    ("piece", "where"), PIECES, ids=["column", "filter", "group", "having"]
)
def test_hostile_pieces_are_refused_by_name(sql, reason, piece, where):
    fragment = replace(FRAGMENT, subquery=replace(SUBQUERY, **piece(sql)))
    message = f"table 'p': {where} is refused: .*({reason})"
    with pytest.raises(QueryError, match=message):
        fragment.check(COLUMNS)


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("sum(count(*))", r"an aggregate cannot stand inside another: COUNT\(\*\)"),
        ("sum(max(amount) + 1)", "an aggregate cannot stand inside another"),
        ("sum(amount) FILTER (WHERE max(id) > 1)", "cannot stand inside another"),
        ("sum(count(*) FILTER (WHERE id > 1))", "cannot stand inside another"),
        ("abs(amount) FILTER (WHERE id > 1)", "follows an aggregate"),
        ("sum(DISTINCT amount)", r"COUNT\(DISTINCT x\) alone"),
        ("count(DISTINCT amount, id)", r"COUNT\(DISTINCT x\) alone, with one"),
        ("sum(*)", r"\* stands inside COUNT alone"),
        ("count(* EXCLUDE (id))", r"\* stands inside COUNT alone"),
        ("count()", "this form of an aggregate is not supported"),
        ("max(amount, 3)", "this form of an aggregate is not supported"),
        ("quantile_cont(amount, 2)", "a quantile is a number from 0 to 1"),
        ("quantile_cont(amount, '0.5')", "a quantile is a number from 0 to 1"),
        ("quantile_cont(amount, [0.5])", "a quantile is a number from 0 to 1"),
        ("sum(p.*)", r"name the columns instead of \*"),
    ],
)
def test_forms_of_aggregates(sql, reason):
    with pytest.raises(QueryError, match=f"column 'f' is refused: .*{reason}"):
        parse_aggregate(sql, "column 'f'")


def test_a_condition_belongs_to_a_filter():
    with pytest.raises(QueryError, match="WHERE stands inside FILTER alone"):
        check_expression(exp.Where(this=exp.column("x")), "column 'f'", aggregates=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": ()}, "sub-query needs a column and an expression to group by"),
        ({"groups": ()}, "sub-query needs a column and an expression to group by"),
        ({"groups": ("1",)}, "sub-query group 1 names no column"),
        ({"groups": ("'x'",)}, "sub-query group 'x' names no column"),
        ({"groups": ("rollup(kind)",)}, "sub-query group 0 is refused"),
        ({"groups": ("ALL",)}, "sub-query group 0 is refused"),
        ({"groups": ("()",)}, "sub-query group 0 is refused"),
        ({"groups": ("kind, amount",)}, "sub-query group 0 is refused: not one"),
        ({"groups": ("sum(amount)",)}, "aggregate functions are not supported"),
        ({"filters": ("sum(amount) > 1",)}, "aggregate functions are not supported"),
        (
            {"columns": (Feature("n", "COUNT(*)"), Feature("N", '"Id"'))},
            r"sub-query column names must differ and not be empty, got \['n', 'N'\]",
        ),
        ({"columns": (Feature("", '"Id"'),)}, "names must differ and not be empty"),
        (
            {"columns": (Feature("k", '"kind"'),)},
            "column 'kind' is neither in GROUP BY nor in an aggregate",
        ),
        (
            {"columns": (Feature("k", 'SUM("amount") + "amount"'),)},
            "column 'amount' is neither in GROUP BY nor in an aggregate",
        ),
        (
            {"columns": (Feature("k", 'MONTH("paid")'),)},
            "column 'paid' is neither in GROUP BY nor in an aggregate",
        ),
        (
            {"having": ('"amount" > 1',)},
            "column 'amount' is neither in GROUP BY nor in an aggregate",
        ),
    ],
)
def test_refused_subqueries(change, message):
    with pytest.raises(QueryError, match=f"table 'p': .*{message}"):
        replace(FRAGMENT, subquery=replace(SUBQUERY, **change)).check(COLUMNS)


def test_columns_may_be_made_of_group_expressions():
    columns = (Feature("y", 'CONCAT("Id", (YEAR("paid")) + 1)'),)
    assert replace(SUBQUERY, columns=columns).check(COLUMNS, "t").columns == columns


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"columns": "x"}, r"Expected `array`, got `str` - at `\$.subquery.columns`"),
        ({"columns": [["a", 1]]}, r"got `int` - at `\$.subquery.columns\[0\]\[1\]`"),
        ({"columns": ["ab"]}, r"got `str` - at `\$.subquery.columns\[0\]`"),
        ({"groups": [["a"]]}, r"got `array` - at `\$.subquery.groups\[0\]`"),
        ({"filters": None}, r"got `null` - at `\$.subquery.filters`"),
        ({"having": [None]}, r"got `null` - at `\$.subquery.having\[0\]`"),
        ({"from": "other"}, "expected the fields and lengths of .*; got .*'from'"),
    ],
)
def test_malformed_json_is_refused(data, message):
    subquery = {**FRAGMENT.to_json()["subquery"], **data}
    with pytest.raises(QueryError, match=message):
        Fragment.from_json({**FRAGMENT.to_json(), "subquery": subquery})


@pytest.mark.parametrize("data", [[], "SELECT 1", {}, 1])
def test_json_that_is_no_subquery_is_refused(data):
    with pytest.raises(QueryError, match=r"malformed fragment: (Expected|Object)"):
        Fragment.from_json({**FRAGMENT.to_json(), "subquery": data})


def test_everything_that_is_allowed_was_run():
    # every accepted pair runs in DuckDB and is compared with its answer
    trees = [tree for pair in ACCEPTED for tree in parse_statements(pair["sql"])]
    nodes = {type(node) for tree in trees for node in tree.walk()}
    assert nodes >= AGGREGATE_NODES
    assert exp.AnyValue not in AGGREGATE_NODES


NAMES = st.one_of(
    st.text(min_size=1, max_size=12),
    st.sampled_from(
        ['a"b', "a'b", "x -- y", "/* x", "; DROP TABLE t", "a.b", "*", "(group)"]
    ),
)


@settings(deadline=None)
@given(names=st.lists(NAMES, min_size=1, max_size=3))
def test_any_name_is_a_name(names):
    """A name from the wire is refused, or DuckDB reads it as that name and no more."""
    subquery = SubQuery(tuple(Feature(name, '"k"') for name in names), groups=('"k"',))
    features = tuple(
        Feature(str(place), quote_name(name)) for place, name in enumerate(names)
    )
    try:
        checked = Fragment("t", "t", features, subquery=subquery).check(["k"])
    except QueryError:
        return
    assert checked.subquery is not None
    relation = checked.subquery.to_sql("(SELECT 7 AS k)")
    items = ", ".join(feature.sql for feature in checked.features)
    found = duckdb.sql(f"SELECT {items} FROM ({relation})").fetchall()
    assert found == [(7,) * len(names)]


TOKENS = """
x y 1 'a' ( ) ( ) , ; + * = AND OR NOT NULL CASE WHEN THEN END SUM( COUNT( COUNT(*)
AVG( MAX( DISTINCT FILTER (WHERE ) OVER QUANTILE_CONT( 0.5 ) ORDER BY FROM t SELECT
MEDIAN( -- /* */ " . AS GROUP HAVING ANY_VALUE( BOOL_OR(
"""


@settings(max_examples=300)
@given(st.lists(st.sampled_from(TOKENS.split()), max_size=12).map(" ".join))
def test_anything_is_refused_or_has_one_form(text):
    try:
        once = render(parse_aggregate(text, "piece"), quote=True)
    except QueryError:
        return
    assert render(parse_aggregate(once, "piece"), quote=True) == once
