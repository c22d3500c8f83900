"""``zlm bench``: finds the measurement that is asked for and hands its arguments over."""

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches

USAGE_ERROR = 2
MEASUREMENTS = {
    "serve": "a server under load: latencies, throughput, goodput, a report with plots",
    "compare": "two servers in turn under the same load, and ratios",
    "offline": "throughput of the offline LLM, case by case",
    "latency": "how long the offline LLM takes for one batch",
    "startup": "what a start costs, and what an idle server uses",
    "profile": "where the time of a step goes, kernel by kernel",
}


def main(words: Sequence[str]) -> int:
    """Run ``zlm bench`` with its arguments *words*; return the exit status."""
    first = words[0] if words else ""
    if first in ("-h", "--help", "help"):
        print(overview())
        return 0
    if first not in MEASUREMENTS:
        near = get_close_matches(first, MEASUREMENTS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        said = f"zlm bench: no measurement {first[:200]!r}{hint}" if first else overview()
        print(said, file=sys.stderr)
        return USAGE_ERROR
    module = "bench_offline" if first == "latency" else f"bench_{first}"
    status: int = importlib.import_module(f"zlm.cli.{module}").main(words[1:], first)
    return status


def overview() -> str:
    """Return what ``zlm bench --help`` prints."""
    lines = ["usage: zlm bench WHAT [arguments]", "", "Measures:"]
    lines += [f"  {name:12}{what}" for name, what in MEASUREMENTS.items()]
    lines += ["", "zlm bench WHAT --help tells more. The last line of each is one JSON document."]
    return "\n".join(lines)
