"""What a start costs and what an idle server uses: one run of a server, from exec to exit."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from zlm.errors import Internal
from zlm.loadtest.servers import (
    ServerProcess,
    command_name,
    cpu_seconds,
    gpu_memory_mib,
    memory_bytes,
    tree,
)

MIB = 1024 * 1024
LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d [\d:.]+) \w+ +(.*)")
SETTLE_SECONDS = 2.0  # what the first answer set going has ended then: only idleness is measured


def measure(
    command: Sequence[str], log: Path, idle_seconds: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Start *command*, ask once, watch it idle and end it; return the figures.

    Raises Internal if it does not become ready or does not answer.
    """
    server = ServerProcess(command, environment=environment, log=log)
    try:
        lines = timeline(log.read_text(errors="replace"), server.started_at)
        first = _first_answer_seconds(server)
        time.sleep(SETTLE_SECONDS)
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


def timeline(log: str, started_at: float) -> list[tuple[float, str]]:
    """Return the lines of *log* with their time in seconds after *started_at*."""
    found = (LOG_LINE.match(line) for line in log.splitlines())
    return [
        (round(datetime.fromisoformat(match[1]).timestamp() - started_at, 3), match[2])
        for match in found
        if match is not None
    ]


def _first_answer_seconds(server: ServerProcess) -> float:
    """Return how long the first completion of 16 tokens takes."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = json.dumps(
        {"prompt": list(range(100, 116)), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    )
    start = time.monotonic()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    if response.status != 200:
        raise Internal(f"the first completion failed: {response.status} {answer!r}")
    return time.monotonic() - start
