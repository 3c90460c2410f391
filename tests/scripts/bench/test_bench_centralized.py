"""The comparison with training on the materialised join: it is of one problem."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from scripts.bench.runs import by_table
from scripts.bench.suites.centralized import (
    CASES,
    HELD_OUT,
    OPPONENTS,
    best_linear,
    in_order,
    mark_held_out,
    run_joined,
    run_tp_flower,
)
from scripts.data.store import make_store
from scripts.joined.centralized import join_tables
from tp_flower.query import Query
from tp_flower.sources.shards import (
    MEMORY_PREFIX,
    load_tables,
    register_frames,
    release,
)


@pytest.fixture(scope="module")
def frames():
    (orders,), (items,), (us, uk) = make_store(800, 20, 60, parts=12).values()
    half = len(orders) // 3
    return {
        "shop": {"orders": orders[:half], "items": items},
        "branch": {"orders": orders[half:].reset_index(drop=True)},
        "us": {"customers": us},
        "uk": {"customers": uk},
    }


@pytest.fixture(scope="module")
def case():
    # with a filter on the label table: what is held out is counted after it
    whole = CASES["narrow store"]
    return replace(whole, sql=f"{whole.sql} WHERE o.discount > 0")


def test_parts_set_the_fan_out() -> None:
    items = make_store(10, 400, 5, parts=24)["items"][0]
    rows = items.groupby("item_id").size()
    assert (rows.min(), rows.max()) == (1, 24)
    assert rows.mean() == pytest.approx(12.5, abs=1.0)


def test_specs_are_more_columns_of_the_same_store() -> None:
    plain, wide = (make_store(50, 9, 8, specs=k)["items"][0] for k in (0, 2))
    assert list(wide)[len(plain.columns) :] == ["spec_1", "spec_2"]
    pd.testing.assert_frame_equal(wide[list(plain)], plain)


def test_both_sides_hold_out_the_same_rows(case, frames) -> None:
    marked = by_table(mark_held_out(case, frames))["orders"]
    token = register_frames(by_table(in_order(frames)), site="all")
    joined = join_tables(
        Query.from_sql(case.sql), case.settings, load_tables(MEMORY_PREFIX + token)
    )
    release(token)
    held_out = np.flatnonzero(marked[HELD_OUT])
    assert set(joined.rows["o"][joined.is_test]) == set(held_out)
    assert not set(joined.rows["o"][~joined.is_test]) & set(held_out)
    assert (marked["discount"][held_out] > 0).all()


def test_all_methods_come_within_a_percent(case, frames) -> None:
    optimum = best_linear(case, frames)["metric"]
    until = case.until(optimum)
    assert until({"rmse": 1.009 * optimum})
    assert not until({"rmse": 1.011 * optimum})
    measured = run_tp_flower(case, frames, until)
    assert 1 <= measured["steps"] <= 12
    marked = mark_held_out(case, frames)
    for method in OPPONENTS:
        found = run_joined(method, case, marked, until)
        assert np.isfinite(found["seconds"]), method
        assert found["seconds"] > found["join-seconds"] + found["encode-seconds"]


def test_what_does_not_come_close_is_not_counted(case, frames) -> None:
    def never(_) -> bool:
        return False

    with pytest.raises(RuntimeError, match="no epoch came within 1 %"):
        run_tp_flower(case, frames, never)
    marked = mark_held_out(case, frames)
    found = run_joined("dense, SGD", case, marked, never)
    assert found["seconds"] == np.inf


def test_more_of_an_auc_is_better() -> None:
    until = CASES["flights"].until(0.7)
    assert until({"auc": 0.6931})
    assert not until({"auc": 0.6929})
