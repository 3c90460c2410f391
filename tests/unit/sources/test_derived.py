"""Derived tables: an owner's SELECT over the site's other tables, run by DuckDB."""

import sqlite3
from contextlib import closing, contextmanager
from dataclasses import replace

import duckdb
import numpy as np
import pandas as pd
import pytest

from client_apps.privacy import guard
from tests.support.files import case_table
from tests.support.tables.fragments import features
from tests.support.tables.sources import rows_of, sources_of, write_frame
from tp_flower.errors import SourceError
from tp_flower.extraction.extract import extract
from tp_flower.query import Fragment
from tp_flower.sources.derived.accounts import source_id
from tp_flower.sources.derived.select import parse_select
from tp_flower.sources.shards import (
    connect,
    create_view,
    describe,
    fingerprint,
    load_tables,
    register_frames,
    release,
    scan,
)
from tp_flower.sources.tables_file import DerivedShard, ShardSource

CASES = case_table(__file__)
SELECTS = CASES["selects"]
SUFFIXES = ["csv", "parquet", "duckdb", "sqlite"]
TABLES = ("visits", "lab", "patients")


def refused(match):
    """Expect a source to be refused, with such a text."""
    return pytest.raises(SourceError, match=match)


def hospital(seed=0, visits=60, patients=9):
    """Visits of patients, some of nobody; measurements at times of their own, some
    without a value; patients, some without a visit.
    """
    rng = np.random.default_rng(seed)
    hours = rng.permutation(24 * 90)
    start = pd.Timestamp("2024-01-01")
    patient = rng.integers(0, patients + 2, visits).astype(float)
    patient[::11] = np.nan
    value = rng.normal(size=2 * visits).round(3)
    value[::7] = np.nan
    return {
        "visits": pd.DataFrame(
            {
                "id": np.arange(visits),
                "patient": patient,
                "at_time": start + pd.to_timedelta(hours[:visits], unit="h"),
                "cost": rng.integers(1, 9, visits) * 0.5,
            }
        ),
        "lab": pd.DataFrame(
            {
                "patient": rng.integers(0, patients, 2 * visits),
                "taken": start + pd.to_timedelta(hours[visits : 3 * visits], unit="h"),
                "value": value,
            }
        ),
        "patients": pd.DataFrame(
            {
                "patient": np.arange(patients),
                "ward": rng.choice(["a", "b c", "d"], patients),
                "born": rng.integers(1930, 2020, patients),
            }
        ),
    }


def entry(table, suffix):
    name = f', table = "{table}"' if suffix in ("duckdb", "sqlite") else ""
    types = ""
    if suffix == "sqlite":
        types = ', types = { at_time = "TIMESTAMP" }' if table == "visits" else types
        types = ', types = { taken = "TIMESTAMP" }' if table == "lab" else types
    return f'{table} = {{ path = "{table}.{suffix}", site = "h"{name}{types} }}\n'


def derived_of(folder, sql, suffixes=None, frames=None):
    """The derived shard of a SELECT over tables in files of such kinds."""
    suffixes = suffixes or dict.fromkeys(TABLES, "parquet")
    text = "[tables]\n"
    for table, frame in (frames or hospital()).items():
        path = folder / f"{table}.{suffixes[table]}"
        if not path.exists():
            write_frame(frame, path, table)
        text += entry(table, suffixes[table])
    text += f"[tables.answer]\nsql = '''{sql}'''\nsite = 'h'\n"
    return sources_of(folder, text)[-1]


def answer(sql, frames):
    """DuckDB's answer over data frames, as sorted rows."""
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for name, frame in frames.items():
            # as a site reads tables: NaN is missing
            columns = ", ".join(
                f"CASE WHEN isfinite({c}) THEN {c} END AS {c}"
                if frame[c].dtype == float
                else c
                for c in frame
            )
            connection.register(f"frame_{name}", frame)
            connection.execute(
                f"CREATE TABLE {name} AS SELECT {columns} FROM frame_{name}"
            )
        return in_order(connection.execute(sql).fetchall())


