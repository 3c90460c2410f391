"""Shards in databases: types, values, order, chunks, snapshots and refusals."""

import logging
import os
import re
import tomllib
import traceback
from dataclasses import replace
from datetime import date

import duckdb
import numpy as np
import pytest
import sqlalchemy as sa
from numpy.testing import assert_allclose

from tests.support.database_tables import KINDS, fill, new_name, run, source_of, url_of
from tests.support.files import case_table
from tests.support.servers import uri, wait_until
from tests.support.tables.fragments import features, plain_features
from tests.support.tables.sources import file_source, sources_of
from tests.support.tables.sources import rows_of as answer_of
from tp_flower.errors import QueryError, SourceError
from tp_flower.extraction.extract import extract
from tp_flower.extraction.select_plan import kind_of
from tp_flower.query import Fragment, SubQuery
from tp_flower.sources.shards import (
    column_types,
    describe,
    fingerprint,
    scan,
)
from tp_flower.sources.text_values import TextFormat

CASES = case_table(__file__)
SESSIONS = {
    "postgresql": "pid FROM pg_stat_activity WHERE datname = current_database()",
    "mariadb": "id FROM information_schema.processlist WHERE user = 'tp_reader'",
}
COLUMNS = CASES["columns"]
ROWS = [
    (1, 2**53 + 1, 0.1, "Zo\u00eb", date(2024, 2, 29)),
    (2, -5, None, None, date(1960, 1, 1)),
    (3, None, 2.5, "b'", None),
    (4, 2**53, 1e300, "Bo", date(2000, 1, 1)),
]


@pytest.fixture(params=KINDS)
def url(request, tmp_path):
    return url_of(request.param, request, tmp_path)


@pytest.fixture
def database(kind, request, tmp_path):
    """The address of the kind of database that a case names."""
    return url_of(kind, request, tmp_path)


@pytest.fixture
def sqlite(tmp_path, request):
    return url_of("sqlite", request, tmp_path)


def refused(match):
    """Expect a source to be refused, with such a text."""
    return pytest.raises(SourceError, match=match)


def fragment_of(*names, filters=()):
    return Fragment("t", "t", plain_features(*names), filters=filters)


def fill_numbers(url, numbers):
    """Create a table of one column, ``a``; return its name."""
    return fill(url, "t", {"a": "INTEGER"}, [(number,) for number in numbers])


def chunks_of(source, fragment):
    """The rows of every chunk, as far as the filters let them pass."""
    with scan(source, fragment) as opened:
        types = column_types(opened.connection, "SELECT * FROM shard")
        # DuckDB needs a library of its own to make Python's aware times
        zones = {n: " AT TIME ZONE 'UTC'" for n, t in types.items() if "ZONE" in t}
        listed = ", ".join(
            f"{f.sql}{zones.get(f.name, '')}" for f in opened.fragment.features
        )
        where = " AND ".join(opened.fragment.filters) or "true"
        sql = f"SELECT {listed} FROM shard WHERE {where}"
        return [opened.connection.execute(sql).fetchall() for _ in opened.chunks()]


def rows_of(source, *columns):
    names = columns or describe(source).columns
    return [row for rows in chunks_of(source, fragment_of(*names)) for row in rows]


def values_of(source, column):
    return [value for (value,) in rows_of(source, column)]


@pytest.mark.parametrize(("kind", "cases"), CASES["types"].items())
def test_types_and_values(kind, cases, database):
    """Every case is a column: a value, then NULL."""
    listed = ", ".join(f"c{k} {declared}" for k, (declared, *_) in enumerate(cases))
    values = ", ".join(value for _, _, value, _ in cases)
    nulls = ", ".join(["NULL"] * len(cases))
    name = new_name()
    run(
        database,
        *CASES["owners-types"].get(kind, ()),
        f"CREATE TABLE {name} ({listed})",
        f"INSERT INTO {name} VALUES ({values}), ({nulls})",
    )
    source = source_of(database, name)
    schema = describe(source)
    assert schema.rows == 2
    row, nothing = rows_of(source)
    for k, (declared, expected, _, value) in enumerate(cases):
        assert (declared, schema.columns[f"c{k}"]) == (declared, expected)
        assert (declared, str(row[k])) == (declared, value)
    # a NaN and a date of zeros are values there
    assert schema.all_null == ()
    assert set(nothing) == {None}


