"""Sending a load: in an open loop when each request is due, in a closed one by clients in turn.

In an open loop no request waits for another. Every time is taken from when the request was to be
sent, so what a slow server, or this client, held up is in the figures (no coordinated omission);
how late the client was is told beside them. In a closed loop C clients each send a request, read
the answer to its end and send the next; times are taken from the sending.

Everything runs in one asyncio loop (uvloop); requests that are known before are made before.
"""

import asyncio
import gc
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop

from zlm.loadtest.plan import ENDPOINTS, Conversation, Pace, Shape
from zlm.loadtest.stream import Connection, Record, clock

Progress = Callable[[int, int], None]

TELL_SECONDS = 1.0
LEAD_SECONDS = 0.05  # from the loop's start to the first arrival of an open loop


@dataclass(frozen=True, slots=True)
class Server:
    """Where to send, and how."""

    host: str
    port: int
    prefix: str = ""  # of every path
    is_tls: bool = False
    api_key: str = ""
    keeps_alive: bool = True  # connections carry one request after another
    timeout_seconds: float = 600.0  # for one request

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Return one POST of *body*, ready to send."""
        data = msgspec.json.encode(body)
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        end = "" if self.keeps_alive else "Connection: close\r\n"
        head = (
            f"POST {self.prefix}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{key}{end}"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


@dataclass(frozen=True, slots=True)
class Work:
    """One client process's part of a level."""

    server: Server
    shape: Shape
    pace: Pace
    conversations: Sequence[Conversation]
    arrivals: Sequence[float]  # seconds after the start, of each conversation
    think_seconds: float = 0.0  # between an answer and the conversation's next request


@dataclass(slots=True)
class Seen:
    """What the clients saw: a record for every request, in no order."""

    records: list[Record]
    cpu_seconds: float  # of the client's processes, all together
    processes: int = 1


class Client:
    """The connections of one client process. Lives inside one event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tls = ssl.create_default_context() if server.is_tls else None
        self._idle: list[Connection] = []
        self._address = ""  # of the host, looked up once

    async def ask(
        self, request: bytes, record: Record, *, streamed: bool, keep_text: bool = False
    ) -> None:
        """Send *request* and note in *record* all that comes of it; raises nothing."""
        while True:
            is_reused = bool(self._idle)
            connection: Connection | None = self._idle.pop() if is_reused else None
            try:
                connection = connection or await self._connect()
            except (OSError, ssl.SSLError) as error:
                record.fail("connect", error)
                record.ended = clock()
                return
            await self._ask_on(connection, request, record, streamed, keep_text)
            # A server may close an idle connection just as it is used: that is no fault of its.
            if record.error != "disconnected" or not is_reused or connection.has_answer:
                return
            record.error = record.detail = ""

    async def _ask_on(
        self,
        connection: Connection,
        request: bytes,
        record: Record,
        streamed: bool,
        keep_text: bool,
    ) -> None:
        seconds = self._server.timeout_seconds
        alarm = asyncio.get_running_loop().call_later(
            seconds, connection.give_up, "timeout", f"no answer in {seconds:g} s"
        )
        await connection.ask(request, record, streamed=streamed, keep_text=keep_text)
        alarm.cancel()
        if connection.is_usable and self._server.keeps_alive:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> Connection:
        loop, server = asyncio.get_running_loop(), self._server
        if not self._address:
            found = await loop.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
            self._address = str(found[0][4][0])
        name = server.host if self._tls else None
        _, connection = await loop.create_connection(
            lambda: Connection(self._forget),
            self._address,
            server.port,
            ssl=self._tls,
            server_hostname=name,
        )
        return connection

    def _forget(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close what is idle."""
        for connection in list(self._idle):
            connection.close()


