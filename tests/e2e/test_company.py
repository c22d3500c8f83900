"""Requests beside others: CASES 20, 25, 29, 93, 94 and sixty-four streams at once.

Greedy and seeded answers in float32 do not depend on who else is there.
"""

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

SUBJECTS = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "harbour",
    "island", "jacket", "kitchen", "ladder", "mirror", "needle", "orchard", "pencil",
)  # fmt: skip
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
ABORT_SECONDS = 2.0

MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.8},
    {"temperature": 1.2, "seed": 3, "top_k": 20},
    {"temperature": 1.0, "seed": 4, "min_p": 0.1},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5, "temperature": 0.7, "seed": 5},
    {"logit_bias": {"260": 5.0}},
    {"logprobs": 3},
    {"stop": [" the"]},
    {"max_tokens": 3},
    {"temperature": 0.9, "seed": -6, "n": 2},
    {"min_tokens": 12},
    {"temperature": 1.0, "seed": 7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1},
    {"ignore_eos": True},
]


def story(subject: str) -> str:
    return f"Write one sentence about the {subject}. The {subject}"


def test_sixty_four_streams_equal_their_solo_runs(server: Any) -> None:
    solo = {s: server.complete(story(s), max_tokens=16).text for s in SUBJECTS}
    assert len(set(solo.values())) > 1
    subjects = list(SUBJECTS) * 4
    stream = {"max_tokens": 16, "stream": True}
    answers = server.together([(story(s), stream) for s in subjects])
    assert [answer.status for answer in answers] == [200] * 64
    assert [answer.streamed_text for answer in answers] == [solo[s] for s in subjects]
    for answer in answers:
        finish = [c["finish_reason"] for e in answer.events for c in e["choices"]]
        assert [reason for reason in finish if reason] in (["length"], ["stop"])
        assert answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("neighbours", [0, 1, 7, 31])
def test_case_20_seed_holds_beside_unseeded_neighbours(server: Any, neighbours: int) -> None:
    seeded = ("The weather today", {"temperature": 0.8, "seed": 42, "max_tokens": 16})
    alone = server.complete(seeded[0], **seeded[1]).text
    unseeded = [(story(s), {"temperature": 0.8, "max_tokens": 16}) for s in SUBJECTS * 2]
    before, after = unseeded[: neighbours // 2], unseeded[neighbours // 2 : neighbours]
    answers = server.together([*before, seeded, seeded, *after])
    assert answers[len(before)].text == answers[len(before) + 1].text == alone


def test_case_22_no_seed_is_fresh_randomness(server: Any) -> None:
    texts = {server.complete("Hello", temperature=1.0, max_tokens=12).text for _ in range(3)}
    assert len(texts) == 3


def test_case_29_each_of_a_mixed_batch_equals_its_solo_run(server: Any) -> None:
    requests = [
        (story(subject), {"max_tokens": 12, **fields})
        for subject, fields in zip(SUBJECTS, MIXED, strict=True)
    ]

    def choices(answer: Any) -> Any:
        assert answer.status == 200, answer.body
        return [{k: c[k] for k in ("text", "finish_reason")} for c in answer.json["choices"]]

    solo = [choices(server.complete(prompt, **fields)) for prompt, fields in requests]
    assert [choices(answer) for answer in server.together(requests)] == solo
    assert [choices(answer) for answer in server.together(requests[::-1])] == solo[::-1]


def test_case_93_two_requests_with_one_client_id(server: Any) -> None:
    def ask(subject: str, request_id: str) -> Any:
        body = {"model": "smol", "prompt": story(subject), "temperature": 0, "max_tokens": 24}
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        return server.request("POST", "/v1/completions", data, headers)

    solo = [server.complete(story(s), max_tokens=24).text for s in SUBJECTS[:2]]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda s: ask(s, "same-id"), SUBJECTS[:2]))
    assert [answer.text for answer in answers] == solo
    assert {answer.headers["x-request-id"] for answer in answers} == {"same-id"}
    assert answers[0].json["id"] != answers[1].json["id"]
    long = ask(SUBJECTS[0], "x" * 1000)
    assert long.status == 200 and len(long.headers["x-request-id"]) <= 128
    assert ask(SUBJECTS[0], "x" * 100_000).status == 431
    server.assert_good()


def read_first_event(raw: socket.socket) -> None:
    received = b""
    while b"data: {" not in received:
        chunk = raw.recv(65536)
        assert chunk, received
        received += chunk


@pytest.mark.parametrize(
    ("count", "fields", "read_first"),
    [
        (1, {"max_tokens": 900}, True),
        (1, {"max_tokens": 200, "n": 4}, True),
        (1, {"max_tokens": 900, "stream": False}, False),
        (50, {"max_tokens": 900}, False),
    ],
    ids=["streaming", "n-4", "not-streamed", "fifty-some-queued"],
)
def test_case_94_a_client_that_leaves_frees_its_blocks(
    server: Any,
    eventually: Callable[[Callable[[], bool], float], bool],
    count: int,
    fields: dict[str, Any],
    read_first: bool,
) -> None:
    def idle() -> bool:
        values = server.metrics()
        return values[RUNNING] == 0 and values[WAITING] == 0 and values[KV_USAGE] == 0

    assert eventually(idle, ABORT_SECONDS)
    raws = [server.open_stream(story(f"{i}"), ignore_eos=True, **fields) for i in range(count)]
    if read_first:
        read_first_event(raws[0])
    assert eventually(lambda: server.metrics()[RUNNING] > 0, 10)
    for raw in raws:
        raw.close()
    assert eventually(idle, ABORT_SECONDS), server.metrics()
    server.assert_good()


def test_case_94_a_client_that_leaves_during_prefill(
    server: Any, eventually: Callable[[Callable[[], bool], float], bool]
) -> None:
    raw = server.open_stream([(7 * i) % 40000 + 100 for i in range(1000)], max_tokens=20)
    assert eventually(lambda: server.metrics()[RUNNING] > 0, 10)
    raw.close()
    assert eventually(lambda: server.metrics()[RUNNING] == 0, ABORT_SECONDS)
    server.assert_good()


def test_leaving_does_not_disturb_the_others(server: Any) -> None:
    expected = server.complete(story("ocean"), max_tokens=40).text
    raw = server.open_stream(story("river"), max_tokens=800, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.complete, story("ocean"), max_tokens=40, stream=True)
        read_first_event(raw)
        raw.close()
        assert other.result().streamed_text == expected