def in_order(rows):
    return sorted(rows, key=repr)


@contextmanager
def framed(sql, frames, **others):
    token = register_frames({**frames, "answer": {"sql": sql}, **others}, site="h")
    try:
        yield next(s for s in load_tables(f"memory:{token}") if s.table == "answer")
    finally:
        release(token)


@pytest.mark.cases(
    *("asof-csv", "windows-parquet", "lateral-duckdb", "groups-sqlite"),
    *("union-csv", "missing-parquet", "union-duckdb", "asof-sqlite"),
)
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", SELECTS)
def test_the_rows_are_those_of_duckdb(tmp_path, name, suffix):
    sql = SELECTS[name]
    source = derived_of(tmp_path, sql, dict.fromkeys(TABLES, suffix))
    assert in_order(rows_of(source)) == answer(sql, hospital())
    schema = describe(source)
    assert schema.rows == len(rows_of(source))
    assert not schema.unread


@pytest.mark.parametrize("name", SELECTS)
def test_data_frames_and_mixed_sources_have_the_same_rows(tmp_path, name):
    frames, sql = hospital(), SELECTS[name]
    mixed = {"visits": "sqlite", "lab": "csv", "patients": "duckdb"}
    expected = answer(sql, frames)
    assert in_order(rows_of(derived_of(tmp_path, sql, mixed))) == expected
    with framed(sql, frames) as source:
        assert in_order(rows_of(source)) == expected


@pytest.mark.cases("0", "1", "2", "3")
@pytest.mark.parametrize("seed", range(10))
def test_random_tables_have_the_rows_of_duckdb(seed):
    rng = np.random.default_rng(seed)
    frames = hospital(seed, *rng.integers(1, 40, 2).tolist())
    for sql in SELECTS.values():
        with framed(sql, frames) as source:
            assert in_order(rows_of(source)) == answer(sql, frames)


def test_a_file_is_read_under_the_tables_own_name(tmp_path):
    """The keys of its columns are about the file, and the SELECT is over the result."""
    (tmp_path / "o.csv").write_text("K;price;day\n1;1.234,50;31.12.2024\n2;;\n")
    (tmp_path / "p.csv").write_text("k,name\n1,x\n")
    (source, _) = sources_of(tmp_path, CASES["of_a_file"])
    assert str(source).endswith(f"of {tmp_path}/o.csv, names)")
    assert describe(source).columns == {
        "id": "BIGINT",
        "twice": "DOUBLE",
        "year": "BIGINT",
        "name": "VARCHAR",
    }
    assert in_order(rows_of(source)) == [(1, 2469.0, 2024, "x"), (2, None, None, None)]


def test_the_keys_of_a_derived_entry_are_about_the_answer(tmp_path):
    (tmp_path / "o.csv").write_text("k,price\n1,$5\n2,n/a\n")
    _, source = sources_of(tmp_path, CASES["about_the_answer"])
    schema = describe(source)
    assert list(schema.columns) == ["id", "price", "smoker"]
    assert schema.columns["price"] == "DOUBLE"
    assert schema.all_null == ("smoker",)
    assert in_order(rows_of(source)) == [(1, 5.0, None), (2, None, None)]


def test_shards_of_a_table_at_the_site_are_read_as_one(tmp_path):
    (tmp_path / "0.csv").write_text("k,x,y,z\n1,5,,u\n")
    (tmp_path / "1.csv").write_text("Z,K,X\nv,2,1.5\n")
    (tmp_path / "2.csv").write_text("k,x,y,z\n3,7,1,w\n")
    source = sources_of(tmp_path, CASES["sharded"])[-1]
    schema = describe(source)
    assert list(schema.columns) == ["k", "x", "y", "z"]
    assert [schema.columns[name] for name in "kxz"] == ["BIGINT", "DOUBLE", "VARCHAR"]
    assert schema.all_null == ("y",)
    expected = [(1, 5.0, None, "u"), (2, 1.5, None, "v")]
    assert in_order(rows_of(source)) == expected
    (tmp_path / "1.csv").write_text("Z,K,X\nv,2,many\n")
    match = (
        r"reads shards that differ; for its owner: column 'x' of table 't' is of the "
        r"types BIGINT and VARCHAR: name one in the table's entry, types = "
        r"\{ x = \"VARCHAR\" \}"
    )
    with refused(match):
        describe(source)
    typed = CASES["sharded"].replace(
        "site = 'h'\n", "site = 'h'\ntypes.x = 'VARCHAR'\n"
    )
    source = sources_of(tmp_path, typed)[-1]
    assert in_order(rows_of(source)) == [(1, "5", None, "u"), (2, "many", None, "v")]


