"""The forecast of memory against the peaks of processes; and what it is made of, by
hand.
"""

import pytest

from scripts.bench.suites import memory
from strategies.explain.memory import stored_values
from strategies.setup.encoding import TableEncoding
from strategies.training.traffic import ShardSize, TableSize
from strategies.training.working_memory import (
    curvature_bytes,
    solver_bytes,
    vector_bytes,
)
from tp_flower.protocol.setup_messages import EncodedColumns, FeatureSummary
from tp_flower.protocol.training_messages import Update

ROWS = 100_000
CATEGORIES = 20_000


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    data = memory.wide(ROWS, CATEGORIES)
    sites = {name: str(path) for name, path in memory.write_sites(data, folder).items()}
    settings = {**data.settings, "num-epochs": 2}
    return memory.run_measured(data.sql, settings, sites, str(folder))


def test_wide_one_hot_columns_take_memory_by_their_rows(measured):
    peaks = measured["measured"]
    assert set(peaks) == {"orders", "customers", "server"}
    dense = 4 * ROWS * CATEGORIES
    assert peaks["orders"] < dense / 50


def test_explain_forecasts_the_memory_of_every_process(measured):
    predicted = measured["forecast"]
    assert set(predicted) == set(measured["measured"])
    for process, peak in measured["measured"].items():
        if peak >= memory.LEAST_BYTES:
            assert predicted[process] == pytest.approx(peak, rel=memory.MOST_APART), (
                process
            )
        else:
            assert predicted[process] < 2 * memory.LEAST_BYTES


def test_stored_values_follow_from_the_encoders_or_from_the_columns():
    counts = {"a": 300, "b": 33, "c": 2, "d": 8, "e": 40, "f": 1}
    encoders = {
        "a": "one-hot(300) missing=category",
        "b": "levels(32) missing=mean",
        "c": "cyclic(12) missing=zero",
        "d": "bins(7) missing=mean indicator",
        "e": "none missing=zero",
    }
    # of "f" its site tells nothing
    summaries = [
        FeatureSummary(column=n, type="", encoder=e) for n, e in encoders.items()
    ]
    encoding = TableEncoding(EncodedColumns(counts, True), features=summaries)
    assert stored_values(encoding) == 1 + 2 + 2 + 2 + 40 + 1


def table(columns, update=Update.LOCAL):
    return TableSize(
        "t", (), update, 1, columns, columns + 1, True, starts_at_zero=True
    )


def test_no_wide_table_takes_a_matrix_of_its_columns_unless_shards_add_one_up():
    many = ShardSize(9000, 9000, 0, 9000)
    few = ShardSize(9, 9, 0, 9)
    columns = 20_000
    matrix = 8 * columns**2
    wide = table(columns)
    for is_exact in (True, False):
        assert solver_bytes(wide, many, is_exact=is_exact) < matrix / 50
        # of few rows: a number for each and every column
        by_rows = solver_bytes(wide, few, is_exact=is_exact) - vector_bytes(wide)
        assert by_rows == 4 * 8 * 9 * (columns + 1)
        assert (
            solver_bytes(table(columns, Update.GRAM), many, is_exact=is_exact) > matrix
        )
        assert solver_bytes(table(100), many, is_exact=is_exact) > 4 * 8 * 100**2
    assert curvature_bytes(wide) < matrix / 50
    assert curvature_bytes(table(100)) > 4 * 8 * 100**2
