"""The cost model against what training sends, and by hand."""

from collections import Counter
from dataclasses import replace

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


SGD = {"strategy": "sgd"}
VFL_ADMM, VFL_SGD = {"strategy": "vfl-admm"}, {"strategy": "vfl-sgd"}
LARGE = {"batch_size": 60}
CORESET = {"coreset_size": 150, "coreset_kind": "uniform"}
CONSENSUS = {"lou": "consensus"}
MLP = {"model": "mlp"}
MIXED = {"models": (("c", "mlp"),)}
TOLERANCE = {"tolerance": 1e-12}
STATISTICS = {"privacy": PrivacySettings(features="statistics")}
GRADIENTS = SGD | LARGE | {"privacy": PrivacySettings(features="dp-sgd")}
ADMM = {"strategy": "admm"}
CG = {"strategy": "cg", "tolerance": 1e-9}
BOOST = {"strategy": "boost", "trees_per_round": 1}
WAYS = {
    "admm": ("whole", STORE_SQL, ADMM),
    "admm-gram": ("sharded", STORE_SQL, ADMM),
    "admm-consensus": ("sharded", STORE_SQL, CONSENSUS),
    "admm-softmax": ("sharded", SOFTMAX, ADMM),
    "admm-mlp": ("whole", STORE_SQL, MLP | {"local_epochs": 1}),
    "admm-mixed": ("sharded", STORE_SQL, MIXED | {"local_epochs": 1}),
    "admm-left": ("sharded", LEFT, ADMM),
    "admm-statistics": ("sharded", STORE_SQL, STATISTICS),
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
    "sgd-private": ("sharded", STORE_SQL, GRADIENTS),
    "sgd-softmax": ("sharded", SOFTMAX, SGD | LARGE),
    "vfl-admm": ("whole", STORE_SQL, VFL_ADMM),
    "vfl-admm-gram": ("sharded", SOFTMAX, VFL_ADMM),
    "vfl-admm-left": ("sharded", LEFT, VFL_ADMM | CONSENSUS),
    "vfl-admm-weighted": ("whole", STORE_SQL, VFL_ADMM | {"row_weight": "entity(c)"}),
    "vfl-sgd": ("whole", STORE_SQL, VFL_SGD | MLP | {"batch_size": 30}),
    "vfl-sgd-left": ("sharded", LEFT, VFL_SGD | {"batch_size": 30}),
    "gd": ("whole", STORE_SQL, {"strategy": "gd"}),
    "coreset": ("sharded", STORE_SQL, ADMM | CORESET),
    "coreset-sgd": ("sharded", STORE_SQL, SGD | CORESET),
}


def trained(layout, sql, **how):
    return train(sites(layout), sql, how.get("strategy", "admm"), **how).report


def explained(layout, sql, **how) -> list[Traffic]:
    """Of the set-up, one epoch, and the whole run."""
    cost = explain(sql, sites(layout), **how)["cost"]
    return [Traffic(*cost[stretch].values()) for stretch in ("set-up", "epoch", "run")]


def sent(rounds) -> Traffic:
    up, down = Counter(), Counter()
    for item in rounds:
        up.update(item.bytes_up)
        down.update(item.bytes_down)
    return Traffic(len(rounds), up, down)


def check(predicted: Traffic, actual: Traffic, within: float = WITHIN) -> None:
    assert predicted.rounds == actual.rounds
    for mine, theirs in ((predicted.up, actual.up), (predicted.down, actual.down)):
        expected = pytest.approx(dict(theirs), rel=within)
        assert {name: mine.get(name, 0) for name in theirs} == expected
        assert sum(mine.values()) == pytest.approx(sum(theirs.values()), rel=within)


def less(one, two):
    return {name: count - two.get(name, 0) for name, count in one.items()}


def without(all_rounds: Traffic, some: Traffic) -> Traffic:
    ways = less(all_rounds.up, some.up), less(all_rounds.down, some.down)
    return Traffic(all_rounds.rounds - some.rounds, *ways)


def first_sums(history) -> Traffic:
    """The sums of Gram matrices: they are set-up, and come with the first epoch."""
    one, two = (sent([r for r in history if r.epoch == number]) for number in (1, 2))
    return Traffic(0, {}, less(one.down, two.down))


@pytest.mark.parametrize("way", list(WAYS))
def test_predictions_match_what_training_reports(way):
    layout, sql, how = WAYS[way]
    is_sgd = "sgd" in how.get("strategy", "")
    # of SGD's epochs, which are of many rounds, all but the last are alike
    last = 2 if is_sgd else 3
    how = {"num_epochs": last, "device": "cpu", **how}
    set_up, epoch, run = explained(layout, sql, **how)
    report = trained(layout, sql, **how)
    epochs = [
        sent([item for item in report.history if item.epoch == epoch])
        for epoch in range(1, last + 1)
    ]
    assert report.epochs == last
    # the batches of SGD are as expected only; all else is counted, to the byte
    within = WITHIN if is_sgd else 0.0
    more = Traffic() if is_sgd else first_sums(report.history)
    epochs[0] = replace(epochs[0], down=less(epochs[0].down, more.down))
    for actual in epochs[:-1]:
        check(epoch, actual, within)
    check(without(run, set_up + epoch * (last - 1)), epochs[-1], within)
    check(
        set_up, sent([item for item in report.history if not item.epoch]) + more, within
    )
    check(run, sent(report.history), within)
    assert sum(run.up.values()) == pytest.approx(report.bytes_up, rel=WITHIN)
    assert sum(run.down.values()) == pytest.approx(report.bytes_down, rel=WITHIN)


@pytest.mark.parametrize("lou", ["auto", "bagged", "pooled"])
def test_trees_that_shards_show_each_other_are_predicted_at_most(lou):
    how = BOOST | {"num_epochs": 2, "lou": lou, "leaves": 4}
    _, epoch, _ = explained("sharded", STORE_SQL, **how)
    _, local, _ = explained("sharded", STORE_SQL, **how | {"lou": "local"})
    actual = sent(
        [r for r in trained("sharded", STORE_SQL, **how).history if r.epoch == 1]
    )
    assert epoch.rounds == actual.rounds == 2
    for most, ways, least in (
        (epoch.up, actual.up, local.up),
        (epoch.down, actual.down, local.down),
    ):
        assert all(least[name] <= ways[name] <= most[name] for name in least)


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_what_drawing_sends_is_predicted_within_what_is_drawn(layout):
    """Which rows are drawn, and how many of them twice, nobody knows before."""
    clear = PrivacySettings(unions="clear")
    how = {"coreset_size": 150, "num_epochs": 2, "privacy": clear}
    set_up, epoch, _ = explained(layout, STORE_SQL, **how)
    history = trained(layout, STORE_SQL, **how).history
    before = [item for item in history if not item.epoch]
    drawing = [item for item in before if item.phase in ("measure", "draw", "weigh")]
    assert [item.phase for item in drawing] == ["measure", "draw", "weigh"]
    check(set_up, sent(before) + first_sums(history), within=0.1)
    # what the first round sends is known
    other_set_up, other_epoch, _ = explained(
        layout, STORE_SQL, **how | {"coreset_size": 0}
    )
    assert set_up.rounds == other_set_up.rounds + 3
    assert sum(epoch.up.values()) < sum(other_epoch.up.values())
