"""The flights of New York: eight shards of five organisations, written once."""

import multiprocessing
import os
import time
import tomllib
from collections import Counter

import numpy as np
import pytest

from tests.support.files import ROOT
from tp_flower.errors import SourceError
from tp_flower.extraction.extract import extract
from tp_flower.features.choice import choose_encoders
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources import flights as flights_module
from tp_flower.sources.flights import FLIGHTS_SQL, flights_tables
from tp_flower.sources.shards import describe, hosted_shards


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder of its own, so that the files are written by this code."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TP_FLOWER_HOME", str(folder))
        flights_tables()
        yield folder


def schemas_of(sources):
    return {source.table: describe(source).columns for source in sources}


def test_five_organisations_host_all_of_the_data_with_one_type_each(home):
    sources = hosted_shards({}, {})
    actual = [(source.table, source.site, source.index) for source in sources]
    origins = list(enumerate(["EWR", "JFK", "LGA"]))
    assert actual == [
        *(("flights", origin, index) for index, origin in origins),
        *(("weather", origin, index) for index, origin in origins),
        ("planes", "registry", 0),
        ("airports", "directory", 0),
    ]
    assert all(source.path.startswith(str(home)) for source in sources)
    nodes = [{"partition-id": node, "num-partitions": 3} for node in range(3)]
    hosted = [source for node in nodes for source in hosted_shards(node, {})]
    assert sorted(map(str, hosted)) == sorted(map(str, sources))
    rows = Counter()
    columns = {}
    for source in sources:
        schema = describe(source)
        rows[source.table] += schema.rows
        assert columns.setdefault(source.table, schema.columns) == schema.columns
    assert rows == {
        "flights": 336_776,
        "weather": 26_115,
        "planes": 3_322,
        "airports": 1_458,
    }
    assert columns["flights"]["time_hour"] == columns["weather"]["time_hour"]
    assert columns["flights"]["arr_delay"] == "BIGINT"


def test_files_are_written_once(home):
    files = [path for table in flights_tables().values() for path in table.values()]
    before = [path.stat().st_mtime_ns for path in files]
    flights_tables()
    assert [path.stat().st_mtime_ns for path in files] == before
    folder = home / "datasets" / "flights"
    assert [path.name for path in folder.iterdir()] == [flights_module.FORMAT]
    assert sorted(p.suffix for p in (folder / "v1").iterdir()) == [".parquet"] * 8


def _race(start, home):
    os.environ["TP_FLOWER_HOME"] = home
    flights_module._write_shards = _write_slowly
    start.wait()
    flights_tables()


def _write_slowly(folder):
    """Stand in for seconds of a core, long enough that all have begun."""
    (folder / "airports.parquet").touch()
    time.sleep(0.2)


@pytest.mark.slow
def test_several_processes_may_write_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    race = (context.Barrier(3), str(tmp_path))
    processes = [context.Process(target=_race, args=race) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert os.listdir(tmp_path / "datasets" / "flights") == ["v1"]


def test_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(folder):
        (folder / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(SourceError, match=r"cannot write the flights data .*disk full"):
        flights_module._build_folder(tmp_path / "a" / "b", fail)
    assert list((tmp_path / "a").iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(SourceError, match="set TP_FLOWER_HOME to a folder that can be"):
        flights_module._build_folder(tmp_path / "file" / "b", lambda _: None)
    flights_module._build_folder(
        tmp_path / "c" / "b", lambda folder: (folder / "x").touch()
    )
    assert (tmp_path / "c" / "b" / "x").exists()
    monkeypatch.setattr(flights_module, "PACKAGE", "no_such_package")
    with pytest.raises(SourceError, match="pip install no_such_package"):
        flights_module._package_data()


@pytest.mark.parametrize(
    ("sql", "kind"),
    [(FLIGHTS_SQL, "boolean"), (flights_module.FLIGHTS_REGRESSION_SQL, "number")],
)
def test_flights_queries_run_at_every_shard(home, sql, kind):
    assert home.is_dir()
    sources = hosted_shards({}, {})
    bound = Query.from_sql(sql).bind(schemas_of(sources))
    names = {part.name: part for part in bound.fragments}
    shards = [extract(source, names[source.table]) for source in sources]
    labels = [shard.label for shard in shards if shard.label is not None]
    assert sum(len(label.values) for label in labels) == 327_346  # arr_delay not null
    assert {label.kind for label in labels} == {kind}
    assert not any(np.isnan(label.values).any() for label in labels)
    kinds = {shard.table: [key.kind for key in shard.keys] for shard in shards}
    times = {"f": ["text", "text+time", "text"], "w": ["text+time"]}
    assert kinds == {**times, "p": ["text"], "a": ["text"]}


def test_the_flights_features_have_encoders_without_statistics(home):
    assert home.is_dir()
    config = tomllib.loads((ROOT / "scripts" / "private_flights.toml").read_text())
    chosen = Settings.from_run_config({"encoders": config["encoders"]})
    sources = hosted_shards({}, {})
    bound = Query.from_sql(FLIGHTS_SQL).bind(schemas_of(sources))
    names = {part.table: [f.name for f in part.features] for part in bound.fragments}
    choices = choose_encoders(chosen.encoders, names)
    for fragment in bound.fragments:
        source = next(part for part in sources if part.table == fragment.name)
        for info in extract(source, fragment).features:
            assert choices[fragment.table].is_declared(info.name, info.kind)
            choices[fragment.table].spec_for(info.name, info.kind)
    # nothing is known of a flight's departure and arrival
    for feature in ("f.dep_time", "f.dep_delay", "f.arr_time", "f.air_time"):
        assert feature not in FLIGHTS_SQL
