"""A long mixed load with kills, and what must hold during and after it.

    python bench/soak.py MODEL_OR_SHAPE [--minutes 10] [--clients 48] [--most-input 3000]
                         [--most-output 200] [--last-id 40000] [--kill-every SECONDS]
                         [--kill ROLE,ROLE,...] [--most-growth-mib 64] [--seed 0] [-- SERVE FLAGS]

Starts ``zlm serve`` and runs clients that each send one request after another: prompts of 1 to
``--most-input`` random ids (a third of them begin with one of a few shared prefixes), streamed and
whole answers, greedy, temperature, top_p, top_k, min_p, penalties, log-probabilities, n = 2 and,
where there is a tokenizer, stop strings and structured output. A tenth of the requests is bad and
must be refused; a tenth of the others is given up: the connection is closed at once, or after some
of the stream. Give a KV cache that is too small for all (--num-gpu-blocks-override,
--kv-cache-memory-bytes), so that sequences are preempted. With ``--kill-every`` a process of the
tree is killed (SIGKILL) as often, of each role in turn; with ``--kill`` those alone, once each.

Every request must be answered in full, be refused as it must be, be given up, or end with an error
that is owed to a kill: none is lost. The server must recover by itself; afterwards nothing runs or
waits, no KV block is in use (the engine core itself checks its blocks whenever it goes idle), the
counters of /metrics have never gone down and agree with what the clients saw, the idle tree uses no
CPU (below 1 % of a core within a minute, for a worker uses idle time first), and no process is left
when it has stopped; memory of the processes and of the GPU must not grow from the second fifth of
the time to the last (which is judged without kills alone: a new process is small). Prints one JSON
document, and leaves with status 1 if anything did not hold.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from soak_load import Client, Disturbances, Tally
from tree import Server, command_name, gpu_memory_mib, memory_bytes, split_flags, tree

from zlm.loadtest.startup import watch_idle

MIB = 1024 * 1024
SAMPLE_SECONDS = 2.0
IDLE_SECONDS = 60.0  # how long the server may take to be idle after the last answer
QUIET_SECONDS = 5.0  # of a window in which the idle tree's CPU time is measured
RECOVERY_SECONDS = 120.0  # how long the server may take to serve again after a kill
ROLES = ("tokenizer", "frontend", "engine", "worker")
GONE = (FileNotFoundError, ProcessLookupError)


@dataclass
class Watch:
    """Memory and metrics as time goes by. ``rss`` is by process: its place in the tree."""

    rss: list[list[float]] = field(default_factory=list)  # MiB
    gpu: list[int] = field(default_factory=list)  # MiB
    most_running: float = 0.0
    most_waiting: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)  # as they were last
    fallen: set[str] = field(default_factory=set)  # counters that have gone down

    def sample(self, server: Server) -> None:
        """Take one sample of everything; none of what is down at this moment."""
        try:
            self.rss.append([memory_bytes(pid)[0] / MIB for pid in tree(server.process.pid)])
        except GONE:
            return
        if (gpu := gpu_memory_mib()) is not None:
            self.gpu.append(gpu)
        try:
            now = samples(server.port)
        except (OSError, HTTPException):
            return
        self.compare(now)
        sums = by_name(now)
        self.most_running = max(self.most_running, sums.get("vllm:num_requests_running", 0.0))
        self.most_waiting = max(self.most_waiting, sums.get("vllm:num_requests_waiting", 0.0))

    def compare(self, now: dict[str, float]) -> None:
        """Note the counters of *now* that are less than they were."""
        for name, value in now.items():
            family = name.partition("{")[0]
            if family.endswith(("_total", "_count", "_sum", "_bucket")):
                if value < self.counters.get(name, 0.0):
                    self.fallen.add(name)
                self.counters[name] = value

    def tenths(self) -> list[list[float]]:
        """Return the memory of the processes at the start and after each tenth of the run."""
        last = len(self.rss) - 1
        return [self.rss[last * tenth // 10] for tenth in range(11)]

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


def samples(port: int) -> dict[str, float]:
    """Return /metrics: the value of each name with its labels; none while it is not served."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    lines = text.splitlines() if response.status == 200 else []
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def by_name(found: dict[str, float]) -> dict[str, float]:
    """Return the sums over labels of *found*."""
    sums: dict[str, float] = {}
    for name, value in found.items():
        name = name.partition("{")[0]
        sums[name] = sums.get(name, 0.0) + value
    return sums


