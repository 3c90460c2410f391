"""The file of a benchmark: what every suite found, on which machine, and when.

Schema of `benchmark.json`::

    schema   1
    suites   {name: {date, seconds, machine: {platform, processor, cores, memory-gib},
                     versions: {library: version},
                     checks: [{name, measured, limit, unit, is-met}],
                     facts: {name: figure}, curves: {title: {method: [value]}}}}
    failed   {name: error}      suites that ended in an error in the last command

Numbers that are not finite are null.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.bench.runs import Outcome
from tp_flower.reports.records import plain

SCHEMA = 1
RESULTS_FILE = "benchmark.json"
LIBRARIES = ("duckdb", "flwr", "numpy", "scikit-learn", "scipy", "torch")
SIGNIFICANT_DIGITS = 6

Results = dict[str, Any]
"""The content of the file, in JSON types."""


def new_results() -> Results:
    """Return the results of no suite."""
    return {"schema": SCHEMA, "suites": {}, "failed": {}}


def read_results(path: Path) -> Results:
    """Return the results in a file.

    Raises:
        ValueError: the file is not of this schema.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    found = content.get("schema") if isinstance(content, dict) else None
    if found != SCHEMA:
        raise ValueError(f"{path}: schema {found!r}, not {SCHEMA}: run it anew")
    return dict(content)


def write_results(path: Path, results: Results) -> None:
    """Write the file; a reader sees the old one or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, allow_nan=False) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    # mkstemp makes the file private; results are as readable as their folder
    Path(temporary).chmod(0o644)
    Path(temporary).replace(path)


def put_outcome(results: Results, name: str, outcome: Outcome, seconds: float) -> None:
    """Enter what a suite found, in place of what it found before."""
    content = {
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        "machine": machine(),
        "versions": {library: version(library) for library in LIBRARIES},
        **outcome.to_json(),
    }
    results["suites"][name] = rounded(plain(content))
    results["failed"].pop(name, None)


def put_failure(results: Results, name: str, error: Exception) -> None:
    """Enter that a suite ended in an error; what it found before stays."""
    results["failed"][name] = f"{type(error).__name__}: {error}"


def machine() -> dict[str, object]:
    """Return what the figures depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "platform": platform.platform(terse=True),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory-gib": round(memory / 2**30),
        "python": platform.python_version(),
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    named = [line for line in lines if line.startswith("model name")]
    return named[0].partition(":")[2].strip() if named else platform.machine()


def rounded(value: object) -> object:
    """Return JSON content with every float to six digits.

    >>> rounded({"a": [0.123456789, 3]})
    {'a': [0.123457, 3]}
    """
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    return value
