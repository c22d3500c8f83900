"""A front end on a loopback port, in a thread of its own, whose answers a test writes.

The server and its connections are the real ones; the tokenizer is a list of pieces of text. What is
generated waits at each ``HOLD`` until ``go``, so that a test sees an answer grow, and may stop it.
"""

import asyncio
import threading
from pathlib import Path
from typing import Any

from frontend_house import delta, resolved

from zlm.engine.stats import Statistics
from zlm.frontend.metrics import FrontendMetrics
from zlm.frontend.open_requests import OpenRequests
from zlm.frontend.protocol import HttpProtocol
from zlm.frontend.recent import RecentRequests
from zlm.frontend.server import Server
from zlm.messages import Cancel, Deltas, Drain, Generate, Launch, ServerState
from zlm.process.counts import CountPage, path_of

HOLD = object()
THOUGHT = "\N{THOUGHT BALLOON}"  # a piece that begins with it is of the thoughts


class PageServer:
    """A context manager: the server listens within it. Keywords are ServerOptions'."""

    def __init__(self, runtime: Path, **server: Any) -> None:
        self.script: list[Any] = ["Hello"]  # of the next answers
        self.commands: list[Any] = []
        self.engine = Statistics(256, CountPage(path_of(runtime, "engine", 0)))
        self.port = 0
        self._options = server
        self._loop = asyncio.new_event_loop()
        self._held: asyncio.Event = asyncio.Event()
        self._cancelled: set[int] = set()
        self._open = OpenRequests(0, self._loop.call_soon)
        metrics = FrontendMetrics(0, runtime)
        recent = RecentRequests(0, runtime)
        self.server = Server(self._open, metrics, None, recent, runtime=runtime)
        self.server.dashboard.later = self._loop.call_later
        self._open.connect([self._take])
        self._thread = threading.Thread(target=self._loop.run_forever)

    @property
    def url(self) -> str:
        root = self._options.get("root_path", "")
        return f"http://127.0.0.1:{self.port}{root}/"

    def __enter__(self) -> "PageServer":
        self._thread.start()
        self.tell(Launch(resolved(**self._options)))
        self.tell(ServerState("ready"))
        listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
        self.port = listening.result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.tell(Drain(abort=True))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _listen(self) -> int:
        made = await self._loop.create_server(
            lambda: HttpProtocol(self.server, self._loop), "127.0.0.1", 0
        )
        port: int = made.sockets[0].getsockname()[1]
        return port

    def tell(self, message: Any) -> None:
        """Let the front end take a message of another process."""
        self._call(self.server.take, message)

    def go(self) -> None:
        """Let what is generated go on, up to the next HOLD."""
        self._call(self._held.set)

    def _call(self, function: Any, *arguments: Any) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(*arguments), done.set()))
        assert done.wait(10), "the front end's loop stands still"

    def _take(self, command: Any) -> None:
        self.commands.append(command)
        if isinstance(command, Generate):
            self._loop.create_task(self._generate(command, list(self.script)))
        elif isinstance(command, Cancel):
            self._cancelled.add(command.request_id)
            self._held.set()

    async def _generate(self, command: Generate, script: list[Any]) -> None:
        number = 0
        for piece in script:
            if piece is HOLD:
                await self._held.wait()
                self._held.clear()
                continue
            if command.request_id in self._cancelled:
                return
            number += 1
            if piece.startswith(THOUGHT):
                news = delta(command, 0, "", number, reasoning=piece.removeprefix(THOUGHT))
            else:
                news = delta(command, 0, piece, number)
            self.server.take(Deltas([news]))
            await asyncio.sleep(0)
        self.server.take(Deltas([delta(command, 0, "", number, finish_reason="stop")]))