def test_columns_that_a_database_lacks(url):
    """They are missing in all rows; other names of columns count their own values."""
    name = fill(url, "t", {"k": "INTEGER", "empty": "INTEGER"}, [(7, None), (8, None)])
    source = replace(
        source_of(url, name, types={"day": "DATE"}),
        rename={"k": "id", "empty": "none"},
        absent=("day", "word"),
    )
    schema = describe(source)
    assert list(schema.columns) == ["id", "none", "day", "word"]
    assert schema.rows == 2
    assert schema.all_null == ("none", "day", "word")
    rows = sorted(rows_of(source, "id", "day", "word"))
    assert rows == [(7, None, None), (8, None, None)]
    filters = (
        '"word" IS NULL',
        '"id" > 7',
        '"day" IS NULL OR "day" > DATE \'2020-01-01\'',
    )
    wanted = features(year='year("day")', text="lower(\"word\") || 'x'")
    extracted = extract(source, Fragment("t", "t", wanted, filters=filters))
    assert extracted.rows == 1
    assert all(extracted.column(name).is_missing.all() for name in ("year", "text"))
    with refused(r"'absent' names column 'ID', but the source has .*'id'"):
        describe(replace(source, absent=("ID",), types={}))


@pytest.mark.parametrize(
    ("kind", "columns", "values", "settings", "match"),
    [(kind, *case) for kinds, *case in CASES["refused"] for kind in kinds.split()],
)
def test_refusals_show_no_value(columns, values, settings, match, database):
    name = new_name()
    run(
        database,
        f"CREATE TABLE {name} ({columns})",
        f"INSERT INTO {name} VALUES {values}",
    )
    if "sql" in settings:
        settings = {"sql": settings["sql"].format(name)}
    if "too long" in match:
        database = database.update_query_dict({"options": "-c statement_timeout=1000"})
    with refused(match) as caught:
        rows_of(source_of(database, name, **settings))
    assert "secret" not in str(caught.value)
    if "compute" in match:
        assert "secret" not in "".join(traceback.format_exception(caught.value))


@CASES.each("misfits", "kind", "columns", "conversion", "values")
def test_a_value_that_is_not_of_its_columns_type_is_read_as_the_refusal_says(
    columns, conversion, values, database
):
    name = new_name()
    run(database, *f"CREATE TABLE {name} {columns}".replace("{}", name).split(";"))
    with refused(r"holds a value that is not .* in 'sql'") as caught:
        rows_of(source_of(database, name))
    converted = source_of(database, name, sql=f"SELECT {conversion} AS f FROM {name}")
    assert values_of(converted, "f") == values
    if advice := re.search(
        r"or read it as a number, (types = .*\})", str(caught.value)
    ):
        typed = source_of(database, name, types=tomllib.loads(advice[1])["types"])
        assert values_of(typed, "f") == values


def test_a_column_of_infinite_times_is_named_and_read_as_the_refusal_says(postgresql):
    name = new_name()
    run(
        postgresql,
        f'CREATE TABLE {name} (a int, "Until" timestamptz, d date)',
        f"INSERT INTO {name} VALUES (1, '2020-01-01', '2020-01-01'), "
        "(2, 'infinity', '2020-01-02'), (3, '-infinity', '2020-01-03')",
    )
    with refused("column 'Until' holds infinity, or a time .* in 'sql', as in CASE"):
        rows_of(source_of(postgresql, name))
    with refused("CASE") as caught:
        rows_of(source_of(postgresql, name), "Until")
    converted = str(caught.value).partition("as in ")[2]
    sql = f"SELECT a, {converted} AS until FROM {name}"
    until = values_of(source_of(postgresql, name, sql=sql), "until")
    assert [moment and moment.year for moment in until] == [2020, None, None]
    # of a query that does not read it, it is no obstacle
    assert len(rows_of(source_of(postgresql, name), "a", "d")) == 3


@CASES.each("useless", "kind", "declared", "text", "conversion")
def test_columns_of_no_use_stop_only_queries_that_read_them(
    kind, declared, text, conversion, database
):
    name = fill(database, "odd", {"a": "INTEGER", "b": declared}, [(1, None)])
    source = source_of(database, name)
    if kind == "sqlite":
        run(database, f"UPDATE {name} SET b = x'00'")
    schema = describe(source)
    assert schema.columns.keys() == {"a"}
    assert values_of(source, "a") == [1]
    assert schema.unread["b"].startswith(
        f"is of type {text}, which cannot be used: convert"
    )
    converted = source_of(
        database, name, sql=f"SELECT a, {conversion} AS b FROM {name}"
    )
    assert describe(converted).unread == {}
    assert rows_of(converted) == [(1, "00" if kind == "sqlite" else None)]
    # a server that asks for it all the same
    with pytest.raises(QueryError, match="no column 'b'"):
        values_of(source, "b")


