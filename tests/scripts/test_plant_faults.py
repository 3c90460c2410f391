"""The list of faults fits the code, and the runner tells what became of each."""

import ast
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.checks import faults, plant_faults
from scripts.checks.faults import Fault, StaleFaultError
from scripts.checks.plant_faults import CAUGHT, LATE, MISSED, STALE, Verdict

FAULT = Fault("sum", "add", "a + b", "a - b", ("test_adding.py",))
SOURCE = """
class Sums:
    def add(self, a, b):
        # a comment
        return (a
                + b)

def add(a, b):
    text = f"{a} plus {b}"
    return a + b

LIMIT = 3
"""
TEST = (
    "from tp_flower.adding import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A product of one module with its test."""
    for folder, name, text in (
        ("tp_flower", "adding.py", SOURCE),
        ("tests", "test_adding.py", TEST),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
        (tmp_path / folder / name).write_text(text)
    (tmp_path / "scripts").symlink_to(plant_faults.ROOT / "scripts")
    return tmp_path


def test_all_faults_fit_the_code():
    stale = []
    listed = faults.read_faults()
    for fault in listed:
        try:
            faults.find_scope(fault)
            assert plant_faults.find_tests(fault.tests)
            assert fault.new != fault.old
        except StaleFaultError as error:
            stale.append(f"{fault.name}: {error}")
    assert stale == []
    names = Counter(fault.name for fault in listed)
    assert max(names.values()) == 1
    assert len(names) > 200


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (FAULT, "    return a - b"),
        (replace(FAULT, function="Sums.add"), "        return a - b"),
        # statements, of a function and of a module
        (replace(FAULT, old="return a + b", new="return\n"), "    return"),
        (replace(FAULT, function="adding.py", old="LIMIT = 3", new="LIMIT = 4"), None),
        # an operator of higher precedence keeps its operands
        (replace(FAULT, old="a", new="a - b", function="Sums.add"), None),
        (replace(FAULT, old="{a}  plus", new="{a} minus", is_text=True), None),
    ],
)
def test_a_fault_replaces_its_fragment_whatever_the_layout(copy, fault, line):
    planted = faults.plant(fault, faults.find_scope(fault, copy))
    before = ast.dump(ast.parse(SOURCE))
    assert ast.dump(ast.parse(planted)) != before
    if line is not None:
        assert line in planted.splitlines()
    # the tree of the file is as it was
    assert ast.dump(faults.find_scope(fault, copy).tree) == before


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (replace(FAULT, old="a * b"), "found 0 times in the 1 that are called 'add'"),
        (replace(FAULT, old="b"), "found 2 times in the 1"),
        (replace(FAULT, function="gone"), "found 0 times in the 0"),
        (replace(FAULT, old="a +"), "a fragment is no Python"),
        (replace(FAULT, new="a +"), "a fragment is no Python"),
    ],
)
def test_a_fault_that_does_not_fit_is_stale(copy, fault, message):
    with pytest.raises(StaleFaultError, match=message):
        faults.find_scope(fault, copy)
    assert plant_faults.try_fault(fault, copy, 1.0).status == STALE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (FAULT, CAUGHT),
        (replace(FAULT, new="b + a"), MISSED),
        (replace(FAULT, new="add(a, b) if __import__('time').sleep(300) else 0"), LATE),
        (replace(FAULT, tests=("test_gone.py",)), STALE),
    ],
)
def test_what_becomes_of_a_fault(copy, fault, status):
    before = (copy / "tp_flower" / "adding.py").read_text()
    seconds = 3.0 if status == LATE else 200.0
    verdict = plant_faults.try_fault(fault, copy, seconds)
    assert verdict.status == status, verdict.detail
    assert ("::test_add" in verdict.detail) == (status == CAUGHT)
    assert (copy / "tp_flower" / "adding.py").read_text() == before


def test_verdicts_are_compared_with_earlier_ones(tmp_path):
    path = tmp_path / "before.json"
    before = {"a": CAUGHT, "b": CAUGHT, "c": MISSED, "renamed": CAUGHT}
    path.write_text(json.dumps([{"name": n, "status": s} for n, s in before.items()]))
    statuses = {"a": CAUGHT, "b": MISSED, "c": LATE}
    now = [Verdict(name, status, 1.0) for name, status in statuses.items()]
    assert plant_faults.lost(now, path) == ["b"]
