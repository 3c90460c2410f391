"""The cost model against what training sends, and by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_apps.app import app
from scripts.data.store import STORE_CLASSIFICATION_SQL, STORE_SQL, make_store
from strategies import STRATEGIES, Explain
from strategies.explain.cost import expected_batch_rows
from strategies.run.grid import InProcessGrid
from strategies.training.traffic import (
    ShardSize,
    TableSize,
    Traffic,
    admm_epoch,
    prepare_round,
    sgd_epoch,
)
from tp_flower.protocol.training_messages import Update
from tp_flower.query import Query
from tp_flower.sources.flights import FLIGHTS_SQL

WITHIN = 0.02

SOFTMAX = STORE_SQL.replace(
    "o.quantity AS",
    "CASE WHEN o.quantity > 14 THEN 'c' WHEN o.quantity > 9 THEN 'b' ELSE 'a' END AS",
)
LEFT = STORE_SQL.replace(
    "JOIN customers AS c ON", "LEFT JOIN customers AS c ON o.discount > 0 AND"
)


def sites(layout):
    """Whole: customers of one shard too. Sharded: customers in two, orders in three."""
    if layout == "flights":
        return 5
    frames = make_store(orders=900, items=40, customers=120, seed=3)
    (orders,), (items,), customers = (
        frames[n] for n in ("orders", "items", "customers")
    )
    if layout == "whole":
        both = pd.concat(customers, ignore_index=True)
        return {
            "shop": {"orders": orders},
            "maker": {"items": items},
            "crm": {"customers": both},
        }
    cut = orders.iloc[:100], orders.iloc[100:400], orders.iloc[400:]
    return {
        # one site of several tables, and of several shards of one
        "shop": {"orders": [cut[0], cut[1]], "items": items},
        "branch": {"orders": cut[2]},
        "us": {"customers": customers[0]},
        "uk": {"customers": customers[1]},
    }


WAYS = {
    "admm": ("whole", STORE_SQL, {}),
    "admm-gram": ("sharded", STORE_SQL, {}),
    "admm-consensus": ("sharded", STORE_SQL, {"lou": "consensus"}),
    "admm-inner-rounds": (
        "sharded",
        STORE_SQL,
        {"lou": "consensus", "inner_rounds": 2},
    ),
    "admm-softmax": ("sharded", SOFTMAX, {}),
    "admm-mlp": ("whole", STORE_SQL, {"model": "mlp", "local_epochs": 1}),
    "admm-mixed": (
        "sharded",
        STORE_SQL,
        {"models": (("c", "mlp"),), "inner_rounds": 2, "local_epochs": 1},
    ),
    "admm-left": ("sharded", LEFT, {}),
    "admm-tolerance": ("whole", STORE_SQL, {"tolerance": 1e-12}),
    "sgd": ("whole", STORE_SQL, {"strategy": "sgd"}),
    "sgd-sharded": ("sharded", STORE_CLASSIFICATION_SQL, {"strategy": "sgd"}),
    "sgd-stale": (
        "sharded",
        STORE_CLASSIFICATION_SQL,
        {"strategy": "sgd", "staleness": 1, "batch_size": 60},
    ),
    "sgd-left": ("sharded", LEFT, {"strategy": "sgd", "batch_size": 60}),
    "sgd-mlp": (
        "whole",
        STORE_CLASSIFICATION_SQL,
        {"strategy": "sgd", "model": "mlp", "batch_size": 60},
    ),
    "sgd-tolerance": (
        "sharded",
        STORE_CLASSIFICATION_SQL,
        {"strategy": "sgd", "tolerance": 1e-12, "batch_size": 60},
    ),
    "vfl-admm": ("whole", STORE_SQL, {"strategy": "vfl-admm"}),
    "vfl-admm-gram": ("sharded", SOFTMAX, {"strategy": "vfl-admm"}),
    "vfl-admm-left": ("sharded", LEFT, {"strategy": "vfl-admm", "lou": "consensus"}),
    "vfl-sgd": (
        "whole",
        STORE_SQL,
        {"strategy": "vfl-sgd", "model": "mlp", "batch_size": 30},
    ),
    "vfl-sgd-left": ("sharded", LEFT, {"strategy": "vfl-sgd", "batch_size": 30}),
    "vfl-admm-weighted": (
        "whole",
        STORE_SQL,
        {"strategy": "vfl-admm", "row_weight": "entity(c)"},
    ),
    "gd": ("whole", STORE_SQL, {"strategy": "gd"}),
    "gd-left": ("sharded", LEFT, {"strategy": "gd"}),
    "coreset": (
        "sharded",
        STORE_SQL,
        {"coreset_size": 150, "coreset_kind": "uniform"},
    ),
    "coreset-tolerance": (
        "whole",
        STORE_SQL,
        {"coreset_size": 150, "coreset_kind": "uniform", "tolerance": 1e-12},
    ),
    "coreset-sgd": (
        "sharded",
        STORE_SQL,
        {"strategy": "sgd", "coreset_size": 150, "coreset_kind": "uniform"},
    ),
    "sgd-softmax": ("sharded", SOFTMAX, {"strategy": "sgd", "batch_size": 60}),
}


def trained(layout, sql, **how):
    grid = InProcessGrid(app, sites(layout))
    strategy = STRATEGIES[how.get("strategy", "admm")](Query.from_sql(sql), **how)
    try:
        strategy.start(grid)
    finally:
        grid.close()
    return strategy.report


def explained(layout, sql, **how):
    grid = InProcessGrid(app, sites(layout))
    strategy = Explain(Query.from_sql(sql), mode="explain", **how)
    try:
        strategy.start(grid)
    finally:
        grid.close()
    return strategy.explanation


def sent(rounds) -> Traffic:
    """What rounds of a report sent."""
    up, down = Counter(), Counter()
    for item in rounds:
        up.update(item.bytes_up)
        down.update(item.bytes_down)
    return Traffic(len(rounds), up, down)


def check(predicted: Traffic, found: Traffic, within: float = WITHIN) -> None:
    assert predicted.rounds == found.rounds
    for mine, theirs in ((predicted.up, found.up), (predicted.down, found.down)):
        assert {name: mine.get(name, 0) for name in theirs} == pytest.approx(
            dict(theirs), rel=within
        )
        assert sum(mine.values()) == pytest.approx(sum(theirs.values()), rel=within)


@pytest.mark.parametrize("way", list(WAYS))
def test_predictions_match_what_training_reports(way):
    layout, sql, how = WAYS[way]
    is_sgd = "sgd" in how.get("strategy", "")
    # of SGD's epochs, which are of many rounds, all but the last are alike
    last = 2 if is_sgd else 3
    how = {"num_epochs": last, "device": "cpu", **how}
    cost = explained(layout, sql, **how).cost
    report = trained(layout, sql, **how)
    epochs = [
        sent([item for item in report.history if item.epoch == epoch])
        for epoch in range(1, last + 1)
    ]
    assert cost.epochs == report.epochs == last
    # the batches of SGD are as expected only; all else is counted, to the byte
    within = WITHIN if is_sgd else 0.0
    for epoch in epochs[:-1]:
        check(cost.epoch, epoch, within)
    check(cost.last_epoch, epochs[-1], within)
    before = [item for item in report.history if not item.epoch]
    check(cost.set_up, sent(before), within)
    check(cost.run, sent(report.history), within)
    assert cost.run.bytes_up == pytest.approx(report.bytes_up, rel=WITHIN)
    assert cost.run.bytes_down == pytest.approx(report.bytes_down, rel=WITHIN)


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_what_drawing_sends_is_predicted_within_what_is_drawn(layout):
    """Which rows are drawn, and how many of them twice, nobody knows before."""
    how = {"coreset_size": 150, "num_epochs": 1}
    cost = explained(layout, STORE_SQL, **how).cost
    history = trained(layout, STORE_SQL, **how).history
    before = [item for item in history if not item.epoch]
    drawing = [item for item in before if item.phase in ("measure", "draw", "weigh")]
    assert [item.phase for item in drawing] == ["measure", "draw", "weigh"]
    check(cost.set_up, sent(before), within=0.1)
    # what the first round sends is known
    plain = {"coreset_size": 0, "num_epochs": 1}
    other = explained(layout, STORE_SQL, **plain).cost
    assert cost.set_up.rounds == other.set_up.rounds + 3
    assert cost.epoch.bytes_up < other.epoch.bytes_up


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["admm", "sgd"])
def test_predictions_match_what_training_on_flights_reports(strategy):
    how = {"strategy": strategy, "num_epochs": 2}
    cost = explained("flights", FLIGHTS_SQL, **how).cost
    report = trained("flights", FLIGHTS_SQL, **how)
    for epoch, predicted in enumerate((cost.epoch, cost.last_epoch), start=1):
        check(predicted, sent([r for r in report.history if r.epoch == epoch]))
    check(cost.set_up, sent([item for item in report.history if not item.epoch]))
    check(cost.run, sent(report.history))


# by hand


def size(name="t", *shards, update=Update.LOCAL, **how) -> TableSize:
    how = {
        "outputs": 1,
        "features": 3,
        "parameters": 4,
        "has_intercept": True,
        "is_linear": True,
        **how,
    }
    return TableSize(name, shards or (ShardSize(20, 10, 4, 12),), update, **how)


TWO = (ShardSize(20, 10, 4, 12, 15.0), ShardSize(9, 5, 2, 6, 7.0))


def test_admm_of_one_shard_by_hand():
    # targets of 10 rows down, scores of 12 up, 4 bytes each and per output
    assert admm_epoch([size(outputs=3)]) == Traffic(1, {"t": 144}, {"t": 120})


def test_admm_with_statistics_by_hand():
    found = admm_epoch([size("t", *TWO, update=Update.GRAM), size("s")])
    # up: 18 scores, twice 4 moments; down: 15 targets, twice 4 parameters
    assert found == Traffic(2, {"t": 72 + 64, "s": 48}, {"t": 60 + 64, "s": 40})


@pytest.mark.parametrize(("inner", "rounds"), [(1, 2), (3, 4)])
def test_admm_with_consensus_by_hand(inner, rounds):
    found = admm_epoch([size("t", *TWO, update=Update.CONSENSUS)], inner)
    assert found == Traffic(rounds, {"t": 72 + 64 * inner}, {"t": 60 + 64 * inner})


def test_sgd_by_hand():
    found = sgd_epoch([size("t", *TWO, update=Update.SUM)], batches=5)
    # 22 rows in batches, 6 tested; per batch two gradients up and two sums down
    assert found == Traffic(10, {"t": 88 + 24 + 320}, {"t": 88 + 320})
    last = sgd_epoch([size("t", *TWO, update=Update.SUM)], 5, is_last=True)
    # no batch after the fifth; all 18 rows are scored
    assert last.up == pytest.approx({"t": 88 * 4 / 5 + 72 + 320})


def test_prepare_by_hand():
    found = prepare_round([size("t", *TWO, update=Update.GRAM)])
    # masks of 20 and 9 rows: 2 * 3 + 2 * 2 bytes; multiplicities of 15 rows
    assert found.down == {"t": 10 + 60}
    # twice 4 flags and a Gram matrix of 4 x 4
    assert found.up == {"t": 2 * (4 + 128)}


def test_table_6_by_hand():
    """Ten rows of a table behind 40 joined ones; batches of 8 see 7 of them each."""
    once = size("t", ShardSize(16, 10, 0, 10, 35.0), outputs=3)
    joined = replace(once, shards=(ShardSize(16, 40, 0, 40, 40.0),), is_repeated=True)
    steps = replace(once, shards=(ShardSize(16, 10, 0, 10, 10.0),))

    def both(traffic):
        return traffic.bytes_up + traffic.bytes_down

    assert both(admm_epoch([once])) == 8 * 10 * 3
    assert both(admm_epoch([joined])) == 8 * 40 * 3
    assert both(sgd_epoch([once], 5)) == 8 * 35 * 3
    assert both(sgd_epoch([joined], 5)) == 8 * 40 * 3
    assert both(sgd_epoch([steps], 1)) == 8 * 10 * 3
    told = [
        prepare_round([own], batches).bytes_down
        for own, batches in ((once, 0), (joined, 0), (once, 5), (joined, 5), (steps, 1))
    ]
    assert told == [
        16 / 4 + 4 * 10,
        4 * 40,
        16 / 4 + 4 * 10 + 4 * (5 + 1 + 35),
        4 * 40 + 4 * (5 + 1 + 40),
        16 / 4 + 4 * 10 + 4 * (2 + 10),
    ]
    assert prepare_round([replace(joined, is_weighted=True)]).bytes_down == 2 * 4 * 40


def test_traffic_adds_and_repeats():
    one, other = Traffic(1, {"a": 2}, {"b": 3}), Traffic(2, {"b": 5}, {})
    assert one + other == Traffic(3, {"a": 2, "b": 5}, {"b": 3})
    assert one * 2 == Traffic(2, {"a": 4}, {"b": 6})


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(0, 99),
)
def test_expected_batch_rows_is_the_mean_over_many_plans(counts, size_, seed):
    counts = np.array([*counts, 3])
    row_of = np.repeat(np.arange(len(counts)), counts)
    total = len(row_of)
    batch = min(size_, total)
    rng = np.random.default_rng(seed)
    draws = 400
    found = []
    for _ in range(draws):
        order = row_of[rng.permutation(total)]
        starts = range(0, total, batch)
        found.append(sum(len(set(order[s : s + batch].tolist())) for s in starts))
    expected = expected_batch_rows(counts, total, batch)
    # five standard errors of the mean
    slack = 5 * np.std(found) / np.sqrt(draws) + 1e-6
    assert expected == pytest.approx(np.mean(found), abs=slack)
