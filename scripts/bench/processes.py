"""Measurements in processes of their own, so that peak memory can be compared.

Imports nothing of the project: a measured process must not carry more than it uses.
"""

import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
STATUS: Final = Path("/proc/self/status")


def in_process_of_its_own(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of a module in a fresh process; arguments and result are JSON.

    Raises:
        RuntimeError: it failed; the message has the end of what it wrote.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__, name, json.dumps(arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the measurement {name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def spent() -> Iterator[dict[str, float]]:
    """Yield figures that the block's seconds, CPU seconds and peak memory are put into.

    ``peak-mib`` is the most memory over what the process had before. A ``seconds`` or
    ``cpu-seconds`` that the block put there itself is kept.
    """
    clear_refs = Path("/proc/self/clear_refs")
    if clear_refs.exists():
        clear_refs.write_text("5")  # the peak starts from what is in use now
    before, figures = peak_memory(), dict[str, float]()
    started, cpu_started = time.perf_counter(), time.process_time()
    yield figures
    figures.setdefault("seconds", time.perf_counter() - started)
    figures.setdefault("cpu-seconds", time.process_time() - cpu_started)
    figures["peak-mib"] = (peak_memory() - before) / 2**20


def peak_memory() -> int:
    """Return the most memory that this process has had, in bytes."""
    if STATUS.exists():
        # ru_maxrss starts at the parent's there, and cannot be made to forget
        return status_bytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def status_bytes(name: str) -> int:
    """Return a figure of this process's memory, by its name in Linux's status file."""
    lines = STATUS.read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    measured = getattr(importlib.import_module(module), function)
    print(json.dumps(measured(*json.loads(sys.argv[2]))))
