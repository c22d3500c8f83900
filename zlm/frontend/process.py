"""The front end as a process: ``python -m zlm.frontend.process RUNTIME INDEX``.

Accepts from the start, on the listening socket it inherits, so that clients get an answer while the
model loads. Wires the inbox, the tokenizers' outboxes and the server together; no logic of its own
but the order of coming and leaving.
"""

import asyncio
import os
import resource
import socket
from typing import Any

import uvloop

from zlm.frontend.metrics import FrontendMetrics
from zlm.frontend.open_requests import OpenRequests
from zlm.frontend.protocol import HttpProtocol
from zlm.frontend.server import Server
from zlm.messages import Drain, Drained, Launch, Ready, Stop, ToFrontend
from zlm.process import garbage
from zlm.process.child import Child, run

LISTEN_FD = "ZLM_LISTEN_FD"  # environment: descriptor of the listening socket
BACKLOG = 4096  # connections the kernel holds until one is accepted
BEAT_SECONDS = 1.0
LEAVE_SECONDS = 1.0  # for the last bytes of answers to go out


class FrontendProcess:
    """One front end between its launch and its stop."""

    def __init__(self, child: Child, loop: asyncio.AbstractEventLoop) -> None:
        self._child = child
        self._loop = loop
        self._open = OpenRequests(child.index, loop.call_soon)
        self._open.on_empty = self._report_drained
        self.server = Server(self._open, FrontendMetrics(child.index))
        self.stopped = asyncio.Event()

    def take(self, message: Any) -> None:
        """Handle one message of the inbox."""
        match message:
            case Stop():
                self.stopped.set()
            case Launch():
                count = message.resolved.num_tokenizers
                outboxes = [self._child.outbox("tokenizer", i) for i in range(count)]
                self._open.connect([outbox.send for outbox in outboxes])
                self.server.take(message)
                garbage.settle()
                self._child.supervisor.send(Ready("frontend", self._child.index))
            case Drain():
                self.server.take(message)
                self._report_drained()
            case _:
                self.server.take(message)

    def _report_drained(self) -> None:
        if self.server.closing and not len(self._open):
            self._child.supervisor.send(Drained(self._child.index))

    def beat(self) -> None:
        """Say that the loop runs, now and every second."""
        self._child.heartbeat.beat(len(self._open) > 0, self.server.num_answered)
        self._loop.call_later(BEAT_SECONDS, self.beat)

    async def leave(self) -> None:
        """Close every connection, giving the last bytes a moment to go out."""
        self.server.closing = True
        for connection in list(self.server.connections):
            connection.close_if_idle()
        deadline = self._loop.time() + LEAVE_SECONDS
        while self.server.connections and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self.server.connections):
            connection.abort()


async def serve(child: Child) -> None:
    """Answer HTTP until the supervisor says Stop."""
    loop = asyncio.get_running_loop()
    process = FrontendProcess(child, loop)
    inbox = child.async_inbox(ToFrontend, process.take)
    listening = await _listen(loop, process.server)
    process.beat()
    await process.stopped.wait()
    listening.close()
    await process.leave()
    inbox.close()


async def _listen(loop: asyncio.AbstractEventLoop, server: Server) -> asyncio.AbstractServer:
    inherited = socket.socket(fileno=int(os.environ[LISTEN_FD]))
    inherited.setblocking(False)
    create = loop.create_server
    if inherited.family == socket.AF_UNIX:
        create = loop.create_unix_server  # type: ignore[assignment]
    return await create(lambda: HttpProtocol(server, loop), sock=inherited, backlog=BACKLOG)


def raise_file_limit() -> None:
    """Take as many descriptors as the system lets us have: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def body(child: Child) -> None:
    """Run the process until it is told to stop."""
    raise_file_limit()
    uvloop.run(serve(child))


if __name__ == "__main__":
    run("frontend", body)
