"""Tables of a load test for a terminal."""

from collections.abc import Sequence
from typing import Any

MOST_CPU = 0.7  # of a core, of a client's process, before it is late itself
MOST_LATE_MS = 5.0
COLUMNS = (  # heading, key of the figures, width
    ("reqs", "ok", 5),
    ("errs", "errors", 5),
    ("req/s", "req_s", 8),
    ("out tok/s", "out_tok_s", 10),
    ("TTFT p50", "ttft_p50_ms", 10),
    ("p90", "ttft_p90_ms", 9),
    ("p99", "ttft_p99_ms", 9),
    ("ITL p50", "itl_p50_ms", 8),
    ("p99", "itl_p99_ms", 8),
    ("TPOT p50", "tpot_p50_ms", 9),
    ("E2E p50", "e2e_p50_ms", 9),
    ("p99", "e2e_p99_ms", 9),
)
RATIOS = (
    ("output tokens/s", "out_tok_s"),
    ("requests/s", "req_s"),
    ("TTFT mean", "ttft_mean_ms"),
    ("TTFT p50", "ttft_p50_ms"),
    ("TTFT p99", "ttft_p99_ms"),
    ("ITL p50", "itl_p50_ms"),
    ("ITL p99", "itl_p99_ms"),
    ("TPOT p50", "tpot_p50_ms"),
    ("E2E p50", "e2e_p50_ms"),
    ("E2E p99", "e2e_p99_ms"),
    ("goodput", "goodput_req_s"),
)


def number(value: Any) -> str:
    """Return a figure for people: three digits that matter, thousands in groups; ``-`` if none."""
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def name(level: dict[str, Any]) -> str:
    """Return how a level's load is called."""
    if level["rate"] is not None:
        cap = f", at most {level['conc']}" if level["conc"] else ""
        return f"{level['rate']:g}/s{cap}"
    return f"{level['conc'] or 'all'} at once"


def heading() -> str:
    """Return the first line of a table of levels. Times are in ms."""
    return f"{'load':>12}" + "".join(f"{title:>{width}}" for title, _, width in COLUMNS)


def row(level: dict[str, Any]) -> str:
    """Return a level's line."""
    cells = "".join(f"{number(level[key]):>{width}}" for _, key, width in COLUMNS)
    return f"{name(level):>12}{cells}"


def remarks(level: dict[str, Any]) -> list[str]:
    """Return what a reader of a level's line must know besides: goodput, faults, limits."""
    lines = []
    if "goodput_req_s" in level:
        limits = " ".join(f"{key}<={ms:g}ms" for key, ms in level["objective_ms"].items())
        lines.append(
            f"goodput {number(level['goodput_req_s'])} requests/s: {level['good']} of {level['n']}"
            f" ({level['good_share']:.1%}) met {limits}"
        )
    if "asked_conc" in level:
        lines.append(
            f"{level['conc']} at once, not {level['asked_conc']}: there were no more --requests"
        )
    if level["errors"]:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in level["errors_by_kind"].items())
        lines.append(f"errors: {kinds}; the first: {level['err']}")
    if level["tokens_from"] != "usage" and level["ok"]:
        lines.append("tokens are counted from events: the server tells no usage for all answers")
    if level["tok_per_event"] > 1.05:
        lines.append(
            f"{level['tok_per_event']:.2f} tokens in an event: ITL is of events, TPOT of tokens"
        )
    if level.get("late_p99_ms", 0.0) > MOST_LATE_MS:
        lines.append(
            f"requests were sent up to {level['late_max_ms']} ms late (p99 {level['late_p99_ms']}):"
            " these waits are in the times"
        )
    if level["client_cpu"] > MOST_CPU * level["client_processes"]:
        lines.append(
            f"the client used {level['client_cpu']:.0%} of a core: its times are in doubt, give it "
            "more --client-processes"
        )
    return lines


def ratio(a: dict[str, Any], b: dict[str, Any], key: str) -> str:
    """Return b / a of a figure, ``-`` where there is none."""
    return f"{b[key] / a[key]:.3f}" if a.get(key) and b.get(key) is not None else "-"


def ratios(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines that set the levels of two servers side by side, with second / first."""
    lines = []
    for a, b in zip(first, second, strict=True):
        lines.append(f"{'load ' + name(a):20}{'A':>12}{'B':>12}{'B / A':>9}")
        for title, key in RATIOS:
            if a.get(key) is None or b.get(key) is None:
                continue
            lines.append(
                f"  {title:18}{number(a[key]):>12}{number(b[key]):>12}{ratio(a, b, key):>9}"
            )
    return lines