def test_a_derived_table_may_be_of_another(tmp_path):
    derived_of(tmp_path, "SELECT 1 FROM lab")
    text = CASES["counts"] + (tmp_path / "tables.toml").read_text()
    sql = "SELECT ward, sum(n)::BIGINT AS n FROM counts GROUP BY ward"
    source = sources_of(tmp_path, text.replace("SELECT 1 FROM lab", sql))[-1]
    expected = (
        "SELECT ward, count(*) AS n FROM visits JOIN patients USING (patient) "
        "GROUP BY ward"
    )
    assert in_order(rows_of(source)) == answer(expected, hospital())


@pytest.mark.parametrize("name", ["shard", "source_rows", "unsorted", "frame", "from"])
def test_a_table_may_have_any_name(name):
    frame = pd.DataFrame({"k": [1, 2], "x": ["5", "6"]})
    raw = {"sql": f'FROM "{name}"', "types": {"x": "DOUBLE"}}
    with framed("SELECT k, x + 1 AS y FROM raw", {name: frame}, raw=raw) as source:
        assert in_order(rows_of(source)) == [(1, 6.0), (2, 7.0)]
        # as scripts that compare with one machine do
        with duckdb.connect() as connection:
            create_view(connection, source)
            assert len(connection.execute("FROM shard").fetchall()) == 2
        wanted = Fragment("t", "answer", features(y="y"))
        assert sorted(extract(source, wanted).column("y").values) == [6.0, 7.0]


def test_a_change_of_any_file_is_noticed(tmp_path):
    sql = "SELECT v.*, l.value FROM visits v ASOF LEFT JOIN l USING (patient, at_time)"
    sql = "WITH l AS (SELECT patient, taken AS at_time, value FROM lab) " + sql
    kinds = {"visits": "csv", "lab": "parquet", "patients": "duckdb"}
    source = derived_of(tmp_path, sql, kinds)
    before = fingerprint(source), rows_of(source)
    assert fingerprint(source) == before[0]
    frames = hospital()
    # no table of the SELECT
    write_frame(frames["patients"], tmp_path / "patients.parquet")
    assert fingerprint(source) == before[0]
    write_frame(frames["lab"].assign(value=1.0), tmp_path / "lab.parquet")
    after = fingerprint(source), rows_of(source)
    assert after[0] != before[0]
    assert after[1] != before[1]
    write_frame(frames["visits"].head(3), tmp_path / "visits.csv")
    assert fingerprint(source) != after[0]
    assert len(rows_of(source)) == 3
    with framed(sql, frames) as of_frames:
        assert fingerprint(of_frames) is None
    database = {**kinds, "lab": "sqlite"}
    assert fingerprint(derived_of(tmp_path, sql, database)) is None


@pytest.mark.parametrize("units", ["", 'privacy-unit = "patient"\nrows-per-unit = 9\n'])
def test_rows_come_in_one_order_whatever_that_of_the_tables(tmp_path, units):
    """They are sorted by their contents, sums of floats included."""
    sql = SELECTS["windows"]
    frames = hospital()
    wanted = Fragment("t", "answer", features(c="cost", m="mean", l="patient"))
    columns = []
    for k in range(3):
        folder = tmp_path / str(k)
        folder.mkdir()
        mixed = {n: f.sample(frac=1.0, random_state=k) for n, f in frames.items()}
        source = derived_of(folder, sql, frames=frames if k == 0 else mixed)
        if units:
            policy = replace(source.policy, privacy_unit=("patient",), rows_per_unit=9)
            source = replace(source, policy=policy)
        with scan(source, wanted) as opened:
            assert opened.needs_sort
        extracted = extract(source, wanted, order_key=b"k" * 32)
        columns.append([extracted.column(name).values for name in "cml"])
    for others in columns[1:]:
        for one, other in zip(columns[0], others, strict=True):
            np.testing.assert_array_equal(one, other)
    assert not np.array_equal(columns[0][0], frames["visits"]["cost"])


