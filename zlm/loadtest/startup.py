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
QUIET_PERCENT = 1.0  # of one core: a tree that uses less is quiet
QUIET_WITHIN_SECONDS = 60.0  # of idleness: a worker may use it first, to capture CUDA graphs


def watch_idle(
    root: int, window_seconds: float, settle_seconds: float = 0.0
) -> dict[str, float | None]:
    """Watch process *root* and all below it, window after window, until they are quiet in one.

    *settle_seconds* pass first. No window begins later than QUIET_WITHIN_SECONDS after the call.

    Returns in percent of one core ``idle_cpu_percent``, of the first window, and
    ``quiet_cpu_percent``, of the quiet one or else of the last; in ``quiet_after_s`` how many
    seconds after the call the quiet one began, None if there was none.
    """
    called = time.monotonic()
    time.sleep(settle_seconds)
    first = None
    while True:
        pids, start = tree(root), time.monotonic()
        before = cpu_seconds(pids)
        time.sleep(window_seconds)
        end = time.monotonic()
        percent = 100 * (cpu_seconds(pids) - before) / (end - start)
        first = percent if first is None else first
        is_quiet = 0 <= percent < QUIET_PERCENT  # below 0: a process has left, and its time with it
        if is_quiet or end - called >= QUIET_WITHIN_SECONDS:
            return {
                "idle_cpu_percent": round(first, 2),
                "quiet_cpu_percent": round(percent, 2),
                "quiet_after_s": round(start - called, 1) if is_quiet else None,
            }


def measure(
    command: Sequence[str], log: Path, idle_seconds: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Start *command*, ask once, watch it idle and end it; return the figures.

    It is watched in windows of *idle_seconds* until one is quiet, and not at all with 0.
    Raises Internal if it does not become ready or does not answer.
    """
    server = ServerProcess(command, environment=environment, log=log)
    try:
        lines = timeline(log.read_text(errors="replace"), server.started_at)
        first = _first_answer_seconds(server)
        root = server.process.pid
        idle = watch_idle(root, idle_seconds, SETTLE_SECONDS) if idle_seconds else {}
        memory = {f"{command_name(pid)} [{pid}]": memory_bytes(pid) for pid in tree(root)}
        gpu = gpu_memory_mib()
    finally:
        stop = server.stop()
    return {
        "ready_s": round(server.ready_seconds, 2),
        "first_answer_s": round(first, 3),
        **idle,
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
