"""Columns that a site cannot read: no obstacle for a query that does not read them.

A query that reads one is refused before any row is read, with a remedy that works.
"""

import json
import re
import sqlite3
import tomllib
from contextlib import closing

import numpy as np
import pandas as pd
import pytest

from tests.support.command_line import invoke, printed_by, refused_by
from tests.support.federated import train
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


def shop(folder, sql=f"SELECT f.rate AS label, f.id, b.z {JOIN}"):
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
    run = {"tables": "tables.toml", "sql": sql, "test-fraction": 0.0, "num-epochs": 2}
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in run.items())
    (folder / "run.toml").write_text("".join(lines))
    return folder / "run.toml"


def test_a_mixed_column_of_sqlite_stops_only_queries_that_read_it(tmp_path):
    run = shop(tmp_path)
    assert "40 of 40 are joined" in printed_by("train", run)
    rated = f"SELECT f.rate AS label, f.rating, b.z {JOIN}"
    assert "40 of 40 are joined" in printed_by("train", run, "--set", f"sql={rated}")
    starred = printed_by(
        "train", run, "--set", f"sql=SELECT f.rate AS label, f.*, b.z {JOIN}"
    )
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
    assert "40 of 40 are joined" in printed_by("train", run, "--set", read)
    convert = 'sql = "SELECT k, rate, CAST(note AS TEXT) AS note FROM film"'
    tables.write_text(TABLES.replace('table = "film"', convert))
    assert "40 of 40 are joined" in printed_by("train", run, "--set", read)


def frames():
    k = np.arange(30)
    months = pd.period_range("2020-01", periods=30, freq="M")
    films = pd.DataFrame({"k": k % 3, "y": k * 0.5, "month": months, "x": k})
    return {"A": {"a": [films]}}, {
        "B": {"b": [pd.DataFrame({"k": [0, 1, 2], "z": [1, 4, 9]})]}
    }


def test_a_period_of_a_frame_stops_only_queries_that_read_it():
    one, other = frames()
    sql = "SELECT a.y AS label, a.x, b.z FROM a JOIN b ON a.k = b.k"
    report = train({**one, **other}, sql, test_fraction=0.0).report
    assert report.joined_rows_train == 30
    reading = sql.replace("a.x", "a.month")
    match = (
        r"feature a.month: table 'a': column 'month' at site 'A' is of pandas' type "
        r"period\[M\], which cannot be read: write (.*) before the run"
    )
    with pytest.raises(SchemaError, match=match) as caught:
        train({**one, **other}, reading, test_fraction=0.0)
    exec(re.search(match, str(caught.value))[1], {"frame": one["A"]["a"][0]})
    assert (
        train({**one, **other}, reading, test_fraction=0.0).report.joined_rows_train
        == 30
    )


def test_a_shard_that_cannot_read_a_column_says_so_for_the_table():
    one, other = frames()
    shards = [one["A"]["a"][0].assign(month=1.0), one["A"]["a"][0]]
    sites = {"S": {"a": shards[:1]}, "A": {"a": shards[1:]}, **other}
    sql = "SELECT a.y AS label, a.x, b.z FROM a JOIN b ON a.k = b.k"
    assert train(sites, sql, test_fraction=0.0).report.joined_rows_train == 60
    with pytest.raises(
        TPFlowerError, match=r"column 'month' at site 'A' is of pandas' type"
    ):
        train(sites, sql.replace("a.x", "a.month"), test_fraction=0.0)
