"""Fixtures and options that all tests share: one server of each kind per session."""

import subprocess
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.servers import mariadb, postgresql
from tp_flower.files import HOME_VARIABLE

__all__ = ["mariadb", "postgresql"]
# the first example may start an engine, and machines differ: none is too slow
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
SHARED = (
    *("test_private_runs", "test_hostile_server", "test_sites", "test_pushdown"),
    *("test_training", "test_left_join", "test_empty_shards"),
    *("test_label_runs", "test_cost", "test_coreset_runs", "test_personalised"),
    *("test_sgd", "test_resume", "test_fuzz", "test_attacks", "test_faults"),
    *("test_key_attacks", "test_flights", "test_row_weights", "test_sql_pairs"),
    *("test_exactly_once", "test_coreset_solved", "test_accounting"),
    *("test_key_sources", "test_privacy_plan", "test_databases"),
    *("test_device_features", "test_extraction", "test_predict"),
    *(
        "test_fuzz_replies",
        "test_sessions",
        "test_sealed_unions",
        "test_early_stopping",
    ),
    *("test_masked", "test_boosting", "test_audit", "test_hostile_server"),
)
"""Files of which a run takes a share: of every test with several parameters one in
``SHARE``, drawn by the commit. ``--whole`` takes all."""
LONGEST = (
    *(
        "test_session_deployment",
        "test_deployment",
        "test_strict_deployment",
        "test_tables",
    ),
    *(
        "test_end_to_end",
        "test_kills",
        "test_flights_databases",
        "test_mapping",
        "test_scale",
    ),
    *SHARED,
)
"""Files that take longest, those that wait beside those that compute. Begun last, one
of them would be run while the other workers have nothing left to do."""
SHARE = 14


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' runs, models and sites' state apart from those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(tmp_path_factory.mktemp("home")))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let all parameters of every test be run."""
    text = "run the tests with all their parameters, not a share of them by commit"
    parser.addoption("--whole", action="store_true", help=text)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say which share is run."""
    if config.getoption("--whole") or not _takes_share(config):
        return None
    return f"share: 1 in {SHARE} of the parameters, drawn by commit {_commit()[:7]}"


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Put the files that take longest first; leave a share of the parameters."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(Path(item.path).stem, len(rank)))
    if not config.getoption("--whole") and _takes_share(config):
        _leave_share(config, items)


def _takes_share(config: pytest.Config) -> bool:
    """Return whether all tests are run: a file that is named is run whole."""
    return not config.args or config.args == config.getini("testpaths")


def _leave_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if Path(item.path).stem in SHARED:
            tests[item.nodeid.partition("[")[0]].append(item)
    left_out = set()
    for name, cases in tests.items():
        first = zlib.crc32(f"{_commit()} {name}".encode()) % min(SHARE, len(cases))
        left_out |= set(cases) - set(cases[first::SHARE])
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _commit() -> str:
    """Return the commit's hash; where there is none, a share that stays the same."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip()
