"""Write the store example: own tables, and the files to train on them.

    python scripts/data/make_store.py DIR [--orders N] [--items N] [--customers N]
                                     [--parts N] [--seed N]

Four organisations: a shop holds the orders, a warehouse the items (a row per part of an
item, so orders and items are many-to-many), and each of two countries its customers.
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from scripts.data.run_files import (
    RUN_FILE,
    DataError,
    Shards,
    make_folder,
    print_commands,
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


def main(arguments: Sequence[str]) -> int:
    """Write the files and print the commands that use them; return the exit status."""
    options = _parse(arguments)
    folder: Path = options.folder.resolve()
    try:
        shards = make_store(
            *(options.orders, options.items, options.customers, options.seed),
            parts=options.parts,
        )
        make_folder(folder)
    except (ValueError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    us, uk = shards["customers"]
    shards["orders"][0].to_csv(folder / "orders.csv", index=False)
    shards["items"][0].to_parquet(folder / "items.parquet", index=False)
    us.to_csv(folder / "customers_us.csv", index=False)
    uk.to_csv(folder / "customers_uk.csv", index=False)
    write_tables(folder, SHARDS)
    runs = [
        _write_run(folder / RUN_FILE, "classification"),
        _write_run(folder / "my-run-regression.toml", "regression"),
    ]
    print_commands("The store", folder, runs)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write the store example.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--orders",
        type=int,
        default=5_000,
        help="rows of orders (default: %(default)s)",
    )
    parser.add_argument(
        "--items", type=int, default=200, help="distinct items (default: %(default)s)"
    )
    parser.add_argument(
        "--customers",
        type=int,
        default=600,
        help="in both countries (default: %(default)s)",
    )
    parser.add_argument(
        "--parts",
        type=int,
        default=4,
        help="most rows of an item (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    return parser.parse_args(arguments)


def _write_run(path: Path, task: str) -> Path:
    classifies = task == "classification"
    return write_run(
        path,
        f"What is the quantity ordered{' above 12' if classifies else ''}?",
        textwrap.dedent(STORE_CLASSIFICATION_SQL if classifies else STORE_SQL),
        {"task": task, "strategy": "admm"},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
