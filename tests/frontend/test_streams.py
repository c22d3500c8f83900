"""Streams in trouble: errors before and after the first byte, slow sockets, clients that leave.

CASES 7 and 94.
"""

import logging

import pytest

from zlm.messages import Deltas, Failed, Generate

COMPLETIONS = "/v1/completions"


@pytest.fixture
def started(house):
    """A client whose stream waits, and the command that its tokenizer got."""

    def start(**fields):
        house.tokenizer = lambda command: []
        client = house.client()
        client.request("POST", COMPLETIONS, {"prompt": "x", "stream": True, **fields})
        return client, house.generated()

    return start


@pytest.fixture
def feed(house, make_delta):
    def feed(command, text, tokens=1, index=0, **fields):
        house.take(Deltas([make_delta(command, index, text, tokens, **fields)]))
        house.loop.turn()

    return feed


def _failed(command, **fields):
    return Failed(command.request_id, 400, "invalid_request_error", "too long", **fields)


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_byte_is_a_real_status(house, stream):
    fields = {"code": "context_length_exceeded", "param": "messages"}
    house.tokenizer = lambda command: [_failed(command, **fields)]
    response = house.complete(stream=stream)
    house.refused(response, 400, "messages")
    assert response.error["code"] == "context_length_exceeded"
    assert "text/event-stream" not in response.headers["content-type"]


def test_retry_after_of_a_failure(house):
    house.tokenizer = lambda command: [
        Failed(command.request_id, 503, "overloaded_error", "full", retry_after_seconds=3)
    ]
    response = house.complete()
    house.refused(response, 503)
    assert response.headers["retry-after"] == "3"


def test_failure_after_the_first_byte(house, started, feed, caplog):
    client, command = started()
    feed(command, "Hello")
    with caplog.at_level(logging.INFO, logger="zlm"):
        house.take(Failed(command.request_id, 500, "internal_error", "the worker died"))
    assert caplog.messages[-1].endswith("cut off: the worker died")
    house.loop.turn()
    (response,) = client.responses()
    *_, last = response.events()
    assert last["error"]["message"] == "the worker died"
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert b"[DONE]" not in response.body
    assert response.ended
    assert client.transport.closed
    assert len(house.open) == 0
    house.assert_serves()


def test_nothing_is_written_before_the_first_delta(house, started, feed):
    client, command = started()
    assert client.output == b""
    feed(command, "")
    assert client.output == b""
    feed(command, "a", 2)
    assert client.output.startswith(b"HTTP/1.1 200 OK")
    assert len(client.transport.written) == 1  # head and first frame together


def test_one_write_for_all_that_queued_in_a_turn(house, started, make_delta):
    client, command = started(n=3)
    for step in range(1, 5):
        house.take(Deltas([make_delta(command, i, f"{step}", step) for i in range(3)]))
    house.loop.turn()
    assert len(client.transport.written) == 1
    house.take(Deltas([make_delta(command, i, ".", 5, finish_reason="stop") for i in range(3)]))
    house.loop.turn()
    assert len(client.transport.written) == 2
    chunks = client.responses()[0].chunks()
    assert [c["choices"][0]["text"] for c in chunks] == ["1234"] * 3 + ["."] * 3


def test_socket_that_is_behind_gets_joined_frames(house, started, feed):
    client, command = started()
    feed(command, "a")
    client.protocol.pause_writing()
    for tokens in range(2, 1000):
        feed(command, "é", tokens)
    feed(command, "z", 1000, finish_reason="length")
    assert len(client.transport.written) == 1
    client.protocol.resume_writing()
    chunks = client.responses()[0].chunks()
    assert [c["choices"][0]["text"] for c in chunks] == ["a", "é" * 998 + "z"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len(house.open) == 0
    client.request("GET", "/version")
    assert client.responses()[-1].status == 200


def test_failure_of_a_stream_that_is_behind(house, started, feed):
    client, command = started()
    feed(command, "a")
    client.protocol.pause_writing()
    feed(command, "b", 2)
    house.take(Failed(command.request_id, 500, "internal_error", "broken"))
    assert client.responses()[0].events()[-1]["error"]["message"] == "broken"
    assert client.transport.closed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_client_that_leaves_cancels(house, started, feed, stream, begun):
    client, command = started(stream=stream, n=2)
    if begun:
        feed(command, "a")
    client.leave()
    assert house.cancelled() == [command.request_id]
    assert len(house.open) == 0
    written = list(client.transport.written)
    feed(command, "late", 2)  # what was on its way is dropped
    feed(command, "", 2, finish_reason="abort")
    assert client.transport.written == written
    house.assert_serves()


def test_client_that_leaves_after_the_answer_cancels_nothing(house):
    client = house.client()
    client.request("POST", COMPLETIONS, {"prompt": "x"})
    house.loop.turn()
    client.leave()
    assert house.cancelled() == []


def test_fifty_clients_leave(house, started):
    clients = [started()[0] for _ in range(50)]
    assert len(house.open) == 50
    for client in clients:
        client.leave()
    assert len(house.open) == 0
    assert len(set(house.cancelled())) == 50


@pytest.mark.parametrize("begun", [False, True])
def test_abort_by_the_engine_is_an_error(house, started, feed, begun):
    client, command = started(n=2)
    if begun:
        feed(command, "a")
    feed(command, "", 1, finish_reason="abort")
    (response,) = client.responses()
    if begun:
        assert response.events()[-1]["error"]["type"] == "overloaded_error"
        assert b"[DONE]" not in response.body
    else:
        assert response.status == 503
    assert house.cancelled() == [command.request_id]  # the other sample is stopped too
    assert len(house.open) == 0


def test_fault_in_writing_an_answer_ends_it(house, started, feed, monkeypatch):
    from zlm.frontend.openai.completions import CompletionForm

    def broken(self, delta, *, first):
        raise ValueError("secret")

    monkeypatch.setattr(CompletionForm, "chunk", broken)
    client, command = started()
    feed(command, "a")
    (response,) = client.responses()
    assert response.status == 500
    assert "secret" not in response.error["message"]
    assert house.cancelled() == [command.request_id]
    monkeypatch.undo()
    house.assert_serves()


def test_news_of_unknown_requests_is_dropped(house, make_delta):
    command = Generate(999, 0.0, ["x"], house_params())
    house.take(Deltas([make_delta(command, 0, "x", 1)]))
    house.take(_failed(command))
    house.loop.turn()
    house.assert_serves()


def house_params():
    from zlm.sampling_params import SamplingParams

    return SamplingParams()


def test_text_that_needs_escapes(house, started, feed):
    """Frames made from a template parse to the text they were made from."""
    client, command = started()
    texts = [
        "a",
        '"quoted"',
        "back\\slash",
        "line\nbreak",
        "\x00\x1f",
        "data: [DONE]\n\n",
        "é😀",
        "</script>",
    ]
    for tokens, text in enumerate(texts, start=1):
        feed(command, text, tokens)
    feed(command, "", 9, finish_reason="stop")
    chunks = client.responses()[0].chunks()
    assert [c["choices"][0]["text"] for c in chunks] == [*texts, ""]


def test_model_name_that_holds_the_place_mark(make_house):
    house = make_house(names=('a"\x00"b',))
    chunks = house.complete(stream=True).chunks()
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hello wörld!"
    assert {c["model"] for c in chunks} == {'a"\x00"b'}
