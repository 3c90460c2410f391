"""Plant faults into the product, one at a time, and see whether the tests catch them.

    python scripts/checks/plant_faults.py                      all faults
    python scripts/checks/plant_faults.py --only NAME ...      some of them
    python scripts/checks/plant_faults.py --json FILE          write the verdicts
    python scripts/checks/plant_faults.py --against FILE       caught then, and not now?

Every fault of ``faults.toml`` is made in a copy of the checkout, and the test files
that it names are run there until the first of their tests fails. They are run without
a fault first: they must pass then.

What becomes of a fault: ``caught`` (a test fails), ``missed`` (all pass), ``late`` (the
time limit was over), or ``stale`` (its fragment is not found exactly once, or no tests
were run). It takes hours: the tests of the project look only whether all faults fit.

Exit status: 0 all faults are caught (with ``--against``: all that were caught then),
1 some are not, 2 the tests fail without a fault.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import hypothesis

from scripts.checks.checkouts import ROOT, run_python
from scripts.checks.faults import (
    Fault,
    StaleFaultError,
    find_scope,
    plant,
    read_faults,
)

CAUGHT, MISSED, LATE, STALE = "caught", "missed", "late", "stale"
SECONDS = 180.0
"""Time limit of a test file with a fault."""
PASSED, FAILED = 0, 1
"""Exit status of pytest."""


@dataclass(frozen=True)
class Verdict:
    """What became of a fault; ``detail`` is the first failure, or why it is stale."""

    name: str
    status: str
    seconds: float
    detail: str = ""

    def __str__(self) -> str:
        text = f"{self.status:7} {self.seconds:6.1f} s  {self.name}"
        return f"{text}  ({self.detail})" if self.detail else text


def pytest_configure() -> None:
    """Have hypothesis take the same examples in every run, and shrink none.

    Called by pytest in the runs of the tests, whose plugin this script is.
    """
    usual = hypothesis.settings.get_profile("ci")
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("faults", parent=usual, phases=phases)
    hypothesis.settings.load_profile("faults")


def find_tests(patterns: Sequence[str], root: Path = ROOT) -> list[str]:
    """Return the test files whose paths end as one of the patterns, below the root."""
    paths = _test_files(root)
    tests: dict[str, None] = {}
    for pattern in patterns:
        matches = [path.as_posix() for path in paths if path.match(pattern)]
        if not matches:
            raise StaleFaultError(f"no test file is called {pattern!r}")
        tests |= dict.fromkeys(matches)
    return list(tests)


@cache
def _test_files(root: Path) -> list[Path]:
    return sorted(path.relative_to(root) for path in root.glob("tests/**/test_*.py"))


@contextmanager
def checkout_copy() -> Iterator[Path]:
    """Yield a copy of the checkout's files, those not committed included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    files = [name for name in listed if (ROOT / name).is_file()]
    with tempfile.TemporaryDirectory(prefix="tp_flower-faults-") as folder:
        subprocess.run(["cp", "-p", "--parents", *files, folder], cwd=ROOT, check=True)
        yield Path(folder)


@contextmanager
def planted(fault: Fault, copy: Path) -> Iterator[None]:
    """Have the fault in a copy of the checkout."""
    scope = find_scope(fault, copy)
    path, text = scope.path, scope.path.read_text(encoding="utf-8")
    path.write_text(plant(fault, scope), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def run_tests(copy: Path, tests: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run test files until one fails; return pytest's exit status and its output."""
    environment = {
        "PYTHONPATH": str(copy),
        # a cached module of before the fault must not be taken for that of after it
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = ("-q", "-x", "-m", "", "--tb=no", "-p", "no:cacheprovider")
    plugin = ("-p", "scripts.checks.plant_faults")
    command = ("-m", "pytest", *options, *plugin, *tests)
    return run_python(command, copy, environment, seconds)


def try_fault(fault: Fault, copy: Path, seconds: float) -> Verdict:
    """Plant a fault, run its tests for as long each, and take the fault out again."""
    started = time.perf_counter()
    status, detail = CAUGHT, ""
    try:
        tests = find_tests(fault.tests, copy)
        with planted(fault, copy):
            code, output = run_tests(copy, tests, seconds * len(tests))
        if code == FAILED:
            failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            detail = next(iter(failures), "")
        elif code == PASSED:
            status = MISSED
        else:
            status, detail = STALE, f"pytest ended with {code}: {output.strip()[-300:]}"
    except StaleFaultError as error:
        status, detail = STALE, str(error)
    except subprocess.TimeoutExpired:
        status = LATE
    return Verdict(fault.name, status, time.perf_counter() - started, detail)


def lost(verdicts: Sequence[Verdict], path: Path) -> list[str]:
    """Return the faults that were caught in the file of ``--json`` and are not now."""
    now = {verdict.name: verdict.status for verdict in verdicts}
    before = [v["name"] for v in json.loads(path.read_text()) if v["status"] == CAUGHT]
    return [name for name in before if now.get(name, CAUGHT) != CAUGHT]


def main(arguments: Sequence[str]) -> int:
    """Try the faults of the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    by_name = {fault.name: fault for fault in read_faults()}
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", choices=by_name, default=list(by_name))
    add("--json", type=Path, metavar="FILE", help="write the verdicts")
    add("--against", type=Path, metavar="FILE", help="earlier verdicts")
    options = parser.parse_args(arguments)
    faults = [by_name[name] for name in options.only]
    verdicts = []
    with checkout_copy() as copy:
        tests = {test for fault in faults for test in find_tests(fault.tests, copy)}
        code, output = run_tests(copy, sorted(tests), SECONDS * len(tests))
        if code != PASSED:
            print(f"{output}\nthe tests fail without a fault", file=sys.stderr)
            return 2
        for fault in faults:
            verdicts.append(try_fault(fault, copy, SECONDS))
            print(verdicts[-1], flush=True)
    counts = Counter(verdict.status for verdict in verdicts)
    listed = ", ".join(f"{number} {status}" for status, number in counts.items())
    print(f"{len(verdicts)} faults: {listed}")
    if options.json:
        text = json.dumps([asdict(verdict) for verdict in verdicts], indent=1)
        options.json.write_text(f"{text}\n", encoding="utf-8")
    if options.against:
        gone = lost(verdicts, options.against)
        print(f"caught before and not now: {', '.join(gone) or 'none'}")
        return int(bool(gone))
    return int(any(verdict.status != CAUGHT for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
