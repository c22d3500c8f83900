"""The listening socket: TCP, IPv6, Unix sockets, systemd's, and what is told when there is none."""

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zlm.config import ServerOptions
from zlm.errors import ConfigError
from zlm.supervisor.listen import Listener, open_listener


def connect(listener: Listener) -> None:
    """See that a client gets through to *listener*."""
    own = socket.socket(fileno=os.dup(listener.filenos(0)[0]))
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
    own = [socket.socket(fileno=os.dup(*listener.filenos(index))) for index in range(4)]
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
    assert all(listener.filenos(index) == (-1,) for index in range(4))


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
    assert listener.filenos(0) == listener.filenos(2)
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
import json, os, sys
from zlm.config import ServerOptions
from zlm.errors import ConfigError
from zlm.supervisor.listen import open_listener
listen_fds, wanted, num_frontends, *descriptors = sys.argv[1:]
above = [os.dup(int(fd)) for fd in descriptors]
while above and min(above) < 3 + len(above):
    above.append(os.dup(above.pop(above.index(min(above)))))
for offset, fd in enumerate(above):
    os.dup2(fd, 3 + offset)
environment = {"LISTEN_PID": wanted.replace("self", str(os.getpid())), "LISTEN_FDS": listen_fds}
options = ServerOptions(port=0, api_server_count=int(num_frontends))
try:
    listener = open_listener(options, environment)
    shares = [listener.filenos(index) for index in range(int(num_frontends))]
    print(json.dumps({
        "url": listener.url,
        "shares": shares,
        "inheritable": any(os.get_inheritable(fd) for share in shares for fd in share),
        "environment": sorted(environment),
        "frontends": [listener.environment(index) for index in range(int(num_frontends))],
        "public": listener.is_public,
    }))
except ConfigError as error:
    print(json.dumps({"error": error.message}))
"""


def from_systemd(
    *passed: socket.socket, listen_fds: str | None = None, pid: str = "self", num_frontends: int = 1
) -> dict[str, Any]:
    """Have a process take *passed* from its descriptor 3 on, as systemd does; what it made."""
    fds = [each.fileno() for each in passed]
    arguments = [listen_fds or str(len(fds)), pid, str(num_frontends), *map(str, fds)]
    done = subprocess.run(
        [sys.executable, "-c", FROM_SYSTEMD, *arguments],
        pass_fds=fds,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_socket_of_systemd_is_shared_and_clients_wait_in_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as passed:
        url = f"http://127.0.0.1:{passed.getsockname()[1]}"
        assert from_systemd(passed, num_frontends=2) == {
            "url": url,
            "shares": [[3], [3]],
            "inheritable": False,
            "environment": [],
            "frontends": [{"ZLM_LISTEN_FD": "3", "ZLM_LISTEN_WAIT": "1"}] * 2,
            "public": False,
        }
        for_another = from_systemd(passed, pid="1")
    assert for_another["environment"] == ["LISTEN_FDS", "LISTEN_PID"]
    assert for_another["url"] != url
    assert "ZLM_LISTEN_WAIT" not in for_another["frontends"][0]


def test_several_addresses_of_systemd_are_each_served_by_every_front_end(tmp_path: Path) -> None:
    path = tmp_path / "zlm.sock"
    with (
        socket.create_server(("0.0.0.0", 0)) as tcp,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as tcp6,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind(str(path))
        unix.listen()
        found = from_systemd(tcp, tcp6, unix, num_frontends=2)
        ports = [each.getsockname()[1] for each in (tcp, tcp6)]
    assert found["shares"] == [[3, 4, 5], [3, 4, 5]]
    assert found["frontends"][0]["ZLM_LISTEN_FD"] == "3,4,5"
    urls = f"http://0.0.0.0:{ports[0]} and http://[::1]:{ports[1]} and unix:{path}"
    assert found["url"] == urls and found["public"]
    assert path.exists(), "the Unix socket's file is systemd's"


@pytest.mark.parametrize(
    ("num_frontends", "shares"),
    [(1, [[3, 4, 5]]), (2, [[3, 5], [4]]), (3, [[3], [4], [5]]), (4, [[3], [4], [5], [3]])],
)
def test_sockets_of_systemd_on_one_port_are_dealt_out(
    num_frontends: int, shares: list[list[int]]
) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(socket.create_server(("127.0.0.1", 0), reuse_port=True))
        at = first.getsockname()
        more = [socket.create_server(at, reuse_port=True) for _ in range(2)]
        for each in more:
            stack.enter_context(each)
        found = from_systemd(first, *more, num_frontends=num_frontends)
    assert found["shares"] == shares
    assert found["url"] == f"http://127.0.0.1:{at[1]}"


def test_what_systemd_should_not_pass_is_told() -> None:
    with socket.socket() as deaf:
        assert "descriptor 3 that systemd passed" in from_systemd(deaf)["error"]
        assert "use ListenStream= with Accept=no" in from_systemd(deaf)["error"]
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        assert "use ListenStream=" in from_systemd(datagrams)["error"]
    with Path("/dev/null").open() as file:
        assert "no listening stream socket (Socket operation" in from_systemd(file)["error"]  # type: ignore[arg-type]
    assert "LISTEN_FDS is 'one'" in from_systemd(listen_fds="one")["error"]
    assert from_systemd(listen_fds="0")["url"].startswith("http://127.0.0.1:")
