import os
import re
import shlex
import sqlite3
import tomllib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from flwr.common.config import parse_config_args

from tests.support.files import case_table
from tests.support.policies import OPEN
from tests.support.tables.fragments import features
from tests.support.tables.sources import (
    duckdb_file,
    file_source,
    rows_of,
    sources_of,
    tables_file,
    write_frame,
)
from tp_flower.errors import SourceError
from tp_flower.extraction.extract import extract
from tp_flower.query import Fragment
from tp_flower.sources import frames
from tp_flower.sources.policy import MISSING, SIMULATED
from tp_flower.sources.shards import (
    ShardSource,
    column_types,
    connect,
    describe,
    fingerprint,
    hosted_shards,
    load_tables,
    register_frames,
    release,
    scan,
)

CASES = case_table(__file__)
ORDERS = "id,price,when\n1,2.5,2024-01-01\n2,,2024-01-02\n"
FRAME = pd.DataFrame({"a": [1, 2]})
each_format = pytest.mark.parametrize(
    "name", ["t.csv", "t.parquet", "t.duckdb", "t.sqlite"]
)
FRAME_TYPES = {
    "number": ([1.5, np.nan], "DOUBLE"),
    "text": (["x", None], "VARCHAR"),
    "time": (pd.to_datetime(["2024-01-01", None]), "TIMESTAMP"),
    "category": (pd.Categorical(["u", None]), "ENUM"),
    "flag": ([True, False], "BOOLEAN"),
    7: ([1, 2], "BIGINT"),
}


def refused(match):
    """Expect a source to be refused, with such a text."""
    return pytest.raises(SourceError, match=match)


def csv(folder: Path, text: str, name: str = "t.csv") -> ShardSource:
    (folder / name).write_text(text)
    return file_source(folder / name)


def framed(frame: pd.DataFrame, site: str = "here") -> ShardSource:
    (source,) = load_tables("memory:" + register_frames({"t": frame}, site=site))
    return source


def test_tables_file_in_both_forms(tmp_path):
    orders, us, uk = sources_of(tmp_path, CASES["shards"])
    file = str(tmp_path / "orders.csv")
    assert orders == ShardSource("orders", "store", 0, file, policy=MISSING)
    assert us.path == str(tmp_path / "us.parquet")
    assert us.types == {"zip": "VARCHAR", "age": "DOUBLE"}
    assert uk.site == "customers-1"
    assert uk.index == 1
    assert uk.path == "/abs/uk.csv.gz"
    assert uk.types == {"zip": "VARCHAR", "age": "DECIMAL(9)"}
    assert uk.nulls == ("?",)


@CASES.each("refused", "text", "match")
def test_tables_file_refusals(tmp_path, text, match):
    with refused(match) as caught:
        sources_of(tmp_path, text)
    assert "s3cret" not in str(caught.value)


def test_databases_in_a_tables_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TP_TEST_PASSWORD", "p@ss")
    (tmp_path / "secret-uri").write_text("mariadb://joe:pw@h/d\n")
    whole, query, visits = sources_of(tmp_path, CASES["payments"])
    assert whole.database.url.url.password == "p@ss"
    assert whole.database.table == ("public", "odd.name")
    assert whole.min_count == 5
    assert whole.database.fingerprint == "SELECT 1"
    assert query.database.sql == "SELECT * FROM t"
    assert query.database.order_by == ("a", "b")
    assert query.database.chunk_rows == 10
    assert not query.database.is_pushed_down
    assert query.types == {"a": "DOUBLE"}
    place = "(table public.odd.name of postgresql://***@h/d)"
    assert str(whole) == f"table 'payments' at site 'bank' {place}"
    assert visits.database.url.dialect == "mysql"
    printed = f"{whole!r} {query!s} {visits!r} {whole.database} {whole.database.url!r}"
    for secret in ("p@ss", "p%40ss", "anna", "joe", "pw"):
        assert secret not in printed


