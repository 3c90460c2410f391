"""A shard is read once: later messages, processes and runs need no source."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.random import default_rng
from numpy.testing import assert_array_equal

from client_apps.data import run_store as store
from client_apps.data.features import CachedFeatures
from client_apps.data.run_store import IN_MEMORY, SiteStore
from client_apps.data.tables import SiteTables
from tests.support.examples.encoding_example import encoder_of
from tests.support.files import output_of
from tests.support.peers.faulty_grid import lose_state
from tests.support.tables.fragments import plain_features
from tests.support.tables.sources import file_source
from tp_flower.errors import SiteError, SourceError
from tp_flower.features.columns import FeatureColumn
from tp_flower.features.encoder import SiteEncoder
from tp_flower.query.fragment import Fragment
from tp_flower.sources import csv_files
from tp_flower.sources.shards import load_tables, register_frames, release

FRAME = pd.DataFrame(
    {
        "k": np.arange(500) % 60,
        "x": default_rng(0).random(500).round(6),
        "c": [None if n % 9 == 0 else f"t{n % 5}" for n in range(500)],
    }
)
WANTED = Fragment("t", "t", plain_features("x", "c"), (('"k"',),))
ROWS = np.concatenate([np.arange(0, 500, 2), np.arange(1, 500, 2)])


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch):
    monkeypatch.setattr(store, "_CACHE", defaultdict(store._OfRun))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "t.csv"
    FRAME.to_csv(path, index=False)
    return file_source(path)


class Site:
    """A site in one run."""

    def __init__(self, root, run=1):
        self.store = SiteStore(str(root), run, 1)
        self.features = CachedFeatures(str(root), 10**9, self.store)
        self.tables = SiteTables(self.features, is_simulated=False)

    def extract(self, source, wanted=WANTED):
        """Extract the rows of part 0."""
        return self.tables.extract(0, source, wanted)


def has_lost(site):
    """Assert that nothing is left of what the site has extracted."""
    with pytest.raises(SiteError, match="lost its state"):
        site.tables.extracted(0)


def restart():
    """Forget what this process knows."""
    store._CACHE.clear()
    csv_files._format.cache_clear()


def columns_of(tables: SiteTables) -> dict[str, FeatureColumn]:
    extracted = tables.extracted(0)
    return {name: extracted.column(name) for name in "xc"}


def encoder(tables: SiteTables) -> SiteEncoder:
    return encoder_of(columns_of(tables))


def expected(tables: SiteTables) -> np.ndarray:
    return encoder(tables).transform(columns_of(tables))[ROWS]


@pytest.mark.parametrize("most_rows", [7, 256, 1 << 14])
def test_features_are_of_whole_columns(tmp_path, source, monkeypatch, most_rows):
    monkeypatch.setattr("tp_flower.extraction.extract.MOST_ROWS", most_rows)
    monkeypatch.setattr("client_apps.data.tables.MOST_VALUES", 10 * most_rows)
    monkeypatch.setattr("client_apps.data.tables.LEAST_ROWS", 3)
    for root in (tmp_path / "state", IN_MEMORY):
        tables = Site(root).tables
        tables.extract(0, source, WANTED)
        features = tables.encode(0, encoder(tables), ROWS)
        assert features.dtype == np.float32
        assert_array_equal(features, expected(tables))
        nothing = tables.encode(0, encoder(tables), ROWS[:0])
        assert nothing.shape == (0, features.shape[1])


def test_second_message_reads_no_source(tmp_path, source):
    first = Site(tmp_path / "state")
    assert first.tables.describe(source).rows == 500
    with first.store.together(bool):
        first.extract(source)
    Path(source.path).unlink()
    for forget in (lambda: None, restart):
        forget()
        tables = Site(tmp_path / "state").tables
        features = tables.encode(0, encoder(tables), ROWS)
        assert_array_equal(features, expected(tables))
    assert isinstance(features, np.memmap)


def test_later_run_reads_no_source(tmp_path, source, monkeypatch):
    site = Site(tmp_path / "state")
    schema = site.tables.describe(source)
    extracted = site.extract(source)
    site.features.release()
    lose_state(site.store)
    restart()
    # neither is the source read
    monkeypatch.setattr("client_apps.data.tables.extract", None)
    monkeypatch.setattr("client_apps.data.tables.describe", None)
    again = Site(tmp_path / "state", run=2).tables
    assert again.describe(source) == schema
    stored = again.extract(0, source, WANTED)
    for name in "xc":
        ours = stored.column(name)
        theirs = extracted.column(name)
        assert_array_equal(ours.is_missing, theirs.is_missing)
    assert stored.keys[0].texts == extracted.keys[0].texts


def test_changed_source_and_other_fragment_are_read(tmp_path, source):
    site = Site(tmp_path / "state")
    site.extract(source)
    other = replace(WANTED, filters=('"k" > 9',))
    assert site.extract(source, other).rows == np.count_nonzero(FRAME["k"] > 9)
    FRAME[:100].to_csv(source.path, index=False)
    restart()
    assert site.extract(source).rows == 100
    assert site.tables.describe(source).rows == 100


def test_source_that_changes_while_it_is_read(tmp_path, source, monkeypatch):
    states = iter(["before", "after"])
    site = Site(tmp_path / "state")
    with monkeypatch.context() as patch:
        patch.setattr("client_apps.data.tables.fingerprint", lambda _: next(states))
        with pytest.raises(
            SourceError, match="changed while it was read; start the run again"
        ):
            site.extract(source)
    has_lost(site)
    assert site.extract(source).rows == 500


def test_frames_are_of_one_run(tmp_path):
    token = register_frames({"t": FRAME}, site="here")
    (source,) = load_tables(f"memory:{token}")
    site = Site(tmp_path)
    assert site.extract(source).rows == 500
    site.tables.encode(0, encoder(site.tables), ROWS)
    site.features.release()
    assert [p.name for p in tmp_path.glob("cache/*") if p.name[0] != "."] == ["uses"]
    release(token)


def test_lost_entries(tmp_path, source):
    site = Site(tmp_path / "state")
    site.extract(source)
    for path in (tmp_path / "state" / "cache").glob("rows-*/rows.arrow"):
        path.write_bytes(b"")
    has_lost(site)
    site.extract(source)
    site.store.drop("extracted-0")
    has_lost(site)


MEASURED = """
import sys
from pathlib import Path
from scripts.bench.suites.encode import ours

ours(Path(sys.argv[1]))
# of this program alone: ru_maxrss begins with what its parent had
status = Path("/proc/self/status").read_text()
print(int(status.split("VmHWM:")[1].split()[0]) // 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    from scripts.bench.suites.encode import write_file

    peaks = []
    for rows in (100_000, 600_000):
        path = tmp_path / f"{rows}.csv"
        write_file(path, rows, mixed=True)
        # DuckDB shows its progress
        peaks.append(int(output_of(MEASURED, str(path)).split()[-1]))
        path.unlink()
    # half a million rows of 60 columns are 240 MB of numbers, and 120 MB of features
    assert peaks[1] < 600
    assert peaks[1] - peaks[0] < 120


def test_the_key_of_the_order_is_the_sites_and_stays(tmp_path):
    first, again = (Site(tmp_path, run=run).tables for run in (1, 2))
    assert first.order_key == again.order_key
    assert len(first.order_key) == 32
    assert (tmp_path / "row-order-key").stat().st_mode & 0o777 == 0o600
    assert SiteTables(Site(tmp_path, 3).features, is_simulated=True).order_key == b""
