"""A deployment of one site on this machine: SuperLink and SuperNode, over TLS.

Both are started by the scripts that a real deployment uses (`scripts/deploy`), in the
environment of this interpreter, and stopped when the ``with`` block ends.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tp_flower.sources.flights import flights_tables

ROOT: Final = Path(__file__).resolve().parents[3]
DEPLOY: Final = ROOT / "scripts" / "deploy"
CONNECTION: Final = "one-site"
START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 15.0


class DeploymentError(Exception):
    """A process did not start, or a run did not end well."""


@dataclass(frozen=True)
class OneSite:
    """A deployment that runs.

    Attributes:
        folder: of all that it writes.
        environment: of the operator's commands.
    """

    folder: Path
    environment: Mapping[str, str]

    def run(self, app: Path, *settings: str) -> str:
        """Run an app; return the run's log.

        Raises:
            DeploymentError: the run failed; the end of the log says how.
        """
        options = [option for setting in settings for option in ("-c", setting)]
        command = ["flwr", "run", str(app), CONNECTION, "--stream", *options]
        log = _output(command, self.environment)
        listed = _output(
            ["flwr", "ls", CONNECTION, "--format", "json"], self.environment
        )
        last = json.loads(listed)["runs"][0]
        if last["status"] != "finished:completed":
            raise DeploymentError(
                f"{last['status']}: {last['status-details']}\n{log[-3000:]}"
            )
        return log


@contextlib.contextmanager
def one_site(folder: Path) -> Iterator[OneSite]:
    """Run a SuperLink, and a SuperNode that has all tables of the flights."""
    home = Path(sys.prefix)
    environment = {
        **os.environ,
        "TP_FLOWER_VENV": str(home),
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        "FLWR_HOME": str(folder / "operator"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    certificates, key, port = folder / "certificates", folder / "node", free_port()
    superlink = f"127.0.0.1:{port}"
    _script("make_ca.sh", [certificates, "localhost"], environment)
    _script("make_node_key.sh", [key], environment)
    link = ["--certificates", certificates, "--state", folder / "link", "--port", port]
    node = [
        *("--superlink", superlink, "--ca", certificates / "ca.crt", "--key", key),
        *("--tables", write_flights(folder / "tables"), "--state", folder / "site"),
        *("--port", free_port()),
    ]
    with _running("superlink.sh", link, folder, environment):
        _wait_until_ready(port, folder / "superlink.sh.log")
        connect = [CONNECTION, superlink, certificates / "ca.crt"]
        _script("connect.sh", connect, environment)
        _script("register.sh", [CONNECTION, f"{key}.pub"], environment)
        with _running("supernode.sh", node, folder, environment):
            yield OneSite(folder, environment)


def write_flights(folder: Path) -> Path:
    """Write the flights federation as one organisation's tables; return their file."""
    folder.mkdir(parents=True)
    lines = []
    for table, files in flights_tables().items():
        for file in files.values():
            shutil.copy(file, folder / file.name)
            lines.append(
                f'[[tables.{table}.shards]]\npath = "{file.name}"\nsite = "one"\n'
            )
    path = folder / "tables.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _running(
    script: str,
    arguments: Sequence[object],
    folder: Path,
    environment: Mapping[str, str],
) -> Iterator[None]:
    """Run a script in the background, with a log of its name."""
    with (folder / f"{script}.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", str(DEPLOY / script), *map(str, arguments)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C must not reach it: it is stopped below, in order
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_SECONDS)
        # the processes that it has started are of its session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _script(
    script: str, arguments: Sequence[object], environment: Mapping[str, str]
) -> None:
    _output(["bash", str(DEPLOY / script), *map(str, arguments)], environment)


def _output(command: Sequence[str], environment: Mapping[str, str]) -> str:
    answer = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    if answer.returncode:
        words = f"{answer.stdout}\n{answer.stderr}"[-3000:]
        raise DeploymentError(f"{' '.join(command)} failed:\n{words}")
    return answer.stdout


def _wait_until_ready(port: int, log: Path) -> None:
    """Wait for a process to listen on a port of loopback."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port)),
        ):
            return
        time.sleep(0.1)
    words = log.read_text(encoding="utf-8", errors="replace")[-3000:]
    raise DeploymentError(f"nothing listens on port {port}:\n{words}")
