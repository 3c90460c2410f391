"""What a saved model predicts when some of its sites are gone, and what it refuses."""

import numpy as np
import pytest

from tests.support.federated import FEATURES, SOURCE, pieces, store, whole
from tests.support.predicted import check_equal, on, scored, train, train_store
from tp_flower.errors import ModelError, SchemaError

UNLABELLED = f"SELECT {FEATURES} {SOURCE}"
MEAN = {"on_missing": "mean"}
CHAIN = (
    "FROM orders o JOIN customers c ON o.customer = c.id JOIN items i ON c.id = i.item"
)


def layout(frames):
    """Every table has a site of its name, but the customers have two."""
    first, second = pieces(frames["customers"], 4)
    return {
        "orders": {"orders": [frames["orders"]]},
        "us": {"customers": [first]},
        "uk": {"customers": [second]},
        "items": {"items": [frames["items"]]},
    }


def check_with_mean(table, pairs, mean):
    """Compare predictions with scores that lack a table's, for which a mean stands."""
    check_equal(scored(table), [(row, score + mean) for row, score in pairs])


def without(sites, *gone):
    return {name: own for name, own in sites.items() if name not in gone}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # customers number 0 and 1 are told apart by the index of their shard
    return train_store(tmp_path_factory.mktemp("missing"), "squared", layout(store()))


def test_stop_refuses_by_name(model):
    for gone, error, match in (
        ("items", SchemaError, "no site hosts table 'items'"),
        ("uk", ModelError, "sites of model .* unavailable: 'uk' of table 'c'"),
    ):
        with pytest.raises(error, match=match):
            model.table(without(layout(store()), gone), UNLABELLED)


def test_a_leaf_table_that_is_gone_counts_with_its_mean(model):
    frames = store()
    strategy = model.predict(without(layout(frames), "items"), UNLABELLED, **MEAN)
    table = strategy.predictions
    # each order once: what repeated it is gone
    joined = "FROM orders o JOIN customers c ON o.customer = c.id"
    pairs = model.reference(frames, joined, aliases=("o", "c"))
    mean = model.manifest.table("i").mean_score[0]
    check_with_mean(table, pairs, mean)
    assert all(table["is_partial"].to_pylist())
    report = strategy.report()
    assert report["missing"] == [{"table": "i", "sites": ["items"]}]
    assert report["rows"]["partial"] == report["rows"]["joined"] == len(table)


def test_a_shard_that_is_gone_makes_its_rows_partial(model):
    frames = store()
    table = model.table(without(layout(frames), "uk"), UNLABELLED, **MEAN)
    there = model.reference(frames, f"{SOURCE} WHERE c.id < 4")
    joined = "FROM orders o JOIN items i ON o.item = i.item "
    gone = f"{joined} WHERE o.customer >= 4 OR o.customer IS NULL"
    rest = model.reference(frames, gone, aliases=("o", "i"))
    mean = model.manifest.table("c").mean_score[0]
    partial = table["is_partial"].to_numpy(zero_copy_only=False)
    check_equal(scored(table.filter(~partial)), there)
    check_with_mean(table.filter(partial), rest, mean)


def test_metrics_with_a_mean(model):
    frames = store()
    metrics = model.evaluate(without(layout(frames), "items"), **MEAN)
    table = model.table(without(layout(frames), "items"), UNLABELLED, **MEAN)
    score = table["score"].to_numpy()
    qty = frames["orders"]["qty"].to_numpy()[table["row_key"].to_numpy()]
    assert metrics["rmse"] == pytest.approx(np.sqrt(np.mean((score - qty) ** 2)))


def test_the_label_table_cannot_be_missing(model):
    with pytest.raises(ModelError, match="table 'o', whose rows are to be predicted"):
        model.table(without(layout(store()), "orders"), UNLABELLED, **MEAN)


@pytest.mark.parametrize("gone", [("us", "uk"), ("us",)])
def test_a_bridge_cannot_be_missing(tmp_path, gone):
    sql = f"SELECT o.qty AS label, {FEATURES} {CHAIN}"
    model = train(tmp_path, layout(store()), sql, task="regression", num_epochs=1)
    with pytest.raises(ModelError, match=r"table 'c' is unavailable .* 'i' can only"):
        model.table(without(layout(store()), *gone), **MEAN)


def test_tables_that_are_gone_are_joined_last(tmp_path):
    """A table that shares a condition with one is joined without it."""
    frames = store()
    items = "FROM orders o JOIN items i ON o.item = i.item"
    both = "JOIN customers c ON o.customer = c.id AND i.item = c.id"
    sql = f"SELECT o.qty AS label, {FEATURES} {items} {both}"
    model = train(tmp_path, on(whole, frames), sql, task="regression", num_epochs=1)
    for gone, joined, left in (
        ({"c": "customers"}, items, ("o", "i")),
        # a join whose tables are both gone
        ({"c": "customers", "i": "items"}, "FROM orders o", ("o",)),
    ):
        table = model.table(without(on(whole, frames), *gone.values()), **MEAN)
        pairs = model.reference(frames, joined, aliases=left)
        mean = sum(model.manifest.table(alias).mean_score[0] for alias in gone)
        check_with_mean(table, pairs, mean)


def test_a_new_shard_at_a_site_takes_the_part_of_another(model):
    frames = store(customers=20, seed=4)
    sites = layout(frames)
    sites["uk"] = {"customers": pieces(sites["uk"]["customers"][0], 3)}
    check_equal(scored(model.table(sites, UNLABELLED)), model.reference(frames, SOURCE))


def test_a_shard_at_a_site_without_a_part_is_refused(model, tmp_path):
    sites = layout(store())
    sites["fr"] = {"customers": [store(customers=6)["customers"]]}
    match = (
        r"site 'fr' hosts shard 0 of table 'c', but no .* Train again, or leave the "
        r"shard out"
    )
    with pytest.raises(ModelError, match=match):
        model.table(sites, UNLABELLED, **MEAN)
    again = train_store(tmp_path, "squared", sites)
    assert again.table(sites, UNLABELLED).num_rows
    del sites["fr"]
    assert model.table(sites, UNLABELLED, **MEAN).num_rows
