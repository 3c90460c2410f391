"""What databases compute is what DuckDB would."""

import re
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.database_tables import KINDS, fill, run, source_of, url_of
from tests.joined import engine_rows, joined_rows, result_names
from tests.sql_tables import TABLES, load_duckdb
from tests.test_sql_pairs import ACCEPTED, by_name
from tp_flower.errors import SourceError
from tp_flower.extraction.extract import extract
from tp_flower.query import Query
from tp_flower.query.fragment import Feature, Fragment, SubQuery
from tp_flower.sources.shards import describe, scan


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def url(kind, request, tmp_path_factory):
    return url_of(kind, request, tmp_path_factory.mktemp("database"))


@pytest.fixture(scope="module")
def sources(url):
    return {
        name: [source_of(url, fill(url, name, table.columns, table.rows))]
        for name, table in TABLES.items()
    }


@pytest.fixture(scope="module")
def schemas(sources):
    return {name: describe(own[0]).columns for name, own in sources.items()}


@pytest.fixture(scope="module")
def duck(kind):
    with duckdb.connect() as connection:
        load_duckdb(connection)
        if kind == "sqlite":
            # it has no decimal numbers, whatever a column is declared as
            for name, table in TABLES.items():
                for column, declared in table.columns.items():
                    if declared.startswith("DECIMAL"):
                        connection.execute(
                            f"ALTER TABLE {name} ALTER {column} TYPE DOUBLE"
                        )
        yield connection


@by_name(ACCEPTED)
def test_answer_is_that_of_duckdb(pair, sources, schemas, duck):
    bound = Query.from_sql(pair["sql"]).bind(schemas)
    reference = pair.get("reference", pair["sql"])
    expected = engine_rows(duck, reference, result_names(bound))
    found = joined_rows(bound, sources, matched=pair.get("matched", False))
    assert found == expected


# expressions, one by one, over nasty values


