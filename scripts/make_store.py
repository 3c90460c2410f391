"""Write the store example: own tables, and the files to train on them.

    python scripts/make_store.py DIR [--orders N] [--items N] [--customers N] [--seed N]

Four organisations: a shop holds the orders, a warehouse the items (a row per part of an
item, so orders and items are many-to-many), and each of two countries its customers.
"""

import argparse
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from tp_flower.datasets.store import STORE_CLASSIFICATION_SQL, STORE_SQL, make_store

ROOT = Path(__file__).resolve().parents[1]

TABLES = """\
# Where the tables are. Paths are relative to this file; a site is an organisation.
[tables.orders]
path = "orders.csv"
site = "shop"

[tables.items]
path = "items.parquet"
site = "warehouse"

# one table in two shards: each country keeps its own customers
[[tables.customers.shards]]
path = "customers_us.csv"
site = "us"

[[tables.customers.shards]]
path = "customers_uk.csv"
site = "uk"
"""

RUN = """\
# Settings of a run; all others take their defaults, which are in pyproject.toml.
# What is the quantity ordered{what}?
sql = \"\"\"
{sql}
\"\"\"
task = "{task}"
strategy = "admm"
tables = {tables}
"""


def main(arguments: Sequence[str]) -> int:
    """Write the files and print the commands that use them; return the exit status."""
    options = _parse(arguments)
    folder: Path = options.folder.resolve()
    try:
        shards = make_store(
            options.orders, options.items, options.customers, options.seed
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    us, uk = shards["customers"]
    shards["orders"][0].to_csv(folder / "orders.csv", index=False)
    shards["items"][0].to_parquet(folder / "items.parquet", index=False)
    us.to_csv(folder / "customers_us.csv", index=False)
    uk.to_csv(folder / "customers_uk.csv", index=False)
    tables = folder / "tables.toml"
    tables.write_text(TABLES, encoding="utf-8")
    runs = [
        _write_run(folder / "my-run.toml", "classification", tables),
        _write_run(folder / "my-run-regression.toml", "regression", tables),
    ]
    print(f"The store is in {folder}. To train on it, in {ROOT}:")
    for run in runs:
        print(f"  flwr run . --stream -c {shlex.quote(str(run))}")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write the store example.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--orders", type=int, default=5_000, help="rows of orders")
    parser.add_argument("--items", type=int, default=200, help="distinct items")
    parser.add_argument("--customers", type=int, default=600, help="in both countries")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def _write_run(path: Path, task: str, tables: Path) -> Path:
    classifies = task == "classification"
    text = RUN.format(
        what=" above 12" if classifies else "",
        sql=textwrap.dedent(
            STORE_CLASSIFICATION_SQL if classifies else STORE_SQL
        ).strip(),
        task=task,
        tables=_toml_string(str(tables)),
    )
    path.write_text(text, encoding="utf-8")
    return path


def _toml_string(text: str) -> str:
    r"""Return the text as a TOML string.

    >>> print(_toml_string(r'C:\a "b"'))
    "C:\\a \"b\""
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
