"""The forecast of rounds and of an epoch's bytes against what training sends."""

import pandas as pd
import pytest

from scripts.data.make_store import STORE_CLASSIFICATION_SQL, STORE_SQL, make_store
from strategies.training.traffic import Traffic
from tests.support.examples.explained import explain
from tests.support.federated import train
from tp_flower.settings import PrivacySettings

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
    frames = make_store(orders=900, items=40, customers=120, seed=3)
    (orders,), (items,), customers = map(frames.get, ("orders", "items", "customers"))
    if layout == "whole":
        both = pd.concat(customers, ignore_index=True)
        shop = {"orders": orders}
        maker = {"items": items}
        return {"shop": shop, "maker": maker, "crm": {"customers": both}}
    cut = orders.iloc[:100], orders.iloc[100:400], orders.iloc[400:]
    return {
        # one site of several tables, and of several shards of one
        "shop": {"orders": [cut[0], cut[1]], "items": items},
        "branch": {"orders": cut[2]},
        "us": {"customers": customers[0]},
        "uk": {"customers": customers[1]},
    }


SGD = {"strategy": "sgd"}
LARGE = {"batch_size": 60}
CORESET = {"coreset_size": 150, "coreset_kind": "uniform"}
TOLERANCE = {"tolerance": 1e-12}
ADMM = {"strategy": "admm"}
CG = {"strategy": "cg", "tolerance": 1e-9}
# a divided table has more rows, and is divided or not as the labels are
BOOST = {"strategy": "boost", "trees_per_round": 1, "regions": "none"}
WAYS = {
    "admm": ("whole", STORE_SQL, ADMM),
    "admm-gram": ("sharded", STORE_SQL, ADMM),
    "admm-consensus": ("sharded", STORE_SQL, {"lou": "consensus"}),
    "admm-softmax": ("sharded", SOFTMAX, ADMM),
    "admm-mlp": ("whole", STORE_SQL, {"model": "mlp", "local_epochs": 1}),
    "admm-mixed": (
        "sharded",
        STORE_SQL,
        {"models": (("c", "mlp"),), "local_epochs": 1},
    ),
    "admm-left": ("sharded", LEFT, ADMM),
    "admm-statistics": (
        "sharded",
        STORE_SQL,
        {"privacy": PrivacySettings(features="statistics")},
    ),
    "admm-tolerance": ("whole", STORE_SQL, ADMM | TOLERANCE),
    "cg": ("whole", STORE_SQL, CG),
    "cg-gram": ("sharded", SOFTMAX, CG),
    "cg-left": ("sharded", LEFT, CG),
    "boost": ("sharded", STORE_SQL, BOOST | {"lou": "local"}),
    "boost-classes": ("whole", SOFTMAX, BOOST),
    "sgd": ("whole", STORE_SQL, SGD),
    "sgd-sharded": ("sharded", STORE_CLASSIFICATION_SQL, SGD),
    "sgd-left": ("sharded", LEFT, SGD | LARGE),
    "sgd-tolerance": ("sharded", STORE_CLASSIFICATION_SQL, SGD | TOLERANCE | LARGE),
    "sgd-private": (
        "sharded",
        STORE_SQL,
        SGD | LARGE | {"privacy": PrivacySettings(features="dp-sgd")},
    ),
    "sgd-softmax": ("sharded", SOFTMAX, SGD | LARGE),
    "gd": ("whole", STORE_SQL, {"strategy": "gd"}),
    "coreset": ("sharded", STORE_SQL, ADMM | CORESET),
    "coreset-sgd": ("sharded", STORE_SQL, SGD | CORESET),
}


def trained(layout, sql, **how):
    return train(sites(layout), sql, how.get("strategy", "admm"), **how).report


def explained(layout, sql, **how) -> dict:
    return explain(sql, sites(layout), **how)["cost"]


def sent(rounds) -> Traffic:
    up = sum(sum(item.bytes_up.values()) for item in rounds)
    down = sum(sum(item.bytes_down.values()) for item in rounds)
    return Traffic(len(rounds), up, down)


@pytest.mark.cases(
    "admm-mixed",
    "admm-consensus",
    "admm-left",
    "sgd-softmax",
    "cg-gram",
    "boost",
    "coreset",
    "gd",
)
@pytest.mark.parametrize("way", list(WAYS))
def test_predictions_match_what_training_reports(way):
    layout, sql, how = WAYS[way]
    is_sgd = "sgd" in how.get("strategy", "")
    # of SGD's epochs, which are of many rounds, all but the last are alike
    last = 2 if is_sgd else 3
    how = {"num_epochs": last, "device": "cpu", **how}
    cost = explained(layout, sql, **how)
    history = trained(layout, sql, **how).history
    epochs = [
        sent([item for item in history if item.epoch == epoch])
        for epoch in range(1, last + 1)
    ]
    set_up = sum(not item.epoch for item in history)
    rounds = {"set-up": set_up, "epoch": epochs[0].rounds, "run": len(history)}
    assert cost["rounds"] == rounds
    # the batches of SGD are as expected only; all else is counted, to the byte
    within = WITHIN if is_sgd else 0.0
    # sums of Gram matrices are set-up, and come with the first epoch
    for actual in epochs[:-1] if is_sgd else epochs[1:-1]:
        assert cost["bytes"]["up"] == pytest.approx(actual.up, rel=within)
        assert cost["bytes"]["down"] == pytest.approx(actual.down, rel=within)


@pytest.mark.cases("auto")
@pytest.mark.parametrize("lou", ["auto", "bagged", "pooled"])
def test_trees_that_shards_show_each_other_are_predicted_at_most(lou):
    how = BOOST | {"num_epochs": 2, "lou": lou, "leaves": 4}
    most = explained("sharded", STORE_SQL, **how)
    least = explained("sharded", STORE_SQL, **how | {"lou": "local"})
    history = trained("sharded", STORE_SQL, **how).history
    actual = sent([item for item in history if item.epoch == 1])
    assert most["rounds"]["epoch"] == actual.rounds == 2
    for way, count in (("up", actual.up), ("down", actual.down)):
        assert least["bytes"][way] <= count <= most["bytes"][way]


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_the_rounds_of_drawing_a_coreset_are_predicted(layout):
    clear = PrivacySettings(unions="clear")
    how = {"coreset_size": 150, "num_epochs": 2, "privacy": clear}
    cost = explained(layout, STORE_SQL, **how)
    history = trained(layout, STORE_SQL, **how).history
    assert cost["rounds"]["run"] == len(history)
    drawing = [item for item in history if item.phase in ("measure", "draw", "weigh")]
    assert [item.phase for item in drawing] == ["measure", "draw", "weigh"]
    every_row = explained(layout, STORE_SQL, **how | {"coreset_size": 0})
    assert cost["rounds"]["set-up"] == every_row["rounds"]["set-up"] + 3
    assert cost["bytes"]["up"] < every_row["bytes"]["up"]