COLUMNS = {
    "id": "INTEGER",
    "i": "INTEGER",
    "j": "BIGINT",
    "s": "SMALLINT",
    "n": "DECIMAL(10,2)",
    "m": "DECIMAL(20,6)",
    "d": "DOUBLE PRECISION",
    "e": "DOUBLE PRECISION",
    "t": "VARCHAR(40)",
    "u": "CHAR(8)",
    "a": "DATE",
    "b": "TIMESTAMP",
    "f": "BOOLEAN",
}
HUGE = 2**53 + 1  # the first whole number that a double does not hold
ROWS = [
    (
        1,
        1,
        1,
        1,
        "1.00",
        "0.000001",
        1.0,
        0.1,
        "ab",
        "ab",
        "2024-02-29",
        "2024-02-29 00:00:00",
        True,
    ),
    (
        2,
        -7,
        HUGE,
        -3,
        "-0.01",
        "12345678901234.567890",
        float(HUGE - 1),
        -2.5,
        "AB",
        "AB",
        "1969-12-31",
        "1969-12-31 23:59:59.999999",
        False,
    ),
    (
        3,
        0,
        -(2**62),
        0,
        "99999999.99",
        "-0.500000",
        -0.0,
        1e-9,
        "ab ",
        "x",
        "2000-12-31",
        "2000-01-01 12:30:00.5",
        None,
    ),
    (
        4,
        2**31 - 1,
        2**62,
        32767,
        "0.00",
        "7.000000",
        1e15,
        3.0,
        "",
        "",
        "1900-03-01",
        "1582-10-15 06:07:08",
        True,
    ),
    (5, None, None, None, None, None, None, None, None, None, None, None, None),
    (
        6,
        3,
        0,
        2,
        "2.50",
        "2.500000",
        2.5,
        2.5,
        "Zoe\u0308",
        "it's",
        "2013-01-06",
        "2013-01-06 23:59:59",
        False,
    ),
    (
        7,
        100,
        100,
        100,
        "100.00",
        "100.000000",
        100.0,
        99.99999999999999,
        "Zo\u00eb",
        "%_",
        "2023-06-30",
        "2023-06-30 01:02:03.000004",
        True,
    ),
    (
        8,
        1,
        3,
        1,
        "1.10",
        "1.100000",
        1.1,
        1.1,
        '\U0001f600\t"`',
        "a",
        "2024-12-30",
        "2024-12-30 18:00:00",
        False,
    ),
]
EXPRESSIONS = [
    # numbers
    "i + 1",
    "j - 1",
    "s * 2",
    "i * 0.5",
    "n + m",
    "n * 3",
    "n * n",
    "m - n",
    "-n",
    "-(i - 1)",
    "ABS(i)",
    "ABS(n)",
    "ABS(d)",
    "d + e",
    "d * 0.1",
    "e - i",
    "d / 3",
    "i / 4",
    "n / 2",
    "n / -0.3",
    "i + NULL",
    "CAST(i AS DOUBLE)",
    "CAST(n AS DOUBLE)",
    "CAST(j AS DOUBLE)",
    "d + j",
    "n + d",
    "(i + s) * 2 - i",
    # conditions
    "i > 0",
    "i >= 0.5",
    "n = 1",
    "n <> 2.5",
    "n < m",
    "j = d",
    "j <= 9007199254740992.0",
    "d = e",
    "d < 0.1",
    "e IN (0.1, 2.5)",
    "i IN (1, 3, NULL)",
    "i NOT IN (1, NULL)",
    "j IN (9007199254740993)",
    "n BETWEEN 0 AND 2.5",
    "i BETWEEN s AND j",
    "d BETWEEN 1 AND n",
    "i IS NULL",
    "d IS NOT NULL",
    "i > 0 AND n > 0",
    "i > 0 OR n IS NULL",
    "NOT (i > 0)",
    "i > 0 OR NULL",
    "NULL AND i > 0",
    "i = NULL",
    "(i > 0) = (n > 0)",
    "i > s AND (j < 5 OR NOT d > 2) OR e IS NULL",
    # booleans
    "f",
    "NOT f",
    "f AND i > 0",
    "f = TRUE",
    "f IS NULL",
    "COALESCE(f, FALSE)",
    # choices
    "CASE WHEN i > 0 THEN 1 ELSE 0 END",
    "CASE WHEN i > 0 THEN n END",
    "CASE WHEN d > 1 THEN i ELSE 0.5 END",
    "CASE WHEN d > 1 THEN i ELSE d END",
    "CASE i WHEN 1 THEN 'one' WHEN 3 THEN 'three' ELSE t END",
    "CASE t WHEN 'ab' THEN 1 WHEN 'AB' THEN 2 ELSE 3 END",
    "CASE WHEN f THEN a END",
    "COALESCE(i, -1)",
    "COALESCE(i, 0.5)",
    "COALESCE(d, i, 0)",
    "COALESCE(t, '?')",
    "COALESCE(n, d)",
    "NULLIF(i, 1)",
    "NULLIF(n, 1)",
    "NULLIF(t, 'ab')",
    "NULLIF(i, d)",
    "NULLIF(d, 1)",
    "IF(i > 0, n, m)",
    # texts
    "t = 'ab'",
    "t <> 'AB'",
    "t = ''",
    "t = u",
    "u = 'ab'",
    "t IN ('ab', 'AB', NULL)",
    "t NOT IN ('ab ')",
    "t = 'Zo\u00eb'",
    "t = '\U0001f600\t\"`'",
    "u = 'it''s'",
    "u = '%_'",
    "t IS NULL",
    "t < 'b'",
    "lower(t)",
    "t LIKE 'a%'",
    "t || u",
    "length(t)",
    # dates
    *(
        f"{part}({column})"
        for part in (
            "year",
            "quarter",
            "month",
            "day",
            "dayofyear",
            "dayofweek",
            "weekday",
            "isodow",
            "hour",
        )
        for column in "ab"
    ),
    "minute(b)",
    "second(b)",
    "EXTRACT(dow FROM a)",
    "date_part('hour', b)",
    "EXTRACT('isodow' FROM b)",
    "a = '2024-02-29'",
    "a < DATE '2000-01-01'",
    "a > TIMESTAMP '2000-12-31 00:00:00'",
    "b >= '2000-01-01'",
    "b < '2024-02-29 00:00:00.000001'",
    "b = '1969-12-31 23:59:59.999999'",
    "a BETWEEN '1900-01-01' AND '2000-12-31'",
    "a IN ('2024-02-29', '1969-12-31', NULL)",
    "a = b",
    "b > DATE '2024-01-01'",
    "b > '1066-10-14'",
    "COALESCE(a, DATE '2000-01-01')",
    "month(a) + 12 * year(a)",
    "CASE WHEN hour(b) < 12 THEN 'am' ELSE 'pm' END",
]


@pytest.fixture(scope="module")
def nasty(url):
    rows = [
        tuple(
            None
            if value is None
            else Decimal(value)
            if "DECIMAL" in declared
            else datetime.fromisoformat(value)
            if declared == "TIMESTAMP"
            else date.fromisoformat(value)
            if declared == "DATE"
            else value
            for value, declared in zip(row, COLUMNS.values(), strict=True)
        )
        for row in ROWS
    ]
    return rows, source_of(url, fill(url, "nasty", COLUMNS, rows), order_by=("id",))


