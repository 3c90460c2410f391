"""The data that methods are compared on: tables, a query, and what to predict."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from scripts.bench.movielens import SQL as MOVIELENS_SQL
from scripts.bench.movielens import TEST_FRACTION, read_movielens
from scripts.bench.runs import by_table, flights_frames
from scripts.data.dataset import Dataset
from scripts.data.store import STORE_SQL, make_store
from tp_flower.sources.flights import FLIGHTS_REGRESSION_SQL, FLIGHTS_SQL

# an item has 2.5 rows on average: 250,000 joined rows
STORE_ORDERS, STORE_ITEMS, STORE_CUSTOMERS = 100_000, 2_000, 10_000


def flights(_: Path | None = None) -> Dataset:
    """Return the built-in flights: is a flight late?"""
    return Dataset(
        *("flights", "Flights, late or not", "auc", FLIGHTS_SQL),
        {"task": "classification"},
        by_table(flights_frames()),
    )


def flights_delay(_: Path | None = None) -> Dataset:
    """Return the built-in flights: how late is a flight?"""
    return Dataset(
        *("flights-delay", "Flights, minutes late", "rmse", FLIGHTS_REGRESSION_SQL),
        {"task": "regression"},
        by_table(flights_frames()),
    )


def store(_: Path | None = None) -> Dataset:
    """Return the made-up store: how much is ordered?"""
    shards = make_store(STORE_ORDERS, STORE_ITEMS, STORE_CUSTOMERS)
    return Dataset(
        *("store", "Store, quantity (many-to-many)", "rmse", STORE_SQL),
        {"task": "regression"},
        {name: pd.concat(own, ignore_index=True) for name, own in shards.items()},
    )


def movielens(folder: Path | None = None) -> Dataset:
    """Return MovieLens-100K from its files: which rating does a movie get?

    Raises:
        ValueError: no folder was given.
    """
    if folder is None:
        raise ValueError("movielens needs the folder of its files")
    return Dataset(
        *("movielens", "MovieLens-100K, rating", "rmse", MOVIELENS_SQL),
        {"task": "regression", "test-fraction": TEST_FRACTION},
        read_movielens(folder),
    )


DATASETS: Mapping[str, Callable[[Path | None], Dataset]] = {
    "flights": flights,
    "flights-delay": flights_delay,
    "store": store,
    "movielens": movielens,
}
