"""Who is let in: keys with limits, a key file that changes, the time an answer may take, room."""

from pathlib import Path

import pytest

from zlm.api_keys import api_key, read_key_file
from zlm.errors import ConfigError
from zlm.messages import Cancel, Deltas


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


BODY = {"prompt": "x", "max_tokens": 4}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(
        "# all of them\nplain\n"
        '{"key": "slow", "name": "ann", "requests_per_minute": 2}\n'
        '{"key": "short", "tokens_per_minute": 8}\n'
        f'{{"sha256": "{api_key("hidden").sha256.upper()}", "concurrency": 1}}\n'
    )
    return file


def test_requests_over_the_limit_of_a_key_are_429(make_house, key_file):
    house = make_house(api_key_file=str(key_file))
    for left in (1, 0):
        answer = house.post("/v1/completions", BODY, bearer("slow"))
        assert answer.status == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
    refused = house.post("/v1/completions", BODY, bearer("slow"))
    assert refused.status == 429 and refused.error["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    assert house.ask("GET", "/v1/models", headers=bearer("slow")).status == 200
    assert house.post("/v1/completions", BODY, bearer("plain")).status == 200


def test_a_request_over_a_limit_is_refused_before_its_body_is_read(make_house, key_file):
    house = make_house(api_key_file=str(key_file))
    for _ in range(2):
        house.post("/v1/completions", BODY, bearer("slow"))
    client = house.client()
    client.methods.append("POST")
    client.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: z\r\nAuthorization: Bearer slow\r\n"
        b"Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
    )
    assert [answer.status for answer in client.responses()] == [429]


def test_tokens_over_the_limit_of_a_key_are_429(make_house, key_file):
    house = make_house(api_key_file=str(key_file))
    answer = house.post("/v1/completions", BODY, bearer("short"))  # 5 of the prompt, 4 made
    assert answer.status == 200 and answer.headers["x-ratelimit-remaining-tokens"] == "8"
    refused = house.post("/v1/completions", BODY, bearer("short"))
    assert refused.status == 429 and "8 tokens a minute" in refused.error["message"]


def test_requests_at_once(make_house, key_file, make_delta):
    house = make_house(api_key_file=str(key_file))
    house.tokenizer = lambda command: []
    waiting = house.client()
    waiting.request("POST", "/v1/completions", BODY, bearer("hidden"))
    refused = house.post("/v1/completions", BODY, bearer("hidden"))
    assert refused.status == 429 and refused.headers["retry-after"] == "1"
    waiting.leave()
    waiting = house.client()
    waiting.request("POST", "/v1/completions", BODY, bearer("hidden"))
    command = house.generated()
    house.take(Deltas([make_delta(command, 0, "x", 1, finish_reason="stop")]))
    house.loop.turn()
    assert waiting.responses()[0].status == 200
    waiting.request("POST", "/v1/completions", {"prompt": 1}, bearer("hidden"))  # 400 frees, too
    waiting.request("POST", "/v1/completions", BODY, bearer("hidden"))
    assert [answer.status for answer in waiting.responses()] == [200, 400]


def test_a_key_file_of_administrators_alone_lets_nobody_else_in(make_house, tmp_path):
    file = tmp_path / "keys"
    file.write_text('{"key": "boss", "admin": true}\n')
    house = make_house(api_key_file=str(file))
    assert house.post("/v1/completions", BODY).status == 401
    assert house.post("/v1/completions", BODY, bearer("boss")).status == 200
    assert house.ask("GET", "/load", headers=bearer("boss")).status == 200


