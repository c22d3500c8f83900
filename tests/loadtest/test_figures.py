"""What records come to, to the last digit."""

from array import array
from typing import Any

import pytest

from zlm.errors import ConfigError
from zlm.loadtest import table
from zlm.loadtest.client import Seen
from zlm.loadtest.figures import figures, percentile
from zlm.loadtest.plan import Limits, Pace
from zlm.loadtest.stream import Record


def record(due: float, *times: float, counts: tuple[int, ...] = (), **fields: Any) -> Record:
    """Return a request that was due and sent at *due* and read events at *times* after it."""
    made = Record(4, 3, intended=due, sent=due, usage_tokens=4)
    made.times = array("d", [due + time for time in times])
    made.counts = array("L", counts or [1] * len(times))
    made.ended = due + (times[-1] if times else 1.0) + 0.5
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_every_figure_of_a_closed_loop() -> None:
    """Binary fractions, so that sums are exact."""
    one = record(10.0, 0.25, 0.5, 0.75, 1.0)
    two = record(11.0, 0.5, 0.625, 1.0, counts=(1, 2, 1))
    failed = record(10.5, 0.25, error="http_503", detail="busy")
    level = figures(Seen([one, two, failed], cpu_seconds=0.5), Pace(concurrency=2))
    assert (level["n"], level["ok"], level["errors"], level["measured_from"]) == (3, 2, 1, "sent")
    assert level["errors_by_kind"] == {"http_503": 1} and level["err"] == "http_503: busy"
    assert level["s"] == 2.0 and level["req_s"] == 1.0 and level["client_cpu"] == 0.25
    assert (level["output_tokens"], level["out_tok_s"], level["events"]) == (8, 4.0, 8)
    assert (level["input_tokens"], level["in_tok_s"], level["tokens_from"]) == (6, 3.0, "usage")
    assert (level["ttft_mean_ms"], level["ttft_p50_ms"], level["ttft_p99_ms"]) == (375, 500, 500)
    assert (level["e2e_p50_ms"], level["tpot_mean_ms"]) == (1000, pytest.approx(208.333, abs=1e-3))
    assert level["itl_mean_ms"] == pytest.approx(1e3 * (0.75 + 0.5) / 6, abs=1e-3), "one is 0"
    assert (level["gap_mean_ms"], level["gap_p99_ms"]) == (250, 375)
    assert "late_p99_ms" not in level and "goodput_req_s" not in level


def test_an_open_loop_counts_from_when_requests_were_due() -> None:
    late = record(10.0, 1.0, 1.5, sent=10.5)
    level = figures(Seen([late, record(14.0, 0.25, 0.5)], 0.0), Pace(request_rate=0.25))
    assert level["measured_from"] == "due" and level["offered_req_s"] == 0.25
    assert level["ttft_p99_ms"] == 1000 and level["late_p99_ms"] == 500


def test_goodput_counts_requests_that_met_every_limit() -> None:
    fast, slow_first = record(0.0, 0.25, 0.5, 0.75, 1.0), record(0.0, 0.5, 0.625, 0.75, 1.0)
    slow_after, broken = record(0.0, 0.25, 1.0, 2.0, 4.0), record(0.0, 0.25, error="timeout")
    limits = Limits.parse(["ttft:250", "tpot:250"])
    seen = Seen([fast, slow_first, slow_after, broken], 0.0)
    level = figures(seen, Pace(concurrency=4), limits)
    assert (level["good"], level["good_share"], level["goodput_req_s"]) == (1, 0.25, 0.25)
    assert "1 of 4 (25.0%) met ttft<=250ms tpot<=250ms" in table.remarks(level)[0]


@pytest.mark.parametrize(
    "word", ["ttft", "ttft:", "ttft:x", "ttft:0", "speed:3", "itl:5", "tpot:nan"]
)
def test_an_objective_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        Limits.parse([word])


def test_tokens_are_counted_from_events_without_usage() -> None:
    level = figures(Seen([record(0.0, 0.5, 1.0, usage_tokens=0)], 0.0), Pace(concurrency=1))
    assert (level["output_tokens"], level["tokens_from"]) == (2, "events")
    assert level["tpot_p50_ms"] == 500
    assert any("counted from events" in line for line in table.remarks(level))


def test_a_client_that_is_too_busy_is_told() -> None:
    for cpu, processes, told in ((1.0, 1, False), (1.6, 1, True), (1.6, 2, False)):
        seen = Seen([record(0.0, 1.0, 2.0)], cpu, processes)
        remarks = table.remarks(figures(seen, Pace(concurrency=1)))
        assert any("in doubt" in line for line in remarks) == told


def test_nothing_answered() -> None:
    level = figures(
        Seen([record(0.0, error="connect", detail="refused")], 0.0), Pace(concurrency=1)
    )
    assert (level["ok"], level["out_tok_s"], level["ttft_p50_ms"]) == (0, 0.0, None)
    assert "-" in table.row(level) and "1 x connect" in table.remarks(level)[0]


def test_percentiles_are_nearest_ranks() -> None:
    assert percentile([], 50) is None
    assert percentile([float(i) for i in range(100)], 99) == 99.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
