"""Fixtures and options that all tests share: one server of each kind per session."""

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.servers import mariadb, postgresql
from tp_flower.files import HOME_VARIABLE

__all__ = ["mariadb", "postgresql"]
# the first example may start an engine, and machines differ: none is too slow
settings.register_profile("same-cases", deadline=None, derandomize=True)
settings.register_profile("new-cases", deadline=None)
settings.load_profile("same-cases")
LONGEST = (
    *("test_session_deployment", "test_deployment", "test_strict_deployment"),
    *("test_every_field", "test_boosting", "test_window_values", "test_remedies"),
    *("test_kills", "test_lateral", "test_sql_pairs", "test_hostile_server"),
    *("test_row_effects", "test_regions", "test_tables", "test_text_files"),
    *("test_end_to_end", "test_moments", "test_pushdown", "test_training"),
    *("test_derived", "test_time_runs", "test_noise", "test_absent_columns"),
    *("test_faults", "test_messages", "test_checked_types", "test_extraction"),
    *("test_suites", "test_databases", "test_split_runs", "test_csv_files"),
    *("test_api", "test_fuzz", "test_bins", "test_union_attacks", "test_memory"),
    *("test_personalised", "test_new_rows", "test_chosen_partners"),
    *("test_flights_databases", "test_scale", "test_mapping", "test_sites"),
    *("test_sealed_cutoffs", "test_sealed_cutoff_runs", "test_key_attacks"),
    "test_estimators",
)
"""Files that take longest, those that wait beside those that compute. Begun last, one
of them would be run while the other workers have nothing left to do."""


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' runs, models and sites' state apart from those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, which is not there yet."""
    folder = tmp_path / "home"
    monkeypatch.setenv(HOME_VARIABLE, str(folder))
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let all parameters of every test be run, on random cases that are new."""
    text = (
        "run every test with all its parameters, not only those of its mark `cases`, "
        "and random ones on cases that no run before it had"
    )
    parser.addoption("--whole", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Draw the cases of random tests anew with `--whole`, before any is collected."""
    if config.getoption("--whole"):
        settings.load_profile("new-cases")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare what is imported and collected, millions of objects that stay, the search
    for garbage: while that happens, and in every test that follows.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Put the files that take longest first; leave what only `--whole` runs."""
    rank = {name: position for position, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(Path(item.path).stem, len(rank)))
    if not _runs_all_files(config):
        return
    _check_cases(items)
    if config.getoption("--whole"):
        return
    left_out = [item for item in items if not _is_on_every_change(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if _is_on_every_change(item)]


def _runs_all_files(config: pytest.Config) -> bool:
    """Return whether no file is named: one that is named is run whole."""
    return not config.args or config.args == config.getini("testpaths")


def _is_on_every_change(item: pytest.Item) -> bool:
    """Return whether a case is one of those that the test's mark `cases` names."""
    mark = item.get_closest_marker("cases")
    if mark is None:
        return True
    return any(_is_named(item.callspec.id, named) for named in mark.args)


def _is_named(case: str, named: str) -> bool:
    """Return whether a mark names a case, by its id or by a pattern with a `*`."""
    return case == named or ("*" in named and fnmatchcase(case, named))


def _unknown(named: Iterable[str], existing: set[str]) -> list[str]:
    """Return what a mark names without there being such a case."""
    return sorted(
        each for each in named if not any(_is_named(case, each) for case in existing)
    )


def _check_cases(items: list[pytest.Item]) -> None:
    """Refuse a mark that names a case which its test does not have."""
    ids = defaultdict(set)
    for item in items:
        if mark := item.get_closest_marker("cases"):
            ids[item.nodeid.partition("[")[0], mark.args].add(item.callspec.id)
    for (test, named), existing in ids.items():
        if unknown := _unknown(named, existing):
            listed = ", ".join(unknown)
            raise pytest.UsageError(f"{test}: the mark cases names no case {listed}")
