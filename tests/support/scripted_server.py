"""An OpenAI-compatible server that computes nothing and answers by a script of delays.

    with ScriptedServer(Script(first=0.05, gap=0.01)) as server: ... server.url, server.served

Runs in a thread with a loop of its own. It notes when each request was read and when each event was
written, on the clock that clients measure with, so what they saw can be held against what was.
"""

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from zlm.loadtest.client import Server, Work
from zlm.loadtest.plan import Pace, Shape, Turn

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LEAD = b'{"index":0,"finish_reason":null,'


@dataclass(frozen=True)
class Script:
    """How the server behaves. Times in seconds."""

    first: float = 0.0  # from a request to its first event
    gap: float = 0.0  # between two events
    tokens_per_event: int = 1
    one_at_a_time: bool = False  # requests wait for each other
    tells_usage: bool = True
    failures: dict[int, str] = field(
        default_factory=dict
    )  # by number of the request, what goes wrong


@dataclass
class Served:
    """One request as the server saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    read_at: float
    written_at: list[float] = field(default_factory=list)


class ScriptedServer:
    """A context manager: the server listens within it."""

    def __init__(self, script: Script, port: int = 0) -> None:
        """Answer by *script*, on *port* of the loopback interface or on any."""
        self._script = script
        self.served: list[Served] = []
        self.num_connections = 0
        self.port = port
        self._loop = asyncio.new_event_loop()
        self._turn = asyncio.Lock()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "ScriptedServer":
        self._thread.start()
        assert self._is_up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        async def start() -> None:
            server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
            self.port = server.sockets[0].getsockname()[1]
            self._is_up.set()

        self._loop.create_task(start())
        self._loop.run_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._request(reader, writer):
                pass
        writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection goes on."""
        start, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        _, path, _ = start.split()
        if not data:
            models = {"object": "list", "data": [{"id": "scripted", "object": "model"}]}
            _write_json(writer, 200, models if path.endswith("/models") else {})
            return True
        served = Served(path, headers, json.loads(data), time.perf_counter())
        self.served.append(served)
        failure = self._script.failures.get(len(self.served) - 1, "")
        if failure.isdigit():
            _write_json(writer, int(failure), {"error": {"message": "as scripted"}})
            return True
        if failure == "close":
            return False
        async with self._turn if self._script.one_at_a_time else contextlib.nullcontext():
            if not served.body.get("stream"):
                await asyncio.sleep(self._script.first)
                _write_json(writer, 200, _whole(served.body))
                return True
            return await self._stream(served, writer, failure)

    async def _stream(self, served: Served, writer: asyncio.StreamWriter, failure: str) -> bool:
        script, body = self._script, served.body
        is_chat = served.path.endswith("/chat/completions")
        writer.write(HEAD)
        if is_chat:  # who speaks: no output yet
            writer.write(_chunk(LEAD + b'"delta":{"role":"assistant","content":""}}'))
        number = -(-body["max_tokens"] // script.tokens_per_event)
        number -= failure == "short"
        text = b'"delta":{"content":"%d "}}' if is_chat else b'"text":"%d "}'
        due = self._loop.time() + script.first
        for at in range(number):
            await asyncio.sleep(due - self._loop.time())
            due += script.gap
            served.written_at.append(time.perf_counter())
            writer.write(_chunk(LEAD + text % at))
            if failure == "cut":
                return False
            if failure == "event":
                writer.write(_chunk(b"", {"error": {"message": "as scripted"}}))
        usage = {"prompt_tokens": input_tokens(body), "completion_tokens": body["max_tokens"]}
        if script.tells_usage:
            told = {**usage, "completion_tokens": usage["completion_tokens"] - (failure == "short")}
            writer.write(_chunk(b"", {"choices": [], "usage": told}))
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        return served.headers.get("connection") != "close"


def input_tokens(body: dict[str, Any]) -> int:
    """Return the tokens of a prompt: ids as they are, one for a word, 7 more for a chat."""
    if "messages" in body:
        return 7 + sum(len(message["content"].split()) for message in body["messages"])
    prompt = body["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def _whole(body: dict[str, Any]) -> dict[str, Any]:
    text = " ".join(map(str, range(body["max_tokens"])))
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    choice |= {"message": {"content": text}} if "messages" in body else {"text": text}
    usage = {"prompt_tokens": input_tokens(body), "completion_tokens": body["max_tokens"]}
    return {"choices": [choice], "usage": usage}


def _chunk(choice: bytes, event: dict[str, Any] | None = None) -> bytes:
    data = json.dumps(event).encode() if event else b'{"choices":[%b]}' % choice
    frame = b"data: %b\n\n" % data
    return b"%x\r\n%b\r\n" % (len(frame), frame)


def _write_json(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)


def work(server: ScriptedServer, pace: Pace, number: int, **more: Any) -> Work:
    """Return a load of *number* requests of 3 ids, 5 tokens out; *more*: of Shape, Server, Work."""
    shape = {k: more.pop(k) for k in ("endpoint", "is_streamed", "ignore_eos") if k in more}
    server_options = {k: more.pop(k) for k in ("keeps_alive", "timeout_seconds") if k in more}
    given = {
        "conversations": [(Turn([5, 6, 7], 3, 5),)] * number,
        "arrivals": [0.0] * number,
        **more,
    }
    shaped = Shape(model="scripted", **shape)
    return Work(Server("127.0.0.1", server.port, **server_options), shaped, pace, **given)
