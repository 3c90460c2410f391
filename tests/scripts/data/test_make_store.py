"""The store example: what it writes can be read by the parts that will read it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.shards import describe, load_tables


def make_store(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "data" / "make_store.py", *arguments],
        # the script imports tp_flower, installed or not
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a store")
    sizes = ("--orders", "30", "--items", "5", "--customers", "9")
    done = make_store(str(folder), *sizes)
    assert done.returncode == 0, done.stderr
    assert f"flwr run . --stream -c '{folder}/my-run.toml'" in done.stdout
    assert f"flwr run . --stream -c '{folder}/my-run-regression.toml'" in done.stdout
    return folder


@pytest.mark.parametrize(
    ("name", "task"),
    [("my-run", "classification"), ("my-run-regression", "regression")],
)
def test_the_runs_fit_the_tables(store: Path, name: str, task: str) -> None:
    config = tomllib.loads((store / f"{name}.toml").read_text(encoding="utf-8"))
    settings = Settings.from_run_config(config)
    assert settings.task == task
    sources = load_tables(settings.tables)
    schemas = {source.table: describe(source).columns for source in sources}
    bound = Query.from_sql(settings.sql).bind(schemas)
    assert list(bound.tables) == ["o", "i", "c"]


def test_each_organisation_has_its_shards(store: Path) -> None:
    sources = load_tables(str(store / "tables.toml"))
    assert [(source.table, source.site) for source in sources] == [
        ("orders", "shop"),
        ("items", "warehouse"),
        ("customers", "us"),
        ("customers", "uk"),
    ]
    rows = {source.site: describe(source).rows for source in sources}
    assert rows["shop"] == 30
    assert (rows["us"], rows["uk"]) == (6, 3)


def test_shards_of_a_table_have_the_same_columns(store: Path) -> None:
    us, uk = load_tables(str(store / "tables.toml"))[2:]
    assert describe(us).columns == describe(uk).columns


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    done = make_store(str(tmp_path), "--customers", "1")
    assert done.returncode == 2
    assert "error: the store needs at least" in done.stderr


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    done = make_store(str(file))
    assert done.returncode == 2
    assert done.stderr == f"error: no folder can be made at {file}: is a file\n"
