"""A front end's listening sockets: its own, and systemd's, in which clients wait."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from zlm.frontend.listening import LISTEN_FD, LISTEN_WAIT, Listening


class Greeter(asyncio.Protocol):
    """Says hello and hangs up."""

    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()


@pytest.fixture
def passed(tmp_path: Path) -> Iterator[list[socket.socket]]:
    """Two TCP sockets and a Unix socket, as systemd would hold them."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(str(tmp_path / "zlm.sock"))
        unix.listen()
        yield [*sockets, unix]


def environment(passed: list[socket.socket], *, wait: bool = True) -> dict[str, str]:
    """Return what a front end would find that inherits *passed*."""
    found = {LISTEN_FD: ",".join(str(os.dup(each.fileno())) for each in passed)}
    return found | ({LISTEN_WAIT: "1"} if wait else {})


def run(test: Callable[[asyncio.AbstractEventLoop], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await test(asyncio.get_running_loop())

    uvloop.run(main())


async def greeting(listening: socket.socket) -> bytes:
    """Connect to *listening* and read to the end."""
    client = socket.socket(listening.family)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, listening.getsockname())
    with client:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 100), 5)


def test_every_socket_is_accepted_from(passed: list[socket.socket]) -> None:
    async def test(loop: asyncio.AbstractEventLoop) -> None:
        own = Listening(loop, Greeter, environment(passed, wait=False))
        assert not own.waits
        await own.open()
        for each in passed:
            assert await greeting(each) == b"hello"
        own.close()

    run(test)


def test_clients_wait_for_the_next_server(passed: list[socket.socket], tmp_path: Path) -> None:
    """What comes before ``open`` and after ``close`` is served by whoever accepts then."""
    clients = [socket.socket(each.family) for each in passed]
    for client, each in zip(clients, passed, strict=True):
        client.connect(each.getsockname())

    async def test(loop: asyncio.AbstractEventLoop) -> None:
        first = Listening(loop, Greeter, environment(passed))
        assert first.waits
        await first.open()
        for client in clients:
            client.setblocking(False)
            assert await asyncio.wait_for(loop.sock_recv(client, 100), 5) == b"hello"
        first.close()
        first.close()
        late = [asyncio.ensure_future(greeting(each)) for each in passed]
        second = Listening(loop, Greeter, environment(passed))
        await second.open()
        assert await asyncio.gather(*late) == [b"hello"] * 3
        second.close()

    run(test)
    assert (tmp_path / "zlm.sock").exists(), "the Unix socket's file is systemd's"
    for client in clients:
        client.close()


def test_closed_before_it_was_opened(passed: list[socket.socket]) -> None:
    async def test(loop: asyncio.AbstractEventLoop) -> None:
        own = Listening(loop, Greeter, environment(passed))
        own.close()
        await own.open()

    run(test)
    with socket.create_connection(passed[0].getsockname()):
        passed[0].settimeout(5)
        passed[0].accept()[0].close()  # it was left for us
