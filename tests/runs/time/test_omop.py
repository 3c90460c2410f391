"""The example of OMOP's windows: DuckDB's answer, and a run that sees no future."""

import re
import shutil
import tomllib
from datetime import date, timedelta

import duckdb
import pandas as pd
import pytest

from examples.omop import compare, make_data
from tests.support.command_line import invoke, settings_of
from tests.support.files import ROOT, read_json
from tests.support.joined import engine_rows, joined_rows, result_names
from tp_flower.query import Query
from tp_flower.sources.shards import load_tables

SQL = tomllib.loads((compare.FOLDER / "sealed.toml").read_text())["sql"]
FLAGS = re.DOTALL | re.MULTILINE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small copy of the example."""
    copy = tmp_path_factory.mktemp("omop") / "a copy"
    shutil.copytree(
        compare.FOLDER, copy, ignore=shutil.ignore_patterns("*.parquet", "__pycache__")
    )
    make_data.make(copy, patients=70)
    return copy


def test_the_page_quotes_the_files():
    page = (ROOT / "docs/tutorial/predict-from-the-past.md").read_text("utf-8")
    tables = (compare.FOLDER / "tables.toml").read_text("utf-8")
    (cohort,) = re.findall(r'^sql = """\n.*?"""$', page, FLAGS)
    policies = re.findall(r"^\[tables\.\w+\.policy\]\n.*?(?=^$|^```)", page, FLAGS)
    (windows,) = re.findall(r"```text\n(LEFT JOIN.*?)```", page, re.DOTALL)
    assert len(policies) == 2
    assert [text for text in (cohort, *policies) if text not in tables] == []
    assert windows in SQL


def rows_of(folder, engine, sql):
    """The joined rows that sites train on, and the query that they answer."""
    sources = {}
    for source in load_tables(str(folder / "tables.toml")):
        sources.setdefault(source.table, []).append(source)
    compare.create_tables(engine, folder)
    schemas = {
        name: {c: t for c, t, *_ in engine.execute(f"DESCRIBE {name}").fetchall()}
        for name in ("cohort", "visit_occurrence", "measurement")
    }
    bound = Query.from_sql(sql).sealing_cutoffs(is_set=True).bind(schemas)
    return joined_rows(bound, sources), bound


def test_the_windows_are_those_of_duckdb(folder):
    with duckdb.connect() as engine:
        found, bound = rows_of(folder, engine, SQL)
        assert found == engine_rows(engine, SQL, result_names(bound))


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("sealed", []),
        # fewer points, for time
        ("grid", ["cutoff-grid=3 months from 2021-12-01 to 2023-12-31"]),
    ],
)
def test_a_copy_trains_as_its_owners_let_it(folder, tmp_path, name, how):
    file = folder / f"{name}.toml"
    out = settings_of(f"output-dir={tmp_path / 'out'}", "num-epochs=1", *how)
    invoke("train", file, *out)
    report = read_json(tmp_path / "out" / "report.json")
    cohort = compare.read_tables(folder)["cohort"]
    assert sum(report["joined-rows"].values()) == len(cohort)


def moved(folder, copy, since):
    """Write a copy with other events from a day on; of visits, from 31 days later."""
    shutil.copytree(folder, copy)
    for name, time in (
        ("measurement", "measurement_date"),
        ("condition_occurrence", "condition_start_date"),
        ("visit_occurrence", "visit_start_date"),
    ):
        # a visit of the next 30 days is what the label says
        first = since + timedelta(days=31) * (name == "visit_occurrence")
        for file in copy.glob(f"*/{name}.parquet"):
            rows = pd.read_parquet(file)
            rows.loc[rows[time] >= first, time] += pd.Timedelta(days=3)
            rows.to_parquet(file, index=False)
    return copy


def test_what_happens_afterwards_changes_nothing(folder, tmp_path):
    """Index dates up to a day, in a world with other events from that day on."""
    last = date(2022, 9, 30)
    sql = f"{SQL} WHERE c.cohort_start_date <= DATE '{last}'"
    copy = moved(folder, tmp_path / "copy", last)
    # a query that looks ahead does see it
    ahead = sql.replace("_date < c.", "_date > c.")
    assert not compare.answer(folder, ahead).equals(compare.answer(copy, ahead))
    with duckdb.connect() as first, duckdb.connect() as second:
        found, _ = rows_of(folder, first, sql)
        again, _ = rows_of(copy, second, sql)
    assert found.total() > 15
    assert found == again
