"""Plant faults into the product, one at a time, and see whether the tests catch them.

    python scripts/checks/plant_faults.py                      all faults
    python scripts/checks/plant_faults.py --only NAME ...      some of them
    python scripts/checks/plant_faults.py --json FILE          keep what came of it
    python scripts/checks/plant_faults.py --against FILE       caught then, and not now?

Every fault of ``fault_list.py`` is made in a copy of the checkout, and the test files
that it names are run there until the first of their tests fails. They are run without
a fault first: they must pass then.

What becomes of a fault: ``caught`` (a test fails), ``missed`` (all pass), ``late`` (the
time limit was over), or ``stale`` (its snippet is not found exactly once, or no tests
were run).

Exit status: 0 all faults are caught (with ``--against``: all that were caught then),
1 some are not, 2 the tests fail without a fault.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue

import hypothesis

from scripts.checks.fault_list import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tp_flower", "strategies", "client_apps")
CAUGHT, MISSED, LATE, STALE = "caught", "missed", "late", "stale"
SECONDS = 180.0
"""Time limit of a fault's tests."""
CLEAN_SECONDS = 3600.0
PASSED, FAILED = 0, 1
"""Exit status of pytest."""


def pytest_configure() -> None:
    """Have hypothesis take the same examples in every run, and shrink none.

    Called by pytest in the runs of the tests, whose plugin this script is.
    """
    usual = hypothesis.settings.get_profile("ci")
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("faults", parent=usual, phases=phases)
    hypothesis.settings.load_profile("faults")


class StaleFaultError(Exception):
    """The list of faults does not fit the code any more."""


@dataclass(frozen=True)
class Verdict:
    """What became of a fault.

    Attributes:
        name: of the fault.
        status: ``caught``, ``missed``, ``late`` or ``stale``.
        seconds: that it took.
        detail: the first test that failed, or why the fault is stale.
    """

    name: str
    status: str
    seconds: float
    detail: str = ""

    def __str__(self) -> str:
        text = f"{self.status:7} {self.seconds:6.1f} s  {self.name}"
        return f"{text}  ({self.detail})" if self.detail else text


def find_snippet(fault: Fault, root: Path = ROOT) -> Path:
    """Return the one product file that has the fault's snippet.

    Raises:
        StaleFaultError: the snippet is not there, or more than once.
    """
    counts = {
        path: path.read_text(encoding="utf-8").count(fault.old)
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
        if fnmatch(path.relative_to(root).as_posix(), fault.file)
    }
    places = [path for path, count in counts.items() for _ in range(count)]
    if len(places) != 1:
        listed = ", ".join(str(path.relative_to(root)) for path in places)
        raise StaleFaultError(
            f"the snippet is found {len(places)} times ({listed or 'nowhere'}): "
            f"{fault.old!r}"
        )
    return places[0]


def find_tests(patterns: Sequence[str], root: Path = ROOT) -> list[str]:
    """Return the test files whose names match, relative to the root.

    Raises:
        StaleFaultError: a pattern matches no file.
    """
    paths = sorted((root / "tests").rglob("test_*.py"))
    chosen: list[str] = []
    for pattern in patterns:
        matches = [path for path in paths if fnmatch(path.name, pattern)]
        if not matches:
            raise StaleFaultError(f"no test file is called {pattern!r}")
        chosen += [path.relative_to(root).as_posix() for path in matches]
    return list(dict.fromkeys(chosen))


@contextmanager
def checkout_copy() -> Iterator[Path]:
    """Yield a copy of the checkout's files, those not committed included."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    with tempfile.TemporaryDirectory(prefix="tp_flower-faults-") as folder:
        for name in filter(None, listed.split("\0")):
            source, target = ROOT / name, Path(folder) / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        yield Path(folder)


@contextmanager
def planted(fault: Fault, copy: Path) -> Iterator[None]:
    """Have the fault in a copy of the checkout."""
    path = find_snippet(fault, copy)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def run_tests(
    copy: Path, tests: Sequence[str], seconds: float, *options: str
) -> tuple[int, str]:
    """Run test files in a copy; return pytest's exit status and its output.

    Raises:
        subprocess.TimeoutExpired: the time limit is over.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        # a cached module of before the fault must not be taken for that of after it
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "--tb=no"]
    command += [
        "-p",
        "no:cacheprovider",
        "-p",
        "scripts.checks.plant_faults",
        *options,
        *tests,
    ]
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException:
            # tests start processes of their own, which go with the group
            os.killpg(process.pid, 9)
            raise
    return process.returncode, output


