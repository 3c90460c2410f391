"""Orders and payments of customers, at one site or at several, and what DuckDB makes.

An order looks back on the payments of its customer in the 90 days before.
"""

import duckdb
import numpy as np
import pandas as pd
import pytest

from tests.support import federated

FIRST = np.datetime64("2020-01-01")
GRID = "1 month from 2020-01-01 to 2021-12-31"
COLUMNS = """COUNT(*) AS n, SUM(p.amount) AS total, AVG(p.amount) AS mean,
MIN(EPOCH(o.day) - EPOCH(p.paid)) / 86400 AS since"""
WHERE = (
    "p.customer = o.customer AND p.paid < o.day AND p.paid >= o.day - INTERVAL 90 DAY"
)
FEATURES = "o.online, w.n, w.total, w.mean, w.since"
SQL = f"""SELECT o.y AS label, {FEATURES} FROM orders o LEFT JOIN LATERAL
(SELECT {COLUMNS} FROM payments p WHERE {WHERE}) w ON TRUE"""
MADE = (
    f"SELECT o.y AS label, {FEATURES} FROM orders o LEFT JOIN windows w ON w.id = o.id"
)
HOW = {"method": "cg", "num_epochs": 30, "tolerance": 1e-9, "device": "cpu"}


def shop(orders=150, payments=900, customers=15, seed=0):
    rng = np.random.default_rng(seed)
    days = FIRST + rng.integers(0, 700, orders).astype("timedelta64[D]")
    # no two at the same time: which is the last would be a matter of their values
    hours = rng.permutation(19_000)[:payments].astype("timedelta64[h]")
    return {
        "orders": pd.DataFrame(
            {
                "id": np.arange(orders),
                "customer": rng.integers(0, customers, orders),
                "day": days.astype("datetime64[us]"),
                "online": rng.random(orders) < 0.4,
                "y": rng.normal(size=orders),
            }
        ),
        "payments": pd.DataFrame(
            {
                # the last two customers have paid nothing
                "customer": rng.integers(0, customers - 2, payments),
                "paid": (FIRST - 100 + hours).astype("datetime64[us]"),
                "amount": rng.gamma(2.0, 10.0, payments).round(2),
                "kind": rng.choice(["card", "cash"], payments),
            }
        ),
    }


def made(tables, sql):
    with duckdb.connect() as engine:
        for name, frame in tables.items():
            engine.register(name, frame)
        return engine.sql(sql).df()


def windows_of(tables):
    """The windows of every order."""
    return made(
        tables,
        f"SELECT o.id, w.* FROM orders o, LATERAL (SELECT {COLUMNS} FROM payments p "
        f"WHERE {WHERE}) w",
    )


def one_site(tables):
    return {"shop": {name: [frame] for name, frame in tables.items()}}


def two_sites(tables):
    return {
        "shop": {"orders": [tables["orders"]]},
        "bank": {"payments": [tables["payments"]]},
    }


def trained(sites, sql, **how):
    with federated.LocalGrid(sites) as grid:
        return federated.train(grid, sql, **{**HOW, **how})


def check_equal(found, expected):
    assert found.report.joined_rows_train == expected.report.joined_rows_train
    for name in ("final_train", "final_test"):
        own, other = (getattr(each.report, name) for each in (found, expected))
        assert own == pytest.approx(other, rel=1e-6)


def three_sites(tables):
    """Payments in two shards, each with half of the customers."""
    paid = tables["payments"]
    is_even = paid["customer"] % 2 == 0
    shards = [paid[is_even], paid[~is_even]]
    return {
        "shop": {"orders": [tables["orders"]]},
        **{f"bank-{n}": {"payments": [own]} for n, own in enumerate(shards)},
    }