def test_a_key_file_that_changes_is_read_again(make_house, key_file, caplog):
    house = make_house(api_key_file=str(key_file))
    assert house.post("/v1/completions", BODY, bearer("plain")).status == 200
    assert house.post("/v1/completions", BODY, bearer("new")).status == 401
    key_file.write_text("\ufeffnew\n")
    house.server.gate.refresh()
    assert house.post("/v1/completions", BODY, bearer("plain")).status == 401
    assert house.post("/v1/completions", BODY, bearer("new")).status == 200
    for content in ("{broken new-secret", ""):
        key_file.write_text(content)
        house.server.gate.refresh()
        house.server.gate.refresh()
        assert house.post("/v1/completions", BODY, bearer("new")).status == 200
    key_file.unlink()
    house.server.gate.refresh()
    assert house.post("/v1/completions", BODY, bearer("new")).status == 200
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 3 and "secret" not in caplog.text and "new-" not in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "there is no key in it"),
        ("# only words\n", "there is no key in it"),
        ("a key\n", "line 1: a key must be printable ASCII without spaces"),
        ('x\n{"key": "topsecret", "requests": 1}', "line 2: Object contains unknown field"),
        ('{"key": "topsecret", "sha256": "00"}', "give either key or sha256"),
        ('{"name": "ann"}', "give either key or sha256"),
        ('{"sha256": "topsecret"}', "sha256 must be 64 hexadecimal digits"),
        ('{"key": "topsecret", "name": "a b"}', "name must be at most 64 letters"),
        ('{"key": "topsecret", "concurrency": 0}', "concurrency must be between 1 and"),
        ('{"key": "topsecret", "concurrency": "2"}', "Expected `int | null`, got `str`"),
        ('{"key": "topsecret"', "line 1: "),
        ('topsecret\n{"key": "topsecret"}', "line 2: this key stands there twice"),
    ],
)
def test_a_wrong_key_file_is_told_without_its_keys(tmp_path, content, words):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        read_key_file(str(file))
    assert words in refused.value.message and "topsecret" not in refused.value.message


def test_more_limits_for_sampling_are_the_servers(make_house):
    from zlm.sampling_params import SamplingLimits

    limits = SamplingLimits(
        max_n=2, max_stop_strings=1, max_stop_characters=3, max_logit_bias=1, max_bad_words=1,
        max_logprobs=2,
    )  # fmt: skip
    house = make_house(limits={"sampling": limits})
    for field, good, bad in (
        ("n", 2, 3),
        ("stop", ["abc"], ["a", "b"]),
        ("stop", "abc", "abcd"),
        ("logit_bias", {"1": 1}, {"1": 1, "2": 1}),
        ("bad_words", ["a"], ["a", "b"]),
        ("logprobs", 2, 3),
        ("prompt_logprobs", 2, 3),
    ):
        assert house.complete(**{field: good}).status == 200
        message = house.refused(house.complete(**{field: bad}), 400, field)
        assert any(digit in message for digit in "123")
    house.refused(house.chat(logprobs=True, top_logprobs=3), 400, "top_logprobs")
    document = house.ask("GET", "/openapi.json").json()
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["n"]["anyOf"][0]["maximum"] == 2


# ------------------------------------------------------------------------------------ deadlines


def timeouts(house, *, header=None, **fields):
    """Make a request that nobody answers; return its connection."""
    client = house.client()
    house.tokenizer = lambda command: []
    headers = {} if header is None else {"X-Request-Timeout": header}
    client.request("POST", "/v1/completions", {**BODY, **fields}, headers)
    return client


@pytest.mark.parametrize(
    ("server", "header", "field", "seconds"),
    [
        (5.0, None, None, 5.0),
        (None, "2.5", None, 2.5),
        (None, None, 3, 3.0),
        (5.0, "2", 3, 2.0),
        (1.0, "2", 3, 1.0),
    ],
)
def test_an_answer_that_takes_too_long_is_504(make_house, server, header, field, seconds):
    house = make_house(limits={"request_timeout_seconds": server})
    fields = {} if field is None else {"timeout": field}
    client = timeouts(house, header=header, **fields)
    house.loop.advance(seconds - 0.001)
    assert not client.responses()
    house.loop.advance(0.001)
    (answer,) = client.responses()
    assert answer.status == 504 and answer.error["code"] == "deadline_exceeded"
    assert f"{seconds:g} seconds" in answer.error["message"]
    assert len(house.cancelled()) == 1 and len(house.open) == 0
    house.tokenizer = lambda command: []
    client.request("GET", "/v1/models")  # the connection lives
    assert [answer.status for answer in client.responses()] == [504, 200]


