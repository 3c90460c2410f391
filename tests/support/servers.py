"""Real database servers for tests: on loopback, on free ports, with passwords.

Each is started once per test session, in a temporary folder, and stopped at its end.
They keep nothing, so that they need not wait for a disk.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa

from scripts.deploy.deployment import free_port

USER = "tp_reader"
PASSWORD = "Pa55-word/of:the@server"  # quoted in every URI: it holds its separators
DATABASE = "shards"
SECONDS_TO_START = 300.0  # of a busy machine


@pytest.fixture(scope="session")
def postgresql() -> Iterator[sa.URL]:
    folders = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda f: float(f.parent.name)
    )
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders[-1:])])
    initdb, postgres = (
        shutil.which(name, path=path) for name in ("initdb", "postgres")
    )
    if not initdb or not postgres:
        pytest.skip("PostgreSQL is not installed: initdb and postgres are not found")
    account = _account("postgres")
    with _folder(account) as folder:
        data = folder / "data"
        _write(folder / "password", PASSWORD, account)
        _run(
            f"{initdb} -D {data} -U {USER} --no-sync -E UTF8 --no-locale "
            f"-A scram-sha-256 --pwfile={folder}/password",
            account,
        )
        port = free_port()
        # no checkpoint, no fsync, no socket file: the data is thrown away
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": port,
            "unix_socket_directories": "",
            "fsync": "off",
            "shared_buffers": "16MB",
            "max_connections": 20,
        }
        options = [part for k, v in settings.items() for part in ("-c", f"{k}={v}")]
        url = sa.URL.create("postgresql+psycopg", USER, PASSWORD, "127.0.0.1", port)
        command = [postgres, "-D", str(data), *options]
        with _server(command, account, folder, url.set(database="postgres")):
            yield _with_database(url.set(database="postgres"))


@pytest.fixture(scope="session")
def mariadb() -> Iterator[sa.URL]:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    install, mariadbd = (
        shutil.which(name, path=path) for name in ("mariadb-install-db", "mariadbd")
    )
    if not install or not mariadbd:
        pytest.skip(
            "MariaDB is not installed: mariadb-install-db and mariadbd are not found"
        )
    account = _account("mysql")
    with _folder(account) as folder:
        common = ["--no-defaults", f"--datadir={folder}/data"]
        _run(
            f"{install} {' '.join(common)} --skip-test-db --tmpdir={folder} "
            "--auth-root-authentication-method=normal --innodb-log-file-size=4M",
            account,
        )
        _write(
            folder / "users.sql",
            f"CREATE USER '{USER}'@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';\n"
            f"GRANT ALL ON *.* TO '{USER}'@'127.0.0.1' WITH GRANT OPTION;\n",
            account,
        )
        port = free_port()
        options = [
            f"--socket={folder}/socket",
            f"--port={port}",
            f"--init-file={folder}/users.sql",
            f"--tmpdir={folder}",
            "--bind-address=127.0.0.1",
            "--skip-name-resolve",
            "--character-set-server=utf8mb4",
            "--innodb-buffer-pool-size=16M",
            "--innodb-flush-log-at-trx-commit=0",
            "--performance-schema=OFF",
        ]
        url = sa.URL.create("mysql+pymysql", USER, PASSWORD, "127.0.0.1", port)
        with (
            _server([mariadbd, *common, *options], account, folder, url),
            pytest.MonkeyPatch.context() as patch,
        ):
            # this server speaks no TLS: unless it is told, the driver reads the
            # system's authorities for each of a thousand connections, 30 ms of a core
            patch.setattr("pymysql.connections.SSL_ENABLED", False)
            yield _with_database(url)


def uri(url: sa.URL) -> str:
    """Return a URL with its password, as a tables file holds it."""
    return url.render_as_string(hide_password=False)


def _account(name: str) -> dict[str, str | int]:
    """The account to run a server under: these refuse to run as root."""
    if os.geteuid() != 0:
        return {}
    for candidate in (name, "nobody"):
        with suppress(KeyError):
            entry = pwd.getpwnam(candidate)
            return {"user": entry.pw_uid, "group": entry.pw_gid}
    pytest.skip(f"there is no account to run a server under: neither {name} nor nobody")


@contextmanager
def _folder(account: dict[str, int]) -> Iterator[Path]:
    """A short path that the server's account owns: pytest's folders are root's."""
    folder = Path(tempfile.mkdtemp(prefix="tp-"))
    try:
        if account:
            os.chown(folder, account["user"], account["group"])
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(file: Path, text: str, account: dict[str, int]) -> None:
    file.write_text(text)
    if account:
        os.chown(file, account["user"], account["group"])


def _run(command: str, account: dict[str, int]) -> None:
    how = {"capture_output": True, "text": True, "cwd": "/", **account}
    done = subprocess.run(command.split(), check=False, **how)
    if done.returncode:
        pytest.fail(f"{command} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


@contextmanager
def _server(
    command: Sequence[str], account: dict[str, int], folder: Path, url: sa.URL
) -> Iterator[None]:
    """Run a server until the block ends; enter it once the server answers."""
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, cwd="/", **account
        )
    try:
        _wait(process, url, log)
        yield
    finally:
        process.send_signal(signal.SIGINT)  # PostgreSQL: do not wait for clients
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: sa.URL, log: Path) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    end = time.monotonic() + SECONDS_TO_START
    while process.poll() is None and time.monotonic() < end:
        try:
            engine.connect().close()
        except sa.exc.OperationalError:
            time.sleep(0.05)
        else:
            return
    pytest.fail(f"the server did not start:\n{log.read_text()[-2000:]}")


def _with_database(url: sa.URL) -> sa.URL:
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {DATABASE}")
    return url.set(database=DATABASE)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return as soon as something is so, however long a busy machine takes; fail if it
    never is.
    """
    end = time.monotonic() + SECONDS_TO_START
    while not is_so():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)
