"""Results and log lines of the strategies' common base."""

import logging

import pandas as pd
import pytest
from flwr.serverapp.strategy import Result, Strategy

from client_apps.app import app
from strategies import STRATEGIES, TablePuppetADMM, TablePuppetCG
from strategies.run.grid import InProcessGrid
from tp_flower.errors import SettingsError
from tp_flower.methods.method import METHODS
from tp_flower.protocol.messages import Action
from tp_flower.query import Query

ORDERS = pd.DataFrame(
    {"k": [1, 1, 2, 3], "y": [1.0, 2.0, 3.0, 5.0], "x": [0.0, 1.0, 2.0, 3.0]}
)
ITEMS = pd.DataFrame({"k": [1, 2, 3], "w": [1.0, 4.0, 9.0], "same": [7, 7, 7]})
SQL = "SELECT o.y AS label, o.x, i.w, i.same FROM o JOIN i ON o.k = i.k"


def grid() -> InProcessGrid:
    return InProcessGrid(app, [{"o": ORDERS}, {"i": ITEMS}])


# those that train over joins
@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"personalised"}))
def test_start_returns_flowers_result_with_metrics_of_every_epoch(name):
    epochs = min(METHODS[name].epochs, 3)
    small_leaves = {"min_rows_per_leaf": 1} if name == "boost" else {}
    strategy = STRATEGIES[name](
        Query.from_sql(SQL), num_epochs=epochs, test_fraction=0.25, **small_leaves
    )
    result = strategy.start(grid())
    assert isinstance(strategy, Strategy)
    assert isinstance(result, Result)
    assert list(result.arrays) == ["base-score"]
    ended = list(range(1, epochs + 1))
    assert list(result.train_metrics_clientapp) == ended
    assert list(result.evaluate_metrics_serverapp) in ([], ended)
    metrics = {"rmse", "mae", "r2"} if strategy.method.has_label else {"rms_distance"}
    if METHODS[name].keeps_labels:
        # it takes every row's label
        metrics -= {"mae"}
    assert set(result.train_metrics_clientapp[epochs]) == {"loss", *metrics}
    ended_with = strategy.history[-2].train["loss"]
    assert result.train_metrics_clientapp[epochs]["loss"] == ended_with


def test_flowers_num_rounds_and_timeout_stand_for_epochs_and_site_timeout(caplog):
    strategy = TablePuppetADMM(Query.from_sql(SQL), test_fraction=0.0)
    with caplog.at_level(logging.INFO, logger="flwr"):
        result = strategy.start(grid(), num_rounds=2, timeout=30.0)
    assert list(result.train_metrics_clientapp) == [1, 2]
    assert result.evaluate_metrics_serverapp == {}
    report = strategy.report
    assert report.joined_rows_train == 4
    assert report.joined_rows_test == 0
    assert "table i: constant features dropped: same" in caplog.text
    assert [table.dropped for table in report.tables] == [(), ("same",)]


def test_a_strategy_lists_the_messages_that_it_sends():
    class Unlisted(TablePuppetCG.method_type):
        messages = (Action.PREPARE,)

    class Silent(TablePuppetCG):
        method_type = Unlisted

    with pytest.raises(RuntimeError, match="list it in the method's `messages`"):
        Silent(Query.from_sql(SQL)).start(grid())
    Unlisted.messages = TablePuppetCG.method_type.messages
    assert Silent(Query.from_sql(SQL)).start(grid()).train_metrics_clientapp


def test_bad_settings_are_refused():
    with pytest.raises(SettingsError, match="num-epoch: unknown setting"):
        TablePuppetADMM(Query.from_sql(SQL), num_epoch=2)
