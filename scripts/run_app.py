"""Run `tp-flower` through Flower, with a SuperLink of its own.

    python scripts/run_app.py train [FILE] [--set key=value] [...]

A local SuperLink that is already running has its own environment. So this starts one on
a free port, with its own FLWR_HOME, and stops it after the run.

Exit status: that of `tp-flower`.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# beside the interpreter, without resolving links: in an environment it is a link
BIN = Path(sys.executable).parent
# Use the installed packages, and leave the network alone. The last one lets simulated
# sites see a GPU.
ENVIRONMENT = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
STARTUP_SECONDS = 60.0
STOP_SECONDS = 15.0
LOG_LINES = 20


class RunError(Exception):
    """The SuperLink could not be started."""


def main(arguments: Sequence[str]) -> int:
    """Run the command with `--flower`; return its exit status."""
    command = [sys.executable, "-m", "tp_flower.command_line", *arguments, "--flower"]
    try:
        with (
            private_superlink() as environment,
            subprocess.Popen(command, env=environment) as run,
        ):
            # Ctrl-C reaches the command too, which stops the run; a polite kill is like
            # it
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, lambda *_: run.send_signal(signal.SIGINT))
            return run.wait()
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def private_superlink() -> Iterator[Mapping[str, str]]:
    """Run a SuperLink for simulations; give the environment in which flwr finds it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(
        prefix="tp-flower-", ignore_cleanup_errors=True
    ) as home:
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "FLWR_HOME": home,
            # flwr looks for its local SuperLink here and starts none if it answers
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port,
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        log = Path(home) / "superlink.log"
        address = ("--host", "127.0.0.1", "--port", port)
        with log.open("wb") as file:
            process = subprocess.Popen(
                [BIN / "flower-superlink", "--insecure", "--simulation", *address],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Ctrl-C must not reach it: it is stopped below, in order
                start_new_session=True,
            )
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}/health", log)
            yield environment
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=1).close()
            return
        time.sleep(0.1)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = "\n".join(lines[-LOG_LINES:])
    raise RunError(f"the local SuperLink did not start. Its last words:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the SuperLink and what it started.

    After a run only its executor is left, which ends by itself. The simulation of an
    interrupted run would go on for a minute before it misses the SuperLink.
    """
    children = descendants(process.pid)
    process.terminate()
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def descendants(ancestor: int) -> list[int]:
    """Return the ids of the processes under this one; none where there is no `ps`."""
    try:
        listing = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid="], text=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    family = [ancestor]
    pairs = [tuple(map(int, line.split())) for line in listing.splitlines()]
    for parent in family:
        family += [pid for pid, its_parent in pairs if its_parent == parent]
    return family[1:]


if __name__ == "__main__":
    # a polite kill is like Ctrl-C, so that the SuperLink is stopped
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
