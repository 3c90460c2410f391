"""The music shop: its federation, its runs, and what makes it hard."""

import tomllib

import pandas as pd
import pytest

from scripts.data.make_music_shop import RUNS, main, make_music_shop
from tests.support.reference.joins import engine_of
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.shards import describe, load_tables


@pytest.fixture(scope="module")
def shop():
    return make_music_shop()


def test_runs_fit_the_tables_in_files_and_sqlite(tmp_path, capsys):
    assert main([str(tmp_path), "--lines", "80"]) == 0
    assert "tp-flower train" in capsys.readouterr().out
    sources = load_tables(str(tmp_path / "tables.toml"))
    assert len({source.table for source in sources}) == 11
    sites = [source.site for source in sources if source.table == "customers"]
    assert sites == ["europe", "americas", "asia"]
    schemas = {source.table: describe(source).columns for source in sources}
    for file in RUNS:
        settings = Settings.from_run_config(
            tomllib.loads((tmp_path / file).read_text("utf-8"))
        )
        tables = Query.from_sql(settings.sql).bind(schemas).tables
        assert len(tables) == (5 if file == "plays.toml" else 9)


def test_the_shop_is_as_hard_as_real_ones(shop):
    assert {name: rows for name, rows in shop.items() if rows.empty} == {}
    albums = shop["albums"]["artist_id"].value_counts()
    assert (albums == 1).mean() > 0.6  # artist and album are nearly the same
    assert 0.2 < shop["tracks"]["composer"].isna().mean() < 0.4
    assert 0.02 < shop["customers"]["age"].isna().mean() < 0.15
    assert shop["tracks"]["genre_id"].value_counts().min() < 20
    assert pd.api.types.is_string_dtype(shop["customers"]["customer_code"])


def test_joined_rows_and_seeds(shop):
    with engine_of(shop) as engine:
        joined = (
            "invoice_lines JOIN invoices USING (invoice_id) JOIN tracks USING "
            "(track_id)"
        )
        assert engine.sql(f"SELECT COUNT(*) FROM {joined}").fetchall() == [(2400,)]
    again, other = (make_music_shop(seed=seed)["invoice_lines"] for seed in (0, 1))
    pd.testing.assert_frame_equal(shop["invoice_lines"], again)
    assert not again.equals(other)
