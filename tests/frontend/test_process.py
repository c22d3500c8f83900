"""The real process body on real sockets: uvloop, HTTP over TCP and a Unix socket, ZeroMQ inboxes.

The tokenizer is a fake on the other end of its inbox; the client is OpenAI's, in a thread.
"""

import asyncio
import http.client
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import uvloop
import zmq

from zlm.frontend.listening import LISTEN_FD, LISTEN_WAIT
from zlm.frontend.process import serve
from zlm.ipc.sockets import AsyncInbox, Inbox, Outbox, address
from zlm.messages import (
    Drain,
    Drained,
    Launch,
    Ready,
    ServerState,
    Stop,
    ToFrontend,
    ToSupervisor,
    ToTokenizer,
)
from zlm.process import heartbeat


class NoHeartbeat:
    def beat(self, work_pending, steps):
        self.last = (work_pending, steps)


class FakeChild:
    """What ``zlm.process.child.Child`` is to a body, in this process."""

    def __init__(self, runtime, context):
        self.index = 0
        self.incarnation = 0
        self.runtime = runtime
        self.context = context
        self.supervisor = Outbox(context, address(runtime, "supervisor"))
        self.heartbeat = NoHeartbeat()

    def outbox(self, role, index=0, incarnation=0):
        return Outbox(self.context, address(self.runtime, role, index, incarnation))

    def say_ready(self):
        self.supervisor.send(Ready("frontend", self.index))

    def async_inbox(self, accepts, handler):
        return AsyncInbox(self.context, address(self.runtime, "frontend"), accepts, handler)


class Stage:
    """A front end in a thread, with the ends of its peers' sockets in our hands."""

    def __init__(self, runtime, listening, tokenizer):
        self.runtime = runtime
        heartbeat.create(runtime, 4)
        self.context = zmq.Context()
        self.supervisor = Inbox(self.context, address(runtime, "supervisor"), ToSupervisor)
        self.tokens = Inbox(self.context, address(runtime, "tokenizer"), ToTokenizer)
        self.frontend = Outbox(self.context, address(runtime, "frontend"))
        self.commands = []
        self.tokenizer = tokenizer
        self._ended = threading.Event()
        os.environ[LISTEN_FD] = str(os.dup(listening.fileno()))
        child = FakeChild(runtime, self.context)
        self.thread = threading.Thread(target=lambda: uvloop.run(serve(child)))
        self.thread.start()
        self.answering = threading.Thread(target=self._answer)
        self.answering.start()

    def _answer(self):
        # Its own way back: sockets are not shared between threads.
        back = Outbox(self.context, address(self.runtime, "frontend"))
        while not self._ended.is_set():
            for command in self.tokens.receive(20):
                self.commands.append(command)
                for message in self.tokenizer(command):
                    back.send(message)
        back.close()

    def launch(self, resolved):
        self.frontend.send(Launch(resolved))
        assert self.supervisor.receive(5000) == [Ready("frontend", 0)]
        self.frontend.send(ServerState("ready"))

    def stop(self):
        self.frontend.send(Stop())
        self.thread.join(10)
        assert not self.thread.is_alive()
        self._ended.set()
        self.answering.join(10)
        self.context.destroy(linger=0)


@pytest.fixture
def tokenizer(default_answer):
    return default_answer


@pytest.fixture
def stage(tmp_path, tokenizer):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stage = Stage(tmp_path, listening, tokenizer)
        stage.port = listening.getsockname()[1]
        yield stage
        stage.stop()


def _wait_ready(port):
    """Poll health until the ServerState has been taken in; each poll is an answered request."""
    for _ in range(1000):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        status = connection.getresponse().status
        connection.close()
        if status == 200:
            return
    pytest.fail("never ready")


@pytest.fixture
def client(stage, make_resolved):
    stage.launch(make_resolved(api_keys=("secret",)))
    _wait_ready(stage.port)
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{stage.port}/v1", api_key="secret", max_retries=0
    ) as client:
        yield client


TEXT = "Hello wörld!"
MESSAGES = [{"role": "user", "content": "hi"}]


