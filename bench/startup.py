"""What a start costs and what an idle server uses.

    python bench/startup.py MODEL [--idle-seconds 10] [--runs 1] [-- SERVE FLAGS]

Measures, for each run: seconds from exec until /health answers 200, from there to the first answer,
CPU of the whole idle tree in percent of one core, resident (RSS, shared pages counted in each
process) and proportional (PSS) memory of every process and their sums, seconds from SIGTERM to
exit. Prints a table and, as the last line, one JSON document.
"""

import argparse
import json
import sys
import time
from http.client import HTTPConnection
from typing import Any

from tree import Server, command_name, cpu_seconds, memory_bytes, split_flags, tree

MIB = 1024 * 1024


def first_answer_seconds(server: Server) -> float:
    """Return how long the first completion of 16 tokens takes."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0})
    start = time.monotonic()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise SystemExit(f"the first completion failed: {response.status} {answer!r}")
    return time.monotonic() - start


def measure(model: str, flags: list[str], idle_seconds: float) -> dict[str, Any]:
    server = Server(model, flags)
    try:
        first = first_answer_seconds(server)
        time.sleep(2.0)  # what the answer set going has ended; only idleness is measured
        pids = tree(server.process.pid)
        before, start = cpu_seconds(pids), time.monotonic()
        time.sleep(idle_seconds)
        idle = (cpu_seconds(pids) - before) / (time.monotonic() - start)
        memory = {f"{command_name(pid)} [{pid}]": memory_bytes(pid) for pid in pids}
    finally:
        stop = server.stop()
    return {
        "ready_s": round(server.ready_seconds, 2),
        "first_answer_s": round(first, 3),
        "idle_cpu_percent": round(100 * idle, 2),
        "rss_mib": round(sum(rss for rss, _ in memory.values()) / MIB),
        "pss_mib": round(sum(pss for _, pss in memory.values()) / MIB),
        "stop_s": round(stop, 2),
        "processes": {
            name: {"rss_mib": round(rss / MIB), "pss_mib": round(pss / MIB)}
            for name, (rss, pss) in memory.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=1)
    words, flags = split_flags(sys.argv[1:])
    options = parser.parse_args(words)
    runs = [measure(options.model, flags, options.idle_seconds) for _ in range(options.runs)]
    for run in runs:
        print(
            f"ready {run['ready_s']} s, first answer {run['first_answer_s']} s, "
            f"idle CPU {run['idle_cpu_percent']} %, RSS {run['rss_mib']} MiB, "
            f"PSS {run['pss_mib']} MiB, stop {run['stop_s']} s"
        )
        for name, sizes in run["processes"].items():
            print(f"  {name:<44} RSS {sizes['rss_mib']:>6} MiB  PSS {sizes['pss_mib']:>6} MiB")
    print(json.dumps({"bench": "startup", "model": options.model, "runs": runs}))


if __name__ == "__main__":
    main()
