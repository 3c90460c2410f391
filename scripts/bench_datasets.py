"""The data that methods are compared on: tables, a query, and what to predict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from bench_movielens import SQL as MOVIELENS_SQL
from bench_movielens import TEST_FRACTION, read_movielens
from bench_runs import by_table, flights_frames
from centralized import JoinedTable, join_tables

from tp_flower.datasets import (
    FLIGHTS_REGRESSION_SQL,
    FLIGHTS_SQL,
    STORE_SQL,
    make_store,
)
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.shards import (
    MEMORY_PREFIX,
    load_tables,
    register_frames,
    release,
)

Sites = dict[str, dict[str, pd.DataFrame]]

# an item has 2.5 rows on average: 250,000 joined rows
STORE_ORDERS, STORE_ITEMS, STORE_CUSTOMERS = 100_000, 2_000, 10_000


@dataclass(frozen=True)
class Dataset:
    """Tables with a query.

    Attributes:
        name: on the command line.
        title: for people.
        metric: the test metric that is compared.
        sql: the query.
        settings: run-config keys of every run, such as ``task``.
        tables: each in one shard.
    """

    name: str
    title: str
    metric: str
    sql: str
    settings: Mapping[str, str | float]
    tables: Mapping[str, pd.DataFrame]

    def join_only(self) -> Sites:
        """Return one site per table."""
        return {name: {name: frame} for name, frame in self.tables.items()}

    def two_shards(self) -> Sites:
        """Return two sites per table, with half of its rows each (the papers' UCQ).

        The halves are in order, so that a run holds out the same rows as without.
        """
        sites: Sites = {}
        for name, frame in self.tables.items():
            middle = len(frame) // 2
            for number, rows in enumerate((slice(middle), slice(middle, None))):
                shard = frame.iloc[rows].reset_index(drop=True)
                sites[f"{name}-{number}"] = {name: shard}
        return sites

    def joined(self, settings: Settings) -> JoinedTable:
        """Return the joined and encoded rows, split as a run splits them."""
        token = register_frames(self.tables, site="all")
        try:
            sources = load_tables(MEMORY_PREFIX + token)
            return join_tables(Query.from_sql(self.sql), settings, sources)
        finally:
            release(token)


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
