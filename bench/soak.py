"""A long mixed load, and what must hold during and after it.

    python bench/soak.py MODEL_OR_SHAPE [--minutes 10] [--clients 48] [--most-input 3000]
                         [--most-output 200] [--most-growth-mib 64] [--seed 0] [-- SERVE FLAGS]

Starts ``zlm serve`` and runs clients that each send one request after another: prompts of 1 to
``--most-input`` random ids (a third of them begin with one of a few shared prefixes), streamed and
whole answers, greedy, temperature, top_p, top_k, min_p, penalties, log-probabilities, n = 2 and,
where there is a tokenizer, stop strings. A tenth of the clients' requests is given up: the
connection is closed at once, or after some of the stream. Give a KV cache that is too small for all
(--num-gpu-blocks-override, --kv-cache-memory-bytes), so that sequences are preempted.

Every request must be answered in full or be one that was given up; the server must stay healthy;
afterwards nothing runs or waits and no KV block is in use (the engine core itself checks its blocks
whenever it goes idle, and ends with an error if they are not balanced); memory of the processes and
of the GPU must not grow from the second fifth of the time to the last. Prints one JSON document,
and leaves with status 1 if anything did not hold.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

from tree import Server, gpu_memory_mib, memory_bytes, split_flags, tree

MIB = 1024 * 1024
SAMPLE_SECONDS = 2.0
IDLE_SECONDS = 60.0  # how long the server may take to be idle after the last answer
GIVEN_UP = 0.1  # part of the requests
SHARED = 1 / 3  # part of the prompts that begin with a shared prefix
ANSWER_SECONDS = 300.0  # an answer that takes longer is a failure
FIRST_ID, LAST_ID = 100, 40_000

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
}


@dataclass(frozen=True)
class Request:
    """One request and what its client does with it."""

    kind: str
    body: dict[str, Any]
    give_up_after: int | None  # reads of the answer until the connection is closed; None: never

    @property
    def tokens(self) -> int:
        """Output tokens of a full answer; with stop strings, the most there can be."""
        return self.body["max_tokens"] * self.body.get("n", 1)


@dataclass
class Tally:
    """What happened to the requests."""

    answered: Counter[str] = field(default_factory=Counter)  # by kind
    given_up: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of answers in full


def make_request(rng: random.Random, options: argparse.Namespace, kinds: list[str]) -> Request:
    """Draw a request; lengths are spread evenly over their logarithm."""
    kind = rng.choice(kinds)
    length = round(options.most_input ** rng.random())
    prompt = [rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)]
    if rng.random() < SHARED:
        shared = random.Random(rng.randrange(4))  # one of a few sequences of ids
        count = min(length - 1, 512)
        prompt[:count] = [shared.randrange(FIRST_ID, LAST_ID) for _ in range(count)]
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": round(options.most_output ** rng.random()),
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
        **KINDS[kind],
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    given_up = rng.random() < GIVEN_UP
    return Request(kind, body, rng.randrange(12) if given_up else None)


async def ask(port: int, request: Request) -> bytes | None:
    """Send *request*; return the whole answer, None if it was given up as planned."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        data = json.dumps(request.body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n"
            "Content-Type: application/json\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        received = bytearray()
        reads = 0
        while request.give_up_after is None or reads < request.give_up_after:
            chunk = await reader.read(1 << 16)
            if not chunk:
                return bytes(received)
            received += chunk
            reads += 1
        return None
    finally:
        writer.close()


def fault_of(request: Request, answer: bytes) -> str | None:
    """Return what is wrong with *answer*, None if it is whole."""
    status, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in status.split(b"\r\n", 1)[0]:
        return f"status: {answer[:300]!r}"
    if request.body["stream"] and b"data: [DONE]" not in body:
        return f"the stream has no end: {answer[-300:]!r}"
    _, found, tail = body.rpartition(b'"completion_tokens":')
    tokens = int(tail.split(b",")[0].split(b"}")[0]) if found else -1
    if request.kind == "stop":
        return None if 1 <= tokens <= request.tokens else f"{tokens} tokens of {request.tokens}"
    return None if tokens == request.tokens else f"{tokens} tokens of {request.tokens}"


async def client(port: int, rng: random.Random, options: argparse.Namespace, tally: Tally) -> None:
    """Send requests until the time is over."""
    kinds = [kind for kind in KINDS if kind != "stop" or options.text]
    while time.monotonic() < options.end:
        request = make_request(rng, options, kinds)
        start = time.monotonic()
        try:
            answer = await asyncio.wait_for(ask(port, request), ANSWER_SECONDS)
        except (OSError, TimeoutError) as error:
            tally.failures.append(f"{request.kind}: {type(error).__name__} {error}")
            await asyncio.sleep(0.5)
            continue
        if answer is None:
            tally.given_up += 1
            continue
        if fault := fault_of(request, answer):
            tally.failures.append(f"{request.kind}: {fault}")
            continue
        tally.answered[request.kind] += 1
        tally.tokens += request.tokens if request.kind != "stop" else 0
        tally.seconds.append(time.monotonic() - start)


