"""HTTPS: the certificate that is shown, asked for and renewed; what is wrong is told at once."""

import asyncio
import http.client
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import uvloop
from certificates import Authority

from zlm.config import ServerOptions
from zlm.errors import ConfigError
from zlm.frontend import tls
from zlm.frontend.listening import LISTEN_FD, Listening
from zlm.frontend.protocol import HttpProtocol
from zlm.supervisor.listen import open_listener

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="needs the openssl command")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def pair(authority: Authority, tmp_path: Path) -> tuple[Path, Path]:
    return authority.issue(tmp_path, "server")


class Running:
    """A front end's listening socket on a real loop, in a thread."""

    def __init__(self, house, options: ServerOptions) -> None:
        self._house = house
        self._options = options
        self._up: Future[int] = Future()
        self.thread = threading.Thread(target=lambda: uvloop.run(self._serve()))
        self.thread.start()
        self.port = self._up.result(10)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._loop, self._stop = loop, asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            environment = {LISTEN_FD: str(taken.detach())} | tls.environment(self._options)
        listening = Listening(loop, lambda: HttpProtocol(self._house.server, loop), environment)
        self.certificates = listening.certificates
        await listening.open()
        self._up.set_result(port)
        await self._stop.wait()
        listening.close()
        for connection in list(self._house.server.connections):
            connection.abort()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def running(house) -> Iterator:
    started: list[Running] = []

    def start(**options) -> Running:
        started.append(Running(house, ServerOptions(**options)))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def context(authority: Authority, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(authority.file))
    if client is not None:
        made.load_cert_chain(*client)
    return made


def ask(server: Running, trusting: ssl.SSLContext) -> tuple[int, str]:
    """Ask for /health; return its status and whose certificate was shown."""
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=trusting, timeout=10)
    try:
        connection.request("GET", "/health")
        shown = connection.sock.getpeercert()
        return connection.getresponse().status, dict(pair[0] for pair in shown["subject"])[
            "commonName"
        ]
    finally:
        connection.close()


def files(pair: tuple[Path, Path]) -> dict[str, str]:
    return {"ssl_certfile": str(pair[0]), "ssl_keyfile": str(pair[1])}


def test_https_and_nothing_else(running, authority, pair, caplog):
    server = running(**files(pair))
    assert ask(server, context(authority)) == (200, "server")
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(server, ssl.create_default_context())
    old = context(authority)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert ask(server, old)[0] == 200
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: z\r\n\r\n")
        answer = plain.recv(1000)
        assert answer.startswith(b"HTTP/1.1 400") and b"this port speaks HTTPS" in answer
    assert caplog.text.count("speaks HTTP to this port") == 1
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as neither:
        neither.sendall(b"\x00\x01\x02 nonsense")
        assert not neither.recv(1000).startswith(b"HTTP")
    assert ask(server, context(authority))[0] == 200


def test_certificate_and_key_may_be_one_file(running, authority, pair, tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes(pair[1].read_bytes() + pair[0].read_bytes())
    assert ask(running(ssl_certfile=str(both)), context(authority)) == (200, "server")


def test_clients_must_show_a_certificate(running, authority, pair, tmp_path):
    server = running(**files(pair), ssl_ca_certs=str(authority.file), ssl_cert_reqs="required")
    client = authority.issue(tmp_path, "client")
    assert ask(server, context(authority, client))[0] == 200
    stranger = Authority(tmp_path, "stranger").issue(tmp_path, "mallory")
    for shown in (None, stranger):
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            ask(server, context(authority, shown))


def test_a_renewed_certificate_is_shown_without_a_restart(
    running, authority, pair, tmp_path, caplog
):
    server = running(**files(pair))
    assert ask(server, context(authority)) == (200, "server")
    (tmp_path / "new").mkdir()
    certificate, key = authority.issue(tmp_path / "new", "renewed")
    shutil.copy(certificate, pair[0])  # the key is still the old one
    server.certificates.refresh()
    server.certificates.refresh()
    assert ask(server, context(authority)) == (200, "server")
    assert caplog.text.count("the certificate stays as it was") == 1
    shutil.copy(key, pair[1])
    server.certificates.refresh()
    assert ask(server, context(authority)) == (200, "renewed")


def test_a_large_upload_is_refused_and_seen(running, authority, pair):
    """A client that writes 40 MB before it reads still gets the 413."""
    server = running(**files(pair))
    connection = http.client.HTTPSConnection(
        "127.0.0.1", server.port, context=context(authority), timeout=10
    )
    connection.request("POST", "/tokenize", b" " * 40_000_000)
    assert connection.getresponse().status == 413
    connection.close()
    assert ask(server, context(authority))[0] == 200


def test_an_open_connection_outlives_a_renewal(running, authority, pair, tmp_path):
    server = running(**files(pair))
    connection = http.client.HTTPSConnection(
        "127.0.0.1", server.port, context=context(authority), timeout=10
    )
    connection.request("GET", "/health")
    connection.getresponse().read()
    (tmp_path / "new").mkdir()
    for fresh, old in zip(authority.issue(tmp_path / "new", "renewed"), pair, strict=True):
        shutil.copy(fresh, old)
    server.certificates.refresh()
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ssl_certfile": "/nonexistent"}, "--ssl-certfile /nonexistent: No such file"),
        ({"ssl_keyfile": "/nonexistent"}, "--ssl-keyfile /nonexistent: No such file"),
        ({"ssl_keyfile": None}, "server.pem: there is no private key in it: give --ssl-keyfile"),
        ({"ssl_keyfile": __file__}, "test_tls.py: there is no private key in it"),
        ({"ssl_certfile": __file__}, "test_tls.py: there is no certificate in it"),
        ({"ssl_ca_certs": __file__, "ssl_cert_reqs": "required"}, "--ssl-ca-certs"),
        ({"ssl_ciphers": "none at all"}, "--ssl-ciphers none at all"),
    ],
)
def test_what_is_wrong_is_told_before_anything_loads(pair, change, words):
    options = ServerOptions(port=0, **{**files(pair), **change})
    with pytest.raises(ConfigError) as refused:
        open_listener(options, {})
    assert words in refused.value.message


@pytest.mark.parametrize("form", ["ec", "pkey"])
def test_a_key_with_a_password_is_told(pair, tmp_path, form):
    locked = tmp_path / "locked.key"
    command = ["openssl", form, "-in", str(pair[1]), "-aes128", "-passout", "pass:x"]
    subprocess.run([*command, "-out", str(locked)], check=True, capture_output=True)
    options = ServerOptions(port=0, ssl_certfile=str(pair[0]), ssl_keyfile=str(locked))
    with pytest.raises(ConfigError, match="has a password"):
        open_listener(options, {})


def test_another_certificate_s_key_is_told(authority, pair, tmp_path):
    _, other = authority.issue(tmp_path, "other")
    options = ServerOptions(port=0, ssl_certfile=str(pair[0]), ssl_keyfile=str(other))
    with pytest.raises(ConfigError, match=r"other\.key: the key is not the certificate's$"):
        open_listener(options, {})


def test_the_address_is_said_to_be_https(pair):
    listener = open_listener(ServerOptions(port=0, **files(pair)), {})
    assert listener.url.startswith("https://127.0.0.1:")
    assert tls.ENVIRONMENT in listener.environment(0)
    listener.close()
