"""A real deployment on loopback: a SuperLink over TLS, SuperNodes with their own keys.

It is started by the scripts of ``scripts/deploy``, on free ports, below one folder.
"""

import contextlib
import getpass
import json
import os
import re
import secrets
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from scripts.run_app import ROOT, descendants
from tp_flower.settings.run_config import run_config_text

SCRIPTS = ROOT / "scripts" / "deploy"
CONNECTION = "demo"
# what a busy machine takes: they say when nothing more is to be expected
SECONDS_TO_START = 300.0
SECONDS_TO_STOP = 60.0
# a killed SuperNode's key is taken for in use for up to 60 seconds
SECONDS_TO_RETURN = 400.0
RETURN_PAUSE = 12.0  # a try takes seconds of a core
POLL_SECONDS = 0.1
LOG_CHARACTERS = 3000
SOCKETS = "http://unix:/run/tp-flower/$1.sock:"
STORE_FILES = {
    "shop": {"orders": "orders.csv"},
    "office": {"items": "items.parquet", "customers": "customers_us.csv"},
}
"""The files of ``make_store.py`` that make up the tables of two sites."""


class DeploymentError(Exception):
    """A process ended or stayed silent; the text has the ends of all logs."""


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def copy_app(folder: Path) -> Path:
    """Copy what the app bundle is made of into a new folder."""
    folder.mkdir(parents=True)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / name)
    for package in ("tp_flower", "strategies", "client_apps"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    return folder


def store_entries(store: Path, site: str, policy: str = "") -> str:
    """The entries of a site's tables file, each with a policy."""
    return "\n".join(
        f'[tables.{table}]\npath = "{store / name}"\nsite = "{site}"\n{policy}'
        for table, name in STORE_FILES[site].items()
    )


class Deployment:
    """Processes by name, ``"superlink"`` and those of the sites, and what they left.

    Runs of mode "serve" listen at the port ``scorer``, for who has the ``token``.

    Args:
        folder: for all of it; not there yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = self.front = free_port()
        # a socket's path is short
        self.sessions = Path(tempfile.mkdtemp(prefix="tp-"))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}
        self._options: dict[str, tuple[object, ...]] = {}
        folder.mkdir(mode=0o700)
        self._environment = {
            **os.environ,
            "TP_FLOWER_VENV": sys.prefix,
            "FLWR_HOME": str(folder / "operator"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            # waiting takes less of a core than by default, and rounds a little longer
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0",
        }
        self.script("make_ca.sh", folder / "ca", "localhost")
        address = f"127.0.0.1:{self.port}"
        self.script("connect.sh", CONNECTION, address, folder / "ca" / "ca.crt")
        self.allowed_apps = folder / "apps.txt"
        self.allowed_apps.touch(0o600)
        self.allowed_apps.write_text(self.app_hash(ROOT))
        self.scorer = free_port()
        self.token = secrets.token_hex(32)
        token = folder / "token"
        token.touch(0o600)
        token.write_text(self.token)
        (folder / "scorer.toml").write_text(
            f'token-file = "token"\nlisten = "127.0.0.1:{self.scorer}"\n'
        )

    def script(self, name: str, *arguments: object) -> str:
        """Run a script of this folder; return what it printed."""
        return self._call("bash", SCRIPTS / name, *arguments)

    def flwr(self, *arguments: object) -> str:
        """Run Flower's command line; return what it printed."""
        return self._call(Path(sys.prefix) / "bin" / "flwr", *arguments)

    def app_hash(self, checkout: Path) -> str:
        """The hash of a checkout's app bundle, which owners list."""
        return self.script("app_hash.sh", checkout).strip()

    def state(self, site: str) -> Path:
        """The folder in which a site keeps the state of runs."""
        return self.folder / site / "state"

    def log(self, name: str) -> str:
        """What a process has written so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def start_superlink(self) -> None:
        """Start the SuperLink, and wait until it answers."""
        certificates, state = self.folder / "ca", self.folder / "superlink"
        self._start(
            *("superlink", "superlink.sh", "--certificates", certificates),
            *("--state", state, "--port", self.port, "--sessions", self.sessions),
            *("--scorer", self.folder / "scorer.toml"),
        )
        self.wait(self._answers, "the SuperLink answers", SECONDS_TO_START)

    def start_front(self, sessions: str = SOCKETS) -> None:
        """Put nginx before the SuperLink; SuperNodes that start from now on use it.

        It passes the requests of sessions to ``sessions``: the runs' sockets, or an
        address.
        """
        self.front = free_port() if self.front == self.port else self.front
        text = (SCRIPTS / "nginx.conf").read_text()
        for old, new in (
            ("127.0.0.1:8000", f"127.0.0.1:{self.port}"),
            ("listen 8443", f"listen 127.0.0.1:{self.front}"),
            ("/etc/tp-flower/ca", str(self.folder / "ca")),
            ("/var/lib/tp-flower-front", str(self.folder)),
            (SOCKETS, sessions),
            ("/run/tp-flower", str(self.sessions)),
        ):
            text = text.replace(old, new)
        (self.folder / "nginx.conf").write_text(text)
        user = f"user {getpass.getuser()}; pid {self.folder / 'pid'}; daemon off;"
        command = [
            "nginx",
            "-c",
            self.folder / "nginx.conf",
            "-e",
            "stderr",
            "-g",
            user,
        ]
        self._run("front", command)

    def add_site(self, site: str, tables: str, *options: object) -> None:
        """Make a site's key and tables file, register the key, start its SuperNode.

        The options are further ones of ``supernode.sh``.
        """
        key = self.folder / site / "node.key"
        self.script("make_node_key.sh", key)
        self.script("register.sh", CONNECTION, f"{key}.pub", site)
        (self.folder / site / "tables.toml").write_text(tables)
        self._ports[site], self._options[site] = free_port(), options
        self.start_site(site)

    def start_site(self, site: str) -> None:
        """Start a SuperNode as a supervisor does: again, while it is refused.

        The first try comes when the SuperLink no longer takes its key for in use.
        """
        deadline = time.monotonic() + SECONDS_TO_RETURN
        time.sleep(max(0.0, self._online_until(site) - time.time()))
        while not self._is_accepted(site):
            if time.monotonic() > deadline:
                self._fail(f"{site} is refused for {SECONDS_TO_RETURN:g} seconds")
            time.sleep(RETURN_PAUSE)

    def kill(self, name: str) -> None:
        """Kill a process and all that it has started, as power loss and systemd do."""
        process = self.processes.pop(name)
        under = descendants(process.pid)
        process.kill()
        process.wait()
        _kill(under)

    def stop_site(self, site: str) -> None:
        """Stop a SuperNode politely."""
        process = self.processes.pop(site)
        process.terminate()
        process.wait(SECONDS_TO_STOP)

    def restart_site(self, site: str) -> None:
        """Stop a SuperNode politely, and start it again."""
        self.stop_site(site)
        self.start_site(site)

    def submit(
        self, name: str, settings: Mapping[str, object], checkout: Path = ROOT
    ) -> str:
        """Start a run with settings under a name; return its number."""
        file = self.folder / f"{name}.toml"
        file.write_text(run_config_text(settings))
        answer = self.flwr("run", checkout, CONNECTION, "--format", "json", "-c", file)
        found = json.loads(answer)
        if "run-id" not in found:
            self._fail(f"no run: {answer}")
        return str(found["run-id"])

    def finish(self, run: str, seconds: float) -> tuple[str, str]:
        """Wait until a run's ServerApp has ended; return the status and the details.

        The log tells it; to ask for the status starts a process of a second.
        """
        end = re.compile(rf"Finished task \d+ of run {run}\b")
        self.wait(
            lambda: bool(end.search(self.log("superlink"))),
            f"the end of {run}",
            seconds,
        )
        answer = self.flwr("ls", CONNECTION, "--run-id", run, "--format", "json")
        (found,) = json.loads(answer)["runs"]
        return found["status"], found["status-details"]

    def wait(
        self, is_so: Callable[[], bool], what: str, seconds: float = 1200.0
    ) -> None:
        """Wait for something; DeploymentError where it does not come."""
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                self._fail(f"after {seconds:g} seconds still not: {what}")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End all processes and what they have started."""
        processes = self.processes.values()
        under = [pid for process in processes for pid in descendants(process.pid)]
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_STOP)
            process.kill()
            process.wait()
        _kill(under)
        shutil.rmtree(self.sessions, ignore_errors=True)

    def _start(self, name: str, script: str, *arguments: object) -> int:
        """Start a script in the background; return how long its log was."""
        return self._run(name, ["bash", SCRIPTS / script, *arguments])

    def _run(self, name: str, command: list[object]) -> int:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                list(map(str, command)),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                start_new_session=True,
            )
            return log.tell()

    def _is_accepted(self, site: str) -> bool:
        """Start a SuperNode once; return whether the SuperLink takes it."""
        own = self.folder / site
        before = self._start(
            *(site, "supernode.sh", "--superlink", f"127.0.0.1:{self.front}"),
            *("--ca", self.folder / "ca" / "ca.crt", "--key", own / "node.key"),
            *("--tables", own / "tables.toml", "--state", own / "state"),
            *("--port", self._ports[site], "--allowed-apps", self.allowed_apps),
            *self._options[site],
        )
        process = self.processes[site]

        def is_known() -> bool:
            is_refused = process.poll() is not None
            return is_refused or "SuperNode ID" in self.log(site)[before:]

        self.wait(is_known, f"{site} is accepted or refused", SECONDS_TO_START)
        return process.poll() is None

    def _online_until(self, site: str) -> float:
        """Return when, in seconds since 1970, the SuperLink takes a site's key."""
        file = f"file:{self.folder / 'superlink' / 'superlink.db'}?mode=ro"
        with contextlib.closing(sqlite3.connect(file, uri=True)) as database:
            query = "SELECT online_until FROM node WHERE name = ?"
            ((seconds,),) = database.execute(query, (site,))
        return seconds or 0.0

    def _answers(self) -> bool:
        if self.processes["superlink"].poll() is not None:
            self._fail("the SuperLink ended")
        context = ssl.create_default_context(cafile=self.folder / "ca" / "ca.crt")
        address = f"https://127.0.0.1:{self.port}/health"
        with contextlib.suppress(OSError):
            urllib.request.urlopen(address, timeout=2, context=context).close()
            return True
        return False

    def _call(self, *command: object) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            self._fail(f"{command} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def _fail(self, what: str) -> NoReturn:
        logs = (
            f"--- {log.stem}\n{log.read_text(errors='replace')[-LOG_CHARACTERS:]}"
            for log in sorted(self.folder.glob("*.log"))
        )
        raise DeploymentError("\n".join([what, *logs]))


@contextlib.contextmanager
def deployed(folder: Path) -> Iterator[Deployment]:
    """Run a SuperLink until the block ends."""
    deployment = Deployment(folder)
    try:
        deployment.start_superlink()
        yield deployment
    finally:
        deployment.stop()


def _kill(processes: Iterable[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
