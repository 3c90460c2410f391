"""The list of faults fits the code, and the runner tells what became of each."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.checks import plant_faults
from scripts.checks.plant_faults import (
    CAUGHT,
    LATE,
    MISSED,
    STALE,
    Fault,
    StaleFaultError,
    Verdict,
)

FAULT = Fault("sum", "a + b", "a - b", ("test_adding.py",))
TEST = (
    "from tp_flower.adding import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A product of one function with its test."""
    for folder, name, text in (
        ("tp_flower", "adding.py", "def add(a, b):\n    return a + b\n"),
        ("tests", "test_adding.py", TEST),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
        (tmp_path / folder / name).write_text(text)
    (tmp_path / "scripts").symlink_to(plant_faults.ROOT / "scripts")
    return tmp_path


@pytest.mark.parametrize(
    "fault", plant_faults.read_faults(), ids=lambda fault: fault.name
)
def test_a_fault_fits_the_code(fault: Fault) -> None:
    path = plant_faults.find_snippet(fault)
    assert plant_faults.find_tests(fault.tests)
    assert fault.new != fault.old
    ast.parse(plant_faults.plant(fault, path))


def test_names_are_unique() -> None:
    names = [fault.name for fault in plant_faults.read_faults()]
    assert sorted(set(names)) == sorted(names)
    assert len(names) >= 44


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (FAULT, CAUGHT),
        (replace(FAULT, new="b + a"), MISSED),
        (replace(FAULT, new="add(a, b) if __import__('time').sleep(300) else 0"), LATE),
        (replace(FAULT, old="a * b"), STALE),
        (replace(FAULT, tests=("test_gone.py",)), STALE),
        (replace(FAULT, new="a +"), STALE),
    ],
)
def test_what_becomes_of_a_fault(copy: Path, fault: Fault, status: str) -> None:
    before = (copy / "tp_flower" / "adding.py").read_text()
    seconds = 10.0 if status == LATE else 200.0
    verdict = plant_faults.try_fault(fault, copy, seconds)
    assert verdict.status == status, verdict.detail
    assert ("::test_add" in verdict.detail) == (status == CAUGHT)
    assert (copy / "tp_flower" / "adding.py").read_text() == before


def test_a_snippet_of_two_files_needs_a_file(copy: Path) -> None:
    (copy / "tp_flower" / "twin.py").write_text("a + b\n")
    with pytest.raises(StaleFaultError, match="found 2 times"):
        plant_faults.find_snippet(FAULT, copy)
    assert (
        plant_faults.find_snippet(replace(FAULT, file="*/twin.py"), copy).name
        == "twin.py"
    )


def test_verdicts_are_compared_with_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    before = {"a": CAUGHT, "b": CAUGHT, "c": MISSED, "renamed": CAUGHT}
    path.write_text(json.dumps([{"name": n, "status": s} for n, s in before.items()]))
    statuses = {"a": CAUGHT, "b": MISSED, "c": LATE}
    now = [Verdict(name, status, 1.0) for name, status in statuses.items()]
    assert plant_faults.lost(now, path) == ["b"]