@CASES.each("mixed", "declared", "values", "reason")
def test_mixed_columns_of_sqlite_stop_only_queries_that_read_them(
    sqlite, declared, values, reason
):
    run(
        sqlite,
        f'CREATE TABLE t (id INTEGER PRIMARY KEY, "a b" {declared})',
        f'INSERT INTO t ("a b") VALUES {values}',
    )
    source = source_of(sqlite, "t", order_by=("a b",))
    schema = describe(source)
    assert schema.columns == {"id": "BIGINT"}
    assert schema.all_null == ()
    assert schema.rows == len(values_of(source, "id"))
    advice = 'types = { "a b" = "VARCHAR" }'
    assert schema.unread == {
        "a b": (
            f"{reason}: name one type for all of them, {advice}, or convert it in 'sql'"
        )
    }
    # both of its remedies work
    typed = replace(source, types=tomllib.loads(advice)["types"])
    schema = describe(typed)
    assert schema.columns["a b"] == "VARCHAR"
    assert schema.unread == {}
    converted = source_of(sqlite, "t", sql='SELECT CAST("a b" AS TEXT) AS a FROM t')
    assert sorted(values_of(typed, "a b")) == sorted(values_of(converted, "a"))
    # as the table calls it, not the source
    renamed = replace(
        source, rename={"a b": "c"}, database=replace(source.database, order_by=())
    )
    assert 'types = { c = "VARCHAR" }' in describe(renamed).unread["c"]


@CASES.each("texts", "declared")
def test_texts_of_an_unknown_type_are_texts(sqlite, declared):
    run(
        sqlite,
        f"CREATE TABLE t (a {declared})",
        "INSERT INTO t VALUES ('x'), (NULL), ('y 1')",
    )
    source = source_of(sqlite, "t")
    schema = describe(source)
    assert schema.columns == {"a": "VARCHAR"}
    assert schema.unread == {}
    assert values_of(source, "a") == ["x", None, "y 1"]


def test_types_of_the_owner(url):
    columns = {"zip": "VARCHAR(5)", "n": "INTEGER"}
    types = {"zip": "INTEGER", "n": "VARCHAR"}
    name = fill(url, "zips", columns, [("007", 1), (None, 2)])
    source = source_of(url, name, types=types)
    assert describe(source).columns == types
    assert rows_of(source) == [(7, "1"), (None, "2")]
    # the database must not take such a column for what it is there
    assert chunks_of(source, fragment_of("n", filters=("n = '1'", "zip < 8"))) == [
        [("1",)]
    ]
    # texts as the owner writes numbers and dates, and those that stand for none
    columns = {"price": "VARCHAR(9)", "day": "VARCHAR(10)"}
    name = fill(url, "texts", columns, [("1.234,50€", "01.02.2013"), ("oops", None)])
    types = {"Price": "DOUBLE", "day": "DATE"}
    texts = replace(
        source_of(url, name, types=types),
        text=TextFormat(decimal=",", dates="%d.%m.%Y"),
        nulls=("oops",),
    )
    assert rows_of(texts) == [(1234.5, date(2013, 2, 1)), (None, None)]
    # values that are refused without them
    if url.drivername == "sqlite":
        run(url, "CREATE TABLE t (a)", "INSERT INTO t VALUES (1), ('x'), (x'61')")
        mixed = source_of(url, "t", types={"a": "VARCHAR"})
        assert describe(mixed).columns == {"a": "VARCHAR"}
        assert len(values_of(mixed, "a")) == 3
    if "mysql" in url.drivername:
        flags = fill(url, "flags", {"f": "tinyint(1)"}, [(1,), (2,)])
        plain = source_of(url, "t", sql=f"SELECT f + 0 AS f FROM {flags}")
        assert values_of(plain, "f") == [1, 2]


def test_sqlite_columns_without_values(sqlite):
    run(sqlite, "CREATE TABLE t (a INTEGER, b, c DATE, d NUMERIC, e TEXT, f BOOLEAN)")
    schema = describe(source_of(sqlite, "t"))
    types = ("BIGINT", "VARCHAR", "DATE", "DOUBLE", "VARCHAR", "BOOLEAN")
    assert schema.columns == dict(zip("abcdef", types, strict=True))
    assert schema.rows == 0
    assert set(schema.all_null) == set("abcdef")


