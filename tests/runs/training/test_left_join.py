"""Training over LEFT JOINs: as on the materialised join, with zeros where no row is."""

import functools

import numpy as np
import pandas as pd
import pytest

from tests.support.examples.store_runs import (
    FRAMES,
    LAYOUTS,
    LEFT,
    assert_optimal,
    distance,
    each_layout,
    each_loss,
    query,
    sgd_of,
)
from tests.support.examples.store_runs import trained as on_store
from tests.support.federated import Run, one_per_site, run_query, store
from tests.support.reference.training import SgdSettings

# an order of nobody and one of an item without parts stay; so do those of late days
trained = functools.partial(on_store, source=LEFT)
MLP = (("c", "mlp"),)  # where rows are missing
HOW = SgdSettings(rate=0.02)


def train(frames: dict[str, pd.DataFrame], layout: str, strategy="admm", **how) -> Run:
    how = {"device": "cpu", "l2": 0.01, "num_epochs": 2, **how}
    sites = one_per_site(LAYOUTS[layout](frames))
    return run_query(query(source=LEFT), sites, strategy, **how)


def test_no_order_is_lost():
    federation = trained("squared", num_epochs=2).problem
    steps = federation.join_steps
    outer = [(step.table, step.is_outer) for step in steps]
    assert outer == [("o", False), ("c", True), ("i", True)]
    assert [step.fan_out_min for step in steps] == [1, 1, 1]
    assert federation.train.tables["c"].has_missing
    assert federation.train.tables["i"].has_missing
    taken = set(federation.train.tables["o"].row_of.tolist())
    taken |= set(federation.test.tables["o"].row_of.tolist())
    assert taken == set(range(len(FRAMES["orders"])))


@pytest.mark.cases("whole-squared", "sharded-logistic", "whole-softmax")
@each_loss
@each_layout
def test_cg_reaches_the_centralised_optimum(loss, layout):
    finished = trained(loss, layout, "cg", tolerance=1e-7, one_site=True)
    assert_optimal(finished, source=LEFT, gradient=1e-5, excess=1e-6)


@pytest.mark.cases("how2")
@pytest.mark.parametrize("how", [{}, {"rho": 2.0}, {"rho": 0.05}])
def test_sharing_converges_without_help(how):
    how = {"num_epochs": 600, "tolerance": 1e-7, "one_site": True, **how}
    finished = trained("logistic", **how)
    assert_optimal(finished, excess=1e-4, source=LEFT)


def test_consensus_reaches_the_optimum():
    finished = trained(
        "logistic", "sharded", lou="consensus", num_epochs=150, one_site=True
    )
    assert_optimal(finished, excess=1e-3, source=LEFT)


@pytest.mark.cases("whole-softmax", "sharded-squared", "whole-logistic")
@each_loss
@each_layout
def test_sgd_is_centralised_sgd(loss, layout):
    finished = trained(
        loss, layout, "sgd", num_epochs=3, batch_size=16, learning_rate=HOW.rate
    )
    expected = sgd_of(finished, HOW, LEFT)
    assert distance(finished.flat, expected) < 1e-5


@pytest.mark.cases("admm-whole", "sgd-sharded")
@each_layout
@pytest.mark.parametrize("strategy", ["admm", "sgd"])
def test_mlps_lower_the_loss(strategy, layout):
    # steps of single rows, the automatic size here, are no matter for MLPs
    how = {"batch_size": 16, "learning_rate": 0.01} if strategy == "sgd" else {}
    finished = trained("squared", layout, strategy, models=MLP, num_epochs=2, **how)
    assert finished.losses[-1] < finished.losses[0]


def nobody() -> dict[str, pd.DataFrame]:
    """The store, where no customer has an order."""
    frames = store()
    frames["customers"]["id"] += 1000
    return frames


@pytest.mark.cases(
    "admm-how1-whole",
    "admm-how0-sharded",
    "sgd-how5-whole",
    "admm-how2-whole",
    "admm-how3-whole",
    "sgd-how4-whole",
)
@each_layout
@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        ("admm", {}),
        ("admm", {"lou": "consensus"}),
        ("admm", {"l2": 0.0}),
        ("admm", {"models": MLP}),
        ("sgd", {"batch_size": 4}),
        ("sgd", {"models": MLP, "batch_size": 16, "learning_rate": 0.01}),
    ],
)
def test_a_table_that_no_row_matches_trains_to_nothing(strategy, how, layout):
    finished = train(nobody(), layout, strategy, **how)
    own = finished.report.tables[1]
    assert (own.table, own.multiplicity) == ("c", {"min": 0, "mean": 0.0, "max": 0})
    assert finished.losses[-1] < finished.losses[0]
    if "models" not in how:
        assert np.abs(finished.theta["c"]).max(initial=0.0) == 0


@each_layout
def test_a_table_that_only_held_out_rows_match(layout):
    frames = store()
    finished = train(frames, layout)
    held_out = np.flatnonzero(finished.tested["o"])
    # the split depends on the seed and the number of orders only
    customer = np.full(len(frames["orders"]), 500.0)
    customer[held_out] = frames["orders"]["customer"].to_numpy()[held_out]
    frames["orders"]["customer"] = customer
    again = train(frames, layout)
    np.testing.assert_array_equal(again.tested["o"], finished.tested["o"])
    assert not again.trained["c"].any()
    assert again.tested["c"].any()
    assert again.report.final_test
    assert np.abs(again.theta["c"]).max(initial=0.0) == 0