def test_unreadable_tables_files(tmp_path):
    for path, match in (
        (tmp_path / "none.toml", r"none.toml does not exist$"),
        ("none.toml", "use an absolute path"),
        (tmp_path, "cannot be read"),
    ):
        with refused(match):
            load_tables(str(path))
    file = tmp_path / "secret-uri"
    text = "[tables.t]\nuri-file = 'secret-uri'\ntable = 't'"
    for data, match in (
        (b"mysql://u:s3cret\xff@h/d", "cannot be read: it is not UTF-8"),
        (b"mysql://u:${HOME}@h/d", r"secret-uri must hold the URI, no \$\{"),
    ):
        file.write_bytes(data)
        with refused(match):
            sources_of(tmp_path, text)


def test_csv_files_of_odd_forms(tmp_path):
    source = csv(tmp_path, "a,b\n1,x\nNA,NA\n,\n")
    assert describe(source).columns == {"a": "BIGINT", "b": "VARCHAR"}
    assert rows_of(source) == [(1, "x"), (None, None), (None, None)]
    chosen = replace(csv(tmp_path, "a,b\n1,NA\n?,y\n"), nulls=("?",))
    assert rows_of(chosen) == [(1, "NA"), (None, "y")]
    lines = "a\"b;it's", '"1;5";25/12/2013', "2;01/02/2013", ""
    source = csv(tmp_path, "\r\n".join(lines), "a'[1].csv")
    assert describe(source).columns == {'a"b': "VARCHAR", "it's": "DATE"}
    assert [str(row[1]) for row in rows_of(source)] == ["2013-12-25", "2013-02-01"]
    # the first line names the columns
    assert rows_of(csv(tmp_path, "a,b\nx,y\n")) == [("x", "y")]
    assert describe(csv(tmp_path, "1,2\n3,4\n")).columns.keys() == {"1", "2"}
    assert describe(csv(tmp_path, "a,b\n")).rows == 0


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_type_override(tmp_path, name):
    write_frame(pd.DataFrame({"a": [1], "b": [2], "c": ["x"]}), tmp_path / name)
    source = file_source(tmp_path / name, types={"b": "DOUBLE"})
    assert describe(source).columns == {"a": "BIGINT", "b": "DOUBLE", "c": "VARCHAR"}
    with refused("names column 'd', but the columns are a, b, c"):
        describe(replace(source, types={"d": "DOUBLE"}))
    unread = describe(replace(source, types={"c": "DOUBLE"})).unread
    assert "more than one in 10 of its texts" in unread["c"]
    assert rows_of(replace(csv(tmp_path, "zip\n007\n"), types={"zip": "VARCHAR"})) == [
        ("007",)
    ]


@each_format
def test_columns_of_other_names(tmp_path, name):
    """Names in the tables file are those of the table, and compare without case."""
    frame = pd.DataFrame({"k": ["007"], "Price": ["$1.50"]})
    write_frame(frame, tmp_path / name, "Album")
    table = "" if name in ("t.csv", "t.parquet") else "table = 'ALBUM'\n"
    rules = f"{table}types = {{ price = 'DOUBLE' }}\nrename = {{ K = 'id' }}\n"
    (source,) = sources_of(tmp_path, f"[tables.t]\npath = '{name}'\n{rules}")
    assert describe(source).columns == {"id": "VARCHAR", "Price": "DOUBLE"}
    with scan(source, Fragment("t", "t", features(p="price"))) as opened:
        for _ in opened.chunks():
            prices = opened.connection.execute('SELECT "Price" FROM shard').fetchall()
            assert prices == [(1.5,)]
    for rename, match in (
        ({"x": "y"}, "'x', but the columns are k"),
        ({"k": "PRICE"}, "one name"),
    ):
        with refused(match):
            describe(replace(source, types={}, rename=rename))


