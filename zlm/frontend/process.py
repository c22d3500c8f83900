"""The front end as a process: ``python -m zlm.frontend.process RUNTIME INDEX``.

Accepts from the start, on the listening sockets it inherits, so that clients get an answer while
the model loads; only from systemd's not before it is ready. Wires the inbox, the tokenizers'
outboxes and the server together; no logic of its own but the order of coming and leaving.
"""

import asyncio
import os
import resource
from typing import Any

import uvloop

from zlm.config import Resolved
from zlm.errors import Overloaded
from zlm.frontend.health import Health
from zlm.frontend.listening import Listening
from zlm.frontend.metrics import FrontendMetrics
from zlm.frontend.open_requests import OpenRequests
from zlm.frontend.probe import send_probe
from zlm.frontend.protocol import HttpProtocol
from zlm.frontend.quotas import Quotas
from zlm.frontend.recent import RecentRequests
from zlm.frontend.server import Server
from zlm.frontend.traces import Tracer
from zlm.messages import (
    Administer,
    Drain,
    Drained,
    Launch,
    PeerLost,
    PeerUp,
    Probe,
    Probed,
    ServerState,
    Stop,
    ToFrontend,
)
from zlm.process import garbage
from zlm.process.child import Child, run

NO_UI = "ZLM_NO_UI"  # environment: set if there is no page at /, also before the launch
BEAT_SECONDS = 1.0
REFRESH_SECONDS = 5.0  # between two looks at the key file and the certificate
GRACE_SECONDS = 0.5  # for requests on systemd's connections that were taken before the end
LEAVE_SECONDS = 1.0  # for the last bytes of answers to go out


class FrontendProcess:
    """One front end between its launch and its stop."""

    def __init__(self, child: Child, loop: asyncio.AbstractEventLoop) -> None:
        self._child = child
        self._loop = loop
        self._open = OpenRequests(child.index, loop.call_soon, child.incarnation)
        self._open.on_empty = self._report_drained
        self.metrics = FrontendMetrics(child.index, child.runtime)
        quotas = Quotas(child.index, child.runtime)
        self.server = Server(
            self._open,
            self.metrics,
            quotas,
            RecentRequests(child.index, child.runtime),
            runtime=child.runtime,
            ui=NO_UI not in os.environ,
        )
        self.server.dashboard.later = loop.call_later
        self.server.admin.ask = child.supervisor.send
        self.listening = Listening(loop, lambda: HttpProtocol(self.server, loop))
        self.may_accept = asyncio.Event()
        self.stopped = asyncio.Event()
        self._resolved: Resolved | None = None

    def take(self, message: Any) -> None:
        """Handle one message of the inbox."""
        match message:
            case Stop():
                self.listening.close()
                self.may_accept.set()
                self.stopped.set()
            case Drain(abort=False) | ServerState(state="draining") if self.listening.waits:
                # Whose connection was taken a moment ago has yet to send its request.
                self.listening.close()
                self._loop.call_later(GRACE_SECONDS, self._drain, message)
            case ServerState():
                self.server.take(message)
                # Clients of one that died wait in its socket for a word better than "loading".
                if message.state == "ready" or not self.listening.waits:
                    self.may_accept.set()
            case Launch():
                self._connect(message)
                self.server.take(message)
                endpoint = message.resolved.config.log.traces_endpoint
                if endpoint is not None:
                    name = message.resolved.served_names[0]
                    self.server.trace_to(Tracer(endpoint, name, self._child.index))
                garbage.settle()
                self._child.say_ready()
            case PeerLost():
                error = Overloaded(f"the request was lost, try again ({message.reason})")
                self._open.lose(message.index, error)
            case PeerUp():
                outbox = self._child.outbox("tokenizer", message.index, message.incarnation)
                self._open.reconnect(message.index, outbox.send)
            case Probe():
                assert self._resolved is not None, "a probe before the launch"
                send_probe(self._open, self._resolved, self._report_probed)
            case Drain():
                self._drain(message)
            case Administer():
                self._child.supervisor.send(self.server.admin.perform(message))
            case _:
                self.server.take(message)

    def _connect(self, launch: Launch) -> None:
        """Open the ways to the tokenizers, and the eyes that watch all processes."""
        self._resolved = launch.resolved
        outboxes = [
            self._child.outbox("tokenizer", index, launch.incarnation("tokenizer", index))
            for index in range(launch.resolved.num_tokenizers)
        ]
        self._open.connect([outbox.send for outbox in outboxes])
        self.server.health = Health(self._child.runtime, launch.resolved)

    def _drain(self, message: Drain | ServerState) -> None:
        if self.listening.waits:
            self.listening.close()
        self.server.take(message)
        self._report_drained()

    def _report_probed(self, problem: str) -> None:
        child = self._child
        child.supervisor.send(Probed(child.index, problem, child.incarnation))

    def _report_drained(self) -> None:
        if self.server.closing and not len(self._open):
            self._child.supervisor.send(Drained(self._child.index))

    def beat(self) -> None:
        """Say that the loop runs, now and every second, and what waits here; see who else does."""
        if self.server.health is not None:
            self.server.health.look(self._loop.time())
        self.metrics.show_queues(len(self._open), self._open.loads)
        self._child.heartbeat.beat(len(self._open) > 0, self.server.num_answered)
        self._loop.call_later(BEAT_SECONDS, self.beat)

    def refresh(self) -> None:
        """Take in what has changed in the key file and the certificate, now and ever again."""
        self.server.gate.refresh()
        if self.listening.certificates is not None:
            self.listening.certificates.refresh()
        self._loop.call_later(REFRESH_SECONDS, self.refresh)

    async def leave(self) -> None:
        """Close every connection, giving the last bytes a moment to go out."""
        self.server.drain(abort=False)
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
    process.beat()
    process.refresh()
    if process.listening.waits or child.incarnation:
        await process.may_accept.wait()
    await process.listening.open()
    await process.stopped.wait()
    process.listening.close()
    await process.leave()
    await asyncio.to_thread(process.server.close)
    inbox.close()


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
