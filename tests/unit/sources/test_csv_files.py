"""Every row of a CSV file has a say in the types of its columns."""

from logging import WARNING
from pathlib import Path

import duckdb
import pytest

from client_apps.data.features import CachedFeatures
from client_apps.data.run_store import SiteStore
from client_apps.data.tables import SiteTables
from tp_flower.sources.csv_files import csv_call, csv_format
from tp_flower.sources.shards import ShardSource, describe

NULLS = ("", "NA", "nan")
ROWS = 30_000  # DuckDB alone would look at the first 20,480


def write(folder: Path, first: str, late: str, header: str = "a,b") -> str:
    path = folder / "t.csv"
    lines = [header, *[first] * ROWS, late, *[first] * 3]
    path.write_bytes(("\n".join(lines) + "\n").encode())
    return str(path)


def types(path: str) -> dict[str, str]:
    return dict(csv_format(path, NULLS).types)


def warnings(path: str, **fields: object) -> tuple[str, ...]:
    return describe(ShardSource("t", "here", 0, path, nulls=NULLS, **fields)).warnings


@pytest.mark.parametrize(
    ("first", "late", "expected"),
    [
        ("1", "-5", "BIGINT"),
        ("1", "NA", "BIGINT"),
        ("1", "", "BIGINT"),
        ("1", "1.5", "DOUBLE"),
        ("1", "1e3", "DOUBLE"),
        ("1.5", "2", "DOUBLE"),
        # keys, which as numbers would be others
        ("1", "007", "VARCHAR"),
        ("1", "00", "VARCHAR"),
        ("1.5", "007.5", "VARCHAR"),
        ("007", "8", "VARCHAR"),
        ("1", "+7", "VARCHAR"),
        ("1", "x", "VARCHAR"),
        ("1", "true", "VARCHAR"),
        ("true", "FALSE", "BOOLEAN"),
        ("true", "1", "VARCHAR"),
        ("2013-01-01", "2013-01-02", "DATE"),
        ("2013-01-01", "2013-01-01 05:06:07", "TIMESTAMP"),
        ("2013-01-01", "2013-13-01", "VARCHAR"),
        ("01/02/2013", "25/12/2013", "DATE"),
        ("05:06:07", "soon", "VARCHAR"),
        ("", "5", "BIGINT"),
        ("", "2013-01-01", "DATE"),
        ("", "", "VARCHAR"),
    ],
)
def test_late_value_decides_the_type(tmp_path, first, late, expected):
    path = write(tmp_path, f"{first},x", f"{late},x")
    assert types(path) == {"a": expected, "b": "VARCHAR"}
    relation = csv_call(path, NULLS, types(path))
    sql = f"SELECT a FROM {relation} LIMIT 1 OFFSET {ROWS}"
    actual = duckdb.execute(sql).fetchall()
    value = None if late in NULLS else late.replace("25/12/2013", "2013-12-25")
    typed = duckdb.execute(f"SELECT CAST(? AS {expected})", [value])
    assert actual == typed.fetchall()


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        ('2,"x,y"', (2, "x,y")),
        ('2,"x\ny"', (2, "x\ny")),
        ('2,"x""y"', (2, 'x"y')),
        ("2,'y'", (2, "y")),
    ],
)
def test_late_line_decides_how_the_file_is_written(tmp_path, late, expected):
    path = write(tmp_path, "1,x", late)
    relation = csv_call(path, NULLS, types(path))
    actual = duckdb.execute(f"SELECT * FROM {relation} LIMIT 1 OFFSET {ROWS}")
    assert actual.fetchall() == [expected]


@pytest.mark.parametrize("late", ["2", "2,y,z", "2,y\r", "# c"])
def test_line_that_does_not_fit(tmp_path, late):
    path = write(tmp_path, "1,x", late)
    with pytest.raises(duckdb.Error):
        csv_format(path, NULLS)


def test_file_that_changed_is_looked_at_again(tmp_path):
    assert types(write(tmp_path, "1,x", "2,y"))["a"] == "BIGINT"
    assert types(write(tmp_path, "1,x", "2.5,y"))["a"] == "DOUBLE"


def test_rows_and_empty_columns(tmp_path):
    path = write(tmp_path, "1,,x", "2,,x", "a,b,c")
    schema = describe(ShardSource("t", "here", 0, path))
    assert (schema.rows, schema.all_null) == (ROWS + 4, ("b",))


def test_one_text_among_numbers_is_told(tmp_path):
    path = write(tmp_path, "1,x", "n/a,y")
    (text,) = warnings(path)
    assert text == (
        f"table 't' at site 'here' ({path}): column 'a' is read as text, because of a "
        f"value in row {ROWS + 1} that is no number: correct it, name it in 'nulls' if "
        "it stands for a missing one, or say that these are texts: "
        'types = { a = "VARCHAR" }'
    )
    assert warnings(path, types={"a": "VARCHAR"}) == ()
    assert describe(ShardSource("t", "here", 0, path, nulls=("n/a",))).warnings == ()


@pytest.mark.parametrize(
    ("values", "row"),
    [
        ([*"123456789", "x"], 10),
        (["x", *"123456789"], 1),
        (["?", "", *"1234567890", "x", *"1234567890"], 1),
        ([*"12345678", "x"], None),  # one in nine
        (["1", "2.5", "", "NA"], None),
        ([*"123456789", "007", "x"], None),
        (["+7", *"123456789"], None),
        (["2013-01-01"] * 20 + ["x"], None),
        (["x", "y"], None),
    ],
)
def test_columns_that_are_nearly_numbers(tmp_path, values, row):
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["a,b", *(f"{value},1" for value in values)]) + "\n")
    assert csv_format(str(path), NULLS).stray_rows == (
        {} if row is None else {"a": row}
    )


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