@pytest.mark.parametrize("suffix", ["csv", "duckdb"])
def test_the_engine_reads_nothing_else(tmp_path, suffix):
    """Even a SELECT that no tables file would let through."""
    (tmp_path / "secret.csv").write_text("a\ns3cret\n")
    source = derived_of(tmp_path, "FROM visits", dict.fromkeys(TABLES, suffix))
    for sql in CASES["other_reads"]:
        text = sql.replace("OTHER", str(tmp_path / "secret.csv"))
        derived = replace(source.derived, sql=f"SELECT * FROM ({text})")
        with refused("table 'answer' at site 'h'.* its 'sql' fails") as caught:
            describe(replace(source, derived=derived))
        assert "s3cret" not in str(caught.value)
    with connect(source) as connection:
        views = connection.execute("SELECT view_name FROM duckdb_views()").fetchall()
        left = {name for (name,) in views if name in TABLES or name.startswith("rows_")}
        assert not left
        for sql in CASES["other_statements"]:
            with pytest.raises(duckdb.Error):
                connection.execute(sql.replace("OTHER", str(tmp_path / "secret.csv")))


@CASES.each("refused", "sql", "match")
def test_selects_that_a_tables_file_refuses(tmp_path, sql, match):
    with refused(f"^'sql' of table 'answer' {match}"):
        derived_of(tmp_path, sql)


@CASES.each("refused_files", "text", "match")
def test_tables_files_that_are_refused(tmp_path, text, match):
    for name in ("a.csv", "b.xls"):
        (tmp_path / name).write_text("k\n1\n")
    with refused(match):
        sources_of(tmp_path, text)


@CASES.each("failing", "sql", "match")
def test_errors_of_a_select_quote_no_value(tmp_path, sql, match):
    frames = hospital()
    frames["patients"]["ward"] = "s3cret"
    source = derived_of(tmp_path, sql, frames=frames)
    with refused(f"^table 'answer' at site 'h' \\(query .*\\): {match}") as caught:
        describe(source)
    assert "s3cret" not in str(caught.value)


@CASES.each("names", "sql", "names")
def test_names_are_those_of_no_with(sql, names):
    assert sorted(parse_select(sql, "'sql'")) == names


