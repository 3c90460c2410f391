"""A folder in RelBench's format becomes tables and a run that looks back."""

import json
import re
import tomllib
from collections import Counter
from contextlib import closing
from itertools import groupby
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml

from scripts.data.prepare_relbench import main
from tests.support.datasets import run_prepared
from tests.support.files import case_table
from tests.support.joined import joined_rows, plain, result_names
from tests.support.tables.formula_one import write_formula_one
from tp_flower.query import Query
from tp_flower.sources.shards import describe, load_tables

CASES = case_table(__file__)
DAYS = pd.date_range("2020-01-01", periods=40)


def labels(start: int, stop: int) -> pd.DataFrame:
    rows = range(start, stop)
    frame = pd.DataFrame({"day": DAYS[start:stop], "driver": [n % 8 for n in rows]})
    return frame.assign(points=[float(n % 8 + n % 3) for n in rows])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "rel"
    task = tmp_path / "rel" / "tasks" / "driver-points"
    for each in (path / "db", task):
        each.mkdir(parents=True)
    for name, columns in CASES["rows"].items():
        frame = pd.DataFrame(
            {k: DAYS[v] if k == "at" else v for k, v in columns.items()}
        )
        frame.to_parquet(path / "db" / f"{name}.parquet")
    for split, ends in {"train": (0, 24), "val": (24, 32), "test": (32, 40)}.items():
        labels(*ends).to_parquet(task / f"{split}.parquet")
    for place, content in ((path, CASES["dataset"]), (task, CASES["task"])):
        (place / "manifest.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def test_labels_join_what_their_entity_refers_to(folder, tmp_path):
    output = tmp_path / "out"
    assert main([str(folder), str(output), "--without", "results"]) == 0
    text = (output / "my-run.toml").read_text()
    assert [line for line in text.split("\n") if "JOIN" in line] == CASES["joins"]
    assert CASES["columns"] in text
    report = run_prepared(output)
    assert (report.joined_rows_train, report.joined_rows_test) == (24, 8)
    assert report.split["validation-rows"] == 8


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda case: case["message"])
def test_others_are_refused_by_name(folder, tmp_path, capsys, case):
    for file, changes in case.get("changes", {}).items():
        path = folder / file / "manifest.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))
    assert main([str(folder), str(tmp_path / "out"), *case["arguments"]]) == 2
    assert case["message"] in capsys.readouterr().err


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("formula-one") / "rel"
    write_formula_one(path, seasons=1, races=8)
    return path


def bound_and_sources(config, output):
    """The query bound to its tables, and the shards of each table."""
    sources = {
        name: list(shards)
        for name, shards in groupby(
            load_tables(str(output / "tables.toml")), lambda source: source.table
        )
    }
    schemas = {name: describe(shards[0]).columns for name, shards in sources.items()}
    query = Query.from_sql(config["sql"]).on_grid(config["cutoff-grid"])
    return query.bind(schemas), sources


def answers_of_duckdb(folder, sql, names):
    """DuckDB's answer to the SQL itself, over the tables of a folder."""
    tables = tomllib.loads((folder / "tables.toml").read_text())["tables"]
    with closing(duckdb.connect()) as engine:
        for name, entry in sorted(tables.items(), key=lambda item: "sql" in item[1]):
            rows = entry.get("sql") or f"FROM '{folder / entry.get('path', '')}'"
            engine.execute(f'CREATE TABLE "{name}" AS {rows}')
        rows = engine.sql(sql).fetchall()
    for row in rows:
        values = map(plain, row)
        yield tuple(sorted(zip(map(str.lower, names), values, strict=True)))


@CASES.each("looks_back", "task", "arguments", "tables")
def test_what_a_label_looks_back_on_is_the_answer_of_duckdb(
    races, tmp_path, task, arguments, tables
):
    assert main([str(races), str(tmp_path), "--task", task, *arguments]) == 0
    config = tomllib.loads((tmp_path / "my-run.toml").read_text())
    bound, sources = bound_and_sources(config, tmp_path)
    assert list(bound.tables) == tables
    expected = answers_of_duckdb(tmp_path, config["sql"], result_names(bound))
    assert joined_rows(bound, sources) == Counter(expected)


