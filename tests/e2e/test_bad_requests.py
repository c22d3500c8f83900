"""What clients get wrong: CASES 33, 34, 43, 44, 65, 86.

After each bad request a good one answers 200.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

VOCAB = 49152
MAX_MODEL_LEN = 1024


@pytest.fixture(autouse=True)
def then_a_good_request(server: Any) -> Iterator[None]:
    yield
    server.assert_good()


def assert_refused(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status == status, (answer.status, answer.body)
    assert answer.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = answer.json["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error


@pytest.mark.parametrize(
    "prompt",
    [[-1], [[-1]], [VOCAB], [[5, VOCAB]], [2**62], [True], [1.5], [1, "1"], [[1], "1"], [], [[]]],
    ids=repr,
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_case_33_ids_outside_the_vocabulary(server: Any, prompt: Any, stream: bool) -> None:
    assert_refused(server.complete(prompt, stream=stream))


@pytest.mark.parametrize("prompt", [[0], [VOCAB - 1], [[0], [VOCAB - 1]]], ids=repr)
def test_case_33_ids_at_the_edges(server: Any, prompt: Any) -> None:
    assert server.complete(prompt, max_tokens=2).status == 200


def test_case_33_and_34_bad_requests_leave_a_running_stream_alone(server: Any) -> None:
    expected = server.complete("Once upon a time", max_tokens=24).text
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete, "Once upon a time", max_tokens=24, stream=True)
        while not running.done():
            assert_refused(server.complete("x", logit_bias={"191222": -100}))
            assert_refused(server.complete([VOCAB]))
        assert running.result().streamed_text == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"191222": -100}),
        ("logit_bias", {str(VOCAB): 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"AI": -100}),
        ("logit_bias", {"5": 100.5}),
        ("stop_token_ids", [10**6]),
        ("stop_token_ids", [-1]),
        ("allowed_token_ids", [VOCAB]),
        ("allowed_token_ids", []),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_case_34_ids_outside_the_vocabulary(server: Any, field: str, value: Any) -> None:
    error = assert_refused(server.complete("x", min_tokens=1, **{field: value}))
    assert field in error["message"] or error["param"] == field


def test_case_34_bias_of_the_last_id_works(server: Any) -> None:
    answer = server.complete("x", max_tokens=1, logit_bias={str(VOCAB - 1): 100}, logprobs=0)
    assert answer.status == 200
    bad = server.complete("x", max_tokens=2, logit_bias={"28": -100})
    assert bad.status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_case_43_at_and_over_the_context_length(server: Any, stream: bool) -> None:
    def prompt(length: int) -> list[int]:
        return [(31 * i + length) % 40000 + 100 for i in range(length)]

    fits = server.complete(prompt(MAX_MODEL_LEN - 1), max_tokens=1, stream=stream)
    assert fits.status == 200
    choice = fits.events[-1]["choices"][0] if stream else fits.json["choices"][0]
    assert choice["finish_reason"] == "length"
    for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 10 * MAX_MODEL_LEN):
        error = assert_refused(server.complete(prompt(length), max_tokens=1, stream=stream))
        assert error["code"] == "context_length_exceeded"
        assert str(MAX_MODEL_LEN) in error["message"] and str(length) in error["message"]
        server.assert_good()


def test_case_43_a_prompt_of_the_limit_may_be_scored(server: Any) -> None:
    ids = [(17 * i) % 40000 + 100 for i in range(MAX_MODEL_LEN)]
    answer = server.complete(ids, max_tokens=0, echo=True, logprobs=0)
    assert answer.status == 200, answer.body
    assert len(answer.json["choices"][0]["logprobs"]["tokens"]) == MAX_MODEL_LEN


def test_case_44_room_and_defaults(server: Any) -> None:
    error = assert_refused(server.complete("Hello", max_tokens=65535))
    assert "65535" in error["message"] and str(MAX_MODEL_LEN) in error["message"]
    body = {"model": "smol", "prompt": "Count: 1, 2, 3,", "temperature": 0, "ignore_eos": True}
    default = server.request("POST", "/v1/completions", body)
    assert default.json["usage"]["completion_tokens"] == 16


def test_case_65_unknown_model(server: Any) -> None:
    error = assert_refused(server.complete("x", model="nobody"), 404)
    assert error["code"] == "model_not_found" and "smol" in error["message"]


BODY = b'{"model": "smol", "prompt": "Hi", "max_tokens": 1, "temperature": 0'


@pytest.mark.parametrize(
    ("body", "content_type", "statuses"),
    [
        (BODY + b"}", None, {200}),
        (BODY + b"}", "application/json; charset=utf-8", {200}),
        (BODY + b"}", "text/plain", {415}),
        (BODY, "application/json", {400}),
        (b"{", "application/json", {400}),
        (b"", "application/json", {400}),
        (b"\xff\xfe{}", "application/json", {400}),
        (BODY.replace(b"Hi", b"\xc3\x28") + b"}", "application/json", {400}),
        (BODY.replace(b"Hi", b"\\ud83d") + b"}", "application/json", {200, 400}),
        (b"[" + BODY + b"}]", "application/json", {400}),
        (b"\xef\xbb\xbf" + BODY + b"}", "application/json", {400}),
        (b"null", "application/json", {400}),
        (b'"text"', "application/json", {400}),
    ],
    ids=[
        "no-type", "charset", "text-plain", "cut", "brace", "empty", "utf-16-mark", "bad-utf-8",
        "lone-surrogate", "list", "byte-order-mark", "null", "string",
    ],
)  # fmt: skip
def test_case_86_broken_bodies(
    server: Any, body: bytes, content_type: str | None, statuses: set[int]
) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    answer = server.request("POST", "/v1/completions", body, headers)
    assert answer.status in statuses, (answer.status, answer.body)
    if answer.status != 200:
        assert_refused(answer, answer.status)