def wait_until_idle(port: int) -> dict[str, float]:
    """Return the metrics once nothing runs or waits, or as they are when patience has run out."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        now = samples(port)
        sums = by_name(now)
        busy = sum(sums.get(f"vllm:num_requests_{what}", 1.0) for what in ("running", "waiting"))
        if not busy + sums.get("zlm:queue_requests", 1.0) or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


class Killer:
    """Kills processes of the tree, one at a time, and waits until the server serves again."""

    def __init__(self, server: Server, options: argparse.Namespace, disturbances: Disturbances):
        self._server = server
        self._options = options
        self._disturbances = disturbances
        self.recoveries: dict[str, list[float]] = {}  # seconds, by role
        self.unrecovered = ""  # the role after whose death the server did not serve again

    async def run(self, over: asyncio.Event) -> None:
        """Kill as the options say until *over*, or until the list is done."""
        for role in self._roles():
            try:
                async with asyncio.timeout(self._options.kill_every):
                    await over.wait()
                return
            except TimeoutError:
                pass
            await self._kill(role)
            if self.unrecovered:
                return

    def _roles(self) -> Iterator[str]:
        if self._options.kill:
            return iter(self._options.kill)
        return itertools.cycle(ROLES) if self._options.kill_every else iter(())

    async def _kill(self, role: str) -> None:
        pids = [pid for pid in tree(self._server.process.pid) if _role_of(pid) == role]
        if not pids:
            self.unrecovered = role
            return
        self._disturbances.begin(cuts=role == "frontend")
        os.kill(random.choice(pids), signal.SIGKILL)
        deadline = time.monotonic() + RECOVERY_SECONDS
        while not await asyncio.to_thread(self._serves):
            if time.monotonic() > deadline or self._server.process.poll() is not None:
                self.unrecovered = role
                return
            await asyncio.sleep(0.05)
        self.recoveries.setdefault(role, []).append(round(self._disturbances.end(), 2))

    def _serves(self) -> bool:
        """Whether all processes are there again and a request is answered."""
        connection = HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        try:
            body = json.dumps({"prompt": [5], "max_tokens": 1})
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()


def _role_of(pid: int) -> str:
    try:
        return command_name(pid).removeprefix("zlm.").removesuffix(".process")
    except GONE:
        return ""


async def load(
    server: Server, options: argparse.Namespace
) -> tuple[Tally, Watch, Killer, Disturbances]:
    """Run the clients, the watch and the killer until the time is over and all kills are done."""
    tally, watch, disturbances = Tally(), Watch(), Disturbances()
    killer = Killer(server, options, disturbances)
    over = asyncio.Event()
    clients = [
        Client(server.port, random.Random(f"{options.seed}:{i}"), options, tally, disturbances)
        for i in range(options.clients)
    ]
    end = time.monotonic() + 60 * options.minutes
    async with asyncio.TaskGroup() as group:
        killing = group.create_task(killer.run(over))
        for each in clients:
            group.create_task(each.run(over))
        while time.monotonic() < end or not (killing.done() or options.kill is None):
            await asyncio.to_thread(watch.sample, server)
            await asyncio.sleep(min(SAMPLE_SECONDS, max(0.1, 6 * options.minutes)))
        over.set()
    return tally, watch, killer, disturbances


def verdict(
    tally: Tally, watch: Watch, end: dict[str, float], most_mib: float, *, kills: int = 0
) -> list[str]:
    """Return what did not hold; *end* are the samples of the idle server."""
    wrong = [f"{len(tally.failures)} failures"] if tally.failures else []
    if not sum(tally.answered.values()):
        wrong.append("no request was answered")
    sums = by_name(end)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting",
                 "vllm:kv_cache_usage_perc", "zlm:queue_requests"):  # fmt: skip
        if sums[name]:
            wrong.append(f"{name.partition(':')[2]} is {sums[name]:g} at the end")
    for what, mib in watch.growth().items():
        if mib is not None and mib > most_mib and not kills:
            wrong.append(f"memory of the {what} grew by {mib} MiB")
    watch.compare(end)
    if watch.fallen:
        wrong.append(f"counters went down: {', '.join(sorted(watch.fallen)[:5])}")
    return wrong + _miscounted(tally, end, kills)


def _miscounted(tally: Tally, end: dict[str, float], kills: int) -> list[str]:
    """Return where the server's counts differ from the clients'."""
    ends: dict[str, float] = {}
    for name, value in end.items():
        if name.startswith("vllm:request_success_total"):
            ends[name.partition('finished_reason="')[2].partition('"')[0]] = value
    wrong = []
    good = ends.get("stop", 0.0) + ends.get("length", 0.0)
    if good < tally.sequences:
        wrong.append(f"{tally.sequences} sequences were answered, {good:g} are counted")
    # The requests by which a recovery is noticed are of one sequence each.
    if not kills and sum(ends.values()) > tally.most_sequences:
        wrong.append(f"{sum(ends.values()):g} ends of {tally.most_sequences} sequences are counted")
    if not kills and ends.get("error", 0.0):
        wrong.append(f"{ends['error']:g} sequences ended with an error")
    return wrong


def options_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--most-input", type=int, default=3000)
    parser.add_argument("--most-output", type=int, default=200)
    parser.add_argument("--last-id", type=int, default=40_000)
    parser.add_argument("--kill-every", type=float, default=None)
    parser.add_argument("--kill", type=lambda value: value.split(","), default=None)
    parser.add_argument("--most-growth-mib", type=float, default=64.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=None)
    options = parser.parse_args(words)
    if options.kill and options.kill_every is None:
        options.kill_every = 1.0
    return options


def main() -> None:
    words, flags = split_flags(sys.argv[1:])
    options = options_of(words)
    quiet = ["--served-model-name", "bench", "--no-enable-log-requests"]
    server = Server(options.target, [*quiet, *flags], log=options.log)
    with open(f"/proc/{server.process.pid}/cmdline") as file:
        options.text = "--skip-tokenizer-init" not in file.read().split("\0")
    began = time.monotonic()
    pids: list[int] = []
    try:
        tally, watch, killer, disturbances = asyncio.run(load(server, options))
        seconds = time.monotonic() - began
        end = wait_until_idle(server.port)
        idle = watch_idle(server.process.pid, QUIET_SECONDS)
        pids = tree(server.process.pid)
    finally:
        stop = server.stop()
    kills = len(disturbances.times)
    wrong = verdict(tally, watch, end, options.most_growth_mib, kills=kills)
    if killer.unrecovered:
        wrong.append(f"the server did not recover from the death of a {killer.unrecovered}")
    if idle["quiet_after_s"] is None:
        wrong.append(f"the idle tree used {idle['quiet_cpu_percent']} % of a core")
    if left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        wrong.append(f"processes are left: {left}")
    if server.process.returncode:
        wrong.append(f"the server left with status {server.process.returncode}")
    found = report(options, tally, watch, killer, by_name(end), wrong)
    times = {"seconds": round(seconds, 1), "stop_s": round(stop, 2)}
    print(json.dumps(found | times | idle))
    sys.exit(1 if wrong else 0)


def report(
    options: argparse.Namespace,
    tally: Tally,
    watch: Watch,
    killer: Killer,
    sums: dict[str, float],
    wrong: list[str],
) -> dict[str, Any]:
    """Return what a run was like; *sums* are the metrics at its end."""
    return {
        "bench": "soak",
        "target": options.target,
        "wrong": wrong,
        "answered": sum(tally.answered.values()),
        "by_kind": dict(tally.answered),
        "refused": sum(tally.refused.values()),
        "given_up": tally.given_up,
        "turned_away": tally.turned_away,
        "failed_by_kills": tally.failed,
        "cut_by_kills": tally.cut,
        "lost": len(tally.failures),
        "failures": tally.failures[:5],
        "recovery_s": killer.recoveries,
        "slowest_s": round(max(tally.seconds, default=0.0), 2),
        "tokens": sums["vllm:generation_tokens_total"],
        "preemptions": sums["vllm:num_preemptions_total"],
        "prefix_cache_hits": sums["vllm:prefix_cache_hits_total"],
        "engine_restarts": sums["zlm:engine_restarts_total"],
        "most_running": watch.most_running,
        "most_waiting": watch.most_waiting,
        "rss_mib": [round(sum(sizes)) for sizes in watch.tenths()],
        "gpu_mib": [watch.gpu[0], watch.gpu[-1]] if watch.gpu else None,
        "growth_mib": watch.growth(),
    }


if __name__ == "__main__":
    main()