def test_a_select_is_over_the_tables_of_one_site(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("k\n1\n")

    def sources(site="", own=""):
        text = "[tables]\n"
        for name in ("a", "b"):
            text += f'{name} = {{ path = "{name}.csv"{site} }}\n'
        return sources_of(tmp_path, f'{text}c = {{ sql = "FROM a, b"{own} }}')

    match = (
        r"'sql' of table 'c' reads tables of one site, and these are several \(a at "
        r"\['a-0'\], b at \['b-0'\]\): give all of them, and the table itself, one "
        "'site'"
    )
    with refused(match):
        sources()
    named = ', site = "h"'
    for own in ("", named):
        assert {source.site for source in sources(named, own)} == {"h"}


def test_days_in_two_formats_are_refused_where_they_are_read(tmp_path):
    (tmp_path / "a.csv").write_text("k,day\n1,01/02/2024\n2,03/04/2024\n")
    file = '[tables]\na = {{ path = "a.csv", site = "h"{} }}\nb = {{ sql = "{}" }}'
    match = (
        r"table 'b' at .*: its 'sql' reads days of several formats; for its owner: the "
        r"days of column 'day' of table 'a' fit them: name the right one, dates = "
        r"\"%d/%m/%Y\" or dates = \"%m/%d/%Y\"; types "
    )

    def derived(sql, keys=""):
        return sources_of(tmp_path, file.format(keys, sql))[1]

    for sql in ("SELECT * FROM a", "SELECT k FROM a WHERE day IS NOT NULL"):
        with refused(match):
            describe(derived(sql))
        for keys in (', dates = "%m/%d/%Y"', ', types = { day = "VARCHAR" }'):
            assert describe(derived(sql, keys)).rows == 2
    assert rows_of(derived("SELECT k FROM a")) == [(1,), (2,)]


def test_a_column_that_no_query_can_read_is_none_of_a_select(tmp_path):
    (tmp_path / "a.csv").write_text("k,x\n1,5\n2,many\n3,few\n")
    text = '[tables]\na = {{ path = "a.csv", site = "h", types.x = "DOUBLE" }}\n'
    text += 'b = {{ sql = "{}" }}'
    whole = sources_of(tmp_path, text.format("FROM a"))[1]
    assert describe(whole).columns == {"k": "BIGINT"}
    match = "its 'sql' fails; DuckDB says: .*; column 'x' of 'a' has a type in 'types',"
    with refused(match):
        describe(sources_of(tmp_path, text.format("SELECT x FROM a"))[1])


def test_what_leaves_the_site_names_no_path(tmp_path):
    (tmp_path / "o.csv").write_text("k,price\n1,5\n")
    (source,) = sources_of(
        tmp_path, '[tables.o]\npath = "o.csv"\nsql = "SELECT nope FROM o"'
    )
    with refused("nope") as caught:
        describe(source)
    assert str(tmp_path) in str(caught.value)
    assert str(tmp_path) not in source.redact_place(str(caught.value))
    (tmp_path / "o.csv").unlink()
    with refused("does not exist") as caught:
        describe(source)
    assert str(tmp_path) not in source.redact_place(str(caught.value))


@CASES.each("accounts", "rules", "match")
def test_policies_of_tables_that_share_rows(tmp_path, rules, match):
    """Refused at load where the account of one would not count what leaves of both."""
    (tmp_path / "a.csv").write_text("k,x\n1,5\n")
    for name in ("b.csv", "c.csv", "d.csv"):
        (tmp_path / name).write_text("k,y\n1,6\n")
    text = CASES["sharing"]
    for table in ("one", "copy", "joined", "again", "parts"):
        policy = f", policy = {rules[table]}" if table in rules else ""
        text = text.replace(f" POLICY-OF-{table.upper()}", policy)
    if match:
        with refused(match):
            sources_of(tmp_path, text)
    else:
        sources_of(tmp_path, text)


def test_the_account_is_that_of_the_rows_behind():
    a, b = (ShardSource(name, "h", 0, path=f"/data/{name}.csv") for name in "ab")
    named = replace(a, policy=replace(a.policy, budget_name="both"))

    def derived(sql, **tables):
        return ShardSource("d", "h", 0, derived=DerivedShard(sql, tables=tables))

    one = derived("FROM a", a=(a,))
    assert source_id(one) == source_id(a) == source_id(derived("FROM d", d=(one,)))
    both = derived("FROM a, b", a=(a,), b=(b,))
    again = derived("FROM b, d", b=(b,), d=(one,))
    assert source_id(both) == source_id(again)
    assert source_id(both) not in (source_id(a), source_id(b))
    assert source_id(derived("FROM a", a=(named,))) == source_id(named)
    budget = replace(both, policy=replace(both.policy, budget_name="both"))
    assert source_id(budget) == source_id(named)
    assert guard.source_id is source_id


def test_a_database_is_asked_for_the_columns_once(tmp_path):
    """Its rows are copied for each reading, under the site's types."""
    sql = "SELECT a.patient, b.ward FROM patients a JOIN patients b USING (patient)"
    source = derived_of(tmp_path, sql, dict.fromkeys(TABLES, "sqlite"))
    with closing(sqlite3.connect(tmp_path / "patients.sqlite")) as database:
        database.execute("UPDATE patients SET ward = 'new'")
        database.commit()
    assert {ward for _, ward in rows_of(source)} == {"new"}