@pytest.fixture(scope="module")
def nasty_duck(nasty):
    """The same rows in DuckDB, of the types that the database gives them."""
    rows, source = nasty
    types = describe(source).columns
    with duckdb.connect() as connection:
        # its rewriting leaves out additions that would overflow: NULLIF(2, i + 2)
        connection.execute("SET disabled_optimizers = 'expression_rewriter'")
        listed = ", ".join(f'"{name}" {kind}' for name, kind in types.items())
        connection.execute(f"CREATE TABLE nasty ({listed})")
        places = ", ".join("?" * len(types))
        connection.executemany(f"INSERT INTO nasty VALUES ({places})", rows)
        if "DOUBLE" in types["n"]:
            # what a driver rounds before it is stored
            connection.execute(
                "UPDATE nasty SET m = CAST(CAST(m AS VARCHAR) AS DOUBLE)"
            )
        yield connection


def exactly(rows):
    """Values as they are, but for NULL and NaN, -0.0 and 0.0 being the same."""
    return [
        tuple(
            v + 0.0 if isinstance(v, float) else v
            for v in (None if v != v else v for v in row)
        )
        for row in rows
    ]


def scanned(source, fragment):
    with scan(source, fragment) as opened:
        left = opened.fragment
        listed = ", ".join(f.sql for f in left.features)
        where = " AND ".join(left.filters) or "true"
        relation = "shard"
        if left.subquery is not None:
            relation = f"({left.subquery.to_sql('shard')})"
        rows = []
        for _ in opened.chunks():
            rows += opened.connection.execute(
                f"SELECT {listed} FROM {relation} WHERE {where}"
            ).fetchall()
        return rows, opened.pushed


def test_expressions(kind, nasty, nasty_duck):
    source, answers, refused = nasty[1], {}, []
    for sql in EXPRESSIONS:
        try:
            rows = nasty_duck.execute(f"SELECT id, {sql} FROM nasty ORDER BY id")
        except duckdb.Error:
            refused.append(sql)
        else:
            answers[sql] = exactly(rows.fetchall())
    found, _ = scanned(source, fragment_of(answers))
    for place, (sql, expected) in enumerate(answers.items(), start=1):
        assert (sql, exactly([(r[0], r[place]) for r in found])) == (sql, expected)
    assert refused or kind == "sqlite"
    for sql in refused:
        with pytest.raises(SourceError, match=r"some value|holds a value|Range"):
            scanned(source, fragment_of([sql]))


with duckdb.connect() as _connection:
    _connection.execute(
        f"CREATE TABLE nasty ({', '.join(map(' '.join, COLUMNS.items()))})"
    )
    CONDITIONS = [
        sql
        for sql in EXPRESSIONS
        if _connection.sql(f"SELECT {sql} FROM nasty").types == ["BOOLEAN"]
    ]


@pytest.mark.parametrize("sql", CONDITIONS)
def test_filter(sql, nasty, nasty_duck):
    try:
        rows = nasty_duck.execute(f"SELECT id FROM nasty WHERE {sql} ORDER BY id")
    except duckdb.Error:
        # a number that DuckDB cannot hold: databases may, and answer rightly, or refuse
        with suppress(SourceError):
            scanned(nasty[1], fragment_of([], (sql,)))
        return
    assert scanned(nasty[1], fragment_of([], (sql,)))[0] == rows.fetchall()


def fragment_of(expressions, filters=(), subquery=None):
    features = [("id", "id"), *((f"x{k}", sql) for k, sql in enumerate(expressions))]
    return Fragment(
        "t",
        "t",
        features=tuple(Feature(name, sql) for name, sql in features),
        filters=tuple(filters),
        subquery=subquery,
    )


# rules of texts, whole seconds, a date beside a time, a time before the year 1000
STAY = {
    "lower(t)",
    "t LIKE 'a%'",
    "t || u",
    "length(t)",
    "t < 'b'",
    "second(b)",
    "a = b",
    "a > TIMESTAMP '2000-12-31 00:00:00'",
    "hour(a)",
}
# MariaDB has numbers for truth values, and any number may be in a column
TABS = {sql for sql in EXPRESSIONS if "\t" in sql}
FLAGS = {sql for sql in EXPRESSIONS if "f" in re.findall(r"\w+", sql)}