def run_in_turn(copy: Path, tests: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run test files one after the other, up to the first that does not pass."""
    status, output = PASSED, ""
    for test in tests:
        status, output = run_tests(copy, [test], seconds, "-x")
        if status != PASSED:
            break
    return status, output


def try_fault(fault: Fault, copy: Path, seconds: float, *, all_tests: bool) -> Verdict:
    """Plant a fault, run its tests, and take the fault out again."""
    started = time.perf_counter()

    def verdict(status: str, detail: str = "") -> Verdict:
        return Verdict(fault.name, status, time.perf_counter() - started, detail)

    try:
        tests = find_tests(fault.tests, copy)
        with planted(fault, copy):
            status, output = run_in_turn(copy, tests, seconds)
            if status == PASSED and all_tests:
                status, output = run_tests(copy, ["tests"], CLEAN_SECONDS, "-x")
    except StaleFaultError as error:
        return verdict(STALE, str(error))
    except subprocess.TimeoutExpired:
        return verdict(LATE)
    if status == PASSED:
        return verdict(MISSED)
    if status == FAILED:
        return verdict(CAUGHT, first_failure(output))
    return verdict(STALE, f"pytest ended with {status}: {output.strip()[-300:]}")


def first_failure(output: str) -> str:
    """Return the name of the first test that failed, as pytest lists it."""
    listed = [line.split() for line in output.splitlines()]
    return next((line[1] for line in listed if line[:1] in (["FAILED"], ["ERROR"])), "")


def try_faults(
    faults: Sequence[Fault], jobs: int, seconds: float, *, all_tests: bool
) -> Iterator[Verdict]:
    """Try faults in as many copies of the checkout as there are jobs."""
    copies: SimpleQueue[Path] = SimpleQueue()

    def attempt(fault: Fault) -> Verdict:
        copy = copies.get()
        try:
            return try_fault(fault, copy, seconds, all_tests=all_tests)
        finally:
            copies.put(copy)

    with ExitStack() as made, ThreadPoolExecutor(jobs) as pool:
        for _ in range(jobs):
            copies.put(made.enter_context(checkout_copy()))
        yield from pool.map(attempt, faults)


def run_without_fault(faults: Sequence[Fault]) -> str:
    """Return what pytest says of the faults' tests if they fail as things are."""
    tests: list[str] = []
    for fault in faults:
        # what does not match any more is reported with its fault
        with suppress(StaleFaultError):
            tests += find_tests(fault.tests)
    with checkout_copy() as copy:
        status, output = run_tests(copy, list(dict.fromkeys(tests)), CLEAN_SECONDS)
    return "" if status == PASSED else output


def choose(names: Sequence[str]) -> list[Fault]:
    """Return the faults of the given names, or all of them.

    Raises:
        ValueError: there is no fault of such a name.
    """
    by_name = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"no fault is called {', '.join(unknown)}: see --list")
    return [by_name[name] for name in names] if names else list(FAULTS)


def lost(verdicts: Sequence[Verdict], before: Mapping[str, str]) -> list[str]:
    """Return the faults that were caught before and are not now."""
    now = {verdict.name: verdict.status for verdict in verdicts}
    caught = [name for name, status in before.items() if status == CAUGHT]
    return [name for name in caught if now.get(name, CAUGHT) != CAUGHT]


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return how many faults came to what."""
    counts = Counter(verdict.status for verdict in verdicts)
    seconds = sum(verdict.seconds for verdict in verdicts)
    listed = ", ".join(
        f"{counts[each]} {each}" for each in (CAUGHT, MISSED, LATE, STALE)
    )
    return f"{len(verdicts)} faults: {listed}; {seconds:.0f} s of tests"


def read_verdicts(path: Path) -> dict[str, str]:
    """Return the status of each fault in a file that ``--json`` has written."""
    return {each["name"]: each["status"] for each in json.loads(path.read_text())}


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the faults' names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts")
    parser.add_argument("--against", type=Path, metavar="FILE", help="earlier verdicts")
    parser.add_argument(
        "--all-tests", action="store_true", help="run the whole suite for a missed one"
    )
    parser.add_argument(
        "--no-clean-run", action="store_true", help="do not run the tests without fault"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Try the faults that are asked for; return the exit status."""
    options = parsed(arguments)
    try:
        faults = choose(options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(fault.name for fault in faults))
        return 0
    if not options.no_clean_run and (failures := run_without_fault(faults)):
        print(f"{failures}\nthe tests fail without a fault", file=sys.stderr)
        return 2
    verdicts = []
    for verdict in try_faults(
        faults, options.jobs, options.seconds, all_tests=options.all_tests
    ):
        print(verdict, flush=True)
        verdicts.append(verdict)
    print(summary(verdicts))
    if options.json:
        text = json.dumps([asdict(verdict) for verdict in verdicts], indent=1)
        options.json.write_text(f"{text}\n", encoding="utf-8")
    if options.against:
        gone = lost(verdicts, read_verdicts(options.against))
        print(f"caught before and not now: {', '.join(gone) or 'none'}")
        return int(bool(gone))
    return int(any(verdict.status != CAUGHT for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