@each_format
def test_columns_that_a_source_lacks(tmp_path, name):
    """They are missing in all rows, of any type, or of that in ``types``."""
    write_frame(pd.DataFrame({"k": [7, 8]}), tmp_path / name)
    rules = "rename = { k = 'id' }\nabsent = ['Day', 'x y']\ntypes = { day = 'DATE' }"
    (source,) = sources_of(tmp_path, f"[tables.t]\npath = '{name}'\n{rules}")
    schema = describe(source)
    assert list(schema.columns) == ["id", "Day", "x y"]
    assert schema.columns["Day"] == "DATE"
    assert schema.rows == 2
    assert schema.all_null == ("Day", "x y")
    wanted = features(i="id", y="year(day)", x='"X Y" + 1')
    fragment = Fragment("t", "t", wanted, filters=('"x y" IS NULL',))
    extracted = extract(source, fragment)
    assert extracted.column("i").values.tolist() == [7, 8]
    assert extracted.column("y").is_missing.all()
    assert extracted.column("x").is_missing.all()
    after = replace(fragment, filters=("Day > DATE '2020-01-01'",))
    assert extract(source, after).rows == 0
    for absent in ("ID", "iD"):
        with refused(f"'absent' names .*'{absent}'.* has a column 'id'"):
            describe(replace(source, absent=(absent,), types={}))
    # the source's old name is that of no column
    assert "k" in describe(replace(source, absent=("k", "day"))).columns


@pytest.mark.parametrize("name", ["x.sqlite", "x.db", "x.duckdb"])
def test_a_file_is_the_database_that_its_content_says(tmp_path, name):
    def add(table):
        connect_to = duckdb.connect if name == "x.duckdb" else sqlite3.connect
        with closing(connect_to(tmp_path / name)) as connection:
            connection.execute(f"CREATE TABLE {table} AS SELECT 1 AS a")

    add("Album")
    (source,) = sources_of(tmp_path, f"tables.t.path = '{name}'")
    assert describe(source).columns.keys() == {"a"}
    add("Track")
    with refused(r"needs 'table'; its tables are .*Album, .*Track"):
        describe(source)


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("t.csv", None, "table 't' at site 'here' .*t.csv.*not exist"),
        ("t.parquet", None, "table 't' at site 'here' .*t.parquet.*not exist"),
        ("t/", None, "does not exist"),
        ("t.csv", "folder", "no Parquet files; several .* each: write .*NAME.shards"),
        ("*.csv", None, "not exist; several other files are a shard each: write"),
        ("t.parquet", "folder", "the folder has no Parquet files"),
        ("t.csv", b"", "the file is empty"),
        ("t.parquet", b"", "the file is empty"),
        ("t.csv", b"a,b\n1,2\n3\n4,5,6\n", "one column 'a,b': does every line have"),
        ("t.csv", b"a,b\nsecret,\xe9\n", "is not utf-8 encoded"),
        ("t.parquet", b"secret", "table 't' at site 'here'"),
        ("t.duckdb", b"secret " * 2000, "IO Error"),
    ],
)
def test_unreadable_files(tmp_path, name, data, match):
    path = tmp_path / name
    if data == "folder":
        path.mkdir()
    elif data is not None:
        path.write_bytes(data)
    relation = ("t",) if name == "t.duckdb" else None
    source = file_source(path, relation=relation)
    with refused(match) as caught:
        describe(source)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", ["csv", "folder", "frame", "duckdb"])
@CASES.each("other_reads", "sql")
def test_connection_reads_its_source_and_nothing_else(tmp_path, sql, kind):
    source = csv(tmp_path, ORDERS)
    other = csv(tmp_path, ORDERS, "other.csv").path
    if kind == "frame":
        source = framed(FRAME)
    if kind == "folder":
        FRAME.to_parquet(tmp_path / "a.parquet")
        source = file_source(tmp_path)
    if kind == "duckdb":
        source = duckdb_file(tmp_path / "crm.duckdb", "CREATE TABLE t AS SELECT 1 AS a")
    with refused("table 't' at site 'here'"), connect(source) as connection:
        listed = connection.execute("SELECT database_name FROM duckdb_databases()")
        names = [name for (name,) in listed.fetchall() if name.startswith("source_")]
        connection.execute(
            sql.format(other=other, folder=tmp_path, database=[*names, "memory"][0])
        )
    assert not (tmp_path / "out.csv").exists()
    assert not (tmp_path / "x.db").exists()