class Run:
    """One level's part, as it runs. Owns its records."""

    def __init__(self, work: Work, tell: Progress | None = None) -> None:
        self._work = work
        self._tell = tell
        self._client = Client(work.server)
        self._path = ENDPOINTS[work.shape.endpoint]
        self._records: list[Record] = []
        shape = work.shape
        self._ready = [
            (talk, work.server.post(self._path, shape.body([], talk[0])))
            for talk in work.conversations
        ]

    async def every(self) -> list[Record]:
        """Send it all and return the records."""
        telling = asyncio.create_task(self._told()) if self._tell else None
        try:
            await (self._open() if self._work.pace.is_open else self._closed())
        finally:
            if telling is not None:
                telling.cancel()
            self._client.close()
        return self._records

    async def _told(self) -> None:
        assert self._tell is not None
        total = sum(map(len, self._work.conversations))
        while True:
            await asyncio.sleep(TELL_SECONDS)
            self._tell(sum(record.ended > 0 for record in self._records), total)

    async def _closed(self) -> None:
        waiting = iter(self._ready)

        async def client(shared: Iterator[tuple[Conversation, bytes]]) -> None:
            for talk, first in shared:
                await self._talk(talk, first, 0.0)

        clients = self._work.pace.concurrency or len(self._ready)
        await asyncio.gather(*(client(waiting) for _ in range(clients)))

    async def _open(self) -> None:
        """Start each conversation when it is due, woken by a thread: the loop's timers are coarse.

        (They count milliseconds; the thread wakes within some 0.1 ms.)
        """
        loop, tasks, stop = asyncio.get_running_loop(), [], threading.Event()
        started_all = loop.create_future()
        cap = asyncio.Semaphore(self._work.pace.concurrency or len(self._ready) or 1)
        base = clock() + LEAD_SECONDS

        async def within(talk: Conversation, first: bytes, due: float) -> None:
            async with cap:
                await self._talk(talk, first, due)

        def start(at: int) -> None:
            if at == len(self._ready):
                started_all.set_result(None)
                return
            due = base + self._work.arrivals[at]
            tasks.append(loop.create_task(within(*self._ready[at], due)))

        def pace() -> None:
            for at, seconds in enumerate(self._work.arrivals):
                if stop.wait(max(0.0, base + seconds - clock())):
                    return
                loop.call_soon_threadsafe(start, at)
            loop.call_soon_threadsafe(start, len(self._ready))

        thread = threading.Thread(target=pace, daemon=True)
        thread.start()
        try:
            await started_all
            await asyncio.gather(*tasks)
        finally:
            stop.set()
            thread.join()

    async def _talk(self, talk: Conversation, first: bytes, due: float) -> None:
        """Go through a conversation; what is said after a request that failed is left out."""
        work, history = self._work, list[dict[str, str]]()
        for at, turn in enumerate(talk):
            request = first
            if at:
                if work.think_seconds:
                    await asyncio.sleep(work.think_seconds)
                due = 0.0  # it is due when the answer before it is read
                request = work.server.post(self._path, work.shape.body(history, turn))
            record = Record(turn.output_tokens, turn.input_tokens)
            self._records.append(record)
            record.sent = clock()
            record.intended = due or record.sent
            goes_on = at + 1 < len(talk)
            streamed = work.shape.is_streamed
            await self._client.ask(request, record, streamed=streamed, keep_text=goes_on)
            _judge(record, work.shape)
            if record.error:
                return
            if goes_on:
                history += [*turn.as_messages(), {"role": "assistant", "content": record.text}]


def _judge(record: Record, shape: Shape) -> None:
    """Where EOS is ignored, an answer of other tokens than were asked for is none."""
    told, asked = record.usage_tokens, record.asked_tokens
    if shape.ignore_eos and told and told != asked:
        record.fail("short", f"{told} tokens of {asked}: is ignore_eos unknown to the server?")


def run_here(work: Work, start_at: float = 0.0, tell: Progress | None = None) -> Seen:
    """Run *work* in this process, from *start_at* (monotonic clock) or at once.

    *tell* gets how many requests are done, and of how many, every second.
    """
    run = Run(work, tell)
    gc.collect()
    gc.disable()  # a collection would hold events up
    try:
        time.sleep(max(0.0, start_at - clock()))
        cpu = time.process_time()
        records = uvloop.run(run.every())
        return Seen(records, time.process_time() - cpu)
    finally:
        gc.enable()