def test_what_is_pushed(kind, nasty):
    with scan(nasty[1], fragment_of(EXPRESSIONS)) as opened:
        found = [re.match(r"feature x(\d+): ", words) for words in opened.pushed]
    pushed = {EXPRESSIONS[int(match[1])] for match in found if match}
    if kind == "sqlite":
        # neither sums, which may round, nor dates, which are texts
        assert not pushed & (STAY | FLAGS | {"i + 1", "month(a)", "i >= 0.5"})
        assert pushed >= {"i > 0", "t = 'ab'", "COALESCE(t, '?')", "d < 0.1", "ABS(i)"}
    else:
        stay = STAY | FLAGS | TABS if kind == "mariadb" else STAY | {"f"}
        assert set(EXPRESSIONS) - pushed == stay


def test_push_down_can_be_switched_off(nasty):
    database = replace(nasty[1].database, is_pushed_down=False)
    source = replace(nasty[1], database=database)
    with scan(source, fragment_of(["i + 1"], ["i < 5"])) as opened:
        assert opened.pushed == ()
        assert opened.fragment.filters == ('"i" < 5',)
    fragment = fragment_of(["j - 1"], ["i < 5"])
    assert scanned(source, fragment)[0] == scanned(nasty[1], fragment)[0]


def test_only_needed_columns_are_read(nasty):
    with scan(nasty[1], fragment_of(["lower(t)", "t = 'ab'"], ["i > 0"])) as opened:
        assert list(opened.columns) == ["id", "t", "pushed 0"]
        assert opened.pushed == ('filter: "i" > 0', "feature x1: \"t\" = 'ab'")


NUMBERS_OF = st.sampled_from(["i", "s", "n", "d", "e", "2", "0.5", "-3"])
NUMBER = st.recursive(
    NUMBERS_OF,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("+-"), inner),
        st.builds("ABS({})".format, inner),
        st.builds("({} / 4)".format, inner),
        st.builds("COALESCE({}, {})".format, inner, inner),
        st.builds("NULLIF({}, {})".format, inner, inner),
        st.builds("CASE WHEN {} > {} THEN {} ELSE {} END".format, *[inner] * 4),
    ),
    max_leaves=6,
)
TEST = st.recursive(
    st.one_of(
        st.builds(
            "{} {} {}".format, NUMBER, st.sampled_from(["=", "<>", "<", ">="]), NUMBER
        ),
        st.builds("{} IN ({}, {})".format, NUMBER, NUMBER, NUMBER),
        st.builds("{} BETWEEN {} AND {}".format, NUMBER, NUMBER, NUMBER),
        st.builds("{} IS NULL".format, NUMBER),
        st.sampled_from(["t = 'ab'", "t <> u", "a < '2001-01-01'", "month(b) > 6"]),
    ),
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        st.builds("NOT ({})".format, inner),
    ),
    max_leaves=5,
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(number=NUMBER, condition=TEST)
def test_any_expression(nasty, nasty_duck, number, condition):
    found, expected = None, None
    with suppress(duckdb.Error):
        expected = nasty_duck.execute(
            f"SELECT id, {number}, {condition} FROM nasty WHERE {condition} ORDER BY id"
        ).fetchall()
    with suppress(SourceError):
        fragment = fragment_of([number, condition], [condition])
        found, _ = scanned(nasty[1], fragment)
    if expected is not None:
        assert exactly(found) == exactly(expected)


# sub-queries


SUB_QUERIES = [
    ("SUM(i)", "s", None),
    ("AVG(i)", "t", None),
    ("AVG(n)", "f", None),
    ("AVG(m)", "f", None),
    ("SUM(n) / COUNT(n)", "u", "COUNT(*) > 0"),
    ("COUNT(DISTINCT t)", "i > 0", None),
    ("COUNT(DISTINCT u)", "f", None),
    ("COUNT(i) FILTER (WHERE n > 1)", "t", None),
    ("COUNT(*) FILTER (WHERE n > 1)", "a", "COUNT(*) FILTER (WHERE n > 1) >= 0"),
    ("SUM(n) FILTER (WHERE t = 'ab')", "f", None),
    ("MIN(d)", "f", "MIN(d) IS NOT NULL"),
    ("MAX(a)", "f", None),
    ("MAX(b)", "month(b)", None),
    ("MIN(n) + MAX(j)", "CASE WHEN i > 0 THEN 'yes' ELSE t END", None),
    ("CASE WHEN COUNT(*) > 1 THEN SUM(j - 1) ELSE 0 END", "n", None),
    ("AVG(d)", "COALESCE(t, 'none')", None),
    ("MEDIAN(i)", "f", None),
    ("COUNT(*)", "lower(t)", None),
    ("COUNT(*)", "d", None),
]


