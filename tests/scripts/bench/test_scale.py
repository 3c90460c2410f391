"""Suites of large and growing sizes on tiny ones: they run, and what they compute."""

import numpy as np
import pytest

from scripts.bench.harness import Options, participants_of, train
from scripts.bench.processes import status_bytes
from scripts.bench.suites import scale
from scripts.data.paper_scale import SQL, rows_of, write_paper_scale
from tp_flower.settings import Settings

SMALL = 1e-3
FACTOR = 1e-4


def test_slope_of_powers():
    sizes = [1e5, 3e5, 1e6]
    for power in (0.5, 1.0, 2.0):
        costs = [7.0 * n**power for n in sizes]
        assert scale.log_slope(sizes, costs) == pytest.approx(power)


def test_memory_beside_files_is_seen():
    before = status_bytes("RssAnon")
    # too large to come of memory that was freed before
    held = np.ones(1 << 23)
    assert status_bytes("RssAnon") - before >= 0.9 * held.nbytes


def test_a_run_of_the_papers_tables_learns_what_is_in_them(tmp_path):
    found = scale.run_paper_scale(str(write_paper_scale(tmp_path, SMALL)))
    held_out = 0.2
    rows = rows_of("reviews", SMALL)
    assert found["joined-rows"] == rows - round(rows * held_out)
    # 3,200 rows for 775 features: far from the 0.85 of all rows, and from 0.5
    assert found["test"]["auc"] > 0.65
    assert found["epoch-seconds"] > 0
    assert found["floor-seconds"] > 0
    # the features alone would be 9 MB; Python and its libraries take 100 or 200
    assert 0.01 < found["peak-gb"] < 6.0


def test_features_stay_mapped_from_message_to_message(tmp_path):
    tables = write_paper_scale(tmp_path, FACTOR)
    seen: list[dict[int, np.ndarray]] = []

    def on_round(report, grid) -> None:
        if report.epoch:
            seen.append({x.number: x.data.features for x in participants_of(grid)})

    settings = Settings(task="classification", num_epochs=2)
    sites = {"all": tables}
    state = tmp_path / "state"
    train(SQL, settings, sites, on_round, state)
    first, second = seen
    assert sorted(first) == [0, 1, 2]
    for number, features in first.items():
        assert isinstance(features, np.memmap)
        assert second[number] is features


@pytest.mark.slow
def test_linearity_of_small_stores():
    outcome = scale.measure_linearity(Options(), (2_000, 8_000), (2, 6))
    assert [check.limit for check in outcome.checks] == [1.1, 1.1, 1.1]
    assert all(np.isfinite(check.measured) for check in outcome.checks)


def test_set_up_of_shards_is_timed_at_the_site():
    assert 0 < scale.shard_set_up(3) < 60
