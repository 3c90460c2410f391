"""Deploying: the scripts make keys that fit, overwrite nothing, refuse the wrong."""

import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys

import pytest
import yaml

from scripts.deploy.deployment import copy_app
from tests.support.files import ROOT, case_table

CASES = case_table(__file__)
DEPLOY = ROOT / "scripts" / "deploy"
SHELL_SCRIPTS = sorted(path.name for path in DEPLOY.glob("*.sh"))
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("bash", "openssl", "ssh-keygen", "flock"))),
    reason="bash, openssl, ssh-keygen or flock is not installed",
)
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
OTHERS = {
    "umask": "077",
    "TZ": "Asia/Tokyo",
    "LC_ALL": "C",
    "PYTHONHASHSEED": "7",
    "SOURCE_DATE_EPOCH": "1",
}


def call(script, *arguments, **environment):
    return subprocess.run(
        ["bash", DEPLOY / script, *map(str, arguments)],
        env={**os.environ, "TP_FLOWER_VENV": sys.prefix, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


def done(script, *arguments):
    answer = call(script, *arguments)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def refused(script, *arguments):
    answer = call(script, *arguments)
    assert answer.returncode == 1, answer
    return answer.stderr


def openssl(*arguments):
    command = ["openssl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    done("make_ca.sh", folder / "ca", "link.example.org", "10.1.2.3", "fd00::1")
    done("make_node_key.sh", folder / "node.key")
    return folder


def test_the_certificate_names_the_superlink_and_is_the_cas(keys):
    ca = keys / "ca" / "ca.crt"
    server = keys / "ca" / "server.pem"
    verify = ("verify", "-CAfile", ca, "-purpose", "sslserver")
    for name in ("link.example.org", "localhost"):
        openssl(*verify, "-verify_hostname", name, server)
    for address in ("10.1.2.3", "127.0.0.1", "fd00::1"):
        openssl(*verify, "-verify_ip", address, server)
    with pytest.raises(subprocess.CalledProcessError):
        openssl("verify", "-CAfile", ca, "-verify_hostname", "example.org", server)


def test_keys_are_the_users_alone_and_nothing_is_overwritten(keys):
    for private in ("ca/ca.key", "ca/server.key", "node.key"):
        assert stat.S_IMODE((keys / private).stat().st_mode) == 0o600
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    assert "server.key is there already" in refused("make_ca.sh", keys / "ca", "x")
    assert "node.key is there already" in refused("make_node_key.sh", keys / "node.key")
    assert before == {path: path.read_bytes() for path in before}


def test_a_certificate_is_renewed_by_the_same_ca(keys, tmp_path):
    ca = shutil.copytree(keys / "ca", tmp_path / "ca")
    for name in ("server.key", "server.pem"):
        (ca / name).unlink()
    fingerprint = done("make_ca.sh", ca, "new.example.org")
    assert fingerprint.strip() in openssl(
        *("x509", "-in", keys / "ca" / "ca.crt", "-noout", "-fingerprint", "-sha256")
    )
    openssl(
        *("verify", "-CAfile", keys / "ca" / "ca.crt"),
        *("-verify_hostname", "new.example.org", ca / "server.pem"),
    )


def test_half_a_ca_is_not_completed(keys, tmp_path):
    (tmp_path / "ca.crt").write_bytes((keys / "ca" / "ca.crt").read_bytes())
    assert "one of ca.key and ca.crt" in refused("make_ca.sh", tmp_path, "x")
    for name in ("https://host", "a b", "host,DNS:other"):
        assert "no host name" in refused("make_ca.sh", tmp_path / "ca", name)
        assert not (tmp_path / "ca").exists()
    # a private key is not registered
    assert "is a private key" in refused("register.sh", "demo", keys / "node.key")


def test_connections_have_absolute_paths_and_names_of_their_own(keys, tmp_path):
    arguments = ("demo", "127.0.0.1:8000", keys / "ca" / "ca.crt")
    first, second = (
        call("connect.sh", *arguments, FLWR_HOME=str(tmp_path)) for _ in range(2)
    )
    assert first.returncode == 0
    written = (tmp_path / "config.toml").read_text()
    assert f'root-certificates = "{keys}/ca/ca.crt"' in written
    assert "has a connection 'demo' already" in second.stderr
    assert (tmp_path / "config.toml").read_text() == written


def test_an_app_has_one_hash_wherever_whenever_and_by_whom(tmp_path):
    expected = done("app_hash.sh")
    assert re.fullmatch("[0-9a-f]{64}\n", expected)
    copy = copy_app(tmp_path / "another" / "name")
    stray = ("run.toml", "notes.md", "tests/test.py", ".git/refs/heads/x.py")
    for name in (*stray, "client_apps/__pycache__/app.py", "docs/build.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("1")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o755)
    assert call("app_hash.sh", copy, **OTHERS).stdout == expected
    as_another = ["unshare", "--user", "--map-user=4321"]
    if subprocess.run([*as_another, "true"], check=False).returncode:
        pytest.skip("cannot be another user here")
    command = f'test "$(id -u)" = 4321 && bash {DEPLOY}/app_hash.sh {copy}'
    environment = {"TP_FLOWER_VENV": sys.prefix, "PATH": os.environ["PATH"]}
    other = [*as_another, "bash", "-c", command]
    assert subprocess.check_output(other, env=environment, text=True) == expected


@pytest.mark.parametrize(
    "name", ["client_apps/app.py", "strategies/app.py", "pyproject.toml"]
)
def test_other_code_and_other_defaults_have_another_hash(name, tmp_path):
    copy = copy_app(tmp_path / "copy")
    text = (copy / name).read_text()
    (copy / name).write_text(text.replace("app", "App", 1))
    assert done("app_hash.sh", copy) != done("app_hash.sh")


def test_no_code_of_a_checkout_runs_while_its_hash_is_made(tmp_path):
    copy = copy_app(tmp_path / "copy")
    for name in ("hashlib.py", "flwr.py", "sitecustomize.py", "tp_flower/__init__.py"):
        (copy / name).write_text("raise SystemExit('this was run')")
    arguments = ["bash", str(DEPLOY / "app_hash.sh"), "."]
    environment = {**os.environ, "TP_FLOWER_VENV": sys.prefix, "PYTHONPATH": str(copy)}
    answer = subprocess.run(
        arguments, env=environment, cwd=copy, capture_output=True, text=True, check=True
    )
    assert re.fullmatch("[0-9a-f]{64}\n", answer.stdout)
    assert "there is no file" in refused("app_hash.sh", tmp_path)
    (copy / "pyproject.toml").write_text("[project]\nname = 'x'")
    assert "no app bundle can be made" in refused("app_hash.sh", copy)


@pytest.fixture
def site(keys, tmp_path):
    """The options of a SuperNode; none of them starts one in these tests."""
    shutil.copy(keys / "node.key", tmp_path / "node.key")
    (tmp_path / "a.csv").write_text("a\n1\n")
    (tmp_path / "tables.toml").write_text(
        '[tables.a]\npath = "a.csv"\npolicy = "open"\n'
    )
    (tmp_path / "apps.txt").write_text("5a" * 32)
    return {
        "--superlink": "127.0.0.1:1",
        "--ca": keys / "ca" / "ca.crt",
        "--key": tmp_path / "node.key",
        "--tables": tmp_path / "tables.toml",
        "--state": tmp_path / "state",
        "--allowed-apps": tmp_path / "apps.txt",
    }


def start_refused(site):
    return refused("supernode.sh", *(part for pair in site.items() for part in pair))


def with_keys(option, content, mode):
    def change(site):
        site[option] = site["--key"].with_name("keys")
        site[option].write_text(content)
        site[option].chmod(mode)

    return change


def with_tables(name, path):
    def change(site):
        site["--tables"] = site["--tables"].with_name(name)
        site["--tables"].write_text(f'[tables.a]\npath = "{path}"\npolicy = "open"\n')

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        *CASES["options"],
        (lambda site: site.pop("--allowed-apps"), "--allowed-apps is missing"),
        (
            lambda site: site["--allowed-apps"].unlink(),
            "--allowed-apps: there is no file",
        ),
        (
            lambda site: site["--allowed-apps"].write_text("5a"),
            "must be the SHA-256 of an app",
        ),
        (
            lambda site: site["--allowed-apps"].chmod(0o620),
            "allowed-apps may be changed",
        ),
        (lambda site: site["--key"].chmod(0o644), "chmod 600"),
        (lambda site: site["--state"].mkdir(mode=0o755), "chmod 700"),
        (with_tables('the "tables".toml', "a.csv"), "a path with a quote"),
        (
            with_tables("tables.toml", "a.xls"),
            "cannot tell the format of 'path' (.xls)",
        ),
        (
            with_keys("--allowed-keys", f"us {'11' * 32}", 0o620),
            "allowed-keys may be changed",
        ),
        (with_keys("--allowed-keys", "11" * 32, 0o600), "the name of a site and its"),
    ],
)
def test_a_supernode_does_not_start_with(change, why, site):
    site.update(change) if isinstance(change, dict) else change(site)
    assert why in start_refused(site)


def test_a_state_folder_is_one_supernodes(site):
    site["--state"].mkdir(mode=0o700)
    with (site["--state"] / "supernode.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another SuperNode runs with the state folder" in start_refused(site)


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_shell_scripts_are_sound(script):
    subprocess.run(["bash", "-n", DEPLOY / script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", DEPLOY / script], check=True, cwd=ROOT)


@pytest.mark.parametrize("script", ["superlink.sh", "supernode.sh"])
def test_templates_name_options_that_there_are(script):
    text = (DEPLOY / script).read_text()
    options = set(re.findall(r"^    (--[a-z-]+)\)", text, re.MULTILINE))
    units = (path.read_text() for path in DEPLOY.glob("systemd/*.service"))
    commands = [service["command"] for service in COMPOSE["services"].values()]
    commands += [text.partition("ExecStart=")[2].partition("\n")[0] for text in units]
    used = [line for line in map(str, commands) if f"deploy/{script}" in line]
    assert len(used) == (2 if script == "superlink.sh" else 3)
    for line in used:
        assert set(re.findall(r"--[a-z-]+", line)) <= options


def test_containers_write_to_their_state_alone_and_secrets_are_files():
    for name, service in COMPOSE["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        for volume in service.get("volumes", []):
            source, _, _ = volume.partition(":")
            assert volume.endswith(":ro") or source in COMPOSE["volumes"], volume
        for secret in service.get("secrets", []):
            source = secret["source"] if isinstance(secret, dict) else secret
            assert COMPOSE["secrets"][source]["file"].startswith("./")
