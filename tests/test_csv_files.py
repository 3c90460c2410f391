"""Looking at the beginning of a file finds what looking at all of it finds."""

from contextlib import closing
from pathlib import Path

import duckdb
import pytest

from tp_flower.sources import csv_files
from tp_flower.sources.csv_files import csv_call, csv_facts, csv_types

NULLS = ("", "NA", "nan")


@pytest.fixture(autouse=True)
def _small_samples(monkeypatch):
    # DuckDB looks at whole chunks of 2048 rows
    monkeypatch.setattr(csv_files, "SAMPLE_ROWS", 2_048)
    monkeypatch.setattr(csv_files, "SEEN_ROWS", 1_024)
    csv_files._facts.cache_clear()


def write(folder: Path, first: str, late: str, header: str = "a,b") -> str:
    path = folder / "t.csv"
    lines = [header, *[first] * 3_000, late, *[first] * 3]
    path.write_bytes(("\n".join(lines) + "\n").encode())
    return str(path)


def whole(path: str) -> csv_files.CsvFacts:
    with closing(duckdb.connect()) as connection:
        file = csv_files._File(connection, path, NULLS)
        return file.counted(file.sniff(csv_files.WHOLE))


def rows(path: str, facts: csv_files.CsvFacts) -> list[tuple]:
    call = csv_files._call(path, NULLS, facts.dialect, facts.types)
    return duckdb.execute(f"SELECT * FROM {call}").fetchall()


NUMBERS = [
    "5", "-5", "007", "+7", "1_000", "1.5", ".5", "5.", "1e3", "-0", " 7 ", "7 ", "00",
    "0x10", "9223372036854775808", "1e400", "inf", "007.5", "00.5", "-007", "1_0.5",
    "true", "x", "NA", "",
]  # fmt: skip
TIMES = [
    "2013-01-02", "2013-1-2", "2013-01-01 05:06:07", "2013-01-01T05:06:07", "20130101",
    "2013/01/02", "infinity", "epoch", "2013-13-01", "2013-01-01x", " 2013-01-01",
    "2013-01-01 05:06:07+02", "2013-01-01 05:06:07.25", "25/12/2013", "12/25/2013",
    "01/02/2013", "05:06:07", "soon", "1", "",
]  # fmt: skip
TRUTHS = ["true", "FALSE", "t", "no", "y", "0", "1", "on", " true", "x"]
CASES = [
    *((first, late) for first in ("1", "1.5") for late in NUMBERS),
    *(
        (first, late)
        for first in (
            "2013-01-01",
            "2013-01-01 05:06:07",
            "2013-01-01 05:06:07+02",
            "01/02/2013",
            "25/12/2013",
            "01/02/2013 05:06:07",
            "05:06:07",
        )
        for late in TIMES
    ),
    *(("true", late) for late in TRUTHS),
    *(("", late) for late in ("5", "5.5", "2013-01-01", "x", "")),
    *(
        ("x", late)
        for late in ('"y"', '"y"",z"', "'y'", '5" pipe', '"pipe', '"p" x', "# c", "y")
    ),
]


@pytest.mark.parametrize(("first", "late"), CASES)
def test_late_value(tmp_path, first, late):
    path = write(tmp_path, f"{first},x", f"{late},x")
    try:
        expected = whole(path)
    except duckdb.Error:
        with pytest.raises(duckdb.Error):
            csv_facts(path, NULLS)
        return
    found = csv_facts(path, NULLS)
    assert (found.types, found.rows) == (expected.types, expected.rows)
    assert found.all_null == expected.all_null
    try:
        values = rows(path, expected)
    except duckdb.Error:  # one that detection takes and reading refuses
        return
    assert rows(path, found) == values


@pytest.mark.parametrize(
    ("first", "late", "header"),
    [
        ("1,x", '2,"x,y"', "a,b"),
        ("1,x", '2,"x\ny"', "a,b"),
        ("1,x", '2,"x""y"', "a,b"),
        ('1,"x"', '2,"x\\"y"', "a,b"),
        ("1,x", "2,'x,y'", "a,b"),
        ('1,"x"', "2,'y'", "a,b"),
        ("1,x;y", "1,x;y,z", "a,b;c"),
        ("1,x", "# c,y", "a,b"),
        ("1", "x", "a"),
        ("1,x,", "1,x,5", "a,b,c"),
        (",,x", "1,2013-01-01,x", "a,b,c"),
        ("01/02/2013,01/02/2013", "25/02/2013,12/25/2013", "a,b"),
        ("2013-12-25,25/12/2013", "2013-12-24,24/12/2013", "a,b"),
    ],
)
def test_late_line(tmp_path, first, late, header):
    path = write(tmp_path, first, late, header)
    expected = whole(path)
    assert csv_facts(path, NULLS).types == expected.types
    assert rows(path, csv_facts(path, NULLS)) == rows(path, expected)


@pytest.mark.parametrize("late", ["2", "2,y,z", "2,y\r", "# c"])
def test_line_that_does_not_fit(tmp_path, late):
    path = write(tmp_path, "1,x", late)
    with pytest.raises(duckdb.Error):
        csv_facts(path, NULLS)


def sniffed(path: str, monkeypatch) -> list[int]:
    """How many rows DuckDB was told to look at, each time."""
    asked = []
    sniff = csv_files._File.sniff
    monkeypatch.setattr(
        csv_files._File, "sniff", lambda self, n: asked.append(n) or sniff(self, n)
    )
    csv_facts(path, NULLS)
    csv_types(path, NULLS)
    csv_call(path, NULLS, {})
    return asked


def test_usual_file_is_not_sniffed_whole(tmp_path, monkeypatch):
    path = write(tmp_path, "1,1.5,x,2013-01-01,true", "-20,.5,it's,,NA", "a,b,c,d,e")
    assert sniffed(path, monkeypatch) == [2_048]


def test_file_is_sniffed_up_to_the_first_value_of_every_column(tmp_path, monkeypatch):
    path = write(tmp_path, ",x", "5,x")
    assert sniffed(path, monkeypatch) == [2_048, 2_048 + 3_001]
    assert csv_types(path, NULLS) == {"a": "BIGINT", "b": "VARCHAR"}


def test_file_that_changed_is_looked_at_again(tmp_path):
    path = write(tmp_path, "1,x", "2,y")
    assert csv_types(path, NULLS)["a"] == "BIGINT"
    path = write(tmp_path, "1,x", "2.5,y")
    assert csv_types(path, NULLS)["a"] == "DOUBLE"


def test_rows_and_empty_columns(tmp_path):
    facts = csv_facts(write(tmp_path, "1,,x", "2,,x", "a,b,c"), NULLS)
    assert (facts.rows, facts.all_null) == (3_004, ("b",))
