"""Fixtures that all tests share: one server of each kind per session."""

from pathlib import Path

import pytest

from tests.servers import mariadb, postgresql

__all__ = ["mariadb", "postgresql"]

LONGEST = (
    *("test_deployment", "test_faults", "test_end_to_end", "test_predict_app"),
    *("test_fuzz", "test_hostile_server", "test_tables", "test_private_runs"),
    *("test_cost", "test_pushdown", "test_sgd", "test_kill_runs", "test_empty_shards"),
    *("test_prepare_mimic", "test_key_attacks", "test_flights_databases"),
    *("test_datasets", "test_encoders_in_runs", "test_scale", "test_training"),
)
"""Files that take longest, of which some have few tests: begun last, one of them would
be run while the other worker has nothing left to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first, the rest as it was."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(Path(item.path).stem, len(rank)))
