"""Advice works: each remedy that a message names is applied to the case that raised it.

A message that advises and is neither tried here nor in ``EXEMPT`` fails the last test:
whoever writes a new one adds the case that raises it, and what its reader would write.
"""

import re
import shlex
import sqlite3
import tomllib
from contextlib import closing
from datetime import time
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest

from tests.support.advice import advising, texts
from tests.support.command_line import printed_by, refused_by
from tests.support.federated import train, write_site
from tests.support.files import ROOT, case_table
from tp_flower.errors import SettingsError, TPFlowerError
from tp_flower.settings import PrivacySettings, Settings, keys
from tp_flower.settings.settings import synonyms

CASES = case_table(__file__)
EXEMPT = tomllib.loads(Path(__file__).with_name("exempt.toml").read_text("utf-8"))
SQL = "SELECT a.y AS label, b.z FROM a JOIN b ON a.k = b.k"
ROWS = 60


def sites():
    k = np.arange(ROWS)
    texts = pd.Series([f"k{i % 6}" for i in k])
    day = pd.Timestamp("2020-01-01")
    a = pd.DataFrame({"k": k % 6, "t": texts, "y": k * 0.5 + k % 7, "x": k % 7})
    a["n"] = [None if i % 4 == 0 else float(i) for i in k]
    a["digits"] = (k % 6).astype(str)
    a["time"], a["once"] = day + pd.to_timedelta(k, unit="h"), day
    a["day"] = "0" + (k % 9 + 1).astype(str).astype(object) + ".02.2020"
    a["clock"] = [time(i % 24, 30) for i in k]
    a["wait"] = pd.to_timedelta(k, unit="s")
    a["tags"] = [["x"] * (i % 3 + 1) for i in k]
    a["marked"] = ["N/A" if i % 10 == 0 else f"{i}.5" for i in k]
    a["ratio"] = np.where(k % 20 == 0, np.inf, k * 1.0)
    a["name"] = [f"{'n' * (i % 4)}-{i}" for i in k]
    b = pd.DataFrame({"k": range(6), "z": [1.0, 4.0, 2.0, 7.0, 5.0, 3.0]})
    b["upper"] = [f" K{i}" for i in b["k"]]
    c = pd.DataFrame({"k": k % 6, "v": k * 1.0, "part": k * 2 // ROWS})
    e = pd.DataFrame({"id": range(6), "w": [2.0, 1.0, 0.0, 5.0, 8.0, 1.0]})
    f = pd.DataFrame({"q": np.arange(1100), "r": np.arange(1100) % 9})
    f["t"] = pd.Timestamp("2020-01-01 12:00") + pd.to_timedelta(f["q"] // 500, unit="D")
    first = c["part"] == 0
    return {
        "A": {"a": [a]},
        "B": {"b": [b], "e": [e], "f": [f]},
        "C": {"c": [c[first]]},
        "D": {"c": [c[~first]]},
    }


def each_case(group):
    """One test for each case of a group, by what the message says."""
    ids = [case["says"][:40] for case in CASES[group]]
    return pytest.mark.parametrize("case", CASES[group], ids=ids)


def outcome(sql, settings, sites):
    """The error of a run, "" for none, and its warnings."""
    options = {"method": "cg", **(settings or {})}
    if "private" in options:
        options["privacy"] = PrivacySettings(**options.pop("private"))
    try:
        return "", train(sites, sql, **options).report.warnings
    except TPFlowerError as error:
        return str(error), []


def check(says, before, after):
    error, warnings = before
    assert says in "\n".join([error, *warnings])
    error, warnings = after
    assert error == ""
    assert not [text for text in warnings if says in text]


@each_case("sql")
def test_the_query_that_a_message_says_to_write_trains(case):
    sql = case["sql"]
    settings = case.get("settings")
    mended = case.get("mended", sql), case.get("mended_settings", settings)
    check(case["says"], outcome(sql, settings, sites()), outcome(*mended, sites()))


@each_case("setting")
def test_the_setting_that_a_message_says_to_set_trains(case):
    before, after = (
        outcome(SQL, case[settings], sites()) for settings in ("settings", "mended")
    )
    check(case["says"], before, after)


@each_case("config")
def test_the_settings_that_a_refusal_names_are_accepted(case):
    with pytest.raises(SettingsError, match=re.escape(case["says"])):
        Settings.from_run_config(case["config"])
    Settings.from_run_config(case["mended"])


@pytest.mark.parametrize("name", synonyms())
def test_every_name_of_another_library_leads_to_a_setting(name):
    match = f"{name}: unknown setting. It is "
    with pytest.raises(SettingsError, match=match) as caught:
        Settings.from_run_config({name: 1})
    meant = re.search(r"It is ([\w-]+)", str(caught.value))[1]
    assert meant in keys()
    assert name not in keys()


def test_privacy_settings_in_python():
    def error_of(settings):
        return outcome(SQL, settings, sites())[0]

    words = "privacy=PrivacySettings(scores=...), from tp_flower.settings"
    for name in ("privacy.scores", "privacy_scores"):
        assert words in error_of({name: "clear"})
    nested = error_of({"privacy": {"scores": "clear"}})
    assert "write privacy=PrivacySettings(...)" in nested
    assert error_of({"privacy": PrivacySettings(scores="clear")}) == ""
    settings = Settings.from_run_config({"privacy.scores": "clear"})
    assert settings.privacy.scores == "clear"


def files(folder, tables):
    """A run on a table of many formats and one of a CSV file."""
    k = np.arange(ROWS)
    frame = pd.DataFrame({"k": k % 6, "y": k * 0.5, "big": k * 1000})
    frame["m"] = ["N/A" if i % 10 == 0 else "-" if i % 10 == 1 else f"{i}.5" for i in k]
    frame.to_csv(folder / "a.csv", index=False)
    duckdb.from_df(frame).write_parquet(str(folder / "a.parquet"))
    (folder / "s.sqlite").unlink(missing_ok=True)
    with closing(sqlite3.connect(folder / "s.sqlite")) as connection:
        mixed = [i if i % 3 else f"n{i}" for i in k.tolist()]
        connection.execute("CREATE TABLE a (k INTEGER, y REAL, mixed)")
        rows = zip((k % 6).tolist(), (k * 0.5).tolist(), mixed, strict=True)
        connection.executemany("INSERT INTO a VALUES (?, ?, ?)", rows)
        connection.commit()
    pd.DataFrame({"k": range(6), "z": [1, 4, 2, 7, 5, 3]}).to_csv(
        folder / "b.csv", index=False
    )
    policy = "" if "policy" in tables else "policy = 'open'\n"
    text = f"[tables.a]\nsite = 'A'\n{policy}{tables}\n"
    text += "[tables.b]\nsite = 'B'\npath = 'b.csv'\npolicy = 'open'\n"
    (folder / "tables.toml").write_text(text)


@each_case("file")
def test_the_tables_file_that_a_message_says_to_write_trains(case, tmp_path):
    def outcome_of(tables):
        files(tmp_path, tables)
        sql = f"SELECT a.y AS label, a.{case['column']}, b.z FROM a JOIN b ON a.k = b.k"
        return outcome(sql, {}, {"A": tmp_path / "tables.toml"})

    check(case["says"], outcome_of(case["tables"]), outcome_of(case["mended"]))


def test_a_tables_file_in_place_of_settings(tmp_path):
    files(tmp_path, "path = 'a.csv'")
    tables = tmp_path / "tables.toml"
    refusal = refused_by("check", tables, status=2)
    assert (
        "is a tables file, not a file of settings: write one with tables = " in refusal
    )
    without_query = refused_by("check", "--set", f"tables={tables}", status=2)
    assert "write the query whose result to train on" in without_query
    arguments = shlex.split(
        re.search(r"--set tables=.*", refusal)[0].replace("SELECT ...", SQL)
    )
    assert "fit together" in printed_by("check", *arguments)
    lines = re.search(r"write one with (tables = .*) and (sql = .*\"), or", refusal)
    run = f"{lines[1]}\n{lines[2]}".replace("SELECT ...", SQL)
    (tmp_path / "run.toml").write_text(run)
    assert "fit together" in printed_by("check", tmp_path / "run.toml")


@each_case("policy")
def test_the_setting_that_a_policy_says_to_set_trains(case, tmp_path):
    def outcome_of(settings):
        rules = {"c": case["rules"]}
        grid = {}
        for name, tables in sites().items():
            frames = {table: frame for table, (frame,) in tables.items()}
            grid[name] = write_site(tmp_path / name, frames, rules)
        sql = "SELECT a.y AS label, b.z, c.v FROM a "
        sql += "JOIN b ON a.k = b.k JOIN c ON a.k = c.k"
        return outcome(sql, settings, grid)

    check(case["says"], outcome_of(case["settings"]), outcome_of(case["mended"]))


def test_rows_without_a_match_that_a_tables_owner_marks_or_leaves_out(tmp_path):
    with closing(sqlite3.connect(tmp_path / "s.sqlite")) as connection:
        connection.execute("CREATE TABLE o (k INTEGER, y REAL)")
        connection.execute("CREATE TABLE gone (k INTEGER)")
        rows = [(i % 6, i * 0.5) for i in range(ROWS)]
        connection.executemany("INSERT INTO o VALUES (?, ?)", rows)
        connection.execute("INSERT INTO gone VALUES (1), (2)")
        connection.commit()

    def trained(where, of_owner='table = "o"'):
        gone = '[tables.gone]\npath = "s.sqlite"\ntable = "gone"\npolicy = "open"\n'
        own = f'[tables.o]\npath = "s.sqlite"\n{of_owner}\npolicy = "open"\n'
        (tmp_path / "tables.toml").write_text(own + gone)
        sql = f"SELECT o.y AS label, o.k FROM o {where}"
        return train({"A": tmp_path / "tables.toml"}, sql, "cg", test_fraction=0.0)

    match = (
        r"let a table's owner mark them or leave them out \(`sql = ...` in the tables "
        r"file\)"
    )
    for condition in ("o.k NOT IN", "NOT EXISTS"):
        with pytest.raises(TPFlowerError, match=match):
            trained(f"WHERE {condition} (SELECT k FROM gone g WHERE g.k = o.k)")
    marked = 'sql = "SELECT *, k IN (SELECT k FROM gone) AS is_gone FROM o"'
    left_out = 'sql = "SELECT * FROM o WHERE k NOT IN (SELECT k FROM gone)"'
    runs = [trained("WHERE o.is_gone = 0", marked), trained("", left_out)]
    assert [run.report.joined_rows_train for run in runs] == [ROWS * 4 // 6] * 2


def test_the_reason_of_unmatched_rows_is_the_filter_that_removed_their_partners():
    reason = '; of b the query takes only rows WHERE "z" > 3'
    where = "WHERE b.z > 3"
    partners = "SELECT LOWER(TRIM(upper)) FROM b WHERE z > 3 AND k > 3"
    for sql in (
        SQL.replace("a.k = b.k", "a.t = LOWER(TRIM(b.upper))") + " " + where,
        f"SELECT a.y AS label, a.x FROM a WHERE a.t IN ({partners})",
    ):
        error, warnings = outcome(sql, {}, sites())
        lost = [text for text in warnings if "have no match in" in text]
        assert error == ""
        assert all(
            reason in text and "LOWER" not in text.split(";")[1] for text in lost
        )
    assert lost


def test_a_value_of_rows_without_a_match_is_that_of_a_sub_query():
    said = "m of b: 30 of 60 joined rows have no match, for which SQL has a value"
    grouped = "(SELECT k, MAX(z) AS m FROM b WHERE k > 2 GROUP BY k) g ON a.k = g.k"
    correlated = "(SELECT MAX(b.z) FROM b WHERE b.k = a.k AND b.k > 2)"
    for sql, has_warned in (
        (f"a.x, COALESCE(g.m, 9) AS m FROM a LEFT JOIN {grouped}", True),
        (f"a.x, g.m FROM a LEFT JOIN {grouped}", False),
        (f"a.x, COALESCE({correlated}, 9) AS m FROM a", False),
    ):
        error, warnings = outcome(f"SELECT a.y AS label, {sql}", {}, sites())
        assert error == ""
        assert any(said in text for text in warnings) == has_warned


def test_every_message_that_advises_is_tried_or_exempt():
    tried = {case["says"] for cases in CASES.values() for case in cases}
    exempt = EXEMPT["messages"].keys()
    new = [
        text
        for text in advising()
        if not any(part in text for part in (*tried, *exempt))
    ]
    assert not new, "messages that advise: try their advice in test_remedies.toml"
    # what stands in no message any more is neither tried nor exempt
    every = texts()
    assert not [
        part for part in (*tried, *exempt) if not any(part in text for text in every)
    ]
    # nor is what is tried exempt
    untried = [text for text in every if not any(part in text for part in tried)]
    assert not [part for part in exempt if not any(part in text for text in untried)]


def test_the_tests_that_stand_for_exempt_messages_are_there():
    named = re.findall(
        r"(test_\w+\.py)::(test_\w+)", "\n".join(EXEMPT["messages"].values())
    )
    assert named
    for file, name in named:
        files = [path.read_text("utf-8") for path in (ROOT / "tests").rglob(file)]
        assert any(f"def {name}(" in text for text in files), name
