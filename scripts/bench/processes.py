"""Measurements in processes of their own, so that peak memory can be compared."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any


def in_process_of_its_own(script: str, argument: object) -> dict[str, Any]:
    """Run a script with one argument; return the JSON of its last line.

    Args:
        script: its path.
        argument: as it is if it is a text, else as JSON.

    Raises:
        RuntimeError: it failed; the message has the end of what it wrote.
    """
    text = argument if isinstance(argument, str) else json.dumps(argument)
    result = subprocess.run(
        [sys.executable, str(Path(script).resolve()), text],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        message = f"the measurement {text} failed:\n{result.stderr[-2000:]}"
        raise RuntimeError(message)
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def peak_memory() -> int:
    """Return the most memory that this process has had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss starts at the parent's there, and cannot be made to forget
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Let the peak start from what is in use now, where the system can do that."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")
