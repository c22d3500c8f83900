"""Mutated bytes against the front end: through its protocol class, or over sockets to a server.

    python bench/byte_fuzz.py protocol [--streams 100000] [--seed 1] [--json]
    python bench/byte_fuzz.py MODEL_OR_URL [--streams 5000] [--seed 1] [--json] [-- SERVE FLAGS]

A stream is a few good requests, one after another, in which bytes were flipped, cut, doubled or
spliced with what HTTP parsers stumble over. It arrives in random pieces.

What must hold. Through the protocol class: nothing is raised or logged as a fault; what is written
is whole HTTP with statuses of ours and none of 500; every request that is let in is one that h11,
another parser, reads there with the same target and body (h11 takes more than we do, and that is
well: what it refuses or reads otherwise and we answer could be smuggled); in the end no request is
open, no timer runs, and the connection is closed. Over sockets: every answer is whole HTTP, no 5xx,
and the server serves on.

Prints what was found, and as the last line one JSON document. Exits 1 if anything was.
"""

import argparse
import json
import logging
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import h11

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from frontend_house import House, MockHandle, Response, parse_responses, resolved
from tree import Server, split_flags

from zlm.config import ServerLimits
from zlm.frontend.exchange import Exchange
from zlm.messages import Launch, ServerState

TOKENIZE = b'{"prompt":"x"}'
COMPLETE = b'{"prompt":"x","max_tokens":2}'
STREAM = b'{"prompt":"x","max_tokens":2,"stream":true}'


def _post(path: bytes, body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST %b HTTP/1.1\r\nHost: zlm\r\n%b%b\r\n%b" % (path, lines, length, body)


def _chunked(path: bytes, body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    head = b"POST %b HTTP/1.1\r\nHost: zlm\r\nTransfer-Encoding: chunked\r\n\r\n" % path
    return head + chunks + b"0\r\n\r\n"


SEEDS = [
    b"GET /health HTTP/1.1\r\nHost: zlm\r\n\r\n",
    b"GET /version?a=b HTTP/1.1\r\nHost: zlm:8000\r\nAccept: */*\r\nUser-Agent: x/1\r\n\r\n",
    b"HEAD /v1/models HTTP/1.1\r\nHost: zlm\r\nConnection: keep-alive\r\n\r\n",
    b"OPTIONS /v1/completions HTTP/1.1\r\nHost: zlm\r\nOrigin: http://a\r\n\r\n",
    b"GET /v1/models HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"GET /nowhere HTTP/1.1\r\nHost: zlm\r\nX-Request-Id: abc\r\n\r\n",
    _post(b"/tokenize", TOKENIZE, b"Content-Type: application/json"),
    _post(b"/v1/completions", COMPLETE, b"Authorization: Bearer k", b"X-Request-Timeout: 5"),
    _post(b"/v1/completions", STREAM),
    _post(b"/nowhere", b"GET /version HTTP/1.1\r\nHost: zlm\r\n\r\n"),
    _post(b"/detokenize", b'{"tokens":[1,2]}', b"Expect: 100-continue"),
    _chunked(b"/tokenize", TOKENIZE, 5),
    _chunked(b"/v1/completions", COMPLETE, 100),
]
PIECES = [
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"\r\n\r\n", b"\n\n", b"\r\n ", b"\x0b",
    b"\xff",
    b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Content-Length: -1\r\n",
    b"Content-Length : 5\r\n", b"Content-Length: 5, 5\r\n", b"content-length: 99999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n", b"Transfer-Encoding: chunked, gzip\r\n",
    b"Transfer-Encoding\r\n : chunked\r\n", b"Upgrade: h2c\r\nConnection: upgrade\r\n",
    b"Connection: close\r\n", b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n",
    b"Host: other\r\n", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"0\r\n\r\n", b"5\r\nhello\r\n",
    b"ffffffffffffffff\r\n", b"0x5\r\n", b"5;a=b\r\n",
    b"GET /version HTTP/1.1\r\nHost: zlm\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"{" * 200, b"[" * 2000,
    b'{"prompt":"\\ud83d"}', b'"prompt":', b"1e999", b"%00%2e%2e/", b"://", b"A: " + b"a" * 600,
]  # fmt: skip


def mutated(chance: random.Random) -> bytes:
    """Return a stream: some good requests, and what befell them."""
    data = bytearray(b"".join(chance.choices(SEEDS, k=chance.randint(1, 3))))
    for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3, 5, 8))):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice((1, 1, 2, 4, 16, 64)))
        match chance.randrange(7):
            case 0:
                data[at:at] = chance.choice(PIECES)
            case 1:
                data[at:end] = chance.choice(PIECES)
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = data[at:end] * chance.choice((1, 1, 2, 30))
            case 4 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 5 if at < len(data):
                data[at] = chance.randrange(256)
            case _:
                other = chance.choice(SEEDS)
                data[at:] = other[chance.randrange(len(other)) :]
    return bytes(data)


