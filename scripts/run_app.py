"""Run the Flower app and tell by the exit status whether the run succeeded.

    python scripts/run_app.py [--note-output FILE] [arguments of flwr run]

`flwr run --stream` exits 0 also when the run failed, and a local SuperLink that is
already running has its own environment. So this starts a SuperLink of its own on a free
port, with its own FLWR_HOME, lets `flwr run` stream the log, asks for the run's true
status and stops the SuperLink.

Exit status: 0 completed, 1 failed, 2 refused before it started.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tp_flower.errors import SettingsError
from tp_flower.reports.records import REPORT_LINE
from tp_flower.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
# beside the interpreter, without resolving links: in an environment it is a link
BIN = Path(sys.executable).parent
FLWR = str(BIN / "flwr")
DEFAULT_FEDERATION = "num-supernodes=5 client-resources-num-cpus=1"
STARTUP_SECONDS = 60.0
STOP_SECONDS = 15.0
STATUS_SECONDS = 60.0
LOG_LINES = 20

# Use the installed packages at every run instead of installing the app's dependencies,
# and leave the network alone. The last one lets simulated sites see a GPU.
FLOWER_ENVIRONMENT = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONUNBUFFERED": "1",
}
# lines of Flower's that tell a user of this script nothing
NOISE = re.compile(
    r"default simulated SuperNodes changed|To change federation size"
    r"|flwr federation simulation-config|Flower configuration not found"
    r"|^(\x1b\[\d+m)?INFO\s*(\x1b\[0m)?\s*:\s*$"
)
_KEY_VALUE = re.compile(r"""\S+?=('[^']*'|"[^"]*"|\S+)""")


class RunError(Exception):
    """The run could not be started or followed."""


def main(arguments: Sequence[str]) -> int:
    """Run the app with the arguments of `flwr run`; return the exit status."""
    options, flower_arguments = _parse(arguments)
    try:
        check_run_config(options.run_config)
        with private_superlink() as environment:
            output_dir = _run(environment, flower_arguments)
    except (SettingsError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    if options.note_output and output_dir:
        options.note_output.write_text(f"{output_dir}\n", encoding="utf-8")
    return 0


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the arguments of `flwr run`."""
    parser = argparse.ArgumentParser(
        description="Run the Flower app; every other option goes to `flwr run`.", allow_abbrev=False
    )
    add = parser.add_argument
    text = "write the run's output folder to this file"
    add("--note-output", type=Path, metavar="FILE", help=text)
    text = """settings: 'key=value key="text"', or one TOML file"""
    add("-c", "--run-config", action="append", default=[], help=text)
    text = "size of the simulation (default: %(default)s)"
    add("--federation-config", default=DEFAULT_FEDERATION, help=text)
    options, others = parser.parse_known_args(arguments)
    settings = [part for text in options.run_config for part in ("-c", text)]
    federation = ["--federation-config", options.federation_config]
    return options, [*settings, *federation, *others]


def check_run_config(texts: Sequence[str]) -> None:
    """Refuse what Flower would refuse without a word about the key, or overlook."""
    # imported here: --help and the tests of other parts need no Flower
    import click
    from flwr.common.config import parse_config_args

    for text in texts:
        # Flower overlooks what does not look like this, such as `a = 1`
        if not text.endswith(".toml") and _KEY_VALUE.sub("", text).strip():
            raise SettingsError(f"-c {text!r}: write key=value without spaces around =")
    try:
        config = parse_config_args(list(texts))
    except (OSError, ValueError, click.ClickException) as error:
        raise SettingsError(
            f"the run config {' '.join(texts)!r} cannot be read: {error}"
        ) from error
    Settings.from_run_config(config)


@contextlib.contextmanager
def private_superlink() -> Iterator[Mapping[str, str]]:
    """Run a SuperLink for simulations; give the environment in which flwr finds it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="tp-flower-", ignore_cleanup_errors=True) as home:
        environment = {
            **os.environ,
            **FLOWER_ENVIRONMENT,
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


def _run(environment: Mapping[str, str], arguments: Sequence[str]) -> str:
    """Stream a run without noise; return its output folder, "" if it named none."""
    output_dir = ""
    try:
        with subprocess.Popen(
            [FLWR, "run", ROOT, "--stream", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        ) as process:
            for line in process.stdout or ():
                if line.startswith(REPORT_LINE):
                    report = Path(line.removeprefix(REPORT_LINE).strip())
                    output_dir = str(report.parent)
                if not NOISE.search(line):
                    print(line, end="", flush=True)
    except KeyboardInterrupt:
        for run in list_runs(environment):
            stop = [FLWR, "stop", run["run-id"]]
            subprocess.run(stop, env=environment, capture_output=True, check=False)
        raise RunError("interrupted; the run was stopped") from None
    status, details = _final_status(environment)
    if status != "finished:completed":
        raise RunError(f"the run ended as {status}: {details}")
    return output_dir


def _final_status(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the run's status and details once it has finished."""
    deadline = time.monotonic() + STATUS_SECONDS
    while runs := list_runs(environment):
        status, details = runs[0]["status"], runs[0]["status-details"]
        if status.startswith("finished") or time.monotonic() > deadline:
            return status, details
        time.sleep(0.5)
    return "not started", "flwr run refused it, see above"


def list_runs(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the runs of the SuperLink: one at most, as it is private."""
    command = [FLWR, "ls", "--format", "json"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    try:
        runs: list[dict[str, str]] = json.loads(done.stdout)["runs"]
    except (ValueError, KeyError):
        return []
    return runs


if __name__ == "__main__":
    # a polite kill is like Ctrl-C, so that the SuperLink is stopped
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