def test_folder_of_parquet_files(tmp_path):
    folder = tmp_path / "orders"
    (folder / "year=2024").mkdir(parents=True)
    (FRAME[:1] + 2).to_parquet(folder / "year=2024" / "b.parquet")
    FRAME.to_parquet(folder / "year=2024" / "a.parquet")
    (folder / "_SUCCESS").write_text("")
    text = "[tables.t]\npath = 'orders/'\n"
    (source,) = sources_of(tmp_path, text)
    assert source.path == str(folder)
    assert describe(source).columns == {"a": "BIGINT", "year": "BIGINT"}
    assert [row[0] for row in rows_of(source)] == [1, 2, 3]
    # an existing folder needs no slash at its end
    (plain,) = sources_of(tmp_path, text.replace("orders/", "orders"))
    assert plain.path == str(folder)


@pytest.mark.parametrize("name", ["a*", "[ab]", "?", "**"])
@pytest.mark.parametrize("folder", ["data", "data [1]*"])
def test_name_that_looks_like_a_pattern_is_one_file(tmp_path, folder, name):
    (tmp_path / folder).mkdir()
    for rows, file in enumerate((name, "ab", "a"), 1):
        frame = pd.DataFrame({"x": [rows] * rows})
        for suffix in ("csv", "parquet"):
            write_frame(frame, tmp_path / folder / f"{file}.{suffix}")
    for suffix in ("csv", "parquet"):
        path = tmp_path / folder / f"{name}.{suffix}"
        source = file_source(path)
        assert describe(source).rows == 1
        assert rows_of(source) == [(1,)]
    assert describe(replace(source, path=str(path.parent))).rows == 1 + 2 + 3


def test_table_of_a_duckdb_file(tmp_path):
    duckdb_file(
        tmp_path / "crm.duckdb",
        "CREATE TABLE t AS SELECT 1 AS a, CAST(uuid() AS UUID) AS u",
        "CREATE SCHEMA s",
        "CREATE TABLE s.t AS SELECT 2 AS a, [0.5, 1] AS v",
    )
    plain, other = sources_of(tmp_path, CASES["databases"])
    assert describe(plain).columns == {"a": "DOUBLE", "u": "UUID"}
    assert rows_of(other) == [(2, [0.5, 1.0])]
    assert "(table s.t of " in str(other)
    with refused(r"Catalog Error: Table with name none"):
        describe(replace(plain, relation=("none",)))


def test_fingerprint_of_files(tmp_path):
    source = csv(tmp_path, ORDERS)
    first = fingerprint(source)
    before = Path(source.path).stat()
    assert source.path in first
    assert fingerprint(source) == first
    # replaced by one of the same size and time
    other = Path(csv(tmp_path, ORDERS.replace("2.5", "7.5"), "other.csv").path)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(source.path)
    assert Path(source.path).stat().st_mtime_ns == before.st_mtime_ns
    second = fingerprint(source)
    csv(tmp_path, ORDERS + "3,1,2024-01-01\n")
    assert len({first, second, fingerprint(source)}) == 3
    (folder := tmp_path / "t").mkdir()
    FRAME.to_parquet(folder / "a.parquet")
    both = file_source(folder)
    one = fingerprint(both)
    FRAME.to_parquet(folder / "b.parquet")
    assert fingerprint(both) != one
    with refused("does not exist"):
        fingerprint(file_source(tmp_path / "none.csv"))
    assert fingerprint(framed(FRAME)) is None


