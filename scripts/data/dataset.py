"""Tables with a query, to train on in several ways."""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from scripts.joined.centralized import JoinedTable, join_tables
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.shards import (
    MEMORY_PREFIX,
    load_tables,
    register_frames,
    release,
)

Sites = dict[str, dict[str, pd.DataFrame]]


@dataclass(frozen=True)
class Dataset:
    """Tables, each in one shard, with a query and the run-config keys of every run.

    Attributes:
        name: on the command line; ``title`` is for people.
        metric: the test metric that is compared.
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
