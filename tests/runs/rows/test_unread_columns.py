"""Columns that a site cannot read: no obstacle for a query that does not read them.

A query that reads one is refused before any row is read, with a remedy that works.
"""

import re
import sqlite3
import tomllib
from contextlib import closing

import numpy as np
import pandas as pd
import pytest

from tests.support.command_line import invoke, printed_by, refused_by
from tests.support.federated import train
from tests.support.files import toml_lines
from tp_flower.errors import SchemaError, TPFlowerError

JOIN = "FROM film f JOIN b ON f.k = b.k"
TABLES = """[tables.film]
path = "shop.sqlite"
table = "film"
site = "A"
[tables.b]
path = "shop.sqlite"
table = "b"
site = "B"
"""


def shop(folder):
    """Films with a rating that SQLite does not know, and a note of numbers and
    texts.
    """
    with closing(sqlite3.connect(folder / "shop.sqlite")) as connection:
        connection.executescript(
            "CREATE TABLE film (id INTEGER PRIMARY KEY, k INTEGER, rate REAL, rating "
            "ENUM, note);CREATE TABLE b (k INTEGER, z REAL);"
        )
        films = [
            (i, i % 5, 0.5 * i, ("PG", "R")[i % 2], i if i % 3 else f"n{i}")
            for i in range(40)
        ]
        connection.executemany("INSERT INTO film VALUES (?, ?, ?, ?, ?)", films)
        connection.executemany(
            "INSERT INTO b VALUES (?, ?)", [(k, k * k) for k in range(5)]
        )
        connection.commit()
    (folder / "tables.toml").write_text(TABLES)
    sql = f"SELECT f.rate AS label, f.id, b.z {JOIN}"
    run = {"tables": "tables.toml", "sql": sql, "test-fraction": 0.0, "num-epochs": 2}
    (folder / "run.toml").write_text(toml_lines(run))
    return folder / "run.toml"


def test_a_mixed_column_of_sqlite_stops_only_queries_that_read_it(tmp_path):
    run = shop(tmp_path)

    def trained(*options):
        printed = printed_by("train", run, *options)
        assert "40 of 40 are joined" in printed
        return printed

    trained()
    trained("--set", f"sql=SELECT f.rate AS label, f.rating, b.z {JOIN}")
    starred = trained("--set", f"sql=SELECT f.rate AS label, f.*, b.z {JOIN}")
    assert re.search(
        r"column 'note' at site 'A' is declared as nothing and holds .* \* leaves it "
        r"out",
        " ".join(starred.split()),
    )
    # read, it is refused, by `check` as well, and both remedies work
    read = f"sql=SELECT f.rate AS label, f.note, b.z {JOIN}"
    refusal = refused_by("check", run, "--set", read)
    assert refusal.removeprefix("FAILED: ") in " ".join(
        invoke("train", run, "--set", read).output.split()
    )
    assert (
        "feature f.note: table 'film': column 'note' at site 'A' is declared" in refusal
    )
    types = re.search(r"types = \{.*?\}", refusal)[0]
    assert tomllib.loads(types) == {"types": {"note": "VARCHAR"}}
    tables = tmp_path / "tables.toml"
    tables.write_text(TABLES.replace('site = "A"', f'site = "A"\n{types}'))
    trained("--set", read)
    convert = 'sql = "SELECT k, rate, CAST(note AS TEXT) AS note FROM film"'
    tables.write_text(TABLES.replace('table = "film"', convert))
    trained("--set", read)


def frames():
    k = np.arange(30)
    months = pd.period_range("2020-01", periods=30, freq="M")
    films = pd.DataFrame({"k": k % 3, "y": k * 0.5, "month": months, "x": k})
    b = pd.DataFrame({"k": [0, 1, 2], "z": [1, 4, 9]})
    return {"A": {"a": [films]}}, {"B": {"b": [b]}}


SQL = "SELECT a.y AS label, a.x, b.z FROM a JOIN b ON a.k = b.k"


def trained_rows(sites, sql):
    """How many joined rows a run trains on."""
    return train(sites, sql, test_fraction=0.0).report.joined_rows_train


def test_a_period_of_a_frame_stops_only_queries_that_read_it():
    one, other = frames()
    assert trained_rows(one | other, SQL) == 30
    reading = SQL.replace("a.x", "a.month")
    match = (
        r"feature a.month: table 'a': column 'month' at site 'A' is of pandas' type "
        r"period\[M\], which cannot be read: write (.*) before the run"
    )
    with pytest.raises(SchemaError, match=match) as caught:
        trained_rows(one | other, reading)
    exec(re.search(match, str(caught.value))[1], {"frame": one["A"]["a"][0]})
    assert trained_rows(one | other, reading) == 30


def test_a_shard_that_cannot_read_a_column_says_so_for_the_table():
    one, other = frames()
    shards = [one["A"]["a"][0].assign(month=1.0), one["A"]["a"][0]]
    sites = {"S": {"a": shards[:1]}, "A": {"a": shards[1:]}, **other}
    assert trained_rows(sites, SQL) == 60
    match = r"column 'month' at site 'A' is of pandas' type"
    with pytest.raises(TPFlowerError, match=match):
        trained_rows(sites, SQL.replace("a.x", "a.month"))
