"""``zlm serve`` started as systemd starts it: sockets from descriptor 3 on, a notification socket.

The manager is the test. A real systemd is in ``test_systemd``, where one can be booted.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path

import pytest
import tiny

START_SECONDS = 120.0
COMPLETION = b"""POST /v1/completions HTTP/1.1\r
Host: z\r
Content-Length: 32\r
\r
{"prompt": "one","max_tokens":2}"""
AS_SYSTEMD_DOES = """
import os, sys
count, *command = sys.argv[1:]
os.environ |= {"LISTEN_FDS": count, "LISTEN_PID": str(os.getpid())}
os.execv(command[0], command)
"""


class Service:
    """A server that holds sockets of ours, and what it tells its manager."""

    def __init__(self, folder: Path, sockets: list[socket.socket], command: list[str]) -> None:
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(folder / "notify"))
        self.manager.settimeout(START_SECONDS)
        self.log = folder / "log"
        above = [os.dup(each.fileno()) for each in sockets]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", AS_SYSTEMD_DOES, str(len(sockets)), *command],
                env={**os.environ, "NOTIFY_SOCKET": str(folder / "notify")},
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: self._place(above),
                close_fds=False,
            )
        for fd in above:
            os.close(fd)

    @staticmethod
    def _place(fds: list[int]) -> None:
        """Give the child *fds* as its descriptors 3, 4, ... ; the rest of ours close on exec."""
        clear = [os.dup2(os.dup(fd), 200 + number) for number, fd in enumerate(fds)]
        for number, fd in enumerate(clear):
            os.dup2(fd, 3 + number)
        os.closerange(3 + len(fds), 300)

    def told(self) -> dict[str, str]:
        """Return the next message of the service."""
        lines = self.manager.recv(4096).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.manager.close()


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[list[socket.socket]]:
    """A TCP socket and a Unix socket that listen, as two ListenStream= lines make them."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "zlm.sock"))
        unix.listen()
        yield [tcp, unix]


@pytest.fixture
def service(tmp_path: Path, sockets: list[socket.socket]) -> Iterator[Service]:
    model = tiny.tiny_checkpoint(tmp_path / "tiny", "llama")
    zlm = str(Path(sys.executable).with_name("zlm"))
    flags = ["--dtype", "float32", "--api-server-count", "2", "--port", "1"]
    service = Service(tmp_path, sockets, [zlm, "serve", str(model), *flags])
    yield service
    service.end()


def ask(listening: socket.socket, path: str) -> socket.socket:
    """Send a request into *listening*, whoever will accept it; return the connection."""
    client = socket.socket(listening.family)
    client.settimeout(START_SECONDS)
    client.connect(listening.getsockname())
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: z\r\nConnection: close\r\n\r\n".encode())
    return client


def status(client: socket.socket) -> int:
    with client, contextlib.closing(HTTPResponse(client)) as response:
        response.begin()
        response.read()
        return response.status


def test_a_service_of_systemd(service: Service, sockets: list[socket.socket]) -> None:
    early = [ask(each, "/health") for each in sockets]
    tcp, unix = sockets
    told = [service.told()]
    while "READY" not in told[-1]:
        told.append(service.told())
        assert "STOPPING" not in told[-1], service.log.read_text()
    *loading, ready = told
    assert loading[0]["STATUS"].startswith("loading ")
    assert all(int(each["EXTEND_TIMEOUT_USEC"]) > 0 for each in loading)
    assert any("worker: " in each.get("STATUS", "") for each in loading), loading
    assert ready["MAINPID"] == str(service.process.pid)
    url = f"http://127.0.0.1:{tcp.getsockname()[1]} and unix:{unix.getsockname()}"
    assert ready["STATUS"].endswith(f" on {url}")
    assert [status(client) for client in early] == [200, 200]
    slow = socket.create_connection(tcp.getsockname(), START_SECONDS)  # a client of few words
    assert [status(ask(each, "/v1/models")) for each in sockets] == [200, 200]

    service.process.send_signal(signal.SIGTERM)
    last = service.told()
    while "STOPPING" not in last:  # the watchdog's messages
        last = service.told()
    slow.sendall(COMPLETION)
    assert status(slow) == 200, "its connection was taken before"
    assert int(last["EXTEND_TIMEOUT_USEC"]) > 30e6
    assert service.process.wait(60) == 0, service.log.read_text()
    for each in sockets:  # they outlive the service: who comes now waits for the next one
        with ask(each, "/health"):
            each.settimeout(5)
            each.accept()[0].close()
