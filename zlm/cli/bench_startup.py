"""``zlm bench startup MODEL``: what a start costs and what an idle server uses.

Measures, for each run: seconds from exec until /health answers 200, when each line of the server's
log came on the way there, seconds from there to the first answer, CPU of the whole idle tree in
percent of one core (in a window of the seconds asked for, and, as a worker may use idle time to get
ready for more, in the first such window below 1 % and how long after the answer that began),
resident (RSS, shared pages counted in each process) and proportional (PSS) memory of every process
and their sums, memory in use on the first GPU, seconds from SIGTERM to exit. With --cold a run
precedes that finds no compiled kernel; the others find what it compiled.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from zlm.cli.bench_serve import split
from zlm.cli.failures import told
from zlm.cli.parse import parse
from zlm.errors import ConfigError
from zlm.loadtest.servers import serve_command
from zlm.loadtest.startup import measure
from zlm.process.runtime import temporary

KERNEL_FOLDER = "TRITON_CACHE_DIR"  # environment: where compiled kernels are kept


def main(words: Sequence[str], name: str = "startup") -> int:
    """Run ``zlm bench startup`` with its arguments *words*; return the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"zlm bench {name}",
        description="Measure what a start costs and what an idle server uses.",
        epilog="All flags of zlm serve are taken too.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--cold", action="store_true", help="first a run without compiled kernels")
    parser.add_argument(
        "--idle-seconds", type=float, default=10.0, help="watched (default: 10); 0: none"
    )
    parser.add_argument("--runs", type=int, default=1, help="(default: 1)")
    options, flags = split(parser, words)
    return told(f"bench {name}", lambda: _run(options, flags))


def _run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    if options.runs < 1 or options.idle_seconds < 0:
        raise ConfigError("--runs must be at least 1, --idle-seconds at least 0")
    parse([options.model, *flags])  # wrong flags are told at once
    command = serve_command(options.model, flags)
    runs: list[dict[str, Any]] = []
    with temporary("zlm-startup-") as folder:
        environment = {KERNEL_FOLDER: f"{folder}/kernels"} if options.cold else {}
        for cache in ["cold"] * options.cold + ["warm"] * options.runs:
            log = folder / f"{len(runs)}.log"
            found = measure(command, log, options.idle_seconds, environment)
            runs.append({"cache": cache, **found})
            _show(runs[-1])
    print(json.dumps({"bench": "startup", "model": options.model, "runs": runs}))
    return 0


def _show(run: dict[str, Any]) -> None:
    gpu = "" if run["gpu_mib"] is None else f"GPU {run['gpu_mib']} MiB, "
    idle = ""
    if "idle_cpu_percent" in run:
        after = run["quiet_after_s"]
        quiet = "not quiet" if after is None else f"quiet after {after} s"
        idle = f"idle CPU {run['idle_cpu_percent']} % ({quiet}: {run['quiet_cpu_percent']} %), "
    print(
        f"{run['cache']}: ready {run['ready_s']} s, first answer {run['first_answer_s']} s, "
        f"{idle}RSS {run['rss_mib']} MiB, "
        f"PSS {run['pss_mib']} MiB, {gpu}stop {run['stop_s']} s"
    )
    for seconds, line in run["timeline"]:
        print(f"  {seconds:>8.3f} s  {line[:110]}")
    for name, sizes in run["processes"].items():
        print(f"  {name:<44} RSS {sizes['rss_mib']:>6} MiB  PSS {sizes['pss_mib']:>6} MiB")
    sys.stdout.flush()