def test_odd_names(url):
    names = {'a "b" %s': "INTEGER", "select": "INTEGER", "c.d;--": "INTEGER"}
    name = fill(url, "odd", names, [(1, 2, 3)])
    run(url, f"CREATE VIEW v_{name} AS SELECT * FROM {name}")
    for relation in (name, f"v_{name}"):
        source = source_of(url, relation)
        assert list(describe(source).columns) == list(names)
        assert rows_of(source) == [(1, 2, 3)]


def test_query_of_the_owner(url):
    name = fill(url, "t", {"a": "INTEGER", "b": "INTEGER"}, [(1, 5), (2, 6), (3, None)])
    sql = f"SELECT a, b * 2 AS double_b FROM {name} WHERE a > 1 -- a comment"
    source = source_of(url, "t", sql=sql)
    assert describe(source).rows == 2
    assert sorted(rows_of(source)) == [(2, 12), (3, None)]
    assert re.search(r"\(query [0-9a-f]{8} of ", str(source))
    # the cache knows sources by their words
    assert str(source) != str(source_of(url, "t", sql=sql + "!"))


def test_table_with_its_schema(postgresql, sqlite):
    run(postgresql, "CREATE SCHEMA sales")
    for url, schema in ((postgresql, "sales"), (sqlite, "main")):
        insert = f"INSERT INTO {schema}.t VALUES (4)"
        run(url, f"CREATE TABLE {schema}.t (a int PRIMARY KEY)", insert)
        source = source_of(url, "t")
        database = replace(source.database, table=(schema, "t"))
        assert rows_of(replace(source, database=database)) == [(4,)]


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 8])
def test_chunks(url, rows):
    values = [(k, f"t{k}") for k in range(rows)]
    name = fill(url, "t", {"a": "INTEGER", "b": "VARCHAR(9)"}, values)
    source = source_of(url, name, chunk_rows=4, order_by=("a",))
    chunks = chunks_of(source, fragment_of("a", "b"))
    assert [row for chunk in chunks for row in chunk] == values
    assert len(chunks) == max(1, -(-rows // 4))
    assert describe(source).rows == rows


def test_rows_come_in_the_order_of_the_key_or_of_the_owner(url):
    key, plain = (new_name() for _ in range(2))
    for name, primary in ((key, ", PRIMARY KEY (b, a)"), (plain, "")):
        run(
            url,
            f"CREATE TABLE {name} (b INTEGER, a INTEGER{primary})",
            f"INSERT INTO {name} VALUES (2, 1), (1, 9), (1, 3)",
        )
    for name, order_by, values in (
        (key, (), [3, 9, 1]),
        (key, ("a",), [1, 3, 9]),
        (plain, ("a",), [1, 3, 9]),
        (plain, (), None),
    ):
        source = source_of(url, name, order_by=order_by)
        with scan(source, fragment_of("a")) as opened:
            assert opened.needs_sort == (values is None)
        assert values is None or values_of(source, "a") == values


def test_one_snapshot(postgresql, mariadb):
    """Rows that come while we read are not seen: types, order and rows fit together."""
    for url in (postgresql, mariadb):
        name = fill_numbers(url, range(10))
        source = source_of(url, name, chunk_rows=3, order_by=("a",))
        with scan(source, fragment_of("a")) as opened:
            run(url, f"INSERT INTO {name} VALUES (-1), (100)")
            actual = []
            for _ in opened.chunks():
                actual += opened.connection.execute("SELECT a FROM shard").fetchall()
        assert actual == [(k,) for k in range(10)]


def test_nothing_can_be_written(postgresql, mariadb, sqlite):
    insert = "INSERT INTO t_w VALUES (2)"
    end = "RETURNS int"
    functions = {
        postgresql: f"{end} LANGUAGE sql AS '{insert} RETURNING a'",
        mariadb: f"{end} MODIFIES SQL DATA BEGIN {insert}; RETURN 1; END",
    }
    for url, function in functions.items():
        run(url, "CREATE TABLE t_w (a INTEGER)", f"CREATE FUNCTION add_w() {function}")
        writing = source_of(url, "t", sql="SELECT add_w() AS a")
        with refused("it wants to write: a shard is only rea"):
            rows_of(writing)
        assert rows_of(source_of(url, "t_w")) == []
    run(sqlite, "CREATE TABLE t (a INTEGER)")
    before = os.stat(sqlite.database).st_mtime_ns
    assert rows_of(source_of(sqlite, "t")) == []
    assert os.stat(sqlite.database).st_mtime_ns == before


def connections(url, kind):
    with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
        return len(connection.exec_driver_sql(f"SELECT {SESSIONS[kind]}").fetchall())


def read_first(source):
    """Leave most rows."""
    with scan(source, fragment_of("a")) as opened:
        next(iter(opened.chunks()))
        yield
        raise ZeroDivisionError


def test_no_connection_stays_open(postgresql, mariadb):
    for kind, url in (("postgresql", postgresql), ("mariadb", mariadb)):
        name = fill_numbers(url, range(100))
        source = source_of(url, name, chunk_rows=10)
        before = connections(url, kind)
        describe(source)
        rows_of(source)
        next(reading := read_first(source))
        with pytest.raises(ZeroDivisionError):
            next(reading)
        next(reading := read_first(source))
        reading.close()
        with pytest.raises(SourceError):
            describe(source_of(url, "none"))
        wait_until(lambda: connections(url, kind) <= before)  # noqa: B023


def test_fingerprint(url):
    name = fill_numbers(url, [1])
    source = source_of(url, name, fingerprint=f"SELECT max(a) FROM {name}")
    assert fingerprint(source) == "1"
    run(url, f"INSERT INTO {name} VALUES (2)")
    assert fingerprint(source) == "2"
    assert fingerprint(source_of(url, name)) is None
    for sql in (f"SELECT a, a FROM {name}", f"SELECT a FROM {name} WHERE a > 9"):
        with refused("'fingerprint' must yield one value"):
            fingerprint(source_of(url, name, fingerprint=sql))
    with refused(r"does not exist: check 'table'|check 'sql'"):
        fingerprint(source_of(url, name, fingerprint="SELECT a FROM nowhere"))


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
@CASES.each("unreachable", "change", "match")
def test_servers_that_do_not_answer(kind, change, match, request):
    url = request.getfixturevalue(kind)
    with refused(match) as caught:
        describe(source_of(url.set(**change), "t"))
    assert "wr0ng" not in str(caught.value)
    assert "nobody-here" not in str(caught.value)


def test_missing_tables_and_files(url, tmp_path, sqlite):
    with refused("the file does not exist or may not be read"):
        describe(source_of(sqlite.set(database=f"{tmp_path}/none.db"), "t"))
    place = r"table 'none' at site 'here' \(table none of \w+://"
    fill_numbers(url, [])
    with refused(place + ".*the table does not exist: check"):
        describe(source_of(url, "none"))
    if url.drivername.startswith("postgresql"):
        schema = new_name()
        run(url, f"CREATE SCHEMA {schema}", f'CREATE TABLE {schema}."Orders" (a int)')
        with refused(f"check 'table', with its schema; its tables are .*{schema}.Ord"):
            describe(source_of(url, "Orders"))
    (tmp_path / "shards.db").write_text("no database " * 100)
    with refused("the file is not an SQLite database"):
        describe(source_of(sqlite, "t"))


def test_no_permission(postgresql, mariadb):
    columns = {"a": "INTEGER", "b": "INTEGER"}
    name = new_name()
    tables = {url: fill(url, "t", columns, [(1, 2)]) for url in (postgresql, mariadb)}
    user = f"'{name}'@'127.0.0.1'"
    run(postgresql, f"CREATE ROLE {name} LOGIN PASSWORD 'guest'")
    run(
        mariadb,
        f"CREATE USER {user} IDENTIFIED BY 'guest'",
        f"GRANT SELECT (a) ON {tables[mariadb]} TO {user}",
    )
    for url, table in tables.items():
        guest = url.set(username=name, password="guest")
        with refused("the user may not read it: grant SELECT"):
            describe(source_of(guest, table))
    assert rows_of(source_of(guest, "t", sql=f"SELECT a FROM {table}")) == [(1,)]


@CASES.each("lost", "kind", "others", "kill")
def test_connection_that_is_lost(kind, others, kill, request):
    url = request.getfixturevalue(kind)
    sql = f"SELECT {SESSIONS[kind]} AND {others}"
    # more than the buffers between us hold
    values = [(k, "x" * 200) for k in range(100_000)]
    name = fill(url, "t", {"a": "INTEGER", "b": "VARCHAR(200)"}, values)
    source = source_of(url, name, chunk_rows=10)
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    lost = refused("the connection was lost")
    with lost, scan(source, fragment_of("a", "b")) as opened:
        for number, _ in enumerate(opened.chunks()):
            if number:
                continue
            with engine.connect() as connection:
                for (session,) in connection.exec_driver_sql(sql).fetchall():
                    connection.exec_driver_sql(kill.format(session))


@pytest.fixture(params=["csv", "tsv.gz", "parquet", "folder", "duckdb", *KINDS])
def same(request, tmp_path):
    """One table as a file or in a database."""
    if request.param in KINDS:
        url = url_of(request.param, request, tmp_path)
        return source_of(url, fill(url, "same", COLUMNS, ROWS), chunk_rows=3)
    path = tmp_path / f"t.{request.param}"
    relation = None
    with duckdb.connect() as connection:
        listed = ", ".join(f"{k} {v}" for k, v in COLUMNS.items())
        if request.param == "duckdb":
            connection.execute(f"ATTACH '{path}' AS f")
            connection.execute("USE f")
            relation = ("t",)
        connection.execute(f"CREATE TABLE t ({listed})")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?, ?)", ROWS)
        if request.param == "folder":
            path.mkdir()
            for k, half in (("1", "id > 2"), ("0", "id <= 2")):
                sql = f"SELECT * FROM t WHERE {half} ORDER BY id"
                connection.execute(f"COPY ({sql}) TO '{path}/{k}.parquet'")
        elif request.param != "duckdb":
            tab = "(FORMAT csv, delimiter '\t')" if "tsv" in request.param else ""
            connection.execute(f"COPY t TO '{path}' {tab}")
    return file_source(path, "same", relation=relation)


def test_forms_of_one_table_agree(same):
    rows = answer_of(same, "SELECT id, n, name FROM shard ORDER BY id")
    assert rows == [(row[0], row[1], row[3]) for row in ROWS]
    schema = describe(same)
    assert list(schema.columns) == list(COLUMNS)
    kinds = [kind_of(kind) for kind in schema.columns.values()]
    assert kinds == ["number", "number", "number", "text", "time"]
    assert schema.rows == 4
    assert schema.all_null == ()
    wanted = features(
        twice='"price" * 2',
        month='month("day")',
        name='"name"',
        early="\"day\" < '2000-06-01'",
    )
    keys = (('"n"',), ('"name"', '"day"'))
    extracted = extract(
        same,
        Fragment("t", "same", wanted, keys, label='"price"', filters=('"id" <> 3',)),
    )
    assert extracted.rows == 3
    whole, pairs = (
        [str(key.texts[code]) if code >= 0 else None for code in key.codes]
        for key in extracted.keys
    )
    big = "number16:9007199254740992"
    next_one = "number16:9007199254740993"
    assert whole == [next_one, "number2:-5", big]
    assert pairs[1] is None
    assert "Zo\u00eb" in pairs[0]
    twice, month, name, early = (extracted.column(each.name) for each in wanted)
    assert_allclose(twice.values, [0.2, np.nan, 2e300])
    assert month.values.tolist() == [2, 1, 1]
    assert early.values.tolist() == [0, 1, 1]
    names = [None if c < 0 else name.texts[c].as_py() for c in name.codes]
    assert names == ["Zo\u00eb", None, "Bo"]
    assert extracted.label.values.tolist()[0] == 0.1


def test_nothing_is_logged(url, caplog, tmp_path):
    name = fill(url, "t", {"a": "VARCHAR(9)"}, [("secret",)])
    text = f"[tables.t]\nuri = '{uri(url)}'\ntable = '{name}'\n"
    (source,) = sources_of(tmp_path, text)
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "sqlalchemy"):
        assert values_of(source, "a") == ["secret"]
    assert caplog.text == ""


def test_order_of_groups_tells_nothing_of_them(url):
    """Every reading comes to the same one, whatever the database filters."""
    rows = [(k, k % 2) for k in range(200)]
    grouped = source_of(url, fill(url, "t", {"k": "INTEGER", "v": "INTEGER"}, rows))
    subquery = SubQuery(features(k='"k"', n="max(v)"), groups=('"k"',))
    fragment = Fragment("t", "t", features(n="n", k="k"), subquery=subquery)
    site = replace(grouped, database=replace(grouped.database, is_pushed_down=False))
    first, again, other = (
        extract(source, fragment).column("k").values
        for source in (grouped, grouped, site)
    )
    assert sorted(first) == list(range(200))
    assert abs(np.corrcoef(first, np.arange(200))[0, 1]) < 0.3
    assert first.tolist() == again.tolist() == other.tolist()
