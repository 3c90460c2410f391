"""Made-up tables, and the flights by carrier: their shapes, and what can be learned."""

import tomllib
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from scripts.data import make_carriers
from scripts.data.make_store import STORE_SQL, main, make_store
from scripts.data.paper_scale import SQL, rows_of, write_paper_scale
from tests.support.files import case_table
from tests.support.reference.joins import engine_of
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.flights import flights_tables
from tp_flower.sources.shards import describe, load_tables

CASES = case_table(__file__)
SMALL = 1e-4


def check_run(path: Path, strategy: str, task: str) -> None:
    """The run's query fits the tables."""
    settings = Settings.from_run_config(tomllib.loads(path.read_text("utf-8")))
    assert (settings.strategy, settings.task) == (strategy, task)
    schemas = {
        source.table: describe(source).columns
        for source in load_tables(settings.tables)
    }
    fragments = Query.from_sql(settings.sql).bind(schemas).fragments
    assert [fragment.name for fragment in fragments] == list(schemas)


def test_each_organisation_has_its_shards_and_both_runs_fit_them(tmp_path, capsys):
    folder = tmp_path / "a store"
    assert (
        main([str(folder), "--orders", "30", "--items", "5", "--customers", "9"]) == 0
    )
    output = capsys.readouterr().out
    sources = load_tables(str(folder / "tables.toml"))
    hosts = [(source.table, source.site) for source in sources]
    assert hosts[:2] == [("orders", "shop"), ("items", "warehouse")]
    assert hosts[2:] == [("customers", "us"), ("customers", "uk")]
    orders, _, us, uk = (describe(source) for source in sources)
    assert (orders.rows, us.rows, uk.rows) == (30, 6, 3)
    assert us.columns == uk.columns
    for name, task in CASES["runs"]:
        assert f"tp-flower train '{folder}/{name}.toml'" in output
        check_run(folder / f"{name}.toml", "admm", task)


@pytest.mark.parametrize(("place", "options", "problem"), CASES["refused"])
def test_what_cannot_be_made_is_refused(tmp_path, capsys, place, options, problem):
    (tmp_path / "file").touch()
    assert main([str(tmp_path / place), *options]) == 2
    assert problem.format(tmp_path / place) in capsys.readouterr().err


def test_store_is_many_to_many_with_two_shards_and_seeded():
    store = make_store(orders=300, items=40, customers=60, seed=3)
    us, uk = store["customers"]
    assert (len(us), set(us["country"])) == (40, {"US"})
    assert (len(uk), set(uk["country"])) == (20, {"UK"})
    (orders,), (items,) = store["orders"], store["items"]
    assert (len(orders), items["item_id"].nunique()) == (300, 40)
    assert items.groupby("item_id").size().max() > 1
    assert orders.groupby("item_id").size().max() > 1
    assert not items.duplicated(["item_id", "part"]).any()
    again, other = (make_store(300, 40, 60, seed) for seed in (3, 4))
    for name, shards in store.items():
        for shard, same in zip(shards, again[name], strict=True):
            pd.testing.assert_frame_equal(shard, same)
    assert not orders.equals(other["orders"][0])


def test_every_table_explains_the_quantity():
    """Without a table's features, least squares explains clearly less."""
    tables = {name: pd.concat(shards) for name, shards in make_store().items()}
    with engine_of(tables) as engine:
        joined = engine.execute(STORE_SQL).df()
    joined["price"] = np.log(joined["price"])
    parts = CASES["parts"]

    def explained(names):
        features = pd.get_dummies(joined[[c for n in names for c in parts[n]]])
        filled = features.fillna(features.mean()).to_numpy(float)
        filled = np.column_stack([filled, np.ones(len(filled))])
        label = joined["label"].to_numpy(float)
        fitted = filled @ np.linalg.lstsq(filled, label, rcond=None)[0]
        return 1 - ((label - fitted) ** 2).mean() / label.var()

    assert explained(parts) > 0.6
    for left_out in parts:
        assert explained(parts.keys() - {left_out}) < explained(parts) - 0.05


def test_every_carrier_has_its_flights_and_the_same_columns(tmp_path, capsys):
    assert make_carriers.main([str(tmp_path)]) == 0
    assert f"tp-flower train {tmp_path}/my-run.toml" in capsys.readouterr().out
    flights = [str(path) for path in flights_tables()["flights"].values()]
    counted = duckdb.sql(
        f"SELECT carrier, count(*), sum((arr_delay > 15)::INT) "
        f"FROM read_parquet({flights}) WHERE arr_delay IS NOT NULL GROUP BY carrier"
    )
    expected = {carrier: (rows, late) for carrier, rows, late in counted.fetchall()}
    sources = load_tables(str(tmp_path / "tables.toml"))
    assert len(sources) == 16
    for source in sources:
        rows = duckdb.read_parquet(str(source.path))
        counted = rows.aggregate("count(*), sum(late::INT)").fetchall()
        assert counted == [expected.pop(source.site)]
    assert not expected
    columns = [describe(source).columns for source in sources]
    assert all(other == columns[0] for other in columns)
    check_run(tmp_path / "my-run.toml", "personalised", "auto")


def test_sizes_are_those_of_table_7():
    rows = {name: rows_of(name, 1.0) for name in ("reviews", "users", "businesses")}
    assert rows == {"reviews": 3_200_000, "users": 1_200_000, "businesses": 35_000}


def test_every_review_is_one_joined_row(tmp_path):
    write_paper_scale(tmp_path, SMALL)
    with duckdb.connect() as connection:
        for table in ("reviews", "users", "businesses"):
            source = connection.read_parquet(str(tmp_path / f"{table}.parquet"))
            source.create_view(table)
            assert len(source) == rows_of(table, SMALL)
        joined = connection.sql(SQL)
        assert len(joined) == rows_of("reviews", SMALL)
        # vectors come as one column
        assert len(joined.columns) == 1 + 1 + 775 - 768
    reviews = pq.read_table(tmp_path / "reviews.parquet")
    assert set(reviews["label"].to_pylist()) == {1, 2, 3, 4, 5}
    vectors = np.array(reviews["vector"].to_pylist())
    assert vectors.shape == (len(reviews), 768)
    assert np.isfinite(vectors).all()
    # mean 0; HIDDEN / HIDDEN = 1 of the directions and 1/4 of their own
    assert abs(vectors.mean()) < 0.1
    assert vectors.var() == pytest.approx(1.25, rel=0.2)


def test_equal_seeds_make_equal_files_and_others_do_not(tmp_path):
    def read(folder, seed):
        write_paper_scale(tmp_path / folder, SMALL, seed)
        return pq.read_table(tmp_path / folder / "reviews.parquet")

    first = read("a", 3)
    assert first.equals(read("b", 3))
    assert not first["label"].equals(read("c", 4)["label"])


@pytest.mark.parametrize("factor", [0.0, float("nan")])
def test_a_factor_that_makes_no_rows_is_refused(tmp_path, factor):
    with pytest.raises(ValueError, match="the factor must be above 0, not"):
        write_paper_scale(tmp_path, factor)
