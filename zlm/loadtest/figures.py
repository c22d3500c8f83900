"""What the records of a level come to. Pure: values in, a dictionary of figures out.

    sent ──▶ first event ─▶ event ─▶ ... ─▶ last event          (from due on in an open loop)
      TTFT ──────┤  ITL ───┤                     │
      E2E  ──────────────────────────────────────┤    TPOT = (E2E - TTFT) / (tokens - 1)

ITL is between events of output as the client read them: those of one read are 0 apart, and a server
may put several tokens into one event (``tok_per_event``). ``gap`` is between reads, TPOT is of
tokens. An event without output (who speaks, usage) counts nowhere. A failed request is in no time
and no rate. Percentiles are by nearest rank.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from zlm.loadtest.client import Seen
from zlm.loadtest.plan import Limits, Pace
from zlm.loadtest.stream import Record

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "itl", "tpot", "e2e", "gap")


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the nearest-rank percentile of *values*; None when there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def timings(record: Record) -> dict[str, float]:
    """Return the TTFT, TPOT and E2E of a request that was answered, as far as it has them."""
    if not record.times:  # not streamed, or nothing but an end
        return {"e2e": record.ended - record.intended}
    first, last = record.times[0], record.times[-1]
    found = {"ttft": first - record.intended, "e2e": last - record.intended}
    if record.output_tokens > 1:
        found["tpot"] = (last - first) / (record.output_tokens - 1)
    return found


def series(records: Sequence[Record], *, streamed: bool = True) -> dict[str, list[float]]:
    """Return the values of every metric in seconds, of the requests that were answered."""
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    for record in records:
        if record.error:
            continue
        for name, value in timings(record).items():
            if streamed or name == "e2e":
                values[name].append(value)
        times = record.times
        gaps = [after - before for before, after in pairwise(times)]
        values["gap"] += gaps
        values["itl"] += gaps + [0.0] * (record.events - len(times))
    return values


def figures(
    seen: Seen, pace: Pace, limits: Limits | None = None, *, streamed: bool = True
) -> dict[str, Any]:
    """Return what *seen* comes to; times in ms, None where there are none."""
    records = seen.records
    good = [record for record in records if not record.error]
    seconds = max(1e-9, _last(records) - min((r.intended for r in records), default=0.0))
    output = sum(record.output_tokens for record in good)
    events = sum(record.events for record in good)
    inputs = sum(record.input_tokens or record.planned_input_tokens for record in good)
    result = {
        "conc": pace.concurrency or None,
        "rate": pace.request_rate if pace.is_open else None,
        "measured_from": "due" if pace.is_open else "sent",
        "n": len(records),
        "ok": len(good),
        **_errors(records),
        "input_tokens": inputs,
        "output_tokens": output,
        "tokens_from": _source(good),
        "s": round(seconds, 3),
        "req_s": round(len(good) / seconds, 3),
        "out_tok_s": round(output / seconds, 1),
        "in_tok_s": round(inputs / seconds, 1),
        "events": events,
        "tok_per_event": round(output / max(events, 1), 3),
        "client_cpu": round(seen.cpu_seconds / seconds, 4),
        "client_processes": seen.processes,
    }
    for name, values in series(records, streamed=streamed).items():
        result |= _milliseconds(name, values)
    if pace.is_open:
        result |= _lateness(records)
    if limits is not None:
        result |= _goodput(good, limits, len(records), seconds)
    return result


def _last(records: Sequence[Record]) -> float:
    return max(
        (record.times[-1] if record.times else record.ended for record in records), default=0
    )


def _errors(records: Sequence[Record]) -> dict[str, Any]:
    failed = [record for record in records if record.error]
    kinds = Counter(record.error for record in failed)
    return {
        "errors": len(failed),
        "errors_by_kind": dict(kinds.most_common()),
        "err": f"{failed[0].error}: {failed[0].detail}" if failed else None,
    }


def _source(good: Sequence[Record]) -> str:
    told = sum(record.usage_tokens > 0 for record in good)
    return "usage" if told == len(good) else "events" if told == 0 else "both"


def _milliseconds(name: str, values: Sequence[float]) -> dict[str, float | None]:
    found = {f"{name}_mean_ms": sum(values) / len(values) if values else None}
    found |= {f"{name}_p{p}_ms": percentile(values, p) for p in PERCENTILES}
    return {key: None if value is None else round(1e3 * value, 3) for key, value in found.items()}


def _lateness(records: Sequence[Record]) -> dict[str, Any]:
    """Return how much later than planned requests went out, and the rate that was offered."""
    late = [record.sent - record.intended for record in records]
    due = sorted(record.intended for record in records)
    span = due[-1] - due[0] if due else 0.0
    return {
        "offered_req_s": round((len(due) - 1) / span, 3) if span > 0 else None,
        "late_p99_ms": round(1e3 * (percentile(late, 99) or 0.0), 3),
        "late_max_ms": round(1e3 * max(late, default=0.0), 3),
    }


def _goodput(good: Sequence[Record], limits: Limits, number: int, seconds: float) -> dict[str, Any]:
    """Return how many requests met the objective, of all that were sent.

    A metric that a request has not (TPOT of one token) is met.
    """
    met = 0
    for record in good:
        found = timings(record)
        met += all(1e3 * found.get(n, 0.0) <= most for n, most in limits.milliseconds.items())
    return {
        "objective_ms": limits.milliseconds,
        "good": met,
        "good_share": round(met / max(number, 1), 4),
        "goodput_req_s": round(met / seconds, 3),
    }
