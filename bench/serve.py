"""Serving speed: a closed-loop load of streamed completions against a server.

    python bench/serve.py MODEL_OR_URL [--concurrency 1,8,32] [--requests 4] [--input-tokens 128]
                          [--output-tokens 128] [--vocab 40000] [-- SERVE FLAGS]

A model starts ``zlm serve``; a URL takes what runs there (any OpenAI-compatible server). Each of C
clients sends a request, reads its stream to the end and sends the next, ``--requests`` times.
Prompts are random token ids, new in every request, so no prefix is ever cached; EOS is ignored, so
each answer has exactly ``--output-tokens``. Output tokens are those the server reports in its
usage, checked against the number asked for; time to first token runs from before the connection is
made; a gap is the time between two reads that brought events. One warm-up request precedes.

Prints a table and, as the last line, one JSON document. The client is one asyncio process over raw
streams; its own CPU is printed, for on a small machine it takes from the server.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tree import Server, split_flags


@dataclass
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


def percentile(values: list[float], percent: float) -> float:
    """Return the nearest-rank percentile of *values*; NaN when there are none."""
    if not values:
        return float("nan")
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


async def stream_once(load: Load, request: bytes, samples: Samples) -> None:
    """Send *request* and note the times of its events; a failure is noted, not raised."""
    start = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(load.host, load.port, limit=1 << 20)
    except OSError as error:
        samples.errors.append(f"connect: {error}")
        return
    received = bytearray()
    first = last = 0.0
    events = 0
    try:
        writer.write(request)
        while data := await reader.read(1 << 16):
            now = time.perf_counter()
            seen = max(0, len(received) - len(b"data: {"))
            received += data
            new = received.count(b"data: {", seen)
            if not new:
                continue
            if not events:
                first = now - start
            else:
                samples.gaps.append(now - last)
            events += new
            last = now
    except OSError as error:
        samples.errors.append(f"read: {error}")
        return
    finally:
        writer.close()
    tokens = usage_tokens(bytes(received))
    if tokens != load.output_tokens or b"data: [DONE]" not in received:
        samples.errors.append(f"incomplete answer ({tokens} tokens): {bytes(received[:300])!r}")
        return
    samples.first.append(first)
    samples.total.append(last - start)
    samples.output_tokens += tokens
    samples.events += events


def usage_tokens(stream: bytes) -> int:
    """Return the completion tokens that the last usage of *stream* reports, or -1."""
    _, found, tail = stream.rpartition(b'"completion_tokens":')
    digits = tail.lstrip()[:12]
    number = digits[: len(digits) - len(digits.lstrip(b"0123456789"))]
    return int(number) if found and number else -1


async def run_level(load: Load, concurrency: int, requests: int) -> dict[str, Any]:
    """Run *concurrency* clients of *requests* requests each and return the figures."""
    rng = random.Random(f"{time.time_ns()}")
    samples = Samples()

    async def client(prepared: list[bytes]) -> None:
        for request in prepared:
            await stream_once(load, request, samples)

    prepared = [[request_bytes(load, rng) for _ in range(requests)] for _ in range(concurrency)]
    cpu, start = time.process_time(), time.perf_counter()
    await asyncio.gather(*(client(each) for each in prepared))
    seconds = time.perf_counter() - start
    done = len(samples.first)
    return {
        "concurrency": concurrency,
        "requests": done,
        "errors": len(samples.errors),
        "first_error": samples.errors[0] if samples.errors else None,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(samples.output_tokens / seconds, 1),
        "input_tokens_per_s": round(done * load.input_tokens / seconds, 1),
        **milliseconds("ttft", samples.first),
        **milliseconds("gap", samples.gaps),
        **milliseconds("e2e", samples.total),
        "tokens_per_event": round(samples.output_tokens / max(samples.events - done, 1), 3),
        "client_cpu": round((time.process_time() - cpu) / seconds, 3),
    }


def milliseconds(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}_p{p}_ms": round(1e3 * percentile(values, p), 2) for p in (50, 90, 99)}


def show(level: dict[str, Any]) -> None:
    print(
        f"{level['concurrency']:>5} {level['requests']:>5} {level['errors']:>4} "
        f"{level['output_tokens_per_s']:>10} {level['input_tokens_per_s']:>9} "
        f"{level['ttft_p50_ms']:>10} {level['ttft_p99_ms']:>10} "
        f"{level['gap_p50_ms']:>9} {level['gap_p99_ms']:>9} {level['client_cpu']:>7}",
        flush=True,
    )


async def run(load: Load, concurrencies: list[int], requests: int) -> list[dict[str, Any]]:
    warm_up = await run_level(load, 1, 1)
    if warm_up["errors"]:
        raise SystemExit(f"the warm-up request failed: {warm_up['first_error']}")
    print(
        "    C  reqs errs  out tok/s  in tok/s  ttft p50   ttft p99   gap p50   gap p99 "
        "client CPU   (ms)"
    )
    levels = []
    for concurrency in concurrencies:
        levels.append(await run_level(load, concurrency, requests))
        show(levels[-1])
    return levels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", help="a model for zlm serve, or http://HOST:PORT")
    parser.add_argument("--model", default="bench", help="model name to ask for (with a URL)")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--requests", type=int, default=4, help="requests of each client")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=40000, help="prompt ids are 100..vocab-1")
    words, flags = split_flags(sys.argv[1:])
    options = parser.parse_args(words)
    server = None
    if "://" not in options.target:
        server = Server(options.target, ["--served-model-name", "bench", *flags])
    where = urlsplit(server.url if server else options.target)
    load = Load(
        where.hostname or "127.0.0.1",
        where.port or 80,
        options.model,
        options.input_tokens,
        options.output_tokens,
        options.vocab,
    )
    try:
        levels = asyncio.run(
            run(load, [int(c) for c in options.concurrency.split(",")], options.requests)
        )
    finally:
        if server is not None:
            server.stop()
    shape = {"input_tokens": load.input_tokens, "output_tokens": load.output_tokens}
    print(json.dumps({"bench": "serve", "target": options.target, **shape, "levels": levels}))


if __name__ == "__main__":
    main()
