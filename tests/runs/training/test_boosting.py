"""Boosted trees over joins and unions, against LightGBM and the joined rows."""

import lightgbm
import numpy as np
import pytest

from tests.support.examples.store_runs import FRAMES, LEFT, each_loss
from tests.support.federated import (
    SOURCE,
    one_per_site,
    run_query,
    sharded,
    store,
    store_sql,
    whole,
)
from tests.support.predicted import check_equal, on, scored, train_store
from tp_flower.errors import SettingsError
from tp_flower.learning.boosting import Boosting
from tp_flower.protocol.messages import Action
from tp_flower.settings import PrivacySettings, Settings

CLEAR = PrivacySettings(scores="clear")
HOW = {"strategy": "boost", "num_epochs": 3, "trees_per_round": 5, "leaves": 8}
SELF = """SELECT o.qty AS label, o.day, p.day AS other FROM orders o
JOIN orders p ON o.customer = p.customer AND p.day < 10"""


@each_loss
@pytest.mark.parametrize("layout", [whole, sharded])
def test_the_saved_trees_score_as_they_did_in_training(tmp_path, loss, layout):
    sites = on(layout, store())
    model = train_store(tmp_path, loss, sites, test_fraction=0.0, **HOW)
    again = model.evaluate(sites)
    assert again["loss"] == pytest.approx(model.manifest.train["loss"], rel=1e-5)
    if layout is whole:
        check_equal(scored(model.table(sites)), model.reference(store(), SOURCE))


@pytest.mark.parametrize(
    "sql",
    [
        store_sql("squared").replace(SOURCE, LEFT),
        SELF,
        store_sql("squared").replace("SELECT", "SELECT o.day + 1 AS weight,", 1),
    ],
    ids=["left", "self", "weights"],
)
def test_every_round_lowers_the_loss_and_masks_change_nothing(sql):
    tables = [name for name in FRAMES if name in sql]
    sites = one_per_site(whole({name: FRAMES[name] for name in tables}))
    clear, masked = (
        run_query(sql, sites, privacy=privacy, **HOW)
        for privacy in (CLEAR, PrivacySettings())
    )
    assert clear.losses == sorted(clear.losses, reverse=True)
    np.testing.assert_allclose(masked.losses, clear.losses, rtol=1e-3)


def test_trees_without_a_split_are_warned_of(caplog):
    sites = one_per_site(whole(FRAMES))
    run = run_query(store_sql("squared"), sites, **HOW, min_rows_per_leaf=10**6)
    assert (
        "no table's trees have a split, so that all rows get one score" in caplog.text
    )
    labels = run.strategy.training_problem.train_labels
    assert run.losses == [pytest.approx(labels.var() / 2)]


def test_a_table_whose_step_is_zero_grows_no_more(monkeypatch):
    steps = []

    def step(self, directions):
        steps.append(len(directions))
        lengths = np.linspace(0.0, 0.5, len(directions))
        self.scores = self._moved(lengths, directions)
        return lengths

    monkeypatch.setattr(Boosting, "step", step)
    sites = one_per_site(whole(FRAMES))
    run = run_query(store_sql("squared"), sites, privacy=CLEAR, **HOW)
    assert steps == [3, 2, 1]
    # the last of them had no step, either: nothing is left to grow
    assert len(run.losses) == 3
    rounds = [seen for seen in run.seen if seen.action == Action.BOOST]
    grown = [len(seen.arrays) for seen in rounds if seen.is_reply]
    assert sorted(grown) == [0, 0, 0, 1, 1, 1, 1, 1, 1]


def test_one_table_is_boosted_as_by_lightgbm():
    sql = "SELECT qty AS label, day FROM orders"
    how = {**HOW, "num_epochs": 1, "trees_per_round": 30, "test_fraction": 0.0}
    run = run_query(sql, [{"orders": FRAMES["orders"]}], privacy=CLEAR, **how)
    days, labels = FRAMES["orders"][["day"]].to_numpy(float), FRAMES["orders"]["qty"]
    options = {"num_leaves": 8, "learning_rate": 0.1, "verbosity": -1}
    options |= {"min_data_in_leaf": 20, "min_data_in_bin": 3}
    data = lightgbm.Dataset(days, np.asarray(labels, float), params=options)
    booster = lightgbm.train(options, data, 30)
    residual = booster.predict(days) - labels.to_numpy(float)
    # a step along the whole boosted model is shrunk, which costs a part of it
    slow, reached = float(np.mean(residual**2) / 2), run.losses[-1]
    start = float(np.var(labels)) / 2
    assert slow <= reached + 1e-3 * start
    assert start - reached > 0.85 * (start - slow)


def test_a_curvature_that_is_not_above_zero_is_refused():
    def change(seen):
        for key in seen.arrays:
            if key[-1] == "hessian":
                seen.arrays[key] = -seen.arrays[key]

    sites = one_per_site(whole(FRAMES))
    with pytest.raises(Exception, match="'hessian' must be above 0"):
        run_query(store_sql("logistic"), sites, change=change, **HOW)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "mlp"}, "which trains its own kind"),
        ({"privacy.features": "dp-sgd"}, "plans no noise"),
        ({"privacy.predictions": 1.0}, "plans no noise"),
        ({"tree-rate": 0.0}, "tree-rate: 0.0 .* above 0"),
    ],
)
def test_settings_that_boosting_has_no_use_for_are_refused(settings, message):
    with pytest.raises(SettingsError, match=message):
        Settings.from_run_config({"strategy": "boost", **settings})


def test_codes_are_for_trees_alone():
    sites = one_per_site(whole(FRAMES))
    with pytest.raises(Exception, match=r"codes.* is for trees"):
        run_query(store_sql("squared"), sites, "cg", encoders="c.region=codes")
