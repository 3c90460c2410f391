"""Every row of a CSV file has a say in the types of its columns."""

import gzip
from logging import WARNING
from pathlib import Path
from unittest.mock import patch

import duckdb
import pytest

from client_apps.data.features import CachedFeatures
from client_apps.data.run_store import SiteStore
from client_apps.data.tables import SiteTables
from tests.support.files import case_table
from tests.support.tables.sources import file_source, rows_of, sources_of
from tp_flower.sources import csv_files
from tp_flower.sources.csv_files import csv_call, csv_format, merging_columns
from tp_flower.sources.shards import describe
from tp_flower.sources.text_values import DETECTED, TextFormat

CASES = case_table(__file__)
NULLS = ("", "NA", "nan")
ROWS = 30_000  # DuckDB alone would look at the first 20,480


def write(folder: Path, first: str, late: str, header: str = "a,b") -> str:
    return write_lines(folder, [*[first] * ROWS, late, *[first] * 3], header)


def write_lines(folder: Path, lines: list[str], header: str = "a;b") -> str:
    path = folder / "t.csv"
    path.write_bytes(("\n".join([header, *lines]) + "\n").encode())
    return str(path)


def types(path: str) -> dict[str, str]:
    columns = csv_format(path, NULLS).columns
    return {name: column.best.type for name, column in columns.items()}


def warnings(path: str, **settings: object) -> tuple[str, ...]:
    return describe(file_source(path, **{"nulls": NULLS, **settings})).warnings


@CASES.each("late-values", "first", "late", "expected")
def test_late_value_decides_the_type(tmp_path, first, late, expected):
    path = write(tmp_path, f"{first},x", f"{late},x")
    assert types(path) == {"a": expected, "b": "VARCHAR"}
    source = file_source(path, nulls=NULLS)
    actual = rows_of(source, f"SELECT a FROM shard LIMIT 1 OFFSET {ROWS}")
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


def test_small_files_of_one_content_are_read_once(tmp_path):
    (tmp_path / "copy").mkdir()
    line = f"1;{tmp_path}"
    file, copy = (
        write_lines(folder, [line]) for folder in (tmp_path, tmp_path / "copy")
    )
    with patch.object(csv_files, "_find_format", wraps=csv_files._find_format) as find:
        assert csv_format(file, NULLS) is csv_format(copy, NULLS)
        assert find.call_count == 1
        # what else the format follows from
        packed = f"{file}.gz"
        Path(packed).write_bytes(gzip.compress(Path(file).read_bytes()))
        semicolons = TextFormat(delimiter=";")
        for path, nulls, text in (
            (packed, NULLS, DETECTED),
            (file, ("1",), DETECTED),
            (file, NULLS, semicolons),
        ):
            calls = find.call_count
            csv_format(path, nulls, text)
            assert find.call_count == calls + 1
        write_lines(tmp_path / "copy", [line.replace("1", "1.5", 1)])
        assert types(copy)["a"] == "DOUBLE"
        assert types(file)["a"] == "BIGINT"


def test_rows_and_empty_columns_of_a_file_that_changed(tmp_path):
    assert types(write(tmp_path, "1,x", "2,y"))["a"] == "BIGINT"
    assert types(write(tmp_path, "1,x", "2.5,y"))["a"] == "DOUBLE"
    path = write(tmp_path, "1,,x", "2,,x", "a,b,c")
    schema = describe(file_source(path))
    assert schema.rows == ROWS + 4
    assert schema.all_null == ("b",)


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
    assert warnings(path, nulls=("n/a",)) == ()


@CASES.each("nearly-numbers", "values", "row")
def test_columns_that_are_nearly_numbers(tmp_path, values, row):
    path = write_lines(tmp_path, [f"{value},1" for value in values.split(" ")], "a,b")
    hints = csv_format(path, NULLS).hints
    rows = {name: hint.row for name, hint in hints.items()}
    assert rows == ({"a": row} if row else {})


@CASES.each("hints", "values", "remedy", "expected")
def test_the_hint_for_texts_names_what_reads_them(tmp_path, values, remedy, expected):
    write_lines(tmp_path, [f"{value.replace('T', ' ')};x" for value in values.split()])
    table = "[tables.t]\npath = 't.csv'\n"
    (text,) = describe(*sources_of(tmp_path, table)).warnings
    assert f"but {remedy} reads" in text
    assert not [value for value in values.split() if value in text]
    remedies = remedy.replace(", types", "\ntypes")
    (source,) = sources_of(tmp_path, f"{table}{remedies}\n")
    actual = rows_of(source, "SELECT a FROM shard")
    assert str([value for (value,) in actual]).startswith(expected)


def test_how_the_owner_says_that_a_file_is_written(tmp_path):
    (tmp_path / "t.csv").write_bytes("a|b\n1,5|Zo\xeb\n".encode("latin-1"))
    wanted = TextFormat(decimal=",", delimiter="|", encoding="latin-1")
    source = file_source(tmp_path / "t.csv", text=wanted)
    assert rows_of(source) == [(1.5, "Zo\xeb")]


def test_the_site_logs_a_warning_once(tmp_path, caplog):
    source = file_source(write(tmp_path, "1,x", "n/a,y"))
    root = str(tmp_path / "state")
    features = CachedFeatures(root, 10**9, SiteStore(root, 1, 1))
    tables = SiteTables(features, is_simulated=False)
    with caplog.at_level(WARNING):
        for _ in range(2):
            assert tables.describe(source).columns["a"] == "VARCHAR"
    assert caplog.text.count("column 'a' is read as text") == 1


@CASES.each("readings", "values", "readings", "differ")
def test_readings_of_a_column(tmp_path, values, readings, differ):
    path = write_lines(tmp_path, [f"{value};1" for value in values.split("|")])
    column = csv_format(path, NULLS).columns["a"]
    listed = [f"{reading.type} {reading.format}".strip() for reading in column.readings]
    assert listed == readings
    assert column.are_ambiguous == differ
    # what fits is read, by each of them
    for reading in column.readings:
        source = file_source(path, nulls=NULLS, readings={"a": reading})
        (counts,) = rows_of(source, "SELECT count(a), count(*) FROM shard")
        assert counts == (len(values.split("|")),) * 2


@CASES.each("merging", "values", "merges")
def test_texts_that_differ_but_are_equal_values(tmp_path, values, merges):
    path = write_lines(tmp_path, [f"{value};1" for value in values.split("|")])
    merging = merging_columns(path, NULLS, DETECTED, ["a"])
    assert merging == (["a"] if merges else [])