def test_frames_by_token():
    token = register_frames({"c": [FRAME, FRAME + 2], "o": FRAME}, site="shop")
    first, second, other = load_tables(f"memory:{token}")
    assert first.table == "c"
    assert first.site == "shop"
    assert first.index == 0
    assert rows_of(second) == [(3,), (4,)]
    assert other.table == "o"
    assert "table 'c' at site 'shop' (a data frame)" in str(first)
    release(token)
    with refused("no data frames are registered"):
        load_tables(f"memory:{token}")
    with refused(r"expected a data frame .*, not int"):
        register_frames({"t": [3]}, site="s")
    with refused("site 's' has no tables"):
        register_frames({"t": []}, site="s")


def test_tables_in_code(tmp_path, monkeypatch):
    """A shard in a program is what it is in a tables file: a path, a URI, keys."""
    monkeypatch.chdir(tmp_path)
    FRAME.to_csv("a.csv", index=False)
    for table in "uv":
        write_frame(FRAME, Path("shop.sqlite"), table)
    arrow = pa.table({"a": pa.array([1, None], pa.int64())})
    uri = f"sqlite:///{tmp_path}/shop.sqlite"
    table_v = {"uri": uri, "table": "v", "order_by": ["a"]}
    token = register_frames(
        {
            "t": ["a.csv", Path("a.csv"), arrow],
            "u": uri,
            "w": {**table_v, "policy": {"columns": ["a"]}},
        },
        site="shop",
    )
    sources = load_tables(f"memory:{token}")
    assert [(s.table, s.site, s.index) for s in sources] == [
        *(("t", "shop", index) for index in range(3)),
        ("u", "shop", 0),
        ("w", "shop", 0),
    ]
    assert [s.policy == SIMULATED for s in sources] == [True] * 4 + [False]
    assert sources[4].policy.columns == ("a",)
    values = FRAME["a"].to_list()
    for source in (*sources[:2], *sources[3:]):
        assert describe(source).rows == len(values)
        assert describe(source).columns == {"a": "BIGINT"}
    assert describe(sources[2]).columns == {"a": "BIGINT"}
    assert rows_of(sources[2]) == [(1,), (None,)]
    release(token)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"pth": "a.csv"}, r"unknown key 'pth' in shard 0 of table 't' at site 's'"),
        ({"path": "a.csv", "site": "x"}, "the dictionary of sites names"),
        ("a.txt", "cannot tell the format of 'path'"),
    ],
)
def test_a_table_in_code_that_is_refused(value, match):
    with refused(match):
        register_frames({"t": value}, site="s")


def test_frame_types():
    columns = {name: values for name, (values, _) in FRAME_TYPES.items()}
    source = framed(pd.DataFrame(columns, index=["p", "q"]))
    types = describe(source).columns
    assert list(types) == [str(name) for name in FRAME_TYPES]
    for actual, (_, kind) in zip(types.values(), FRAME_TYPES.values(), strict=True):
        assert actual.startswith(kind)
    assert rows_of(source)[1][:4] == (None,) * 4


def test_a_frame_that_runs_backwards_is_read_from_its_end():
    columns = {"n": [1, 2, 3], "t": pd.date_range("2020", periods=3), "s": list("abc")}
    frame = pd.DataFrame(columns)
    assert rows_of(framed(frame.iloc[::-1])) == rows_of(framed(frame))[::-1]
    assert frames.read_frame(frame) is frame


def test_types_that_tell_how_duckdb_reads_a_frame():
    columns = [pd.Series([1, 0]).astype(kind) for kind in frames.PLAIN]
    # in pandas 2 there is no type "str", and Python may hold texts
    columns = [
        column
        for kind, column in zip(frames.PLAIN, columns, strict=True)
        if str(column.dtype) == kind
        and getattr(column.dtype, "storage", "pyarrow") == "pyarrow"
    ]
    assert len(columns) >= len(frames.PLAIN) - 2
    frame = pd.concat(columns, axis=1, keys=[f"x{n}" for n in range(len(columns))])
    for own in (frame, frame[:0]):
        assert frames.hosted_frame(own).plain_types == connection_types(own)
    for odd in (["a", "A"], ["a", ""], ["a", "a"]):
        frame = pd.DataFrame([[1, 2]], columns=odd)
        assert frames.hosted_frame(frame).plain_types is None
        assert list(connection_types(frame)) != odd


