"""Databases filter as DuckDB would."""

import re
from contextlib import suppress
from dataclasses import replace
from datetime import date

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.database_tables import KINDS, fill, run, source_of, url_of
from tests.support.files import case_table
from tests.support.joined import engine_rows, joined_rows, result_names
from tests.support.sql_pairs import ACCEPTED, SCRIPT, TABLES, by_name, read_tables
from tests.support.tables.fragments import features, plain_features
from tp_flower.errors import SourceError
from tp_flower.extraction.extract import extract
from tp_flower.query import Fragment, Query, SubQuery
from tp_flower.sources.shards import describe, scan

CASES = case_table(__file__)
NASTY = read_tables(CASES["nasty"])["nasty"]
COLUMNS = {**NASTY.columns, "u": "CHAR(8)"}
NUMBERS = CASES["numbers"]
TEXTS = CASES["texts"]
TIMES = CASES["times"]
STAY = CASES["stay"]
NULLS = [f"{name} IS {word}" for name in COLUMNS for word in ("NULL", "NOT NULL")]


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
    return {name: describe(shards[0]).columns for name, shards in sources.items()}


@pytest.fixture(scope="module")
def duck(kind):
    with duckdb.connect() as connection:
        connection.execute(SCRIPT)
        if kind == "sqlite":
            # it has no decimal numbers, whatever a column is declared as
            for name, table in TABLES.items():
                for column, declared in table.columns.items():
                    if declared.startswith("DECIMAL"):
                        connection.execute(
                            f"ALTER TABLE {name} ALTER {column} TYPE DOUBLE"
                        )
        yield connection


@pytest.mark.cases("postgresql-*", "mariadb-star schema", "sqlite-star schema")
@by_name(ACCEPTED)
def test_answer_is_that_of_duckdb(pair, sources, schemas, duck):
    bound = Query.from_sql(pair["sql"]).bind(schemas)
    sql = pair.get("reference", pair["sql"])
    expected = engine_rows(duck, sql, result_names(bound))
    assert joined_rows(bound, sources, matched=pair.get("matched", False)) == expected


@pytest.fixture(scope="module")
def nasty(url):
    return source_of(url, fill(url, "nasty", COLUMNS, NASTY.rows), order_by=("id",))


@pytest.fixture(scope="module")
def nasty_duck(nasty):
    """The same rows in DuckDB, of the types that the database gives them."""
    types = describe(nasty).columns
    with duckdb.connect() as connection:
        connection.execute(CASES["nasty"])
        if "DOUBLE" in types["n"]:
            # what a driver rounds before it is stored
            connection.execute("ALTER TABLE nasty ALTER m TYPE VARCHAR")
        for name, kind in types.items():
            connection.execute(f"ALTER TABLE nasty ALTER {name} TYPE {kind}")
        yield connection


def exactly(rows):
    """Values as they are, but for NULL and NaN, -0.0 and 0.0 being the same."""
    return [
        tuple(None if v != v else v + 0 if isinstance(v, float) else v for v in row)
        for row in rows
    ]


def fragment_of(expressions, filters=()):
    numbered = {f"x{place}": sql for place, sql in enumerate(expressions)}
    return Fragment("t", "t", features(id="id", **numbered), filters=tuple(filters))


def scanned(source, fragment):
    """The rows of a fragment, what was pushed down, and which columns were read."""
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
        return rows, opened.pushed, opened.connection.sql("FROM shard").columns


def test_values_arrive_unchanged(nasty, nasty_duck):
    expected = nasty_duck.execute("SELECT id, * FROM nasty ORDER BY id").fetchall()
    rows, pushed, _ = scanned(nasty, fragment_of(COLUMNS))
    assert exactly(rows) == exactly(expected)
    assert pushed == ()


# MariaDB has numbers for truth values, and any number may be in a column
TABS = {sql for sql in TEXTS if "\t" in sql}
FLAGS = {sql for sql in NULLS if sql.startswith("f ")}
DECIMALS = {sql for sql in NUMBERS if re.match(r"[is] .*\d\.\d", sql)}
TIME_NULLS = {sql for sql in NULLS if sql.startswith(("a ", "b "))}
AT_SITE = {
    "postgresql": set(),
    "mariadb": TABS | FLAGS,
    # neither decimals beside integers, nor dates, which are texts
    "sqlite": {*TIMES, *FLAGS, *DECIMALS, *TIME_NULLS},
}


