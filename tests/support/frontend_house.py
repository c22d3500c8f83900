"""A front end without sockets, loop or other processes.

A ``House`` is the real server with its connections on mock transports and a mock loop; its
tokenizer is a function from a command to the messages it answers with, which a test may replace.
"""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from specs import small_spec

from zlm.api_keys import api_key
from zlm.config import Config, ModelOptions, Resolved, ServerLimits, ServerOptions
from zlm.frontend.metrics import FrontendMetrics
from zlm.frontend.open_requests import OpenRequests
from zlm.frontend.protocol import HttpProtocol
from zlm.frontend.server import Server
from zlm.messages import (
    Cancel,
    Delta,
    Deltas,
    Detokenize,
    DetokenizedText,
    Generate,
    Launch,
    ServerState,
    ToFrontend,
    Tokenize,
    Tokens,
    ToTokenizer,
)

MODEL = "tiny"
WORDS = ["Hel", "lo ", "wörld", "!"]


class MockHandle:
    def __init__(self, when: float, function: Callable[[], None]) -> None:
        self.when = when
        self.function = function
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class MockLoop:
    """Time stands still until ``advance``; what is to run soon runs in ``turn``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.soon: list[Callable[[], None]] = []
        self.timers: list[MockHandle] = []

    def call_soon(self, function: Callable[[], None]) -> None:
        self.soon.append(function)

    def call_later(self, seconds: float, function: Callable[[], None]) -> MockHandle:
        handle = MockHandle(self.now + seconds, function)
        self.timers.append(handle)
        return handle

    def turn(self) -> None:
        while self.soon:
            self.soon.pop(0)()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer.when <= self.now]
        self.timers = [timer for timer in self.timers if timer.when > self.now]
        for timer in due:
            if not timer.cancelled:
                timer.function()


class MockTransport:
    """Keeps what is written. Once closed, it says so to its protocol in the next turn."""

    def __init__(self, protocol: HttpProtocol, loop: MockLoop) -> None:
        self.protocol = protocol
        self.loop = loop
        self.written: list[bytes] = []
        self.unsent_bytes = 0
        self.closed = False
        self.aborted = False
        self.eof_written = False
        self.reading = True

    def write(self, data: bytes) -> None:
        assert isinstance(data, bytes)
        assert not self.eof_written, "written after the end"
        self.written.append(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof_written = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.loop.call_soon(lambda: self.protocol.connection_lost(None))

    def abort(self) -> None:
        self.aborted = True
        self.close()


class Response:
    """One parsed response."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes, ended: bool) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.ended = ended  # the end of the body is there

    def json(self) -> Any:
        return json.loads(self.body.decode("utf-8"), parse_constant=pytest.fail)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        return error

    def events(self) -> list[Any]:
        """The payloads of an event stream; ``[DONE]`` stays a string."""
        frames = self.body.decode("utf-8").split("\n\n")
        assert frames.pop() == ""
        assert all(frame.startswith("data: ") for frame in frames)
        payloads = [frame.removeprefix("data: ") for frame in frames]
        return [p if p == "[DONE]" else json.loads(p, parse_constant=pytest.fail) for p in payloads]

    def chunks(self) -> list[Any]:
        """The chunks of a stream that ended well: exactly one end marker, at the end."""
        events = self.events()
        assert events.pop() == "[DONE]"
        assert "[DONE]" not in events
        assert self.ended
        return events


def parse_responses(data: bytes, methods: list[str]) -> list[Response]:
    """Split what a server wrote; *methods* are those of the requests, in order."""
    responses = []
    methods = list(methods)
    while data:
        head, separator, data = data.partition(b"\r\n\r\n")
        assert separator, f"no end of head in {head!r}"
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, status, _ = status_line.split(" ", 2)
        assert version == "HTTP/1.1"
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(": ")
            assert name == name.lower() and name not in headers
            headers[name] = value
        if status == "100":
            responses.append(Response(100, headers, b"", True))
            continue
        method = methods.pop(0) if methods else "GET"
        if method == "HEAD" or status == "204":
            body, ended = b"", True
        elif "content-length" in headers:
            length = int(headers["content-length"])
            body, data = data[:length], data[length:]
            ended = len(body) == length
        elif headers.get("transfer-encoding") == "chunked":
            body, data, ended = _dechunk(data)
        else:
            body, data, ended = data, b"", False
        responses.append(Response(int(status), headers, body, ended))
    return responses


def _dechunk(data: bytes) -> tuple[bytes, bytes, bool]:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        piece, data = data[:length], data[length:]
        assert data[:2] == b"\r\n"
        data = data[2:]
        if length == 0:
            return body, data, True
        body += piece
    return body, b"", False


class Client:
    """One connection to the house."""

    def __init__(self, house: "House") -> None:
        self.house = house
        self.protocol = HttpProtocol(house.server, house.loop)  # type: ignore[arg-type]
        self.transport = MockTransport(self.protocol, house.loop)
        self.methods: list[str] = []
        self.protocol.connection_made(self.transport)  # type: ignore[arg-type]

    def send(self, data: bytes) -> None:
        """Deliver bytes as they would arrive from the network."""
        if not self.transport.closed:
            self.protocol.data_received(data)

    @property
    def output(self) -> bytes:
        return b"".join(self.transport.written)

    def responses(self) -> list[Response]:
        return parse_responses(self.output, self.methods)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> None:
        """Send a request; a body that is not bytes goes as JSON."""
        self.methods.append(method)
        self.send(render(method, path, body, headers))

    def leave(self) -> None:
        """Go away, as a client that closes its socket does."""
        if not self.protocol.eof_received():
            self.transport.close()
        self.house.loop.turn()