def connection_types(frame):
    with closing(duckdb.connect()) as connection:
        connection.register("frame", frame)
        return column_types(connection, "SELECT * FROM frame")


@pytest.fixture
def shared(tmp_path):
    return tables_file(tmp_path, CASES["sites"])


def test_organisations_are_dealt_to_nodes(shared):
    for nodes, expected in (
        (1, ["0 1 2 3"]),
        (2, ["0 2 3", "1"]),  # a and c, f-1
        (3, ["0 2", "1", "3"]),
        (4, ["0 2", "1", "3", ""]),
    ):
        configs = [{"partition-id": k, "num-partitions": nodes} for k in range(nodes)]
        hosted = [hosted_shards(config, {"tables": shared}) for config in configs]
        dealt = [[Path(source.path).stem for source in sources] for sources in hosted]
        assert list(map(" ".join, dealt)) == expected


def test_a_site_reads_its_own_tables_and_none_that_the_run_chooses(shared, tmp_path):
    own = {"tables": f"memory:{register_frames({'t': FRAME}, site='s')}"}
    simulated = {"partition-id": 1, "num-partitions": 2}
    (source,) = hosted_shards(own | simulated, {"tables": shared})
    assert source.table == "t"
    with refused("no tables file of its own, and the run's") as caught:
        hosted_shards({}, {"tables": shared})
    _, written = shlex.split(re.search(r"--node-config .*", str(caught.value))[0])
    own_file = tmp_path / "own.toml"
    own_file.write_text(f"[tables.t]\npath = 't.csv'\n{OPEN}")
    own_line = written.replace("/path/of/tables.toml", str(own_file))
    node_config = parse_config_args([own_line])
    assert [source.table for source in hosted_shards(node_config, {})] == ["t"]
    assert hosted_shards({"partition-id": 0}, {"tables": shared})[0].table == "f"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_file_without_permission(tmp_path):
    source = csv(tmp_path, ORDERS)
    Path(source.path).chmod(0)
    with refused("cannot be read: Permission denied"):
        describe(source)


def test_frames_share_an_engine_but_see_only_their_own():
    one = framed(FRAME, "a")
    other = framed(FRAME[:1] + 6, "b")
    with connect(one) as first, connect(other) as second:
        first.execute("CREATE TEMP TABLE kept AS SELECT * FROM shard")
        assert second.execute("FROM shard").fetchall() == [(7,)]
        assert first.execute("FROM shard").fetchall() == [(1,), (2,)]
        with pytest.raises(duckdb.CatalogException, match="kept"):
            second.execute("SELECT * FROM kept")
    with (
        connect(one) as again,
        pytest.raises(duckdb.CatalogException, match="kept"),
    ):
        again.execute("SELECT * FROM kept")


