"""The load of a soak: requests of all kinds, good and bad, and the clients that send them.

Owns the tally of what became of each request. Every request that is sent ends in exactly one way;
one that ends in another way than those that are allowed is a failure. Knows no processes: whether a
fault may be blamed on a kill is asked of ``Disturbances``.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

GIVEN_UP = 0.1  # part of the good requests
BAD = 0.1  # part of all requests
SHARED = 1 / 3  # part of the prompts that begin with a shared prefix
ANSWER_SECONDS = 300.0  # an answer that takes longer is a failure
FIRST_ID = 100
LEFT = b"left"  # stands for the answer to a request that was given up
SETTLE_SECONDS = 2.0  # after a recovery, for answers that a kill spoilt to come

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.9},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_k": {"temperature": 1.2, "top_k": 40, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.7, "logprobs": 5},
    "seeded": {"temperature": 1.0, "seed": 7},
    "two": {"temperature": 1.0, "n": 2},
    "bias": {"temperature": 0, "logit_bias": {"300": 5.0, "301": -100.0}, "min_tokens": 1},
    "stop": {"temperature": 1.0, "stop": ["the", "\n\n", " a "]},
    "regex": {"temperature": 1.0, "structured_outputs": {"regex": "[a-z]{1,6}"}},
}
TEXT_KINDS = {"stop", "regex"}  # they need a tokenizer, and may end before their limit

_JSON = "Content-Type: application/json\r\n"


def _post(body: str, head: str = _JSON, path: str = "/v1/completions") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n"
        f"Connection: close\r\n\r\n{body}"
    ).encode()


BAD_REQUESTS: dict[str, tuple[bytes, int]] = {  # what is sent, and the status that answers it
    "broken JSON": (_post('{"prompt": '), 400),
    "unknown field": (_post('{"prompt": [5], "colour": 1}'), 400),
    "value out of range": (_post('{"prompt": [5], "n": 0}'), 400),
    "token id out of range": (_post('{"prompt": [2147483647]}'), 400),
    "too long": (_post('{"prompt": [5], "max_tokens": 99999999}'), 400),
    "no such model": (_post('{"prompt": [5], "model": "none"}'), 404),
    "no such path": (_post("{}", path="/v1/nothing"), 404),
    "not JSON": (_post("x", "Content-Type: text/plain\r\n"), 415),
    "wrong method": (
        b"DELETE /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        405,
    ),
    "two lengths": (_post('{"prompt": [5]}', f"{_JSON}Content-Length: 3\r\n"), 400),
    "huge header": (_post('{"prompt": [5]}', f"X: {'x' * 100_000}\r\n"), 431),
}


@dataclass(frozen=True)
class Request:
    """One request and what its client does with it."""

    kind: str
    body: dict[str, Any]
    give_up_after: int | None  # reads of the answer until the connection is closed; None: never

    @property
    def sequences(self) -> int:
        n: int = self.body.get("n", 1)
        return n

    @property
    def tokens(self) -> int:
        """Output tokens of a full answer; of TEXT_KINDS the most there can be."""
        tokens: int = self.body["max_tokens"] * self.sequences
        return tokens


@dataclass
class Disturbances:
    """The times in which a fault of the server is owed to us, who killed one of its processes."""

    times: list[list[float]] = field(default_factory=list)  # [kill, recovery]
    cuts: list[float] = field(default_factory=list)  # when a front end, and its connections, died

    def begin(self, *, cuts: bool) -> None:
        """Note that a process is killed now; with *cuts* connections die with it."""
        now = time.monotonic()
        self.times.append([now, float("inf")])
        if cuts:
            self.cuts.append(now)

    def end(self) -> float:
        """Note that the server serves again; return the seconds that took."""
        self.times[-1][1] = time.monotonic()
        return self.times[-1][1] - self.times[-1][0]

    def excuse(self, start: float, end: float) -> bool:
        """Whether a request from *start* to *end* may have been answered with a fault."""
        return any(kill <= end and start <= back + SETTLE_SECONDS for kill, back in self.times)

    def cut(self, start: float, end: float) -> bool:
        """Whether the connection of such a request may have been cut."""
        return any(start <= at + SETTLE_SECONDS and at <= end for at in self.cuts)


@dataclass
class Tally:
    """What happened to the requests."""

    answered: Counter[str] = field(default_factory=Counter)  # in full, by kind
    sequences: int = 0  # of those
    most_sequences: int = 0  # of all good requests that were sent
    refused: Counter[str] = field(default_factory=Counter)  # bad ones, as they must be
    given_up: int = 0
    turned_away: int = 0  # with a 503, while a process was down
    failed: int = 0  # with an error, because a process was killed
    cut: int = 0  # without an answer, because the front end that held them was killed
    tokens: int = 0
    failures: list[str] = field(default_factory=list)  # what must not be
    seconds: list[float] = field(default_factory=list)  # of answers in full


def make_request(rng: random.Random, options: argparse.Namespace, kinds: list[str]) -> Request:
    """Draw a good request; lengths are spread evenly over their logarithm."""
    kind = rng.choice(kinds)
    length = round(options.most_input ** rng.random())
    prompt = [rng.randrange(FIRST_ID, options.last_id) for _ in range(length)]
    if rng.random() < SHARED:
        shared = random.Random(rng.randrange(4))  # one of a few sequences of ids
        count = min(length - 1, 512)
        prompt[:count] = [shared.randrange(FIRST_ID, options.last_id) for _ in range(count)]
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": round(options.most_output ** rng.random()),
        "ignore_eos": kind != "regex",
        "stream": rng.random() < 0.7,
        **KINDS[kind],
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    given_up = rng.random() < GIVEN_UP
    return Request(kind, body, rng.randrange(12) if given_up else None)


async def exchange(port: int, data: bytes, most_reads: int | None = None) -> bytes:
    """Send *data*; return all that comes back, LEFT if it was given up after *most_reads*."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(data)
        await writer.drain()
        received = bytearray()
        reads = 0
        while most_reads is None or reads < most_reads:
            chunk = await reader.read(1 << 16)
            if not chunk:
                return bytes(received)
            received += chunk
            reads += 1
        return LEFT
    finally:
        writer.close()


