"""What a start costs and what an idle server uses.

    python bench/startup.py MODEL_OR_SHAPE [--cold] [--runs 1] [--idle-seconds 10] [-- SERVE FLAGS]

Measures, for each run: seconds from exec until /health answers 200, when each line of the server's
log came on the way there, seconds from there to the first answer, CPU of the whole idle tree in
percent of one core, resident (RSS, shared pages counted in each process) and proportional (PSS)
memory of every process and their sums, memory in use on the first GPU, seconds from SIGTERM to
exit. With --cold a run precedes that finds no compiled kernel; the others find what it compiled.
Prints a table and, as the last line, one JSON document.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from datetime import datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tree import (
    Server,
    command_name,
    cpu_seconds,
    gpu_memory_mib,
    memory_bytes,
    split_flags,
    tree,
)

MIB = 1024 * 1024
LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d [\d:.]+) \w+ +(.*)")
KERNEL_FOLDER = "TRITON_CACHE_DIR"  # environment: where compiled kernels are kept


def first_answer_seconds(server: Server) -> float:
    """Return how long the first completion of 16 tokens takes."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = json.dumps(
        {"prompt": list(range(100, 116)), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    )
    start = time.monotonic()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise SystemExit(f"the first completion failed: {response.status} {answer!r}")
    return time.monotonic() - start


def timeline(log: str, started_at: float) -> list[tuple[float, str]]:
    """Return the lines of *log* with their time in seconds after *started_at*."""
    found = (LOG_LINE.match(line) for line in log.splitlines())
    return [
        (round(datetime.fromisoformat(match[1]).timestamp() - started_at, 3), match[2])
        for match in found
        if match is not None
    ]


def measure(
    model: str, flags: list[str], idle_seconds: float, environment: dict[str, str], log: Path
) -> dict[str, Any]:
    server = Server(model, flags, environment=environment, log=log)
    try:
        lines = timeline(log.read_text(errors="replace"), server.started_at)
        first = first_answer_seconds(server)
        time.sleep(2.0)  # what the answer set going has ended; only idleness is measured
        pids = tree(server.process.pid)
        before, start = cpu_seconds(pids), time.monotonic()
        time.sleep(idle_seconds)
        idle = (cpu_seconds(pids) - before) / (time.monotonic() - start)
        memory = {f"{command_name(pid)} [{pid}]": memory_bytes(pid) for pid in pids}
        gpu = gpu_memory_mib()
    finally:
        stop = server.stop()
    return {
        "ready_s": round(server.ready_seconds, 2),
        "first_answer_s": round(first, 3),
        "idle_cpu_percent": round(100 * idle, 2),
        "rss_mib": round(sum(rss for rss, _ in memory.values()) / MIB),
        "pss_mib": round(sum(pss for _, pss in memory.values()) / MIB),
        "gpu_mib": gpu,
        "stop_s": round(stop, 2),
        "processes": {
            name: {"rss_mib": round(rss / MIB), "pss_mib": round(pss / MIB)}
            for name, (rss, pss) in memory.items()
        },
        "timeline": lines,
    }


def show(run: dict[str, Any]) -> None:
    print(
        f"{run['cache']}: ready {run['ready_s']} s, first answer {run['first_answer_s']} s, "
        f"idle CPU {run['idle_cpu_percent']} %, RSS {run['rss_mib']} MiB, "
        f"PSS {run['pss_mib']} MiB, GPU {run['gpu_mib']} MiB, stop {run['stop_s']} s"
    )
    for seconds, line in run["timeline"]:
        print(f"  {seconds:>8.3f} s  {line[:110]}")
    for name, sizes in run["processes"].items():
        print(f"  {name:<44} RSS {sizes['rss_mib']:>6} MiB  PSS {sizes['pss_mib']:>6} MiB")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--cold", action="store_true", help="first a run without compiled kernels")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=1)
    words, flags = split_flags(sys.argv[1:])
    options = parser.parse_args(words)
    runs = []
    with tempfile.TemporaryDirectory(prefix="zlm-startup-") as folder:
        environment = {KERNEL_FOLDER: f"{folder}/kernels"} if options.cold else {}
        for cache in ["cold"] * options.cold + ["warm"] * options.runs:
            log = Path(folder) / f"{len(runs)}.log"
            run = measure(options.model, flags, options.idle_seconds, environment, log)
            runs.append({"cache": cache, **run})
            show(runs[-1])
    print(json.dumps({"bench": "startup", "model": options.model, "runs": runs}))


if __name__ == "__main__":
    main()
