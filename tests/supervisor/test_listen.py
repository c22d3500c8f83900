"""The listening socket: TCP, IPv6, Unix sockets, systemd's, and what is told when there is none."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from zlm.config import ServerOptions
from zlm.errors import ConfigError
from zlm.supervisor.listen import Listener, open_listener


def connect(listener: Listener) -> None:
    """See that a client gets through to *listener*."""
    own = socket.socket(fileno=os.dup(listener.fileno()))
    with own, socket.socket(own.family) as client:
        client.connect(own.getsockname())
        own.accept()[0].close()


@pytest.mark.parametrize(
    ("host", "url", "public"),
    [
        ("127.0.0.1", "http://127.0.0.1:", False),
        ("localhost", "http://127.0.0.1:", False),
        ("0.0.0.0", "http://0.0.0.0:", True),
        ("::1", "http://[::1]:", False),
        ("[::1]", "http://[::1]:", False),
        ("::", "http://[::]:", True),
    ],
)
def test_tcp(host: str, url: str, public: bool) -> None:
    listener = open_listener(ServerOptions(host=host, port=0), {})
    assert listener.url.startswith(url) and listener.is_public == public
    connect(listener)
    listener.close()
    listener.close()


def test_all_ipv6_addresses_are_all_ipv4_addresses_too() -> None:
    listener = open_listener(ServerOptions(host="::", port=0), {})
    port = int(listener.url.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()
    listener.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_front_ends_share_a_port_evenly(host: str) -> None:
    listener = open_listener(ServerOptions(host=host, port=0, api_server_count=4), {})
    port = int(listener.url.rpartition(":")[2])
    own = [socket.socket(fileno=os.dup(listener.fileno(index))) for index in range(4)]
    clients = [socket.create_connection((host, port)) for _ in range(200)]
    taken = []
    for listening in own:
        listening.setblocking(False)
        taken.append(0)
        with pytest.raises(BlockingIOError):
            while True:
                listening.accept()[0].close()
                taken[-1] += 1
    assert sum(taken) == 200
    assert min(taken) >= 20  # 50 on average, 6 standard deviations are 37
    for each in (*own, *clients):
        each.close()
    listener.close()
    assert all(listener.fileno(index) < 0 for index in range(4))


def test_a_port_that_front_ends_share_is_taken_for_a_second_server() -> None:
    several = ServerOptions(port=0, api_server_count=2)
    first = open_listener(several, {})
    port = int(first.url.rpartition(":")[2])
    for count in (1, 2):
        with pytest.raises(ConfigError, match=rf"--port {port} on 127.0.0.1 is taken"):
            open_listener(ServerOptions(port=port, api_server_count=count), {})
    socket.create_connection(("127.0.0.1", port)).close()
    first.close()
    alone = open_listener(ServerOptions(port=port), {})
    with pytest.raises(ConfigError, match=rf"--port {port} on 127.0.0.1 is taken"):
        open_listener(ServerOptions(port=port, api_server_count=2), {})
    alone.close()


def test_front_ends_share_a_unix_socket(tmp_path: Path) -> None:
    options = ServerOptions(uds=str(tmp_path / "zlm.sock"), api_server_count=3)
    listener = open_listener(options, {})
    assert listener.fileno(0) == listener.fileno(2)
    listener.close()


def test_a_second_server_on_a_port_is_refused_and_a_third_after_both_is_not() -> None:
    first = open_listener(ServerOptions(port=0), {})
    port = int(first.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"--port {port} on 127.0.0.1 is taken"):
        open_listener(ServerOptions(port=port), {})
    connect(first)  # leaves a connection in TIME_WAIT
    first.close()
    open_listener(ServerOptions(port=port), {}).close()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("no-such-host.invalid", "--host no-such-host.invalid: no such address"),
        ("192.0.2.1", "--host 192.0.2.1 is no address of this machine"),
        ("a" * 64 + ".example", "--host a+.example: no such address"),
    ],
)
def test_bad_hosts_are_told(host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_listener(ServerOptions(host=host, port=0), {})


def test_unix_socket_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "zlm.sock"
    listener = open_listener(ServerOptions(uds=str(path)), {})
    assert listener.url == f"unix:{path}" and not listener.is_public
    connect(listener)
    with pytest.raises(ConfigError, match="is taken by another program"):
        open_listener(ServerOptions(uds=str(path)), {})
    listener.close()
    assert not path.exists()


def test_stale_unix_socket_is_replaced_and_anothers_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "zlm.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    first = open_listener(ServerOptions(uds=str(path)), {})
    path.unlink()
    second = open_listener(ServerOptions(uds=str(path)), {})
    first.close()
    connect(second)
    second.close()


def test_unix_socket_problems_are_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="exists and is not a socket"):
        open_listener(ServerOptions(uds=str(file)), {})
    assert stat.S_ISREG(file.stat().st_mode)
    with pytest.raises(ConfigError, match="No such file or directory"):
        open_listener(ServerOptions(uds=str(tmp_path / "missing" / "s")), {})
    with pytest.raises(ConfigError, match="over 107 bytes"):
        open_listener(ServerOptions(uds=str(tmp_path / ("x" * 108))), {})


FROM_SYSTEMD = """
import os, sys
from zlm.config import ServerOptions
from zlm.errors import ConfigError
from zlm.supervisor.listen import open_listener
count, wanted, descriptor = sys.argv[1:]
os.dup2(int(descriptor), 3)
environment = {"LISTEN_PID": wanted.replace("self", str(os.getpid())), "LISTEN_FDS": count}
try:
    listener = open_listener(ServerOptions(port=0), environment)
    print(listener.url, os.get_inheritable(3))
except ConfigError as error:
    print(error)
print(sorted(environment))
"""


def ask_systemd_child(descriptor: int, count: str, pid: str = "self") -> list[str]:
    """Run the code above with *descriptor* as its descriptor 3, as systemd would."""
    done = subprocess.run(
        [sys.executable, "-c", FROM_SYSTEMD, count, pid, str(descriptor)],
        pass_fds=(descriptor,),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_socket_of_systemd() -> None:
    with socket.create_server(("127.0.0.1", 0)) as passed:
        port = passed.getsockname()[1]
        lines = ask_systemd_child(passed.fileno(), "1")
        assert lines == [f"http://127.0.0.1:{port} False", "[]"]
        assert "systemd passed 2 sockets" in ask_systemd_child(passed.fileno(), "2")[0]
        for_another = ask_systemd_child(passed.fileno(), "1", pid="1")
        assert for_another[1] == "['LISTEN_FDS', 'LISTEN_PID']"
        assert not for_another[0].startswith(f"http://127.0.0.1:{port} ")
    with socket.socket() as deaf:
        assert "does not listen: use Accept=no" in ask_systemd_child(deaf.fileno(), "1")[0]