def split(data: bytes, chance: random.Random) -> Iterator[bytes]:
    """Yield *data* in the pieces that it may arrive in."""
    most = chance.choice((1, 7, 100, 100_000, 100_000))
    at = 0
    while at < len(data):
        size = chance.randint(1, most)
        yield data[at : at + size]
        at += size


@dataclass
class Findings:
    """What came of a run."""

    streams: int = 0
    let_in: int = 0  # requests
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


LOGGERS = ("zlm.frontend.protocol", "zlm.frontend.generation")  # those that tell of faults
Parsed = tuple[str, bytes]  # target and body of a request
_ZEROS = re.compile(rb"\r\n0{10,}(?=[0-9a-fA-F]{1,10}[\r;])")  # h11 takes 20 digits of a size
_SPACES = re.compile(rb"\A([A-Z]+) +(\S+) +")  # between words: several are as good as one


def as_h11_reads(data: bytes) -> list[Parsed]:
    """Return the requests that h11 finds in *data* before it refuses something.

    Each is read by a connection of its own, so that it matters not whether h11 would close one.
    """
    found: list[Parsed] = []
    while data := data.lstrip(b"\r\n"):  # as the empty lines before a request, any number of them
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        connection.receive_data(_ZEROS.sub(b"\r\n", _SPACES.sub(rb"\1 \2 ", data, count=1)))
        target, body = "", b""
        try:
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    target = event.target.decode("latin-1")
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:  # it needs more
                    return found
        except h11.RemoteProtocolError:
            return found
        found.append((target, body))
        data = bytes(connection.trailing_data[0])
    return found


class Watched:
    """A house that notes which requests are let in, and every fault that is logged."""

    def __init__(self) -> None:
        self.house = House()
        limits = ServerLimits(max_body_bytes=100_000)
        self.house.take(Launch(resolved(limits=limits, log_requests=False)))
        self.house.take(ServerState("ready"))
        self.let_in: list[Parsed] = []
        self.methods: list[str] = []
        self.logged: list[str] = []
        server = self.house.server
        begin, handle = server.begin, server.handle

        def noted_begin(exchange: Exchange) -> None:
            self.methods.append(exchange.request.method or "GET")
            begin(exchange)

        def noted_handle(exchange: Exchange) -> None:
            self.let_in.append((exchange.request.target, bytes(exchange.request.body)))
            handle(exchange)

        server.begin, server.handle = noted_begin, noted_handle  # type: ignore[method-assign]
        self._filter = lambda record: self._note(record)
        for name in LOGGERS:
            logging.getLogger(name).addFilter(self._filter)

    def _note(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.logged.append(record.getMessage())
        return False  # it goes no further

    def close(self) -> None:
        """Leave the log as it was."""
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self._filter)

    def run(self, data: bytes, chance: random.Random, findings: Findings) -> list[str]:
        """Send *data* on a connection of its own; return what is wrong with what came of it."""
        self.let_in.clear()
        self.methods.clear()
        self.logged.clear()
        house = self.house
        house.loop.timers.clear()
        house.commands.clear()
        client = house.client()
        try:
            for piece in split(data, chance):
                client.send(piece)
                if chance.random() < 0.3:
                    house.loop.turn()
            house.loop.turn()
            if chance.random() < 0.2:
                client.leave()
            for _ in range(3):  # a slow message, the wait for another, the rest of a refused one
                house.loop.advance(100)
                house.loop.turn()
        except Exception as error:
            return [f"raised {error!r}"]
        faults = [f"logged {line}" for line in self.logged]
        faults += self._differences(data)
        client.methods = list(self.methods)
        try:
            answers = client.responses()
        except (AssertionError, ValueError) as error:
            return [*faults, f"wrote what is no HTTP: {error!r}"]
        faults += faults_of(answers, findings)
        findings.let_in += len(self.let_in)
        held = house.server.body_memory.used_bytes
        if not client.transport.closed or house.server.connections or len(house.open) or held:
            faults.append("something is left open")
        if any(timer for timer in house.loop.timers if not timer.cancelled):
            faults.append(f"timers run on: {_names(house.loop.timers)}")
        return faults

    def _differences(self, data: bytes) -> list[str]:
        expected = as_h11_reads(data)
        for request in self.let_in:
            if request not in expected:
                return [f"let in {request!r}, where h11 reads {expected!r}"]
            expected = expected[expected.index(request) + 1 :]
        return []


