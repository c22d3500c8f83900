"""The soak client: the requests it draws, what it takes for a whole answer, and its verdict."""

import random
import time
from argparse import Namespace

import pytest
from soak import Watch, verdict
from soak_load import (
    KINDS,
    SETTLE_SECONDS,
    Disturbances,
    Request,
    Tally,
    fault_of,
    is_error,
    make_request,
)

OPTIONS = Namespace(most_input=3000, most_output=200, last_id=40_000)
IDLE = {
    "vllm:num_requests_running": 0.0,
    "vllm:num_requests_waiting": 0.0,
    "vllm:kv_cache_usage_perc": 0.0,
    'zlm:queue_requests{process="engine 0"}': 0.0,
    'vllm:request_success_total{engine="0",finished_reason="stop"}': 1.0,
    'vllm:request_success_total{engine="0",finished_reason="abort"}': 1.0,
}


def test_requests_are_mixed() -> None:
    rng = random.Random(1)
    requests = [make_request(rng, OPTIONS, list(KINDS)) for _ in range(600)]
    lengths = [len(request.body["prompt"]) for request in requests]
    assert min(lengths) == 1 and 2000 < max(lengths) <= 3000
    assert {request.kind for request in requests} == set(KINDS)
    assert all(1 <= request.body["max_tokens"] <= 200 for request in requests)
    assert 30 < sum(request.give_up_after is not None for request in requests) < 100
    beginnings = [tuple(request.body["prompt"][:20]) for request in requests if lengths]
    long = [beginning for beginning in beginnings if len(beginning) == 20]
    assert len(long) - len(set(long)) > 50  # some begin as others do


def whole(tokens: int, stream: bool = True) -> bytes:
    end = b"data: [DONE]\n\n" if stream else b""
    return b'HTTP/1.1 200 OK\r\n\r\ndata: {"usage": {"completion_tokens":%d}}\n\n%b' % (tokens, end)


def request(kind: str = "greedy", **body: object) -> Request:
    return Request(kind, {"max_tokens": 5, "stream": True, **body}, None)


@pytest.mark.parametrize(
    ("asked", "answer", "fault"),
    [
        (request(), whole(5), None),
        (request(n=2), whole(10), None),
        (request(), whole(4), "4 tokens of 5"),
        (request(), whole(5, stream=False), "no end"),
        (request(stream=False), whole(5, stream=False), None),
        (request("stop"), whole(3), None),
        (request("stop"), whole(6), "6 tokens of 5"),
        (request(), b"HTTP/1.1 500 Oh\r\n\r\n", "status"),
        (request(), b"", "status"),
    ],
)
def test_whole_answers_and_others(asked: Request, answer: bytes, fault: str | None) -> None:
    found = fault_of(asked, answer)
    assert found is None if fault is None else fault in str(found)


def watch(*sums: float) -> Watch:
    return Watch(rss=[[each / 2, each / 2] for each in sums])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b'HTTP/1.1 503 Oh\r\n\r\n{"error": {}}', True),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {}}\n\n', True),
        (b"HTTP/1.1 503 Oh\r\n\r\n", False),
        (b'HTTP/1.1 400 No\r\n\r\n{"error": {}}', False),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n", False),
        (b"", False),
    ],
)
def test_what_counts_as_an_error_that_is_told(answer: bytes, expected: bool) -> None:
    assert is_error(answer) is expected


def test_only_requests_near_a_kill_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    disturbances = Disturbances()
    disturbances.begin(cuts=True)
    now = 103.0
    assert disturbances.excuse(90.0, 101.0) and disturbances.excuse(102.0, 200.0)
    assert not disturbances.excuse(90.0, 99.0)
    assert disturbances.end() == 3.0
    assert disturbances.excuse(103.0 + SETTLE_SECONDS, 110.0)
    assert not disturbances.excuse(103.1 + SETTLE_SECONDS, 110.0)
    assert disturbances.cut(99.0, 101.0) and not disturbances.cut(99.0, 99.5)
    assert not disturbances.cut(100.1 + SETTLE_SECONDS, 110.0)


def good() -> Tally:
    tally = Tally(sequences=1, most_sequences=2)
    tally.answered["greedy"] = 1
    return tally


def test_the_verdict() -> None:
    flat = watch(*[100.0] * 10)
    assert verdict(good(), flat, IDLE, 10.0) == []
    assert "no request was answered" in verdict(Tally(), flat, IDLE, 10.0)
    leaking = watch(*[100.0 + 5 * i for i in range(10)])
    assert verdict(good(), leaking, IDLE, 10.0) == ["memory of the processes grew by 30.0 MiB"]
    held = IDLE | {"vllm:kv_cache_usage_perc": 0.1}
    assert verdict(good(), flat, held, 10.0) == ["kv_cache_usage_perc is 0.1 at the end"]
    failed = good()
    failed.failures.append("x")
    assert verdict(failed, flat, IDLE, 10.0) == ["1 failures"]


def test_counts_must_agree_and_never_go_down() -> None:
    stop, abort = (name for name in IDLE if "success" in name)
    seen = watch()
    seen.compare(IDLE)
    uncounted = verdict(good(), seen, IDLE | {stop: 0.0}, 10.0)
    assert uncounted[0] == f"counters went down: {stop}"
    assert uncounted[1:] == ["1 sequences were answered, 0 are counted"]
    twice = verdict(good(), watch(), IDLE | {abort: 2.0}, 10.0)
    assert twice == ["3 ends of 2 sequences are counted"]
    assert verdict(good(), watch(), IDLE | {abort: 2.0}, 10.0, kills=1) == []
    error = abort.replace("abort", "error")
    assert verdict(good(), watch(), IDLE | {abort: 0.0, error: 1.0}, 10.0) == [
        "1 sequences ended with an error"
    ]


def test_growth_at_the_start_does_not_count() -> None:
    warming = watch(50.0, 100.0, *[120.0] * 8)
    assert warming.growth() == {"processes": 0.0, "gpu": None}