def render(
    method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> bytes:
    """Return the bytes of a request."""
    fields = {"Host": "zlm", **(headers or {})}
    data = b""
    if body is not None:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        fields.setdefault("Content-Type", "application/json")
        fields["Content-Length"] = str(len(data))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


class House:
    """The server, its loop and its tokenizers."""

    def __init__(self, *, index: int = 0, num_tokenizers: int = 1) -> None:
        self.loop = MockLoop()
        self.open = OpenRequests(index, self.loop.call_soon)
        self.server = Server(self.open, FrontendMetrics(index))
        self.server.dashboard.later = self.loop.call_later  # type: ignore[assignment]
        self.commands: list[Any] = []  # all that was sent to tokenizers
        self.tokenizer: Callable[[Any], list[Any]] = answer
        senders = [self._sender(number) for number in range(num_tokenizers)]
        self.sent_to: list[int] = []
        self.open.connect(senders)

    def _sender(self, number: int) -> Callable[[Any], None]:
        def send(command: Any) -> None:
            # Through the codec, as between processes.
            command = msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=ToTokenizer)
            self.commands.append(command)
            self.sent_to.append(number)
            for message in self.tokenizer(command):
                self.loop.call_soon(lambda message=message: self.take(message))

        return send

    def take(self, message: Any) -> None:
        """Deliver a message of another process."""
        frame = msgspec.msgpack.encode(message)
        self.server.take(msgspec.msgpack.decode(frame, type=ToFrontend))

    def client(self) -> Client:
        return Client(self)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Response:
        """Make one request on a connection of its own, and return the whole answer."""
        client = self.client()
        client.request(method, path, body, headers)
        self.loop.turn()
        responses = client.responses()
        assert len(responses) == 1, f"{len(responses)} responses"
        return responses[0]

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Response:
        return self.ask("POST", path, body, headers)

    def complete(self, **fields: Any) -> Response:
        return self.post("/v1/completions", {"prompt": "x", **fields})

    def chat(self, **fields: Any) -> Response:
        messages = [{"role": "user", "content": "hi"}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def assert_serves(self) -> None:
        """One good request answers 200, and nothing is left open."""
        before = self.tokenizer
        self.tokenizer = answer
        assert self.complete(max_tokens=4).status == 200
        self.tokenizer = before

    def refused(self, response: Response, status: int, param: str | None = None) -> str:
        """Check that *response* is an error of that status and that the server lives on.

        Returns the error's message.
        """
        assert response.status == status, response.body
        error = response.error
        assert error["message"]
        if param is not None:
            assert error["param"] == param, error
        self.assert_serves()
        assert len(self.open) == 0
        return error["message"]

    def generated(self) -> Generate:
        """The last Generate that a tokenizer got."""
        return [c for c in self.commands if isinstance(c, Generate)][-1]

    def cancelled(self) -> list[int]:
        return [c.request_id for c in self.commands if isinstance(c, Cancel)]


def delta(command: Generate, index: int, text: str, tokens: int, **fields: Any) -> Delta:
    """A delta of *command* with the counts filled in: 5 prompt tokens, 2 of them cached."""
    return Delta(command.request_id, index, text, 5, 2, tokens, **fields)


def answer(command: Any) -> list[Any]:
    """The default tokenizer: WORDS as each choice's text, cut by nothing."""
    match command:
        case Generate():
            num_choices = max(1, len(command.prompts)) * command.params.n
            choices = range(num_choices)
            if not command.stream:
                text = "".join(WORDS)
                done = [delta(command, i, text, 4, finish_reason="stop") for i in choices]
                return [Deltas([item]) for item in done]
            batches = [
                Deltas([delta(command, i, word, n + 1) for i in choices])
                for n, word in enumerate(WORDS)
            ]
            last = [delta(command, i, "", 4, finish_reason="stop") for i in choices]
            return [*batches, Deltas(last)]
        case Tokenize():
            strings = ["a", "b"] if command.return_token_strings else None
            return [Tokens(command.request_id, [7, 8], strings)]
        case Detokenize():
            return [DetokenizedText(command.request_id, f"{len(command.token_ids)} tokens")]
    return []


def resolved(**server: Any) -> Resolved:
    """A configuration of a tiny model; keywords are ServerOptions'."""
    names = server.pop("names", (MODEL,))
    for field in ("api_keys", "admin_api_keys"):
        keys = server.get(field, ())
        admin = field.startswith("admin")
        server[field] = tuple(api_key(k, admin=admin) if isinstance(k, str) else k for k in keys)
    spec = small_spec(vocab_size=100, max_position=256)
    return Resolved(
        config=Config(model=ModelOptions(model="/models/tiny"), server=ServerOptions(**server)),
        spec=spec,
        model_path="/models/tiny",
        tokenizer_path="/models/tiny",
        served_names=names,
        device="cpu",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_groups=(),
    )


# ---------------------------------------------------- fixtures, for those conftests that name them


@pytest.fixture
def make_house() -> Callable[..., House]:
    """Make a house that is ready; keywords are ServerOptions' (``limits`` a dict)."""

    def make(*, num_tokenizers: int = 1, ready: bool = True, **server: Any) -> House:
        house = House(num_tokenizers=num_tokenizers)
        if "limits" in server:
            server["limits"] = ServerLimits(**server["limits"])
        house.take(Launch(resolved(**server)))
        if ready:
            house.take(ServerState("ready"))
        return house

    return make


@pytest.fixture
def make_resolved() -> Callable[..., Resolved]:
    return resolved


@pytest.fixture
def house(make_house: Callable[..., House]) -> House:
    return make_house()


@pytest.fixture
def bare_house() -> House:
    """A house that no Launch has reached."""
    return House()