def status_of(answer: bytes) -> int:
    """Return the status of an answer; 0 if it has none."""
    line = answer.split(b"\r\n", 1)[0].split(b" ")
    return int(line[1]) if len(line) > 1 and line[1].isdigit() else 0


def is_error(answer: bytes) -> bool:
    """Whether *answer* is whole and says that the request failed: by status, or in the stream."""
    status, body = status_of(answer), answer.partition(b"\r\n\r\n")[2]
    if status >= 500:
        return b'"error"' in body
    return status == 200 and b'data: {"error"' in body and b"[DONE]" not in body


def fault_of(request: Request, answer: bytes) -> str | None:
    """Return what is wrong with *answer*, None if it is whole."""
    if status_of(answer) != 200:
        return f"status: {answer[:300]!r}"
    body = answer.partition(b"\r\n\r\n")[2]
    if request.body["stream"] and b"data: [DONE]" not in body:
        return f"the stream has no end: {answer[-300:]!r}"
    _, found, tail = body.rpartition(b'"completion_tokens":')
    tokens = int(tail.split(b",")[0].split(b"}")[0]) if found else -1
    if request.kind in TEXT_KINDS:
        return None if 1 <= tokens <= request.tokens else f"{tokens} tokens of {request.tokens}"
    return None if tokens == request.tokens else f"{tokens} tokens of {request.tokens}"


class Client:
    """Sends one request after another and tallies what becomes of each."""

    def __init__(
        self,
        port: int,
        rng: random.Random,
        options: argparse.Namespace,
        tally: Tally,
        disturbances: Disturbances,
    ) -> None:
        self._port = port
        self._rng = rng
        self._options = options
        self._tally = tally
        self._disturbances = disturbances
        self._kinds = [kind for kind in KINDS if options.text or kind not in TEXT_KINDS]

    async def run(self, over: asyncio.Event) -> None:
        """Send requests until *over*."""
        while not over.is_set():
            good = await (self._send_bad() if self._rng.random() < BAD else self._send_good())
            if not good:
                await asyncio.sleep(0.2)

    async def _send_good(self) -> bool:
        """Send a good request; return whether the server is up."""
        tally, request = self._tally, make_request(self._rng, self._options, self._kinds)
        data = _post(json.dumps(request.body))
        tally.most_sequences += request.sequences
        start = time.monotonic()
        answer = await self._ask(request.kind, data, request.give_up_after)
        if answer is None:
            return False
        if answer is LEFT:
            tally.given_up += 1
        elif (fault := fault_of(request, answer)) is None:
            tally.answered[request.kind] += 1
            tally.sequences += request.sequences
            tally.tokens += request.tokens if request.kind not in TEXT_KINDS else 0
            tally.seconds.append(time.monotonic() - start)
        else:
            return self._judge(request.kind, start, answer, fault)
        return True

    async def _send_bad(self) -> bool:
        name = self._rng.choice(list(BAD_REQUESTS))
        data, status = BAD_REQUESTS[name]
        start = time.monotonic()
        answer = await self._ask(name, data)
        if answer is None:
            return False
        if status_of(answer) == status and b'"error"' in answer:
            self._tally.refused[name] += 1
            return True
        return self._judge(name, start, answer, f"{status} was due: {answer[:300]!r}")

    async def _ask(self, name: str, data: bytes, most_reads: int | None = None) -> bytes | None:
        """Return the answer; None if the connection failed, which is tallied."""
        start = time.monotonic()
        try:
            return await asyncio.wait_for(exchange(self._port, data, most_reads), ANSWER_SECONDS)
        except (OSError, TimeoutError) as error:
            if self._disturbances.cut(start, time.monotonic()):
                self._tally.cut += 1
            else:
                self._tally.failures.append(f"{name}: {type(error).__name__} {error}")
            return None

    def _judge(self, name: str, start: float, answer: bytes, fault: str) -> bool:
        """Tally an answer that is not what was asked for; it must be owed to a kill."""
        end = time.monotonic()
        if is_error(answer) and self._disturbances.excuse(start, end):
            if status_of(answer) == 503:
                self._tally.turned_away += 1
            else:
                self._tally.failed += 1
        elif not is_error(answer) and self._disturbances.cut(start, end):
            self._tally.cut += 1
        else:
            self._tally.failures.append(f"{name}: {fault}")
        return False