@pytest.mark.parametrize("sql", [*NUMBERS, *NULLS, *TEXTS, *TIMES, *STAY])
def test_filter(sql, kind, nasty, nasty_duck):
    fragment = fragment_of([], (sql,))
    with scan(nasty, fragment) as opened:
        assert bool(opened.pushed) == (sql not in {*STAY, "-3 < i", *AT_SITE[kind]})
    try:
        rows = nasty_duck.execute(f"SELECT id FROM nasty WHERE {sql} ORDER BY id")
    except duckdb.Error:
        # a number that DuckDB cannot hold: databases may, and answer rightly, or refuse
        with suppress(SourceError):
            scanned(nasty, fragment)
    else:
        assert scanned(nasty, fragment)[0] == rows.fetchall()


def test_only_needed_columns_and_rows_are_read(nasty):
    fragment = fragment_of(["lower(t)", "t = 'ab'"], ["i > 0"])
    assert scanned(nasty, fragment)[1:] == (('filter: "i" > 0',), ["id", "t"])
    filters = ("i > 0", "lower(t) = 'ab'")
    subquery = SubQuery(features(x="MEDIAN(i)"), filters=filters, groups=("s",))
    groups = Fragment("t", "t", plain_features("x"), subquery=subquery)
    assert scanned(nasty, groups) == ([(1.0,)], ('filter: "i" > 0',), ["i", "s", "t"])
    with scan(nasty, groups) as opened:
        assert opened.fragment.subquery.filters == ("LOWER(\"t\") = 'ab'",)
    # it can be switched off
    site = replace(nasty, database=replace(nasty.database, is_pushed_down=False))
    with scan(site, fragment) as opened:
        assert opened.pushed == ()
        assert opened.fragment.filters == ('"i" > 0',)
    assert scanned(site, fragment)[0] == scanned(nasty, fragment)[0]


CONSTANT = st.one_of(
    st.integers(-110, 110).map(str),
    st.decimals(-110, 110, places=3, allow_nan=False).map(str),
    st.sampled_from(["0.1", "-0.01", "1.1", "-0"]),
)
NUMBER = st.sampled_from("ijsnmde")
COMPARISON = st.sampled_from(["=", "<>", "<", "<=", ">", ">="])
TEXT = st.sampled_from(["ab", "AB", "a", "ab ", "Zo\u00eb"])
COMPARED = st.one_of(
    st.builds("{} {} {}".format, NUMBER, COMPARISON, CONSTANT),
    st.builds("{} IN ({}, {})".format, NUMBER, CONSTANT, CONSTANT),
    st.builds("{} BETWEEN {} AND {}".format, NUMBER, CONSTANT, CONSTANT),
    st.builds("t = '{}'".format, TEXT),
    st.builds(
        "{} < '{}'".format,
        st.sampled_from("ab"),
        st.dates(date(1000, 1, 1), date(2100, 1, 1)),
    ),
)
FILTER = COMPARED | st.builds("NOT ({})".format, COMPARED)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(filters=st.lists(FILTER, min_size=1, max_size=2))
def test_any_filter(nasty, nasty_duck, filters):
    where = " AND ".join(f"({sql})" for sql in filters)
    expected = nasty_duck.execute(
        f"SELECT id FROM nasty WHERE {where} ORDER BY id"
    ).fetchall()
    assert scanned(nasty, fragment_of([], filters))[0] == expected


@pytest.mark.parametrize("mode", ["NO_BACKSLASH_ESCAPES", "EMPTY_STRING_IS_NULL", ""])
def test_texts_mean_the_same_under_every_mode_of_mariadb(mariadb, mode):
    declared = {'t`:"': "varchar(9) CHARACTER SET utf8mb4"}
    name = fill(mariadb, "t", declared, [("a\nb",), ("a\\nb",), ("",), ("it's",)])
    texts = features(x='"t`:"""')
    run(mariadb, f"SET GLOBAL sql_mode = '{mode}'")
    try:
        for sql in ("= 'a\nb'", "= ''", "= 'it''s'", "<> 'it''s'", "NOT IN ('', '\t')"):
            fragment = Fragment("t", name, texts, filters=(f'"t`:""" {sql}',))
            how = {"order_by": ('t`:"',)}
            here, there = (
                extract(source_of(mariadb, name, **how, is_pushed_down=way), fragment)
                for way in (False, True)
            )
            one = here.column("x")
            other = there.column("x")
            assert one.codes.tolist() == other.codes.tolist(), sql
            assert one.texts.equals(other.texts), sql
            assert bool(there.contents.pushed) == (not set("\n\t") & set(sql)), sql
    finally:
        run(mariadb, "SET GLOBAL sql_mode = DEFAULT")
