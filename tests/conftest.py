"""Fixtures that all tests share: one server of each kind per session."""

from pathlib import Path

import pytest

from tests.servers import mariadb, postgresql

__all__ = ["mariadb", "postgresql"]

LONGEST = (
    *("test_deployment", "test_training", "test_end_to_end", "test_hostile_server"),
    *("test_faults", "test_sgd", "test_predict_app", "test_pushdown"),
    *("test_fuzz", "test_wire_runs", "test_tables", "test_cost", "test_sites"),
    *("test_fault_schedules", "test_attacks", "test_bench_coreset", "test_left_join"),
    *("test_coreset_solved", "test_personalised", "test_coreset_runs", "test_vfl"),
    *("test_empty_shards", "test_private_runs", "test_kill_runs", "test_key_attacks"),
    *("test_prepare_mimic", "test_flights_databases", "test_datasets", "test_scale"),
)
"""Files that take longest, those that wait beside those that compute. Begun last, one
of them would be run while the other workers have nothing left to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first, the rest as it was."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(Path(item.path).stem, len(rank)))