@pytest.mark.parametrize(("aggregate", "group", "having"), SUB_QUERIES)
def test_sub_query(aggregate, group, having, nasty, nasty_duck):
    # sums of what fits a BIGINT, for SQLite
    where = ("j < 9000 OR j IS NULL",)
    subquery = SubQuery(
        columns=(Feature("id", group), Feature("x", aggregate)),
        filters=(f"({where[0]})",),
        groups=(group,),
        having=(having,) if having else (),
    )
    fragment = Fragment(
        "t",
        "t",
        features=(Feature("id", '"id"'), Feature("x", '"x"')),
        subquery=subquery,
    )
    expected = nasty_duck.execute(
        f"SELECT {group} AS g, {aggregate} FROM nasty WHERE {where[0]} "
        f"GROUP BY {group} HAVING {having or 'true'}"
    ).fetchall()
    found, _ = scanned(nasty[1], fragment)
    assert sorted(map(rounded, found)) == sorted(map(rounded, expected))


def rounded(row):
    """Sums of doubles depend on their order."""
    return repr([float(f"{v:.14g}") + 0.0 if isinstance(v, float) else v for v in row])


def test_groups_are_computed_in_the_database(nasty):
    subquery = SubQuery((Feature("x", "SUM(i)"),), groups=('"s"', '"t"'))
    fragment = Fragment(
        "t", "t", features=(Feature("x", '"x" + 1'),), subquery=subquery
    )
    with scan(nasty[1], fragment) as opened:
        assert opened.fragment.subquery is None
        assert opened.groups == ('"group 0"', '"group 1"')
        assert opened.columns["x"] == "HUGEINT"
        # the order of the groups would tell them
        assert opened.needs_sort
        assert opened.pushed == ('sub-query: GROUP BY "s", "t"',)


def test_groups_at_the_site_need_few_columns_and_rows(nasty):
    subquery = SubQuery(
        (Feature("x", "MEDIAN(i)"),),
        filters=("i > 0", "lower(t) = 'ab'"),
        groups=("s",),
    )
    fragment = Fragment("t", "t", features=(Feature("x", '"x"'),), subquery=subquery)
    with scan(nasty[1], fragment) as opened:
        assert opened.fragment.subquery.filters == ("LOWER(\"t\") = 'ab'",)
        assert list(opened.columns) == ["i", "s", "t"]
        assert opened.pushed == ('filter: "i" > 0',)
        assert opened.groups == ()
    assert scanned(nasty[1], fragment)[0] == [(1.0,)]


def test_years_before_the_first(postgresql):
    run(
        postgresql,
        "CREATE TABLE old_days (id int PRIMARY KEY, a date)",
        "INSERT INTO old_days "
        "VALUES (1, '0044-03-15 BC'), (2, '0001-01-01'), (3, NULL)",
    )
    with duckdb.connect() as connection:
        expected = connection.execute(
            "SELECT k, year(CAST(a AS DATE)) FROM (VALUES (1, '0044-03-15 (BC)'), "
            "(2, '0001-01-01'), (3, NULL)) AS t(k, a)"
        ).fetchall()
    fragment = fragment_of(["year(a)"])
    assert scanned(source_of(postgresql, "old_days"), fragment)[0] == expected
    assert expected[0] == (1, -43)


@pytest.mark.parametrize("mode", ["NO_BACKSLASH_ESCAPES", "EMPTY_STRING_IS_NULL", ""])
def test_texts_mean_the_same_under_every_mode_of_mariadb(mariadb, mode):
    name = fill(
        mariadb,
        "t",
        {'t`:"': "varchar(9) CHARACTER SET utf8mb4"},
        [("a\nb",), ("a\\nb",), ("",), ("it's",)],
    )
    column = '"t`:"""'
    values = [
        f"{column} = 'a\nb'",
        f"{column} = ''",
        f"{column} = 'it''s'",
        f"CASE WHEN {column} <> '' THEN 'tab\t' ELSE '' END = ''",
        f"nullif({column}, '') IS NULL",
    ]
    features = tuple(Feature(f"f{k}", sql) for k, sql in enumerate(values))
    fragment = Fragment("t", name, features=features)
    run(mariadb, f"SET GLOBAL sql_mode = '{mode}'")
    try:
        found = [
            extract(
                source_of(mariadb, name, order_by=('t`:"',), is_pushed_down=pushed),
                fragment,
            )
            for pushed in (True, False)
        ]
    finally:
        run(mariadb, "SET GLOBAL sql_mode = DEFAULT")
    for feature in features:
        here, there = (own.column(feature.name).values for own in found)
        assert here.tolist() == there.tolist(), feature.sql
    assert f"feature f1: {values[1]}" in found[0].pushed
