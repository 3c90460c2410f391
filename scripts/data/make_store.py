"""Write the store example: own tables, and the files to train on them.

    python scripts/data/make_store.py OUTPUT [--orders N] [--items N] [--customers N]
                                     [--parts N] [--seed N]

Four organisations: a shop holds the orders, a warehouse the items, and each of two
countries its customers. ``items`` has one row per *part* of an item, so that an order
of an item joins several rows: orders and items are many-to-many. The quantity ordered
depends on all three tables.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pandas as pd

from scripts.data.run_files import (
    RUN_FILE,
    print_commands,
    script,
    write_run,
    write_tables,
)
from tp_flower.arrays import FloatArray

_FROM: Final = """
    o.channel, o.discount, o.placed,
    i.part, i.price, i.weight, i.fragile,
    c.age, c.income, c.segment, c.country
FROM orders AS o
JOIN items AS i ON o.item_id = i.item_id
JOIN customers AS c ON o.customer_id = c.customer_id
"""
STORE_SQL: Final = f"SELECT o.quantity AS label,{_FROM}"
STORE_CLASSIFICATION_SQL: Final = f"SELECT o.quantity > 12 AS label,{_FROM}"

CHANNELS: Final = np.array(["web", "shop", "phone"])
PARTS: Final = np.array(["case", "motor", "screen", "battery", "cable"])
SEGMENTS: Final = np.array(["home", "office", "school"])
MISSING_SHARE: Final = 0.03


def make_store(
    orders: int = 5_000,
    items: int = 200,
    customers: int = 600,
    seed: int = 0,
    *,
    parts: int = 4,
    specs: int = 0,
) -> dict[str, list[pd.DataFrame]]:
    """Return the store's tables, each as the list of its shards.

    Args:
        orders: rows of ``orders``.
        items: distinct items; each has one row or more, one per part.
        customers: rows of ``customers``, two thirds of them in the US shard.
        seed: equal seeds give equal tables.
        parts: the most rows of an item; an order joins (1 + parts) / 2 on average.
        specs: more numbers of each part, in columns ``spec_1``, ``spec_2``, ...
    """
    if min(orders, items, parts) < 1 or customers < 2:
        raise ValueError(
            "the store needs at least 1 order, 1 item, 2 customers and 1 part, not "
            f"{orders} orders, {items} items, {customers} customers and {parts} parts"
        )
    # a data set of its own: not a draw of the run, so it does not take its generator
    draw = np.random.default_rng(seed)
    item_table, item_effect = _items(items, parts, specs, draw)
    customer_table, customer_effect = _customers(customers, draw)
    is_us = customer_table["country"] == "US"
    shards = [customer_table[rows].reset_index(drop=True) for rows in (is_us, ~is_us)]

    item = draw.integers(0, items, size=orders)
    customer = draw.integers(0, customers, size=orders)
    channel = draw.integers(0, len(CHANNELS), size=orders)
    discount = draw.choice([0.0, 0.05, 0.1, 0.2], size=orders)
    effect = np.array([0.0, 1.0, -1.0])[channel] + 12.0 * discount
    noise = draw.normal(0.0, 1.0, size=orders)
    quantity = 9.0 + effect + item_effect[item] + customer_effect[customer] + noise
    days = draw.integers(0, 365, size=orders).astype("timedelta64[D]")
    order_table = pd.DataFrame(
        {
            "order_id": np.arange(1, orders + 1),
            "item_id": item + 1,
            "customer_id": [f"C{number:06d}" for number in customer],
            "placed": np.datetime64("2024-01-01") + days,
            "channel": CHANNELS[channel],
            "discount": discount,
            "quantity": np.maximum(quantity.round(), 1.0).astype(np.int64),
        }
    )
    return {"orders": [order_table], "items": [item_table], "customers": shards}


def one_per_site(
    store: Mapping[str, Sequence[pd.DataFrame]],
) -> dict[str, dict[str, pd.DataFrame]]:
    """Return a site for each shard, by name."""
    return {
        f"{table}-{number}": {table: shard}
        for table, shards in store.items()
        for number, shard in enumerate(shards)
    }


def _items(
    items: int, most_parts: int, specs: int, draw: np.random.Generator
) -> tuple[pd.DataFrame, FloatArray]:
    """One row per part of an item; and what each item adds to the quantity."""
    parts = draw.integers(1, most_parts + 1, size=items)
    item = np.repeat(np.arange(items), parts)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    part = (
        draw.integers(0, len(PARTS), size=items)[item] + np.arange(item.size)
    ) - first
    price = np.exp(draw.normal(3.0, 0.6, size=item.size)).round(2)
    weight = draw.gamma(2.0, 1.5, size=item.size).round(3)
    table = pd.DataFrame(
        {
            "item_id": item + 1,
            "part": PARTS[part % len(PARTS)],
            "price": price,
            "weight": _with_gaps(weight, draw),
            "fragile": draw.random(item.size) < 0.3,
        }
    )
    value = -1.5 * (np.log(price) - 3.0) + 0.8 * (part % len(PARTS) == 2)
    # drawn last, so that the rest is the same without them
    spec = draw.normal(size=(item.size, specs)).round(3)
    names = [f"spec_{number + 1}" for number in range(specs)]
    table = pd.concat([table, pd.DataFrame(spec, columns=names)], axis=1)
    value += 0.2 * (weight - 3.0) + 0.5 * spec.sum(axis=1) / max(specs, 1) ** 0.5
    return table, 2.0 * np.bincount(item, value) / parts


def _customers(
    customers: int, draw: np.random.Generator
) -> tuple[pd.DataFrame, FloatArray]:
    """The customers of both countries; and what each adds to the quantity."""
    us = np.arange(customers) < max(1, min(customers - 1, 2 * customers // 3))
    age = draw.integers(18, 80, size=customers)
    income = draw.normal(np.where(us, 60.0, 45.0), 12.0).round(1)
    segment = draw.integers(0, len(SEGMENTS), size=customers)
    table = pd.DataFrame(
        {
            "customer_id": [f"C{number:06d}" for number in range(customers)],
            "country": np.where(us, "US", "UK"),
            "age": age,
            "income": _with_gaps(income, draw),
            "segment": SEGMENTS[segment],
        }
    )
    effect = (
        0.06 * (income - 55.0) - 0.02 * (age - 49) + np.array([0.0, 3.0, 1.0])[segment]
    )
    return table, effect


def _with_gaps(values: FloatArray, draw: np.random.Generator) -> FloatArray:
    """The values with a few missing ones."""
    return np.where(draw.random(values.size) < MISSING_SHARE, np.nan, values)


SHARDS = {
    "orders": [("orders.csv", "shop")],
    "items": [("items.parquet", "warehouse")],
    # one table in two shards: each country keeps its own customers
    "customers": [("customers_us.csv", "us"), ("customers_uk.csv", "uk")],
}
SIZES = {
    "orders": (int, 5_000, "rows of orders"),
    "items": (int, 200, "distinct items"),
    "customers": (int, 600, "in both countries"),
    "seed": (int, 0, "of the random numbers"),
    "parts": (int, 4, "most rows of an item"),
}


def write(options: argparse.Namespace) -> None:
    """Write the files to OUTPUT."""
    folder = options.output
    store = make_store(**{name: getattr(options, name) for name in SIZES})
    for table, shards in SHARDS.items():
        for (file, _), shard in zip(shards, store[table], strict=True):
            to_file = shard.to_parquet if file.endswith("parquet") else shard.to_csv
            to_file(folder / file, index=False)
    write_tables(folder, SHARDS)
    runs = [
        write_run(
            folder / file,
            f"What is the quantity ordered{question}?",
            sql,
            {"task": task, "strategy": "admm"},
        )
        for file, question, sql, task in (
            (RUN_FILE, " above 12", STORE_CLASSIFICATION_SQL, "classification"),
            ("my-run-regression.toml", "", STORE_SQL, "regression"),
        )
    ]
    print_commands("The store", folder, runs)


main = script(__doc__, write, options=SIZES)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
