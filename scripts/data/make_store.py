"""Write the store example: own tables, and the files to train on them.

    python scripts/data/make_store.py OUTPUT [--orders N] [--items N] [--customers N]
                                     [--parts N] [--seed N]

Four organisations: a shop holds the orders, a warehouse the items (a row per part of an
item, so orders and items are many-to-many), and each of two countries its customers.
"""

import argparse
import sys
from collections.abc import Sequence

from scripts.data.run_files import (
    RUN_FILE,
    Shards,
    print_commands,
    run_script,
    write_run,
    write_tables,
)
from scripts.data.store import STORE_CLASSIFICATION_SQL, STORE_SQL, make_store

SHARDS: Shards = {
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


def main(arguments: Sequence[str]) -> int:
    """Write the files and print the commands that use them; return the exit status."""
    return run_script(__doc__, write, arguments, options=SIZES)


def write(options: argparse.Namespace) -> None:
    """Write the files to OUTPUT."""
    folder = options.output
    (orders,), (items,), (us, uk) = make_store(
        **{name: getattr(options, name) for name in SIZES}
    ).values()
    items.to_parquet(folder / "items.parquet", index=False)
    for name, table in (("orders", orders), ("customers_us", us), ("customers_uk", uk)):
        table.to_csv(folder / f"{name}.csv", index=False)
    write_tables(folder, SHARDS)
    runs = [
        write_run(
            folder / RUN_FILE,
            "What is the quantity ordered above 12?",
            STORE_CLASSIFICATION_SQL,
            {"task": "classification", "strategy": "admm"},
        ),
        write_run(
            folder / "my-run-regression.toml",
            "What is the quantity ordered?",
            STORE_SQL,
            {"task": "regression", "strategy": "admm"},
        ),
    ]
    print_commands("The store", folder, runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
