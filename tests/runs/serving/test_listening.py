"""The address of a scorer, its token and its TLS; the command, from start to end."""

import os
import signal
import ssl
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from ipaddress import ip_address
from socket import create_server
from threading import Thread

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from strategies.serving.http_server import (
    LEAST_CHARACTERS,
    TOKEN_VARIABLE,
    Address,
    ScorerServer,
    read_token,
)
from strategies.serving.metrics import Metrics
from strategies.serving.request_queue import OPENING, RequestQueue
from tests.support.command_line import printed_by, refused_by
from tests.support.federated import store_on_disk, store_sql
from tests.support.files import case_table
from tests.support.serving.scorers import PATIENCE, TOKEN, Serving
from tp_flower import api
from tp_flower.errors import SettingsError
from tp_flower.settings import Settings

CASES = case_table(__file__)


@pytest.fixture
def certificate(tmp_path):
    """A PEM file of a key and a certificate that its holder has signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "scorer")])
    now = datetime.now(UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "scorer.pem"
    encoding = serialization.Encoding.PEM
    private = serialization.PrivateFormat.PKCS8
    plain = serialization.NoEncryption()
    file.write_bytes(
        key.private_bytes(encoding, private, plain) + built.public_bytes(encoding)
    )
    return file


@contextmanager
def listening(address):
    """A server whose scorer has no session yet."""
    server = ScorerServer(address, RequestQueue(), Metrics(), "m@1")
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_tls_hides_the_token_and_refuses_plain_http(certificate):
    context = ssl.create_default_context(cafile=certificate)
    with listening(Address("127.0.0.1", 0, TOKEN, certificate)) as port:
        # a client that shakes no hand holds up nobody
        silent = HTTPConnection("localhost", port)
        silent.connect()
        status, _, content = Serving(None, None, port, [], context).ask("/healthz")
        assert (status, content) == (503, {"error": OPENING})
        with pytest.raises(OSError, match=r"reset|closed|response|TLS"):
            Serving(None, None, port, []).ask("/healthz")
        silent.close()


@pytest.mark.parametrize(("listen", "reason"), CASES["addresses"])
def test_refused_addresses(monkeypatch, listen, reason):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with pytest.raises(SettingsError, match=reason):
        Address.read(listen, None, None)


@pytest.mark.parametrize("listen", ["127.0.0.1:80", "[::1]:80", "localhost:80"])
def test_plain_http_on_this_machine_alone(monkeypatch, certificate, listen):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    address = Address.read(listen, None, None)
    assert (address.port, address.scheme, address.token) == (80, "http", TOKEN)
    # as --listen says of another machine's: with a certificate it is allowed
    address = Address.read("0.0.0.0:443", None, certificate)
    assert address.scheme == "https"
    assert TOKEN not in repr(address)


def test_an_address_that_cannot_be_listened_at(certificate):
    with create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1], TOKEN)
        with pytest.raises(SettingsError, match=r"--listen 127\.0\.0\.1:.* in use"):
            ScorerServer(address, RequestQueue(), Metrics(), "m@1")
    certificate.write_text("nothing")
    with pytest.raises(SettingsError, match="is no PEM file"):
        Address("127.0.0.1", 0, TOKEN, certificate).context  # noqa: B018


def test_a_token_is_long_and_its_owner_s_alone(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    file = tmp_path / "token"
    with pytest.raises(SettingsError, match=f"the variable {TOKEN_VARIABLE} has no"):
        read_token(None)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_token(file)
    file.write_text(f" {TOKEN}\n")
    file.chmod(0o640)
    with pytest.raises(SettingsError, match=f"chmod 600 {file}"):
        read_token(file)
    file.chmod(0o600)
    assert read_token(file) == TOKEN
    file.write_text(TOKEN[: LEAST_CHARACTERS - 1])
    with pytest.raises(SettingsError, match="openssl rand -hex 32"):
        read_token(file)


def test_the_command_serves_until_it_is_ended(home, monkeypatch):
    folder = store_on_disk(home.with_name("store"))
    tables = ("--set", f"tables={folder}")
    query = f"sql={store_sql('squared')}"
    printed_by("train", "--set", query, *tables, "--set", "num-epochs=1")
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers = []

    def ask():
        served = Serving(None, None, port, [])
        status = 503
        while status == 503:
            try:
                status, _, content = served.ask(body={"keys": [{"row": 0}]})
            except ConnectionRefusedError:
                time.sleep(0.05)
        answers.append((status, content["model"]))
        os.kill(os.getpid(), signal.SIGTERM)

    asking = Thread(target=ask, daemon=True)
    asking.start()
    printed = printed_by("serve", "default", "--listen", f"127.0.0.1:{port}", *tables)
    asking.join(PATIENCE)
    ((status, model),) = answers
    assert status == 200
    address = f"http://127.0.0.1:{port}/predict"
    assert printed == f"Serving {model} at {address}; end with Ctrl-C\n"
    assert "no model" in refused_by("serve", "other", *tables)
    # with `tables`, as the message says, it has served
    without = refused_by("serve", "default", status=2)
    assert "write the run file, as in tp-flower serve default my-run.toml" in without


def test_a_run_of_mode_serve_is_the_command_s():
    settings = Settings(mode="serve")
    with pytest.raises(SettingsError, match=r"lets runs listen .*--scorer FILE"):
        api.run(settings)