def test_a_stream_that_takes_too_long_ends_with_an_error(make_house, make_delta):
    house = make_house()
    client = timeouts(house, header="2", stream=True)
    house.take(Deltas([make_delta(house.generated(), 0, "He", 1)]))
    house.loop.turn()
    house.loop.advance(2)
    (answer,) = client.responses()
    events = answer.events()
    assert events[-1]["error"]["code"] == "deadline_exceeded" and "[DONE]" not in events
    house.loop.turn()
    assert client.transport.closed and isinstance(house.commands[-1], Cancel)


def test_an_answer_in_time_is_left_alone(make_house):
    house = make_house(limits={"request_timeout_seconds": 5.0})
    client = house.client()
    client.request("POST", "/v1/completions", BODY)
    house.loop.turn()
    house.loop.advance(6)
    assert [answer.status for answer in client.responses()] == [200]
    assert not client.transport.closed  # only the time to stay open runs


@pytest.mark.parametrize("header", ["0", "-1", "x", "1e3", "86401", "nan", "inf", "1;2"])
def test_a_wrong_header_is_told(house, header):
    answer = house.post("/v1/completions", BODY, {"X-Request-Timeout": header})
    assert "X-Request-Timeout must be" in house.refused(answer, 400)


@pytest.mark.parametrize("value", [0, -1, 86401, "5"])
def test_a_wrong_field_is_told(house, value):
    house.refused(house.complete(timeout=value), 400, "timeout")


# ------------------------------------------------------------------------------------- room


def test_idle_connections_give_way_to_new_ones(make_house):
    house = make_house(limits={"max_connections": 3})
    busy = timeouts(house)
    slow = house.client()
    slow.send(b"GET / HTTP/1.1\r\nHost: ")  # never comes to its end
    idle = house.client()
    fourth = house.client()
    house.loop.turn()
    assert slow.transport.aborted and not idle.transport.closed
    fifth = house.client()
    house.loop.turn()
    assert idle.transport.aborted and not busy.transport.closed
    for client in (fourth, fifth):
        client.request("GET", "/health")
        assert client.responses()[0].status == 200


def test_connections_that_are_all_busy_let_nobody_in(make_house):
    house = make_house(limits={"max_connections": 2})
    busy = [timeouts(house) for _ in range(2)]
    third = house.client()
    house.loop.turn()
    assert third.transport.aborted and not any(client.transport.closed for client in busy)
    assert len(house.server.connections) == 2
    busy[0].leave()
    fourth = house.client()
    fourth.request("GET", "/health")
    assert fourth.responses()[0].status == 200


def test_no_more_connections_than_the_system_allows(make_house, monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    assert make_house().server.limits.max_connections == 1024 - 128
    assert make_house(limits={"max_connections": 5}).server.limits.max_connections == 5


def test_bodies_that_arrive_at_once_share_their_memory(make_house):
    house = make_house(limits={"max_body_bytes": 1000, "max_body_memory_bytes": 1500})
    head = b"POST /tokenize HTTP/1.1\r\nHost: z\r\nContent-Length: 800\r\n\r\n"
    body = b'{"prompt":"x"}'.ljust(800)
    first, second, third = (house.client() for _ in range(3))
    first.send(head + body[:790])
    second.send(head + body[:790])
    (refused,) = second.responses()
    assert refused.status == 503 and refused.headers["retry-after"] == "1"
    assert second.transport.eof_written and house.server.body_memory.used_bytes == 790
    third.send(head + body[:700])
    first.leave()  # its memory is free again
    fourth = house.client()
    fourth.methods = ["POST"]
    fourth.send(head + body)
    third.send(body[700:])
    house.loop.turn()
    assert [client.responses()[0].status for client in (third, fourth)] == [200, 200]
    assert house.server.body_memory.used_bytes == 0