def test_openai_client(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    completion = client.completions.create(model="tiny", prompt="x", n=2, stop=["a"], seed=1)
    assert [choice.text for choice in completion.choices] == [TEXT, TEXT]
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert chat.choices[0].message.content == TEXT
    assert chat.usage.prompt_tokens_details.cached_tokens == 2
    with client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.total_tokens == 9


def test_openai_client_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=5)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert client.completions.create(model="tiny", prompt="x").choices[0].text == TEXT


def test_many_streams_at_once(client):
    def stream(number):
        with client.completions.create(model="tiny", prompt=str(number), stream=True) as chunks:
            return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(stream, range(64))) == [TEXT] * 64


def test_large_upload_is_refused_and_seen(stage, client):
    """A client that writes 40 MB before it reads still gets the 413."""
    connection = http.client.HTTPConnection("127.0.0.1", stage.port, timeout=10)
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", b" " * 40_000_000, headers)
    assert connection.getresponse().status == 413
    connection.close()
    assert client.completions.create(model="tiny", prompt="x").choices[0].text == TEXT


def test_drain_and_stop(stage, client):
    keeping = http.client.HTTPConnection("127.0.0.1", stage.port, timeout=10)
    keeping.request("GET", "/health/live")
    keeping.getresponse().read()
    stage.frontend.send(Drain())
    assert stage.supervisor.receive(5000) == [Drained(0)]
    assert keeping.sock.recv(1) == b""  # the idle connection is closed
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="tiny", prompt="x")
    assert caught.value.status_code == 503
    assert "shutting down" in caught.value.message


def test_client_that_closes_its_socket_cancels(stage, client):
    stage.tokenizer = lambda command: []
    raw = socket.create_connection(("127.0.0.1", stage.port))
    body = b'{"prompt":"x"}'
    raw.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: z\r\n"
        b"Authorization: Bearer secret\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    asyncio.run(_until(lambda: len(stage.commands) == 1))
    raw.close()
    asyncio.run(_until(lambda: len(stage.commands) == 2))
    generate, cancel = stage.commands
    assert cancel.request_id == generate.request_id


async def _until(condition):
    async with asyncio.timeout(2.0):
        while not condition():
            await asyncio.sleep(0)


def test_unix_socket(tmp_path, default_answer, make_resolved):
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        stage = Stage(tmp_path, listening, default_answer)
        try:
            stage.launch(make_resolved())
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(path))
                raw.sendall(b"GET /health/live HTTP/1.1\r\nHost: z\r\nConnection: close\r\n\r\n")
                assert raw.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
        finally:
            stage.stop()


def test_clients_wait_in_a_socket_of_systemd(tmp_path, default_answer, make_resolved, monkeypatch):
    """Nobody is told that the model loads, and who comes after Drain is left to the next server."""
    monkeypatch.setenv(LISTEN_WAIT, "1")
    ask = b"GET /health HTTP/1.1\r\nHost: z\r\nConnection: close\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        early = socket.create_connection(listening.getsockname(), timeout=10)
        early.sendall(ask)
        stage = Stage(tmp_path, listening, default_answer)
        try:
            stage.launch(make_resolved())
            assert early.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
            stage.frontend.send(Drain())
            assert stage.supervisor.receive(5000) == [Drained(0)]
            late = socket.create_connection(listening.getsockname(), timeout=10)
            listening.settimeout(10)
            listening.accept()[0].close()
            assert late.recv(1) == b""
        finally:
            stage.stop()


def test_messages_of_the_inbox_have_handlers(make_house):
    """Every message a front end may get is one that it takes."""
    from typing import get_args

    handled = {"Launch", "ServerState", "Drain", "Stop", "Deltas", "Failed", "Tokens"}
    handled |= {"DetokenizedText", "Pooled", "Administer", "Administered"}
    handled |= {"PeerLost", "PeerUp", "Probe"}
    assert {kind.__name__ for kind in get_args(ToFrontend)} == handled


def test_mutated_streams_over_sockets(stage, make_resolved):
    """A short run of bench/byte_fuzz.py over connections: no 5xx, and the server serves on."""
    sys.path.append(str(Path(__file__).parents[2] / "bench"))
    import byte_fuzz

    stage.launch(make_resolved())
    _wait_ready(stage.port)
    findings = byte_fuzz.run_sockets(f"http://127.0.0.1:{stage.port}", 200, 1)
    assert findings.faults == [] and findings.streams == 200
    assert findings.statuses[200] > 20 and findings.statuses[400] > 20
