"""The address of a scorer, its token and its TLS; the command, from start to end."""

import math
import os
import signal
import ssl
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from ipaddress import ip_address
from socket import create_connection, create_server
from threading import Thread

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from strategies.serving import connections, http_server
from strategies.serving.http_server import (
    HEAD_BYTES,
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
def listening(address, requests=None):
    """A server whose scorer has no session yet."""
    server = ScorerServer(address, requests or RequestQueue(), Metrics(), "m@1")
    thread = Thread(target=server.serve_forever, args=(0.05,))
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


LOCAL = Address("127.0.0.1", 0, TOKEN)
PREDICT = b"POST /predict HTTP/1.1\r\nAuthorization: Bearer %s\r\n"
WITH_TOKEN = PREDICT % TOKEN.encode()
HEALTH = b"GET /healthz HTTP/1.1\r\n"


def connected(port, sent=b""):
    """A client that has sent something."""
    client = create_connection(("127.0.0.1", port), timeout=PATIENCE)
    client.sendall(sent)
    return client


def answered(client):
    """What a client reads until the server closes."""
    content = b""
    with client, suppress(ConnectionResetError):
        while block := client.recv(1 << 16):
            content += block
    return content


@pytest.mark.parametrize("is_tls", [False, True])
def test_slow_clients_hold_up_nobody(certificate, is_tls):
    address, context = LOCAL, None
    if is_tls:
        context = ssl.create_default_context(cafile=certificate)
        address = Address("127.0.0.1", 0, TOKEN, certificate)
    begun = b"" if is_tls else HEALTH
    with listening(address) as port, ExitStack() as clients:
        for _ in range(http_server.MOST_THREADS + 44):
            clients.enter_context(connected(port, begun))
        started = time.monotonic()
        status, _, content = Serving(None, None, port, [], context).ask("/healthz")
        assert (status, content) == (503, {"error": OPENING})
        assert time.monotonic() - started < connections.HEAD_SECONDS / 4
        metrics = Serving(None, None, port, [], context).ask("/metrics")[2].decode()
    # 44 slow ones for the others, one for each question unless a thread was free
    assert "cut_connections_total 45\n" in metrics or "total 46\n" in metrics


def test_who_has_the_token_is_not_cut_for_others(monkeypatch):
    monkeypatch.setattr(ScorerServer, "most_threads", 1)
    with listening(LOCAL) as port:
        kept = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        ask = ("GET", "/healthz", None, {"Authorization": f"Bearer {TOKEN}"})
        for _ in range(2):
            kept.request(*ask)
            assert kept.getresponse().read() == b'{"error":"%s"}' % OPENING.encode()
            assert answered(connected(port)) == b""
        kept.close()


@pytest.mark.parametrize(
    ("head", "limit"),
    [
        (HEALTH, "HEAD_SECONDS"),
        (PREDICT % b"wrong" + b"Content-Length: 1000\r\n\r\n", "HEAD_SECONDS"),
        (WITH_TOKEN + b"Content-Length: 1000\r\n\r\n", "REQUEST_SECONDS"),
    ],
)
def test_bytes_that_come_one_at_a_time_are_cut(monkeypatch, head, limit):
    module = connections if limit == "HEAD_SECONDS" else http_server
    monkeypatch.setattr(module, limit, 0.4)
    with listening(LOCAL) as port, connected(port, head) as client:
        started = time.monotonic()
        with suppress(ConnectionResetError, BrokenPipeError):
            while time.monotonic() < started + PATIENCE:
                client.sendall(b"x")
                time.sleep(0.02)
        assert 0.3 < time.monotonic() - started < 2.0


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEALTH + b"a: %s\r\n\r\n" % (b"x" * HEAD_BYTES), b"431"),
        (HEALTH + b"a: 1\r\n" * 5000, b"431"),
        (b"GET /%s" % (b"x" * HEAD_BYTES), b""),
        (WITH_TOKEN + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (WITH_TOKEN + b"Content-Length: 2\r\n" * 2 + b"\r\n{}", b"400"),
        (PREDICT % b"wrong" + b"Expect: 100-continue\r\n\r\n", b"401"),
        (HEALTH + b"\r\n" + HEALTH + b"\r\n", b"503"),
        (
            WITH_TOKEN.replace(b"POST /predict", b"GET /healthz")
            + b"Content-Length: 9\r\n\r\n"
            + HEALTH,
            b"503",
        ),
    ],
)
def test_there_is_one_answer_and_then_the_end(sent, status):
    with listening(LOCAL) as port:
        content = answered(connected(port, sent))
    lines = [line for line in content.splitlines() if line.startswith(b"HTTP/")]
    # what is too long may be reset before its answer is read
    assert [line.split()[1] for line in lines] == [status] * bool(status) or (
        status == b"431" and not lines
    )


def test_a_request_that_has_waited_too_long_is_not_asked(monkeypatch):
    monkeypatch.setattr(http_server, "ANSWER_SECONDS", 0.05)
    requests = RequestQueue()
    requests.open()
    with listening(LOCAL, requests) as port:
        served = Serving(None, None, port, [])
        assert served.error({"row": 0}) == (
            503,
            "no answer within 0.05 seconds; the sites were not asked",
        )
        assert requests.take(time.monotonic() + 0.05, 1) == ()
        # one that is in a round has been asked
        taken = []
        taking = Thread(target=lambda: taken.extend(requests.take(math.inf, 1)))
        taking.start()
        assert served.error({"row": 0})[1].endswith("the sites may have counted it")
        taking.join()
        assert [request.keys for request in taken] == [[{"row": 0}]]


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
