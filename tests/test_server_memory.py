"""The server's memory: what is predicted against what its arrays take."""

import gc
import tracemalloc
from contextlib import closing

import numpy as np
import pytest

from client_apps.app import app
from strategies import STRATEGIES, Explain
from strategies.admm import AdmmServer
from tp_flower.datasets import STORE_CLASSIFICATION_SQL, STORE_SQL, make_store
from tp_flower.explain.cost import ShardSize, TableSize
from tp_flower.explain.server_memory import admm_bytes, sgd_bytes
from tp_flower.grid import InProcessGrid
from tp_flower.protocol import Update
from tp_flower.query import Query

SLACK = 0.35
"""Temporary arrays and caches come on top, and some of the largest need not be live."""


def sites():
    frames = make_store(orders=20_000, items=300, customers=900, seed=2)
    orders, items, customers = (frames[n] for n in ("orders", "items", "customers"))
    return {"shop": {"orders": orders, "items": items, "customers": customers}}


def predicted(sql, **how) -> int:
    strategy = Explain(Query.from_sql(sql), mode="explain", **how)
    with closing(InProcessGrid(app, sites())) as grid:
        strategy.start(grid)
    costs = strategy.explanation.strategies
    (chosen,) = [cost for cost in costs if cost.is_chosen]
    return chosen.server_bytes


def mapping_bytes(federation) -> int:
    every = [*federation.train.tables.values(), *federation.test.tables.values()]
    labels = federation.train_labels.nbytes + federation.test_labels.nbytes
    return sum(rows.row_of.nbytes for rows in every) + labels


@pytest.mark.parametrize("memory", [0, 5])
@pytest.mark.parametrize("sql", [STORE_SQL, STORE_CLASSIFICATION_SQL])
def test_admm(sql, memory):
    how = {"num_epochs": 1, "anderson_memory": memory}
    strategy = STRATEGIES["admm"](Query.from_sql(sql), **how)
    with closing(InProcessGrid(app, sites())) as grid:
        strategy.start(grid)
    federation = strategy.federation
    rng = np.random.default_rng(0)
    gc.collect()
    tracemalloc.start()
    try:
        server = AdmmServer(federation, strategy.settings)
        for _ in range(8):
            made = server.targets()
            server.take({n: 0.1 * rng.normal(size=t.shape) for n, t in made.items()})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    found = peak + mapping_bytes(federation)
    assert predicted(sql, **how) == pytest.approx(found, rel=SLACK)


def test_sgd():
    how = {"num_epochs": 1, "strategy": "sgd"}
    strategy = STRATEGIES["sgd"](Query.from_sql(STORE_SQL), **how)
    with closing(InProcessGrid(app, sites())) as grid:
        strategy.start(grid)
    plan = strategy._batches.plan
    arrays = [plan.order, plan.start]
    for own in plan.tables.values():
        arrays += [own.start, own.rows, own.slots]
    found = sum(array.nbytes for array in arrays) + mapping_bytes(strategy.federation)
    # the scores seen in an epoch, and labels in the order of the batches
    found += 2 * strategy.federation.train_labels.nbytes
    assert predicted(STORE_SQL, **how) == pytest.approx(found, rel=SLACK)


def table(rows, outputs=1) -> TableSize:
    shard = ShardSize(rows, rows, 0, rows, batch_rows=2.0 * rows)
    return TableSize("t", (shard,), Update.LOCAL, outputs, 3, 3, False, True)


def test_by_hand():
    # 10 joined rows of two tables of 4 and 6 rows, nothing held out
    tables = [table(4), table(6)]
    mapping = 10 * (2 * 4 + 8) + 10 * 8
    assert admm_bytes(tables, 10, 0, 0) == mapping + (7 * 10 + 3 * 10) * 8
    # (duals, h_i): 20 numbers, and their steps, and the last one; a weight per row
    assert admm_bytes(tables, 10, 0, 2) == (
        mapping + 100 * 8 + (2 * (20 + 20) + 20) * 4 + 10 * 8
    )
    assert sgd_bytes(tables, 10, 0) == mapping + (30 + 20) * 8 + 20 * 8 + 10 * 8
