"""Shards without rows: a filter may leave a site nothing, and the run goes on."""

import pytest

from tests.support.examples.store_runs import FRAMES, query
from tests.support.federated import SOURCE, one_per_site, run_query, sharded

ALL_WAYS = [
    {"strategy": "admm", "num_epochs": 3},
    {"strategy": "admm", "num_epochs": 3, "lou": "consensus"},
    {"strategy": "admm", "num_epochs": 8, "model": "mlp", "hidden_sizes": (8,)},
    {"strategy": "sgd", "num_epochs": 2, "batch_size": 20},
]
WAYS = ["gram", "consensus", "mlp", "sgd"]
each_way = pytest.mark.parametrize("how", ALL_WAYS, ids=WAYS)


def train(shards, how, source=SOURCE, where="", loss="squared"):
    """The metrics of a run over these shards."""
    sql = query(loss, f"{source} {where}")
    settings = {"l2": 0.01, "device": "cpu", "test_fraction": 0.0}
    settings |= {"validation_fraction": 0.0, **how}
    return run_query(sql, one_per_site(shards), **settings).report


def shards_of(*empty):
    """Every table in one shard; those that are named have another without rows."""
    return {
        table: [frame, frame.head(0)] if table in empty else [frame]
        for table, frame in FRAMES.items()
    }


@pytest.mark.cases("softmax-consensus", "squared-gram", "softmax-sgd", "squared-mlp")
@each_way
@pytest.mark.parametrize("loss", ["squared", "softmax"])
def test_shard_without_rows_changes_nothing(how, loss):
    if "model" in how:
        # a model that consensus trains stands where it stands for any other shards
        other = train(sharded(FRAMES), how, loss=loss)
        split = train(shards_of("orders", "customers", "items"), how, loss=loss)
        assert split.final_train["loss"] < 1.2 * other.final_train["loss"]
        return
    unsplit = train(shards_of(), how, loss=loss)
    split = train(shards_of("orders", "customers", "items"), how, loss=loss)
    assert split.joined_rows_train == unsplit.joined_rows_train
    # consensus approaches what one shard is at once; of shards that counted as many as
    # there are, the empty ones among them, it would be 8 % away
    expected = unsplit.final_train["loss"]
    tolerance = 0.07 if "lou" in how else 1e-4
    assert split.final_train["loss"] == pytest.approx(expected, rel=tolerance)


@pytest.mark.cases("orders-consensus", "orders-sgd", "customers-gram", "customers-mlp")
@each_way
@pytest.mark.parametrize("table", ["orders", "customers"])
def test_filter_may_leave_a_shard_nothing(how, table):
    others = FRAMES[table].assign(
        **({"day": 99} if table == "orders" else {"age": 999.0})
    )
    where = "WHERE o.day < 50 AND (c.age < 200 OR c.age IS NULL)"
    beside = {**shards_of(), table: [FRAMES[table], others]}
    filtered = train(beside, {**how, "num_epochs": 1}, where=where)
    unsplit = train(shards_of(), {"strategy": "admm", "num_epochs": 1})
    assert filtered.joined_rows_train == unsplit.joined_rows_train


@each_way
def test_left_joined_table_may_have_no_row_at_all(how):
    source = SOURCE.replace(
        "JOIN customers c ON o.customer = c.id",
        "LEFT JOIN customers c ON o.customer = c.id AND c.age > 999",
    )
    report = train(shards_of("customers"), how, source=source)
    tables = {own.table: own for own in report.tables}
    assert (tables["c"].rows, tables["c"].features) == (0, 0)
    assert report.final_train["rmse"] < 10