def _names(timers: list[MockHandle]) -> str:
    return ", ".join(timer.function.__qualname__ for timer in timers if not timer.cancelled)


def faults_of(answers: list[Response], findings: Findings) -> list[str]:
    """Return what is wrong with *answers*, and count them."""
    faults = []
    for answer in answers:
        findings.statuses[answer.status] += 1
        if answer.status >= 500:
            faults.append(f"status {answer.status}: {answer.body[:200]!r}")
    return faults


def run_protocol(count: int, number: int) -> Findings:
    """Send *count* streams, drawn with the seed *number*, through the protocol class."""
    chance = random.Random(number)
    watched, findings = Watched(), Findings()
    began = time.monotonic()
    for _ in range(count):
        data = mutated(chance)
        findings.streams += 1
        found = watched.run(data, chance, findings)
        findings.faults += [f"{data[:600]!r}: {fault}" for fault in found]
    findings.seconds = time.monotonic() - began
    watched.house.assert_serves()
    watched.close()
    return findings


# -------------------------------------------------------------------------------- over sockets

QUIET_SECONDS = 0.05  # without a byte: the server waits for more, or has nothing to say
ANSWER_SECONDS = 20.0  # for the first byte of an answer to a good request
THREADS = 8


def send_stream(address: tuple[str, int], data: bytes, chance: random.Random) -> bytes:
    """Send *data*, and return what comes back until the server closes or is quiet."""
    received = b""
    with socket.create_connection(address, timeout=ANSWER_SECONDS) as connection:
        try:
            for piece in split(data, chance):
                connection.sendall(piece)
            connection.settimeout(QUIET_SECONDS)
            while piece := connection.recv(65536):
                received += piece
        except TimeoutError:
            pass  # quiet: what is left open is closed by us, as clients do
        except (ConnectionResetError, BrokenPipeError):
            pass  # it has closed before it had read all of a stream that it refuses
    return received


def _one(address: tuple[str, int], number: int) -> tuple[bytes, bytes]:
    chance = random.Random(number)
    data = mutated(chance)
    return data, send_stream(address, data, chance)


def run_sockets(url: str, count: int, number: int) -> Findings:
    """Send *count* streams over connections to the server at *url*, some at once."""
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    findings = Findings()
    began = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        numbers = range(number * 1_000_000, number * 1_000_000 + count)
        for data, received in pool.map(lambda each: _one(address, each), numbers):
            findings.streams += 1
            for status in _statuses(received):
                findings.statuses[status] += 1
                if status >= 500:
                    findings.faults.append(f"{data[:600]!r}: {received[:300]!r}")
            if received and not received.startswith(b"HTTP/1.1 "):
                findings.faults.append(f"{data[:600]!r}: {received[:300]!r}")
    findings.faults += serves(address)
    findings.seconds = time.monotonic() - began
    return findings


def _statuses(received: bytes) -> list[int]:
    """Return the statuses of the answers, as far as they can be told without the requests."""
    heads = received.split(b"HTTP/1.1 ")[1:]
    return [int(head[:3]) for head in heads if head[:3].isdigit()]


def serves(address: tuple[str, int]) -> list[str]:
    """Return what shows that the server does not serve on."""
    with socket.create_connection(address, timeout=ANSWER_SECONDS) as connection:
        connection.sendall(_post(b"/tokenize", TOKENIZE, b"Connection: close"))
        received = b""
        while piece := connection.recv(65536):
            received += piece
    (answer,) = parse_responses(received, ["POST"])
    return [] if answer.status == 200 else [f"afterwards: {answer.status} {answer.body[:300]!r}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", help="protocol, a model for zlm serve, or http://HOST:PORT")
    parser.add_argument("--streams", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the JSON document alone")
    words, flags = split_flags(sys.argv[1:])
    options = parser.parse_args(words)
    if options.target == "protocol":
        findings = run_protocol(options.streams or 100_000, options.seed)
    elif "://" in options.target:
        findings = run_sockets(options.target, options.streams or 5000, options.seed)
    else:
        server = Server(options.target, ["--disable-log-requests", *flags])
        try:
            findings = run_sockets(server.url, options.streams or 5000, options.seed)
        finally:
            server.stop()
    if not options.json:
        for fault in findings.faults[:100]:
            print(fault)
    summary = {
        "streams": findings.streams,
        "let_in": findings.let_in,
        "statuses": {str(status): n for status, n in sorted(findings.statuses.items())},
        "faults": len(findings.faults),
        "seconds": round(findings.seconds, 1),
    }
    print(json.dumps(summary))
    sys.exit(1 if findings.faults else 0)


if __name__ == "__main__":
    main()
