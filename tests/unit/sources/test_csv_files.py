"""Every row of a CSV file has a say in the types of its columns."""

from logging import WARNING
from pathlib import Path

import duckdb
import pytest

from client_apps.data.features import CachedFeatures
from client_apps.data.run_store import SiteStore
from client_apps.data.tables import SiteTables
from tests.support.files import case_table
from tp_flower.sources.csv_files import csv_call, csv_format, merging_columns
from tp_flower.sources.shards import ShardSource, connect, describe, load_tables
from tp_flower.sources.text_values import DETECTED, TextFormat

CASES = case_table(__file__)
NULLS = ("", "NA", "nan")
ROWS = 30_000  # DuckDB alone would look at the first 20,480


def write(folder: Path, first: str, late: str, header: str = "a,b") -> str:
    path = folder / "t.csv"
    lines = [header, *[first] * ROWS, late, *[first] * 3]
    path.write_bytes(("\n".join(lines) + "\n").encode())
    return str(path)


def types(path: str) -> dict[str, str]:
    return {
        name: column.best.type
        for name, column in csv_format(path, NULLS).columns.items()
    }


def warnings(path: str, **fields: object) -> tuple[str, ...]:
    return describe(ShardSource("t", "here", 0, path, nulls=NULLS, **fields)).warnings


@CASES.each("late-values", "first", "late", "expected")
def test_late_value_decides_the_type(tmp_path, first, late, expected):
    path = write(tmp_path, f"{first},x", f"{late},x")
    assert types(path) == {"a": expected, "b": "VARCHAR"}
    with connect(ShardSource("t", "here", 0, path, nulls=NULLS)) as connection:
        actual = connection.execute(
            f"SELECT a FROM shard LIMIT 1 OFFSET {ROWS}"
        ).fetchall()
    value = None if late in NULLS else late.replace("25/12/2013", "2013-12-25")
    assert actual == duckdb.execute(f"SELECT CAST(? AS {expected})", [value]).fetchall()


@CASES.each("late-lines", "late", "expected")
def test_late_line_decides_how_the_file_is_written(tmp_path, late, expected):
    path = write(tmp_path, "1,x", late)
    relation = csv_call(path, NULLS, csv_format(path, NULLS).dialect, types(path))
    actual = duckdb.execute(f"SELECT * FROM {relation} LIMIT 1 OFFSET {ROWS}")
    assert actual.fetchall() == [tuple(expected)]


@pytest.mark.parametrize("late", ["2", "2,y,z", "2,y\r", "# c"])
def test_line_that_does_not_fit(tmp_path, late):
    with pytest.raises(duckdb.Error):
        csv_format(write(tmp_path, "1,x", late), NULLS)


def test_rows_and_empty_columns_of_a_file_that_changed(tmp_path):
    assert types(write(tmp_path, "1,x", "2,y"))["a"] == "BIGINT"
    assert types(write(tmp_path, "1,x", "2.5,y"))["a"] == "DOUBLE"
    path = write(tmp_path, "1,,x", "2,,x", "a,b,c")
    schema = describe(ShardSource("t", "here", 0, path))
    assert (schema.rows, schema.all_null) == (ROWS + 4, ("b",))


def test_one_text_among_numbers_is_told(tmp_path):
    path = write(tmp_path, "1,x", "n/a,y")
    (text,) = warnings(path)
    assert text == (
        f"table 't' at site 'here' ({path}): column 'a' is read as text, but types = "
        f'{{ "a" = "DOUBLE" }} reads {ROWS + 3} of its {ROWS + 4} values, '
        f"not that of row {ROWS + 1}; others are missing, as those in 'nulls'; types = "
        '{ "a" = "VARCHAR" } says that these are texts'
    )
    (text,) = warnings(path, types={"A": "DOUBLE"})
    assert text.endswith(f"1 of its {ROWS + 4} texts are not of it, and are missing")
    assert warnings(path, types={"a": "VARCHAR"}) == ()
    assert describe(ShardSource("t", "here", 0, path, nulls=("n/a",))).warnings == ()


@CASES.each("nearly-numbers", "values", "row")
def test_columns_that_are_nearly_numbers(tmp_path, values, row):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "".join(f"{value},1\n" for value in values.split(" ")))
    hints = csv_format(str(path), NULLS).hints
    assert {name: hint.row for name, hint in hints.items()} == (
        {"a": row} if row else {}
    )


@CASES.each("hints", "values", "remedy", "expected")
def test_the_hint_for_texts_names_what_reads_them(tmp_path, values, remedy, expected):
    texts = "".join(f"{value.replace('T', ' ')};x\n" for value in values.split())
    (tmp_path / "t.csv").write_text(f"a;b\n{texts}")
    file = tmp_path / "tables.toml"
    file.write_text("[tables.t]\npath = 't.csv'\n")
    (text,) = describe(*load_tables(str(file))).warnings
    assert f"but {remedy} reads" in text
    assert not [value for value in values.split() if value in text]
    file.write_text(
        f"[tables.t]\npath = 't.csv'\n{remedy.replace(', types', chr(10) + 'types')}\n"
    )
    (source,) = load_tables(str(file))
    with connect(source) as connection:
        actual = connection.execute("SELECT a FROM shard").fetchall()
    assert str([value for (value,) in actual]).startswith(expected)


def test_how_the_owner_says_that_a_file_is_written(tmp_path):
    (tmp_path / "t.csv").write_bytes("a|b\n1,5|Zo\xeb\n".encode("latin-1"))
    wanted = TextFormat(decimal=",", delimiter="|", encoding="latin-1")
    source = ShardSource("t", "here", 0, str(tmp_path / "t.csv"), text=wanted)
    with connect(source) as connection:
        assert connection.execute("FROM shard").fetchall() == [(1.5, "Zo\xeb")]


def test_the_site_logs_a_warning_once(tmp_path, caplog):
    source = ShardSource("t", "here", 0, write(tmp_path, "1,x", "n/a,y"))
    root = str(tmp_path / "state")
    tables = SiteTables(
        CachedFeatures(root, 10**9, SiteStore(root, 1, 1)), is_simulated=False
    )
    with caplog.at_level(WARNING):
        for _ in range(2):
            assert tables.describe(source).columns["a"] == "VARCHAR"
    assert caplog.text.count("column 'a' is read as text") == 1


@CASES.each("readings", "values", "readings", "differ")
def test_readings_of_a_column(tmp_path, values, readings, differ):
    path = tmp_path / "t.csv"
    path.write_text("a;b\n" + "".join(f"{value};1\n" for value in values.split("|")))
    column = csv_format(str(path), NULLS).columns["a"]
    listed = [f"{reading.type} {reading.format}".strip() for reading in column.readings]
    assert (listed, column.are_ambiguous) == (readings, differ)
    # what fits is read, by each of them
    for reading in column.readings:
        source = ShardSource(
            "t", "here", 0, str(path), nulls=NULLS, readings={"a": reading}
        )
        with connect(source) as connection:
            (counts,) = connection.execute(
                "SELECT count(a), count(*) FROM shard"
            ).fetchall()
        assert counts == (len(values.split("|")),) * 2


@CASES.each("merging", "values", "merges")
def test_texts_that_differ_but_are_equal_values(tmp_path, values, merges):
    path = tmp_path / "t.csv"
    path.write_text("a;b\n" + "".join(f"{value};1\n" for value in values.split("|")))
    assert merging_columns(str(path), NULLS, DETECTED, ["a"]) == (
        ["a"] if merges else []
    )
