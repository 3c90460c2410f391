"""A test runs with the cases of its mark on every change, and with all by `--whole`."""

import pytest

from tests.support.files import ROOT

pytest_plugins = ["pytester"]
TEST = """
import pytest

@pytest.mark.cases("one", "{named}")
@pytest.mark.parametrize("x", [1, 2, 3], ids=["one", "two", "three"])
def test_number(x):
    assert x

def test_other():
    pass
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """A suite with the project's hooks, whose one test has three cases."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(
        "from tests.conftest import pytest_addoption, pytest_collection_modifyitems"
    )
    pytester.makeini(
        "[pytest]\ntestpaths = .\nmarkers = cases: the cases of every change\n"
    )
    pytester.makepyfile(test_numbers=TEST.format(named="three"))
    return pytester


def test_every_change_takes_the_named_cases_and_whole_takes_all(suite):
    suite.runpytest_inprocess().assert_outcomes(passed=3, deselected=1)
    suite.runpytest_inprocess("--whole").assert_outcomes(passed=4)
    suite.runpytest_inprocess("test_numbers.py").assert_outcomes(passed=4)


def test_a_pattern_names_the_cases_that_it_matches(suite):
    suite.makepyfile(test_numbers=TEST.format(named="t*"))
    suite.runpytest_inprocess().assert_outcomes(passed=4)


@pytest.mark.parametrize("named", ["four", "f*", "[t]wo"])
def test_a_case_that_does_not_exist_is_refused(suite, named):
    suite.makepyfile(test_numbers=TEST.format(named=named))
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if "the mark cases" in line]
    assert line.endswith(f"test_number: the mark cases names no case {named}")