def test_a_run_looks_back_from_every_cutoff(races, tmp_path):
    assert main([str(races), str(tmp_path), "--task", "driver-position"]) == 0
    report = run_prepared(tmp_path, strategy="cg")
    labels = sum(
        len(pd.read_parquet(races / "tasks" / "driver-position" / f"{name}.parquet"))
        for name in ("train", "val", "test")
    )
    rows = report.split["validation-rows"] + report.joined_rows_train
    assert rows + report.joined_rows_test == labels
    assert not [text for text in report.warnings if "cutoff-grid" in text]


def test_a_table_of_another_owner_is_left_out_and_said(races, tmp_path, capsys):
    arguments = [str(races), str(tmp_path), "--task", "circuit-dnf"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    advice = "--owners together=results,races"
    assert f"left out: results: is two joins away, by races: {advice}" in said
    assert main([*arguments, *advice.split()]) == 0
    assert "left out: results" not in capsys.readouterr().out


def in_the_packages_format(folder, path):
    """The folder as the package relbench saves one: metadata in place of manifests."""

    def save(source, target, table):
        rows = pq.read_table(source)
        own = {
            "fkey_col_to_pkey_table": table.get("fkeys", {}),
            "pkey_col": table.get("pkey"),
            "time_col": table.get("time_col"),
        }
        metadata = {key: json.dumps(value) for key, value in own.items()}
        target.parent.mkdir(parents=True, exist_ok=True)
        metadata = {**rows.schema.metadata, **metadata}
        pq.write_table(rows.replace_schema_metadata(metadata), target)

    tables = yaml.safe_load((folder / "manifest.yaml").read_text())["tables"]
    for name, table in tables.items():
        save(folder / f"db/{name}.parquet", path / f"db/{name}.parquet", table)
    for task in (folder / "tasks").iterdir():
        own = yaml.safe_load((task / "manifest.yaml").read_text())
        fkeys = {own["entity_col"]: own["entity_table"]}
        table = {"fkeys": fkeys, "time_col": own["time_col"]}
        for file in task.glob("*.parquet"):
            save(file, path / "tasks" / task.name / file.name, table)
    return path


@pytest.mark.parametrize("task", ["driver-dnf", "driver-position", "circuit-dnf"])
def test_a_download_of_the_package_is_prepared_as_with_manifests(races, tmp_path, task):
    saved = in_the_packages_format(races, tmp_path / "saved")
    configs = []
    for number, folder in enumerate((races, saved)):
        output = tmp_path / str(number)
        assert main([str(folder), str(output), "--task", task]) == 0
        configs.append(tomllib.loads((output / "my-run.toml").read_text()))
        del configs[-1]["tables"]
        # the package keeps no order of the tables
        configs[-1]["sql"] = sorted(re.split(r", |\n", configs[-1]["sql"]))
    assert configs[0] == configs[1]


def test_tables_that_tell_no_keys_are_refused(races, tmp_path, capsys):
    (tmp_path / "db").mkdir()
    rows = pq.read_table(races / "db" / "drivers.parquet").replace_schema_metadata()
    pq.write_table(rows, tmp_path / "db" / "drivers.parquet")
    assert main([str(tmp_path), str(tmp_path / "out"), "--task", "x"]) == 2
    assert "drivers.parquet has no pkey_col in its metadata" in capsys.readouterr().err


def test_a_task_of_two_targets_is_refused(races, tmp_path, capsys):
    saved = in_the_packages_format(races, tmp_path / "saved")
    path = saved / "tasks" / "driver-dnf" / "train.parquet"
    rows = pq.read_table(path)
    pq.write_table(rows.append_column("other", rows["did_not_finish"]), path)
    assert main([str(saved), str(tmp_path / "out"), "--task", "driver-dnf"]) == 2
    assert "supported are tasks of one entity, a time and a target" in (
        capsys.readouterr().err
    )
