"""A closed-loop load of streamed completions, for any OpenAI-compatible server.

Clients send random token ids, new in every request, so no prefix is ever cached; EOS is ignored, so
each answer has exactly as many tokens as asked for, which the server's usage must confirm. Each
request has a connection of its own. Time to first token runs from before the connection is made; a
gap is the time between two reads that brought events.

The client is one asyncio process (uvloop, a protocol rather than streams: about 6 µs a read), or
several that share the clients; what they used of a core is told beside the figures.
"""

import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

EVENT = b"data: {"
KEPT_BYTES = 2048  # of the end of a stream: its usage and [DONE] stand there
PREPARING_SECONDS = 2.0  # from telling client processes to start until they do


@dataclass(frozen=True)
class Load:
    """What to send and where."""

    host: str
    port: int
    model: str
    input_tokens: int
    output_tokens: int
    vocab: int


@dataclass
class Samples:
    """What the clients of one concurrency saw. Times in seconds."""

    first: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    output_tokens: int = 0
    events: int = 0
    errors: list[str] = field(default_factory=list)
    began: float = 0.0  # on the machine's monotonic clock
    ended: float = 0.0
    cpu: float = 0.0

    def merge(self, other: "Samples") -> None:
        """Take in what another process saw."""
        self.first += other.first
        self.total += other.total
        self.gaps += other.gaps
        self.output_tokens += other.output_tokens
        self.events += other.events
        self.errors += other.errors
        self.began = min(self.began, other.began)
        self.ended = max(self.ended, other.ended)
        self.cpu += other.cpu


def percentile(values: list[float], percent: float) -> float | None:
    """Return the nearest-rank percentile of *values*; None when there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def request_bytes(load: Load, rng: random.Random) -> bytes:
    """Return one POST of a streamed completion over random ids."""
    body = {
        "model": load.model,
        "prompt": [rng.randrange(100, load.vocab) for _ in range(load.input_tokens)],
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {load.host}:{load.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + data


class Stream(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, request: bytes, samples: Samples) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events = 0
        self.head = b""  # the answer's first bytes
        self.tail = b""  # and its last
        self._request = request
        self._gaps = samples.gaps
        self.began = time.perf_counter()
        self.first = self.last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.tail:
            self.head = data[:400]
        self.events += (new := (self.tail[1 - len(EVENT) :] + data).count(EVENT))
        self.tail = (self.tail + data)[-KEPT_BYTES:]
        if not new:
            return
        if self.first:
            self._gaps.append(now - self.last)
        else:
            self.first = now
        self.last = now

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def stream_once(load: Load, request: bytes, samples: Samples) -> None:
    """Send *request* and note the times of its events; a failure is noted, not raised."""
    stream = Stream(request, samples)
    loop = asyncio.get_running_loop()
    try:
        await loop.create_connection(lambda: stream, load.host, load.port)
    except OSError as error:
        samples.errors.append(f"connect: {error}")
        return
    await stream.closed
    tokens = usage_tokens(stream.tail)
    if tokens != load.output_tokens or b"data: [DONE]" not in stream.tail:
        samples.errors.append(f"incomplete answer ({tokens} tokens): {stream.head!r}")
        return
    samples.first.append(stream.first - stream.began)
    samples.total.append(stream.last - stream.began)
    samples.output_tokens += tokens
    samples.events += stream.events


def usage_tokens(stream: bytes) -> int:
    """Return the completion tokens that the last usage of *stream* reports, or -1."""
    _, found, tail = stream.rpartition(b'"completion_tokens":')
    digits = tail.lstrip()[:12]
    number = digits[: len(digits) - len(digits.lstrip(b"0123456789"))]
    return int(number) if found and number else -1


def run_clients(load: Load, clients: int, requests: int, start_at: float = 0.0) -> Samples:
    """Run *clients* that share *requests*, from *start_at* (monotonic clock) or at once."""
    rng = random.Random(f"{time.time_ns()}")
    prepared = iter([request_bytes(load, rng) for _ in range(requests)])
    samples = Samples()

    async def client(shared: Iterator[bytes]) -> None:
        for request in shared:
            await stream_once(load, request, samples)

    async def every() -> None:
        await asyncio.gather(*(client(prepared) for _ in range(clients)))

    time.sleep(max(0.0, start_at - time.perf_counter()))
    cpu, samples.began = time.process_time(), time.perf_counter()
    uvloop.run(every())
    samples.ended, samples.cpu = time.perf_counter(), time.process_time() - cpu
    return samples


def run_level(load: Load, concurrency: int, requests: int, processes: int = 1) -> dict[str, Any]:
    """Run *requests* in all from *concurrency* clients; return the figures.

    The clients are spread over *processes*; with one, they run in this process.
    """
    processes = min(processes, concurrency)
    if processes == 1:
        samples = run_clients(load, concurrency, requests)
    else:
        shares = [(concurrency + i) // processes for i in range(processes)]
        counts = [(requests + i) // processes for i in range(processes)]
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
            start_at = time.perf_counter() + PREPARING_SECONDS
            several = pool.map(
                run_clients, [load] * processes, shares, counts, [start_at] * processes
            )
            samples, *rest = several
        for other in rest:
            samples.merge(other)
    return figures(load, concurrency, requests, samples)


def figures(load: Load, concurrency: int, requests: int, samples: Samples) -> dict[str, Any]:
    """Return what *samples* come to; a time that was never taken is None."""
    seconds = samples.ended - samples.began
    ok = len(samples.first)
    return {
        "conc": concurrency,
        "n": requests,
        "ok": ok,
        "errors": len(samples.errors),
        "err": samples.errors[0] if samples.errors else None,
        "prompt": load.input_tokens,
        "output": load.output_tokens,
        "s": round(seconds, 3),
        "req_s": round(ok / seconds, 2),
        "out_tok_s": round(samples.output_tokens / seconds, 1),
        "in_tok_s": round(ok * load.input_tokens / seconds, 1),
        "events": samples.events,
        **milliseconds("ttft", samples.first),
        **milliseconds("gap", samples.gaps),
        **milliseconds("e2e", samples.total),
        "tok_per_event": round(samples.output_tokens / max(samples.events - ok, 1), 3),
        "client_cpu": round(samples.cpu / seconds, 3),
    }


def milliseconds(name: str, values: list[float]) -> dict[str, float | None]:
    found = {p: percentile(values, p) for p in (50, 90, 99)}
    return {f"{name}_p{p}_ms": None if v is None else round(1e3 * v, 3) for p, v in found.items()}
