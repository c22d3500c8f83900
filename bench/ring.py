"""What the host costs: the whole server but the model, under a load of streamed completions.

    python bench/ring.py MODEL [--streams 1,64,256] [--requests 2] [--slow 1] [-- SERVE FLAGS]

Starts the real supervisor, front ends, tokenizers and engine core around a worker that computes
nothing (bench/ring_worker.py): a step takes 0.45 ms at one row, 3 ms at 256 rows, 3 ms and more
with a prefill, all times ``--slow``. MODEL gives the tokenizer; no weight is read, no GPU needed.

CPU time is what to look at, for on a small machine the client and the processes share cores: the
table shows, for each process, microseconds of CPU per output token and per engine step, all threads
together, from /proc/PID/task/*/schedstat. With ``--slow`` large enough that no core is full nobody
falls behind, so nothing is coalesced and the cost per token is the highest; without it, tokens per
second, time to first token and gaps are those of the ring on this machine. ``--free`` lets a step
take no time at all: then the time to first token is the way round the ring.

Prints a table for each level and, as the last line, one JSON document.
"""

import argparse
import json
import os
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
from client import Load, run_level
from ring_worker import ENVIRONMENT, Device
from tree import Server, command_name, split_flags, tree

MODULES = ("zlm.frontend.process", "zlm.tokenizer.process", "zlm.engine.process")
FLAGS = ("--max-num-seqs", "256", "--max-num-batched-tokens", "8192", "--disable-log-requests")


def serve_ring(words: list[str]) -> int:
    """Be the supervisor of a tree whose worker is the fake one; *words* are flags of serve."""
    from zlm.cli.parse import parse
    from zlm.process.launch import module_command
    from zlm.process.logs import start_logging
    from zlm.supervisor.main import serve

    def command(role: str) -> list[str]:
        if role != "worker":
            return module_command(role)
        return [sys.executable, str(Path(__file__).with_name("ring_worker.py"))]

    start_logging("supervisor")
    config, _ = parse(words)
    return serve(config, command=command)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that all threads of *pid* have used, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def steps_done(port: int) -> int:
    """Return how many steps the engine core has made."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    line = next(line for line in text.splitlines() if line.startswith("zlm:engine_steps"))
    return int(float(line.split()[-1]))


def processes(root: int) -> dict[int, str]:
    """Return the name of each process of the ring."""
    names = {pid: command_name(pid) for pid in tree(root)}
    kept = {pid: name for pid, name in names.items() if name in MODULES or "ring_worker" in name}
    return {
        pid: "worker (fake)" if "ring_worker" in name else name.split(".")[1]
        for pid, name in kept.items()
    }


def level(server: Server, load: Load, streams: int, requests: int) -> dict[str, Any]:
    """Run one level and return its figures, with microseconds by role (all its processes)."""
    names = processes(server.process.pid)
    steps = steps_done(server.port)
    before = {pid: cpu_seconds(pid) for pid in names}
    figures = run_level(load, streams, streams * requests)
    micros: dict[str, float] = {}
    for pid, name in names.items():
        micros[name] = micros.get(name, 0.0) + 1e6 * (cpu_seconds(pid) - before[pid])
    steps = steps_done(server.port) - steps
    tokens = max(1, figures["ok"] * load.output_tokens)
    figures["steps"] = steps
    figures["processes"] = {name: list(names.values()).count(name) for name in micros}
    figures["us_per_token"] = {name: round(us / tokens, 2) for name, us in micros.items()}
    figures["us_per_step"] = {name: round(us / max(1, steps), 1) for name, us in micros.items()}
    return figures


def show(figures: dict[str, Any]) -> None:
    print(
        f"{figures['conc']} streams: {figures['out_tok_s']} tokens/s, "
        f"TTFT p50 {figures['ttft_p50_ms']} p99 {figures['ttft_p99_ms']} ms, "
        f"gap p50 {figures['gap_p50_ms']} p99 {figures['gap_p99_ms']} ms, "
        f"{figures['tok_per_event']} tokens an event, {figures['steps']} steps, "
        f"client CPU {figures['client_cpu']}, errors {figures['errors']}"
    )
    for name, per_token in sorted(figures["us_per_token"].items()):
        per_step = figures["us_per_step"][name]
        count = figures["processes"][name]
        print(f"    {count} x {name:15}{per_token:9.2f} us/token{per_step:10.1f} us/step")
    if figures["errors"]:
        print(figures["err"])
    sys.stdout.flush()


class RingServer(Server):
    """A server whose worker is the fake one."""

    def command(self, model: str) -> list[str]:
        return [sys.executable, __file__, "--serve", model]


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        sys.exit(serve_ring(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a model whose tokenizer is used")
    parser.add_argument("--streams", default="1,64,256")
    parser.add_argument("--requests", type=int, default=2, help="requests of each stream")
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=40000, help="prompt ids are 100..vocab-1")
    parser.add_argument("--slow", type=float, default=1.0, help="times a step's time")
    parser.add_argument("--free", action="store_true", help="a step takes no time")
    words, flags = split_flags(sys.argv[1:])
    options = parser.parse_args(words)
    device = Device(scale=0.0 if options.free else options.slow)
    os.environ[ENVIRONMENT] = msgspec.json.encode(device).decode()
    server = RingServer(options.model, ["--served-model-name", "bench", *FLAGS, *flags])
    load = Load(
        "127.0.0.1",
        server.port,
        "bench",
        options.input_tokens,
        options.output_tokens,
        options.vocab,
    )
    levels = []
    try:
        run_level(load, 1, 1)
        for streams in options.streams.split(","):
            levels.append(level(server, load, int(streams), options.requests))
            show(levels[-1])
    finally:
        server.stop()
    print(json.dumps({"bench": "ring", "slow": options.slow, "levels": levels}))


if __name__ == "__main__":
    main()