UNREADABLE = {
    "period": pd.period_range("2020-01", periods=3, freq="M"),
    "interval": pd.interval_range(0, 3),
    "binned": pd.cut([1.0, 2.0, 3.0], 2),
    "sparse": pd.arrays.SparseArray([0.0, 1.0, 2.0]),
    "months": np.array(
        [pd.Period("2020-01"), None, pd.Period("2020-02")], dtype=object
    ),
    "complex": [1j, 2j, 3j],
    "long": np.array([1, 2, 3], np.longdouble),
    "matrices": [np.eye(2)] * 3,
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_columns_of_frames_that_cannot_be_read_are_no_obstacle(name):
    frame = pd.DataFrame(
        {"a": [1, 2, 3], name: UNREADABLE[name], "b": ["x", "y", None]}
    )
    schema = describe(framed(frame))
    assert schema.columns == {"a": "BIGINT", "b": "VARCHAR"}
    assert rows_of(framed(frame))[1][0] == 2
    (reason,) = schema.unread.values()
    assert re.match(r"is of pandas' type .*, which cannot be read: ", reason)
    # its line of Python works
    line = re.search(r"write (.*) before the run$", reason)[1]
    exec(line, {"frame": frame})
    schema = describe(framed(frame))
    assert list(schema.columns) == ["a", name, "b"]
    assert schema.unread == {}
    assert len(rows_of(framed(frame))) == 3


def test_a_column_of_a_view_that_fails_stops_no_other_column(tmp_path):
    schema = describe(
        duckdb_file(
            tmp_path / "t.duckdb",
            "CREATE TABLE source AS SELECT 'secret' AS x",
            "CREATE VIEW t AS SELECT x, CAST(x AS INTEGER) AS y FROM source",
        )
    )
    assert schema.columns == {"x": "VARCHAR"}
    assert schema.rows == 1
    assert re.match(
        r"cannot be read \(Conversion Error \(to INT\w*\)\)$", schema.unread["y"]
    )


TYPED = {
    "no cast": (
        "[1]",
        "DOUBLE",
        r"cannot be read as its type in 'types' of the tables file \(Conv",
    ),
    "values": (
        "1000",
        "TINYINT",
        r"cannot be read as its type .* \(Conversion Error \(out of range\)\)",
    ),
    "texts": (
        "'x'",
        "DOUBLE",
        "more than one in 10 of its texts are not of it: check 'decimal'",
    ),
}


@pytest.mark.parametrize(("sql", "kind", "reason"), TYPED.values(), ids=TYPED)
@pytest.mark.parametrize("suffix", ["parquet", "duckdb", "csv"])
def test_types_of_an_unused_column_stop_no_other_column(
    tmp_path, suffix, sql, kind, reason
):
    path = tmp_path / f"t.{suffix}"
    select = f'SELECT {sql} AS "o d", range AS a FROM range(3)'
    if suffix == "duckdb":
        plain = duckdb_file(path, f"CREATE TABLE t AS {select}")
    else:
        duckdb.execute(f"COPY ({select}) TO '{path}'")
        plain = file_source(path)
    source = replace(plain, types={"O D": kind, "a": "DOUBLE"})
    schema = describe(source)
    assert schema.columns == {"a": "DOUBLE"}
    assert schema.rows == 3
    assert rows_of(source, "SELECT sum(a) FROM shard") == [(3.0,)]
    if suffix != "csv":
        # in a CSV file all values are texts
        assert re.search(reason, schema.unread["o d"])
    assert str(path) not in schema.unread["o d"]
    # its last remedy works
    typed = re.search(r"types = (\{.*?\})", schema.unread["o d"])[1]
    types = tomllib.loads(f"types = {typed}")["types"]
    assert describe(replace(plain, types=types)).columns["o d"] == "VARCHAR"
    # the owner's own mistake is not a matter of columns
    with refused("NOTYPE"):
        describe(replace(source, types={"a": "NOTYPE"}))


def test_exotic_types_of_files_are_no_obstacle(tmp_path):
    source = duckdb_file(
        tmp_path / "t.duckdb",
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE TABLE t AS SELECT 1 AS a, {'m': 'ok'::mood} AS s, MAP {'k': [1]} AS m, "
        "'101'::BIT AS b, INTERVAL 1 DAY AS i, TIMETZ '10:00:00+01' AS z, 'x'::BLOB "
        "AS o, 5::UHUGEINT AS u, union_value(n := 3) AS v, [[1]] AS l, 12::BIGNUM AS n",
    )
    schema = describe(replace(source, relation=()))
    assert list(schema.columns) == [*"asmbizouvln"]
    assert schema.unread == {}
