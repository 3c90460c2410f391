"""Training ends when validation rows say so, and the best epoch's model is saved."""

import numpy as np
import pytest

from tests.support.examples.store_runs import (
    FRAMES,
    LAYOUTS,
    assert_same_models,
    each_layout,
    query,
    trained,
)
from tests.support.federated import one_per_site, run_query
from tp_flower.splits import VALIDATION, Shares, split_at_random

HOW = {"task": "regression", "device": "cpu", "l2": 0.0, "validation_fraction": 0.3}
RUNS = {
    "cg": {"tolerance": 1e-9},
    "admm": {"rho": 0.01},
    # so many linear epochs follow from num-epochs, in which the runs differ
    "boost": {
        "l2": 1e-4,
        "trees_per_round": 20,
        "min_rows_per_leaf": 1,
        "linear_epochs": 0,
    },
    "sgd": {"batch_size": 16, "learning_rate": 0.2},
    "gd": {},
}


def run(folder, strategy, layout, **settings):
    sites = one_per_site(LAYOUTS[layout](FRAMES))
    how = {**HOW, **RUNS[strategy], **settings}
    return run_query(query(), sites, strategy, state=folder, **how)


@pytest.mark.cases("cg-sharded", "admm-whole", "boost-whole", "sgd-whole")
@each_layout
@pytest.mark.parametrize("strategy", RUNS)
def test_the_saved_model_is_that_of_the_best_epoch(strategy, layout, tmp_path):
    patient = run(tmp_path / "a", strategy, layout, num_epochs=25, patience=3)
    losses = [item.validation["loss"] for item in patient.history if item.validation]
    best = int(np.argmin(losses)) + 1
    report = patient.report
    assert report.chosen["best-epoch"] == best
    mark = np.inf
    since = 0
    for loss in losses:
        assert since < 3
        mark, since = (loss, 0) if loss < mark - 2e-3 * loss else (mark, since + 1)
    assert report.epochs == len(losses) < 25
    assert since == 3
    short = run(tmp_path / "b", strategy, layout, num_epochs=best)
    assert_same_models(tmp_path / "a", tmp_path / "b")
    assert report.final_test == short.report.final_test
    assert report.contributions == short.report.contributions
    # the models at the end of training were others
    assert not np.array_equal(patient.flat, short.flat)


def test_validation_rows_are_neither_trained_nor_tested_on():
    report = trained("squared", validation_fraction=0.3, num_epochs=2).report
    validation_rows = report.split["validation-rows"]
    plain = trained("squared", num_epochs=2).report
    orders = len(FRAMES["orders"])
    rng = np.random.default_rng(0)
    subset = split_at_random(np.ones(orders, bool), Shares(0.2, 0.3), rng)
    assert (subset == VALIDATION).sum() == round(0.3 * round(0.8 * orders))
    assert report.joined_rows_test == plain.joined_rows_test
    assert validation_rows > 0
    assert report.joined_rows_train + validation_rows == plain.joined_rows_train


def test_without_patience_all_epochs_run():
    report = trained("squared", strategy="gd", validation_fraction=0.3, num_epochs=15)
    report = report.report
    assert report.epochs == 15 > report.chosen["best-epoch"]