@dataclass
class Watch:
    """Memory and gauges as time goes by. ``rss`` is by process: its place in the tree."""

    rss: list[list[float]] = field(default_factory=list)  # MiB
    gpu: list[int] = field(default_factory=list)  # MiB
    most_running: float = 0.0
    most_waiting: float = 0.0

    def sample(self, server: Server) -> None:
        """Take one sample of everything."""
        try:
            sizes = [memory_bytes(pid)[0] / MIB for pid in tree(server.process.pid)]
        except (FileNotFoundError, ProcessLookupError):
            return  # a short-lived process has gone meanwhile: no sample this time
        self.rss.append(sizes)
        if (gpu := gpu_memory_mib()) is not None:
            self.gpu.append(gpu)
        gauges = metrics(server.port)
        self.most_running = max(self.most_running, gauges["vllm:num_requests_running"])
        self.most_waiting = max(self.most_waiting, gauges["vllm:num_requests_waiting"])

    def growth(self) -> dict[str, float | None]:
        """Return by how many MiB the processes and the GPU grew over the run."""
        return {
            "processes": _growth([sum(sizes) for sizes in self.rss]),
            "gpu": _growth([float(size) for size in self.gpu]),
        }


def _growth(values: list[float]) -> float | None:
    """Return the median of the last fifth less that of the second fifth."""
    fifth = len(values) // 5
    if not fifth:
        return None
    early = statistics.median(values[fifth : 2 * fifth])
    return round(statistics.median(values[-fifth:]) - early, 1)


def metrics(port: int) -> dict[str, float]:
    """Return /metrics: the sum over labels of each name."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    found: dict[str, float] = {}
    for line in connection.getresponse().read().decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    connection.close()
    return found


def wait_until_idle(port: int) -> dict[str, float]:
    """Return the metrics once nothing runs or waits, or as they are when patience has run out."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        now = metrics(port)
        busy = now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"]
        if not busy or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


async def load(server: Server, options: argparse.Namespace) -> tuple[Tally, Watch]:
    """Run the clients and the watch until the time is over."""
    tally, watch = Tally(), Watch()
    clients = [
        asyncio.create_task(
            client(server.port, random.Random(f"{options.seed}:{i}"), options, tally)
        )
        for i in range(options.clients)
    ]
    while any(not task.done() for task in clients):
        await asyncio.to_thread(watch.sample, server)
        await asyncio.wait(clients, timeout=SAMPLE_SECONDS)
    for task in clients:
        task.result()  # raises what should not have happened
    return tally, watch


def verdict(tally: Tally, watch: Watch, end: dict[str, float], most_mib: float) -> list[str]:
    """Return what did not hold."""
    wrong = [f"{len(tally.failures)} failures"] if tally.failures else []
    if not sum(tally.answered.values()):
        wrong.append("no request was answered")
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        if end[f"vllm:{name}"]:
            wrong.append(f"{name} is {end[f'vllm:{name}']} at the end")
    for what, mib in watch.growth().items():
        if mib is not None and mib > most_mib:
            wrong.append(f"memory of the {what} grew by {mib} MiB")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--most-input", type=int, default=3000)
    parser.add_argument("--most-output", type=int, default=200)
    parser.add_argument("--most-growth-mib", type=float, default=64.0)
    parser.add_argument("--seed", type=int, default=0)
    words, flags = split_flags(sys.argv[1:])
    options = parser.parse_args(words)
    quiet = ["--served-model-name", "bench", "--no-enable-log-requests"]
    server = Server(options.target, [*quiet, *flags])
    with open(f"/proc/{server.process.pid}/cmdline") as file:
        options.text = "--skip-tokenizer-init" not in file.read().split("\0")
    began = time.monotonic()
    options.end = began + 60 * options.minutes
    try:
        tally, watch = asyncio.run(load(server, options))
        seconds = time.monotonic() - began
        end = wait_until_idle(server.port)
    finally:
        stop = server.stop()
    wrong = verdict(tally, watch, end, options.most_growth_mib)
    if server.process.returncode:
        wrong.append(f"the server left with status {server.process.returncode}")
    result = {
        "bench": "soak",
        "target": options.target,
        "seconds": round(seconds, 1),
        "wrong": wrong,
        "answered": sum(tally.answered.values()),
        "by_kind": dict(tally.answered),
        "given_up": tally.given_up,
        "failures": tally.failures[:5],
        "slowest_s": round(max(tally.seconds, default=0.0), 2),
        "out_tok_s": round(end["vllm:generation_tokens_total"] / seconds, 1),
        "preemptions": end["vllm:num_preemptions_total"],
        "prefix_cache_hits": end["vllm:prefix_cache_hits_total"],
        "most_running": watch.most_running,
        "most_waiting": watch.most_waiting,
        "rss_mib": [[round(size) for size in sizes] for sizes in (watch.rss[0], watch.rss[-1])],
        "gpu_mib": [watch.gpu[0], watch.gpu[-1]] if watch.gpu else None,
        "growth_mib": watch.growth(),
        "stop_s": round(stop, 2),
    }
    print(json.dumps(result))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
