"""The project's root, and how its scripts are run."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    seconds: float | None = None,
) -> tuple[int, str]:
    """Run Python in a folder; return its exit status and output.

    Raises:
        subprocess.TimeoutExpired: the time limit is over.
    """
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException:
            # what it has started goes with the group; without a limit it may clean up
            os.killpg(process.pid, signal.SIGKILL if seconds else signal.SIGTERM)
            raise
    return process.returncode, output
